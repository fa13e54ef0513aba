/** Lists with pages, tables, forms, and buttons that ask for a confirmation. */
import { useEffect, useRef, useState } from "preact/hooks";

import { get, withQuery } from "../api.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { go, place } from "../router.js";
import { Button, Empty, Failure, Loaded, Select } from "./basics.js";
import { Export } from "./export.js";
import { leave } from "./keys.js";
import { instead, useWork } from "./work.js";

const LIMIT = 50;
/** Pause after the last letter, after which the text may be complete. */
const TYPING_MS = 300;
/** @type {(answer: any) => boolean} */
const always = () => true;
/** @type {(item: any) => boolean} */
const never = () => false;

/**
 * A list with pages: the result of `useData`, and `more`, which reads the next page. All pages that were
 * read are read again together.
 *
 * Args:
 *   of: name of the list in an answer, which holds the items of all these pages.
 *   isEnough: of an answer; while the result is false, the next pages are read at once. It must be a constant function.
 *
 * @param {string} path
 * @param {{of?: string, isEnough?: (answer: any) => boolean, everyMs?: number,
 *   ended?: (data: any) => boolean}} [options]
 */
export function usePages(path, { of = "items", isEnough = always, ...options } = {}) {
  const paged = withQuery(path, { limit: LIMIT });
  const kept = place().pages; // of this entry of the history, so that the way back leads to as many
  const readAll = async () => {
    let answer = await get(paged);
    for (let number = 1; answer.next_cursor && (number < (kept[paged] ?? 1) || !isEnough(answer)); number++) {
      const page = await get(withQuery(paged, { cursor: answer.next_cursor }));
      answer = { ...page, [of]: [...answer[of], ...page[of]] };
    }
    return answer;
  };
  const found = useData(paged, { ...options, from: readAll });
  const more = () => {
    kept[paged] = (kept[paged] ?? 1) + 1;
    return found.reload();
  };
  return { ...found, more };
}

/**
 * A list with pages: `children` gets all items, a function that reads them again, and whether there are more. `isOver`:
 * true for an item that no longer changes; if all items are over, the list is not read again. `isSaved`: the list can
 * be saved as a file.
 */
export function Pages({ path, what, everyMs = 0, isOver = never, isSaved = false, children }) {
  const found = usePages(path, { everyMs, ended: ({ items }) => items.length > 0 && items.every(isOver) });
  return html`<${Loaded} from=${found} what=${what}>${({ items, next_cursor: cursor }) => html`${children(items,
    found.reload, cursor !== null)}
    ${(cursor || (isSaved && items.length > 0)) && html`<div class="body actions">
      ${cursor && html`<${Button} onClick=${found.more}>Show more<//>`}
      ${isSaved && html`<${Export} name=${what} path=${path} />`}</div>`}`}<//>`;
}

/**
 * A field that reports its text when the focus leaves; typed text survives a redraw of the page. `leaves`: Enter and
 * Escape leave the field, because keys act on the page. `soon`: the field also reports its text after short pauses.
 */
export function Filter({ label, value, onChange, kind = "", leaves = false, soon = false, ...rest }) {
  const [typed, setTyped] = useState(null);
  useEffect(() => {
    if (!soon || typed === null) return undefined;
    const timer = setTimeout(() => onChange(typed.trim()), TYPING_MS);
    return () => clearTimeout(timer);
  }, [typed]);
  return html`<label class=${kind}>${label} <input value=${typed ?? value} placeholder="any" ...${rest}
    onKeyDown=${(e) => leaves && leave(e)}
    onInput=${(e) => setTyped(e.target.value)}
    onChange=${(e) => (setTyped(null), onChange(e.target.value.trim()))} /></label>`;
}

/** The values of a filter in an address, separated by commas. */
export const severalOf = (text) => (text ?? "").split(",").map((each) => each.trim()).filter(Boolean);

/** A choice of several values; a button names the chosen values. `onChange` gets the values' text for an address. */
export function Choices({ label, values, chosen, onChange }) {
  const box = useRef(null);
  const close = () => void (box.current.open = false);
  const turn = (value, isOn) => onChange(values.filter((each) => (each === value ? isOn : chosen.includes(each)))
    .join(","));
  const onKeyDown = (event) => {
    if (event.key !== "Escape") return;
    close();
    box.current.querySelector("summary").focus();
  };
  return html`<details class="several" ref=${box} onKeyDown=${onKeyDown}
    onFocusOut=${(e) => e.relatedTarget && !box.current.contains(e.relatedTarget) && close()}>
    <summary><span class="small soft">${label}</span> ${chosen.join(", ") || "any"}</summary>
    <fieldset class="choices"><legend class="hidden">${label}</legend>${values.map((each) => html`<label class="check"
      key=${each}><input type="checkbox" checked=${chosen.includes(each)}
      onChange=${(e) => turn(each, e.target.checked)} /> ${each}</label>`)}</fieldset></details>`;
}

/** A button that asks for a confirmation before it acts; `needs`: see `Button`. */
export function Confirmed({ label, question, act, needs, kind = "small danger" }) {
  const [asks, setAsks] = useState(null); // null: it never did
  const box = useRef(null);
  useEffect(() => {
    if (asks !== null) (asks ? box.current : box.current.querySelector("button"))?.focus();
  }, [asks]);
  const { busy, error, work, setError } = useWork();
  const go = () => work(async () => {
    await act();
    setAsks(false);
  });
  if (!asks) return html`<span ref=${box}><${Button} needs=${needs} kind=${kind} onClick=${() => setAsks(true)}>${label}
    <//></span>`;
  return html`<span ref=${box} class="inline" role="group" tabindex="-1" aria-label=${question}>${question}
    <${Button} kind=${kind} busy=${busy} onClick=${go}>${label}<//><${Button} kind="small"
      onClick=${() => (setAsks(false), setError(null))}>Keep<//>
    ${error && html`<span class="bad-text small" role="alert">${error.message}</span>`}</span>`;
}

/** A button that acts at once, and shows an error if the action failed; `needs`: see `Button`. */
export function Act({ label, act, needs, kind = "" }) {
  const { busy, error, work } = useWork();
  return html`<${Button} needs=${needs} kind=${kind} busy=${busy} onClick=${() => work(act)}>${label}<//>
    ${error && html`<${Failure}
    error=${error} />`}`;
}

const fieldsOf = (form) => JSON.stringify([...new FormData(form)]);

/**
 * A form that makes an object. `send` gets the form's fields by name; the form shows errors of the API at
 * their fields. After a success the form is empty, and names the new object until the user types.
 */
export function Sending({ children, label, send }) {
  const { busy, error, work } = useWork();
  const [made, setMade] = useState(null);
  const submit = instead(({ currentTarget: form }) => work(async () => {
    const sent = fieldsOf(form);
    const name = form.elements.name.value;
    setMade(null);
    await send(new FormData(form));
    if (fieldsOf(form) !== sent) return; // it is the next one already
    form.reset();
    setMade(name);
  }));
  return html`<form class="form body" onSubmit=${submit} onInput=${() => setMade(null)}>${children}
    ${error && html`<${Failure} error=${error} />`}
    <div class="actions"><${Button} type="submit" kind="primary" busy=${busy}>${label}<//>
      <span class="small soft" role="status">${made !== null && `Done: ${made}`}</span></div></form>`;
}

/** Columns whose name begins with # have numbers, which are aligned to the right. */
const sideOf = (name) => (String(name).startsWith("#") ? "right" : "");

export const Table = ({ label, head, children }) => html`<div class="scroll" tabindex="0" role="region"
  aria-label=${label}><table class="table"><thead><tr>${head.map((each) => (each && !each.type ? html`<th scope="col"
    class=${sideOf(each)}>${each.replace("#", "")}</th>` : html`<td>${each}</td>`))}</tr></thead>
  <tbody>${children}</tbody></table></div>`;

/**
 * A table with a row for each item. `cells`: the cells of an item's row, below the names in `head`; `id`: an item's
 * unique id; `kind`: a CSS class of an item's row; `empty`: a text, with `hint`, if there are no items.
 */
export const Rows = ({ items, cells, head, empty = "", hint = null, id = (each) => each.id, label, kind = null }) => (
  items.length === 0 && empty ? html`<${Empty} title=${empty}>${hint}<//>`
    : html`<${Table} label=${label} head=${head}>${items.map((each) => html`<tr key=${id(each)} class=${kind?.(each)}>
      ${cells(each).map((cell, place) => html`<td class=${sideOf(head[place])}>${cell}</td>`)}</tr>`)}<//>`);

/** Filters in the address of a page: `set` changes the filters; `field` and `choice` make the form's elements. */
export function filtersOf(path, query) {
  const set = (change) => go(path, { ...query, ...change }, { replace: true });
  const field = (name, label, rest = {}) => html`<${Filter} label=${label} value=${query[name] ?? ""} ...${rest}
    onChange=${(text) => set({ [name]: text })} />`;
  const choice = (name, label, options, rest = {}) => html`<${Select} label=${label} any="any" options=${options}
    value=${query[name] ?? ""} ...${rest} onChange=${(value) => set({ [name]: value })} />`;
  return { set, field, choice };
}
