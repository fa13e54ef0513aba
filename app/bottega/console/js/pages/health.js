/** Whether runs succeed, how long they take, what fails and what it costs: of all, or by agent, version or model. */
import { useMemo } from "preact/hooks";

import { get, url, withQuery } from "../api.js";
import { COUNTED } from "../en.js";
import { AgentFigures } from "../figures/outcomes.js";
import { rateOf, tallyOf } from "../figures/rates.js";
import { clock, count, duration, seconds } from "../format.js";
import { html } from "../html.js";
import { badlyOf, groupsOf } from "../health/failures.js";
import { slowestFirst } from "../health/slow.js";
import { useData } from "../load.js";
import { Empty, Figure, Figures, Link, Loaded, Panel, Time } from "../parts/basics.js";
import { Chart } from "../parts/chart.js";
import { Export } from "../parts/export.js";
import { Table } from "../parts/lists.js";
import { titleOf } from "../parts/run_table.js";
import { fromFirst } from "../parts/points.js";
import { SpanChoice, spanOf, timesOf, useOutcomes, useSeries, useSpan, useTotals } from "../parts/series.js";
import { columnsOf, dollars } from "../parts/version_figures.js";
import { ServerState, Warnings } from "../parts/waits.js";
import { go } from "../router.js";
import { didOf, failedTool, times } from "../run/diagnosis.js";
import { RunState } from "../run/state.js";

const EVERY_MS = 15_000;
const MOST_FAILURES = 200;
const MOST_CHANGED = 10;
/** More lines than these are not told apart in a chart. */
const MOST_LINES = 10;
const share = (part, whole) => (whole ? `${((100 * part) / whole).toFixed(part && part < whole ? 1 : 0)} %` : "–");

/** When versions of agents, or of one, were stored in a span: `[{at, text}]`. */
async function readChanges(span, agent) {
  const { from } = timesOf(span);
  const { items } = await get("/v1/agents?limit=200");
  const isNew = (each) => each.version > 1 && each.created_at >= from && (!agent || each.name === agent);
  const changed = items.filter(isNew).slice(0, MOST_CHANGED);
  const lists = await Promise.all(changed.map(({ name }) =>
    get(url`/v1/agents/${name}/versions?order=desc&limit=20`)));
  return lists.flatMap((list, place) => list.items
    .filter((each) => each.version > 1 && each.created_at >= from)
    .map((each) => ({ at: each.created_at, text: `${changed[place].name}@${each.version}` })));
}

/**
 * A chart of some metrics. With `by`: of one, a line for each key; `agent`: only its own, or those of its versions.
 * `first`: time of the first run of all.
 */
function Measured({ title, names, by, agent, span, first, format, marks, colours = {} }) {
  const found = useSeries(names, span, by);
  const isOwn = ({ key }) => !agent || key === agent || key.startsWith(`${agent}@`);
  const lines = useMemo(() => fromFirst(largest((found.data ?? []).filter(isOwn)), first)
    .map((each) => ({ ...each, colour: colours[each.key] })), [found.data, agent, first]);
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
    <${Figure} name="95 % take less than" value=${seconds(all?.duration_p95)}
      note=${slowest && `slowest: ${slowest.key}, ${seconds(slowest.duration_p95)}`} />
    <${Figure} name="First token, 95 %" value=${seconds(all?.first_token_p95)} />
    <${Figure} name="Wait in the queue, 95 %" value=${seconds(all?.queue_wait_p95)} />
    <${Figure} name="Queued now"
      value=${scheduler.data ? count(waiting.reduce((n, each) => n + each.queued, 0)) : "–"}
      note=${oldest && html`since <${Time} at=${oldest} />`} /><//>
    <p class="small soft">${COUNTED} Each item of a batch is a run. Those out of time are failed, too.</p>`}<//>`;
}

const FAILS = { title: "What fails", none: "No run failed in this time.", head: ["Cause", "Code", "#Runs", "Agents"],
  lists: [{ status: "failed" }, { status: "timeout" }], like: ({ code }, agent) => ({ error_code: code, agent }) };
const WENT_BADLY = { title: "What went badly or partly", none: "Nobody judged a run of this time as bad or partly.",
  of: badlyOf, head: ["Reason", "Agent and version", "#Runs", "Judged"],
  lists: [{ status: "completed", outcome: ["FAILURE", "PARTIAL"] }],
  like: ({ runs: [{ agent, version, outcome: { value, source, reason } }] }) => ({ status: "completed", agent, version,
    outcome: value, outcome_source: source, outcome_reason: reason?.slice(0, 500) }) };

/** Runs of a span in groups; `lists`: what to read; `like`: the filters of a group's runs. */
function Groups({ title, none, head, lists, of = undefined, like, span, agent }) {
  const about = { order: "desc", limit: MOST_FAILURES, agent };
  const found = useData(withQuery("/v1/runs", { ...about, ...lists[0] }), { everyMs: EVERY_MS, from: async () => {
    const answers = await Promise.all(lists.map((each) => get(withQuery("/v1/runs", { ...each, ...about,
      created_after: timesOf(span).from }))));
    return answers.flatMap(({ items }) => items).sort((a, b) => (a.created_at < b.created_at ? 1 : -1));
  } });
  return html`<${Panel} title=${title}><${Loaded} from=${found} what="runs">${(runs) => runs.length ? html`
    <${Table} label=${title} head=${[...head, "First", "Last", "Newest run"]}>
      ${groupsOf(runs, of).map((each) => html`<tr key=${each.key}><td>${each.signature}
        ${each.code === "max_iterations" && html`<${ToolCause} run=${each.runs[0].id} />`}</td>
        <td><${Link} path=${["runs"]} query=${{ ...like(each, agent), span }}><code>${each.code}</code><//></td>
        <td class="right">${count(each.runs.length)}</td><td>${each.by.join(", ")}</td>
        <td><${Time} at=${each.runs.at(-1).created_at} /></td><td><${Time} at=${each.runs[0].created_at} /></td>
        <td><${Link} path=${["runs", each.runs[0].id]}>${titleOf(each.runs[0], 40)}<//></td></tr>`)}<//>
    ${runs.length >= MOST_FAILURES && html`<p class="small soft body">Of the last ${MOST_FAILURES}
      ${lists.length > 1 && " of a status"}.</p>`}` : html`<${Empty} title=${none} />`}<//><//>`;
}

/** Which tool kept failing in a run that used all its calls; its log alone tells. */
function ToolCause({ run }) {
  const { data } = useData(url`/v1/runs/${run}/events?order=desc&limit=200`);
  const state = new RunState();
  for (const event of data?.items.toReversed() ?? []) state.apply(event);
  const cause = failedTool(state);
  return cause && html`<p class="small">In the newest run ${cause}</p>`;
}

/** All agents side by side. Those that ran as a part of other agents' runs only have tokens, but no time. */
function Agents({ span, found }) {
  const outcomes = useOutcomes(span, { by: "agent" });
  const tally = (key) => tallyOf((outcomes.data?.items ?? []).filter((each) => each.key === key));
  return html`<${Panel} title="Agents, the slowest first" actions=${found.data && html`<${Export} name="agents"
    columns=${columnsOf(tally, timesOf(span))} items=${found.data.items} />`}>
    <${Loaded} from=${found} what="agents">${({ items }) => {
    const agents = slowestFirst(items.filter(({ runs, tokens }) => runs || tokens));
    return agents.length ? html`<${Table} label="Agents" head=${["Agent", "#Runs", "#Failed", "#Judged good",
      "#Half take", "#95 % take", "#Tokens", "#Cost of a run"]}>
      ${agents.map(({ key, runs, errors, tokens, run_cost: cost, ...lasted }) => html`<tr key=${key}>
        <td><${Link} path=${["health"]} query=${{ agent: key, span }}>${key}<//></td>
        <td class="right">${count(runs)}</td>
        <td class=${errors ? "right bad-text" : "right"}>${share(errors, runs)}</td>
        <td class="right">${rateOf(tally(key))}</td>
        <td class="right">${seconds(lasted.duration_p50)}</td><td class="right">${seconds(lasted.duration_p95)}</td>
        <td class="right">${count(tokens)}</td>
        <td class="right">${runs ? dollars(cost / runs, tokens) : "–"}</td></tr>`)}<//>`
      : html`<${Empty} title="No agent ran in this time." />`;
  }}<//><//>`;
}

function Providers() {
  const found = useData("/v1/provider-health", { everyMs: EVERY_MS });
  const whyOf = ({ agent, model, code, http_status: status, calls, first_at: first, last_at: last }) =>
    `${agent} with ${model}: ${didOf({ code, message: status ? `HTTP ${status}` : "" })} ${times(calls)}, ${
      clock(first)}${calls > 1 ? ` to ${clock(last)}` : ""}`;
  return html`<${Panel} title="Providers, by the last 100 calls that were sent"><${Loaded} from=${found}
    what="providers">${({ items }) => html`<${Table} label="Providers"
      head=${["Provider", "#Calls", "#Failed", "#Median", "#95 %", "Why", "Now"]}>
      ${items.map(({ name, recent, ...now }) => html`<tr key=${name}>
        <td><${Link} path=${["operations", "providers"]}>${name}<//></td>
        <td class="right">${count(recent.calls)}</td>
        <td class=${recent.failed ? "right bad-text" : "right"}>${share(recent.failed, recent.calls)}</td>
        <td class="right">${duration(recent.duration_p50_ms)}</td>
        <td class="right">${duration(recent.duration_p95_ms)}</td>
        <td class="small">${recent.failures.length ? recent.failures.map((each) => html`<p>${whyOf(each)}</p>`)
          : "–"}</td>
        <td class="small"><${ServerState} health=${now} /></td></tr>`)}<//>`}<//><//>`;
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
  ["95 % take less than", "duration_p95", seconds], ["First token, 95 %", "first_token_p95", seconds],
  ["Cost", "cost", dollars], ["Tokens", "tokens", count]];

const Together = (shown) => html`<div class="charts">
  <${Measured} title="Runs and failures" names=${{ runs: "runs", errors: "failed" }} format=${count} colours=${COLOURS}
    ...${shown} />
  <${Measured} title="Failures by code" names=${{ errors: "" }} by="code" format=${count} ...${shown} />
  <${Measured} title="Time of a run" names=${{ duration_p50: "half take less", duration_p95: "95 % take less" }}
    format=${seconds} ...${shown} />
  <${Measured} title="Waits" names=${WAITS} format=${seconds} ...${shown} /></div>`;

const Apart = ({ by, ...shown }) => html`<div class="charts">${CHARTS.map(([title, metric, format]) => html`
  <${Measured} key=${metric} title=${`${title} by ${by}`} names=${{ [metric]: "" }} by=${by} format=${format}
    ...${shown} />`)}</div>`;

function Charts({ span, by, agent }) {
  const changes = useData(withQuery("/v1/agents", { agent }), { from: () => readChanges(span, agent),
    everyMs: 60_000 });
  const marks = changes.data ?? NONE;
  const first = useData("/v1/runs?limit=1&order=asc").data?.items[0]?.created_at; // the charts begin there
  const byAgent = useSpan(agent ? null : "/v1/metrics/totals", span, { by: "agent" });
  const [slowest] = slowestFirst((byAgent.data?.items ?? []).filter(({ runs }) => runs));
  return html`<${Totals} span=${span} agent=${agent} slowest=${slowest} />
    ${agent && html`<${AgentFigures} agent=${agent} span=${span} />`}
    ${by ? html`<${Apart} key=${by} ...${{ by, agent, span, first, marks }} />`
      : html`<${Together} ...${{ span, first, marks }} />`}
    ${[FAILS, WENT_BADLY].map((each) => html`<${Groups} key=${each.title} ...${each} span=${span} agent=${agent} />`)}
    ${!agent && html`<${Agents} span=${span} found=${byAgent} />`}
    <${Providers} />`;
}

/** Of one agent the page also says what it costs, and whether a version or memory helped. */
export function Health({ query }) {
  const agent = query.agent || undefined;
  const span = spanOf(query, agent ? "30d" : "24h");
  const agents = useData("/v1/agents?limit=200");
  const names = new Set([...(agents.data?.items ?? []).map(({ name }) => name), ...(agent ? [agent] : [])]);
  const choices = Object.entries(BY).filter(([name]) => !agent || ["agent", "version"].includes(name));
  const by = choices.some(([name]) => name === query.by) ? query.by : agent ? "version" : "";
  const set = (change) => go(["health"], { ...query, ...change }, { replace: true });
  const choice = (label, value, name, options) => html`<label class="inline">${label} <select value=${value}
    onChange=${(e) => set({ [name]: e.target.value })}>${options.map(([each, words]) => html`
      <option value=${each}>${words}</option>`)}</select></label>`;
  return html`<div class="head"><h1>Health${agent && html` of ${agent}`}</h1><div class="actions">
      ${choice("Agent", agent ?? "", "agent", [["", "all"], ...[...names].map((each) => [each, each])])}
      ${choice("Lines by", by, "by", choices)}
      <${SpanChoice} span=${span} onChange=${(value) => set({ span: value })} /></div></div>
    <${Charts} key=${`${span} ${agent}`} span=${span} by=${by} agent=${agent} />`;
}
