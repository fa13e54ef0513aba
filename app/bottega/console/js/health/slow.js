/** Which agents are far slower than the others. Pure. */
import { count } from "../format.js";

/** Agents with fewer runs than this say nothing about time. */
const LEAST_RUNS = 5;
/** An agent is slow if 95 % of its runs take less than a time that is so many times that of the agent in the middle. */
const FAR = 5;

/** Agents by the time in which 95 % of their runs end, the longest first. */
export const slowestFirst = (items) => items.toSorted((a, b) => (b.duration_p95 ?? 0) - (a.duration_p95 ?? 0));

/**
 * "slow: 90 times the other agents' middle"; "": it is not slow, or there is too little to compare it with.
 *
 * @param {string} key the agent
 * @param {any[]} items as of `GET /v1/metrics/totals` by agent
 */
export function slownessOf(key, items) {
  const measured = slowestFirst(items.filter((each) => each.runs >= LEAST_RUNS && each.duration_p95));
  const own = measured.find((each) => each.key === key);
  const others = measured.filter((each) => each.key !== key);
  if (!own || others.length < 2) return "";
  const times = own.duration_p95 / others[Math.floor((others.length - 1) / 2)].duration_p95;
  return times >= FAR ? `slow: ${count(times)} times the other agents' middle` : "";
}
