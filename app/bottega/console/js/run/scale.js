/** The time axis of a run, on which long times without work take little room. */

/** A time without work is squeezed if it is longer than both: ms, and this part of the run's time. */
const LONG_MS = 10_000, LONG_PART = 0.15;
/** How much room a squeezed time takes, as a part of the times with work. */
const ROOM = 0.08;
const WORK = new Set(["model", "tool"]);

/** The long times between `from` and `to` (ms) in which no model and no tool of the tasks worked. */
export function idleTimes(tasks, from, to) {
  const work = [];
  for (const task of tasks) {
    for (const span of task.spans) if (WORK.has(span.kind)) work.push([span.from, span.to ?? to]);
  }
  work.sort((a, b) => a[0] - b[0]);
  const long = Math.max(LONG_MS, LONG_PART * (to - from));
  const found = [];
  let until = from;
  for (const [begin, end] of [...work, [to, to]]) {
    if (begin - until > long) found.push({ from: until, to: begin });
    until = Math.max(until, end);
  }
  return work.length ? found : [];
}

/** A function from a time (ms) to its place on the axis, from 0 to 1; `idle` times are squeezed. */
export function axis(from, to, idle) {
  const idled = idle.reduce((sum, each) => sum + each.to - each.from, 0);
  const room = ROOM * Math.max(1, to - from - idled);
  const whole = Math.max(1, to - from - idled + room * idle.length);
  return (at) => {
    let place = Math.min(Math.max(at, from), to) - from;
    for (const each of idle) {
      if (at <= each.from) break;
      const length = each.to - each.from;
      const passed = Math.min(at, each.to) - each.from;
      place += (room * passed) / length - passed;
    }
    return place / whole;
  };
}
