/** Agents and models that are much slower than before. Pure. */

/** Minimum number of runs for a comparison of times. */
const LEAST_RUNS = 5;
/** An agent or model is slow if it takes this many times as long as before. */
const FAR = 5;
/** Minimum difference in seconds: users do not notice a smaller difference. */
const LEAST_S = 1;

/** Agents by the time in which 95 % of their runs end, the longest time first. */
export const slowestFirst = (items) => items.toSorted((a, b) => (b.duration_p95 ?? 0) - (a.duration_p95 ?? 0));

/** A call in progress for less than this time is not slow. */
const LONG_MS = 5000;
/** Minimum number of answered calls for a usual duration. */
const LEAST_CALLS = 5;

/**
 * Servers with a call in progress that takes much longer than usual: `[{name, number, since, usual_ms}]`.
 *
 * @param {any[]} servers as of `GET /v1/provider-health`
 * @param {number} now ms
 */
export const stuckOf = (servers, now) => servers.flatMap(({ name, calls, recent }) => {
  const usual = recent.duration_p50_ms, answered = recent.calls - recent.failed;
  const isLong = calls.oldest_at && answered >= LEAST_CALLS
    && now - Date.parse(calls.oldest_at) >= Math.max(LONG_MS, FAR * usual);
  return isLong ? [{ name, number: calls.under_way, since: calls.oldest_at, usual_ms: usual }] : [];
});

const runsOf = (points) => points.reduce((sum, { runs }) => sum + runs, 0);

/** The median of medians; each median counts as often as its number of runs. */
function medianOf(points) {
  let left = runsOf(points) / 2;
  return points.toSorted((a, b) => a.value - b.value).find(({ runs }) => (left -= runs) <= 0)?.value;
}

/**
 * The time since which an agent or model is slower than before: `{since, now, before}`, medians in seconds; null: not
 * slow, or too few runs. `since` is null if all minutes are slow.
 *
 * @param {{at: string | null, value: number | null, runs: number | null}[]} points oldest first; `at` of the first may
 *   be null: this point is the day before
 */
export function slowSince(points) {
  const ran = points.filter(({ value, runs }) => value !== null && runs);
  const newest = ran.slice(ran.findLastIndex((_, place) => runsOf(ran.slice(place)) >= LEAST_RUNS));
  for (let place = 1; place < ran.length; place++) {
    const past = ran.slice(0, place), since = ran.slice(place);
    if (runsOf(past) < LEAST_RUNS || runsOf(since) < LEAST_RUNS) continue;
    const before = medianOf(past), least = Math.max(LEAST_S, FAR * before);
    if ([ran[place].value, medianOf(since), medianOf(newest)].every((value) => value >= least)) {
      return { since: past[0].at === null && place === 1 ? null : ran[place].at, now: medianOf(newest), before };
    }
  }
  return null;
}
