/** Tokens and money: over time, and by who spent them. */
import { withQuery } from "../api.js";
import { COUNTED } from "../en.js";
import { count, money, tokens } from "../format.js";
import { html } from "../html.js";
import { Empty, Link, Loaded, Panel, Unpriced } from "../parts/basics.js";
import { Chart } from "../parts/chart.js";
import { Filter, Pages, Table } from "../parts/lists.js";
import { hourOf, SpanChoice, spanOf, useSeries } from "../parts/series.js";
import { dollars } from "../parts/version_figures.js";
import { go } from "../router.js";

const KINDS = ["agent", "model", "user", "session", "key", "batch", "metadata", "day"];
const FILTERS = { agent: "Agent", model: "Model", user: "User", session_id: "Session",
  metadata: "Metadata (key:value)" };
const EVERY_MS = 30_000;
/** What orders those that spent something: their tokens, since not each model has a price. */
const spent = (each) => each.input + each.output;

/** Tokens and cost over time, of all runs or by agent, version or model. */
function OverTime({ span, by }) {
  const cost = useSeries({ cost: "cost" }, span, by);
  const used = useSeries({ tokens: "tokens" }, span, by);
  const chart = (title, found, format, none) => html`<${Panel} title=${title}>
    <${Loaded} from=${found} what=${title.toLowerCase()}>${(series) => html`<${Chart} label=${title} series=${series}
      format=${format} none=${none} />`}<//><//>`;
  return html`<div class="charts">
    ${chart("Cost", cost, dollars, "No call with a known price yet; new ones come within 75 s.")}
    ${chart("Tokens", used, tokens)}</div>`;
}

/** `hasMore`: there are others, which are not shown. */
function Sums({ by, items, hasMore }) {
  const isInSeveral = by === "agent" || by === "model"; // so that the runs of all are not their sum
  const most = Math.max(1, ...items.map((each) => each.input + each.output));
  const part = (value) => `${(100 * value) / most}%`;
  const name = (each) => each[by] ?? `no ${by === "metadata" ? "such key" : by}`;
  const path = { batch: (each) => [["runs", each.batch]], agent: (each) => [["health"], { agent: each.agent }],
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

function Who({ query, span, set }) {
  const by = KINDS.includes(query.by) ? query.by : "agent";
  const key = query.key ?? "";
  const only = Object.fromEntries(Object.keys(FILTERS).map((name) => [name, query[name]]));
  const path = withQuery("/v1/usage", { by: by === "metadata" ? `metadata:${key}` : by, ...only,
    since: hourOf(span), order: by === "day" ? "desc" : "asc" });
  return html`<${Panel} title="Who spent it" actions=${html`<label class="inline">By <select value=${by}
      onChange=${(e) => set({ by: e.target.value })}>${KINDS.map((each) => html`<option>${each}</option>`)}</select>
      </label>`}>
    <div class="body"><form class="filters" onSubmit=${(e) => e.preventDefault()}>
      ${by === "metadata" && html`<${Filter} label="Key of the metadata" value=${key}
        onChange=${(text) => set({ key: text })} />`}
      ${Object.entries(FILTERS).map(([name, label]) => html`<${Filter} key=${name} label=${label}
        value=${query[name] ?? ""} onChange=${(text) => set({ [name]: text })} />`)}</form></div>
    ${by === "metadata" && !key ? html`<${Empty} title="Name a key, such as customer." />`
      : html`<${Pages} key=${path} path=${path} what="usage" everyMs=${EVERY_MS} isSaved>${(items, _, hasMore) =>
        items.length ? html`<${Sums} by=${by} items=${items} hasMore=${hasMore} />`
        : html`<${Empty} title="No run like that has used tokens in this time." />`}<//>`}<//>`;
}

export function Usage({ query }) {
  const span = spanOf(query, "30d");
  const set = (change) => go(["usage"], { ...query, ...change }, { replace: true });
  const over = ["agent", "model"].includes(query.by ?? "agent") ? query.by ?? "agent" : undefined;
  return html`<div class="head"><h1>Usage</h1><div class="actions"><${SpanChoice} span=${span}
      onChange=${(value) => set({ span: value })} /></div></div>
    <${OverTime} key=${`${span} ${over}`} span=${span} by=${over} />
    <${Who} query=${query} span=${span} set=${set} />`;
}
