/** What each version of an agent did and cost. */
import { bySource, numberOf, rateOf, tallyOf } from "../figures/rates.js";
import { count, seconds } from "../format.js";
import { html } from "../html.js";
import { Empty, Link, Loaded, Panel } from "./basics.js";
import { Export } from "./export.js";
import { Table } from "./lists.js";
import { timesOf, useOutcomes, useTotals } from "./series.js";

export const dollars = (value, tokens = 0) => (value ? `${value.toPrecision(3)} USD` : tokens ? "no price" : "–");
/** The columns of a file of versions. `tally`: of a key, its judged runs and the good ones; `times`: of all runs. */
export const columnsOf = (tally, times) => ({
  name: ({ key }) => key,
  runs: ({ runs }) => runs,
  failed: ({ errors }) => errors,
  good: ({ key }) => tally(key).good,
  judged: ({ key }) => tally(key).runs,
  cost_of_a_run_usd: ({ run_cost: cost, runs }) => (cost && runs ? cost / runs : null),
  tokens: ({ tokens }) => tokens,
  half_take_s: (each) => each.duration_p50,
  "95_percent_take_s": (each) => each.duration_p95,
  first_token_95_percent_s: (each) => each.first_token_p95,
  from: () => times.from, to: () => times.to,
});

/** Totals and outcomes of an agent by version, of a span as in series.js. */
export const useVersions = (agent, span) => ({
  span,
  found: useTotals(span, { by: "version", agent }),
  outcomes: useOutcomes(span, { by: "version", agent }),
});

/** What figures count as a good run. */
export const GoodMeans = ({ agent, span }) => html`<p class="small soft body">Of judged runs; partly and bad are not
  good. <${Link} path=${["runs"]} query=${{ agent, span, outcome: "PARTIAL,FAILURE" }}>Runs that are not good<//></p>`;

/** Figures by version, the newest first. `of`: as of `useVersions`. */
export function VersionFigures({ agent, of: { span, found, outcomes }, actions = null }) {
  const judged = (key) => (outcomes.data?.items ?? []).filter((each) => each.key === key);
  return html`<${Panel} title=${`Versions of ${agent}`} actions=${html`${actions}${found.data && html`<${Export}
    name=${`versions of ${agent}`} columns=${columnsOf((key) => tallyOf(judged(key)), timesOf(span))}
    items=${found.data.items.filter(({ key }) => key.includes("@"))} />`}`}>
    <${Loaded} from=${found} what="figures">${({ items }) => {
    const versions = items.filter(({ key, runs }) => key.includes("@") && runs)
      .sort((a, b) => numberOf(b) - numberOf(a));
    return versions.length ? html`<${Table} label=${`Figures by version of ${agent}`}
      head=${["Version", "#Runs", "#Without failure", "#Judged good", "#Cost of a run", "#Tokens of its own",
        "#Half take", "#95 % take", "#First token, 95 %"]}>
      ${versions.map((each) => html`<tr key=${each.key}>
        <td><${Link} path=${["runs"]} query=${{ agent, span,
          version: numberOf(each) }}>${each.key}<//></td>
        <td class="right">${count(each.runs)}</td>
        <td class="right">${((100 * (each.runs - each.errors)) / each.runs).toFixed(0)} %</td>
        <td class="right">${rateOf(tallyOf(judged(each.key)))}
          <p class="small soft">${bySource(judged(each.key))}</p></td>
        <td class="right">${dollars(each.run_cost / each.runs, each.tokens)}</td>
        <td class="right">${count(each.tokens)}</td>
        <td class="right">${seconds(each.duration_p50)}</td><td class="right">${seconds(each.duration_p95)}</td>
        <td class="right">${seconds(each.first_token_p95)}</td></tr>`)}<//><${GoodMeans} agent=${agent}
        span=${span} />`
      : html`<${Empty} title="No run of it is over." />`;
  }}<//><//>`;
}
