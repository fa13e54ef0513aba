/** What memory gave a run, whether it helped, and what was learnt from the run. */
import { excerpt, plain } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Empty, Link, Loaded, Panel, Status, Time } from "../parts/basics.js";
import { Table } from "../parts/lists.js";

const GIVEN = new Set(["used", "trial"]);

export function Given({ id }) {
  const run = useData(`/v1/runs/${id}`);
  const learning = useData(`/v1/runs/${id}/learning`);
  return html`<${Loaded} from=${run} what="the run">${(shown) => html`
    <div class="head"><div><h2>${shown.agent ?? shown.graph}: ${excerpt(plain(shown.input), 120)}</h2>
      <p class="small soft"><${Link} path=${["runs", id]}>the run<//> <${Status} value=${shown.status} /> outcome ${shown.outcome.value.toLowerCase()}${shown.outcome.source && ` by ${shown.outcome.source}`}</p></div></div>
    <${Loaded} from=${learning} what="what was learnt">${(found) => html`
      <${Panel} title="Patterns that were tried on it"><${Tried} items=${found.applications} /><//>
      <${Panel} title="What was learnt from it">${found.insights.length || found.failures.length
        ? html`<ul class="rows">${found.insights.map((each) => html`<li>${each.text ?? excerpt(plain(each), 300)}</li>`)}${found.failures.map((each) => html`<li><span class="bad-text">${each.error_type ?? "failure"}</span> ${excerpt(plain(each.root_cause ?? each), 300)}</li>`)}</ul>`
        : html`<${Empty} title=${found.status === "pending" ? "It is being looked at." : "Nothing was learnt from it."} />`}<//>`}<//>`}<//>`;
}

function Tried({ items }) {
  if (!items.length) return html`<${Empty} title="No pattern fitted this run." />`;
  return html`<${Table} label="Patterns tried on the run" head=${["Pattern", "Was it given?", "Followed?", "Went well?", "#Expected without", "When"]}>${items.map((each) => html`<tr key=${each.pattern_id}>
    <td><${Link} path=${["memory", "patterns", each.pattern_id]}>${each.name}<//> <span class="small soft">version ${each.version}</span></td><td>${GIVEN.has(each.arm) ? `given (${each.arm})` : `held back (${each.arm})`}</td>
    <td>${said(each.followed)}</td><td>${said(each.good)}</td><td class="right">${Math.round(100 * each.baseline.rate)} %</td><td><${Time} at=${each.at} /></td></tr>`)}<//>`;
}

const said = (value) => (value == null ? "not known" : value ? "yes" : "no");
