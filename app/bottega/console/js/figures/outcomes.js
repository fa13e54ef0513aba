/** Whether runs went well by those who judged them, over time, and whether a version or memory helped. */
import { useState } from "preact/hooks";

import { LABEL_SOURCES } from "../en.js";
import { count, seconds } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Empty, Link, Loaded, Panel, Unpriced } from "../parts/basics.js";
import { Chart } from "../parts/chart.js";
import { Export } from "../parts/export.js";
import { Table } from "../parts/lists.js";
import { SPANS, SpanChoice, spanOf, timesOf, useOutcomes, useSpan, useSpanOfUsage,
  useTotals } from "../parts/series.js";
import { dollars, GoodMeans, useVersions, VersionFigures } from "../parts/version_figures.js";
import { go } from "../router.js";
import { memorySentence, numberOf, percent, points, rateOf, tallyOf, versionSentence } from "./rates.js";

const Partial = ({ of }) => !of.complete && html`<p class="small soft body">Of the newest 20,000 judged runs.</p>`;

/** Days with judged runs: the share of good ones as lines by source, and their numbers. `agent`: of one; or null. */
export function OutcomesOverTime({ agent, span }) {
  const found = useOutcomes(span, { by: "day", agent });
  return html`<${Panel} title="Outcomes over time"><${Loaded} from=${found} what="outcomes">${(answer) => {
    const days = [...new Set(answer.items.map(({ key }) => key))];
    if (!days.length) return html`<${Empty} title="No run of this time is judged."><p><${Link} needs="run"
      path=${["ratings"]} query=${{ agent }}>Rate answers<//>, or give agents a success check.</p><//>`;
    const of = (day, source) => tallyOf(answer.items.filter((each) => each.key === day && each.source === source));
    const sources = Object.keys(LABEL_SOURCES).filter((source) => answer.items.some((each) => each.source === source));
    const series = sources.map((source) => ({ key: LABEL_SOURCES[source], points: days.map((day) => {
      const { good, runs } = of(day, source);
      return { at: `${day}T00:00:00Z`, value: runs ? good / runs : null };
    }) }));
    return html`${days.length > 1 && html`<${Chart} label="Share of good runs" series=${series} format=${percent} />`}
      <${Table} label="Good runs by day" head=${["Day (UTC)", ...series.map(({ key }) => `#By ${key}`)]}>
      ${days.toReversed().map((day) => html`<tr key=${day}><td>${day}</td>${sources.map((source) => html`<td
        class="right">${rateOf(of(day, source))}</td>`)}</tr>`)}<//>
      <${GoodMeans} agent=${agent} span=${span} /><${Partial} of=${answer} />`;
  }}<//><//>`;
}

/** Columns of a file of comparisons. */
const COMPARED = {
  compared: ({ name }) => name,
  good_with: ({ given }) => given.good, runs_with: ({ given }) => given.runs,
  good_without: ({ without }) => without.good, runs_without: ({ without }) => without.runs,
  difference: (each) => each.difference, low_95: ({ low }) => low, high_95: ({ high }) => high,
};

/** What an effect of memory consists of: all runs, each pattern, each version of the agent. */
const comparisonsOf = (effect, agent) => [
  ...effect.by_pattern.map((each) => ({ ...each, kind: "pattern",
    name: `${each.name}, version ${each.version}, ${each.on_trial ? "on trial" : "validated"}` })),
  ...effect.by_version.map((each) => ({ ...each, kind: "version", name: `${agent}@${each.version}` })),
  { ...effect, kind: "all", name: "all" },
];

/** Runs with what memory learned beside those without it, a row for each comparison. */
const Compared = ({ of, what }) => of.length > 0 && html`<${Table} label=${`Good runs by ${what}`}
  head=${[`By ${what}`, "#Good with it", "#Good without it", "#Difference", "#95 % certainty"]}>
  ${of.map(({ name, pattern_id: id, given, without, ...each }) => html`<tr key=${name}><td>${id
    ? html`<${Link} path=${["memory", "patterns", id]}>${name}<//>` : name}</td>
    <td class="right">${rateOf(given)}</td><td class="right">${rateOf(without)}</td>
    <td class="right">${points(each.difference)} points</td>
    <td class="right">${points(each.low)} to ${points(each.high)}</td></tr>`)}<//>`;

/** Whether what memory learned helped, by the runs that were drawn to go without it. */
export function MemoryHelp({ agent, span }) {
  const effect = useSpan("/v1/metrics/memory-effect", span, { agent });
  const rows = effect.data?.patterns ? comparisonsOf(effect.data, agent) : [];
  const of = (kind) => rows.filter((each) => each.kind === kind);
  return html`<${Panel} title="Did memory help?" actions=${rows.length > 0 && html`<${Export} name="effect of memory"
    items=${rows} columns=${{ ...COMPARED, from: () => timesOf(span).from, to: () => timesOf(span).to }} />`}>
    <${Loaded} from=${effect} what="the effect of memory">${(found) => html`
      <p class="body lead">${memorySentence(found)}</p>
      <${Compared} of=${of("pattern")} what="pattern" /><${Compared} of=${of("version")} what="version and memory" />
      <p class="small soft body">Chance decides which runs go without a pattern or an insight that applies, so that
        nothing else makes the difference. ${found.patterns > 1 && `The difference of all is the mean of the rows by
        pattern, with the weights of Mantel and Haenszel, n·m/(n + m) for n runs with it and m without; so is that of
        a version. A pattern has a row for its runs on trial, and one for those since.`}</p>`}
      <//><//>`;
}

/** Two versions of an agent compared in words; at first the newest two that have judged runs. */
function VersionHelp({ of: { found: totals, outcomes } }) {
  const [chosen, setChosen] = useState([null, null]);
  return html`<${Panel} title="Did a version help?"><${Loaded} from=${outcomes} what="outcomes">${({ items }) => {
    const judged = new Set(items.map(numberOf));
    const ran = (totals.data?.items ?? []).filter(({ key, runs }) => runs && key.includes("@")).map(numberOf);
    const numbers = [...new Set([...judged, ...ran])].sort((a, b) => b - a);
    if (numbers.length < 2) return html`<${Empty} title="Only one version ran in this time." />`;
    const usual = [...numbers.filter((each) => judged.has(each)), ...numbers.filter((each) => !judged.has(each))]
      .slice(0, 2).sort((a, b) => b - a);
    const pair = chosen.map((each, place) => each ?? usual[place]);
    const [after, before] = pair.map((number) => ({ number,
      ...tallyOf(items.filter((each) => numberOf(each) === number)),
      total: totals.data?.items.find((each) => each.runs && numberOf(each) === number) }));
    const choice = (label, place) => html`<label class="inline">${label} <select value=${pair[place]}
      onChange=${(e) => setChosen(chosen.with(place, Number(e.target.value)))}>${numbers.map((each) => html`<option
        value=${each}>version ${each}</option>`)}</select></label>`;
    return html`<form class="filters body" onSubmit=${(e) => e.preventDefault()}>${choice("Compare", 0)}
      ${choice("with", 1)}</form>
      <p class="body lead">${versionSentence(after, before)}
      ${after.total && before.total && ` A run of version ${after.number} costs ${costOf(after.total)}, of version ${
        before.number} ${costOf(before.total)}; half of them take less than ${seconds(after.total.duration_p50)} and ${
        seconds(before.total.duration_p50)}.`}</p>`;
  }}<//><//>`;
}

const costOf = ({ run_cost: cost, runs }) => (cost ? dollars(cost / runs) : "what is not known");

/** Models that an agent called in a span, and whose price is not known. */
function useUnpriced(agent, span) {
  const found = useSpanOfUsage(agent, span);
  return (found.data?.items ?? []).filter(({ cost }) => !cost.complete).map(({ model }) => model);
}

function costSentence(agent, span, all) {
  if (!all) return `It did not run in the last ${span}.`;
  if (!all.runs) return `It did not run by itself in the last ${span}; as a part of other runs it cost ${
    all.cost ? dollars(all.cost) : "what is not known"}.`;
  const cost = all.run_cost ? `for ${dollars(all.run_cost)}: ${costOf(all)} a run, with what its sub-agents cost`
    : "at a cost that is not known";
  const ran = `In the last ${span} ${agent} ran ${count(all.runs)} times`;
  return `${ran} ${cost}. ${count(all.errors)} of these runs failed.`;
}

/** What an agent costs, in a sentence. */
function Cost({ agent, span }) {
  const found = useTotals(span, { by: "agent", agent });
  const unpriced = useUnpriced(agent, span);
  return html`<${Panel} title="What does it cost?"><${Loaded} from=${found} what="costs">${({ items: [all] }) => html`
    <p class="body lead">${costSentence(agent, SPANS[span].text, all)}
      ${" "}<${Unpriced} models=${unpriced} /> <${Link} path=${["usage"]} query=${{ agent }}>More about usage<//></p>`}
    <//><//>`;
}

/** The versions of an agent, in words and then in figures; both show the same answers. */
function ByVersion({ agent, span }) {
  const of = useVersions(agent, span);
  return html`<${VersionHelp} of=${of} /><${VersionFigures} agent=${agent} of=${of} />`;
}

/** Answers about one agent, in words and then in figures. */
export const AgentFigures = ({ agent, span }) => html`<div class="stacked" key=${span}>
  <${Cost} agent=${agent} span=${span} /><${ByVersion} agent=${agent} span=${span} />
  <${MemoryHelp} agent=${agent} span=${span} /><${OutcomesOverTime} agent=${agent} span=${span} /></div>`;

/** The same about memory, of one agent or of all. */
export function MemoryFigures({ query }) {
  const set = (change) => go(["memory", "figures"], { ...query, ...change }, { replace: true });
  const span = spanOf(query, "30d");
  const agents = useData("/v1/agents?limit=200");
  const names = (agents.data?.items ?? []).map(({ name }) => name);
  const agent = query.agent || undefined;
  return html`<form class="filters" onSubmit=${(e) => e.preventDefault()}>
    <label>Agent <select value=${agent ?? ""} onChange=${(e) => set({ agent: e.target.value })}>
      <option value="">all</option>${[...new Set([...names, ...(agent ? [agent] : [])])].map((each) => html`<option>
        ${each}</option>`)}</select></label>
    <${SpanChoice} span=${span} onChange=${(value) => set({ span: value })} /></form>
    <div class="stacked" key=${`${agent} ${span}`}><${MemoryHelp} agent=${agent} span=${span} />
      <${OutcomesOverTime} agent=${agent} span=${span} /></div>`;
}
