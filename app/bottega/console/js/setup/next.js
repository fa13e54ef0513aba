/** What is set up on this installation, and what comes next; until all is done, or somebody hides it. */
import { useState } from "preact/hooks";

import { ROOT } from "../api.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Link, Panel } from "../parts/basics.js";
import { may } from "../person.js";
import { info, isOpen } from "./model.js";
import { Templates } from "./templates.js";

const HIDDEN = `bottega.setup${ROOT}`;

/** `hasRun`: true or false once the runs were read; null before. */
export function NextSteps({ hasRun }) {
  const [choice, setChoice] = useState(localStorage.getItem(HIDDEN));
  const agents = useData(choice === "yes" || !may("define") ? null : "/v1/agents?limit=1");
  if (!may("define") || info.value === null) return null;
  const hide = (hidden) => {
    localStorage.setItem(HIDDEN, hidden ? "yes" : "no");
    setChoice(hidden ? "yes" : "no");
  };
  const hasAgents = agents.data ? agents.data.items.length > 0 : null;
  if (choice === null && [hasAgents, hasRun].some((each) => typeof each !== "boolean")) return null;
  const isHidden = choice === null ? !info.value.demo_model && hasAgents && hasRun : choice === "yes";
  if (isHidden) return html`<p><${Button} kind="small ghost" onClick=${() => hide(false)}>Set up and templates<//></p>`;
  return html`<${Panel} title="Set up" actions=${html`<${Button} kind="small ghost"
    onClick=${() => hide(true)}>Hide this list<//>`}>
    <ul class="rows steps">
      <${Step} done=${!info.value.demo_model} what="Connect a model" way=${html`<${Button} kind="small"
        onClick=${() => (isOpen.value = true)}>Choose one<//>`}>
        ${info.value.demo_model ? "The demo model answers until then."
          : html`<code>${info.value.model}</code> answers.`}
      <//>
      <${Step} done=${hasAgents} what="Define an agent"
        way=${html`<${Link} path=${["agents", "+new"]}>Write one<//>`}>Or begin with a template below.<//>
      <${Step} done=${hasRun} what="Ask, and watch it live"
        way=${html`<${Link} path=${["chat"]}>Ask an agent<//>`}>
        Each run shows its agents, tools and answers as they come.<//>
    </ul>
    <${Templates} />
  <//>`;
}

const Step = ({ done, what, way, children }) => html`<li><span aria-hidden="true">${done ? "●" : "○"}</span>${" "}
  <strong>${what}</strong> <span class="small soft">${done ? "Done. " : "Next. "}${children}</span>${" "}
  ${!done && way}</li>`;
