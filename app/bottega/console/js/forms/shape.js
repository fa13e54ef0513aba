/** The form for a value of the API, derived from the value's schema. Pure. */
import { FIELD_HELP } from "../en.js";

/** A field whose text may be longer than this number of characters has several lines. */
const LONGEST_LINE = 2000;
/** Fields with JSON Schemas or conditions, whose type in the OpenAPI document is object. */
const SCHEMAS = ["parameters", "output_schema", "input_schema", "schema"];
const CONDITIONS = ["when", "until"];
const ABBREVIATIONS = { url: "URL", json: "JSON", id: "ID", ttl: "TTL", s: "(seconds)", k: "count" };

/** The words of a field: `max_output_tokens` as "Max output tokens". */
export function labelOf(name) {
  const words = name.split("_").map((word) => ABBREVIATIONS[word] ?? word).join(" ");
  return words[0].toUpperCase() + words.slice(1);
}

/** A description, changed for a form: a form shows defaults, and fields can be empty. */
const inForm = (text) => text.replace(/\s*Default: (?:"[^"]*"|\S+?)\.(?=\s|$)/g, "").replace(/\bnull:/g, "left empty:")
  .replace(/\bNull:/g, "Left empty:").replace(/^True: (.)/, (_, first) => first.toUpperCase());

/** The schema of a reference, with the description next to the reference. */
export function resolved(schema, schemas) {
  if (!schema?.$ref) return schema ?? {};
  const found = resolved(schemas[schema.$ref.split("/").at(-1)], schemas);
  return schema.description ? { ...found, description: schema.description } : found;
}

/** The value of a property in one kind of an object; undefined: any value. */
const constOf = (property) => (property?.enum?.length === 1 ? property.enum[0] : property?.const ?? undefined);

/** The property that names the kind of an object, and the schemas by the property's value; null: none. */
function kindsOf(choices, schemas) {
  const all = choices.map((each) => resolved(each, schemas));
  const names = Object.keys(all[0]?.properties ?? {});
  const by = names.find((name) => all.every((each) => typeof constOf(each.properties?.[name]) === "string"));
  return by ? { by, kinds: Object.fromEntries(all.map((each) => [constOf(each.properties[by]), each])) } : null;
}

/**
 * The description of a form field: `{kind, name, label, help, isRequired, mayBeNull, usual, …}`.
 *
 * @param {string} name
 * @param {any} schema
 * @param {any} schemas
 * @param {boolean} [isRequired]
 * @returns {any}
 */
export function shapeOf(name, schema, schemas, isRequired = false) {
  const whole = resolved(schema, schemas);
  const choices = (whole.anyOf ?? [whole]).map((each) => resolved(each, schemas));
  const plain = choices.filter((each) => each.type !== "null");
  const one = plain.length === 1 ? plain[0] : null;
  const shared = { name, label: labelOf(name), help: FIELD_HELP[name]
      ?? inForm(whole.description ?? one?.description ?? ""), isRequired,
    mayBeNull: plain.length < choices.length, usual: whole["x-default"] };
  return { ...shared, ...(one ? ofOne(name, one, schemas) : ofSeveral(name, plain)) };
}

function ofSeveral(name, plain) {
  if (name === "model") return { kind: "models" };
  const [words, when] = [plain.find((each) => each.enum), plain.find((each) => each.properties?.when)];
  const confirms = plain.some((each) => each.properties?.confirm_above);
  if (words && when) return { kind: "rule", choices: words.enum, confirms };
  if (plain.some((each) => each.type === "string" && !each.enum)) return { kind: "textOr" };
  return { kind: "json" };
}

function ofOne(name, one, schemas) {
  if (CONDITIONS.includes(name)) return { kind: "condition" };
  if (SCHEMAS.includes(name)) return { kind: "schema" };
  if (name === "arguments") return { kind: "arguments" };
  if (one.oneOf) {
    const found = kindsOf(one.oneOf, schemas);
    return found ? { kind: "kinds", ...found } : { kind: "json" };
  }
  if (one.const !== undefined) return { kind: "constant" };
  if (one.enum) return { kind: "choice", choices: one.enum };
  if (one.type === "array") return ofList(one, schemas);
  if (one.type === "object" || one.properties) return ofObject(one, schemas);
  if (one.type === "boolean") return { kind: "switch" };
  if (one.type === "integer" || one.type === "number") {
    return { kind: "number", least: one.minimum ?? one.exclusiveMinimum, most: one.maximum ?? one.exclusiveMaximum,
      isWhole: one.type === "integer" };
  }
  if (one.type === "string") {
    return { kind: one.maxLength > LONGEST_LINE ? "long" : "text", most: one.maxLength, pattern: one.pattern };
  }
  return { kind: "json" };
}

function ofList(one, schemas) {
  const item = resolved(one.items, schemas);
  if (item.enum) return { kind: "several", choices: item.enum };
  if (item.type === "string") return { kind: "lines", most: one.maxItems };
  return item.oneOf || item.properties ? { kind: "list", item, most: one.maxItems } : { kind: "json" };
}

function ofObject(one, schemas) {
  if (one.properties) return { kind: "object", schema: one };
  const named = resolved(one.additionalProperties, schemas);
  if (named.properties) return { kind: "named", item: named };
  const isTextSchema = (each) => each?.type === "string";
  const values = one.additionalProperties?.anyOf ?? [one.additionalProperties];
  const secrets = values.find((each) => !isTextSchema(each));
  if (values.some(isTextSchema) && (!secrets || secrets.$ref?.endsWith("/SecretHeader"))) {
    return { kind: "texts", hasSecrets: Boolean(secrets) };
  }
  return { kind: "json" };
}

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);
const isTexts = (value) => Array.isArray(value) && value.every((each) => typeof each === "string");
const isText = (value) => typeof value === "string";
/** The values that the editor of a kind can show; other editors show all values. */
const FITS = { switch: (value) => typeof value === "boolean", choice: isText, text: isText, long: isText,
  number: (value) => typeof value === "number", several: isTexts, lines: isTexts,
  models: (value) => isText(value) || (isTexts(value) && value.length > 0), object: isObject, kinds: isObject,
  list: (value) => Array.isArray(value) && value.every(isObject), arguments: isObject, schema: isObject,
  condition: isObject, texts: (value) => isObject(value) && Object.values(value).every((each) => isText(each)
    || isText(each?.secret)), named: (value) => isObject(value) && Object.values(value).every(isObject) };

/** True if a field's editor can show a value, which a user may have typed as JSON; false: edit the value as JSON. */
export const fits = ({ kind, choices }, value) => value === null || ((FITS[kind]?.(value) ?? true)
  && (kind !== "choice" || choices.includes(value)));

/** The fields of an object, in their order. */
export const fieldsOf = (schema, schemas) => Object.entries(schema.properties).map(([name, each]) =>
  shapeOf(name, each, schemas, schema.required?.includes(name)));

/** A new object of a kind: it has the required fields. */
export function begun(schema, schemas) {
  const start = { string: "", integer: 1, number: 1, boolean: false, array: [], object: {} };
  return Object.fromEntries(Object.entries(schema.properties).flatMap(([name, property]) => {
    const fixed = constOf(property);
    const of = resolved(property, schemas);
    if (fixed !== undefined && fixed !== null) return [[name, fixed]];
    if (SCHEMAS.includes(name) && of.type === "object") return [[name, { type: "object", properties: {} }]];
    if (!schema.required?.includes(name)) return [];
    if (CONDITIONS.includes(name)) return [[name, TEST]];
    return [[name, of.enum?.[0] ?? start[of.type] ?? null]];
  }));
}

/** A copy of an object with another kind. The copy keeps the fields that both kinds have. */
export function changedTo(schema, value, by, schemas) {
  const kept = Object.entries(value ?? {}).filter(([name]) => name !== by && name in schema.properties
    && constOf(schema.properties[name]) === undefined && schema.properties[name].const === undefined);
  return { ...begun(schema, schemas), ...Object.fromEntries(kept) };
}

/** A copy of an object with one changed field; undefined: without the field. */
export function withField(value, name, part) {
  if (part !== undefined) return { ...value, [name]: part };
  const { [name]: gone, ...rest } = value ?? {};
  return rest;
}

const namesIn = (text) => [...new Set([...(text ?? "").matchAll(/\{(\w+)\}/g)].map(([, name]) => name))];
const PLACEHOLDER = JSON.stringify({ type: "string" });

/** An HTTP tool after a change of its URL: each placeholder has a parameter. Unused parameters without text go. */
export function withPlaceholders(before, after) {
  const [old, now] = [namesIn(before.url), namesIn(after.url)];
  const schema = { type: "object", properties: {}, ...after.parameters };
  const kept = rowsOf(schema).filter(({ name, of }) => now.includes(name) || !old.includes(name)
    || JSON.stringify(of) !== PLACEHOLDER);
  const added = now.filter((name) => kept.every((each) => each.name !== name));
  if (!hasRows(schema) || (!added.length && kept.length === rowsOf(schema).length)) return after;
  return { ...after, parameters: withRows(schema, [...kept, ...added.map((name) => ({ name, of: { type: "string" },
    isRequired: true }))]) };
}

// JSON Schemas of objects, as rows.

export const TYPES = { string: "text", number: "number", integer: "whole number", boolean: "yes or no",
  array: "list of texts" };

/** The word for the type of a property; "other": the property is edited as JSON. */
export function typeOf(property) {
  const type = property?.type;
  if (type === "array") return property.items?.type === "string" ? "array" : "other";
  return typeof type === "string" && type in TYPES && typeof property === "object" ? type : "other";
}

/** True if a schema can be edited in rows: one for each property. */
export const hasRows = (schema) => schema?.type === "object"
  && (schema.properties === undefined || (typeof schema.properties === "object" && schema.properties !== null))
  && (schema.required === undefined || Array.isArray(schema.required));

/** The rows of a schema: `[{name, of, isRequired}]`. */
export const rowsOf = (schema) => Object.entries(schema.properties ?? {}).map(([name, of]) =>
  ({ name, of, isRequired: schema.required?.includes(name) ?? false }));

/** A copy of a schema with other rows; the rest of the schema stays. */
export function withRows(schema, rows) {
  const names = rows.filter((each) => each.isRequired).map((each) => each.name);
  const own = new Set(Object.keys(schema.properties ?? {}));
  const kept = (schema.required ?? []).filter((name) => !own.has(name) || names.includes(name));
  const required = [...kept, ...names.filter((name) => !kept.includes(name))];
  const isShown = required.length > 0 || schema.required !== undefined;
  return { ...schema, properties: Object.fromEntries(rows.map(({ name, of }) => [name, of])),
    ...(isShown && { required }) };
}

export const withType = (of, type) => {
  const { items, ...rest } = of;
  return { ...rest, type, ...(type === "array" && { items: { type: "string" } }) };
};

// Conditions, as rows; values, as texts.

export const OPERATORS = { eq: "is", ne: "is not", gt: "is more than", ge: "is at least", lt: "is less than",
  le: "is at most", contains: "contains", in: "is one of", not_in: "is none of", exists: "is there" };
export const TEST = { feature: "output", op: "contains", value: "" };

const isTest = (each) => typeof each?.feature === "string" && each.op in OPERATORS
  && Object.keys(each).every((name) => ["feature", "op", "value"].includes(name));

/** `{group, tests}` of a condition; null: the condition is nested, and edited as JSON. */
export function testsOf(condition) {
  if (isTest(condition)) return { group: "all", tests: [condition] };
  const [group, ...others] = Object.keys(condition ?? {});
  if (others.length || !["all", "any"].includes(group) || !Array.isArray(condition[group])) return null;
  return condition[group].every(isTest) ? { group, tests: condition[group] } : null;
}

/** A condition with some tests; a group stays a group. */
export const conditionOf = (group, tests, before) => (tests.length === 1 && !before?.[group] ? tests[0]
  : { [group]: tests });

function parsed(text) {
  try {
    return JSON.parse(text);
  } catch {
    return undefined;
  }
}

/** A value as text for a field: a text has no quotes unless it looks like another value. */
export const typedOf = (value) => (typeof value === "string" && parsed(value.trim()) === undefined ? value
  : value === undefined ? "" : JSON.stringify(value));

/** The value of a typed text; see `typedOf`. */
export const meantBy = (text) => parsed(text.trim()) ?? (text.trim() === "null" ? null : text);
