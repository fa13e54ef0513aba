/** Tokens and money: over time, and by who spent them. */
import { withQuery } from "../api.js";
import { COUNTED } from "../en.js";
import { count, knownAmount, money, tokens } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Empty, Link, Loaded, Panel, Unpriced } from "../parts/basics.js";
import { Chart } from "../parts/chart.js";
import { Export } from "../parts/export.js";
import { filtersOf, Pages, Table } from "../parts/lists.js";
import { addressOf, PeriodChoice, periodColumns, spanOf, usagePeriod, useSeries } from "../parts/series.js";
import { dollars } from "../parts/version_figures.js";

const KINDS = ["agent", "model", "user", "session", "key", "batch", "metadata", "day"];
const FILTERS = { agent: "Agent", model: "Model", user: "User", session_id: "Session",
  metadata: "Metadata (key:value)" };
const EVERY_MS = 30_000;
/** What orders those that spent something: their tokens, since not each model has a price. */
const spent = (each) => each.input + each.output;

const NO_PRICE = "No call with a known price yet; new ones come within 75 s.";
const chart = (title, found, format, none) => html`<${Panel} title=${title}>
  <${Loaded} from=${found} what=${title.toLowerCase()}>${(series) => html`<${Chart} label=${title} series=${series}
    format=${format} none=${none} />`}<//><//>`;

/** Tokens and cost over time, of all runs or by agent or model. `agent`: only its own. */
function OverTime({ span, by, agent }) {
  const own = (found) => ({ ...found, data: found.data?.filter(({ key }) => !agent || key === agent) ?? null });
  const cost = useSeries({ cost: "cost" }, span, by), used = useSeries({ tokens: "tokens" }, span, by);
  return html`<div class="charts">${chart("Cost", own(cost), dollars, NO_PRICE)}
    ${chart("Tokens", own(used), tokens)}</div>`;
}

/** The same by day, of what meets the filters. */
function ByDay({ span, only }) {
  const found = useData(withQuery("/v1/usage", { by: "day", limit: 200, order: "asc", ...only, ...usagePeriod(span) }),
    { everyMs: EVERY_MS });
  const series = (of) => ({ ...found, data: found.data && [{ key: "what the filters find",
    points: found.data.items.map((each) => ({ at: `${each.day}T00:00:00Z`, value: of(each) })) }] });
  return html`<div class="charts">${chart("Cost by day", series(({ cost }) => Number(cost.amount)), dollars, NO_PRICE)}
    ${chart("Tokens by day", series(spent), tokens)}</div>`;
}

/** `hasMore`: there are others, which are not shown. */
function Sums({ by, items, hasMore, period }) {
  const isInSeveral = by === "agent" || by === "model"; // so that the runs of all are not their sum
  const most = Math.max(1, ...items.map((each) => each.input + each.output));
  const part = (value) => `${(100 * value) / most}%`;
  const name = (each) => each[by] ?? `no ${by === "metadata" ? "such key" : by}`;
  const path = { batch: (each) => [["runs", each.batch]],
    agent: (each) => [["health"], { agent: each.agent, ...period }],
    session: (each) => [["chat"], { session: each.session }] }[by];
  const named = (each) => {
    const [to, query] = (each[by] && path?.(each)) || [];
    return to ? html`<${Link} path=${to} query=${query}>${each[by]}<//>` : name(each);
  };
  const sums = (list, unpriced = null) => {
    const sum = (of) => list.reduce((all, each) => all + Number(of(each)), 0);
    const runs = list.length > 1 && isInSeveral ? null : sum((each) => each.runs);
    const cost = { ...list[0].cost, amount: sum((a) => a.cost.amount), complete: list.every((a) => a.cost.complete) };
    return html`<td class="right">${tokens(sum((each) => each.input))}</td>
      <td class="right">${tokens(sum((each) => each.output))}${list.some((each) => each.estimated) ? " ≈" : ""}</td>
      <td class="right">${count(runs)}</td><td class="right">${money(cost)}${unpriced}</td>
      <td class="right">${runs ? money({ ...cost, amount: cost.amount / runs }) : "–"}</td>`;
  };
  const shown = by === "day" ? items : [...items].sort((a, b) => spent(b) - spent(a));
  return html`<${Table} label=${`Usage by ${by}`}
    head=${[by[0].toUpperCase() + by.slice(1), "Tokens", "#In", "#Out", "#Runs", "#Cost", "#Cost of a run"]}>
    ${shown.map((each) => html`<tr key=${name(each)}><td>${named(each)}</td>
      <td class="wide-cell"><span class="stack" aria-hidden="true">
        <i class="bar model" style=${{ width: part(each.input) }}></i>
        <i class="bar tool-bar" style=${{ width: part(each.output) }}></i></span></td>
      ${sums([each], by === "model" && !each.cost.complete && html` <${Unpriced} models=${[each.model]} />`)}</tr>`)}
    <tr><td><strong>Total${hasMore ? " of those shown" : ""}</strong></td><td></td>${sums(items)}</tr><//>
    <p class="small soft body">${COUNTED} A batch is one run.${isInSeveral
      && ` A run counts at each ${by} that it asked.`}</p>
    <p class="legend small soft"><span><i class="bar model"></i>in</span><span><i class="bar tool-bar"></i>out</span>
      <span>≈ partly estimated</span><span>≥ some calls have no known price${by !== "model" && html`:
        ${" "}<${Link} path=${["usage"]} query=${{ by: "model" }}>which models<//>`}</span></p>`;
}

function Who({ query, span, filters: { field, choice } }) {
  const by = KINDS.includes(query.by) ? query.by : "agent";
  const key = query.key ?? "", only = filtersIn(query);
  const path = withQuery("/v1/usage", { by: by === "metadata" ? `metadata:${key}` : by, ...only,
    ...usagePeriod(span), order: by === "day" ? "desc" : "asc" });
  return html`<${Panel} title="Who spent it" actions=${html`${choice("by", "By", KINDS,
      { any: "", kind: "inline", value: by })}<${Export} key=${path} name="usage" path=${path} columns=${{
        [by]: (each) => each[by], ...SUMS, ...periodColumns(span), ...Object.fromEntries(Object.entries(only)
          .map(([name, value]) => [`only_${name}`, () => value])) }} />`}>
    <div class="body"><form class="filters" onSubmit=${(e) => e.preventDefault()}>
      ${by === "metadata" && field("key", "Key of the metadata")}
      ${Object.entries(FILTERS).map(([name, label]) => field(name, label))}</form></div>
    ${by === "metadata" && !key ? html`<${Empty} title="Name a key, such as customer." />`
      : html`<${Pages} key=${path} path=${path} what="usage" everyMs=${EVERY_MS}>${(items, _, hasMore) =>
        items.length ? html`<${Sums} ...${{ by, items, hasMore }} period=${addressOf(span)} />`
        : html`<${Empty} title="No run like that has used tokens in this time." />`}<//>`}<//>`;
}

const filtersIn = (query) => Object.fromEntries(Object.keys(FILTERS).filter((name) => query[name])
  .map((name) => [name, query[name]]));
const SUMS = { runs: ({ runs }) => runs, tokens_in: ({ input }) => input, tokens_out: ({ output }) => output,
  cost: ({ cost }) => knownAmount(cost), currency: ({ cost }) => cost.currency,
  all_priced: ({ cost }) => (cost.complete ? "yes" : "no") };

export function Usage({ query }) {
  const span = spanOf(query), only = filtersIn(query);
  const filters = filtersOf(["usage"], query);
  const over = ["agent", "model"].includes(query.by ?? "agent") ? query.by ?? "agent" : undefined;
  return html`<div class="head"><h1>Usage</h1><div class="actions"><${PeriodChoice} query=${query}
      set=${filters.set} /></div></div>
    ${Object.keys(only).length > (over === "agent" && only.agent ? 1 : 0) ? html`<${ByDay} span=${span} only=${only} />`
      : html`<${OverTime} key=${`${span} ${over}`} span=${span} by=${over} agent=${only.agent} />`}
    <${Who} ...${{ query, span, filters }} />`;
}
