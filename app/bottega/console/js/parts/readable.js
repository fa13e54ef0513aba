/** A value for a reader: its fields by name, texts as they are; only what is nested is JSON. */
import { objectIn } from "../format.js";
import { html } from "../html.js";
import { Value } from "./basics.js";

/** The object that a value is, or that a text has as JSON; null: it is another value. */
function fieldsOf(value) {
  const found = typeof value === "string" ? objectIn(value) : value;
  const isObject = found !== null && typeof found === "object" && !Array.isArray(found);
  return isObject && Object.keys(found).length ? found : null;
}

const One = ({ value }) => (value !== null && typeof value === "object" ? html`<${Value} value=${value} />`
  : typeof value === "string" ? html`<span class="text">${value}</span>` : html`<code>${String(value)}</code>`);

/**
 * `isMarked(name)`: a field is marked; `about(name)`: what is said below it.
 *
 * @param {{value: any, isMarked?: (name: string) => boolean, about?: (name: string) => any}} properties
 */
export function Readable({ value, isMarked = () => false, about = () => null }) {
  const fields = fieldsOf(value);
  if (!fields) return html`<${Value} value=${value ?? "–"} />`;
  return html`<dl class="arguments">${Object.entries(fields).map(([name, each]) => html`
    <div key=${name} class=${isMarked(name) ? "flagged" : ""}><dt>${name}</dt>
      <dd><${One} value=${each} />${about(name)}</dd></div>`)}</dl>`;
}

/** A call of a tool with its arguments. */
export const ToolCall = ({ call }) => html`<div class="call"><p class="small">calls <code>${call.name}</code></p>
  ${Object.keys(call.arguments ?? {}).length > 0 && html`<${Readable} value=${call.arguments} />`}</div>`;

/** Who wrote a message: the run's user, the agent, or the agent that passed it on. `user`, `agent`: names, or null. */
export const Author = ({ role = "user", source = null, user, agent }) => html`<p class="small author">
  <b><bdi>${source ?? (role === "assistant" ? agent : role === "user" ? user ?? "User" : role)}</bdi></b></p>`;

/** "result of lookup", or in red that the call did not work. */
export const ResultOf = ({ message: { name, status } }) => html`<p
  class=${`small ${status === "error" ? "bad-text" : "soft"}`}>${status === "error"
    ? html`✕ <code>${name}</code> did not work` : html`result of <code>${name}</code>`}</p>`;
