/** What memory gave a run, whether it helped, and what was learnt from the run. */
import { url, withQuery } from "../api.js";
import { excerpt, plain } from "../format.js";
import { html } from "../html.js";
import { Empty, Link, Panel, Read, Status, Time } from "../parts/basics.js";
import { Rows } from "../parts/lists.js";
import { Worth } from "../parts/run_table.js";
import { Source } from "../parts/source.js";
import { isFinal } from "../run/state.js";

const HELD_BACK = new Set(["withheld", "control"]);
const arm = (name) => (HELD_BACK.has(name) ? `held back (${name})` : name.startsWith("reported") ? "told by a client"
  : `given (${name})`);
const ended = (found) => found.status === "done" || found.status === "failed";
const none = (found) => (found.status === "pending" ? "It is being looked at." : found.status
  ? "Nothing was learnt from it." : "The run is not over, or it left no episode.");

export const Given = ({ id }) => html`<${Read} path=${url`/v1/runs/${id}`} what="the run" everyMs=${3000}
  ended=${({ status }) => isFinal(status)}>${(shown) => html`
    <div class="head"><div><h2>${shown.agent ?? shown.graph}: ${excerpt(plain(shown.input), 120)}</h2>
      <p class="small soft"><${Link} path=${["runs", id]}>the run<//> <${Status}
        value=${shown.status} /> outcome <${Worth} of=${shown} /></p></div></div>`}<//>
    <${Read} path=${url`/v1/runs/${id}/learning`} what="what was learnt" everyMs=${3000} ended=${ended}>
      ${(found) => html`
      ${found.error && html`<p class="note bad" role="alert">Learning failed: ${found.error}
        ${found.next_at && html`; tried again <${Time} at=${found.next_at} />`}</p>`}
      <${Panel} title="What memory gave it"><${Recalled} id=${id} /><//>
      <${Panel} title="Patterns that were tried on it"><${Tried} items=${found.applications} /><//>
      <${Panel} title="What was learnt from it"><${Learnt} of=${found} empty=${none(found)} /><//>
      ${found.candidates.length > 0
        && html`<${Panel} title="Patterns that were found in it">
          <ul class="rows">${found.candidates.map(
            (each) => html`<li key=${each.id}>
              <${Link} path=${["memory", "patterns", each.id]}>${each.name}<//> <span class="small soft">
                ${each.category.toLowerCase()}, ${each.state.toLowerCase().replace("_", " ")}</span></li>`)}</ul>
                  <//>`}`}<//>`;

/** What of earlier runs stood in the run's prompts. */
const Recalled = ({ id }) => html`<${Read} what="what it was given"
  path=${withQuery(url`/v1/runs/${id}/events`, { types: "context.recalled", limit: 100 })}>${({ items }) => {
    const given = items.filter(({ data }) => data.content);
    return given.length ? html`<ul class="rows">${given.map(({ seq, data }) => html`<li key=${seq}>
        <p><${Source} of=${data.source} />${data.score != null && html` <span class="small soft">likeness
          ${" "}${data.score}</span>`}</p><p class="small">${excerpt(data.content, 200)}</p></li>`)}</ul>`
      : html`<${Empty} title="It was given nothing of earlier runs." />`;
  }}<//>`;

function Tried({ items }) {
  return html`<${Rows} label="Patterns tried on the run" items=${items} empty="No pattern fitted this run."
    id=${(each) => each.pattern_id} head=${["Pattern", "Was it given?", "Followed?", "Went well?", "When"]}
    cells=${(each) => [html`<${Link} path=${["memory", "patterns", each.pattern_id]}>${each.name}<//> <span
      class="small soft">version ${each.version}</span>`, arm(each.arm), said(each.followed), said(each.good),
      html`<${Time} at=${each.at} />`]} />`;
}

const said = (value) => (value == null ? "not known" : value ? "yes" : "no");

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
