/** Facts about a call that waits for a person. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { factsOf, largeArguments, mentions, saidByUser } from "../../../app/bottega/console/js/parts/approval_facts.js";

test("a value is found in the forms that people write", () => {
  const cases = [
    ["I paid 20 EUR.", 20, true],
    ["I paid 20.00 EUR.", 20, true],
    ["I paid 20,50 EUR", 20.5, true],
    ["I paid 1,234.50", 1234.5, true],
    ["I paid 1 234,50", 1234.5, true],
    ["I paid 15.0.", 15, true],
    ["I paid 15,00", 15, true],
    ["I paid 52", "52.0", true],
    ["I paid 52.00", "52", true],
    ["I paid 1000", 1000, true],
    ["I paid 1,000 and no more", 1000, true],
    ["I paid 1.000,00 EUR", 1000, true],
    ["I paid 1'000.", 1000, true],
    ["I paid 1 000 000", 1_000_000, true],
    ["I want 2 500 g bags", 500, true],
    ["I paid 0.500", 0.5, true],
    ["It weighs 1.234 kg", 1.234, true],
    ["I paid EUR15, or 16EUR", 15, true],
    ["I paid 1,000", 1, false],
    ["It is from 12.5.2026", 12, false],
    ["customer 007", 7, true],
    ["customer 7", "007", false],
    ["I paid 20.50 EUR", 20, false],
    ["I paid 50.00 EUR", 49.999, false],
    ["I paid 120 EUR", 20, false],
    ["I paid 20 EUR.", 200, false],
    ["order a-17, please", "A-17", true],
    ["order A-171", "A-17", false],
    ["", "A-17", false],
  ];
  for (const [text, value, has] of cases) assert.equal(mentions(text, value), has, `${text} ${value}`);
});

const call = { id: "1", kind: "approval", tool: "refund", user: "ada", status: "pending" };
const asked = { ...call, arguments: { "order.id": "A-17", amount: 500 } };

test("facts are of what users said, and what people decided", () => {
  const text = saidByUser([
    { role: "assistant", content: "I refund 500 for A-17 now." },
    { role: "user", content: "Please refund A-17." },
  ]);
  const once = { ...asked, id: "2", run_id: "r", status: "resolved" };
  const approved = { decision: "approve", arguments: { "order.id": "A-17", amount: 5 } };
  const cases = [
    [{ resolution: approved }, 'was approved with other arguments: {"order.id":"A-17","amount":5}'],
    [{ resolution: { decision: "approve" } }, "was approved"],
    [{ resolution: { decision: "deny" } }, "was denied"],
    [{ resolution: { result: 1 } }, "was answered"],
    [{ status: "expired" }, "expired"],
    [{ kind: "client_tool", resolution: { result: 1 } }, null],
  ];
  for (const [more, became] of cases) {
    const about = became ? [[null, `the same call for ada ${became}`]] : [];
    assert.deepEqual(factsOf(asked, text, [{ ...once, ...more }]).map((each) => [each.name, each.text]),
      [["amount", "amount 500 is not in the user's messages"], ...about]);
  }
});

test("what a tool found is said of a value that no user wrote", () => {
  const found = [{ name: "order", result: { price: 500.0, customer: "ada" } }, { name: "other", result: null }];
  assert.deepEqual(factsOf(asked, "Please refund A-17.", [], found).map((each) => each.text),
    ["amount 500 is not in the user's messages, but in the result of order"]);
});

test("nothing is missing from texts that nobody here knows", () => {
  for (const unknown of [[], [{ role: "user", content: "", parts: [{ type: "file" }] }]]) {
    assert.deepEqual(factsOf(asked, saidByUser(unknown), []), []);
  }
});

test("arguments above their numbers, and those that are no numbers, are to be confirmed", () => {
  const large = { arguments: { amount: 1000.5, order: { weight: 3 } },
    confirm_above: { "arguments.amount": 1000, "arguments.order.weight": 3, "arguments.absent": 1 } };
  const found = (edited) => largeArguments(large, edited).map(({ name, value }) => `${name} ${value}`);
  assert.deepEqual(found(undefined), ["amount 1000.5"]);
  assert.deepEqual(found({ amount: 5 }), []);
  assert.deepEqual(found({ amount: "2000", order: { weight: [] } }), ["amount 2000", "order.weight (no number)"]);
  assert.deepEqual(largeArguments({ arguments: { amount: 9 } }), []);
});

test("what is another customer's is grave, and an amount that was looked up or differs slightly is not", () => {
  const asked = { id: "1", tool: "refund", kind: "approval", user: "lena", arguments: { order: "4444", amount: 54 } };
  const result = { status: 200, body: '{"order": "4444", "customer": "carla", "price": 54}' };
  const grave = (text, results, more = {}) => factsOf({ ...asked, ...more }, text, [], results)
    .map((each) => [each.text, each.isGrave]);
  assert.deepEqual(grave("Refund 4445, please.", [{ name: "order", result }]), [
    ["order 4444 is not in the user's messages, but in the result of order", false],
    ["order 4444 is of carla, by the result of order", true],
    ["amount 54 is not in the user's messages, but in the result of order", false]]);
  assert.deepEqual(grave("Refund 4444, it was 54.", [{ name: "order", result }], { user: "Carla" }), []);
  assert.deepEqual(grave("Refund 4444, it was 53.90.", []), [["amount 54 is not in the user's messages", false]]);
  assert.deepEqual(grave("Refund 4444, it was 5.40.", []), [["amount 54 is not in the user's messages", true]]);
});
