/** A difference as rows of two columns, and the parts of two lines that differ. Pure. */
import { lineDiff } from "../parts/line_diff.js";

/** Rows `{kind, before, after}` of lines `{kind: "same" | "removed" | "added" | "gap", line}`; null: no line. */
function paired(lines) {
  const rows = [];
  let removed = [], added = [];
  const flush = () => {
    for (let i = 0; i < Math.max(removed.length, added.length); i++) {
      rows.push({ kind: "changed", before: removed[i] ?? null, after: added[i] ?? null });
    }
    removed = [];
    added = [];
  };
  for (const { kind, line } of lines) {
    if (kind === "removed") {
      if (added.length) flush();
      removed.push(line);
    } else if (kind === "added") added.push(line);
    else {
      flush();
      rows.push({ kind, before: line, after: line });
    }
  }
  flush();
  return rows;
}

const SIGNS = { "-": "removed", "+": "added", "@": "gap" };

/** The rows of a unified diff; `kind: "gap"` between hunks. */
export function rowsOf(diff) {
  const lines = diff.split("\n").slice(2).map((line) => {
    const kind = SIGNS[line[0]] ?? "same";
    return { kind, line: kind === "gap" ? null : line.slice(1) };
  });
  return paired(lines.filter(({ kind }, place) => kind !== "gap" || place > 0));
}

/** The rows of two texts, line by line. */
export const rowsOfTexts = (before, after) => paired(lineDiff(before, after));

/** The parts of two lines: what they share at their start, what differs, what they share at their end. */
export function parts(before, after) {
  const old = words(before), now = words(after);
  const most = Math.min(old.length, now.length);
  let start = 0, end = 0;
  while (start < most && old[start] === now[start]) start++;
  while (end < most - start && old.at(-1 - end) === now.at(-1 - end)) end++;
  const cut = (all) => [all.slice(0, start), all.slice(start, all.length - end), all.slice(all.length - end)]
    .map((some) => some.join(""));
  return [cut(old), cut(now)];
}

const words = (line) => line.split(/(?<=\s)|(?=\s)/);
