/** Shares of good runs, compared in words. Pure. */
import { JUDGES } from "../en.js";

const NORMAL_95 = 1.96;

/** Sums of `[{good, partly, bad}]`: how many runs went well, and how many were judged. */
export function tallyOf(items) {
  const sum = (of) => items.reduce((total, each) => total + of(each), 0);
  return { good: sum((each) => each.good), runs: sum((each) => each.good + each.partly + each.bad) };
}

/** "people 20 of 21, checks 80 of 83": numbers of good runs by the source of the outcome. */
export const bySource = (items) => Object.entries(JUDGES)
  .map(([source, name]) => ({ name, ...tallyOf(items.filter((each) => each.source === source)) }))
  .filter(({ runs }) => runs).map(({ name, good, runs }) => `${name} ${good} of ${runs}`).join(", ");

export const percent = (share) => (share == null ? "–" : `${Math.round(100 * share)} %`);
export const points = (share) => `${share < 0 ? "−" : "+"}${Math.abs(Math.round(100 * share))}`;

/** "80 % (8 of 10)"; "–": no run was judged. */
export const rateOf = ({ good, runs }) => (runs ? `${percent(good / runs)} (${good} of ${runs})` : "–");

/**
 * The share of good runs of `a` minus the share of good runs of `b`, and the 95 % interval by
 * Agresti and Caffo (2000), who add a good and a bad run to each. Null: `a` or `b` has no runs.
 */
export function differenceOf(a, b) {
  if (!a.runs || !b.runs) return null;
  const [p, q] = [a, b].map(({ good, runs }) => (good + 1) / (runs + 2));
  const half = NORMAL_95 * Math.sqrt((p * (1 - p)) / (a.runs + 2) + (q * (1 - q)) / (b.runs + 2));
  return { difference: a.good / a.runs - b.good / b.runs, low: Math.max(-1, p - q - half),
    high: Math.min(1, p - q + half) };
}

/** "better", "worse" or "open": the result of an interval. */
export const verdictOf = ({ low, high }) => (low > 0 ? "better" : high < 0 ? "worse" : "open");

/** "+20 points, with 95 % certainty between −20 and +52" */
export const difference = (of) => `${points(of.difference)} points, with 95 % certainty between ${points(of.low)} and ${
  points(of.high)}`;

const VERSION_WORDS = { better: "did better than", worse: "did worse than",
  open: "cannot be told from" };

/** A sentence about which of two versions is better. `a` and `b`: `{number, good, runs}`. */
export function versionSentence(a, b) {
  const of = differenceOf(a, b);
  if (!of) return `Version ${a.runs ? b.number : a.number} has no judged run in this time.`;
  const verdict = verdictOf(of);
  return `Version ${a.number} ${VERSION_WORDS[verdict]} version ${b.number}${verdict === "open" ? " yet" : ""}: ${
    rateOf(a)} of its judged runs went well, against ${rateOf(b)}. That is ${difference(of)}. Nobody drew
    lots between the versions: other questions or another time may explain a part of it.`.replace(/\s+/g, " ");
}

/** The version in a key such as "clerk@5". */
export const numberOf = ({ key }) => Number(key.split("@").at(-1));

/** The judged runs of a version among outcomes by version. */
export const tallyOfVersion = (items, number) => ({ number,
  ...tallyOf(items.filter((each) => numberOf(each) === number)) });

/** Two versions to compare: chosen versions, then the newest of `numbers`; versions with judged `items` come first. */
export function pairOf(chosen, numbers, items) {
  const judged = new Set(items.map(numberOf));
  const usual = [true, false].flatMap((is) => numbers.filter((each) => judged.has(each) === is)).slice(0, 2);
  return [...new Set([...chosen, ...usual.sort((a, b) => b - a)])].slice(0, 2);
}

/**
 * Agents whose newest judged version is worse than the version before: `[{agent, after, before}]`; versions as in
 * `versionSentence`; the worst agent first.
 *
 * @param {any[]} items as of `GET /v1/metrics/outcomes` by version
 */
export function brokenOf(items) {
  return [...new Set(items.map(({ key }) => key.split("@")[0]))].flatMap((agent) => {
    const own = items.filter(({ key }) => key.startsWith(`${agent}@`));
    const [after, before] = [...new Set(own.map(numberOf))].sort((a, b) => b - a)
      .map((number) => tallyOfVersion(own, number));
    const of = before && differenceOf(after, before);
    return of && verdictOf(of) === "worse" ? [{ agent, after, before, of }] : [];
  }).sort((a, b) => a.of.difference - b.of.difference);
}

const UNKNOWN = "It is not known yet if memory helped";
const MEMORY_WORDS = { better: "Memory helped", worse: "Memory did harm", open: UNKNOWN };
const HELPED = { better: "it helped", worse: "it did harm", open: "not known yet" };

/** The result of a comparison of runs with and without something, in words. */
export const helped = (of) => HELPED[verdictOf(of)];

/** Cells of a table: the difference, the 95 % interval and the result. `of`: result of `differenceOf`, or null. */
export const differenceCells = (of) => [...(of ? [`${points(of.difference)} points`,
  `${points(of.low)} to ${points(of.high)}`] : ["–", "–"]), helped(of ?? {})];

/** Whether memory helped, by `GET /v1/metrics/memory-effect`: a sentence. `agent`: the newest version of one. */
export function memorySentence(effect, agent) {
  const off = agent?.memory === "off" && `Memory of ${agent.name} is off`;
  if (effect.difference === null) return `${off || UNKNOWN}: no pattern has judged runs with and without it.`;
  const newest = agent && effect.by_version.find(({ version }) => version === agent.version);
  const now = newest ? `${helped(newest)}, ${difference(newest)}` : "no runs to compare";
  return `${off ? `${off}. ` : ""}${MEMORY_WORDS[verdictOf(effect)]}: with what it learned the share of good runs
    changed by ${difference(effect)}, against the runs drawn to go without it.${agent
    ? ` The newest version, ${agent.version}: ${now}.` : ""}`.replace(/\s+/g, " ");
}
