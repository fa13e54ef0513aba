/** Groups of similar runs that failed or had a bad outcome. Pure. */
import { OUTCOME_WORDS } from "../en.js";
import { causeOf, judgeOf } from "../run/diagnosis.js";

/** A cause without the parts that differ between runs: ids, numbers and quoted texts. */
export function signatureOf(error) {
  return causeOf(error)
    .replace(/[0-9a-f]{8}-[0-9a-f-]{27}/gi, "…")
    .replace(/(["'`])(?:(?!\1).)*\1/g, "…")
    .replace(/(?<!HTTP )\b\d+(?:\.\d+)?/g, "…");
}

const nameOf = ({ agent, graph, version }) => `${agent ?? graph}${version ? `@${version}` : ""}`;

/** The common properties of a group of failed runs: the cause, the error's code and the version. */
export const failureOf = (run) => ({ what: signatureOf(run.error), how: run.error?.code ?? run.status,
  of: nameOf(run) });

/** The common properties of a group of bad runs: the reason, the outcome, its source and the version. */
export const badlyOf = (run) => ({ of: nameOf(run), how: `${OUTCOME_WORDS[run.outcome.value]} by ${judgeOf(run)}`,
  what: run.outcome.reason ?? (run.error ? signatureOf(run.error) : "no reason given") });

/**
 * Groups of similar runs, the largest group first: `{key, runs, …}`.
 *
 * @param {any[]} runs as of `GET /v1/runs`, the newest first
 * @param {(run: any) => Record<string, string>} of what alike runs have in common, which each group has, too
 */
export const groupsOf = (runs, of) => [...Map.groupBy(runs, (run) => Object.values(of(run)).join(" "))]
  .map(([key, alike]) => ({ key, .../** @type {any} */ (of(alike[0])), runs: alike }))
  .sort((a, b) => b.runs.length - a.runs.length);

/** "3 bad by people, 1 partly by checks": each text with its number of runs. */
export const numbersOf = (runs, of) => groupsOf(runs, (run) => ({ text: of(run) }))
  .map((each) => `${each.runs.length} ${each.text}`).join(", ");
