/** Which model answers agents that name none, and the way to another one. */
import { signal } from "@preact/signals";
import { useEffect, useState } from "preact/hooks";

import { get, key } from "../api.js";
import { html } from "../html.js";
import { Button } from "../parts/basics.js";
import { isKnown, may } from "../person.js";
import { route } from "../router.js";

/** What `/v1/info` says; null: not read yet. */
export const info = signal(null);
/** Whether the dialog that connects a model is shown. */
export const isOpen = signal(false);
const news = signal("");

const readInfo = () => get("/v1/info").then((found) => (info.value = found), () => {});

/** A note on every page while the demo model answers, and the dialog that connects another one. */
export function DemoModel() {
  const [wizard, setWizard] = useState(null);
  const reads = isKnown.value && may("read");
  useEffect(() => void (reads && readInfo()), [reads, key.value]);
  useEffect(() => {
    if (isOpen.value && !wizard) void import("./wizard.js").then((found) => setWizard(() => found.Wizard));
  }, [isOpen.value]);
  const connected = async (model) => {
    await readInfo();
    news.value = `${model} answers from now on.`;
    isOpen.value = false;
  };
  useEffect(() => void (news.value = ""), [route.value.path.join("/")]); // it was read on the page before
  return html`${reads && info.value?.demo_model && html`<aside class="banner demo" aria-label="Model">
      <span>The demo model answers: its texts are made by rules.</span> <${Button}
      kind="small" needs="define" onClick=${() => (isOpen.value = true)}>Connect a model<//></aside>`}
    <p class=${news.value ? "banner ok" : ""} aria-live="polite">${news.value}</p>
    ${isOpen.value && wizard && html`<${wizard} onConnected=${connected} onClose=${() => (isOpen.value = false)} />`}`;
}
