/**
 * The state of a run after some of its events. Pure: the same events give the same state.
 *
 * A task is one query of an agent: the query of the run's agent, a call of a sub-agent, or a dispatched task. A task's
 * key is the task's id, or "@agent" for an agent of the run itself.
 */

import { HELD_BACK } from "../en.js";

/** @import { EventOf, IsLive, IsOf, KnownEvent, LiveText } from "./events" */

/** The status of a run by its last event. */
export const FINAL = { "run.completed": "completed", "run.failed": "failed", "run.timeout": "timeout",
  "run.cancelled": "cancelled" };
/** Kinds of a task's spans that end when its model is called again. */
const PARTS_OF_CALL = new Set(["model", "retry", "held"]);
const ENDED = new Set(["completed", "failed", "timeout", "cancelled"]);

export const isFinal = (status) => ENDED.has(status);

const isLive = /** @type {IsLive} */ (({ type }) => type === "llm.delta" || type === "subagent.output_chunk");
const isOf = /** @type {IsOf} */ ((event, area) => event.type.startsWith(`${area}.`));

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

  /**
   * Apply the next event of the log, or a piece of live text (`seq` is null).
   *
   * @param {KnownEvent | LiveText} event
   */
  apply(event) {
    if (isLive(event)) {
      this.#delta(event);
      return;
    }
    if (event.seq == null || event.seq <= this.last) return;
    this.last = event.seq;
    this.events.push(event);
    const at = Date.parse(event.at);
    this.now = Math.max(this.now, at);
    if (isOf(event, "run")) this.#run(event, at);
    else if (isOf(event, "message")) this.#message(event);
    else if (event.type === "warning") this.warnings.push(event);
    else if (isOf(event, "node")) this.#node(event, at);
    else if (event.type === "edge.decided") this.decisions.push(event.data);
    else if (event.agent != null || event.task_id != null) this.#task(event, at);
  }

  /** The text of an event: `content`, or the text of the answer to which the event refers. */
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

  /** Tasks in the order of a tree: each task before the tasks that it called. */
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

  /** @param {EventOf<"run">} event */
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

  /** @param {KnownEvent} event */
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

  /** @param {KnownEvent} event */
  #task(event, at) {
    const task = this.#find(event);
    if (isOf(event, "agent")) this.#agent(event, task, at);
    else if (isOf(event, "llm")) this.#model(event, task, at);
    else if (isOf(event, "tool")) this.#tool(event, task, at);
    else if (isOf(event, "subagent")) this.#dispatched(event, task, at);
    else if (isOf(event, "interrupt")) this.#interrupt(event, task, at);
    else if (event.type === "memory.injected") {
      const { data } = event;
      const flow = { seq: event.seq, at, source: data.edge?.[0] ?? data.source, target: task.node ?? task.agent,
        version: data.version, data };
      this.flows.push(flow);
      task.received.push(flow);
    } else if (event.type === "memory.published") {
      const { data } = event;
      this.published.push({ agent: data.node ?? task.agent, version: data.version, at, data });
    } else if (event.type === "context.recalled") {
      const { data } = event;
      const item = { seq: event.seq, at, source: data.source, target: task.agent, version: data.version, data,
        isRecalled: true };
      this.recalled.push(item);
      task.received.push(item);
    }
  }

  /**
   * A node of a graph with decisions; a node without an agent is shown as a task with the node's name.
   *
   * @param {EventOf<"node">} event
   */
  #node(event, at) {
    const { type, data } = event;
    const status = type === "node.started" ? "running" : type.slice("node.".length);
    this.nodes.set(data.node, { status, reason: type === "node.skipped" ? data.reason : null });
    if (event.task_id == null) return;
    const task = this.#find(event);
    task.node = data.node;
    task.startedAt ??= at;
    if (event.agent != null) return;
    task.agent = data.node;
    task.error = type === "node.failed" ? data.error : null;
    if (status !== "running") this.#end(task, status, at);
  }

  /** @param {EventOf<"agent">} event */
  #agent({ type, data }, task, at) {
    if (type === "agent.started") {
      task.startedAt ??= at;
      if (task.status === "queued") task.status = "running";
    } else if (type === "agent.waiting" || type === "agent.resumed") {
      task.status = type === "agent.waiting" ? "waiting" : "running";
    } else {
      const isAnswered = type === "agent.completed";
      if (isAnswered) task.output = data.output;
      task.usage = data.usage ?? task.usage;
      task.error = type === "agent.failed" ? data.error : null;
      if (!task.isAsync) this.#end(task, isAnswered ? "completed" : "failed", at);
    }
  }

  #end(task, status, at) {
    task.status = status;
    task.endedAt = at;
    task.live = null;
    for (const span of task.spans) span.to ??= at;
  }

  /** @param {EventOf<"llm">} event */
  #model({ type, data }, task, at) {
    let call = task.calls.find((each) => each.call === data.call);
    if (type === "llm.started") {
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
    if (type === "llm.completed") {
      Object.assign(call, { message: data.message, usage: data.usage, ms: data.duration_ms, tries: data.try });
      task.tokens += data.usage.input + data.usage.output;
      task.cost.amount += Number(data.usage.cost.amount);
      task.cost.complete &&= data.usage.cost.complete;
      task.live = null;
    } else if (type === "llm.failed") {
      call.error = data.error;
      const isHeld = data.error.code in HELD_BACK; // the try was not sent
      const about = { label: `${data.provider ?? "default"}/${data.model}`, error: data.error };
      if (span) Object.assign(span, isHeld ? { kind: "held", ...about } : { error: data.error });
      if (data.retry_in_ms == null) task.live = null;
      else task.spans.push({ kind: isHeld ? "held" : "retry", from: at, to: null, ...about });
    } else if (type === "llm.cancelled") task.live = null;
  }

  /** @param {EventOf<"tool">} event */
  #tool({ type, data, seq }, task, at) {
    const same = (each) => each.call === data.call && each.id === data.tool_call_id;
    let tool = task.tools.findLast(same);
    if (type === "tool.started") {
      if (tool?.status !== "asked") task.tools.push((tool = { call: data.call, id: data.tool_call_id }));
      Object.assign(tool, { name: data.name, arguments: data.arguments, status: "running", from: at, to: null, seq });
      task.spans.push({ kind: "tool", from: at, to: null, label: data.name, id: `${data.call}:${data.tool_call_id}` });
      return;
    }
    if (!tool) return;
    const status = data.error?.type === "denied" ? "denied" : type.slice("tool.".length);
    Object.assign(tool, { status, to: at, result: data.result, error: data.error, answerSeq: data.answer_seq });
    const span = task.spans.findLast((each) => each.id === `${data.call}:${data.tool_call_id}`);
    if (span) Object.assign(span, { to: at, error: status === "failed" ? data.error : null });
  }

  /** @param {EventOf<"subagent">} event */
  #dispatched({ type, data }, task, at) {
    if (type === "subagent.backpressure") return;
    task.isAsync = true;
    if (type === "subagent.dispatched") {
      Object.assign(task, { queuedAt: at, status: "queued", prompt: data.prompt });
      task.title = data.metadata?.title ?? "";
    } else if (type === "subagent.dequeued") {
      task.startedAt = at;
      task.status = "running";
    } else if (type === "subagent.status_changed") task.status = data.to;
    else if (type === "subagent.resumed") task.status = "queued";
    else if ("token_usage" in data) {
      task.usage = data.token_usage;
      task.error = "error" in data ? data.error : null;
      this.#end(task, type.slice("subagent.".length), at);
    }
  }

  /** @param {EventOf<"interrupt">} event */
  #interrupt({ type, data }, task, at) {
    if (type === "interrupt.created") {
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

  /** @param {EventOf<"message">} event */
  #message({ type, data }) {
    const id = data.message_id;
    const known = this.messages.find((each) => each.id === id);
    const delivered = type === "message.delivered";
    const content = type === "message.delivered" ? data.content : undefined;
    if (!known) this.messages.push({ id, content, delivered });
    else if (delivered) Object.assign(known, { content, delivered: true });
  }

  /** @param {LiveText} event */
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
