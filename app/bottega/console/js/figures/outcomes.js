/** Outcomes of runs over time, by source, and whether a version or memory helped. */
import { JUDGES } from "../en.js";
import { about, count } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Empty, Link, Loaded, Panel, Select, Unpriced } from "../parts/basics.js";
import { Chart } from "../parts/chart.js";
import { Export } from "../parts/export.js";
import { filtersOf, Rows, severalOf } from "../parts/lists.js";
import { addressOf, PeriodChoice, periodColumns, periodText, spanOf, useOutcomes, useSpan, useSpanOfUsage,
  useTotals } from "../parts/series.js";
import { dollars, GoodMeans, useVersions, VersionFigures } from "../parts/version_figures.js";
import { differenceCells, differenceOf, helped, memorySentence, numberOf, pairOf, percent, rateOf, tallyOf,
  tallyOfVersion, versionSentence } from "./rates.js";

const Partial = ({ of }) => !of.complete && html`<p class="small soft body">Of the newest 20,000 judged runs.</p>`;

/** The options in the choice of a source of outcomes. */
export const JUDGE_CHOICE = ["judged_by", "Judged by", Object.entries(JUDGES), { any: "all", kind: "inline" }];

const DAYS = { day: ({ key }) => key, judged_by: ({ source }) => JUDGES[source], good: ({ good }) => good,
  partly: ({ partly }) => partly, bad: ({ bad }) => bad };

/** Days with judged runs: the share of good runs as lines by source, and the numbers. `agent`: its name; null: all. */
export function OutcomesOverTime({ agent, span, judge }) {
  const found = useOutcomes(span, { by: "day", agent }, judge);
  return html`<${Panel} title="Outcomes over time" actions=${found.data && html`<${Export} name="outcomes over time"
    items=${found.data.items} columns=${{ agent: () => agent ?? "all", ...DAYS }} />`}>
    <${Loaded} from=${found} what="outcomes">${(answer) => {
    const days = [...new Set(answer.items.map(({ key }) => key))];
    if (!days.length) return html`<${Empty} title="No run of this time is judged."><p><${Link} needs="run"
      path=${["ratings"]} query=${{ agent }}>Rate answers<//>, or give agents a success check.</p><//>`;
    const of = (day, source) => tallyOf(answer.items.filter((each) => each.key === day && each.source === source));
    const sources = Object.keys(JUDGES).filter((source) => answer.items.some((each) => each.source === source));
    const series = sources.map((source) => ({ key: JUDGES[source], points: days.map((day) => {
      const { good, runs } = of(day, source);
      return { at: `${day}T00:00:00Z`, value: runs ? good / runs : null };
    }) }));
    return html`<${Chart} label="Share of good runs" series=${series} format=${percent} />
      <${Rows} label="Good runs by day" head=${["Day (UTC)", ...series.map(({ key }) => `#By ${key}`)]}
        items=${days.toReversed()} id=${(day) => day} cells=${(day) => [day,
          ...sources.map((source) => rateOf(of(day, source)))]} />
      <${GoodMeans} ...${{ agent, span, judge }} /><${Partial} of=${answer} />`;
  }}<//><//>`;
}

/** Columns of a file with comparisons: runs with and without learned patterns, or two versions. */
const DIFFERENCE = { difference: (of) => of.difference, low_95: ({ low }) => low, high_95: ({ high }) => high,
  verdict: helped };
const COMPARED = { compared: ({ name }) => name,
  good_with: ({ given }) => given.good, runs_with: ({ given }) => given.runs,
  good_without: ({ without }) => without.good, runs_without: ({ without }) => without.runs, ...DIFFERENCE };
const VERSIONS_COMPARED = { version: ({ after }) => after.number, compared_with: ({ before }) => before.number,
  good: ({ after }) => after.good, judged: ({ after }) => after.runs,
  good_of_other: ({ before }) => before.good, judged_of_other: ({ before }) => before.runs, ...DIFFERENCE };

/** The parts of memory's effect: all runs, each pattern, each version of the agent. */
const comparisonsOf = (effect, agent) => [
  ...effect.by_pattern.map((each) => ({ ...each, kind: "pattern",
    name: `${each.name}, version ${each.version}, ${each.on_trial ? "on trial" : "validated"}` })),
  ...effect.by_version.map((each) => ({ ...each, kind: "version", name: `${agent}@${each.version}` })),
  { ...effect, kind: "all", name: "all" },
];

/** Runs with learned patterns compared with runs without patterns, a row for each comparison. */
const Compared = ({ of, what, runs }) => of.length > 0 && html`<${Rows} label=${`Good runs by ${what}`} items=${of}
  head=${[`By ${what}`, "#Good with it", "#Good without it", "#Difference", "#95 % certainty", "Did it help?"]}
  id=${({ name }) => name} cells=${({ name, pattern_id: id, version, given, without, ...each }) => [
    id ? html`<${Link} path=${["memory", "patterns", id]}>${name}<//>` : name,
    ...[["with", given], ["without", without]].map(([draw, tally]) => (id ? rateOf(tally) : html`<${Link}
      path=${["runs"]} query=${{ ...runs, version, memory_draw: draw }}>${rateOf(tally)}<//>`)),
    ...differenceCells(each)]} />`;

/** Whether learned patterns helped, compared with the runs that got no patterns by random choice. */
export function MemoryHelp({ agent, span, judge }) {
  const effect = useSpan("/v1/metrics/memory-effect", span, { agent, judged_by: judge });
  const own = useData("/v1/agents?limit=200").data?.items.find(({ name }) => name === agent);
  const runs = { agent, judged_by: judge, ...addressOf(span) };
  const rows = effect.data?.patterns ? comparisonsOf(effect.data, agent) : [];
  const of = (kind) => rows.filter((each) => each.kind === kind);
  return html`<${Panel} title="Did memory help?" actions=${rows.length > 0 && html`<${Export} name="effect of memory"
    items=${rows} columns=${{ judged_by: () => JUDGES[judge] ?? "all", ...COMPARED, ...periodColumns(span) }} />`}>
    <${Loaded} from=${effect} what="the effect of memory">${(found) => html`
      <p class="body lead">${memorySentence(found, own)}</p>
      <${Compared} of=${of("pattern")} what="pattern" /><${Compared} of=${of("version")} what="version and memory"
        runs=${runs} />
      <p class="small soft body">Chance decides which runs go without a pattern that applies; episodes and lessons they
        get, so this tests patterns alone. “Helped” or “did harm”: the 95 % leave no doubt about the sign.
        ${" "}${found.patterns > 1 && `The difference of all is the mean of the rows by
        pattern, with the weights of Mantel and Haenszel, n·m/(n + m) for n runs with it and m without; so is that of
        a version. A pattern has a row for its runs on trial, and one for those since.`}</p>`}
      <//><//>`;
}

/** Two versions of an agent, compared in words: the versions in the address, or the newest two with judged runs. */
function VersionHelp({ agent, of: { span, judge, found: totals, outcomes }, query, set }) {
  const { items } = outcomes.data ?? { items: [] };
  const ran = (totals.data?.items ?? []).filter(({ key, runs }) => runs && key.includes("@"));
  const chosen = severalOf(query.versions).map(Number).filter((each) => each > 0 && Number.isInteger(each));
  const numbers = [...new Set([...[...items, ...ran].map(numberOf), ...chosen])].sort((a, b) => b - a);
  const pair = pairOf(chosen, numbers, items);
  const [after, before] = pair.map((number) => ({ ...tallyOfVersion(items, number),
    total: ran.find((each) => numberOf(each) === number) }));
  const choose = (place, number) => set({
    versions: (number === pair[1 - place] ? pair.toReversed() : pair.with(place, number)).join(",") });
  const choice = (label, place) => html`<${Select} kind="inline" label=${label} value=${pair[place]}
    options=${numbers.map((each) => [each, `version ${each}`])} onChange=${(text) => choose(place, Number(text))} />`;
  return html`<${Panel} title="Did a version help?" actions=${before && html`<${Export} label="Export"
    name="comparison of versions" items=${[{ after, before, ...differenceOf(after, before) }]} columns=${{
      judged_by: () => JUDGES[judge] ?? "all", agent: () => agent, ...VERSIONS_COMPARED, ...periodColumns(span) }} />`}>
    <${Loaded} from=${outcomes} what="outcomes">${() => before ? html`
      <form class="filters body" onSubmit=${(e) => e.preventDefault()}>${choice("Compare", 0)}
        ${choice("with", 1)}</form>
      <p class="body lead">${judge && `By ${JUDGES[judge]} alone: `}${versionSentence(after, before)}
      ${after.total && before.total && ` A run of version ${after.number} costs ${costOf(after.total)}, of version ${
        before.number} ${costOf(before.total)}; half of them take less than ${about(after.total.duration_p50)} and ${
        about(before.total.duration_p50)}.`}</p>` : html`<${Empty} title="Only one version ran in this time." />`}
      <//><//>`;
}

const costOf = ({ run_cost: cost, runs }) => (cost ? dollars(cost / runs) : "what is not known");

/** Models without a known price that an agent called in a period. */
function useUnpriced(agent, span) {
  const found = useSpanOfUsage(agent, span);
  return (found.data?.items ?? []).filter(({ cost }) => !cost.complete).map(({ model }) => model);
}

function costSentence(agent, span, all) {
  if (!all) return `It did not run ${span}.`;
  if (!all.runs) return `It did not run by itself ${span}; as a part of other runs it cost ${
    all.cost ? dollars(all.cost) : "what is not known"}.`;
  const cost = all.run_cost ? `for ${dollars(all.run_cost)}: ${costOf(all)} a run, with what its sub-agents cost`
    : "at a cost that is not known";
  const ran = `${span[0].toUpperCase()}${span.slice(1)} ${agent} ran ${count(all.runs)} times`;
  return `${ran} ${cost}. ${count(all.errors)} of these runs failed.`;
}

/** The cost of an agent, in a sentence. */
function Cost({ agent, span }) {
  const found = useTotals(span, { by: "agent", agent });
  const unpriced = useUnpriced(agent, span);
  return html`<${Panel} title="What does it cost?"><${Loaded} from=${found} what="costs">${({ items: [all] }) => html`
    <p class="body lead">${costSentence(agent, periodText(span), all)}
      ${" "}<${Unpriced} models=${unpriced} /> <${Link} path=${["usage"]}
        query=${{ agent, ...addressOf(span) }}>More about usage<//></p>`}
    <//><//>`;
}

/** Results of one agent, in words and then in figures. */
export function AgentFigures({ agent, span, judge, ...address }) {
  const about = { agent, span, judge }, of = useVersions(agent, span, judge);
  return html`<div class="stacked"><${Cost} ...${about} /><${VersionHelp} ...${{ agent, of, ...address }} />
    <${VersionFigures} agent=${agent} of=${of} /><${MemoryHelp} ...${about} />
    <${OutcomesOverTime} ...${about} /></div>`;
}

/** Results of memory, for one agent or for all agents. */
export function MemoryFigures({ query }) {
  const { set, choice } = filtersOf(["memory", "figures"], query);
  const span = spanOf(query);
  const agent = query.agent || undefined, judge = query.judged_by || undefined;
  return html`<form class="filters" onSubmit=${(e) => e.preventDefault()}>
    <${AgentChoice} agent=${agent} set=${set} />${choice(...JUDGE_CHOICE)}
    <${PeriodChoice} query=${query} set=${set} /></form>
    <div class="stacked" key=${`${agent} ${span} ${judge}`}><${MemoryHelp} ...${{ agent, span, judge }} />
      <${OutcomesOverTime} ...${{ agent, span, judge }} /></div>`;
}

/** The choice of an agent; the first option is all agents. `set` changes the address. */
export function AgentChoice({ agent, set }) {
  const agents = useData("/v1/agents?limit=200");
  const names = new Set([...(agents.data?.items ?? []).map(({ name }) => name), ...(agent ? [agent] : [])]);
  return html`<${Select} kind="inline" label="Agent" any="all" value=${agent ?? ""} options=${[...names]}
    onChange=${(name) => set({ agent: name, versions: "" })} />`;
}
