/** Progress of the tasks of a run. Pure. */
import { count } from "../format.js";

/** The count in which a task of each status is included. */
export const PART_OF = { queued: "waiting", running: "running", streaming: "running", waiting: "waiting",
  completed: "done", failed: "failed", timeout: "failed", cancelled: "failed" };
/** Below this number of tasks there is no picture of their progress, and no search among them. */
export const FEW = 8;
/** Number of done tasks from which on the time of the others is estimated. */
const ESTIMATE_FROM = 3;

/** "3 failed · 2 running" */
export const countsText = (counts) => Object.entries(counts).filter(([, number]) => number)
  .map(([part, number]) => `${count(number)} ${part}`).join(" · ");

/**
 * The dispatched tasks, counted as in `tasks` of `GET /v1/runs/{id}`; `leftMs` until all are over: null if it is not
 * known.
 */
export function progressOf(state) {
  const tasks = [...state.tasks.values()].filter(({ queuedAt }) => queuedAt);
  const counts = { done: 0, failed: 0, running: 0, waiting: 0 };
  for (const { status } of tasks) counts[PART_OF[status]] += 1;
  const over = counts.done + counts.failed, total = tasks.length;
  const first = tasks.reduce((least, { queuedAt }) => Math.min(least, queuedAt), Infinity);
  const last = tasks.reduce((most, { endedAt }) => Math.max(most, endedAt ?? 0), 0);
  const leftMs = counts.done < ESTIMATE_FROM ? null : Math.round((last - first) / over * (total - over));
  return { counts, over, total, leftMs };
}
