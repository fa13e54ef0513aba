/** Why runs wait, in the queue or for a model, in one sentence. Pure. */
import { count } from "../format.js";
import { causeOf as errorOf } from "../run/diagnosis.js";

/** Runs that wait for less time are no sign of anything. */
const SOON_MS = 10_000;
/** Runs that wait for so long are a fault. */
const LATE_MS = 60_000;

const sum = (items, of) => items.reduce((total, each) => total + of(each), 0);
const named = (quotas, name) => {
  const { used = 0, limit = null } = quotas.find((each) => each.name === name) ?? {};
  return { used: Number(used), limit: limit === null ? Infinity : Number(limit) };
};

/** Who holds the places: `{text, since}`: "researcher" or "researcher (18), faq (2)", and the start of the longest. */
export function holdersOf(running) {
  const all = [...Map.groupBy(running, ({ agent, graph }) => agent ?? graph)];
  const names = all.sort(([, a], [, b]) => b.length - a.length)
    .map(([name, runs]) => (all.length > 1 ? `${name} (${count(runs.length)})` : name));
  return { text: names.join(", "), since: running.map((each) => each.started_at).filter(Boolean).sort()[0] };
}

/** Causes why runs stay in the queue, and what users can do: `[cause, what]`. */
function causeOf(workers, runs) {
  if (!workers.length) return ["no worker is up", "Start one with bottega worker."];
  if (runs.used >= runs.limit) return [`${count(runs.used)} runs are under way, and no more may be at once (limit
    concurrent_runs)`, "Cancel runs that take too long, or have the operator raise BOTTEGA_CONCURRENT_RUNS."];
  return [`the ${workers.length === 1 ? "worker has" : `${count(workers.length)} workers have`} not claimed them, with
    ${count(sum(workers, ({ pool }) => pool.runs))} runs under way`,
  "Start another worker, or cancel runs that take too long."];
}

/**
 * Runs that wait for a model: `{runs, text}`; null: none. The wait begins again after each try, so it has no time.
 *
 * @param {any[]} waiting as of `GET /v1/scheduler`
 * @param {string} [agent] only its runs
 */
export function modelWaits(waiting, agent) {
  const found = waiting.filter((each) => each.reason === "model" && (!agent || each.agent === agent));
  if (!found.length) return null;
  const runs = sum(found, (each) => each.runs);
  const groups = found.map((each) => `${count(each.runs)} of ${each.agent}${each.error
    ? ` (${errorOf(each.error)})` : ""}`);
  const what = runs === 1 ? "A run waits for a model, and goes on by itself when it answers"
    : `${count(runs)} runs wait for a model, and go on by themselves when it answers`;
  return { runs, text: `${what}: ${groups.join(", ")}.` };
}

/**
 * `{text, isBad, since}`; null: no problem. `since`: time of the oldest waiting run.
 *
 * @param {any} scheduler as of `GET /v1/scheduler`
 * @param {number} now ms
 */
export function queueTrouble({ workers, runs: queued, quotas }, now) {
  const number = sum(queued, (each) => each.queued);
  const since = queued.map((each) => each.oldest_at).sort()[0] ?? null;
  const waiting = named(quotas, "queued_runs");
  const isFull = waiting.used >= waiting.limit;
  if (workers.length && !isFull && (!since || now - Date.parse(since) < SOON_MS)) return null;
  const [cause, what] = causeOf(workers, named(quotas, "concurrent_runs"));
  const full = isFull ? `The queue is full: ${count(waiting.used)} of ${count(waiting.limit)} runs wait (limit
    queued_runs), and new ones are refused with HTTP 429, since ${cause}.`
    : number ? `${number === 1 ? "A run waits" : `${count(number)} runs wait`} in the queue, since ${cause}.`
      : `New runs will wait in the queue, since ${cause}.`;
  const isBad = !workers.length || isFull || (since !== null && now - Date.parse(since) >= LATE_MS);
  return { text: `${full} ${what}`.replace(/\s+/g, " "), isBad, since };
}
