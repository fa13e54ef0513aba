/** A JSON Schema, and a condition, as rows to edit. */
import { useContext, useState } from "preact/hooks";

import { html } from "../html.js";
import { Button, Select } from "../parts/basics.js";
import { JsonField, Known, Name } from "./parts.js";
import { conditionOf, hasRows, meantBy, OPERATORS, rowsOf, TEST, testsOf, typedOf, typeOf, TYPES, withField, withRows,
  withType } from "./shape.js";

const EMPTY = { type: "object", properties: {} };

/** The properties of an object, a row each; another schema is edited as JSON. */
export function SchemaRows({ shape, input, label, value, onChange, gone }) {
  const [asJson, setAsJson] = useState(false);
  const schema = value ?? EMPTY;
  if (asJson || !hasRows(schema)) return html`<${JsonField} ...${input} label=${`${label}, as JSON`} value=${value}
    rows=${8} onChange=${onChange} />
    ${hasRows(schema) && html`<div><${Button} kind="small" onClick=${() => setAsJson(false)}>As rows<//></div>`}`;
  const rows = rowsOf(schema);
  const keep = (next) => onChange(next.length || !shape.mayBeNull ? withRows(schema, next) : gone);
  const set = (at, part) => keep(rows.with(at, { ...rows[at], ...part }));
  const add = () => {
    const taken = rows.map((each) => each.name);
    let name = "field";
    for (let number = 2; taken.includes(name); number++) name = `field_${number}`;
    keep([...rows, { name, of: { type: "string" }, isRequired: true }]);
  };
  return html`<fieldset class="part"><legend>${label}</legend>
    ${rows.map((row, at) => html`<div class="row" key=${at}>
      <${Name} label="Field" value=${row.name} taken=${rows.map((each) => each.name)}
        onChange=${(name) => set(at, { name })} />
      <label>Type <select value=${typeOf(row.of)} onChange=${(e) => set(at, { of: withType(row.of, e.target.value) })}>
        ${typeOf(row.of) === "other" && html`<option value="other" disabled>other</option>`}
        ${Object.entries(TYPES).map(([type, word]) => html`<option value=${type}>${word}</option>`)}</select></label>
      <label class="grow">What it means <input value=${row.of?.description ?? ""}
        onInput=${(e) => set(at, { of: withField(row.of, "description", e.target.value || undefined) })} /></label>
      <label class="inline"><input type="checkbox" checked=${row.isRequired}
        onChange=${(e) => set(at, { isRequired: e.target.checked })} /> required</label>
      <${Button} kind="small" aria-label=${`Remove the field ${row.name}`}
        onClick=${() => keep(rows.filter((_, other) => other !== at))}>Remove<//>
      ${typeOf(row.of) === "other" && html`<${JsonField} label=${`${row.name}, as JSON`} value=${row.of} rows=${2}
        onChange=${(of) => set(at, { of })} />`}</div>`)}
    <div class="actions"><${Button} kind="small" onClick=${add}>Add a field<//>
      <${Button} kind="small ghost" onClick=${() => setAsJson(true)}>As JSON<//></div></fieldset>`;
}

/** Tests of which all, or one, must hold; a nested condition is edited as JSON. */
export function ConditionRows({ label, value, onChange, onRemove }) {
  const { features = [] } = useContext(Known);
  const found = testsOf(value);
  if (!found) return html`<${JsonField} label=${`${label}, as JSON`} value=${value} rows=${4} onChange=${onChange} />`;
  const { group, tests } = found;
  const keep = (next, by = group) => (next.length ? onChange(conditionOf(by, next, value)) : onRemove?.());
  const set = (at, part) => keep(tests.with(at, { ...tests[at], ...part }));
  const list = `features-${label.replace(/\W+/g, "-")}`;
  const withOperator = (test, op) => (op === "exists" ? withField({ ...test, op }, "value", undefined)
    : { ...test, op, value: test.value ?? "" });
  return html`<fieldset class="part"><legend>${label}</legend>
    ${tests.length > 1 && html`<${Select} label="Must hold" value=${group}
      options=${[["all", "all of them"], ["any", "one of them"]]} onChange=${(how) => onChange({ [how]: tests })} />`}
    ${tests.map((each, at) => html`<div class="row" key=${at}>
      <label>What <input value=${each.feature} list=${list} required spellcheck=${false} autocomplete="off"
        onInput=${(e) => set(at, { feature: e.target.value })} /></label>
      <${Select} label="Comparison" value=${each.op} options=${Object.entries(OPERATORS)}
        onChange=${(op) => keep(tests.with(at, withOperator(each, op)))} />
      ${each.op !== "exists" && html`<label>With <input value=${typedOf(each.value)}
        onInput=${(e) => set(at, { value: meantBy(e.target.value) })} /></label>`}
      ${(tests.length > 1 || onRemove) && html`<${Button} kind="small"
        aria-label=${`Remove the test of ${each.feature}`}
        onClick=${() => keep(tests.filter((_, other) => other !== at))}>Remove<//>`}</div>`)}
    <datalist id=${list}>${features.map((each) => html`<option value=${each} />`)}</datalist>
    <div><${Button} kind="small" onClick=${() => keep([...tests, { ...TEST, feature: tests[0].feature }])}>
      Add a test<//></div></fieldset>`;
}
