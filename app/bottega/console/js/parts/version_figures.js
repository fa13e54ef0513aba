/** Results and costs of each version of an agent. */
import { bySource, numberOf, percent, rateOf, tallyOf } from "../figures/rates.js";
import { ABOUT, JUDGES, JUDGES_MEAN, NOT_GOOD } from "../en.js";
import { about, count } from "../format.js";
import { html } from "../html.js";
import { FINAL } from "../run/state.js";
import { Empty, Link, Loaded, Panel } from "./basics.js";
import { Export } from "./export.js";
import { Rows } from "./lists.js";
import { addressOf, periodColumns, useOutcomes, useTotals } from "./series.js";

export const dollars = (value, tokens = 0) => (value ? `${value.toPrecision(3)} USD` : tokens ? "no price" : "–");
/** The columns of a file of versions. `tally`: judged and good runs of a key; `judge`: source of the outcomes. */
export const columnsOf = (tally, period, judge) => ({
  name: ({ key }) => key,
  runs: ({ runs }) => runs,
  failed: ({ errors }) => errors,
  judged_by: () => JUDGES[judge] ?? "all",
  good: ({ key }) => tally(key).good,
  judged: ({ key }) => tally(key).runs,
  cost_of_a_run_usd: ({ run_cost: cost, runs }) => (cost && runs ? cost / runs : null),
  tokens: ({ tokens }) => tokens,
  half_take_about_s: (each) => each.duration_p50,
  "95_percent_take_about_s": (each) => each.duration_p95,
  first_token_95_percent_about_s: (each) => each.first_token_p95,
  ...periodColumns(period),
});

/** Totals and outcomes of an agent by version, in a period of series.js. `judge`: only outcomes of this source. */
export const useVersions = (agent, span, judge) => ({
  span, judge,
  found: useTotals(span, { by: "version", agent }),
  outcomes: useOutcomes(span, { by: "version", agent }, judge),
});

/** The runs that figures count as good. */
export const GoodMeans = ({ agent, span, judge }) => html`<p class="small soft body">Of judged runs; partly and bad are
  not good. ${JUDGES_MEAN} <${Link} path=${["runs"]} query=${{ agent, judged_by: judge, outcome: NOT_GOOD,
    ...addressOf(span) }}>Runs that are not good<//></p>`;

/** Figures by version, the newest first. `of`: result of `useVersions`. */
export function VersionFigures({ agent, of: { span, judge, found, outcomes }, actions = null }) {
  const judged = (key) => (outcomes.data?.items ?? []).filter((each) => each.key === key);
  return html`<${Panel} title=${`Versions of ${agent}`} actions=${html`${actions}${found.data && html`<${Export}
    name=${`versions of ${agent}`} columns=${columnsOf((key) => tallyOf(judged(key)), span, judge)}
    items=${found.data.items.filter(({ key }) => key.includes("@"))} />`}`}>
    <${Loaded} from=${found} what="figures">${({ items }) => {
    const versions = items.filter(({ key, runs }) => key.includes("@") && runs)
      .sort((a, b) => numberOf(b) - numberOf(a));
    return versions.length ? html`<${Rows} label=${`Figures by version of ${agent}`} items=${versions}
      id=${({ key }) => key} head=${["Version", "#Runs", "#Without failure", "#Judged good", "#Cost of a run",
        "#Tokens of its own", "#Half take", "#95 % take", "#First token, 95 %"]} cells=${(each) => [
        html`<${Link} path=${["runs"]} query=${{ agent, ...addressOf(span), version: numberOf(each),
          status: Object.values(FINAL) }}>${each.key}<//>`, count(each.runs),
        percent((each.runs - each.errors) / each.runs), html`${rateOf(tallyOf(judged(each.key)))}
          <p class="small soft">${bySource(judged(each.key))}</p>`, dollars(each.run_cost / each.runs, each.tokens),
        count(each.tokens), ...[each.duration_p50, each.duration_p95, each.first_token_p95].map(about)]} />
      <${GoodMeans} ...${{ agent, span, judge }} /><p class="small soft body">${ABOUT}</p>`
      : html`<${Empty} title="No run of it is over." />`;
  }}<//><//>`;
}
