/** The difference of two texts as one text. */
import { html } from "../html.js";
import { lineDiff, nearChanges } from "./line_diff.js";

const SIGNS = { same: " ", gap: " ", removed: "-", added: "+" };
const WORDS = { same: "", gap: "", removed: "removed: ", added: "added: " };

/** Two texts as one, with a sign before each line that differs; lines far from all of these are left out. */
export function Diff({ before, after }) {
  const lines = lineDiff(before, after);
  if (lines.every((each) => each.kind === "same")) return html`<p class="state">No difference.</p>`;
  return html`<pre class="diff" tabindex="0" role="region" aria-label="Difference">
    ${nearChanges(lines).map(({ kind, line }) =>
      html`<span class=${kind}><span class="hidden">${WORDS[kind]}</span><span aria-hidden="true">${SIGNS[kind]} </span>
        ${line}${"\n"}</span>`)}</pre>`;
}
