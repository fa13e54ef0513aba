/** Whether runs succeed, how long they take, what fails and what it costs: of all, or by agent, version or model. */
import { useMemo, useState } from "preact/hooks";

import { get, url, withQuery } from "../api.js";
import { ABOUT, COUNTED, NOT_GOOD } from "../en.js";
import { AgentChoice, AgentFigures, JUDGE_CHOICE } from "../figures/outcomes.js";
import { rateOf, tallyOf } from "../figures/rates.js";
import { about, clock, count, duration } from "../format.js";
import { html } from "../html.js";
import { badlyOf, failureOf, groupsOf, numbersOf } from "../health/failures.js";
import { slowestFirst } from "../health/slow.js";
import { useData } from "../load.js";
import { Button, Empty, Figure, Figures, Link, Loaded, Panel, Read, Time } from "../parts/basics.js";
import { Chart } from "../parts/chart.js";
import { RUN_COLUMNS } from "../parts/csv.js";
import { allOf, Export } from "../parts/export.js";
import { filtersOf, Rows, Table } from "../parts/lists.js";
import { titleOf } from "../parts/run_table.js";
import { addressOf, createdIn, PeriodChoice, periodColumns, spanOf, timesOf, useOutcomes, useSeries, useSpan, useTotals
} from "../parts/series.js";
import { columnsOf, dollars } from "../parts/version_figures.js";
import { ServerState, Warnings } from "../parts/waits.js";
import { didOf, failedTool, times } from "../run/diagnosis.js";
import { RunState } from "../run/state.js";

const EVERY_MS = 15_000;
/** So many runs of a period are put into groups, and how often. */
const MOST_GROUPED = 1000, GROUPS_EVERY_MS = 60_000;
const MOST_CHANGED = 10;
/** More lines than these are not told apart in a chart. */
const MOST_LINES = 10;
const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part < whole ? 1 : 0)} %` : "–");

/** When versions of agents, or of one, were stored in a span: `[{at, text}]`. */
async function readChanges(span, agent) {
  const { from, to } = timesOf(span);
  const { items } = await get("/v1/agents?limit=200");
  const isNew = (each) => each.version > 1 && each.created_at >= from && (!agent || each.name === agent);
  const changed = items.filter(isNew).slice(0, MOST_CHANGED);
  const lists = await Promise.all(changed.map(({ name }) =>
    get(url`/v1/agents/${name}/versions?order=desc&limit=20`)));
  return lists.flatMap((list, place) => list.items
    .filter((each) => each.version > 1 && each.created_at >= from && each.created_at < to)
    .map((each) => ({ at: each.created_at, text: `${changed[place].name}@${each.version}` })));
}

/** A chart of some metrics. With `by`: of one, a line for each key; `agent`: only its own, or those of its versions. */
function Measured({ title, names, by, agent, span, format, marks, colours = {} }) {
  const found = useSeries(names, span, by);
  const isOwn = ({ key }) => !agent || key === agent || key.startsWith(`${agent}@`);
  const lines = useMemo(() => largest((found.data ?? []).filter(isOwn))
    .map((each) => ({ ...each, colour: colours[each.key] })), [found.data, agent]);
  return html`<${Panel} title=${title}><${Loaded} from=${found} what=${title.toLowerCase()}>${() => html`
    <${Chart} label=${title} format=${format} marks=${marks} series=${lines} />
    ${(found.data ?? []).filter(isOwn).length > MOST_LINES && html`<p class="small soft body">The largest ${MOST_LINES}
      are shown.</p>`}`}<//><//>`;
}

/** The series with the largest sums, in their order. */
function largest(series) {
  const sumOf = ({ points }) => points.reduce((sum, { value }) => sum + (value ?? 0), 0);
  const chosen = new Set([...series].sort((a, b) => sumOf(b) - sumOf(a)).slice(0, MOST_LINES));
  return series.filter((each) => chosen.has(each));
}

function Totals({ span, agent, slowest }) {
  const found = useTotals(span, agent ? { by: "agent", agent } : {});
  const scheduler = useData("/v1/scheduler", { everyMs: EVERY_MS });
  const waiting = scheduler.data?.runs ?? [];
  const oldest = waiting.map((each) => each.oldest_at).sort()[0];
  return html`<${Warnings} scheduler=${scheduler} agent=${agent} />
    <${Loaded} from=${found} what="figures">${({ items: [all] }) => html`<${Figures}>
    <${Figure} name="Runs" value=${count(all?.runs ?? 0)} />
    <${Figure} name="Failed" value=${share(all?.errors ?? 0, all?.runs)}
      note=${all && `${count(all.errors)} runs`} />
    <${Figure} name="95 % take less than" value=${about(all?.duration_p95)}
      note=${slowest && `slowest: ${slowest.key}, ${about(slowest.duration_p95)}`} />
    <${Figure} name="First token, 95 %" value=${about(all?.first_token_p95)} />
    <${Figure} name="Wait in the queue, 95 %" value=${about(all?.queue_wait_p95)} />
    <${Figure} name="Queued now"
      value=${scheduler.data ? count(waiting.reduce((n, each) => n + each.queued, 0)) : "–"}
      note=${oldest && html`since <${Time} at=${oldest} />`} /><//>
    <p class="small soft">${COUNTED} Each item of a batch is a run. Those out of time are failed, too.${" "}
      ${ABOUT}</p>`}<//>`;
}

const FAILS = { title: "What fails", none: "No run failed in this time.", head: ["Cause", "Code"], of: failureOf,
  query: () => ({ status: ["failed", "timeout"] }), like: ({ error }) => ({ error_code: error?.code }) };
const WENT_BADLY = { title: "What went badly or partly", none: "No run of this time is judged bad or partly good.",
  head: ["Reason", "How, by whom"], of: badlyOf,
  query: (judge) => ({ outcome: NOT_GOOD.split(","), judged_by: judge }),
  like: ({ outcome, error }) => ({ outcome_reason: outcome.reason?.slice(0, 500),
    error_code: outcome.reason ? "" : error?.code }) };
/** What an unfolded row's runs have in common beside the group. */
const likeOne = ({ agent, version, outcome, judged_by: by }) => ({ agent, version, outcome: outcome.value,
  judged_by: by?.source });

/** Runs of a period in groups that are alike, each with its versions; `like`: the filters of a group's runs. */
function Groups({ title, none, head, of, query, like, span, agent, judge }) {
  const [open, setOpen] = useState(null);
  const found = useData(withQuery("/v1/runs", { order: "desc", agent, ...query(judge) }), { everyMs: GROUPS_EVERY_MS,
    from: (path) => allOf(withQuery(path, createdIn(span)), MOST_GROUPED) });
  const filters = { ...query(judge), agent, ...addressOf(span) };
  const row = (runs, first, how, group) => html`${first}
    <td class="right"><${Link} path=${["runs"]} query=${{ ...filters, ...group }}>${count(runs.length)}<//></td>
    <td>${how}</td><td>${numbersOf(runs, (each) => of(each).of)}</td>
    <td><${Time} at=${runs.at(-1).created_at} /></td><td><${Time} at=${runs[0].created_at} /></td>
    <td><${Link} path=${["runs", runs[0].id]}>${titleOf(runs[0], 40)}<//></td>`;
  const rows = (each) => html`<tr key=${each.key}>${row(each.runs, html`<td><${Button} kind="small ghost"
      aria-expanded=${open === each.key} onClick=${() => setOpen(open === each.key ? null : each.key)}
      aria-label=${`Versions of: ${each.what}`}>${open === each.key ? "▾" : "▸"}<//> ${each.what}
      ${each.code === "max_iterations" && html`<${ToolCause} run=${each.runs[0].id} />`}</td>`,
    numbersOf(each.runs, (run) => of(run).how), like(each.runs[0]))}</tr>
    ${open === each.key && groupsOf(each.runs, of).map((one) => html`<tr key=${one.key}>${row(one.runs,
      html`<td class="soft">└ ${one.of}</td>`, one.how, { ...like(one.runs[0]), ...likeOne(one.runs[0]) })}</tr>`)}`;
  return html`<${Panel} title=${title} actions=${found.data?.items.length > 0 && html`<${Export}
      name=${title.toLowerCase()} items=${groupsOf(found.data.items, of)} columns=${{ ...GROUPED,
        ...periodColumns(span) }} />`}><${Loaded} from=${found} what="runs">${({ items, isCut }) => items.length ? html`
    <${Table} label=${title} head=${[head[0], "#Runs", head[1], "Agent and version", "First", "Last", "Newest run"]}>
      ${groupsOf(items, (run) => ({ what: of(run).what, code: run.error?.code ?? "" })).map(rows)}
      <tr>${row(items, html`<td><strong>Total${isCut && " of the newest"}</strong></td>`,
        numbersOf(items, (run) => of(run).how), {})}</tr><//>`
    : html`<${Empty} title=${none} />`}<//><//>`;
}

/** The columns of a file of groups; what a group's runs have in common is that of the first. */
const GROUPED = { reason: ({ what }) => what,
  ...Object.fromEntries(["agent", "version", "outcome", "judged_by", "judged_by_name"].map((name) => [name,
    ({ runs: [run] }) => RUN_COLUMNS[name](run)])), code: ({ runs: [run] }) => run.error?.code,
  runs: ({ runs }) => runs.length, first: ({ runs }) => runs.at(-1).created_at, last: ({ runs }) => runs[0].created_at,
  newest_run: ({ runs }) => runs[0].id };

/** Which tool kept failing in a run that used all its calls; its log alone tells. */
function ToolCause({ run }) {
  const { data } = useData(url`/v1/runs/${run}/events?order=desc&limit=200`);
  const state = new RunState();
  for (const event of data?.items.toReversed() ?? []) state.apply(event);
  const cause = failedTool(state);
  return cause && html`<p class="small">In the newest run ${cause}</p>`;
}

/** All agents side by side. Those that ran as a part of other agents' runs only have tokens, but no time. */
function Agents({ span, found, judge }) {
  const outcomes = useOutcomes(span, { by: "agent" }, judge);
  const tally = (key) => tallyOf((outcomes.data?.items ?? []).filter((each) => each.key === key));
  return html`<${Panel} title="Agents, the slowest first" actions=${found.data && html`<${Export} name="agents"
    columns=${columnsOf(tally, span, judge)} items=${found.data.items} />`}>
    <${Loaded} from=${found} what="agents">${({ items }) => {
    const agents = slowestFirst(items.filter(({ runs, tokens }) => runs || tokens));
    return html`<${Rows} label="Agents" items=${agents} id=${({ key }) => key} empty="No agent ran in this time."
      head=${["Agent", "#Runs", "#Failed", "#Judged good", "#Half take", "#95 % take", "#Tokens", "#Cost of a run"]}
      cells=${({ key, runs, errors, tokens, run_cost: cost, ...lasted }) => [html`<${Link} path=${["health"]}
          query=${{ agent: key, ...addressOf(span) }}>${key}<//>`, count(runs), html`<span class=${errors ? "bad-text"
          : ""}>${share(errors, runs)}</span>`, rateOf(tally(key)), about(lasted.duration_p50),
        about(lasted.duration_p95), count(tokens), runs ? dollars(cost / runs, tokens) : "–"]} />`;
  }}<//><//>`;
}

function Providers() {
  const whyOf = ({ agent, model, code, http_status: status, calls, first_at: first, last_at: last }) =>
    `${agent} with ${model}: ${didOf({ code, message: status ? `HTTP ${status}` : "" })} ${times(calls)}, ${
      clock(first)}${calls > 1 ? ` to ${clock(last)}` : ""}`;
  return html`<${Panel} title="Providers, by the last 100 calls that were sent"><${Read} path="/v1/provider-health"
    what="providers" everyMs=${EVERY_MS}>${({ items }) => html`<${Rows} label="Providers" items=${items}
      id=${({ name }) => name}
      head=${["Provider", "#Calls", "#Failed", "#Median", "#95 %", "Why", "Now"]}
      cells=${({ name, recent, ...now }) => [html`<${Link} path=${["operations", "providers"]}>${name}<//>`,
        count(recent.calls), html`<span class=${recent.failed ? "bad-text" : ""}>${
          share(recent.failed, recent.calls)}</span>`,
        duration(recent.duration_p50_ms), duration(recent.duration_p95_ms), recent.failures.length
          ? recent.failures.map((each) => html`<p class="small">${whyOf(each)}</p>`) : "–",
        html`<span class="small"><${ServerState} health=${now} /></span>`]} />`}<//><//>`;
}

const NONE = [];
const WAITS = { queue_wait_p95: "in the queue, 95 %", first_token_p95: "for the first token, 95 %" };
const COLOURS = { "runs": "accent", "failed": "bad" };
/** What the charts have a line for. */
const BY = { "": "all together", agent: "agent", version: "version", model: "model" };
/**
 * The charts with a line for each agent, version or model: title, metric, format.
 *
 * @type {[string, string, (value: number) => string][]}
 */
const CHARTS = [["Runs", "runs", count], ["Failures", "errors", count],
  ["95 % take less than", "duration_p95", about], ["First token, 95 %", "first_token_p95", about],
  ["Cost", "cost", dollars], ["Tokens", "tokens", count]];

const Together = (shown) => html`<div class="charts">
  <${Measured} title="Runs and failures" names=${{ runs: "runs", errors: "failed" }} format=${count} colours=${COLOURS}
    ...${shown} />
  <${Measured} title="Failures by code" names=${{ errors: "" }} by="code" format=${count} ...${shown} />
  <${Measured} title="Time of a run" names=${{ duration_p50: "half take less", duration_p95: "95 % take less" }}
    format=${about} ...${shown} />
  <${Measured} title="Waits" names=${WAITS} format=${about} ...${shown} /></div>`;

const Apart = ({ by, ...shown }) => html`<div class="charts">${CHARTS.map(([title, metric, format]) => html`
  <${Measured} key=${metric} title=${`${title} by ${by}`} names=${{ [metric]: "" }} by=${by} format=${format}
    ...${shown} />`)}</div>`;

function Charts({ span, by, agent, judge, ...address }) {
  const changes = useData(withQuery("/v1/agents", { agent }), { from: () => readChanges(span, agent),
    everyMs: 60_000 });
  const marks = changes.data ?? NONE;
  const byAgent = useSpan(agent ? null : "/v1/metrics/totals", span, { by: "agent" });
  const [slowest] = slowestFirst((byAgent.data?.items ?? []).filter(({ runs }) => runs));
  return html`<${Totals} span=${span} agent=${agent} slowest=${slowest} />
    ${agent && html`<${AgentFigures} ...${{ agent, span, judge, ...address }} />`}
    ${by ? html`<${Apart} key=${by} ...${{ by, agent, span, marks }} />`
      : html`<${Together} ...${{ span, marks }} />`}
    ${[FAILS, WENT_BADLY].map((each) => html`<${Groups} key=${each.title} ...${each} ...${{ agent, span, judge }} />`)}
    ${!agent && html`<${Agents} ...${{ span, judge }} found=${byAgent} />`}
    <${Providers} />`;
}

/** Of one agent the page also says what it costs, and whether a version or memory helped. */
export function Health({ query }) {
  const agent = query.agent || undefined;
  const span = spanOf(query), judge = query.judged_by || undefined;
  const choices = Object.entries(BY).filter(([name]) => !agent || ["agent", "version"].includes(name));
  const by = choices.some(([name]) => name === query.by) ? query.by : agent ? "version" : "";
  const { set, choice } = filtersOf(["health"], query);
  return html`<div class="head"><h1>Health${agent && html` of ${agent}`}</h1><div class="actions">
      <${AgentChoice} agent=${agent} set=${set} />
      ${choice("by", "Lines by", choices, { any: "", kind: "inline", value: by })} ${choice(...JUDGE_CHOICE)}
      <${PeriodChoice} query=${query} set=${set} /></div></div>
    <${Charts} key=${`${span} ${agent} ${judge}`} ...${{ span, by, agent, judge, query, set }} />`;
}
