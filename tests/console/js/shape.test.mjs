/** Forms made of the API's schemas: what they edit comes back as it was. */
import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { test } from "node:test";

import * as shape from "../../../app/bottega/console/js/forms/shape.js";

const { components } = JSON.parse(readFileSync(new URL("../../contract/snapshots/openapi.json", import.meta.url)));
const { schemas } = components;

/** Numbers that look random and are the same each time. */
function randomly(seed) {
  return (most) => {
    seed = (seed * 1_103_515_245 + 12_345) % 2 ** 31;
    return Math.floor((seed / 2 ** 31) * most);
  };
}

const TEXTS = ["", "a", "5", "true", "null", '"x"', " ", "[1]", "A text.", "{", "1e3", "-", "null "];

function anyValue(any, depth = 2) {
  const kinds = [() => any(1000) / 4, () => any(2) === 0, () => null, () => TEXTS[any(TEXTS.length)]];
  if (depth) kinds.push(() => Array.from({ length: any(3) }, () => anyValue(any, depth - 1)));
  return kinds[any(kinds.length)]();
}

test("a value comes back from what is typed for it", () => {
  const any = randomly(3);
  for (let turn = 0; turn < 2000; turn++) {
    const value = anyValue(any);
    assert.deepEqual(shape.meantBy(shape.typedOf(value)), value, JSON.stringify(value));
  }
});

test("a JSON Schema comes back from its rows, with what rows do not show", () => {
  const any = randomly(5);
  const types = ["string", "number", "integer", "boolean", "array", "object"];
  for (let turn = 0; turn < 500; turn++) {
    const names = ["a", "b", "c", "d"].slice(0, any(5));
    const properties = Object.fromEntries(names.map((name) => [name, { type: types[any(6)],
      ...(any(2) && { description: "D." }), ...(any(3) === 0 && { enum: ["x"] }), items: { type: types[any(6)] } }]));
    const schema = { type: "object", ...(any(2) && { title: "T" }), ...(any(4) && { properties }),
      ...(any(2) && { required: [...names.filter(() => any(2)), "elsewhere"] }), ...(any(2) && { $defs: { e: {} } }) };
    const again = shape.withRows(schema, shape.rowsOf(schema));
    assert.deepEqual(again, { ...schema, properties: schema.properties ?? {} });
    assert.deepEqual(shape.rowsOf(again), shape.rowsOf(schema));
  }
});

test("a condition comes back from its rows", () => {
  const any = randomly(7);
  const operators = Object.keys(shape.OPERATORS);
  for (let turn = 0; turn < 500; turn++) {
    const tests = Array.from({ length: 1 + any(3) }, () => ({ feature: "output", op: operators[any(operators.length)],
      ...(any(4) && { value: anyValue(any) }) }));
    const condition = any(3) ? { [any(2) ? "all" : "any"]: tests } : tests[0];
    const found = shape.testsOf(condition);
    assert.deepEqual(shape.conditionOf(found.group, found.tests, condition), condition);
  }
  assert.equal(shape.testsOf({ not: { feature: "a", op: "eq" } }), null);
  assert.equal(shape.testsOf({ feature: "a", op: "eq", value: 1, more: 2 }), null);
});

test("each field of the API's definitions has an editor, and few are JSON", () => {
  const asJson = ["AgentContent", "Node", "Edge"].flatMap((name) =>
    shape.fieldsOf(schemas[name], schemas).filter((each) => each.kind === "json").map((each) => each.name));
  assert.deepEqual(asJson, ["metadata"]);
  const kinds = Object.fromEntries(shape.fieldsOf(schemas.AgentContent, schemas).map((each) => [each.name, each.kind]));
  assert.deepEqual([kinds.system_message, kinds.model, kinds.tools, kinds.params, kinds.subagents, kinds.output_schema],
    ["long", "models", "list", "object", "kinds", "schema"]);
});

test("a tool of another type keeps what both have", () => {
  const { item } = shape.shapeOf("tools", schemas.AgentContent.properties.tools, schemas);
  const { by, kinds } = shape.shapeOf("tool", item, schemas);
  const http = { type: "http", name: "pay", description: "Pays.", url: "https://a.example", approval: "always" };
  const changed = shape.changedTo(kinds.client, http, by, schemas);
  assert.deepEqual(changed, { type: "client", name: "pay", description: "Pays.", approval: "always",
    parameters: { type: "object", properties: {} } });
});

test("a value of another type than its field's is edited as JSON", () => {
  const fields = shape.fieldsOf(schemas.AgentContent, schemas);
  const { tools, system_message: prompt, memory } = Object.fromEntries(fields.map((each) => [each.name, each]));
  assert.deepEqual([[], [{}], null, 5, [null], {}].map((value) => shape.fits(tools, value)),
    [true, true, true, false, false, false]);
  assert.deepEqual(["a", 5, ["a"]].map((value) => shape.fits(prompt, value)), [true, false, false]);
  assert.deepEqual(["off", "other"].map((value) => shape.fits(memory, value)), [true, false]);
});

test("a placeholder of a URL has a parameter, which goes with it unless somebody wrote more about it", () => {
  const tool = (url, parameters) => ({ type: "http", url, parameters });
  const one = shape.withPlaceholders(tool(""), tool("https://shop.example/orders/{order}"));
  assert.deepEqual(one.parameters, { type: "object", properties: { order: { type: "string" } }, required: ["order"] });
  const renamed = shape.withPlaceholders(one, { ...one, url: "https://shop.example/orders/{id}" });
  assert.deepEqual(Object.keys(renamed.parameters.properties), ["id"]);
  assert.deepEqual(renamed.parameters.required, ["id"]);
  const told = { ...one, parameters: { type: "object", properties: { order: { type: "integer" } } } };
  const kept = shape.withPlaceholders(told, { ...told, url: "https://shop.example/orders" });
  assert.deepEqual(kept.parameters, told.parameters);
  const none = tool("https://shop.example/", null);
  assert.equal(shape.withPlaceholders(tool("https://shop.example"), none), none);
});
