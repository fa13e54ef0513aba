/** Which agents and models are far slower than they were. Pure. */

/** Fewer runs than these say nothing about time. */
const LEAST_RUNS = 5;
/** What takes so many times as long as before is slow. */
const FAR = 5;
/** Nobody notices less. */
const LEAST_S = 1;

/** Agents by the time in which 95 % of their runs end, the longest first. */
export const slowestFirst = (items) => items.toSorted((a, b) => (b.duration_p95 ?? 0) - (a.duration_p95 ?? 0));

/** Calls under way for less time than this are usual. */
const LONG_MS = 5000;
/** So many answered calls tell what is usual. */
const LEAST_CALLS = 5;

/**
 * Servers of which a call is under way far longer than usual, before any run ends: `[{name, number, since, usual_ms}]`.
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

/** The median of points that are medians, each counted as often as it has runs. */
function medianOf(points) {
  let left = runsOf(points) / 2;
  return points.toSorted((a, b) => a.value - b.value).find(({ runs }) => (left -= runs) <= 0)?.value;
}

/**
 * Since when one is slow, by its own past: `{since, now, before}`, medians in seconds; null: it is not, or too little
 * ran to say so. `since` is null if it is slow in all minutes.
 *
 * @param {{at: string | null, value: number | null, runs: number | null}[]} points oldest first; `at` of the first may
 *   be null: it stands for the day before
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
