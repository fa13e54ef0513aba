/** Lists by pages, tables, forms, and buttons that ask once more. */
import { useRef, useState } from "preact/hooks";

import { get } from "../api.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Failure, Loaded } from "./basics.js";

const LIMIT = 50;
const always = () => true;

/**
 * A list by pages: what `useData` returns, and `more`, which reads a page more. All pages that were
 * asked for are read again together.
 *
 * Args:
 *   of: name of the list in an answer, which holds the items of all these pages.
 *   isEnough: of an answer; while it is false, more pages are read unasked. It may not depend on the drawing.
 */
export function usePages(path, { of = "items", isEnough = always, ...options } = {}) {
  const paged = `${path}${path.includes("?") ? "&" : "?"}limit=${LIMIT}`;
  const wanted = useRef({ paged, pages: 1 });
  if (wanted.current.paged !== paged) wanted.current = { paged, pages: 1 };
  const readAll = async () => {
    let answer = await get(paged);
    for (let number = 1; answer.next_cursor && (number < wanted.current.pages || !isEnough(answer)); number++) {
      const page = await get(`${paged}&cursor=${encodeURIComponent(answer.next_cursor)}`);
      answer = { ...page, [of]: [...answer[of], ...page[of]] };
    }
    return answer;
  };
  const found = useData(paged, { ...options, from: readAll });
  const more = () => {
    wanted.current.pages += 1;
    return found.reload();
  };
  return { ...found, more };
}

/** A list by pages: `children` gets all items that were asked for, and a function that reads them again. */
export function Pages({ path, what, everyMs = 0, children }) {
  const found = usePages(path, { everyMs });
  return html`<${Loaded} from=${found} what=${what}>${({ items, next_cursor: cursor }) => html`${children(items, found.reload)}
    ${cursor && html`<div class="body"><${Button} onClick=${found.more}>Show more<//></div>`}`}<//>`;
}

/** A button that asks once more before it acts. */
export function Confirmed({ label, question, act, kind = "small danger" }) {
  const [asks, setAsks] = useState(false);
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const go = async () => {
    setBusy(true);
    setError(null);
    try {
      await act();
      setAsks(false);
    } catch (problem) {
      setError(problem.message);
    }
    setBusy(false);
  };
  if (!asks) return html`<${Button} kind=${kind} onClick=${() => setAsks(true)}>${label}<//>`;
  return html`<span class="inline" role="group" aria-label=${question}>${question}
    <${Button} kind=${kind} busy=${busy} onClick=${go}>${label}<//><${Button} kind="small" onClick=${() => (setAsks(false), setError(null))}>Keep<//>
    ${error && html`<span class="bad-text small" role="alert">${error}</span>`}</span>`;
}

/** A button that acts at once, and says so if that did not work. */
export function Act({ label, act, kind = "" }) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const go = async () => {
    setBusy(true);
    await act().then(() => setError(null), setError);
    setBusy(false);
  };
  return html`<${Button} kind=${kind} busy=${busy} onClick=${go}>${label}<//>${error && html`<${Failure} error=${error} />`}`;
}

/** A form whose `send` gets its fields by name; errors of the API are shown with their fields. */
export function Sending({ children, label, send }) {
  const [error, setError] = useState(null);
  const [busy, setBusy] = useState(false);
  const submit = async (event) => {
    event.preventDefault();
    const form = event.currentTarget;
    setBusy(true);
    setError(null);
    try {
      if ((await send(new FormData(form))) !== false) form.reset();
    } catch (problem) {
      setError(problem);
    }
    setBusy(false);
  };
  return html`<form class="form body" onSubmit=${submit}>${children}
    ${error && html`<${Failure} error=${error} />`}
    <div class="actions"><button class="button primary" disabled=${busy}>${label}</button></div></form>`;
}

export const Table = ({ label, head, children }) => html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table class="table">
  <thead><tr>${head.map((each) => each ? html`<th scope="col" class=${each.startsWith("#") ? "right" : ""}>${each.replace("#", "")}</th>` : html`<td></td>`)}</tr></thead><tbody>${children}</tbody></table></div>`;
