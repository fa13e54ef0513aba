/** What was learnt from a run: insights, what cured a failure, what went well. */
import { excerpt, plain } from "../format.js";
import { html } from "../html.js";
import { Empty } from "../parts/basics.js";

const insight = (each) => each.text ?? excerpt(plain(each), 300);
const used = (each) => (each.uses ? each.uses.join(", then ") : excerpt(plain(each), 300));

/** A failure that the service found; one that another system recorded is shown as it is. */
function failure(each) {
  if (!each.tool) return excerpt(plain(each), 300);
  const cure = each.then ? html`; then <code>${each.then}</code> ${each.recovered ? "went well" : "did not help"}`
    : ", and nothing was tried after it";
  return html`<code>${each.tool}</code> failed <span class="small soft">(${each.signature})</span>${cure}.`;
}

export function Learnt({ of, empty = "Nothing yet." }) {
  const parts = [["Insights", of.insights, insight], ["What failed, and what came of it", of.failures, failure],
    ["What went well", of.patterns, used]].filter(([, items]) => items?.length);
  if (!parts.length) return html`<${Empty} title=${empty} />`;
  return html`<div class="body">
    ${parts.map(([title, items, show]) => html`<h3>${title}</h3>
      <ul>${items.map((each) => html`<li>${show(each)}</li>`)}</ul>`)}</div>`;
}
