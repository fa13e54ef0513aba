/** Runs as comma-separated values. Pure. */
import { causeOf } from "../run/diagnosis.js";

const COLUMNS = {
  id: (run) => run.id,
  question: (run) => run.question,
  agent: (run) => run.agent,
  graph: (run) => run.graph,
  user: (run) => run.user,
  session: (run) => run.session_id,
  status: (run) => run.status,
  cause: (run) => causeOf(run.error),
  outcome: (run) => (run.outcome?.source ? run.outcome.value : ""),
  made: (run) => run.created_at,
  ended: (run) => run.ended_at,
  seconds: (run) => (run.started_at && run.ended_at
    ? (Date.parse(run.ended_at) - Date.parse(run.started_at)) / 1000 : ""),
  tokens_in: (run) => run.usage?.input,
  tokens_out: (run) => run.usage?.output,
  cost: (run) => run.usage?.cost?.amount,
  currency: (run) => run.usage?.cost?.currency,
};

/** A field (RFC 4180). One that a spreadsheet would compute begins with an apostrophe. */
function field(value) {
  if (value == null) return "";
  const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
  return /[",\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
}

/** A line for each run, as of `GET /v1/runs`, after one of names. */
export const csvOf = (runs) => [
  Object.keys(COLUMNS), ...runs.map((run) => Object.values(COLUMNS).map((of) => of(run))),
].map((row) => `${row.map(field).join(",")}\r\n`).join("");
