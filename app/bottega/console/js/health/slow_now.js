/** Which agents and models are slow now, for pages that are no charts. */
import { get, withQuery } from "../api.js";
import { duration } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Link } from "../parts/basics.js";
import { timesOf } from "../parts/series.js";
import { slowNow } from "./slow.js";

const NOW = "15m", DAY = "24h";
/** What is read how often: at other times each, so that few requests come at once. */
const AGENTS_EVERY_MS = 70_000, MODELS_EVERY_MS = 100_000, DAY_EVERY_MS = 600_000;
const seconds = (value) => duration(1000 * value);

const useTotalsOf = (by, span, everyMs) => useData(withQuery("/v1/metrics/totals", { by, of: span }), { everyMs,
  from: () => get(withQuery("/v1/metrics/totals", { by, ...timesOf(span) })) });

/** "clerk: 95 % take less than 40 s in the last 15 minutes, 2.0 s in the last day", for each that is slow. */
export function SlowNow() {
  const agents = useTotalsOf("agent", NOW, AGENTS_EVERY_MS), models = useTotalsOf("model", NOW, MODELS_EVERY_MS);
  const days = { agent: useTotalsOf("agent", DAY, DAY_EVERY_MS), model: useTotalsOf("model", DAY, DAY_EVERY_MS) };
  const slow = Object.entries({ agent: agents, model: models }).flatMap(([by, now]) =>
    slowNow(now.data?.items ?? [], days[by].data?.items ?? [], `${by}s`).map((each) => ({ by, ...each })));
  return slow.length > 0 && html`<div class="note" role="status"><strong>Slow in the last 15 minutes</strong>
    <ul>${slow.map(({ by, key, now, day, why }) => html`<li key=${`${by} ${key}`}>
      ${by === "model" && "Runs with "}<${Link} path=${["health"]} query=${by === "agent" ? { agent: key, span: "1h" }
        : { by: "model", span: "1h" }}>${key}<//>: 95 % take less than <strong class="bad-text">${seconds(now)}</strong>
      ${day !== null && `, in the last day ${seconds(day)}`}. <span class="small soft">${why}</span></li>`)}
    </ul></div>`;
}
