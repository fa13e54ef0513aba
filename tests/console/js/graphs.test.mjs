/** Changes of a graph: none changes the one that it is given. */
import assert from "node:assert/strict";
import { test } from "node:test";

import * as draft from "../../../app/bottega/console/js/graphs/draft.js";

const graph = Object.freeze({
  nodes: Object.freeze(["a", "b", "c"].map((agent) => Object.freeze({ agent, ttl_s: null }))),
  edges: Object.freeze([["a", "b"], ["b", "c"]].map(([source, target]) =>
    Object.freeze({ source, target, policy: "final_response_only" }))),
});

test("an edge that closes a cycle is shown with the path that it closes", () => {
  assert.deepEqual(draft.cycleOf(graph, "c", "a"), ["c", "a", "b", "c"]);
  assert.equal(draft.cycleOf(graph, "a", "c"), null);
});

test("a node goes with its edges", () => {
  const without = draft.withoutNode(graph, "b");
  assert.deepEqual(without.nodes.map(draft.nameOf), ["a", "c"]);
  assert.deepEqual(without.edges, []);
  assert.equal(graph.nodes.length, 3);
});

test("an edge exists once, with the policy that was set last", () => {
  const changed = draft.withEdge(graph, "a", "b", "full_history");
  assert.equal(changed.edges.length, 2);
  assert.equal(changed.edges.find((edge) => draft.idOf(edge) === "a→b").policy, "full_history");
});

test("a node moves within the list only", () => {
  assert.deepEqual(draft.moved(graph, "c", -1).nodes.map(draft.nameOf), ["a", "c", "b"]);
  assert.equal(draft.moved(graph, "a", -1), graph);
});

test("a condition is said in words", () => {
  const when = { all: [{ feature: "score", op: ">", value: 3 }, { not: { feature: "label", op: "exists" } }] };
  assert.equal(draft.conditionOf({ when }), "score > 3 and not (label exists)");
  assert.equal(draft.conditionOf({ else: true }), "else");
});
