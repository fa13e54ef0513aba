/** The difference of two texts, line by line. Pure. */

/** Lines of each side that are compared: the time grows with their product. */
const MOST = 400;

/** `[{kind: "same" | "removed" | "added", line}]`. */
export function lineDiff(before, after) {
  const [old, next] = [before.split("\n"), after.split("\n")];
  let head = 0;
  while (head < old.length && head < next.length && old[head] === next[head]) head++;
  let tail = 0;
  while (tail < old.length - head && tail < next.length - head && old.at(-1 - tail) === next.at(-1 - tail)) tail++;
  const same = (lines) => lines.map((line) => ({ kind: "same", line }));
  const middle = changed(old.slice(head, old.length - tail), next.slice(head, next.length - tail));
  return [...same(old.slice(0, head)), ...middle, ...same(tail ? old.slice(-tail) : [])];
}

/** Lines of `lineDiff` that differ, and a few around each; what is left out between them is one line of kind "gap". */
export function nearChanges(lines, around = 3) {
  const isNear = (place) => lines.slice(Math.max(0, place - around), place + around + 1)
    .some(({ kind }) => kind !== "same");
  const shown = lines.map((each, place) => (isNear(place) ? each : { kind: "gap", line: "…" }));
  return shown.filter(({ kind }, place) => kind !== "gap" || shown[place - 1]?.kind !== "gap");
}

/** The difference of lines by their longest common subsequence; of too many, all of both. */
function changed(old, next) {
  const of = (kind, lines) => lines.map((line) => ({ kind, line }));
  if (old.length > MOST || next.length > MOST) return [...of("removed", old), ...of("added", next)];
  const common = Array.from({ length: old.length + 1 }, () => new Uint16Array(next.length + 1));
  for (let i = old.length - 1; i >= 0; i--) {
    for (let j = next.length - 1; j >= 0; j--) {
      common[i][j] = old[i] === next[j] ? common[i + 1][j + 1] + 1 : Math.max(common[i + 1][j], common[i][j + 1]);
    }
  }
  const found = [];
  let i = 0, j = 0;
  while (i < old.length && j < next.length) {
    if (old[i] === next[j]) found.push({ kind: "same", line: old[i++] }), j++;
    else if (common[i + 1][j] >= common[i][j + 1]) found.push({ kind: "removed", line: old[i++] });
    else found.push({ kind: "added", line: next[j++] });
  }
  return [...found, ...of("removed", old.slice(i)), ...of("added", next.slice(j))];
}
