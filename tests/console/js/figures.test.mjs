import assert from "node:assert/strict";
import { test } from "node:test";

import { brokenOf, differenceOf, memorySentence, pairOf, rateOf, tallyOf, versionSentence } from
  "../../../app/bottega/console/js/figures/rates.js";

const version = (number, good, runs) => ({ number, good, runs });

test("runs that went partly well are judged, and not good", () => {
  assert.deepEqual(tallyOf([{ good: 2, partly: 1, bad: 1 }, { good: 1, partly: 0, bad: 0 }]), { good: 3, runs: 5 });
  assert.equal(rateOf({ good: 3, runs: 5 }), "60 % (3 of 5)");
  assert.equal(rateOf({ good: 0, runs: 0 }), "–");
});

test("a few runs do not tell which version is better, many do", () => {
  assert.match(versionSentence(version(4, 2, 2), version(3, 0, 2)), /^Version 4 cannot be told from version 3 yet: 100 %/);
  assert.match(versionSentence(version(4, 90, 100), version(3, 50, 100)), /^Version 4 did better.*\+40 points/);
  assert.match(versionSentence(version(4, 50, 100), version(3, 90, 100)), /^Version 4 did worse.*−40 points/);
  assert.match(versionSentence(version(4, 9, 10), version(3, 1, 10)), /Nobody drew lots between the versions: other/);
  assert.equal(versionSentence(version(4, 0, 0), version(3, 1, 1)), "Version 4 has no judged run in this time.");
  assert.equal(versionSentence(version(4, 1, 1), version(3, 0, 0)), "Version 3 has no judged run in this time.");
  const { difference, low, high } = differenceOf({ good: 9, runs: 10 }, { good: 5, runs: 10 });
  assert.equal(difference, 0.4);
  assert.ok(low < 0.05 && high > 0.6 && high <= 1);
  const bounds = differenceOf({ good: 25, runs: 30 }, { good: 10, runs: 20 });
  assert.deepEqual([bounds.low, bounds.high].map((each) => each.toFixed(5)), ["0.06362", "0.56138"]); // the server's
});

test("two versions that are compared are those chosen, never the same one twice, or the newest that are judged", () => {
  const judged = [2, 3].map((number) => ({ key: `clerk@${number}` }));
  assert.deepEqual(pairOf([], [4, 3, 2, 1], judged), [3, 2]);
  assert.deepEqual(pairOf([], [4, 3], []), [4, 3]);
  assert.deepEqual(pairOf([1, 4], [4, 3, 2, 1], judged), [1, 4]);
  assert.deepEqual(pairOf([3, 3], [4, 3, 2, 1], judged), [3, 2]);
  assert.deepEqual(pairOf([2], [4, 3, 2, 1], judged), [2, 3]);
  assert.deepEqual(pairOf([], [4], judged), [4]);
});

test("what memory did is said with its interval, and not before it is known", () => {
  const sides = { given: { good: 25, runs: 30 }, without: { good: 10, runs: 20 } };
  assert.match(memorySentence({ ...sides, difference: 0.33, low: 0.07, high: 0.55 }),
    /^Memory helped: .* changed by \+33 points, with 95 % certainty between \+7 and \+55, against the runs drawn to/);
  assert.match(memorySentence({ ...sides, difference: -0.3, low: -0.5, high: -0.1 }), /^Memory did harm/);
  assert.match(memorySentence({ ...sides, difference: 0.1, low: -0.1, high: 0.3 }), /^It is not known yet/);
  assert.match(memorySentence({ difference: null }), /^It is not known yet.*no pattern/);
  const clerk = { name: "clerk", version: 4, memory: "full" }, off = { ...clerk, memory: "off" };
  assert.match(memorySentence({ difference: null }, off), /^Memory of clerk is off: no pattern has judged runs/);
  const helps = { difference: 0.33, low: 0.07, high: 0.55 }, open = { difference: 0, low: -0.2, high: 0.2 };
  const effect = { ...helps, by_version: [{ version: 3, ...helps }, { version: 4, ...open }] };
  assert.match(memorySentence(effect, clerk), /^Memory helped.* The newest version, 4: not known yet, \+0 points/);
  assert.match(memorySentence(effect, { ...off, version: 5 }), /^Memory of clerk is off\. .* 5: no runs to compare\.$/);
});

test("an agent is broken if its newest judged version did clearly worse than the one before", () => {
  const judged = (key, good, bad, source = "check") => ({ key, source, good, partly: 0, bad });
  const found = brokenOf([judged("clerk@3", 1, 9), judged("clerk@4", 100, 3), judged("clerk@4", 1, 0, "feedback"),
    judged("clerk@5", 0, 21), judged("faq@1", 1, 1), judged("faq@2", 0, 1), judged("stock@9", 0, 50),
    judged("desk@1", 0, 50), judged("desk@10", 50, 0), judged("writer@1", 50, 0), judged("writer@2", 25, 25)]);
  assert.deepEqual(found.map(({ agent, after, before }) => [agent, after, before]), [
    ["clerk", version(5, 0, 21), version(4, 101, 104)], ["writer", version(2, 25, 50), version(1, 50, 50)]]);
});
