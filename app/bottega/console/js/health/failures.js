/** Failed runs in groups of the same cause. Pure. */
import { causeOf } from "../run/diagnosis.js";

/** A cause without what differs from run to run: ids, numbers and quoted texts. */
export function signatureOf(error) {
  return causeOf(error)
    .replace(/[0-9a-f]{8}-[0-9a-f-]{27}/gi, "…")
    .replace(/(["'`])(?:(?!\1).)*\1/g, "…")
    .replace(/(?<!HTTP )\b\d+(?:\.\d+)?/g, "…");
}

/**
 * Groups of failed runs with the same code and signature, the largest first.
 *
 * @param {any[]} runs as of `GET /v1/runs`, the newest first
 */
export function groupsOf(runs) {
  const groups = new Map();
  for (const run of runs) {
    const code = run.error?.code ?? run.status;
    const signature = signatureOf(run.error);
    const key = `${code} ${signature}`;
    const group = groups.get(key) ?? { key, code, signature, runs: [], agents: new Set() };
    group.runs.push(run);
    group.agents.add(run.agent ?? run.graph);
    groups.set(key, group);
  }
  return [...groups.values()].map((each) => ({ ...each, agents: [...each.agents].sort() }))
    .sort((a, b) => b.runs.length - a.runs.length);
}
