/** One run: tasks over time, publications between agents, live text of each agent, playback. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { post, ROOT, url } from "../api.js";
import { LINK_STATES, RETRY_HELP } from "../en.js";
import { count, duration, excerpt, money, plain, tokens } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Copy, Empty, Failure, Figure, Figures, Link, Loading, NoRun, Panel, RunStatus, SIGNS, Stale,
  Tabs, Time, Unpriced, Value } from "../parts/basics.js";
import { useChecks, useOthers } from "../parts/checked.js";
import { Decision } from "../parts/decision.js";
import { DialogForm } from "../parts/dialog.js";
import { Windowed } from "../parts/windowed.js";
import { instead, useWork } from "../parts/work.js";
import { may } from "../person.js";
import { follow, go, useTitle } from "../router.js";
import { programsOf, requestOf } from "../run/copy_as.js";
import { Graph, skippedOf } from "../run/graph.js";
import { Playback } from "../run/playback.js";
import { isFinal } from "../run/state.js";
import { Answer, Diagnosis, Question, textOf } from "../run/story.js";
import { TaskDetail } from "../run/task.js";
import { Progress, Timeline } from "../run/timeline.js";
import { useRunState } from "../run/use_run.js";

const TABS = [["timeline", "Timeline"], ["graph", "Graph"], ["flows", "What flowed"], ["events", "Events"]];

const LOG_MS = 3000;

export function Run({ id, query }) {
  const [live, link] = useRunState(id);
  const run = useData(url`/v1/runs/${id}`);
  const graph = useData(run.data?.graph ? url`/v1/runs/${id}/graph` : null);
  const [played, setPlayed] = useState(null);
  const detail = useRef(null);
  const state = played ?? live;
  const tab = query.tab ?? "timeline";
  const set = (change) => go(["runs", id], { ...query, ...change }, { replace: true });
  useEffect(() => {
    if (link !== "connecting") run.reload();
  }, [link, live.status]);
  const [, tick] = useState(0);
  const moves = !isFinal(live.status);
  useTitle(run.data && `${SIGNS[live.status]} ${run.data.agent ?? run.data.graph}: ${excerpt(run.data.question, 60)}`);
  useEffect(() => {
    if (!moves) return undefined;
    const timer = setInterval(() => tick((n) => n + 1), 500);
    return () => clearInterval(timer);
  }, [moves]);

  const [isLate, setLate] = useState(false); // no log comes: the run alone is better than nothing
  useEffect(() => {
    const timer = setTimeout(() => setLate(true), LOG_MS);
    return () => clearTimeout(timer);
  }, [id]);
  // Before the log is read, an ended run would look like a waiting run.
  const isUnread = run.data && isFinal(run.data.status) && !live.queuedAt && !isLate;

  if (link === "gone" || run.error?.status === 404) return html`<${NoRun} />`;
  if (run.error && !run.data) return html`<${Failure} error=${run.error} again=${run.reload} />`;
  if (!run.data || isUnread) return html`<${Loading} what="the run" />`;
  const now = played ? played.now : moves ? Date.now() : live.endedAt;
  const chosen = state.tasks.get(query.task) ?? state.tasks.values().next().value;
  const choose = (task) => {
    set({ task, call: "" });
    detail.current?.scrollIntoView({ block: "nearest" });
  };
  const models = [...new Set([...live.tasks.values()].flatMap(({ calls }) => calls)
    .filter(({ model }) => model).map(({ model, provider }) => `${provider ?? "default"}/${model}`))];
  const answer = state.output || (played ? "" : textOf(run.data.output));
  return html`
    <div class="head">
      <div><h1>${run.data.agent ?? run.data.graph}</h1>
        <p class="soft small"><span class="mono">${id}</span> <${Copy} text=${id} label="Copy id" /> made <${Time}
          at=${run.data.created_at} />${run.data.version && html` · version ${run.data.version}`}
          ${models.length > 0 && html` · model ${models.join(", ")}`}
          ${run.data.session_id && html` · session ${run.data.session_id}`}${run.data.user
            && html` · user ${run.data.user}`}
          ${run.data.memory_used && html` · ${memoryOf(run.data.memory_used)}`}
          ${run.data.memory !== "off" && may("read") && html` · <${Link}
            path=${["memory", "runs", id]}>what memory gave it<//>`}
          ${run.data.retry_of && html` · retry of <${Source} of=${run.data.retry_of} id=${id} />`}
          ${run.data.fork_of && html`<${ForkedFrom} of=${run.data.fork_of} id=${id} taken=${run.data.taken_over} />`}
        </p></div>
      <div class="actions"><${RunStatus} status=${state.status} waitsFor=${state.waitsFor} />
        <span class="small soft" role="status">${played ? "Playback" : LINK_STATES[link]}</span>
        <${Actions} run=${run.data} status=${live.status} onDone=${run.reload} /></div>
    </div>
    <${Stale} from=${run} />
    <${Question} run=${run.data} />
    ${!played && html`<${Asked} state=${live} run=${run.data} />`}
    <${Answer} run=${run.data} answer=${answer} moves=${moves} isPlayed=${played !== null}
      onRated=${run.reload} />
    <${Diagnosis} run=${run.data} state=${live} now=${moves ? Date.now() : live.endedAt} />
    ${!played && html`<${Steer} key=${id} run=${run.data} state=${live} moves=${moves} />`}
    <${Numbers} state=${state} now=${now} />
    <${Progress} state=${state} />
    ${state.warnings.map((each) => html`<p class="note"><strong>${each.data.code}</strong> ${each.data.message}</p>`)}
    ${skippedOf(state, graph.data) && html`<p class="note">${skippedOf(state, graph.data)}</p>`}
    <${Playback} run=${live} enabled=${!moves} onState=${setPlayed} />
    <div class="run">
      <${Panel}>
        <${Tabs} tabs=${TABS} chosen=${tab} onChoose=${(name) => set({ tab: name })} label="Views of the run" />
        <div role="tabpanel" aria-label=${tab}>
          ${tab === "timeline" && html`<${Timeline} state=${state} now=${now} chosen=${chosen?.key} onChoose=${choose}
            />`}
          ${tab === "graph" && html`<${Graph} state=${state} graph=${graph.data} chosen=${chosen?.node ?? chosen?.agent}
            onChoose=${(agent) => choose(lastTaskOf(state, agent)?.key)} />`}
          ${tab === "flows" && html`<${Flows} state=${state} last=${state.last} />`}
          ${tab === "events" && html`<${EventList} events=${state.events} last=${state.last} follow=${moves} />`}
        </div>
      <//>
      <div ref=${detail}><${TaskDetail} run=${run.data} state=${state} task=${chosen} now=${now} tab=${query.detail}
        call=${Number(query.call) || null} onChange=${set} /></div>
    </div>`;
}

/** The scope of a run's memory in words: from "user", "session", "tenant" or "none (reason)". */
const memoryOf = (used) => (used.startsWith("none") ? `remembers no earlier runs${used.slice("none".length)}`
  : `remembers earlier runs of this ${used}`);

/** The run that this run repeats. */
const Source = ({ of, id }) => html`<${Link} path=${["runs", of]}>another run<//>
  ${may("read") && html` (<${Link} path=${["runs", of, "compare"]} query=${{ with: id }}>compare<//>)`}`;

/** The place from which this run repeats another run, and the steps that this run took over. */
const ForkedFrom = ({ of, id, taken }) => html` · repeats <${Source} of=${of.run_id} id=${id} /> from
  ${" "}${of.node ? html`<strong>${of.node}</strong>` : `event ${of.seq}`}; took over ${count(taken.events)} events,
  ${" "}${tokens(taken.usage.input + taken.usage.output)} tokens`;

const lastTaskOf = (state, agent) =>
  [...state.tasks.values()].findLast((task) => (task.node ?? task.agent) === agent);

function Numbers({ state, now }) {
  let input = 0, calls = 0, tools = 0;
  const cost = { amount: 0, currency: "USD", complete: true };
  const unpriced = new Set();
  for (const task of state.tasks.values()) {
    tools += task.tools.length;
    cost.amount += task.cost.amount;
    cost.complete &&= task.cost.complete;
    for (const call of task.calls) {
      calls += 1;
      input += call.usage ? call.usage.input + call.usage.output : 0;
      if (call.usage && !call.usage.cost.complete) unpriced.add(call.model);
    }
  }
  const usage = state.usage;
  return html`<${Figures}>
    <${Figure} name="Time" value=${duration(state.startedAt && now - state.startedAt)}
      note=${state.startedAt && `after ${duration(state.startedAt - state.queuedAt)} in the queue`} />
    <${Figure} name="Tasks" value=${count(state.tasks.size)} />
    <${Figure} name="Model calls" value=${count(Math.max(usage?.model_calls ?? 0, calls))} />
    <${Figure} name="Tool calls" value=${count(usage?.tool_calls ?? tools)} />
    <${Figure} name="Tokens" value=${tokens(usage ? usage.input + usage.output : input)}
      note=${usage?.estimated && "partly estimated"} />
    <${Figure} name="Cost" value=${money(usage ? usage.cost : cost)} note=${unpriced.size > 0 && html`
      <${Unpriced} models=${[...unpriced]} />`} />
    ${state.attempt > 1 && html`<${Figure} name="Taken up by a worker" value=${`${count(state.attempt)} times`}
      note="at its start, and after each wait or lost worker" />`}
  <//>`;
}

/** The questions to people in this run. */
function Asked({ state, run }) {
  const open = [...state.interrupts.values()].filter((each) => each.status === "pending");
  if (!open.length) return null;
  return html`<${Panel} title=${`Waiting for ${open.length === 1 ? "a decision" : `${open.length} decisions`}`}
    kind="asked-now">
    ${open.map((each) => html`<${Checked} key=${each.id}
      asked=${{ ...each, run_id: run.id, session_id: run.session_id, user: run.user }} />`)}<//>`;
}

const Checked = ({ asked }) => html`<${Decision} interrupt=${asked} ...${useChecks(asked, useOthers(0))} />`;

/** `status`: the current status; the status in `run` may be older. */
function Actions({ run, status, onDone }) {
  const moves = !isFinal(status);
  const { busy, error, work, postOnce } = useWork();
  const [changing, setChanging] = useState(false);
  const act = (name, what) => work(async () => {
    await what();
    onDone();
  }, name);
  const retry = (from) => follow(postOnce(url`/v1/runs/${run.id}/retry`, { from }), ({ id }) => ["runs", id]);
  const cancel = () => post(url`/v1/runs/${run.id}/cancel`);
  return html`
    ${moves && html`<${Button} needs="run" kind="danger" busy=${busy === "cancel"}
      onClick=${() => act("cancel", cancel)}>Cancel run<//>`}
    ${!moves && status !== "completed" && html`<${Button} needs="run" busy=${busy === "last_step"}
      title=${RETRY_HELP.last_step} onClick=${() => act("last_step",
        () => retry("last_step"))}>Retry from the last step<//>`}
    ${!moves && html`<${Button} needs="run" busy=${busy === "start"} title=${RETRY_HELP.start}
      onClick=${() => act("start", () => retry("start"))}>Retry<//>`}
    ${!moves && typeof run.input === "string" && html`<${Button} needs="run" title=${RETRY_HELP.change}
      onClick=${() => setChanging(true)}>Change and run<//>`}
    <${Link} needs="read" class="button" path=${["runs", run.id, "compare"]}>Compare<//>
    <${CopyAs} run=${run} />
    ${changing && html`<${Changed} run=${run} onClose=${() => setChanging(false)} />`}
    ${error && html`<span class="bad-text small" role="alert">${error.message}</span>`}`;
}

/** A program that starts a similar run. */
function CopyAs({ run }) {
  const [isOpen, setOpen] = useState(false);
  return html`<${Button} aria-expanded=${isOpen} onClick=${() => setOpen(!isOpen)}>Copy as<//>
    ${isOpen && html`<span class="inline" role="group" aria-label="Copy as">
      ${Object.entries(programsOf(run, location.origin + ROOT)).map(([name, text]) => html`<${Copy} key=${name}
        text=${text} label=${name} />`)}</span>`}`;
}

/** A form that asks the same agent another question: a new run, outside the session of the old run. */
function Changed({ run, onClose }) {
  const [input, setInput] = useState(run.input);
  const start = (postOnce) => follow(postOnce("/v1/runs", { ...requestOf(run), input }), ({ id }) => ["runs", id]);
  return html`<${DialogForm} title="Change and run" label="Start" send=${start} disabled=${!input.trim()}
    onClose=${onClose}>
      <label>Question <textarea rows="8" autofocus value=${input} onInput=${(e) => setInput(e.target.value)}></textarea>
        </label>
      <p class="small soft">A new run of the same agent in its present version, outside of the session.</p>
  <//>`;
}

function Steer({ run, state, moves }) {
  const [text, setText] = useState("");
  const [sent, setSent] = useState({});
  const { busy, error, work, postOnce } = useWork();
  const takes = moves && run.mode !== "dag" && may("run");
  // A new message appears in the log a little later.
  const known = new Set(state.messages.map((each) => each.id));
  const coming = Object.keys(sent).filter((id) => !known.has(id)).map((id) => ({ id, delivered: false }));
  const messages = [...state.messages, ...coming];
  if (!takes && !messages.length) return null;
  const send = instead(() => work(async () => {
    const { message_id: id } = await postOnce(url`/v1/runs/${run.id}/messages`, { content: text.trim() });
    setSent((old) => ({ ...old, [id]: text.trim() }));
    setText((now) => (now === text ? "" : now)); // what was typed meanwhile stays
  }));
  return html`<${Panel} title="Messages during the run">
    ${messages.length > 0 && html`<ul class="rows">${messages.map((each) => html`<li key=${each.id}>
      <pre class="text">${plain(each.content) || sent[each.id] || "A message"}</pre>
      <p class="small soft">${each.delivered ? `read by ${run.agent}`
        : "not read yet: it comes before the next model call"}</p></li>`)}</ul>`}
    ${takes && html`<form class="body filters" onSubmit=${send}>
      <label class="grow">Tell ${run.agent} something <input value=${text} onInput=${(e) => setText(e.target.value)} />
        </label>
      <${Button} type="submit" busy=${busy} disabled=${!text.trim()}>Tell it<//></form>`}
    ${error && html`<p class="bad-text small" role="alert">${error.message}</p>`}
  <//>`;
}

const ROW = 30;
const time = (at) => new Date(at).toISOString().slice(11, 23);

/** `events` grows in place; `last`, the number of the last event, shows the growth. */
function EventList({ events, last, follow }) {
  const [wanted, setWanted] = useState("");
  const [open, setOpen] = useState(null);
  const shown = useMemo(() => {
    const text = wanted.trim().toLowerCase();
    return text ? events.filter((each) => `${each.type} ${each.agent ?? ""}`.toLowerCase().includes(text)) : events;
  }, [events, last, wanted]);
  const row = (event) => html`<div key=${event.seq} class=${`event-row ${open?.seq === event.seq ? "chosen" : ""}`}
    style=${{ height: `${ROW}px` }} role="listitem">
    <button type="button" aria-pressed=${open?.seq === event.seq} onClick=${() => setOpen(event)}>
      <span class="numbers soft">${event.seq}</span><span class="numbers soft wide">${time(event.at)}</span>
        <code>${event.type}</code><span>${event.agent ?? ""}</span></button></div>`;
  return html`<div class="events">
    <label class="body">Only events whose type or agent contains <input value=${wanted}
      onInput=${(e) => setWanted(e.target.value)} placeholder="tool" /></label>
    <${Windowed} items=${shown} rowHeight=${ROW} row=${row} label="Events" follow=${follow} />
    ${open && html`<div class="body"><h3>${open.seq} ${open.type}</h3><${Value} value=${open.data} /></div>`}
  </div>`;
}

const FLOW_ROW = 34;
const kindOf = (flow) => (flow.isRecalled ? "recalled" : `version ${flow.version}`);

/** Publications of a run, and received publications of earlier runs, with their readers and numbers of reads. Pure. */
function publicationsOf(state) {
  const found = new Map();
  const of = (source, version, at) => {
    const key = `${source} ${version}`;
    if (!found.has(key)) found.set(key, { key, source, version, at, receivers: new Map() });
    return found.get(key);
  };
  for (const each of state.published) of(each.agent, each.version, each.at);
  const agents = new Set([...found.values(), ...state.flows].map((each) => each.source));
  for (const flow of [...state.flows, ...state.recalled.filter((each) => agents.has(each.source))]) {
    const { receivers } = of(flow.source, flow.version, null);
    receivers.set(flow.target, (receivers.get(flow.target) ?? 0) + 1);
  }
  return [...found.values()];
}

const times = ([agent, number]) => `${agent}${number > 1 ? ` (${number} times)` : ""}`;

/** `state` grows in place; `last`, the number of its last event, shows the growth. */
function Flows({ state, last }) {
  const [open, setOpen] = useState(null);
  const number = state.flows.length + state.recalled.length;
  const all = useMemo(() => [...state.flows, ...state.recalled].sort((a, b) => a.seq - b.seq), [state, last]);
  const published = useMemo(() => publicationsOf(state), [state, last]);
  if (!number && !published.length) return html`<${Empty} title="Nothing has flowed between agents yet." />`;
  const row = (flow) => html`<div key=${flow.seq} class=${`event-row ${open?.seq === flow.seq ? "chosen" : ""}`}
    style=${{ height: `${FLOW_ROW}px` }} role="listitem">
    <button type="button" aria-pressed=${open?.seq === flow.seq} onClick=${() => setOpen(flow)}>
      <span class="numbers soft small">${duration(flow.at - (state.startedAt ?? flow.at))}</span>
        <span><strong>${flow.source}</strong> → <strong>${flow.target}</strong></span>
      <span class="small soft">${kindOf(flow)}</span></button></div>`;
  const publication = (each) =>
    html`<div key=${each.key} class="event-row" style=${{ height: `${FLOW_ROW}px` }} role="listitem">
    <p class="line"><strong>${each.source}</strong> <span
      class="small soft">version ${each.version}, ${each.at === null ? "of an earlier run"
        : `after ${duration(each.at - state.startedAt)}`}</span> received by ${[...each.receivers].map(times).join(", ")
          || "nobody"}</p></div>`;
  return html`<div class="events">
    ${published.length > 0 && html`<div class="published">
      <${Windowed} items=${published} rowHeight=${FLOW_ROW} row=${publication} label="Publications" /></div>`}
    <${Windowed} items=${all} rowHeight=${FLOW_ROW} row=${row} label="What flowed" />
    ${open
      ? html`<div class="body"><h3>${open.source} → ${open.target} <span
        class="small soft">${kindOf(open)}</span></h3>
        <${Value} value=${state.textOf(open.data)} /></div>`
      : html`<p class="body small soft">Choose one to read its text.</p>`}
  </div>`;
}
