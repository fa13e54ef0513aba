/** Lessons: sentences that later runs of a user or session get. People edit, pin and remove them. */
import { useState } from "preact/hooks";

import { call, url, withQuery } from "../api.js";
import { html } from "../html.js";
import { Button, Empty, Failure, Link, Panel, Time } from "../parts/basics.js";
import { Confirmed, Filter, Pages, Table } from "../parts/lists.js";
import { go } from "../router.js";

const HEAD = ["Lesson", "By", "Agent", "Made", ""];

export function Lessons({ query }) {
  const { user, session_id, state = "active" } = query;
  const set = (change) => go(["memory", "lessons"], { ...query, ...change }, { replace: true });
  const field = (name, label) => html`<${Filter} label=${label} value=${query[name] ?? ""}
    onChange=${(value) => set({ [name]: value || undefined })} />`;
  const path = withQuery("/v1/lessons", { order: "desc", user, session_id, state });
  return html`<form class="filters" onSubmit=${(e) => e.preventDefault()}>
      ${field("user", "User")} ${field("session_id", "Session")}
      <label>State <select value=${state} onChange=${(e) => set({ state: e.target.value })}>
        <option>active</option><option>removed</option></select></label></form>
    ${!(user || session_id) && html`<p class="note">These lessons belong to no user and no session, or all runs of their
      agent get them. Name a user to see what is learnt for this user.</p>`}
    <${Panel} title="Lessons"><${Pages} key=${path} path=${path} what="lessons">${(items, reload) => items.length
      ? html`<${Table} label="Lessons" head=${HEAD}>${items.map((each) => html`<${Row} reload=${reload} lesson=${each}
        key=${`${each.id} ${each.text} ${each.pinned} ${each.for_all} ${each.state}`} />`)}<//>`
      : html`<${Empty} title="There is no such lesson."><p>A lesson is made of what a run found out, and of the reason
        of a bad outcome.</p><//>`}<//><//>`;
}

function Row({ lesson, reload }) {
  const [text, setText] = useState(lesson.text);
  const [error, setError] = useState(null);
  const at = withQuery(url`/v1/lessons/${lesson.id}`, { user: lesson.user });
  const change = (body) => call("PATCH", at, body).then(reload, setError);
  const isActive = lesson.state === "active";
  const { run_id, episode_id, by } = lesson.source;
  return html`<tr><td>${isActive ? html`<textarea aria-label="Lesson" rows="2" maxlength="2000" value=${text}
      onInput=${(e) => setText(e.target.value)}></textarea>` : lesson.text}
      ${lesson.pinned && html`<p class="small">Each run of ${lesson.user ? `the user ${lesson.user}` : "the session"}
        gets it, whatever its task is.</p>`}
      ${lesson.for_all && html`<p class="small">All runs of ${lesson.agent} get it, of all users.</p>`}
      ${error && html`<${Failure} error=${error} />`}</td>
    <td>${by}</td>
    <td>${lesson.agent ?? "–"}</td>
    <td><${Link} path=${run_id ? ["runs", run_id] : ["memory", "episodes", episode_id]}><${Time}
      at=${lesson.created_at} /><//></td>
    <td class="actions">${isActive && html`
      ${text !== lesson.text && html`<${Button} onClick=${() => change({ text })}>Save<//>`}
      <${Button} onClick=${() => change({ pinned: !lesson.pinned })}>${lesson.pinned ? "Unpin" : "Pin"}<//>
      ${lesson.agent && html`<${Button} needs="define" onClick=${() => change({ for_all: !lesson.for_all })}>
        ${lesson.for_all ? "Use for its user only" : `Use for all runs of ${lesson.agent}`}<//>`}
      <${Confirmed} label="Remove" question=${`Remove "${lesson.text}"? No run gets it any more.`}
        act=${async () => (await call("DELETE", at), reload())} />`}</td></tr>`;
}
