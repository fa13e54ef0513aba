/** Tokens and money of the last 30 days, by day, model, agent, user, session or key. */
import { withQuery } from "../api.js";
import { count, money, tokens } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Empty, Loaded, Panel } from "../parts/basics.js";
import { go } from "../router.js";
import { Table } from "../parts/lists.js";

const KINDS = { day: "day", model: "model", agent: "agent", user: "user", session: "session", key: "key" };

export function Usage({ query }) {
  const by = KINDS[query.by] ?? "day";
  const found = useData(withQuery("/v1/usage", { by, limit: 200, order: by === "day" ? "" : "desc" }),
    { everyMs: 30_000 });
  const choose = (value) => go(["operations", "usage"], { ...query, by: value }, { replace: true });
  return html`<${Panel} title=${`Usage of 30 days by ${by}`}
    actions=${html`<label class="inline">By <select value=${by} onChange=${(e) => choose(e.target.value)}>
      ${Object.keys(KINDS).map((each) => html`<option value=${each}>${each}</option>`)}</select></label>`}>
    <${Loaded} from=${found} what="usage">
      ${(page) => page.items.length ? html`<${Sums} by=${by} items=${page.items} more=${page.next_cursor !== null} />`
        : html`<${Empty} title="No run has used tokens in the last 30 days." />`}<//><//>`;
}

function Sums({ by, items, more }) {
  const most = Math.max(1, ...items.map((each) => each.input + each.output));
  const part = (value) => `${(100 * value) / most}%`;
  const name = (each) => each[by] ?? `no ${by}`;
  return html`<${Table} label=${`Usage by ${by}`}
    head=${[by[0].toUpperCase() + by.slice(1), "Tokens", "#In", "#Out", "#Runs", "#Cost"]}>
    ${items.map((each) => html`<tr key=${name(each)}><td>${name(each)}</td>
      <td class="wide-cell"><span class="stack" aria-hidden="true">
        <i class="bar model" style=${{ width: part(each.input) }}></i>
        <i class="bar tool-bar" style=${{ width: part(each.output) }}></i></span></td>
      <td class="right">${tokens(each.input)}</td>
        <td class="right">${tokens(each.output)}${each.estimated ? " ≈" : ""}</td>
        <td class="right">${count(each.runs)}</td><td class="right">${money(each.cost)}</td></tr>`)}<//>
    <p class="legend small soft"><span><i class="bar model"></i>in</span><span><i class="bar tool-bar"></i>out</span>
      <span>≈ partly estimated</span><span>≥ some calls have no known price</span>
      ${more && html`<span>The first 200 are shown.</span>`}</p>`;
}
