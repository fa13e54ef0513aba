/** Figures over a span of time up to now, as the address names it: `?span=24h`. */
import { get, withQuery } from "../api.js";
import { html } from "../html.js";
import { useData } from "../load.js";

const HOUR_MS = 3_600_000;
const EVERY_MS = 30_000;
/** The spans: their length, and the step of their points. */
export const SPANS = {
  "15m": { text: "15 minutes", ms: HOUR_MS / 4, step: "1m" },
  "1h": { text: "1 hour", ms: HOUR_MS, step: "1m" },
  "24h": { text: "24 hours", ms: 24 * HOUR_MS, step: "5m" },
  "7d": { text: "7 days", ms: 7 * 24 * HOUR_MS, step: "1h" },
  "30d": { text: "30 days", ms: 30 * 24 * HOUR_MS, step: "1d" },
};

/** The query parameters of a span that ends now. */
export function timesOf(span, now = Date.now()) {
  return { from: new Date(now - SPANS[span].ms).toISOString(), to: new Date(now).toISOString() };
}

/**
 * The series of some metrics in one list. `names`: their keys, by metric; with `by` the keys are the API's.
 * What shows them is drawn anew for another span.
 */
export function useSeries(names, span, by) {
  const metrics = Object.keys(names);
  return useData(withQuery("/v1/metrics/series", { step: SPANS[span].step, by, metric: metrics[0] }), {
    everyMs: EVERY_MS,
    from: async () => {
      const about = { step: SPANS[span].step, by, ...timesOf(span) };
      const answers = await Promise.all(metrics.map((metric) =>
        get(withQuery("/v1/metrics/series", { metric, ...about }))));
      return answers.flatMap(({ metric, series }) =>
        series.map((each) => (by ? each : { ...each, key: names[metric] })));
    },
  });
}

/** An answer about a span that ends now; what shows it is drawn anew for another span. */
export const useSpan = (path, span, about = {}) => useData(path && withQuery(path, about), {
  everyMs: EVERY_MS, from: (asked) => get(withQuery(asked, timesOf(span))),
});

/** All figures of a span by key, as of `GET /v1/metrics/totals`. */
export const useTotals = (span, about = {}) => useSpan("/v1/metrics/totals", span, about);
/** Outcomes of judged runs of a span, as of `GET /v1/metrics/outcomes`. */
export const useOutcomes = (span, about) => useSpan("/v1/metrics/outcomes", span, about);

/** The hour in which a span begins: it changes rarely, so that an address stays the same. */
export const hourOf = (span) => `${timesOf(span).from.slice(0, 13)}:00:00Z`;

/** What an agent's calls of each model took in a span, as of `GET /v1/usage`. */
export const useSpanOfUsage = (agent, span) => useData(withQuery("/v1/usage", { by: "model", agent, limit: 200,
  since: hourOf(span) }), { everyMs: EVERY_MS });

export const spanOf = (query, usual) => (SPANS[query.span] ? query.span : usual);

export const SpanChoice = ({ span, onChange }) => html`<label class="inline">Time <select value=${span}
  onChange=${(e) => onChange(e.target.value)}>${Object.entries(SPANS).map(([name, { text }]) => html`
    <option value=${name}>last ${text}</option>`)}</select></label>`;
