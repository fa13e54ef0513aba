/** The tenant's conversations, the newest first: found by their words, agent, user and state. */
import { useEffect, useRef, useState } from "preact/hooks";

import { call, post, url, withQuery } from "../api.js";
import { CONVERSATION_STATES } from "../en.js";
import { dayOf, excerpt } from "../format.js";
import { html } from "../html.js";
import { go, } from "../router.js";
import { Button, Empty, Link, Panel, Time } from "./basics.js";
import { Act, Confirmed, filtersOf, Pages } from "./lists.js";
import { searchOf } from "./search_words.js";
import { isUnread } from "./seen.js";
import { instead, useWork } from "./work.js";

const TONES = { answering: "busy", waiting: "wait", failed: "bad" };

/** The days from a time to before another one, in words. */
function daysOf(from, to) {
  const [first, last] = [from, Date.parse(to) - 1].map(dayOf);
  return first === last ? `of ${first}` : `of ${first} to ${last}`;
}

/** `query`: of the page's address, which holds the filters. */
export function Conversations({ query }) {
  const { q = "", of = "", user = "", state = "" } = query;
  const search = searchOf(q);
  const path = withQuery("/v1/sessions", { order: "updated_at", ...search, agent: of, user, state });
  const { field, choice } = filtersOf(["chat"], query);
  return html`<${Panel} title="Conversations">
    <form class="filters body" onSubmit=${(e) => e.preventDefault()}>
      ${field("q", "Name, words or date", { kind: "grow", type: "search", maxlength: 500, soon: true,
        placeholder: "such as: ada refund yesterday" })}
      ${field("of", "Answered by")} ${field("user", "User")}
      ${choice("state", "State", Object.entries(CONVERSATION_STATES))}
    </form>
    ${search.active_after && html`<p class="small soft">Conversations${" "}
      ${daysOf(search.active_after, search.active_before)}${search.q && `, with: ${search.q}`}</p>`}
    <${Pages} key=${path} path=${path} what="conversations" isSaved everyMs=${10_000}>${(items, reload) => items.length
      ? html`<ul class="rows">${items.map((each) => html`<${Conversation} key=${each.id} of=${each}
        onChange=${reload} />`)}</ul>`
      : html`<${Empty} title="No conversation is like that." />`}<//><//>`;
}

/** `onChange` is called after something was changed in the list. */
function Conversation({ of, onChange }) {
  const { id, title, last_message, agent, graph, user, state, updated_at } = of;
  const [isNaming, setNaming] = useState(false);
  const name = excerpt(title, 100) || id;
  const fork = async () => {
    const made = await post(url`/v1/sessions/${id}/fork`, {});
    go(["chat"], { session: made.id, agent: agent ?? graph, user, known: "1" });
  };
  const remove = () => call("DELETE", url`/v1/sessions/${id}`).then(onChange);
  const isNew = isUnread(of);
  return html`<li class=${isNew ? "unread" : ""}>
    <${Link} path=${["chat"]} query=${{ session: id, user }} title=${id}>${name}<//>
    ${isNew && html` <span class="badge">new</span>`}
    ${TONES[state] && html` <span class=${`status ${TONES[state]}`}>${CONVERSATION_STATES[state]}</span>`}
    ${last_message && last_message !== title && html`<p class="small">${excerpt(last_message, 140)}</p>`}
    <p class="small soft">${[agent ?? graph, user].filter(Boolean).join(" · ")}${" "}<${Time} at=${updated_at} /></p>
    ${isNaming
      ? html`<${Naming} id=${id} title=${title} onEnd=${() => (setNaming(false), onChange())} />`
      : html`<div class="actions" role="group" aria-label=${name}>
        <${Button} kind="small ghost" needs="run" onClick=${() => setNaming(true)}>Rename<//>
        <${Act} kind="small ghost" needs="run" label="Fork" act=${fork} />
        <${Confirmed} kind="small ghost" needs="run" label="Delete" question="Delete it and its runs?" act=${remove} />
      </div>`}</li>`;
}

/** Another title for a conversation; without one its first question is shown. */
function Naming({ id, title, onEnd }) {
  const [text, setText] = useState(title ?? "");
  const { error, work } = useWork();
  const field = useRef(null);
  useEffect(() => field.current.select(), []);
  const save = instead(() => work(() =>
    call("PATCH", url`/v1/sessions/${id}`, { title: text.trim() || null }).then(onEnd)));
  return html`<form class="inline" onSubmit=${save} onKeyDown=${(e) => e.key === "Escape" && onEnd()}>
    <label>Title <input ref=${field} value=${text} maxlength="200" onInput=${(e) => setText(e.target.value)} /></label>
    <${Button} type="submit" kind="small primary">Save<//><${Button} kind="small" onClick=${onEnd}>Cancel<//>
    ${error && html`<span class="bad-text small" role="alert">${error.message}</span>`}</form>`;
}
