/** Lists by pages, tables, forms, and buttons that ask once more. */
import { useState } from "preact/hooks";

import { get } from "../api.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Failure, Loaded } from "./basics.js";

const LIMIT = 50;

/**
 * A list by pages: `children` gets the items read so far, and a function that reads the first page
 * again, as happens every `everyMs`. `keyOf` tells items apart.
 */
export function Pages({ path, what, everyMs = 0, keyOf = (item) => item.id ?? item.name, children }) {
  const paged = `${path}${path.includes("?") ? "&" : "?"}limit=${LIMIT}`;
  const first = useData(paged, { everyMs });
  const [more, setMore] = useState({ path, items: [], cursor: undefined, error: null });
  const older = more.path === path ? more : { path, items: [], cursor: undefined, error: null };
  const cursor = older.cursor === undefined ? first.data?.next_cursor : older.cursor;
  const readMore = async () => {
    try {
      const page = await get(`${paged}&cursor=${encodeURIComponent(cursor)}`);
      const began = older.items.length ? older.items : first.data.items;
      setMore({ path, items: [...began, ...page.items], cursor: page.next_cursor, error: null });
    } catch (error) {
      setMore({ ...older, error });
    }
  };
  return html`<${Loaded} from=${first} what=${what}>${(page) => {
    const seen = new Set(page.items.map(keyOf));
    return html`${children([...page.items, ...older.items.filter((item) => !seen.has(keyOf(item)))], first.reload)}
      ${older.error && html`<p class="note bad" role="alert">${older.error.message}</p>`}
      ${cursor && html`<div class="body"><${Button} onClick=${readMore}>Show more<//></div>`}`;
  }}<//>`;
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
