/** Small components of all pages. */
import { useEffect, useRef, useState } from "preact/hooks";

import { connected } from "../api.js";
import { ERROR_TITLES, WAITS_FOR } from "../en.js";
import { ago, exact } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { may } from "../person.js";
import { to } from "../router.js";

export const SIGNS = {
  queued: "○", running: "◐", streaming: "◐", waiting: "◇", completed: "●", failed: "✕", timeout: "✕",
  cancelled: "–", pending: "◇", resolved: "●", expired: "–", denied: "–",
};
const TONES = {
  queued: "quiet", running: "busy", streaming: "busy", waiting: "wait", completed: "ok", failed: "bad",
  timeout: "bad", cancelled: "quiet", pending: "wait", resolved: "ok", expired: "quiet",
};
export const toneOf = (status) => TONES[status] ?? "quiet";

/** A status as a sign, a colour and a word. */
export const Status = ({ value }) => html`
  <span class="status ${toneOf(value)}"><span aria-hidden="true">${SIGNS[value] ?? "·"}</span> <span class="word">
    ${value}</span></span>`;

/** The status of a run, with the reason of its wait. */
export const RunStatus = ({ status, waitsFor }) => html`<${Status} value=${status} />
  ${status === "waiting" && waitsFor && html`<span class="small soft"> for ${WAITS_FOR[waitsFor]}</span>`}`;

/** A time as "3 min. ago"; the exact time on hover and for screen readers. */
export function Time({ at }) {
  const [, tick] = useState(0);
  useEffect(() => {
    const isNew = Math.abs(Date.now() - Date.parse(at)) < 90_000;
    const timer = setTimeout(() => tick((n) => n + 1), isNew ? 1000 : 30_000);
    return () => clearTimeout(timer);
  });
  return html`<time datetime=${at ?? ""} title=${exact(at)}>${ago(at)}</time>`;
}

/**
 * `busy`, true or a text: the button ignores clicks, but keeps the focus (a disabled button loses it). `needs`, also
 * of links and panels: scopes; only callers with one of these scopes see the element.
 */
export const Button = ({ kind = "", busy = false, needs, children, ...rest }) => may(needs) && html`
  <button type="button" class="button ${kind}" aria-disabled=${Boolean(busy)} aria-busy=${Boolean(busy)}
    ...${rest}>${children}</button>`;
addEventListener("click", (event) => {
  if (!(event.target instanceof Element) || !event.target.closest('[aria-disabled="true"]')) return;
  event.preventDefault(); // prevents that Enter or a click sends the form again
  event.stopImmediatePropagation();
}, true);

/**
 * For a page that shows one item after another: if the focus was in the previous item, move the focus to the heading
 * of the next item. Return the ref for the element that shows the item; `id`: the item's id.
 */
export function useHeading(id) {
  const box = useRef(null);
  const isInside = box.current?.contains(document.activeElement); // before the item is drawn
  useEffect(() => {
    const heading = isInside && box.current.querySelector("h2");
    if (!heading) return;
    heading.tabIndex = -1;
    heading.focus();
  }, [id]);
  return box;
}

export const Link = ({ path, query, needs, children, ...rest }) => may(needs) && html`<a href=${to(path, query)}
  ...${rest}>${children}</a>`;

/** A choice of one of some values, or of some `[value, words]`; `any`: words for no choice. */
export const Select = ({ label, options, onChange = null, any = "", kind = "", ...rest }) => html`<label class=${kind}>
  ${label} <select ...${rest} onChange=${(e) => onChange?.(e.target.value)}>
  ${[...(any ? [["", any]] : []), ...options.map((each) => [each].flat())].map(([value, words = value]) => html`<option
    value=${value}>${words}</option>`)}</select></label>`;

export const Panel = ({ title, actions, children, kind = "", needs }) => may(needs) && html`
  <section class="panel ${kind}">
    ${title && html`<header><h2>${title}</h2><div class="actions">${actions}</div></header>`}
    ${children}
  </section>`;

export const Loading = ({ what = "" }) => html`<p class="state" role="status"><span class="spinner" aria-hidden="true">
  </span> Loading ${what}…</p>`;

export const Empty = ({ title, children }) => html`<div class="state"><p><strong>${title}</strong></p>${children}
  </div>`;

/** An error of the API in the API's words, with a link or a button that helps. */
export const Failure = ({ error, again }) => html`
  <div class="state bad" role="alert">
    <p><strong>${ERROR_TITLES[error.status] ?? "This did not work"}</strong></p>
    <p>${error.message}</p>
    ${error.problem?.errors?.map((each) => html`<p class="small"><code>${each.pointer}</code> ${each.detail}</p>`)}
    ${again && html`<${Button} onClick=${again}>Try again<//>`}
  </div>`;

export const NoRun = () => html`<div class="head"><h1>There is no such run</h1></div>
  <p><${Link} path=${["runs"]}>Show all runs<//></p>`;

/** A note that the data on the page are old, because the page could not load new data. */
export const Stale = ({ from, again = from.reload }) => from.error && (from.error.status !== 0 || connected.value)
  && html`
  <p class="note bad" role="alert">${from.error.message} ${from.retries ? "It is tried again." : html`<${Button}
    kind="small" onClick=${again}>Try again<//>`}</p>`;

/** Shows the state of `useData`: loading, an error, or the children made from the data. */
export function Loaded({ from, what, children }) {
  if (from.data !== null) return html`<${Stale} from=${from} />${children(from.data)}`;
  if (from.error) return html`<${Failure} error=${from.error} again=${from.reload} />`;
  return html`<${Loading} what=${what} />`;
}

/** Shows what `children` makes of the data of a path and of `reload`; `options`: of `useData`. */
export function Read({ path, what, children, ...options }) {
  const found = useData(path, options);
  return html`<${Loaded} from=${found} what=${what}>${(data) => children(data, found.reload)}<//>`;
}

/** A part that `children` makes when the user opens the part; `isOpen`: open at first. */
export function Folded({ summary, isOpen: opens = false, children, ...rest }) {
  const [isOpen, setOpen] = useState(opens);
  return html`<details ...${rest} open=${isOpen} onToggle=${(e) => setOpen(e.currentTarget.open)}>
    <summary>${summary}</summary>${isOpen && children()}</details>`;
}

/** Copy a text; false: the browser refused. Without HTTPS, browsers only have `execCommand`. */
export async function copied(text, button) {
  if (navigator.clipboard) return navigator.clipboard.writeText(text).then(() => true, () => false);
  // The text is placed next to the button, because outside an open dialog no text can be selected.
  const field = button.parentNode.appendChild(document.createElement("textarea"));
  field.value = text;
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  button.focus();
  return done;
}

/** A text that can be copied. */
export function Copy({ text, label = "Copy" }) {
  const [done, setDone] = useState(false);
  const copy = async ({ currentTarget }) => {
    setDone(await copied(text, currentTarget));
    setTimeout(() => setDone(false), 1500);
  };
  return html`<${Button} kind="small ghost" onClick=${copy} aria-label=${`${label}: ${text.slice(0, 60)}`}>
    ${done ? "Copied" : label}<//>`;
}

export const Figure = ({ name, value, note, href }) => html`
  <div class="figure"><dt>${name}</dt><dd>${href ? html`<a href=${href}>${value}</a>` : value}${note && html`<small>
    ${note}</small>`}</dd></div>`;
export const Figures = ({ children }) => html`<dl class="figures">${children}</dl>`;

/** The tabs of `[[name, label, needs], …]` that the caller may see; all callers may see a tab without `needs`. */
export const permitted = (tabs) => tabs.filter(([, , needs]) => may(needs));

/** The tab in the address, if the tab exists; otherwise the first tab. */
export const chosenOf = (tabs, name) => (permitted(tabs).find(([each]) => each === name) ?? tabs[0])[0];

/** Tabs; `chosen` is the name of one of `[[name, label], …]`. */
export function Tabs({ tabs, chosen, onChoose, label }) {
  const list = useRef(null);
  useEffect(() => {
    const [all, one] = [list.current,
      list.current.querySelector('[aria-selected="true"]')].map((each) => each?.getBoundingClientRect());
    if (one) list.current.scrollLeft += one.left - all.left - (all.width - one.width) / 2;
  }, [chosen]);
  const onKeyDown = (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    event.preventDefault(); // the arrow would also scroll the list
    const at = tabs.findIndex(([name]) => name === chosen);
    const [name] = tabs[(at + step + tabs.length) % tabs.length];
    onChoose(name);
    event.currentTarget.querySelector(`[data-name="${name}"]`)?.focus();
  };
  return html`<div class="tabs" role="tablist" ref=${list} aria-label=${label} onKeyDown=${onKeyDown}>
    ${tabs.map(([name, text]) => html`
      <button type="button" role="tab" data-name=${name} aria-selected=${name === chosen}
        tabindex=${name === chosen ? 0 : -1}
        onClick=${() => onChoose(name)}>${text}</button>`)}
  </div>`;
}

/** A value as indented JSON, or a text as it is. */
export const Value = ({ value }) =>
  html`<pre class="value" tabindex="0">${typeof value === "string" ? value : JSON.stringify(value, null, 2)}</pre>`;

/** `models`: names of the models without a known price. */
export const Unpriced = ({ models }) => models.map((model) => html`<${Link} key=${model} needs="read" class="small"
  path=${["operations", "providers"]} query=${{ model }}>Set the price of ${model}<//> `);
