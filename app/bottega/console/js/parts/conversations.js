/** The tenant's conversations, the newest first: found by their words, agent, user and state. */
import { withQuery } from "../api.js";
import { excerpt } from "../format.js";
import { html } from "../html.js";
import { go } from "../router.js";
import { Empty, Link, Panel, Time } from "./basics.js";
import { Filter, Pages } from "./lists.js";

const STATES = { answering: "answers", waiting: "waits for you", failed: "failed", idle: "idle" };
const TONES = { answering: "busy", waiting: "wait", failed: "bad" };

/** `query`: of the page's address, which holds the filters. */
export function Conversations({ query }) {
  const { q = "", of = "", user = "", state = "" } = query;
  const path = withQuery("/v1/sessions", { order: "updated_at", q, agent: of, user, state });
  const set = (change) => go(["chat"], { ...query, ...change }, { replace: true });
  const field = (name, label, value, rest = {}) => html`<${Filter} label=${label} value=${value} ...${rest}
    onChange=${(text) => set({ [name]: text })} />`;
  return html`<${Panel} title="Conversations">
    <form class="filters body" onSubmit=${(e) => e.preventDefault()}>
      ${field("q", "Title or question contains", q, { kind: "grow", type: "search", maxlength: 500 })}
      ${field("of", "Answered by", of)} ${field("user", "User", user)}
      <label>State <select value=${state} onChange=${(e) => set({ state: e.target.value })}>
        <option value="">any</option>
        ${Object.entries(STATES).map(([value, text]) => html`<option value=${value}>${text}</option>`)}</select></label>
    </form>
    <${Pages} key=${path} path=${path} what="conversations" everyMs=${10_000}>${(items) => items.length
      ? html`<ul class="rows">${items.map((each) => html`<${Conversation} key=${each.id} of=${each} />`)}</ul>`
      : html`<${Empty} title="No conversation is like that." />`}<//><//>`;
}

const Conversation = ({ of: { id, title, last_message, agent, graph, user, state, updated_at } }) => html`<li>
  <${Link} path=${["chat"]} query=${{ session: id, user }} title=${id}>${excerpt(title, 100) || id}<//>
  ${TONES[state] && html` <span class=${`status ${TONES[state]}`}>${STATES[state]}</span>`}
  ${last_message && last_message !== title && html`<p class="small">${excerpt(last_message, 140)}</p>`}
  <p class="small soft">${[agent ?? graph, user].filter(Boolean).join(" · ")}${" "}<${Time} at=${updated_at} /></p>
    </li>`;
