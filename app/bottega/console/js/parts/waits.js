/** Warnings about runs that wait in the queue or for a model, with the cause, on all pages of operators. */
import { get, url, withQuery } from "../api.js";
import { clock, count, duration, seconds } from "../format.js";
import { holdersOf, modelWaits, queueTrouble } from "../health/queue.js";
import { slowSince, stuckOf } from "../health/slow.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Link, Time } from "./basics.js";

const EVERY_MS = 30_000, SERVERS_EVERY_MS = 15_000;

/** The address of the list of these runs. */
export const waitingForModel = (agent) => ({ waiting_for: "model", agent });

/** All warnings. `scheduler`: result of `useData`; `agent`: only runs of this agent that wait for a model. */
export function Warnings({ scheduler, agent }) {
  const forModel = modelWaits(scheduler.data?.waiting ?? [], agent);
  const isBusy = forModel || scheduler.data?.workers.some(({ pool }) => pool.runs > 0);
  const servers = useData(isBusy ? "/v1/provider-health" : null, { everyMs: SERVERS_EVERY_MS }).data?.items ?? [];
  return html`<${ModelWaits} waits=${forModel} agent=${agent} servers=${servers} />
    <${Queue} trouble=${scheduler.data && queueTrouble(scheduler.data, Date.now())} />
    <${SlowNow} servers=${servers} />`;
}

function ModelWaits({ waits, agent, servers }) {
  const failing = servers.flatMap(({ name, breaker }) => Object.entries(breaker)
    .flatMap(([model, { open_since: since }]) => (since ? [`${model} of ${name} since ${clock(since)}`] : [])));
  return waits && html`<p class="note bad" role="alert">${waits.text} ${failing.length > 0
    && html`<strong>What keeps failing: ${failing.join(", ")}.</strong> `}<${Link} path=${["runs"]}
      query=${waitingForModel(agent)}>Runs that wait for a model<//>
    ${" "}<${Link} path=${["operations", "providers"]}>Model servers<//></p>`;
}

/** Why runs wait in the queue, and which runs use the places. `trouble`: result of `queueTrouble`. */
function Queue({ trouble }) {
  const running = useData(trouble ? withQuery("/v1/runs", { status: "running", limit: 200 }) : null,
    { everyMs: EVERY_MS });
  const held = running.data?.items ?? [], holders = holdersOf(held);
  return trouble && html`<p class=${`note ${trouble.isBad ? "bad" : ""}`} role="alert">${trouble.text}
    ${trouble.since && html` The oldest waits since <${Time} at=${trouble.since} />.`}
    ${held.length > 0 && html` The ${count(held.length)} places are held by runs of <strong>${holders.text}</strong>,
      the longest since <${Time} at=${holders.since} />.`}
    ${" "}<${Link} path=${["operations"]}>Workers and queue<//> <${Link} path=${["runs"]}
      query=${{ status: "running" }}>Runs under way<//></p>`;
}

/** Number of minutes with own figures: even with 200 agents, an answer may have this many. */
const MINUTES_MS = 3_000_000, DAY_MS = 86_400_000;
/** Pauses between two reads of each kind of data; they differ, so that few requests coincide. */
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

/** Slow models and agents: `[{by, key, since, now, before}]`, models first. */
function useSlow() {
  const minutes = { model: useMinutes("model", MODELS_EVERY_MS), agent: useMinutes("agent", AGENTS_EVERY_MS) };
  const days = { model: useDay("model"), agent: useDay("agent") };
  return Object.entries(minutes).flatMap(([by, { data }]) => (data ?? []).flatMap(({ key, points }) => {
    const day = days[by].data?.items.find((each) => each.key === key);
    const found = slowSince([{ at: null, value: day?.[MEDIANS[by]] ?? null, runs: day?.runs }, ...points]);
    return found ? [{ by, key, ...found }] : [];
  }));
}

/**
 * "Calls of office take 20.0 s since 06:32 (40 ms before)", for each slow one. `servers`: as of
 * `GET /v1/provider-health`.
 */
function SlowNow({ servers }) {
  const slow = useSlow(), stuck = stuckOf(servers, Date.now());
  return slow.length + stuck.length > 0 && html`<div class="note bad" role="alert"><strong>Slow now</strong>
    <ul>${stuck.map(({ name, number, since, usual_ms: usual }) => html`<li key=${name}>
      ${count(number)} ${number === 1 ? "call" : "calls"} of the model server <${Link} path=${["operations",
        "providers"]}>${name}<//> ${number === 1 ? "is" : "are"} under way, the oldest since
        ${" "}<${Time} at=${since} />: half of its last calls took less than ${duration(usual)}.</li>`)}
    ${slow.map(({ by, key, since, now, before }) => html`<li key=${`${by} ${key}`}>
      ${by === "agent" ? "Runs" : "Calls"} of <${Link} path=${["health"]} query=${{ span: "1h",
        ...(by === "agent" ? { agent: key } : { by }) }}>${key}<//>
      ${" "}take <strong class="bad-text">${seconds(now)}</strong>
      ${by === "model" && " to begin an answer"} ${since ? `since ${clock(since)}` : "for almost an hour or longer"}
      ${" "}(${seconds(before)} before).</li>`)}</ul></div>`;
}

/** `health`: an item of `GET /v1/provider-health`; missing: not known yet. */
export function ServerState({ health }) {
  if (!health) return "–";
  const { breaker, calls } = health;
  const failing = Object.entries(breaker).filter(([, { state }]) => state !== "closed");
  return html`${failing.map(([model, { state, retry_at: at, open_since: since }]) => html`<p key=${model}
    class="bad-text"><code>${model}</code> keeps failing${since && ` since ${clock(since)}`}: calls are held back until
    one trial call succeeds, ${state === "half_open" ? "which is under way" : Date.parse(at) > Date.now()
      ? html`due <${Time} at=${at} />` : "due now"}.</p>`)}
    <p>${count(calls.under_way)} under way${calls.waiting > 0 && `, ${count(calls.waiting)} held back`}</p>`;
}
