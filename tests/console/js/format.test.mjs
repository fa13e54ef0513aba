/** Numbers, amounts and times as text. */
import assert from "node:assert/strict";
import { test } from "node:test";

import { ago, duration, excerpt, money, plain, tokens } from "../../../app/bottega/console/js/format.js";
import { searchOf } from "../../../app/bottega/console/js/parts/search_words.js";

test("an amount shows its first digit that is not zero", () => {
  const of = (amount, complete = true) => money({ amount, currency: "USD", complete });
  assert.equal(of("0.000123"), "0.00012 USD");
  assert.equal(of("12.345"), "12.35 USD");
  assert.equal(of("0", false), "no price");
  assert.equal(of("1", false), "≥ 1.00 USD");
  assert.equal(money(null), "–");
});

test("a length of time has two units at most", () => {
  assert.deepEqual(
    [-5, 999, 1500, 61_000, 3_660_000, 50 * 3_600_000].map(duration),
    ["0 ms", "999 ms", "1.5 s", "1 min 1 s", "1 h 1 min", "2 d 2 h"],
  );
  assert.equal(duration(null), "–");
});

test("a time is told from now", () => {
  const now = Date.parse("2026-01-02T00:00:00Z");
  assert.equal(ago("2026-01-01T23:57:00Z", now), "3 minutes ago");
  assert.equal(ago("2026-01-04T00:00:00Z", now), "in 2 days");
  assert.equal(ago(null), "–");
});

test("large counts are short, small ones exact", () => {
  assert.deepEqual([9999, 10_000, null].map(tokens), ["9,999", "10K", "–"]);
});

test("an input is the text of its parts", () => {
  const input = [{ role: "user", content: [{ type: "text", text: "What is this?" }, { type: "image", file: "f" }] }];
  assert.equal(plain(input), "What is this?\n[image]");
  assert.equal(excerpt("a\n  b", 9), "a b");
  assert.equal(excerpt("abcdef", 4), "abc…");
});

test("one field has names, words and dates", () => {
  const now = new Date(2026, 10, 29, 12);
  const span = (from, to) => ({ active_after: from.toISOString(), active_before: to.toISOString() });
  const day = (month, number, year = 2026) => new Date(year, month - 1, number);
  assert.deepEqual(searchOf("  ada refund ", now), { q: "ada refund" });
  assert.deepEqual(searchOf("ada yesterday", now), { q: "ada", ...span(day(11, 28), day(11, 29)) });
  assert.deepEqual(searchOf("2026-11-03 Today", now), { q: "", ...span(day(11, 3), day(11, 30)) });
  assert.deepEqual(searchOf("lamp 2026-10", now), { q: "lamp", ...span(day(10, 1), day(11, 1)) });
  assert.deepEqual(searchOf("3.12. x", now), { q: "x", ...span(day(12, 3, 2025), day(12, 4, 2025)) });
  assert.deepEqual(searchOf("A-1 3.50", now), { q: "A-1 3.50" });
});
