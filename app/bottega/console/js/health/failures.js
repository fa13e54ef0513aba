/** Runs that failed or went badly, in groups that are alike. Pure. */
import { OUTCOME_WORDS } from "../en.js";
import { causeOf, judgeOf } from "../run/diagnosis.js";

/** A cause without what differs from run to run: ids, numbers and quoted texts. */
export function signatureOf(error) {
  return causeOf(error)
    .replace(/[0-9a-f]{8}-[0-9a-f-]{27}/gi, "…")
    .replace(/(["'`])(?:(?!\1).)*\1/g, "…")
    .replace(/(?<!HTTP )\b\d+(?:\.\d+)?/g, "…");
}

const nameOf = ({ agent, graph, version }) => `${agent ?? graph}${version ? `@${version}` : ""}`;

/** What failed runs have in common: the cause, and its code; and of which version they are. */
export const failureOf = (run) => ({ what: signatureOf(run.error), how: run.error?.code ?? run.status,
  of: nameOf(run) });

/** What runs that went badly have in common: the reason, how they went by whom, and of which version they are. */
export const badlyOf = (run) => ({ of: nameOf(run), how: `${OUTCOME_WORDS[run.outcome.value]} by ${judgeOf(run)}`,
  what: run.outcome.reason ?? (run.error ? signatureOf(run.error) : "no reason given") });

/**
 * Groups of runs that are alike, the largest first: `{key, runs, …}`.
 *
 * @param {any[]} runs as of `GET /v1/runs`, the newest first
 * @param {(run: any) => Record<string, string>} of what alike runs have in common, which each group has, too
 */
export const groupsOf = (runs, of) => [...Map.groupBy(runs, (run) => Object.values(of(run)).join(" "))]
  .map(([key, alike]) => ({ key, .../** @type {any} */ (of(alike[0])), runs: alike }))
  .sort((a, b) => b.runs.length - a.runs.length);

/** "3 bad by people, 1 partly by checks": how often runs have which text. */
export const numbersOf = (runs, of) => groupsOf(runs, (run) => ({ text: of(run) }))
  .map((each) => `${each.runs.length} ${each.text}`).join(", ");
