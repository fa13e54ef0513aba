/** Runs as programs and as a table: texts that other programs read. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { rowsOfTexts } from "../../../app/bottega/console/js/compare/rows.js";
import { linesOf } from "../../../app/bottega/console/js/compare/talk_lines.js";
import { lineDiff, nearChanges } from "../../../app/bottega/console/js/parts/line_diff.js";
import { csvOf, RUN_COLUMNS } from "../../../app/bottega/console/js/parts/csv.js";
import { programsOf, requestOf } from "../../../app/bottega/console/js/run/copy_as.js";

const RUN = { id: "r", agent: "clerk", graph: null, user: "o'neil", input: "It's \"$HOME\" `x` \\n\n🙂 $(1)",
  timeout_s: 60, output: "?", goals: [] };

test("a request has what was asked for, and no more", () => {
  assert.deepEqual(requestOf(RUN), { agent: "clerk", user: "o'neil", timeout_s: 60, goals: [], input: RUN.input });
});

test("a file for apply has the same request", () => {
  const [schedule] = JSON.parse(programsOf(RUN, "http://x").apply).schedules;
  assert.deepEqual(schedule.run, requestOf(RUN));
});

test("fields of a table are quoted, and none is a formula", () => {
  const run = { id: "1", question: 'a, "b"\nc', agent: "=1+1", user: "@x", status: "failed",
    outcome: { value: "FAILURE", source: "check", reason: "=no \"VAT\"" }, judged_by: { source: "feedback",
      author: "key:ada" }, memory_draw: "without", output: `-${"x".repeat(400)}`,
    error: { code: "model_unavailable", message: "HTTP 500" }, created_at: "2026-01-01T00:00:00Z", ended_at: null,
    version: 3, usage: { input: 3, output: 1, cost: { amount: "-0.5", currency: "USD" } } };
  const [names, row, end] = csvOf([run], RUN_COLUMNS).split("\r\n");
  assert.equal(names.split(",").length, 22);
  assert.equal(row, `1,"a, ""b""\nc",'=1+1,,3,'@x,,failed,model answered HTTP 500,"without, by lot",bad,people,key:ada,"'=no ""VAT"""`
    + `,2026-01-01T00:00:00Z,,,3,1,'-0.5,USD,'-${"x".repeat(299)}`);
  assert.equal(end, "");
  const unknown = { ...run, usage: { ...run.usage, cost: { amount: "0", currency: "USD", complete: false } } };
  assert.ok(csvOf([unknown], RUN_COLUMNS).includes(",3,1,,USD,"), "a cost without a price is no zero");
});

test("a list has a column for each value that its items have", () => {
  const items = [{ agent: "a", cost: { amount: "0.5", currency: "USD", complete: true }, tools: [] }, { agent: "b", note: null,
    tools: ["x", "y"] }];
  assert.equal(csvOf(items), 'agent,cost.amount,cost.complete,tools,note\r\na,0.5,true,,\r\nb,,,"[""x"",""y""]",\r\n');
  assert.equal(csvOf([]), "\r\n");
});

test("two conversations are compared line by line, arguments each on a line of its own", () => {
  const talk = (amount) => linesOf([{ role: "system", origin: "agent", content: "Help." },
    { role: "assistant", origin: "model", content: "", tool_calls: [{ name: "refund", arguments: { order: "A-1",
      amount } }] }, { role: "tool", origin: "tool", name: "refund", content: "paid" }]);
  const rows = rowsOfTexts(talk(10), talk(20)).filter(({ kind }) => kind === "changed");
  assert.deepEqual(rows, [{ kind: "changed", before: "  amount: 10", after: "  amount: 20" }]);
});

test("lines far from all that differ are left out", () => {
  const before = ["a", "b", "c", "d", "e", "f", "g"].join("\n");
  const near = (after) => nearChanges(lineDiff(before, after), 1).map(({ line }) => line).join("");
  assert.equal(near(before.replace("d", "D")), "…cdDe…");
  assert.equal(near(before.replace("a", "A")), "aAb…");
});
