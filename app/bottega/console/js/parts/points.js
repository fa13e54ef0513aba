/** Points of charts. Pure. */

/**
 * Series without the points before `first`, so that a chart of a young installation is no line at its right edge.
 *
 * @param {any[]} series each with `points: [{at}]`, all with the same times
 * @param {string} [first] missing: all points stay
 */
export function fromFirst(series, first) {
  const times = series[0]?.points.map(({ at }) => Date.parse(at)) ?? [];
  const place = first ? times.findLastIndex((at) => at <= Date.parse(first)) : 0;
  const begin = Math.max(0, Math.min(place, times.length - 2)); // a line has two points
  return series.map((each) => ({ ...each, points: each.points.slice(begin) }));
}
