/** What is made of a run's events: its state, its time axis, the sentence that says why. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { causeOf, diagnose, judgedOf } from "../../../app/bottega/console/js/run/diagnosis.js";
import { marksOf } from "../../../app/bottega/console/js/run/marks.js";
import { countsText, progressOf } from "../../../app/bottega/console/js/run/progress.js";
import { axis, idleTimes } from "../../../app/bottega/console/js/run/scale.js";
import { RunState } from "../../../app/bottega/console/js/run/state.js";

const usage = { input: 5, output: 2, cost: { amount: "0.5", currency: "USD", complete: true } };
const LOG = [
  ["run.queued", {}, null],
  ["run.started", { attempt: 1 }, null],
  ["agent.started", {}],
  ["llm.started", { call: 1, model: "m", provider: "p", attempt: 1 }],
  ["llm.completed", { call: 1, message: { content: "Rome." }, usage, try: 1, duration_ms: 1000 }],
  ["agent.completed", { output: "Rome." }],
  ["run.completed", { answer_seq: 6 }, null],
];

function stateOf(log) {
  const state = new RunState();
  for (const [at, [type, data, agent = "clerk"]] of log.entries()) {
    state.apply({ seq: at + 1, at: new Date(at * 1000).toISOString(), task_id: null, agent, type, data });
  }
  return state;
}

test("a run's state follows from its events", () => {
  const state = stateOf(LOG);
  assert.equal(state.status, "completed");
  assert.equal(state.output, "Rome.");
  const [task] = state.tasks.values();
  assert.deepEqual([task.agent, task.tokens, task.cost.amount], ["clerk", 7, 0.5]);
  assert.deepEqual(state.tree().map(({ task: { key }, depth }) => [key, depth]), [["@clerk", 0]]);
});

test("an event that came already changes nothing", () => {
  const state = stateOf(LOG);
  state.apply({ ...state.events[0] });
  assert.equal(state.events.length, LOG.length);
});

test("live text replaces from its offset, in code points", () => {
  const state = stateOf(LOG.slice(0, 4));
  const delta = (offset, text) => state.apply({ seq: null, type: "llm.delta", task_id: null, agent: "clerk",
    data: { call: 1, attempt: 1, offset, text } });
  delta(0, "a🙂b");
  delta(2, "c");
  assert.equal(state.tasks.get("@clerk").live.text, "a🙂c");
});

test("a sentence says how a run ended", () => {
  assert.equal(diagnose(stateOf(LOG), 0).text, "Completed after 5.0 s.");
  assert.equal(diagnose(stateOf(LOG.slice(0, 1)), 2000).text, "Waits in the queue for 2.0 s.");
});

test("a judgement says how a run went, who said so and why", () => {
  const outcome = { value: "FAILURE", source: "check", reason: 'the answer did not contain "Reference:"' };
  assert.equal(judgedOf({ outcome, judged_by: { source: "judge", author: null } }),
    'is bad, by judges: the answer did not contain "Reference:"');
  assert.equal(judgedOf({ outcome: { value: "PARTIAL", reason: null }, judged_by: { source: "feedback",
    author: "user:ada" } }), "is partly, by people (user:ada)");
});

test("a cause is the same words for the same error", () => {
  const error = { code: "model_unavailable", message: "the model's API is down (HTTP 503)", last_code: null };
  assert.equal(causeOf(error), "model answered HTTP 503");
  assert.equal(causeOf(null), "");
});

const failed = (status) => ({ code: "model_unavailable", message: `HTTP ${status}` });
const limited = { code: "model_rate_limited", message: "HTTP 429" };

/** The events of a call of a model: an answer, or an error. */
function modelCall(model, error) {
  const about = { call: 1, attempt: 1, provider: "default", model };
  const end = error ? ["llm.failed", { error }] : ["llm.completed", { message: { content: "Yes." }, usage }];
  return [["llm.started", about], [end[0], { ...about, ...end[1] }]];
}

const asks = (id) => ({ interrupt_id: id, kind: "approval", tool: "refund" });

/** The events of a call that was denied. */
function denied(status, decision) {
  const call = { call: 1, tool_call_id: "x", name: "refund", arguments: {} };
  return [["tool.started", call], ["interrupt.created", asks("i")],
    ["interrupt.resolved", { interrupt_id: "i", status, ...decision }],
    ["tool.failed", { ...call, error: { type: "denied", message: "denied" } }]];
}

test("a denied call is no failed one", () => {
  const state = stateOf([...LOG.slice(0, 2), ...denied("resolved", { resolution: { decision: "deny" } })]);
  assert.deepEqual(state.tasks.get("@clerk").tools.map(({ status }) => status), ["denied"]);
  assert.deepEqual(marksOf(state.events).map(([kind]) => kind), ["Decisions"]);
});

test("a sentence names the reason and no other", () => {
  const begun = LOG.slice(0, 2);
  const look = { call: 1, tool_call_id: "x", name: "look", arguments: {} };
  const budget = { code: "budget_exhausted", message: "The budget of 10 tokens is used up." };
  const late = { code: "queue_timeout", message: "?" };
  const cases = [
    [[["run.queued", {}], ["run.cancelled", {}]], "Cancelled after 1.0 s in the queue."],
    [[["run.queued", {}], ["run.timeout", { error: late }]],
      "Never started after 1.0 s in the queue: no worker claimed it."],
    [[...begun, ["tool.started", look], ["tool.failed", { ...look, error: { message: "no" } }],
      ["run.failed", { error: budget }]],
    "Failed after 3.0 s: The budget of 10 tokens is used up; the tool look failed once: no."],
    [[...begun, ...modelCall("big", failed(500)), ...modelCall("big", limited), ...modelCall("small", failed(500)),
      ...modelCall("small", failed(500)), ["run.failed", { error: failed(500) }]],
    "Failed after 9.0 s: default/small answered HTTP 500 twice."],
    [[...begun, ...denied("resolved", { by: { name: "Lea" }, resolution: { decision: "deny", comment: "no receipt" } }),
      ["run.completed", {}]], 'Completed after 5.0 s; refund was denied by Lea: "no receipt".'],
    [[...begun, ...denied("expired", {}), ...Array(3).fill(["warning", {}]), ["interrupt.created", asks("j")],
      ["interrupt.resolved", { interrupt_id: "j", status: "resolved", resolution: { decision: "approve" } }],
      ["run.completed", {}]],
    "Completed after 10.0 s; refund was denied, since nobody decided in time."],
    [[["run.queued", {}], ["run.started", {}], ["interrupt.created", asks("i")], ...Array(7).fill(["warning", {}]),
      ["run.completed", {}]], "Completed after 9.0 s; waited 8.0 s for a person to decide about refund."],
    [[...begun, ...modelCall("big", failed(500)), ...modelCall("big"), ...Array(6).fill(["warning", {}]),
      ["run.timeout", {}]], "Out of time after 11.0 s."],
    [[...begun, ...modelCall("big", failed(500)), ["run.waiting", { reason: "time" }]],
      "Pauses before the next try: default/big answered HTTP 500 once."],
  ];
  for (const [log, sentence] of cases) {
    const state = stateOf(log);
    assert.equal(diagnose(state, state.now).text, sentence);
  }
});

test("a call that was held back names the model that kept failing, and not its answer", () => {
  const about = { call: 1, attempt: 1, provider: "default", model: "m" };
  const held = { code: "model_circuit_open", message: "the model keeps failing. The last failure: HTTP 500" };
  const tries = Array(9).fill([["llm.started", about], ["llm.failed", { ...about, error: held, retry_in_ms: 900 }]]);
  const waits = [...LOG.slice(0, 3), ...tries.flat()];
  const answered = [...waits, ["llm.started", about], ["llm.completed", { ...about, message: { content: "Yes." }, usage }],
    ["run.completed", {}]];
  assert.equal(diagnose(stateOf(answered), 0).text,
    "Completed after 22.0 s; 18.0 s of it held back, because default/m kept failing.");
  assert.equal(diagnose(stateOf(waits), 0).text, "Tries again: calls are held back, because default/m kept failing.");
  const kinds = stateOf(answered).tasks.get("@clerk").spans.map(({ kind }) => kind);
  assert.deepEqual([...new Set(kinds)], ["held", "model"]);
});

test("a wait of a run is a part of its agent's time", () => {
  const state = stateOf([...LOG.slice(0, 3), ["run.waiting", { reason: "children" }], ["run.resumed", { attempt: 2 }],
    ...LOG.slice(3)]);
  const [first] = state.tasks.get("@clerk").spans;
  assert.deepEqual([first.kind, first.to - first.from], ["wait", 1000]);
});

test("tasks wait and go on in the state of a run", () => {
  const state = new RunState();
  const log = [
    ["run.started", null, null, { attempt: 1 }],
    ["agent.started", null, "lead", { depth: 0 }],
    ["agent.started", "t", "clerk", { depth: 1 }],
    ["agent.waiting", "t", "clerk", { attempt: 1 }],
    ["run.waiting", null, null, { reason: "person", interrupts: ["i"] }],
    ["run.resumed", null, null, { attempt: 2 }],
    ["agent.resumed", "t", "clerk", { attempt: 2 }],
    ["agent.completed", "t", "clerk", { output: "yes" }],
  ];
  const seen = log.map(([type, task_id, agent, data], i) => {
    state.apply({ seq: i + 1, type, task_id, agent, data, at: new Date(i).toISOString(), parent_task_id: null });
    return [state.status, ...[...state.tasks.values()].map((task) => task.status)].join(" ");
  });
  assert.deepEqual(seen.slice(3), ["running running waiting", "waiting waiting waiting", "running running waiting",
    "running running running", "running running completed"]);
});

test("the progress of dispatched tasks is counted, and the rest is estimated from those that are over", () => {
  const state = new RunState();
  let seq = 0;
  const take = (type, task_id, data = {}) => state.apply({ seq: ++seq, type, task_id, agent: "clerk", data,
    at: new Date(1000 * seq).toISOString(), parent_task_id: null });
  take("agent.started", null);
  take("agent.started", "called"); // not dispatched: its caller waits for it
  const tasks = ["a", "b", "c", "d", "e", "f"];
  for (const task of tasks) take("subagent.dispatched", task, { prompt: "?", metadata: null });
  take("subagent.dequeued", "e");
  take("subagent.completed", "a", { token_usage: {} });
  take("subagent.completed", "b", { token_usage: {} });
  take("subagent.timeout", "c", { token_usage: {}, error: { code: "timeout", message: "late" } });
  const before = progressOf(state);
  assert.deepEqual([before.over, before.total, before.leftMs], [3, 6, null]);
  take("subagent.completed", "d", { token_usage: {} });
  const { counts, leftMs } = progressOf(state);
  assert.equal(countsText(counts), "3 done · 1 failed · 1 running · 1 waiting");
  assert.equal(leftMs, 10_000 / 4 * 2); // dispatched from second 3, the last over at second 13
});

test("long times without work take little room", () => {
  const span = (kind, from, to) => ({ kind, from, to });
  const idle = idleTimes([
    { spans: [span("model", 0, 1000), span("person", 1000, 90_000)] },
    { spans: [span("tool", 90_000, null)] },
  ], 0, 91_000);
  assert.deepEqual(idle, [{ from: 1000, to: 90_000 }]);
  const places = [0, 500, 1000, 45_000, 90_000, 90_500, 91_000].map(axis(0, 91_000, idle));
  assert.deepEqual(places, [...places].sort((a, b) => a - b));
  assert.deepEqual([places[0], places.at(-1)], [0, 1]);
  assert.ok(places[4] - places[2] > 0.05 && places[4] - places[2] < 0.1);
  assert.equal(axis(0, 91_000, [])(45_500), 0.5);
  assert.deepEqual(idleTimes([{ spans: [span("model", 0, 9), span("tool", 50, 99)] }], 0, 99), []);
  assert.deepEqual(idleTimes([{ spans: [span("queue", 0, 60_000)] }], 0, 60_000), []);
});

test("a try that failed and the pause after it are seen, with their cause", () => {
  const about = { call: 1, attempt: 1, provider: "p", model: "m" };
  const state = stateOf([
    ...LOG.slice(0, 4),
    ["llm.failed", { ...about, error: failed(500), try: 1, retry_in_ms: 900 }],
    ["llm.started", about],
    ["llm.completed", { ...about, message: { content: "Rome." }, usage, try: 2, duration_ms: 1 }],
  ]);
  const seen = state.tasks.get("@clerk").spans.map(({ kind, from, to, error }) => [kind, (to - from) / 1000, !!error]);
  assert.deepEqual(seen, [["model", 1, true], ["retry", 1, true], ["model", 1, false]]);
});

test("a playback jumps to failures, decisions and publications", () => {
  const events = stateOf([
    ...LOG.slice(0, 4),
    ["llm.failed", { call: 1, error: failed(500) }],
    ["interrupt.created", { interrupt_id: "i", tool: "refund" }],
    ["interrupt.resolved", { interrupt_id: "i", status: "resolved", resolution: { decision: "deny" } }],
    ["memory.published", { version: 2 }],
  ]).events;
  assert.deepEqual(marksOf(events), [
    ["Failures", [{ position: 5, text: "clerk: model answered HTTP 500" }]],
    ["Decisions", [{ position: 6, text: "clerk: refund asks" }, { position: 7, text: "clerk: deny" }]],
    ["Publications", [{ position: 8, text: "clerk: version 2" }]],
  ]);
  assert.deepEqual(marksOf(stateOf(LOG).events), []);
});
