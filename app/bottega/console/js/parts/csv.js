/** Lists as comma-separated values. Pure. */
import { JUDGES, OUTCOME_WORDS } from "../en.js";
import { knownAmount } from "../format.js";
import { causeOf, memoryOf } from "../run/diagnosis.js";

/** The columns of runs in a file. */
export const RUN_COLUMNS = {
  id: (run) => run.id,
  question: (run) => run.question,
  agent: (run) => run.agent,
  graph: (run) => run.graph,
  version: (run) => run.version,
  user: (run) => run.user,
  session: (run) => run.session_id,
  status: (run) => run.status,
  cause: (run) => causeOf(run.error),
  memory: memoryOf,
  outcome: (run) => OUTCOME_WORDS[run.outcome?.value],
  judged_by: (run) => JUDGES[run.judged_by?.source],
  judged_by_name: (run) => run.judged_by?.author,
  reason: (run) => run.outcome?.reason,
  made: (run) => run.created_at,
  ended: (run) => run.ended_at,
  seconds: (run) => (run.started_at && run.ended_at
    ? (Date.parse(run.ended_at) - Date.parse(run.started_at)) / 1000 : ""),
  tokens_in: (run) => run.usage?.input,
  tokens_out: (run) => run.usage?.output,
  cost: (run) => knownAmount(run.usage?.cost),
  currency: (run) => run.usage?.cost?.currency,
  answer: ({ output }) => output && (typeof output === "string" ? output : JSON.stringify(output)).slice(0, 300),
};

/** A field (RFC 4180). One that a spreadsheet would compute begins with an apostrophe. */
function field(value) {
  if (value == null) return "";
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** The values of an item by their places, such as `cost.amount`; a list is one value. */
function valuesOf(item, before = "") {
  return Object.entries(item).flatMap(([name, value]) => {
    const place = before + name;
    if (name === "outcome") return [[place, OUTCOME_WORDS[value] ?? value]];
    if (name === "outcome_source") return [[place, JUDGES[value] ?? value]];
    if (value?.currency) return [[`${place}.amount`, knownAmount(value)], [`${place}.complete`, value.complete]];
    if (value === null || typeof value !== "object") return [[place, value]];
    return Array.isArray(value) ? [[place, value.length ? JSON.stringify(value) : ""]] : valuesOf(value, `${place}.`);
  });
}

/** The names of all values that some items have. */
const placesOf = (rows) => [...new Set(rows.flatMap((row) => [...row.keys()]))];

/**
 * A line for each item, after one of names.
 *
 * @param {any[]} items
 * @param {Record<string, (item: any) => unknown>} [columns] what a line has; left out: all values of the items
 */
export function csvOf(items, columns) {
  const rows = items.map((item) => new Map(columns
    ? Object.entries(columns).map(([name, of]) => [name, of(item)]) : valuesOf(item)));
  const names = columns ? Object.keys(columns) : placesOf(rows);
  return [names, ...rows.map((row) => names.map((name) => row.get(name)))]
    .map((row) => `${row.map(field).join(",")}\r\n`).join("");
}
