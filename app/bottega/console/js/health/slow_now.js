/** Which agents and models are slow now, by their own past. */
import { get, url, withQuery } from "../api.js";
import { clock, seconds } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Link } from "../parts/basics.js";
import { slowSince } from "./slow.js";

/** Minutes that are told apart: of 200 agents, too, they are no more than an answer may have. */
const MINUTES_MS = 3_000_000, DAY_MS = 86_400_000;
/** What is read how often: at other times each, so that few requests come at once. */
const AGENTS_EVERY_MS = 70_000, MODELS_EVERY_MS = 75_000, DAY_EVERY_MS = 600_000;
const MEDIANS = { agent: "duration_p50", model: "first_token_p50" };
const at = (ms) => new Date(ms).toISOString();

const useMinutes = (by, everyMs) => useData(url`/v1/metrics/series#${by}`, { everyMs, from: async () => {
  const about = { by, step: "1m", from: at(Date.now() - MINUTES_MS) };
  const [medians, runs] = await Promise.all([MEDIANS[by], "runs"].map((metric) =>
    get(withQuery("/v1/metrics/series", { metric, ...about }))));
  const numbers = new Map(runs.series.map(({ key, points }) => [key, points]));
  return medians.series.map(({ key, points }) => ({ key, points: points.map((each, place) => ({ ...each,
    runs: numbers.get(key)?.[place]?.value ?? 0 })) }));
} });
const useDay = (by) => useData(url`/v1/metrics/totals#${by}`, { everyMs: DAY_EVERY_MS, from: () => get(withQuery(
  "/v1/metrics/totals", { by, from: at(Date.now() - DAY_MS), to: at(Date.now() - MINUTES_MS) })) });

/** Those that are slow: `[{by, key, since, now, before}]`, models first. */
function useSlow() {
  const minutes = { model: useMinutes("model", MODELS_EVERY_MS), agent: useMinutes("agent", AGENTS_EVERY_MS) };
  const days = { model: useDay("model"), agent: useDay("agent") };
  return Object.entries(minutes).flatMap(([by, { data }]) => (data ?? []).flatMap(({ key, points }) => {
    const day = days[by].data?.items.find((each) => each.key === key);
    const found = slowSince([{ at: null, value: day?.[MEDIANS[by]] ?? null, runs: day?.runs }, ...points]);
    return found ? [{ by, key, ...found }] : [];
  }));
}

/** "Calls of office take 20.0 s since 06:32 (40 ms before)", for each that is slow. */
export function SlowNow() {
  const slow = useSlow();
  return slow.length > 0 && html`<div class="note bad" role="alert"><strong>Slow now</strong>
    <ul>${slow.map(({ by, key, since, now, before }) => html`<li key=${`${by} ${key}`}>
      ${by === "agent" ? "Runs" : "Calls"} of <${Link} path=${["health"]} query=${{ span: "1h",
        ...(by === "agent" ? { agent: key } : { by }) }}>${key}<//>
      ${" "}take <strong class="bad-text">${seconds(now)}</strong>
      ${by === "model" && " to begin an answer"} ${since ? `since ${clock(since)}` : "for almost an hour or longer"}
      ${" "}(${seconds(before)} before).</li>`)}</ul></div>`;
}
