/** Changes of a graph: none changes the one that it is given. */
import assert from "node:assert/strict";
import { test } from "node:test";

import dagre from "../../../app/bottega/console/vendor/dagre.mjs";
import * as draft from "../../../app/bottega/console/js/graphs/draft.js";
import { arrange, HEIGHT, pathOf, WIDTH, widthOf } from "../../../app/bottega/console/js/parts/layout.js";

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

test("no node covers the label of an edge", () => {
  const nodes = ["sort", "refund", "answer", "letter"].map((id) => ({ id, label: id }));
  const edges = [["sort", "refund", 'output contains "money" and metadata.tier is "gold"'], ["sort", "answer", "else"],
    ["refund", "letter", "full history"], ["answer", "letter", ""], ["sort", "letter", "tool results"]]
    .map(([source, target, label]) => ({ id: `${source} ${target}`, source, target, label }));
  const places = arrange(dagre, nodes, edges);
  for (const edge of edges.filter(({ label }) => label)) {
    const at = places.edges.get(edge.id);
    for (const [id, { x, y }] of places.nodes) {
      const isClear = Math.abs(at.x - x) >= (widthOf(edge) + WIDTH) / 2 || Math.abs(at.y - y) >= (HEIGHT + 14) / 2;
      assert.ok(isClear, `${edge.id} is behind ${id}`);
    }
    assert.ok(pathOf(at.points).includes(` ${at.x} ${at.y}`), `${edge.id} is not on its line`);
  }
  assert.equal(widthOf({ label: "v1", room: "v1 · 1 ×" }), widthOf({ room: "v1 · 1 ×" }));
});
