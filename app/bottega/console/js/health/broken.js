/** Agents of which the newest version does worse than the one before. */
import { get, url, withQuery } from "../api.js";
import { brokenOf } from "../figures/rates.js";
import { clock, count } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Link } from "../parts/basics.js";
import { timesOf } from "../parts/series.js";

const EVERY_MS = 65_000;

export function Broken() {
  const found = useData("/v1/metrics/outcomes", { everyMs: EVERY_MS,
    from: (path) => get(withQuery(path, { by: "version", ...timesOf("7d") })) });
  return brokenOf(found.data?.items ?? []).map((each) => html`<${One} key=${each.agent} ...${each} />`);
}

/** "clerk version 5: 0 of 21 good, version 4: 101 of 104; stored 06:43." Nothing, once a newer version is stored. */
function One({ agent, after, before }) {
  const versions = useData(url`/v1/agents/${agent}/versions?order=desc&limit=1`);
  const newest = versions.data?.items[0];
  if (versions.loading || (newest && newest.version !== after.number)) return null; // of a graph there is none
  return html`<p class="note bad" role="alert"><strong>${agent} version ${after.number}: ${count(after.good)} of ${
    count(after.runs)} good, version ${before.number}: ${count(before.good)} of ${count(before.runs)}</strong>${newest
    && `; stored ${clock(newest.created_at)}`}. <${Link} path=${["health"]} query=${{ agent, span: "7d" }}>Both versions
    in figures<//>${newest && html` <${Link} path=${["agents", agent]} query=${{ tab: "versions" }}>What changed<//>`}
  </p>`;
}
