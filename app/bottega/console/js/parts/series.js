/** Figures over the period in the address: `?span=24h`, which ends now, or `?from=…&to=…`. */
import { get, withQuery } from "../api.js";
import { exact } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Select } from "./basics.js";
import { Filter } from "./lists.js";

const HOUR_MS = 3_600_000, DAY_MS = 24 * HOUR_MS;
const EVERY_MS = 30_000;
/** Maximum age of figures by minute: the server keeps them for 30 days. */
const MINUTES_KEPT_MS = 29 * DAY_MS;
/** Periods that end now, and the step between their points. */
export const SPANS = {
  "15m": { text: "15 minutes", ms: HOUR_MS / 4, step: "1m" },
  "1h": { text: "1 hour", ms: HOUR_MS, step: "1m" },
  "24h": { text: "24 hours", ms: DAY_MS, step: "5m" },
  "7d": { text: "7 days", ms: 7 * DAY_MS, step: "1h" },
  "30d": { text: "30 days", ms: 30 * DAY_MS, step: "1d" },
};
/** The period of all pages with figures if the address has none. */
const USUAL = "7d";

/** The part of an address that names a period. @param {Record<string, string>} query */
export const periodIn = ({ span, from, to }) => ({ span, from, to });

/** A period: a span, or "FROM/TO" in the times of the address, each of which may be empty. `usual`: without any. */
export const spanOf = ({ span, from, to }, usual = USUAL) => (from || to ? `${from ?? ""}/${to ?? ""}`
  : SPANS[span] ? span : usual);

/** A period as the address has it. */
export function addressOf(period) {
  const [from, to] = period.split("/");
  return to === undefined ? { span: period } : { from, to };
}

/** The query parameters of a period. */
export function timesOf(period, now = Date.now()) {
  const at = (text, usual) => new Date(Number.isNaN(Date.parse(text)) ? usual : text).toISOString();
  if (SPANS[period]) return { from: at("", now - SPANS[period].ms), to: at("", now) };
  const [from, until] = period.split("/");
  const to = at(until, now);
  return { from: at(from, Date.parse(to) - SPANS["30d"].ms), to };
}

/** "in the last 7 days", "from … to …" */
export function periodText(period) {
  const { from, to } = timesOf(period);
  return SPANS[period] ? `in the last ${SPANS[period].text}` : `from ${exact(from)} to ${exact(to)}`;
}

/** The parameters of a list for runs that were made in a period. */
export function createdIn(period) {
  const { from, to } = timesOf(period);
  return { created_after: from, created_before: period.split("/")[1] && to };
}

/** The columns of a period in a file. */
export const periodColumns = (period) => ({ from: () => timesOf(period).from, to: () => timesOf(period).to });

/** A period without the time before the first run of all, and the step that shows it in some points. */
async function charted(period) {
  const { from, to } = timesOf(period);
  const { items: [first] } = await get("/v1/runs?limit=1&order=asc");
  const begin = first?.created_at > from && first.created_at < to ? new Date(first.created_at).toISOString() : from;
  const isKept = Date.now() - Date.parse(begin) < MINUTES_KEPT_MS;
  const fits = Object.values(SPANS).find(({ ms, step }) => Date.parse(to) - Date.parse(begin) <= ms
    && (isKept || !step.endsWith("m")));
  return { from: begin, to, step: fits?.step ?? "1d" };
}

/**
 * The series of some metrics in one list, and their step. `names`: their keys, by metric; with `by` the keys are the
 * API's. What shows them is drawn anew for another period.
 */
export function useSeries(names, period, by) {
  const metrics = Object.keys(names);
  return useData(withQuery("/v1/metrics/series", { by, metric: metrics, period }), {
    everyMs: EVERY_MS,
    from: async () => {
      const about = { by, ...await charted(period) };
      const answers = await Promise.all(metrics.map((metric) =>
        get(withQuery("/v1/metrics/series", { metric, ...about }))));
      return answers.flatMap(({ metric, series }) =>
        series.map((each) => (by ? each : { ...each, key: names[metric] })));
    },
  });
}

/** An answer about a period; what shows it is drawn anew for another period. */
export const useSpan = (path, period, about = {}) => useData(path && withQuery(path, about), {
  everyMs: EVERY_MS, from: (asked) => get(withQuery(asked, timesOf(period))),
});

/** All figures of a period by key, as of `GET /v1/metrics/totals`. */
export const useTotals = (period, about = {}) => useSpan("/v1/metrics/totals", period, about);

/** Outcomes of judged runs of a period, as of `GET /v1/metrics/outcomes`. `judge`: only those of this source. */
export function useOutcomes(period, about, judge) {
  const found = useSpan("/v1/metrics/outcomes", period, about);
  const items = found.data?.items.filter(({ source }) => !judge || source === judge);
  return { ...found, data: found.data && { ...found.data, items } };
}

/** A period for `GET /v1/usage`, from a whole hour: it changes rarely, so that an address stays the same. */
export function usagePeriod(period) {
  const { from, to } = timesOf(period);
  return { since: `${from.slice(0, 13)}:00:00Z`, until: period.split("/")[1] ? to : undefined };
}

/** What an agent's calls of each model took in a period, as of `GET /v1/usage`. */
export const useSpanOfUsage = (agent, period) => useData(withQuery("/v1/usage", { by: "model", agent, limit: 200,
  ...usagePeriod(period) }), { everyMs: EVERY_MS });

const OWN = "own";
/** The time of the reader's clock as fields of forms have it. */
const local = (at) => new Date(Date.parse(at) - 60_000 * new Date(at).getTimezoneOffset()).toISOString().slice(0, 16);

/** The choice of a period; `set` changes the address. `usual`: "" if no period is a choice, too. */
export function PeriodChoice({ query, set, usual = USUAL, kind = "inline" }) {
  const period = spanOf(query, usual), isOwn = period.includes("/");
  const choose = (span) => set({ from: "", to: "", span: "", ...(span === OWN
    ? { from: local(timesOf(period || USUAL).from) } : { span }) });
  const time = (name, label) => html`<${Filter} kind=${kind} label=${label} value=${query[name] ?? ""}
    type="datetime-local" onChange=${(text) => set({ [name]: text })} />`;
  return html`<${Select} kind=${kind} label="Time" value=${isOwn ? OWN : period} any=${usual ? "" : "any"}
      options=${[...Object.entries(SPANS).map(([name, { text }]) => [name, `last ${text}`]), [OWN, "from … to …"]]}
      onChange=${choose} />
    ${isOwn && html`${time("from", "From")} ${time("to", "to")}`}`;
}
