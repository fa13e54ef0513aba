/** A unified diff as two columns, with what changed inside of a line marked. */
import { html } from "../html.js";

/** The rows of a unified diff: `{kind, before, after}`, each line a text or null; `kind: "gap"` between hunks. Pure. */
export function rowsOf(diff) {
  const rows = [];
  let removed = [], added = [], hunks = 0;
  const flush = () => {
    for (let i = 0; i < Math.max(removed.length, added.length); i++) {
      rows.push({ kind: "changed", before: removed[i] ?? null, after: added[i] ?? null });
    }
    removed = [];
    added = [];
  };
  for (const line of diff.split("\n").slice(2)) {
    if (line.startsWith("-")) {
      if (added.length) flush();
      removed.push(line.slice(1));
    } else if (line.startsWith("+")) added.push(line.slice(1));
    else {
      flush();
      if (!line.startsWith("@@")) rows.push({ kind: "same", before: line.slice(1), after: line.slice(1) });
      else if (hunks++) rows.push({ kind: "gap", before: null, after: null });
    }
  }
  flush();
  return rows;
}

/** The parts of two lines: what they share at their start, what differs, what they share at their end. Pure. */
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

/** A line of a column; the element `tag` (`del` or `ins`) marks the part that only this line has. */
function Line({ row, side, tag }) {
  const text = row[side];
  if (row.kind === "gap") return html`<span class="soft">⋯</span>`;
  if (text === null) return null;
  if (row.kind === "same") return text;
  if (row.before === null || row.after === null) return html`<${tag}>${text}</${tag}>`;
  const [start, middle, end] = parts(row.before, row.after)[side === "before" ? 0 : 1];
  return html`${start}<${tag}>${middle}</${tag}>${end}`;
}

export const Sides = ({ diff, label }) =>
  html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table class="differs">
  <thead><tr><th scope="col">Before</th><th scope="col">After</th></tr></thead>
  <tbody>${rowsOf(diff).map((row, i) => html`<tr key=${i} class=${row.kind}>
    <td class=${row.before === null ? "none" : ""}><${Line} row=${row} side="before" tag="del" /></td>
    <td class=${row.after === null ? "none" : ""}><${Line} row=${row} side="after" tag="ins" /></td></tr>`)}</tbody>
      </table></div>`;
