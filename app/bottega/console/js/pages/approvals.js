/** What agents wait for people to decide, worked one after the other: j and k go on, a, d and e decide. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { withQuery } from "../api.js";
import { excerpt, plain } from "../format.js";
import { html } from "../html.js";
import { decided, factsOf } from "../parts/approval_facts.js";
import { Button, Empty, Link, Loaded, Panel, Tabs, Time, useHeading } from "../parts/basics.js";
import { Results, readTalk, useChecks, useOthers, worth } from "../parts/checked.js";
import { Decision } from "../parts/decision.js";
import { useKeys } from "../parts/keys.js";
import { Filter, Pages, usePages } from "../parts/lists.js";
import { Markdown } from "../parts/markdown.js";
import { pending } from "../parts/pending.js";
import { Author } from "../parts/said.js";
import { go } from "../router.js";

const EVERY_MS = 3000;
const SHOWN_MESSAGES = 5;
const SHOWN_DECISIONS = 10;
/** For the first calls of the list it is read what users said, so that their rows have signs. */
const LOOKED_THROUGH = 20;

/** Who decides: a person here, or the program that started the run. */
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
  useEffect(() => void (found.data && pending.value.reload?.()), [all.map(({ id }) => id).join()]);
  return html`
    <div class="head"><h1>Approvals</h1><p class="small soft">Keys: <kbd>j</kbd> next, <kbd>k</kbd> before,${" "}
      <kbd>a</kbd> approve, <kbd>d</kbd> deny, <kbd>e</kbd> edit, <kbd>c</kbd> comment</p></div>
    <${Tabs} tabs=${tabs} chosen=${tab} label="What waits, and what was decided"
      onChoose=${(name) => go(["approvals"], { tab: name }, { replace: true })} />
    ${tab === "decided" ? html`<${Decided} query=${query} />`
    : html`<${Loaded} from=${own} what="decisions">${(page) => page.items.length
      ? html`<${Inbox} key=${tab} found=${own} tab=${query.tab} named=${query.id} others=${others} />`
      : html`<${Panel}><${Empty} title="Nobody waits for you.">
          <p>Agents ask here before a call that needs approval, and when they have a question.</p><//><//>`}<//>
    ${latest.length > 0 && html`<${Panel} title="Decided last" actions=${html`<${Link} path=${["approvals"]}
      query=${{ tab: "decided" }}>All<//>`}><${Decisions} of=${latest} /><//>`}`}`;
}

/** All that was decided, the latest decision first. */
function Decided({ query }) {
  const path = withQuery("/v1/interrupts", { status: "resolved", order: "resolved_at",
    user: query.user });
  return html`<form class="filters" onSubmit=${(e) => e.preventDefault()}><${Filter} label="User"
      value=${query.user ?? ""} onChange=${(user) => go(["approvals"], { tab: "decided", user }, { replace: true })} />
    </form><${Panel}><${Pages} key=${path} path=${path} what="decisions" everyMs=${EVERY_MS} isSaved>${(items) =>
      items.length ? html`<${Decisions} of=${items} />` : html`<${Empty} title="Nothing was decided." />`}<//><//>`;
}

/**
 * The item that is shown, and its place in the list: the named one once its name comes; else the same as before, even
 * after it left the list; after it was decided here, the one in its place.
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

/** The facts about each of some calls, by its id. `others`: as of `factsOf`; null: not read yet. */
function useFacts(items, shown, others) {
  const [texts, setTexts] = useState({}); // what users said, by the ids of calls
  const keep = (id, text) => setTexts((old) => (old[id] === text ? old : { ...old, [id]: text }));
  // What is shown reads its own.
  const isOpen = ({ id, kind }) => kind === "approval" && !(id in texts) && id !== shown;
  const next = others ? items.slice(0, LOOKED_THROUGH).find(isOpen) : null;
  useEffect(() => {
    if (next) readTalk(next).then(({ text }) => keep(next.id, text), () => keep(next.id, null));
  }, [next?.id]);
  const facts = useMemo(() => Object.fromEntries(items.map((each) =>
    [each.id, others ? factsOf(each, texts[each.id] ?? null, others) : []])), [items, texts, others]);
  return { facts, keep };
}

/** How much there is to look at in a call before it is decided. */
const Warned = ({ of }) => of.length > 0 && html` <span
  class=${`status ${of.some(({ isGrave }) => isGrave) ? "bad" : "wait"}`}>${of.length === 1 ? "1 warning"
    : `${of.length} warnings`}</span>`;

function Inbox({ found, tab, named, others }) {
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
      onRead=${(text) => keep(asked.id, text)} /></div>
  </div>`;
}

/** What was decided on calls and questions, by whom. */
const Decisions = ({ of }) => html`<ul class="rows">${of.map((each) => html`<li key=${each.id}>
  <strong>${each.tool ?? each.agent}</strong> for ${each.user ?? "a user without a name"}:
  ${" "}${decided(each)} <code>${excerpt(worth(each.resolution?.arguments ?? each.arguments), 80)}</code>
  <span class="small soft"> by ${each.resolved_by?.name ?? "nobody"} <${Time} at=${each.resolved_at} /> · <${Link}
    path=${["runs", each.run_id]}>the run<//></span>
  ${each.resolution?.comment && html`<p class="small">Why: ${each.resolution.comment}</p>`}</li>`)}</ul>`;

/** `others`: as of `factsOf`; null: not read yet. `onRead` gets what the users said. */
function One({ asked, isThere, others, onDone, onRead }) {
  const checks = useChecks(asked, others);
  const { talk, said, text, results } = checks;
  useEffect(() => void (talk.data && onRead(text)), [talk.data]);
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
