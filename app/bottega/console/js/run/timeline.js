/** The tree of tasks beside a waterfall of what each did when. */
import { useMemo, useState } from "preact/hooks";

import { SPAN_KINDS } from "../en.js";
import { count, duration, money, tokens } from "../format.js";
import { html } from "../html.js";
import { Select, Status } from "../parts/basics.js";
import { Windowed } from "../parts/windowed.js";
import { causeOf } from "./diagnosis.js";
import { countsText, FEW, PART_OF, progressOf } from "./progress.js";
import { axis, idleTimes } from "./scale.js";

const ROW = 34;
/** How a part of a task's time is drawn. */
const kindOf = ({ kind, error }) => (error && kind === "model" ? "failed" : error && kind === "tool" ? "broken" : kind);
/**
 * Which tries of a model and calls of tools failed and why, and how long others were held back, such as "2 failed
 * tries: model answered HTTP 500; lookup failed: HTTP 404; held back 3.0 s"; "": none.
 */
function troubleOf(task, now) {
  const failed = task.spans.filter(({ kind, error }) => kind === "model" && error);
  const broken = task.spans.filter(({ kind, error }) => kind === "tool" && error);
  const held = task.spans.filter(({ kind }) => kind === "held");
  const number = `${failed.length} failed ${failed.length === 1 ? "try" : "tries"}`;
  const lost = held.reduce((sum, { from, to }) => sum + (to ?? now) - from, 0);
  return [failed.length > 0 && `${number}: ${causeOf(failed.at(-1).error)}`,
    broken.length > 0 && `${broken.at(-1).label} failed: ${causeOf(broken.at(-1).error)}`,
    broken.length > 1 && `${count(broken.length)} calls of tools failed in all`,
    held.length > 0 && `held back ${duration(lost)}`].filter(Boolean).join("; ");
}

/** The rows of the tree whose task has a status and a text in its name; "" stands for any. */
function chosenRows(rows, status, text) {
  const wanted = text.trim().toLowerCase();
  return rows.filter(({ task }) => (!status || task.status === status)
    && (!wanted || `${task.agent} ${task.title}`.toLowerCase().includes(wanted)));
}

/** The dispatched tasks in one picture, if they are many. */
export function Progress({ state }) {
  const { counts, over, total, leftMs } = progressOf(state);
  if (total < FEW) return null;
  const text = countsText(counts);
  return html`<div class="progress">
    <div role="progressbar" aria-label="Dispatched tasks" aria-valuemin="0" aria-valuemax=${total} aria-valuenow=${over}
      aria-valuetext=${`${over} of ${total} are over: ${text}`}>
      ${Object.entries(counts).map(([part, number]) => html`<i class=${`bar ${part}`}
        style=${{ width: `${100 * number / total}%` }}></i>`)}</div>
    <p class="small numbers"><strong>${count(over)} of ${count(total)} tasks are over</strong> · ${text}
      ${leftMs > 0 && ` · about ${duration(leftMs)} left`}</p>
  </div>`;
}

/** `state`: RunState; `now`: end of the time axis in ms; `chosen`: key of a task. */
export function Timeline({ state, now, chosen, onChoose }) {
  const [status, setStatus] = useState("");
  const [text, setText] = useState("");
  const [squeezed, setSqueezed] = useState(true);
  const from = state.queuedAt ?? state.startedAt ?? now;
  const span = Math.max(1, now - from);
  const second = Math.floor(now / 1000);
  const found = useMemo(() => idleTimes(state.tasks.values(), from, now), [state, state.last, second]);
  const idle = squeezed ? found : [];
  const at = axis(from, now, idle);
  const place = (time) => `${100 * at(time)}%`;
  const width = (a, b) => `max(2px, ${100 * Math.max(0, at(b) - at(a))}%)`;
  const bar = (each, i) => html`<i key=${i} class=${`bar ${kindOf(each)}`}
    title=${[`${SPAN_KINDS[kindOf(each)]}:`, each.label, duration((each.to ?? now) - each.from), causeOf(each.error)]
      .filter(Boolean).join(" ")}
    style=${{ left: place(each.from), width: width(each.from, each.to ?? now) }}></i>`;
  const row = ({ task, depth }) => {
    const queuedAt = task.queuedAt ?? (task.id === null ? state.queuedAt : null);
    const begun = task.queuedAt ? task.startedAt : state.startedAt; // the run's own agent waits as its run does
    const spans = queuedAt ? [{ kind: "queue", from: queuedAt, to: begun ?? task.endedAt }, ...task.spans] : task.spans;
    const trouble = troubleOf(task, now);
    const lasted = duration(task.startedAt && (task.endedAt ?? now) - task.startedAt);
    return html`<div key=${task.key} class=${`task-row ${chosen === task.key ? "chosen" : ""}`}
      style=${{ height: `${ROW}px` }} role="listitem">
      <button type="button" class="task-name" style=${{ paddingLeft: `${8 + depth * 16}px` }}
        aria-pressed=${chosen === task.key} title=${trouble || null} onClick=${() => onChoose(task.key)}>
        <span class="name">${task.title || task.agent}${trouble && html`<span class="small bad-text">
          ${" "}${trouble}</span>`}</span> <${Status} value=${task.status} /></button>
      <span class="numbers small soft">${lasted}</span>
      <span class="numbers small soft wide">${tokens(task.tokens)}</span>
      <span class="numbers small soft wide">${money(task.cost)}</span>
      <span class="track" aria-hidden="true">
        ${idle.map((each) => html`<i class="idle" style=${{ left: place(each.from), width: width(each.from, each.to) }}>
          </i>`)}${spans.map(bar)}</span>
    </div>`;
  };
  const rows = state.tree();
  const shown = status || text ? chosenRows(rows, status, text) : rows;
  return html`<div class="timeline">
    ${rows.length >= FEW && html`<form class="filters body" onSubmit=${(e) => e.preventDefault()}>
      <${Select} label="Status" any="any" value=${status} options=${Object.keys(PART_OF)} onChange=${setStatus} />
      <label>Task or agent <input type="search" value=${text} onInput=${(e) => setText(e.target.value)} /></label>
      <span class="small soft" role="status">${shown.length} of ${rows.length} tasks</span></form>`}
    <div class="task-row names" aria-hidden="true"><span>Task</span><span>Time</span><span class="wide">Tokens</span>
      <span class="wide">Cost</span>
      <span class="axis">${idle.length
        ? idle.map((each) => html`<span style=${{ left: place((each.from + each.to) / 2) }}>
          ${duration(each.to - each.from)}</span>`)
        : html`<span>0</span><span style=${{ left: "50%" }}>${duration(span / 2)}</span>`}
          <span class="last">${duration(span)}</span></span></div>
    <${Windowed} items=${shown} rowHeight=${ROW} row=${row} label="Tasks" />
    <p class="legend small soft">
      ${Object.entries(SPAN_KINDS).map(([kind, name]) => html`<span><i class=${`bar ${kind}`}></i>${name}</span>`)}
      ${found.length > 0 && html`<label class="check">
        <input type="checkbox" checked=${squeezed} onChange=${(e) => setSqueezed(e.target.checked)} /> Shorten times
        without work <i class="bar idle"></i></label>`}</p>
  </div>`;
}
