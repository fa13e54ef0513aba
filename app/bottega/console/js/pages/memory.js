/** What runs remember and learn: episodes, lessons, patterns with their evidence, whether it helped, reports. */
import { useState } from "preact/hooks";

import { call, post, url, withQuery } from "../api.js";
import { MemoryFigures } from "../figures/outcomes.js";
import { count, duration } from "../format.js";
import { html } from "../html.js";
import { Episode, Episodes } from "../memory/episodes.js";
import { Given } from "../memory/given.js";
import { Pattern, Patterns } from "../memory/patterns.js";
import { Button, Empty, Failure, Link, Loaded, Panel, Read, Status, Tabs, Time, Value } from "../parts/basics.js";
import { Confirmed, filtersOf, Pages, Rows, Table, usePages } from "../parts/lists.js";
import { periodIn } from "../parts/series.js";
import { forAll } from "../parts/work.js";
import { follow, go } from "../router.js";

const VIEWS = { episodes: [Episodes, Episode], lessons: [Lessons, Lessons], patterns: [Patterns, Pattern],
  runs: [Episodes, Given],
  figures: [MemoryFigures, MemoryFigures], reports: [Reports, Report] };
const TABS = [["episodes", "Episodes"], ["lessons", "Lessons"], ["patterns", "Patterns"], ["figures", "Did it help?"],
  ["reports", "Reports"]];

export function Memory({ rest: [part = "episodes", id], query }) {
  const [all, one] = VIEWS[part] ?? VIEWS.episodes;
  const chosen = part === "runs" || !(part in VIEWS) ? "episodes" : part;
  return html`<div class="head"><h1>Memory</h1></div>
    <${Tabs} tabs=${TABS} chosen=${chosen} label="Parts of memory"
      onChoose=${(name) => go(["memory", name], periodIn(query))} />
    <div role="tabpanel" aria-label=${chosen} class="stacked"><${id ? one : all} key=${id} id=${id} query=${query} />
      </div>`;
}

const SHOWN = { done: "completed", pending: "queued" };
const took = (job) => duration(job.started_at && job.ended_at ? Date.parse(job.ended_at) - Date.parse(job.started_at)
  : null);

function Reports() {
  const start = () => follow(post("/v1/memory/maintenance"), ({ id }) => ["memory", "reports", id]);
  return html`<${Panel} title="Reports" actions=${html`<${Confirmed} needs="admin" label="Run it now" kind="small"
    question="Merge, age and judge now?" act=${start} />`}>
    <${Pages} path="/v1/memory/reports?order=desc" what="reports" everyMs=${5000}>${(items) => html`<${Rows}
      label="Reports of memory's maintenance" items=${items} head=${["Began", "Why", "State", "#Took"]}
      empty="There is no report yet." hint=${html`<p>Maintenance runs each night.</p>`} cells=${(each) => [
        html`<${Link} path=${["memory", "reports", each.id]}><${Time} at=${each.created_at} /><//>`, each.cause,
        html`<${Status} value=${SHOWN[each.status] ?? each.status} />${each.error && html` <span class="bad-text small">
          ${each.error}</span>`}`, took(each)]} />`}<//><//>`;
}

function Report({ id }) {
  return html`<${Read} path=${url`/v1/memory/reports/${id}`} what="the report" everyMs=${3000}
    ended=${(job) => job.ended_at !== null}>${(job) => html`
    <div class="head"><div><h2>Report of <${Time} at=${job.created_at} /></h2><p class="small soft"><${Status}
      value=${SHOWN[job.status] ?? job.status} /> ${job.cause}, took ${took(job)}</p></div></div>
    ${job.error && html`<p class="note bad" role="alert">${job.error}</p>`}
    <${Panel} title="What was done"><${Done} job=${job} /><//>`}<//>`;
}

/** The report; of a job that is not over, or failed, the stages that it ended. */
function Done({ job }) {
  const parts = Object.entries(job.report ?? job.progress);
  const told = job.report ? null : job.ended_at
    ? "It failed. These stages were done before; the next job goes on after them."
      : `It is not over: ${job.stage} of 6 stages are done.`;
  return html`<div class="body">${told && html`<p role="status">${told}</p>`}${parts.map(([part, value]) => html`<h3>
    ${part.replaceAll("_", " ")}</h3><${Value} value=${value} />`)}</div>`;
}

/** More pages are read until there are so many different lessons, or so many in all. */
const FEW = 10, MOST_READ = 500;
const HEAD = ["Lesson", "By", "Agent", "Made", ""];

function Lessons({ query }) {
  const { user, session_id, state = "active" } = query;
  const { field, choice } = filtersOf(["memory", "lessons"], { ...query, state });
  const path = withQuery("/v1/lessons", { order: "desc", user, session_id, state });
  return html`<form class="filters" onSubmit=${(e) => e.preventDefault()}>
      ${field("user", "User")} ${field("session_id", "Session")}
      ${choice("state", "State", ["active", "removed"], { any: "" })}</form>
    ${!(user || session_id) && html`<p class="note">These lessons belong to no user and no session, or all runs of their
      agent get them. Name a user to see what is learnt for this user.</p>`}
    <${Panel} title="Lessons"><${Grouped} key=${path} path=${path} /><//>`;
}

const likeness = ({ text, agent, user, session_id, pinned, for_all, state, source }) =>
  JSON.stringify([text, agent, for_all || [user, session_id], pinned, state, source.by]);

/** Lessons that say the same of the same runs, together: a failed check teaches the same each time. */
function Grouped({ path }) {
  const found = usePages(path, { isEnough: ({ items }) => items.length >= MOST_READ || groupsIn(items).length >= FEW });
  return html`<${Loaded} from=${found} what="lessons">${({ items, next_cursor: cursor }) => items.length
    ? html`<${Table} label="Lessons" head=${HEAD}>${groupsIn(items).map((all) => html`<${Row} all=${all}
      reload=${found.reload} key=${`${likeness(all[0])} ${all.length}`} />`)}<//>
      ${cursor && html`<div class="body"><${Button} onClick=${found.more}>Show more<//></div>`}`
    : html`<${Empty} title="There is no such lesson."><p>A lesson is made of what a run found out, and of the reason of
      a bad outcome.</p><//>`}<//>`;
}

const groupsIn = (lessons) => [...Map.groupBy(lessons, likeness).values()];

/** `all`: lessons that are alike, the newest first: what is done is done with each. */
function Row({ all, reload }) {
  const [lesson] = all;
  const [text, setText] = useState(lesson.text);
  const [error, setError] = useState(null);
  const each = (method, body) => forAll(all, ({ id, user }) => call(method, withQuery(url`/v1/lessons/${id}`, { user }),
    body)).then(({ reason }) => (reason ? setError({ message: reason }) : reload()));
  const change = (body) => each("PATCH", body);
  const pin = () => call("PATCH", withQuery(url`/v1/lessons/${lesson.id}`, { user: lesson.user }), { pinned: true })
    .then(reload, setError);
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
      at=${lesson.created_at} /><//>${all.length > 1 && html` <span class="small soft">and ${count(all.length - 1)} more
      since <${Time} at=${all.at(-1).created_at} /></span>`}</td>
    <td class="actions">${isActive && html`
      ${text !== lesson.text && html`<${Button} onClick=${() => change({ text })}>Save<//>`}
      <${Button} onClick=${() => (lesson.pinned ? change({ pinned: false }) : pin())}>
        ${lesson.pinned ? "Unpin" : "Pin"}<//>
      ${lesson.agent && html`<${Button} needs="define" onClick=${() => change({ for_all: !lesson.for_all })}>
        ${lesson.for_all ? "Use for its user only" : `Use for all runs of ${lesson.agent}`}<//>`}
      <${Confirmed} label="Remove" question=${`Remove "${lesson.text}"? No run gets it any more.`}
        act=${() => each("DELETE")} />`}</td></tr>`;
}
