/** Lists by pages, tables, forms, and buttons that ask once more. */
import { useState } from "preact/hooks";

import { get } from "../api.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Failure, Loading } from "./basics.js";

/** What a key may not read is said in words, with the scope that it needs. */
export function Refused({ error, again }) {
  if (error.code === "no_secrets_key") return html`<div class="state"><p>${error.message}</p></div>`;
  if (error.status !== 403) return html`<${Failure} error=${error} again=${again} />`;
  return html`<div class="state"><p><strong>This key may not see this.</strong></p><p>${error.message}. Enter another one with the button <em>Key</em>.</p></div>`;
}

/** What a tab shows of `useData`: loading, a refusal, or its children made of the data. */
export function Shown({ from, what, children }) {
  if (from.data !== null) return children(from.data);
  if (from.error) return html`<${Refused} error=${from.error} again=${from.reload} />`;
  return html`<${Loading} what=${what} />`;
}

/** A list by pages: `children` gets the items read so far; the first page is read again every `everyMs`. */
export function Pages({ path, what, everyMs = 0, version = 0, children }) {
  const first = useData(`${path}${path.includes("?") ? "&" : "?"}limit=50`, { everyMs });
  const [more, setMore] = useState({ of: null, items: [], cursor: null });
  const [error, setError] = useState(null);
  const older = more.of === path + version ? more : { items: [], cursor: undefined };
  const cursor = older.cursor === undefined ? first.data?.next_cursor : older.cursor;
  const readMore = async () => {
    try {
      const page = await get(`${path}${path.includes("?") ? "&" : "?"}limit=50&cursor=${encodeURIComponent(cursor)}`);
      setMore({ of: path + version, items: [...older.items, ...page.items], cursor: page.next_cursor });
      setError(null);
    } catch (problem) {
      setError(problem);
    }
  };
  return html`<${Shown} from=${first} what=${what}>${(page) => html`
    ${children([...page.items, ...older.items], first.reload)}
    ${error && html`<p class="note bad" role="alert">${error.message}</p>`}
    ${cursor && html`<div class="body"><${Button} onClick=${readMore}>Show more<//></div>`}`}<//>`;
}

/** A button that asks once more before it acts. */
export function Confirmed({ label, question, act, kind = "small danger" }) {
  const [asks, setAsks] = useState(false);
  const [error, setError] = useState(null);
  const go = async () => {
    try {
      await act();
      setAsks(false);
    } catch (problem) {
      setError(problem.message);
    }
  };
  if (!asks) return html`<${Button} kind=${kind} onClick=${() => setAsks(true)}>${label}<//>`;
  return html`<span class="inline" role="group" aria-label=${question}>${question}
    <${Button} kind=${kind} onClick=${go}>${label}<//><${Button} kind="small" onClick=${() => setAsks(false)}>Keep<//>
    ${error && html`<span class="bad-text small" role="alert">${error}</span>`}</span>`;
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
