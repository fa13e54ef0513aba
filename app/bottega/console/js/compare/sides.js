/** A difference as two columns, with what changed inside of a line marked. */
import { html } from "../html.js";
import { parts } from "./rows.js";

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

/** `rows`: as of `rowsOf` or `rowsOfTexts`; `label`: for screen readers. */
export const Sides = ({ rows, label }) =>
  html`<div class="scroll" tabindex="0" role="region" aria-label=${label}><table class="differs">
  <thead><tr><th scope="col">Before</th><th scope="col">After</th></tr></thead>
  <tbody>${rows.map((row, i) => html`<tr key=${i} class=${row.kind}>
    <td class=${row.before === null ? "none" : ""}><${Line} row=${row} side="before" tag="del" /></td>
    <td class=${row.after === null ? "none" : ""}><${Line} row=${row} side="after" tag="ins" /></td></tr>`)}</tbody>
      </table></div>`;
