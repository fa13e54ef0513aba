/** Failed runs in groups of the same cause. Pure. */
import { LABEL_SOURCES, OUTCOME_WORDS } from "../en.js";
import { causeOf } from "../run/diagnosis.js";

/** A cause without what differs from run to run: ids, numbers and quoted texts. */
export function signatureOf(error) {
  return causeOf(error)
    .replace(/[0-9a-f]{8}-[0-9a-f-]{27}/gi, "…")
    .replace(/(["'`])(?:(?!\1).)*\1/g, "…")
    .replace(/(?<!HTTP )\b\d+(?:\.\d+)?/g, "…");
}

const failureOf = ({ agent, graph, status, error }) => ({ code: error?.code ?? status, signature: signatureOf(error),
  by: agent ?? graph });

/** What makes runs that went badly alike: the reason, who judged, how, and the version of the agent. */
export const badlyOf = ({ agent, graph, version, outcome: { value, source, reason } }) => ({
  code: `${agent ?? graph}${version ? `@${version}` : ""}`, signature: reason ?? "no reason given",
  alike: `${value} ${source}`, by: `${OUTCOME_WORDS[value]}, by ${LABEL_SOURCES[source] ?? source}` });

/**
 * Groups of runs with the same code and signature, the largest first; `by`: the agents that failed, or who judged.
 *
 * @param {any[]} runs as of `GET /v1/runs`, the newest first
 * @param {(run: any) => {code: string, signature: string, by: string, alike?: string}} [of] what makes runs alike
 */
export function groupsOf(runs, of = failureOf) {
  const groups = new Map();
  for (const run of runs) {
    const { code, signature, by, alike = "" } = of(run);
    const key = `${code} ${signature} ${alike}`;
    const group = groups.get(key) ?? { key, code, signature, runs: [], by: new Set() };
    group.runs.push(run);
    group.by.add(by);
    groups.set(key, group);
  }
  return [...groups.values()].map((each) => ({ ...each, by: [...each.by].sort() }))
    .sort((a, b) => b.runs.length - a.runs.length);
}
