import assert from "node:assert/strict";
import { test } from "node:test";

import { groupsOf, signatureOf } from "../../../app/bottega/console/js/health/failures.js";
import { modelWaits, queueTrouble } from "../../../app/bottega/console/js/health/queue.js";
import { slowNow, slownessOf } from "../../../app/bottega/console/js/health/slow.js";
import { fromFirst } from "../../../app/bottega/console/js/parts/points.js";

const run = (id, error, agent = "clerk") => ({ id, agent, status: "failed", error });

test("what differs from run to run is no part of a signature", () => {
  const told = (message) => signatureOf({ code: "agent_failed", message });
  assert.equal(told("order 17 of 'ada' is unknown"), told("order 4.5 of 'bob' is unknown"));
  assert.notEqual(told("order 17 is unknown"), told("order 17 is closed"));
  assert.match(signatureOf({ code: "model_unavailable", message: "it answered HTTP 500" }), /HTTP 500/);
  assert.notEqual(signatureOf({ code: "model_unavailable", message: "HTTP 500" }),
    signatureOf({ code: "model_unavailable", message: "HTTP 503" }));
});

test("failures of the same cause are one group, the largest first", () => {
  const slow = { code: "timeout", message: "the run took longer than its timeout_s of 3 s" };
  const lost = { code: "tool_policy", message: "no such tool" };
  const groups = groupsOf([run(1, lost), run(2, slow), run(3, { ...slow, message: slow.message.replace("3", "9") }, "b")]);
  assert.deepEqual(groups.map((each) => [each.code, each.runs.length, each.agents]),
    [["timeout", 2, ["b", "clerk"]], ["tool_policy", 1, ["clerk"]]]);
  assert.equal(groupsOf([{ id: 1, agent: "a", status: "timeout", error: null }])[0].code, "timeout");
});

test("runs that wait for a model are told with their agents and causes", () => {
  const waits = (agent, runs, reason = "model", error = { code: "model_unavailable", message: "HTTP 500" }) =>
    ({ agent, runs, reason, error, oldest_at: `2026-01-01T00:00:0${runs % 10}Z` });
  assert.equal(modelWaits([waits("clerk", 3, "person", null)]), null);
  assert.deepEqual(modelWaits([waits("newsletter", 18), waits("clerk", 3, "person", null), waits("faq", 2)]), {
    runs: 20, since: "2026-01-01T00:00:02Z",
    text: "20 runs wait for a model, and go on by themselves when it answers: 18 of newsletter (model answered HTTP 500), "
      + "2 of faq (model answered HTTP 500).",
  });
  assert.match(modelWaits([waits("newsletter", 18), waits("faq", 1)], "faq").text, /^A run waits for a model.*1 of faq/);
});

test("an agent far slower than the others is slow, if enough ran to say so", () => {
  const agent = (key, duration_p95, runs = 9) => ({ key, duration_p95, runs });
  const all = [agent("stock", 24.7), agent("faq", 0.2), agent("writer", 0.3), agent("rare", 99, 2)];
  assert.equal(slownessOf("stock", all), "slow: 82 times the other agents' middle");
  assert.equal(slownessOf("writer", all), "");
  assert.equal(slownessOf("rare", all), "");
  assert.equal(slownessOf("stock", all.slice(0, 2)), "");
});

test("an agent far slower than in its own day is slow now", () => {
  const agent = (key, duration_p95, runs = 9) => ({ key, duration_p95, runs });
  const now = [agent("faq", 0.2), agent("stock", 12), agent("rare", 99, 2), agent("new", 0.3)];
  const day = [agent("faq", 0.2, 18), agent("stock", 2, 18), agent("rare", 1, 18)];
  assert.deepEqual(slowNow(now, day, "agents"), [{ key: "stock", now: 12, day: 2, why: "slow: 6 times its own day" }]);
  assert.deepEqual(slowNow(now, [], "models"), [{ key: "stock", now: 12, day: null,
    why: "slow: 40 times the other models' middle" }]);
  assert.deepEqual(slowNow([agent("faq", 0.2), agent("new", 0.3), agent("stock", 4)], day, "agents"), []);
});

test("charts begin at the first run", () => {
  const series = [{ key: "runs", points: [0, 5, 10, 15].map((minute) =>
    ({ at: new Date(60_000 * minute).toISOString() })) }];
  const left = (first) => fromFirst(series, first)[0].points.length;
  assert.deepEqual([undefined, -60_000, 360_000, 960_000].map((ms) => left(ms && new Date(ms).toISOString())),
    [4, 4, 3, 2]);
  assert.deepEqual(fromFirst([], "2026-01-01T00:00:00Z"), []);
});

test("a queue that stands still says since when, why, and what to do", () => {
  const scheduler = (used, waiting) => ({ workers: [{ pool: { runs: 2 } }],
    runs: waiting ? [{ priority: 2, queued: waiting, oldest_at: "2026-01-01T00:00:00Z" }] : [],
    quotas: [{ name: "concurrent_runs", used: `${used}`, limit: "5" }, { name: "queued_runs", used: `${waiting}`,
      limit: "10" }] });
  const late = Date.parse("2026-01-01T00:05:00Z");
  assert.equal(queueTrouble(scheduler(5, 0), late), null);
  assert.equal(queueTrouble(scheduler(5, 3), Date.parse("2026-01-01T00:00:02Z")), null);
  assert.match(queueTrouble(scheduler(5, 3), late).text, /^3 runs wait in the queue, since 5 runs are under way.*BOTTEGA_CO/);
  assert.match(queueTrouble(scheduler(2, 1), late).text, /^A run waits in the queue, since the worker has not claimed/);
  const full = queueTrouble(scheduler(5, 10), late);
  assert.match(full.text, /^The queue is full: 10 of 10 runs wait \(limit queued_runs\), and new ones are refused/);
  assert.deepEqual([full.isFull, full.since], [true, "2026-01-01T00:00:00Z"]);
  assert.match(queueTrouble({ ...scheduler(0, 1), workers: [] }, late).text, /no worker is up. Start one/);
});
