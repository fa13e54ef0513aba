/**
 * What a run looks like after some of its events. Pure: the same events give the same state.
 *
 * A task is one query of an agent: the run's own, a call of a sub-agent, or a dispatched task. Its
 * key is its id, or "@agent" for an agent of the run itself.
 */

import { HELD_BACK } from "../en.js";

/** The status of a run by its last event. */
export const FINAL = { "run.completed": "completed", "run.failed": "failed", "run.timeout": "timeout",
  "run.cancelled": "cancelled" };
/** Kinds of a task's spans that end when its model is called again. */
const PARTS_OF_CALL = new Set(["model", "retry", "held"]);
const ENDED = new Set(["completed", "failed", "timeout", "cancelled"]);

export const isFinal = (status) => ENDED.has(status);

export class RunState {
  constructor() {
    this.events = [];
    this.tasks = new Map();
    this.nodes = new Map();
    this.decisions = [];
    this.flows = [];
    this.recalled = [];
    this.published = [];
    this.interrupts = new Map();
    this.messages = [];
    this.warnings = [];
    this.status = "queued";
    this.attempt = 0;
    this.queuedAt = this.startedAt = this.endedAt = null;
    this.error = this.usage = null;
    this.last = 0;
    this.now = 0;
  }

  /** Apply the next event of the log, or a piece of live text (`seq` is null). */
  apply(event) {
    if (event.type === "llm.delta" || event.type === "subagent.output_chunk") {
      this.#delta(event);
      return;
    }
    if (event.seq == null || event.seq <= this.last) return;
    this.last = event.seq;
    this.events.push(event);
    const at = Date.parse(event.at);
    this.now = Math.max(this.now, at);
    if (event.type.startsWith("run.")) this.#run(event, at);
    else if (event.type.startsWith("message.")) this.#message(event.type, event.data);
    else if (event.type === "warning") this.warnings.push(event);
    else if (event.type.startsWith("node.")) this.#node(event, at);
    else if (event.type === "edge.decided") this.decisions.push(event.data);
    else if (event.agent != null || event.task_id != null) this.#task(event, at);
  }

  /** The text of an event: `content`, or that of the answer which it refers to. */
  textOf(data) {
    if (data.content != null) return data.content;
    if (data.output != null) return data.output;
    const answer = data.answer_seq && this.events[data.answer_seq - 1];
    return answer?.data.output ?? "";
  }

  get output() {
    const ended = this.events.at(-1);
    return ended && FINAL[ended.type] ? this.textOf(ended.data) : "";
  }

  /** Tasks in the order of a tree: each one before those that it called. */
  tree() {
    const children = Map.groupBy(this.tasks.values(), ({ parent }) => (this.tasks.has(parent) ? parent : null));
    const rows = [];
    const open = [...(children.get(null) ?? [])].reverse().map((task) => [task, 0]);
    while (open.length) {
      const [task, depth] = open.pop();
      rows.push({ task, depth });
      const below = children.get(task.key) ?? [];
      for (let i = below.length - 1; i >= 0; i--) open.push([below[i], depth + 1]);
    }
    return rows;
  }

  #run({ type, data }, at) {
    if (type === "run.queued") this.queuedAt = at;
    else if (type === "run.started" || type === "run.resumed") {
      this.status = "running";
      this.attempt = data.attempt;
      this.startedAt ??= at;
      for (const task of this.tasks.values()) {
        task.live = null;
        for (const span of task.spans) if (span.kind === "wait") span.to ??= at;
        if (task.id === null && task.status === "waiting") task.status = "running";
      }
    } else if (type === "run.waiting") {
      this.status = "waiting";
      this.waitsFor = data.reason;
      for (const task of this.tasks.values()) {
        if (task.id !== null || isFinal(task.status)) continue;
        task.status = "waiting";
        if (task.spans.every(({ to }) => to !== null)) task.spans.push({ kind: "wait", from: at, to: null, label: "" });
      }
    } else if (FINAL[type]) {
      this.status = FINAL[type];
      this.endedAt = at;
      this.error = data.error ?? null;
      this.usage = data.usage ?? null;
      for (const task of this.tasks.values()) {
        task.live = null;
        for (const span of task.spans) span.to ??= at;
        if (!isFinal(task.status)) this.#end(task, this.status, at);
      }
      for (const each of this.interrupts.values()) if (each.status === "pending") each.status = "cancelled";
    }
  }

  #find(event) {
    const key = event.task_id ?? `@${event.agent}`;
    let task = this.tasks.get(key);
    if (!task) {
      const first = this.tasks.values().next().value;
      const root = first && first.id === null && event.task_id !== null ? first.key : null;
      task = {
        key, id: event.task_id, agent: event.agent, parent: event.parent_task_id ?? root, title: "",
        status: "running", queuedAt: null, startedAt: null, endedAt: null, spans: [], calls: [],
        tools: [], received: [], prompt: "", output: null, error: null, usage: null, live: null,
        isAsync: false, tokens: 0, cost: { amount: 0, currency: "USD", complete: true },
      };
      this.tasks.set(key, task);
    }
    return task;
  }

  #task(event, at) {
    const task = this.#find(event);
    const { type, data } = event;
    const [area, what] = type.split(".");
    if (area === "agent") this.#agent(task, what, data, at);
    else if (area === "llm") this.#model(task, what, data, at);
    else if (area === "tool") this.#tool(task, what, data, at, event.seq);
    else if (area === "subagent") this.#dispatched(task, what, data, at);
    else if (area === "interrupt") this.#interrupt(task, what, data, at);
    else if (type === "memory.injected") {
      const flow = { seq: event.seq, at, source: data.edge?.[0] ?? data.source, target: task.node ?? task.agent,
        version: data.version, data };
      this.flows.push(flow);
      task.received.push(flow);
    } else if (type === "memory.published") {
      this.published.push({ agent: data.node ?? task.agent, version: data.version, at, data });
    } else if (type === "context.recalled") {
      const item = { seq: event.seq, at, source: data.source, target: task.agent, version: data.version, data,
        isRecalled: true };
      this.recalled.push(item);
      task.received.push(item);
    }
  }

  /** A node of a graph that decides; one that is no agent is shown as a task of its name. */
  #node(event, at) {
    const { type, data } = event;
    const status = type === "node.started" ? "running" : type.slice("node.".length);
    this.nodes.set(data.node, { status, reason: data.reason ?? null });
    if (event.task_id == null) return;
    const task = this.#find(event);
    task.node = data.node;
    task.startedAt ??= at;
    if (event.agent != null) return;
    task.agent = data.node;
    task.error = data.error ?? null;
    if (status !== "running") this.#end(task, status, at);
  }

  #agent(task, what, data, at) {
    if (what === "started") {
      task.startedAt ??= at;
      if (task.status === "queued") task.status = "running";
    } else if (what === "waiting" || what === "resumed") {
      task.status = what === "waiting" ? "waiting" : "running";
    } else {
      task.output = data.output ?? task.output;
      task.usage = data.usage ?? task.usage;
      task.error = data.error ?? null;
      if (!task.isAsync) this.#end(task, what === "completed" ? "completed" : "failed", at);
    }
  }

  #end(task, status, at) {
    task.status = status;
    task.endedAt = at;
    task.live = null;
    for (const span of task.spans) span.to ??= at;
  }

  #model(task, what, data, at) {
    let call = task.calls.find((each) => each.call === data.call);
    if (what === "started") {
      for (const span of task.spans) if (PARTS_OF_CALL.has(span.kind)) span.to ??= at;
      if (!call) task.calls.push((call = { call: data.call, at }));
      Object.assign(call, { model: data.model, provider: data.provider, attempt: data.attempt, memory: data.memory });
      task.startedAt ??= at;
      task.spans.push({ kind: "model", from: at, to: null, label: data.model });
      task.live = { call: data.call, attempt: data.attempt, text: "" };
      return;
    }
    const span = task.spans.findLast((each) => each.kind === "model");
    if (span) span.to ??= at;
    if (!call) return;
    if (what === "completed") {
      Object.assign(call, { message: data.message, usage: data.usage, ms: data.duration_ms, tries: data.try });
      task.tokens += data.usage.input + data.usage.output;
      task.cost.amount += Number(data.usage.cost.amount);
      task.cost.complete &&= data.usage.cost.complete;
      task.live = null;
    } else if (what === "failed") {
      call.error = data.error;
      const isHeld = data.error.code in HELD_BACK; // the try was not sent
      const about = { label: `${data.provider ?? "default"}/${data.model}`, error: data.error };
      if (span) Object.assign(span, isHeld ? { kind: "held", ...about } : { error: data.error });
      if (data.retry_in_ms == null) task.live = null;
      else task.spans.push({ kind: isHeld ? "held" : "retry", from: at, to: null, ...about });
    } else if (what === "cancelled") task.live = null;
  }

  #tool(task, what, data, at, seq) {
    const same = (each) => each.call === data.call && each.id === data.tool_call_id;
    let tool = task.tools.findLast(same);
    if (what === "started") {
      if (tool?.status !== "asked") task.tools.push((tool = { call: data.call, id: data.tool_call_id }));
      Object.assign(tool, { name: data.name, arguments: data.arguments, status: "running", from: at, to: null, seq });
      task.spans.push({ kind: "tool", from: at, to: null, label: data.name, id: `${data.call}:${data.tool_call_id}` });
      return;
    }
    if (!tool) return;
    const status = data.error?.type === "denied" ? "denied" : what;
    Object.assign(tool, { status, to: at, result: data.result, error: data.error, answerSeq: data.answer_seq });
    const span = task.spans.findLast((each) => each.id === `${data.call}:${data.tool_call_id}`);
    if (span) Object.assign(span, { to: at, error: status === "failed" ? data.error : null });
  }

  #dispatched(task, what, data, at) {
    if (what === "backpressure") return;
    task.isAsync = true;
    if (what === "dispatched") {
      Object.assign(task, { queuedAt: at, status: "queued", prompt: data.prompt });
      task.title = data.metadata?.title ?? "";
    } else if (what === "dequeued") {
      task.startedAt = at;
      task.status = "running";
    } else if (what === "status_changed") task.status = data.to;
    else if (what === "resumed") task.status = "queued";
    else if (ENDED.has(what)) {
      task.usage = data.token_usage ?? task.usage;
      task.error = data.error ?? null;
      this.#end(task, what, at);
    }
  }

  #interrupt(task, what, data, at) {
    if (what === "created") {
      this.interrupts.set(data.interrupt_id,
        { ...data, id: data.interrupt_id, task: task.key, agent: task.agent, status: "pending", at });
      task.spans.push({ kind: "person", from: at, to: null, label: data.tool, id: data.interrupt_id });
      return;
    }
    const asked = this.interrupts.get(data.interrupt_id);
    if (asked) Object.assign(asked, { status: data.status, resolution: data.resolution, by: data.by, resolvedAt: at });
    const span = task.spans.findLast((each) => each.id === data.interrupt_id);
    if (span) span.to = at;
    const waits = [...this.interrupts.values()].some((each) => each.status === "pending");
    if (this.status === "waiting" && !waits) this.status = "queued";
  }

  #message(type, { message_id: id, content }) {
    const known = this.messages.find((each) => each.id === id);
    const delivered = type === "message.delivered";
    if (!known) this.messages.push({ id, content, delivered });
    else if (delivered) Object.assign(known, { content, delivered: true });
  }

  #delta(event) {
    const task = this.tasks.get(event.task_id ?? `@${event.agent}`);
    const { call, attempt, offset, text } = event.data;
    if (!task?.live || task.live.call !== call || attempt < task.live.attempt) return;
    const had = task.live.text;
    // Offsets count code points; a text without surrogates has as many units.
    const kept = offset >= had.length ? had : [...had].slice(0, offset).join("");
    task.live = { call, attempt, text: kept + text };
  }
}
