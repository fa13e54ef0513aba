/** The tree of tasks beside a waterfall of what each did when. */
import { duration, money, tokens } from "../format.js";
import { html } from "../html.js";
import { Status } from "../parts/basics.js";
import { Windowed } from "../parts/windowed.js";

const ROW = 34;
const KINDS = { queue: "waiting in the queue", model: "model", tool: "tool", person: "waiting for a person" };

/** `state`: RunState; `now`: end of the time axis in ms; `chosen`: key of a task. */
export function Timeline({ state, now, chosen, onChoose }) {
  const from = state.queuedAt ?? state.startedAt ?? now;
  const span = Math.max(1, now - from);
  const place = (at) => `${(100 * Math.max(0, at - from)) / span}%`;
  const width = (a, b) => `max(2px, ${(100 * Math.max(0, b - a)) / span}%)`;
  const bar = (each, i) => html`<i key=${i} class=${`bar ${each.kind}`} title=${`${KINDS[each.kind]}: ${each.label ?? ""} ${duration((each.to ?? now) - each.from)}`}
    style=${{ left: place(each.from), width: width(each.from, each.to ?? now) }}></i>`;
  const row = ({ task, depth }) => {
    const spans = task.queuedAt ? [{ kind: "queue", from: task.queuedAt, to: task.startedAt ?? task.endedAt }, ...task.spans] : task.spans;
    const lasted = duration(task.startedAt && (task.endedAt ?? now) - task.startedAt);
    return html`<div key=${task.key} class=${`task-row ${chosen === task.key ? "chosen" : ""}`} style=${{ height: `${ROW}px` }} role="listitem">
      <button type="button" class="task-name" style=${{ paddingLeft: `${8 + depth * 16}px` }} aria-pressed=${chosen === task.key} onClick=${() => onChoose(task.key)}>
        <span class="name">${task.title || task.agent}</span> <${Status} value=${task.status} /></button>
      <span class="numbers small soft">${lasted}</span>
      <span class="numbers small soft wide">${tokens(task.tokens)}</span>
      <span class="numbers small soft wide">${money(task.cost)}</span>
      <span class="track" aria-hidden="true">${spans.map(bar)}</span>
    </div>`;
  };
  return html`<div class="timeline">
    <div class="task-row names" aria-hidden="true"><span>Task</span><span>Time</span><span class="wide">Tokens</span><span class="wide">Cost</span>
      <span class="axis"><span>0</span><span>${duration(span / 2)}</span><span>${duration(span)}</span></span></div>
    <${Windowed} items=${state.tree()} rowHeight=${ROW} row=${row} label="Tasks" />
    <p class="legend small soft">${Object.entries(KINDS).map(([kind, name]) => html`<span><i class=${`bar ${kind}`}></i>${name}</span>`)}</p>
  </div>`;
}
