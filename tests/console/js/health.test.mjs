import assert from "node:assert/strict";
import { test } from "node:test";

import { badlyOf, failureOf, groupsOf, numbersOf, signatureOf } from "../../../app/bottega/console/js/health/failures.js";
import { holdersOf, modelWaits, queueTrouble } from "../../../app/bottega/console/js/health/queue.js";
import { slowSince, stuckOf } from "../../../app/bottega/console/js/health/slow.js";

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
  const groups = groupsOf([run(1, lost), run(2, slow), run(3, { ...slow, message: slow.message.replace("3", "9") }, "b")],
    (each) => ({ what: failureOf(each).what }));
  assert.deepEqual(groups.map(({ runs }) => [numbersOf(runs, (each) => failureOf(each).how),
    numbersOf(runs, (each) => failureOf(each).of)]), [["2 timeout", "1 clerk, 1 b"], ["1 tool_policy", "1 clerk"]]);
  assert.equal(failureOf({ id: 1, agent: "a", status: "timeout", error: null }).how, "timeout");
});

test("runs that went badly are grouped by their reason, who judged them how, and the version of the agent", () => {
  const bad = (id, version, reason, source = "check", value = "FAILURE") => ({ id, agent: "clerk", version,
    outcome: { value, source, reason }, judged_by: { source, author: source === "feedback" ? "key:ada" : null } });
  const lacks = 'the answer did not contain "Reference:"';
  const groups = groupsOf([bad(1, 4, null, "feedback"), bad(2, 4, lacks), bad(3, 3, lacks),
    bad(4, 4, lacks), bad(5, 4, lacks, "feedback", "PARTIAL")], badlyOf);
  assert.deepEqual(groups.map((each) => [each.what, each.of, each.runs.length, each.how]),
    [[lacks, "clerk@4", 2, "bad by checks"], ["no reason given", "clerk@4", 1, "bad by people (key:ada)"],
      [lacks, "clerk@3", 1, "bad by checks"], [lacks, "clerk@4", 1, "partly by people (key:ada)"]]);
});

test("runs that wait for a model are told with their agents and causes", () => {
  const waits = (agent, runs, reason = "model", error = { code: "model_unavailable", message: "HTTP 500" }) =>
    ({ agent, runs, reason, error, oldest_at: `2026-01-01T00:00:0${runs % 10}Z` });
  assert.equal(modelWaits([waits("clerk", 3, "person", null)]), null);
  assert.deepEqual(modelWaits([waits("newsletter", 18), waits("clerk", 3, "person", null), waits("faq", 2)]), {
    runs: 20,
    text: "20 runs wait for a model, and go on by themselves when it answers: 18 of newsletter (model answered HTTP 500), "
      + "2 of faq (model answered HTTP 500).",
  });
  assert.match(modelWaits([waits("newsletter", 18), waits("faq", 1)], "faq").text, /^A run waits for a model.*1 of faq/);
});

test("a call that is under way far longer than usual is told before it ends", () => {
  const now = Date.parse("2026-01-01T06:30:00Z");
  const server = (at, median, calls = 100, failed = 0) => ({ name: "office", calls: { under_way: 3, waiting: 0,
    oldest_at: at }, recent: { calls, failed, duration_p50_ms: median } });
  const at = "2026-01-01T06:29:48Z";
  assert.deepEqual(stuckOf([server(at, 40)], now), [{ name: "office", number: 3, since: at, usual_ms: 40 }]);
  const usual = [server("2026-01-01T06:29:56Z", 40), server(at, 3000), server(null, 40), server(at, 40, 9, 6)];
  assert.deepEqual(stuckOf(usual, now), []);
});

test("what became far slower than it was is slow, however short its past", () => {
  const minute = (place, value, runs = 1) => ({ at: `2026-01-01T06:${20 + place}:00Z`, value, runs });
  const day = { at: null, value: 0.05, runs: 900 };
  const none = { at: null, value: null, runs: undefined };
  const fast = [0, 1, 2, 3, 4].map((place) => minute(place, 0.04)), broke = [5, 6, 7].map((place) => minute(place, 20, 2));
  const found = { since: "2026-01-01T06:25:00Z", now: 20, before: 0.04 };
  assert.deepEqual(slowSince([none, ...fast, ...broke]), found);
  assert.deepEqual(slowSince([none, ...fast, minute(5, null, 0), minute(6, 20, 9)]), { ...found,
    since: "2026-01-01T06:26:00Z" });
  assert.deepEqual(slowSince([day, ...broke]), { since: null, now: 20, before: 0.05 });
  assert.equal(slowSince([none, ...fast.slice(1), ...broke]), null);
  assert.equal(slowSince([none, ...fast, ...broke.slice(1)]), null);
  assert.equal(slowSince([day, ...broke, minute(8, 0.05, 9)]), null);
  assert.equal(slowSince([none, ...fast, minute(5, 0.5, 9)]), null);
  assert.equal(slowSince([]), null);
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
  assert.deepEqual([full.isBad, full.since], [true, "2026-01-01T00:00:00Z"]);
  assert.match(queueTrouble({ ...scheduler(0, 1), workers: [] }, late).text, /no worker is up. Start one/);
});

test("a queue that stands is told with who holds its places, and is bad after a minute", () => {
  const run = (agent, minute) => ({ agent, started_at: minute && `2026-01-01T00:0${minute}:00Z` });
  assert.deepEqual(holdersOf([run("researcher", 2), run("researcher", 1)]),
    { text: "researcher", since: "2026-01-01T00:01:00Z" });
  assert.equal(holdersOf([run("faq", null), run("researcher", 2), run("researcher", 1)]).text, "researcher (2), faq (1)");
  const waits = { workers: [{ pool: { runs: 2 } }], quotas: [],
    runs: [{ priority: 2, queued: 3, oldest_at: "2026-01-01T00:00:00Z" }] };
  assert.deepEqual([30_000, 60_000].map((ms) => queueTrouble(waits, Date.parse("2026-01-01T00:00:00Z") + ms).isBad),
    [false, true]);
});
