/** Whether runs went well by those who judged them, over time, and whether a version or memory helped. */
import { useState } from "preact/hooks";

import { LABEL_SOURCES } from "../en.js";
import { count, money, seconds } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Empty, Figure, Figures, Link, Loaded, Panel } from "../parts/basics.js";
import { Chart } from "../parts/chart.js";
import { Table } from "../parts/lists.js";
import { SPANS, SpanChoice, spanOf, useOutcomes, useSpan, useSpanOfUsage, useTotals } from "../parts/series.js";
import { Unpriced } from "../parts/unpriced.js";
import { GoodMeans, useVersions, VersionFigures } from "../parts/version_figures.js";
import { go } from "../router.js";
import { memorySentence, numberOf, percent, rateOf, tallyOf, versionSentence } from "./rates.js";

const SOURCES = Object.keys(LABEL_SOURCES);
const dollars = (amount) => money({ amount, currency: "USD" });
const byWhom = (source) => `#By ${LABEL_SOURCES[source]}`;

const Partial = ({ of }) => !of.complete && html`<p class="small soft body">Of the newest 20,000 judged runs.</p>`;

/** Days with judged runs: the share of good ones as lines by source, and their numbers. `agent`: of one; or null. */
export function OutcomesOverTime({ agent, span }) {
  const found = useOutcomes(span, { by: "day", agent });
  return html`<${Panel} title="Outcomes over time"><${Loaded} from=${found} what="outcomes">${(answer) => {
    const days = [...new Set(answer.items.map(({ key }) => key))];
    if (!days.length) return html`<${Unjudged} agent=${agent} />`;
    const of = (day, source) => tallyOf(answer.items.filter((each) => each.key === day && each.source === source));
    const sources = SOURCES.filter((source) => answer.items.some((each) => each.source === source));
    const series = sources.map((source) => ({ key: LABEL_SOURCES[source], points: days.map((day) => {
      const { good, runs } = of(day, source);
      return { at: `${day}T00:00:00Z`, value: runs ? good / runs : null };
    }) }));
    return html`${days.length > 1 && html`<${Chart} label="Share of good runs" series=${series} format=${percent} />`}
      <${Table} label="Good runs by day" head=${["Day (UTC)", ...sources.map(byWhom)]}>
      ${days.toReversed().map((day) => html`<tr key=${day}><td>${day}</td>${sources.map((source) => html`<td
        class="right">${rateOf(of(day, source))}</td>`)}</tr>`)}<//><${GoodMeans} agent=${agent} /><${Partial}
        of=${answer} />`;
  }}<//><//>`;
}

const Unjudged = ({ agent }) => html`<${Empty} title="No run of this time is judged.">
  <p><${Link} needs="run" path=${["ratings"]} query=${{ agent }}>Rate answers<//>, or give agents a success check.</p>
  <//>`;

/** Whether what memory learned helped: of the runs that were drawn to go without it, and of all others. */
export function MemoryHelp({ agent, span }) {
  const effect = useSpan("/v1/metrics/memory-effect", span, { agent });
  const all = useOutcomes(span, { by: "memory", agent });
  return html`<${Panel} title="Did memory help?"><${Loaded} from=${effect} what="the effect of memory">
    ${(found) => html`
    <p class="body lead">${memorySentence(found)}</p>
    ${found.difference !== null && html`<${Figures}>
      <${Figure} name="Good with it" value=${percent(found.given.good / found.given.runs)}
        note=${`${count(found.given.good)} of ${count(found.given.runs)}`} />
      <${Figure} name="Good without it" value=${percent(found.without.good / found.without.runs)}
        note=${`${count(found.without.good)} of ${count(found.without.runs)}`} />
      <${Figure} name="Patterns compared" value=${count(found.patterns)} /><//>`}
    <p class="small soft body">Chance decides which runs go without a pattern or an insight that applies, so that
      nothing else makes the difference. Runs are compared pattern by pattern.</p>`}<//>
    <${Loaded} from=${all} what="outcomes">${(answer) => {
    const of = (key) => tallyOf(answer.items.filter((each) => each.key === key));
    return answer.items.length > 0 && html`<${Table} label="Good runs by use of memory"
      head=${["Runs", "#Good", ...SOURCES.map(byWhom)]}>
      ${[["with", "could read memory"], ["without", "could not"]].map(([key, words]) => html`<tr key=${key}>
        <td>${words}</td><td class="right">${rateOf(of(key))}</td>${SOURCES.map((source) => html`<td class="right">
          ${rateOf(tallyOf(answer.items.filter((each) => each.key === key && each.source === source)))}</td>`)}
        </tr>`)}<//>
      <p class="small soft body">Nobody drew these: other questions or another time may make their difference.</p>
      <${Partial} of=${answer} />`;
  }}<//><//>`;
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
