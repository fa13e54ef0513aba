/** The reason of a run's state, in one sentence that rules make from the run's log. Pure. */
import { HELD_BACK, JUDGES, LONG_WORK, MEMORY_DRAWS, MODEL_ERRORS, OUTCOME_WORDS, RUN_ERRORS,
  WAITED_FOR } from "../en.js";
import { ago, count, duration, excerpt, stopAfter } from "../format.js";
import { isFinal } from "./state.js";

/** If a part takes at least this share of a run's time, the sentence names the part. */
const MOST_OF_IT = 0.5;
const ALIKE_MS = 3_600_000;

const WORDS = ["", "once", "twice", "three times", "four times", "five times", "six times"];
export const times = (number) => WORDS[number] ?? `${count(number)} times`;
const statusOf = (error) => /HTTP \d{3}/.exec(error.message)?.[0];
const saidOf = (error) => /It said: (.*)/s.exec(error.message)?.[1];

/** True if the last try was not sent, because the model had failed before or is at its limits. */
const isHeldBack = (error) => error.code in HELD_BACK || error.message.includes("keeps failing");

/** The failure of a model's server, in words. */
export function didOf(error) {
  const status = statusOf(error);
  if (error.code === "model_limited") return "was at the limits of its server";
  if (isHeldBack(error) && !status) return "keeps failing";
  const code = /^model_/.test(error.last_code ?? "") ? error.last_code : error.code;
  const words = MODEL_ERRORS[code] ?? "failed";
  if (!status) return words;
  const refused = /^HTTP 4/.test(status) && saidOf(error);
  return `answered ${status}${refused ? `: ${excerpt(refused, 160)}` : ""}`;
}

/** The cause of a run's error in a few words, for lists. Similar errors have the same words. */
export function causeOf(error) {
  if (!error) return "";
  if (error.code?.startsWith("model_")) return `model ${didOf(error)}`;
  return RUN_ERRORS[error.code] ?? excerpt(error.message ?? error.code, 90);
}

/** Who judged a run: "people", or "people (key:3f2a)" with a person's name. */
export const judgeOf = ({ judged_by: by }) => by && `${JUDGES[by.source]}${by.author ? ` (${by.author})` : ""}`;

/** The outcome of a run, with source and reason. */
export const judgedOf = (run) => `is ${OUTCOME_WORDS[run.outcome.value]}, by ${judgeOf(run)}${run.outcome.reason
  ? `: ${run.outcome.reason}` : ""}`;

/**
 * Whether a run had memory: by random choice, or the reason why there was no choice.
 *
 * @param {{memory_draw?: string | null, memory_used?: string, ended_at?: string | null}} run
 */
export const memoryOf = ({ memory_draw: draw, memory_used: used = "", ended_at: end }) => MEMORY_DRAWS[draw]
  ?? (used === "off" || used.startsWith("none") ? "off" : end ? "no pattern" : "–");

/** The last failed call without an answer: the model's failure and the number of tries; null: no such call. */
function failedCall(state) {
  const isAnswered = ({ task_id: task, agent, data }) =>
    state.tasks.get(task ?? `@${agent}`)?.calls.find(({ call }) => call === data.call)?.message;
  const last = state.events.findLast((each) => each.type === "llm.failed" && !isAnswered(each));
  if (!last) return null;
  const isSameCall = ({ type, task_id: task, agent, data }) =>
    type === "llm.failed" && task === last.task_id && agent === last.agent && data.call === last.data.call;
  const tries = state.events.filter(isSameCall).map(({ data }) => data).filter((each) => !isHeldBack(each.error));
  const { provider, model, error } = tries.at(-1) ?? last.data;
  const isSame = (each) => each.provider === provider && each.model === model && didOf(each.error) === didOf(error);
  const same = tries.filter(isSame);
  const name = `${provider ?? "default"}/${model}`;
  return same.length ? `${name} ${didOf(error)} ${times(same.length)}`
    : `calls are held back, because ${name} ${HELD_BACK[error.code] ?? "keeps failing"}`;
}

/** The tool that failed most often, with its last error; "": no tool failed. */
export function failedTool(state) {
  const failed = [...state.tasks.values()].flatMap(({ tools }) => tools.filter(({ status }) => status === "failed"));
  const [calls] = [...Map.groupBy(failed, ({ name }) => name).values()].sort((a, b) => b.length - a.length);
  return calls ? `the tool ${calls[0].name} failed ${times(calls.length)}: ${
    excerpt(calls.at(-1).error?.message, 160)}` : "";
}

/** Whether a call was denied, by a person or because nobody decided in time. */
const isDenied = ({ kind, status, resolution }) => kind === "approval"
  && (status === "expired" || resolution?.decision === "deny");

/** The last denied call: by whom and why, and the number of other denied calls. */
function deniedCall(state) {
  const denied = [...state.interrupts.values()].filter(isDenied);
  if (!denied.length) return "";
  const { tool, status, resolution, by } = denied.at(-1);
  const others = denied.length > 1 ? `${count(denied.length)} calls were denied, the last: ` : "";
  if (status === "expired") return `${others}${tool} was denied, since nobody decided in time`;
  const why = resolution.comment ? `: "${excerpt(resolution.comment, 160)}"` : "";
  return `${others}${tool} was denied by ${by?.name ?? "a person"}${why}`;
}

/** The model, tool or person that took most of a run's time. */
function slowest(state, total, now) {
  const sums = new Map();
  for (const task of state.tasks.values()) {
    for (const { kind, label, error, from, to } of task.spans) {
      if (!LONG_WORK[kind] && kind !== "held") continue;
      const key = `${kind} ${label}`;
      const sum = sums.get(key) ?? { kind, label, error, ms: 0, most: 0, number: 0 };
      const ms = (to ?? now) - from;
      sums.set(key, { ...sum, ms: sum.ms + ms, most: Math.max(sum.most, ms), number: sum.number + 1 });
    }
  }
  const [first] = [...sums.values()].sort((a, b) => b.ms - a.ms);
  if (!first || first.ms < MOST_OF_IT * total) return "";
  const time = duration(Math.min(first.ms, total));
  if (first.kind === "held") return `${time} of it held back, because ${first.label} ${HELD_BACK[first.error.code]}`;
  const longest = first.number > 1 ? `, the longest ${duration(first.most)}` : "";
  const [one, several] = LONG_WORK[first.kind];
  if (first.kind === "person") {
    const words = first.number === 1 ? one : `${several} ${count(first.number)} calls of`;
    return `waited ${time} ${words} ${first.label}${longest}`;
  }
  const work = `${first.number === 1 ? one : `${count(first.number)} ${several}`} ${first.label}`;
  return `${time} of it in ${work}${longest}`;
}

/** The call that waits for its next try; null: no call waits. */
function retried(state) {
  const isRetried = ({ live, calls }) => live && calls.at(-1)?.error && !calls.at(-1).message;
  return [...state.tasks.values()].some(isRetried) ? failedCall(state) : null;
}

function unfinished(state, now) {
  if (state.status === "waiting") {
    const asked = [...state.interrupts.values()].filter((each) => each.status === "pending");
    const failed = ["model", "time"].includes(state.waitsFor) ? failedCall(state) : null;
    const on = asked.length ? `, who decides on ${asked.map((each) => each.tool).join(", ")}` : "";
    const doing = state.waitsFor === "time" ? "Pauses before the next try"
      : `Waits for ${WAITED_FOR[state.waitsFor] ?? state.waitsFor}`;
    return `${doing}${on}${failed ? `: ${failed}` : ""}.`;
  }
  if (state.queuedAt === null) return "Its log is not read yet.";
  if (!state.startedAt) return `Waits in the queue for ${duration(now - state.queuedAt)}.`;
  const again = retried(state);
  return again ? `Tries again: ${again}.` : `Works for ${duration(now - state.startedAt)}.`;
}

/** An event with its reason, if the reason is known; a reason may end with a full stop. */
const sentence = (what, why = "") => {
  const text = `${what}${why ? `: ${why}` : ""}`;
  return `${text}${stopAfter(text)}`;
};

function neverStarted({ status, error }, after) {
  const isLate = error?.code === "queue_timeout";
  const ended = status === "cancelled" ? "Cancelled" : "Never started";
  const why = isLate ? "no worker claimed it" : error?.message;
  return { text: sentence(`${ended} ${after} in the queue`, why), place: isLate ? "scheduler" : "" };
}

/**
 * Return `{text, place, trouble}`: the sentence; the part of Operations with more information; and the tool that
 * failed although the run completed; "": none. `now`: ms.
 *
 * @returns {{text: string, place: string, trouble?: string}}
 */
export function diagnose(state, now) {
  if (!isFinal(state.status)) return { text: unfinished(state, now), place: retried(state) ? "providers" : "" };
  const total = state.endedAt - (state.startedAt ?? state.queuedAt);
  const after = `after ${duration(total)}`;
  if (!state.startedAt) return neverStarted(state, after);
  const took = slowest(state, total, state.endedAt);
  const tool = [deniedCall(state), failedTool(state)].filter(Boolean).join("; ");
  if (state.status === "completed") {
    const notes = [deniedCall(state), total > 5000 && took].filter(Boolean).join("; ");
    return { text: sentence(`Completed ${after}${notes ? `; ${notes}` : ""}`), place: "", trouble: failedTool(state) };
  }
  if (state.status === "cancelled") return { text: `Cancelled ${after}.`, place: "" };
  const call = failedCall(state);
  if (state.status === "timeout") {
    const why = [took, call].filter(Boolean).join("; ");
    return { text: sentence(`Out of time ${after}`, why), place: call ? "providers" : "" };
  }
  const isModel = state.error?.code?.startsWith("model_");
  if (isModel && call) return { text: `Failed ${after}: ${call}.`, place: "providers" };
  const own = (isModel && causeOf(state.error)) || RUN_ERRORS[state.error?.code] || state.error?.message;
  const why = [own?.replace(/\.$/, ""), tool].filter(Boolean).join("; "); // the run's own error is the reason
  return { text: sentence(`Failed ${after}`, why || "no reason is known"), place: "" };
}

/** Other failed runs with the same cause, at most an hour apart. `runs`: as of `GET /v1/runs`. */
export function alike(run, runs) {
  const at = Date.parse(run.ended_at);
  return runs.filter((each) => each.id !== run.id && causeOf(each.error) === causeOf(run.error)
    && Math.abs(Date.parse(each.ended_at) - at) < ALIKE_MS);
}

/** A sentence, if runs of an agent fail since its current version and not before; otherwise "". */
export function brokenVersion(run, runs, version) {
  const over = runs.filter((each) => ["completed", "failed", "timeout"].includes(each.status));
  const [since, before] = [true, false].map((isSince) =>
    over.filter((each) => Date.parse(each.created_at) >= Date.parse(version.created_at) === isSince));
  const bad = (list) => list.filter((each) => each.status !== "completed").length;
  const rate = (list) => bad(list) / list.length;
  const isSince = since.some((each) => each.id === run.id);
  if (!before.length || !isSince || rate(since) < 2 * rate(before) + 0.2) return "";
  return `Since version ${version.version} of ${run.agent}, stored ${ago(version.created_at)},`
    + ` ${count(bad(since))} of its ${count(since.length)} runs failed;`
    + ` of the ${count(before.length)} before it ${count(bad(before))}.`;
}
