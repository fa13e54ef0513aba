/** Calls that wait for a person's decision, one after another: keys j and k move, keys a, d and e decide. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { url, withQuery } from "../api.js";
import { excerpt, plain } from "../format.js";
import { html } from "../html.js";
import { pending, useData } from "../load.js";
import { decided, factsOf } from "../parts/approval_facts.js";
import { Button, Empty, Link, Loaded, Panel, Tabs, Time, useHeading } from "../parts/basics.js";
import { readBefore, Results, useChecks, useOthers, worth } from "../parts/checked.js";
import { Decision } from "../parts/decision.js";
import { useKeys } from "../parts/keys.js";
import { filtersOf, Pages, usePages } from "../parts/lists.js";
import { Markdown } from "../parts/markdown.js";
import { Author } from "../parts/readable.js";
import { forAll } from "../parts/work.js";
import { go } from "../router.js";
import { isFinal } from "../run/state.js";
import { textOf } from "../run/story.js";

const EVERY_MS = 3000;
const SHOWN_MESSAGES = 5;
const SHOWN_DECISIONS = 10;
/** Number of calls at the top of the list whose conversations are read, so that their rows have signs. */
const LOOKED_THROUGH = 30;

/** Whether a person decides here, or the program that started the run. */
const isForPrograms = ({ kind }) => kind === "client_tool";
const TABS = { people: ["For people", (each) => !isForPrograms(each)], programs: ["For programs", isForPrograms],
  decided: ["Decided", () => false] };

export function Approvals({ query }) {
  const found = usePages("/v1/interrupts?status=pending", { everyMs: EVERY_MS });
  const all = found.data?.items ?? [];
  const waits = all.length > 0;
  const named = all.find(({ id }) => id === query.id);
  const isOfPrograms = named ? isForPrograms(named) : waits && all.every(isForPrograms);
  const tab = query.tab in TABS ? query.tab : isOfPrograms ? "programs" : "people";
  const own = { ...found, data: found.data && { ...found.data, items: all.filter(TABS[tab][1]) } };
  const tabs = Object.entries(TABS).map(([name, [label, isIn]]) => [name, `${label} ${all.filter(isIn).length || ""}`])
    .filter(([name]) => name !== "programs" || tab === name || all.some(isForPrograms));
  const others = useOthers(EVERY_MS);
  const latest = (others ?? []).filter(({ status }) => status === "resolved")
    .sort((a, b) => (a.resolved_at < b.resolved_at ? 1 : -1)).slice(0, SHOWN_DECISIONS);
  const [last, setLast] = useState(null); // what was decided here
  useEffect(() => void (found.data && pending.value.reload?.()), [all.map(({ id }) => id).join()]);
  return html`
    <div class="head"><h1>Approvals</h1><p class="small soft">Keys: <kbd>j</kbd> next, <kbd>k</kbd> before,${" "}
      <kbd>a</kbd> approve, <kbd>d</kbd> deny, <kbd>e</kbd> edit, <kbd>c</kbd> comment</p></div>
    <${Tabs} tabs=${tabs} chosen=${tab} label="What waits, and what was decided"
      onChoose=${(name) => go(["approvals"], { tab: name }, { replace: true })} />
    ${last && html`<${Followed} key=${last.id} of=${last} />`}
    ${tab === "decided" ? html`<${Decided} query=${query} />`
    : html`<${Loaded} from=${own} what="decisions">${(page) => page.items.length
      ? html`<${Inbox} key=${tab} found=${own} tab=${query.tab} named=${query.id} others=${others}
        onDecided=${setLast} />`
      : html`<${Panel}><${Empty} title="Nobody waits for you.">
          <p>Agents ask here before a call that needs approval, and when they have a question.</p><//><//>`}<//>
    ${latest.length > 0 && html`<${Panel} title="Decided last" actions=${html`<${Link} path=${["approvals"]}
      query=${{ tab: "decided" }}>All<//>`}><${Decisions} of=${latest} /><//>`}`}`;
}

/** All decisions, the latest first. */
function Decided({ query }) {
  const path = withQuery("/v1/interrupts", { status: "resolved", order: "resolved_at", user: query.user });
  const { field } = filtersOf(["approvals"], { tab: "decided" });
  return html`<form class="filters" onSubmit=${(e) => e.preventDefault()}>${field("user", "User",
    { value: query.user ?? "" })}</form>
    <${Panel}><${Pages} key=${path} path=${path} what="decisions" everyMs=${EVERY_MS} isSaved>${(items) =>
      items.length ? html`<${Decisions} of=${items} />` : html`<${Empty} title="Nothing was decided." />`}<//><//>`;
}

/**
 * The shown item and its index in the list: the item in the address; otherwise the same item as before, even if the
 * item left the list; after a decision on this page, the next item at the same index.
 */
function useShown(items, named, isDecided) {
  const kept = useRef({ named: null, item: items[0], place: 0 });
  const { item, place } = kept.current;
  const id = named && named !== kept.current.named ? named : item.id;
  const found = items.findIndex((each) => each.id === id);
  const last = items.length - 1;
  const next = found < 0 && isDecided(id) && last >= 0 ? Math.min(place, last) : found;
  kept.current = { named, item: items[next] ?? item, place: next < 0 ? place : next };
  return kept.current;
}

/** The facts about calls, by the call's id. `others`: see `factsOf`; null: not read yet. */
function useFacts(items, shown, others) {
  const [known, setKnown] = useState({}); // what was before calls, by their ids: [text, results]
  const keep = (id, before) => setKnown((old) => ({ ...old, [id]: before }));
  const begun = useRef(new Set([shown])); // what is shown reads its own
  const open = others ? items.slice(0, LOOKED_THROUGH).filter(({ id, kind }) => kind === "approval"
    && !begun.current.has(id)) : [];
  useEffect(() => {
    for (const { id } of open) begun.current.add(id);
    forAll(open, (each) => readBefore(each).then(([{ text }, results]) => keep(each.id, [text, results])));
  }, [open.map(({ id }) => id).join()]);
  const facts = useMemo(() => Object.fromEntries(items.map((each) =>
    [each.id, others ? factsOf(each, ...(known[each.id] ? [known[each.id][0], others, known[each.id][1]]
      : [null, others])) : []])), [items, known, others]);
  return { facts, keep };
}

/** The number of facts to check before the decision on a call. */
const Warned = ({ of }) => of.length > 0 && html` <span
  class=${`status ${of.some(({ isGrave }) => isGrave) ? "bad" : "wait"}`}>${of.length === 1 ? "1 warning"
    : `${of.length} warnings`}</span>`;

function Inbox({ found, tab, named, others, onDecided }) {
  const [done, setDone] = useState([]); // ids of those that were decided here
  const items = useMemo(() => found.data.items.filter(({ id }) => !done.includes(id)), [found.data, done]);
  const { item: asked, place } = useShown(items, named, (id) => done.includes(id));
  const isThere = items.includes(asked);
  const choose = (number) => {
    const one = items[Math.max(0, Math.min(number, items.length - 1))];
    if (one) go(["approvals"], { id: one.id, tab }, { replace: true });
  };
  const list = useRef(null);
  useEffect(() => list.current.querySelector(".chosen")?.scrollIntoView({ block: "nearest" }), [asked.id]);
  useKeys({ j: () => choose(place + (isThere ? 1 : 0)), k: () => choose(place - 1) });
  const onDone = () => {
    setDone((old) => [...old, asked.id]);
    onDecided(asked);
    found.reload();
  };
  const box = useHeading(asked.id);
  const { facts, keep } = useFacts(items, asked.id, others);
  return html`<div class="inbox">
    <${Panel}><ul class="rows" ref=${list}>${items.map((each) => html`<li key=${each.id}
        class=${each.id === asked.id ? "chosen" : ""}>
      <${Link} path=${["approvals"]} query=${{ id: each.id, tab }} aria-current=${each.id === asked.id ? "true" : null}>
        ${each.kind === "question" ? excerpt(each.question, 80) : each.tool}<//><${Warned} of=${facts[each.id]} />
      <p class="small soft">${each.user ?? "no user named"} · ${excerpt(worth(each.arguments), 60)} ·${" "}
        <${Time} at=${each.created_at} /></p>
    </li>`)}</ul>
      ${found.data.next_cursor && html`<div class="body"><${Button} onClick=${found.more}>Show more<//></div>`}<//>
    <div ref=${box}><${One} key=${asked.id} asked=${asked} isThere=${isThere} others=${others} onDone=${onDone}
      onRead=${(before) => keep(asked.id, before)} /></div>
  </div>`;
}

/** The answer of the run after the decision on a call, as the customer gets it. */
function Followed({ of: { run_id: run, tool, agent, user } }) {
  const { data } = useData(url`/v1/runs/${run}`, { everyMs: 1000, ended: ({ status }) => isFinal(status) });
  const says = data && (isFinal(data.status) ? textOf(data.output) || `no answer: the run ${data.status}`
    : data.status === "waiting" ? "nothing yet: the run waits for another decision" : "…");
  return html`<p class="note" role="status">After your decision on ${tool ?? "the question"} for ${user
    ?? "a user without a name"}, ${agent} answers: <q>${excerpt(says ?? "…", 300)}</q> <${Link}
    path=${["runs", run]}>The run<//></p>`;
}

/** Decisions on calls and questions, with the deciding person. */
const Decisions = ({ of }) => html`<ul class="rows">${of.map((each) => html`<li key=${each.id}>
  <strong>${each.tool ?? each.agent}</strong> for ${each.user ?? "a user without a name"}:
  ${" "}${decided(each)} <code>${excerpt(worth(each.resolution?.arguments ?? each.arguments), 80)}</code>
  <span class="small soft"> by ${each.resolved_by?.name ?? "nobody"} <${Time} at=${each.resolved_at} /> · <${Link}
    path=${["runs", each.run_id]}>the run<//></span>
  ${each.resolution?.comment && html`<p class="small">Why: ${each.resolution.comment}</p>`}</li>`)}</ul>`;

/** `others`: see `factsOf`; null: not read yet. `onRead` gets the users' text and the tools' results. */
function One({ asked, isThere, others, onDone, onRead }) {
  const checks = useChecks(asked, others);
  const { talk, said, text, results } = checks;
  useEffect(() => void (talk.data && onRead([text, results])), [talk.data]);
  const before = (others ?? []).filter(({ status, tool, kind, user }) =>
    status === "resolved" && tool === asked.tool && kind === asked.kind && user === asked.user);
  return html`<div class="stacked">
    <${Panel} title=${asked.user ? `Asked by ${asked.user}` : "Asked by a user without a name"}
      actions=${html`<${Link} path=${["runs", asked.run_id]}>The run<//>`}>
      <${Loaded} from=${talk} what="what was said">${() => html`<div class="body">
        ${said.slice(0, SHOWN_MESSAGES).reverse().map((each) => html`<div class=${`said ${each.role}`}
          key=${`${each.run_id} ${each.seq}`}><${Author} ...${each} user=${asked.user} agent=${asked.agent} />
          ${each.role === "assistant"
            ? html`<${Markdown} text=${plain(each.content)} />`
            : html`<pre class="text">${plain(each.content)}</pre>`}</div>`)}
        ${!said.length && html`<p class="soft">Nothing was said.</p>`}<${Results} of=${results} /></div>`}<//><//>
    <${Panel} kind="asked-now">
      <${Decision} interrupt=${asked} ...${checks} byKey isThere=${isThere} onDone=${onDone} /><//>
    ${before.length > 0 && html`<${Panel} title=${`Decided before for ${asked.user ?? "users without a name"}`}>
      <${Decisions} of=${before.slice(0, 5)} /><//>`}
  </div>`;
}
