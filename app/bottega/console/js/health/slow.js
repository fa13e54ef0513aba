/** Which agents and models are far slower than the others, or than they usually are. Pure. */
import { count } from "../format.js";

/** Agents with fewer runs than this say nothing about time. */
const LEAST_RUNS = 5;
/**
 * An agent is slow if 95 % of its runs take less than a time that is so many times that of the agent in the middle, or
 * its own of a day.
 */
const FAR = 5;

/** Agents by the time in which 95 % of their runs end, the longest first. */
export const slowestFirst = (items) => items.toSorted((a, b) => (b.duration_p95 ?? 0) - (a.duration_p95 ?? 0));

/**
 * "slow: 90 times the other agents' middle"; "": it is not slow, or there is too little to compare it with.
 *
 * @param {string} key the agent or model
 * @param {any[]} items as of `GET /v1/metrics/totals` by agent or by model
 * @param {string} [what] "agents" or "models"
 */
export function slownessOf(key, items, what = "agents") {
  const measured = slowestFirst(items.filter((each) => each.runs >= LEAST_RUNS && each.duration_p95));
  const own = measured.find((each) => each.key === key);
  const others = measured.filter((each) => each.key !== key);
  if (!own || others.length < 2) return "";
  const times = own.duration_p95 / others[Math.floor((others.length - 1) / 2)].duration_p95;
  return times >= FAR ? `slow: ${count(times)} times the other ${what}' middle` : "";
}

/**
 * Those that are slow now, the slowest first: `[{key, now, day, why}]`, in seconds. `day`: null if the day has hardly
 * more runs than the last minutes; then the others are what it is compared with.
 *
 * @param {any[]} now totals of the last minutes, by agent or by model
 * @param {any[]} days totals of a day
 * @param {string} what "agents" or "models"
 */
export function slowNow(now, days, what) {
  return slowestFirst(now.filter(({ runs, duration_p95: p95 }) => runs >= LEAST_RUNS && p95)).flatMap((each) => {
    const usual = days.find(({ key, runs }) => key === each.key && runs >= 2 * each.runs);
    const day = usual?.duration_p95 ?? null;
    const times = day && each.duration_p95 / day;
    const why = !day ? slownessOf(each.key, now, what) : times >= FAR ? `slow: ${count(times)} times its own day` : "";
    return why ? [{ key: each.key, now: each.duration_p95, day, why }] : [];
  });
}
