import assert from "node:assert/strict";
import { test } from "node:test";

import { groupsOf, signatureOf } from "../../../app/bottega/console/js/health/failures.js";

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
