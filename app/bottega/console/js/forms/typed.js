/** Editors of values by schema. Each editor changes only the part that the user edits. */
import { useContext, useId } from "preact/hooks";

import { html } from "../html.js";
import { Button, Select } from "../parts/basics.js";
import { JsonField, Known, Name } from "./parts.js";
import { ConditionRows, SchemaRows } from "./rows.js";
import { begun, changedTo, fieldsOf, fits, labelOf, meantBy, typedOf, withField, withPlaceholders } from "./shape.js";

/** Fields that offer names: the list in `Known`, by the field's name. */
const OFFERED = { agent: "agents", names: "agents", graph: "graphs", server: "servers", tool_name: "tools",
  exit_on_success: "tools", from: "nodes", secret: "secrets" };
const TOOL_WORDS = { builtin: "Built in", http: "HTTP request", mcp: "MCP server", client: "Client program" };
/** Maximum length of a range for which a slider is shown. */
const WIDEST = 1000;

/** Fields of tools that few users need. */
const RARE = ["approval_reason", "expires_s", "headers", "idempotent", "max_bytes", "output_schema", "timeout_s"];

/** Whether a value is the default. */
const isUsual = (value, usual = null) => value === undefined || JSON.stringify(value) === JSON.stringify(usual)
  || (usual === null && JSON.stringify(value) === "[]");

/** Fields that few users need, below a title that names the set fields; open at first if a field has an error. */
export function FoldedFields({ title, names, schema, value, at, onChange }) {
  const { schemas, problems } = useContext(Known);
  const isWrong = problems.some(({ pointer }) => pointer?.startsWith(at)
    && names.includes(pointer.slice(at.length + 1).split("/")[0]));
  const set = fieldsOf(schema, schemas).filter(({ name, usual }) => names.includes(name)
    && !isUsual(value[name], usual)).map(({ label }) => label);
  return html`<details class="folded" key=${isWrong} open=${isWrong}><summary>${title}${set.length > 0
    && html`: <span class="soft">${set.join(", ")}</span>`}</summary><div class="stacked"><${Fields} schema=${schema}
      value=${value} at=${at} onChange=${onChange} shown=${({ name }) => names.includes(name)} /></div></details>`;
}

/** @type {(shape: any) => boolean} */
const always = () => true;

/** The fields of an object; `at`: its JSON Pointer; `shown`: chooses fields by shape; without it, all fields. */
export function Fields({ schema, value, at, onChange, shown = always }) {
  const { schemas } = useContext(Known);
  return fieldsOf(schema, schemas).filter((each) => each.kind !== "constant" && shown(each)).map((each) => html`
    <${Field} key=${each.name} shape=${each} value=${value?.[each.name]} at=${`${at}/${each.name}`}
      onChange=${(part) => onChange(withField(value, each.name, part))} />`);
}

const WHOLE = ["object", "list", "kinds", "named"];

/** A text with code between backticks. */
const coded = (text) => text?.split("`").map((part, place) => (place % 2 ? html`<code>${part}</code>` : part));

/** One field with its help and its error. */
export function Field({ shape, value, at, onChange }) {
  const { problems } = useContext(Known);
  const id = useId();
  const isWhole = WHOLE.includes(shape.kind);
  const wrong = problems.filter(({ pointer }) => pointer === at || (!isWhole && pointer?.startsWith(`${at}/`)));
  const input = { id, "aria-describedby": `${id}-help`, "aria-invalid": wrong.length > 0 };
  const now = value === undefined ? shape.usual ?? null : value;
  return html`<div class=${`field ${wrong.length ? "wrong" : ""}`}>
    <${Editor} ...${{ shape, input, at, onChange }} value=${now} />
    <p class="small soft" id=${`${id}-help`}>${coded(shape.help)}</p>
    ${wrong.map((each) => html`<p class="small bad-text" role="alert">
      ${each.pointer !== at && html`<code>${each.pointer}</code> `}${each.detail}</p>`)}</div>`;
}

function Editor({ shape, input, value, at, onChange }) {
  const gone = shape.mayBeNull ? null : undefined;
  const given = { shape, input, value, at, onChange, gone };
  switch (fits(shape, value) ? shape.kind : "json") {
    case "switch": return html`<${Switch} ...${given} />`;
    case "choice": return html`<${Choice} ...${given} />`;
    case "number": return html`<${Numeric} ...${given} />`;
    case "text": return html`<${Text} ...${given} />`;
    case "long": return html`<label>${shape.label} <textarea rows="8" ...${input} required=${shape.isRequired}
      value=${value ?? ""} onInput=${(e) => onChange(e.target.value || (shape.isRequired ? "" : gone))}></textarea>
      </label>`;
    case "textOr": return typeof (value ?? "") === "string"
      ? html`<label>${shape.label} <textarea rows="3" ...${input} required=${shape.isRequired} value=${value ?? ""}
        onInput=${(e) => onChange(e.target.value || (shape.isRequired ? "" : gone))}></textarea></label>`
      : html`<${JsonField} ...${input} label=${`${shape.label}, as JSON`} value=${value} rows=${4}
        onChange=${onChange} />`;
    case "several": return html`<${Several} ...${given} choices=${shape.choices} />`;
    case "lines": return html`<${Lines} ...${given} />`;
    case "models": return html`<${Models} ...${given} />`;
    case "rule": return html`<${Rule} ...${given} />`;
    case "object":
    case "kinds": return html`<${Part} ...${given} />`;
    case "list": return html`<${List} ...${given} />`;
    case "named": return html`<${Named} ...${given} />`;
    case "texts": return html`<${Texts} ...${given} />`;
    case "arguments": return html`<${Arguments} ...${given} />`;
    case "schema": return html`<${SchemaRows} ...${given} label=${shape.label} />`;
    case "condition": return value === null
      ? html`<${Begin} label=${shape.label} onBegin=${() => onChange(begun({ properties: { when: {} },
        required: ["when"] }, {}).when)} />`
      : html`<${ConditionRows} ...${given} label=${shape.label} onRemove=${() => onChange(gone)} />`;
    default: return html`<${JsonField} ...${input} label=${`${shape.label}, as JSON`} value=${value} rows=${2}
      onChange=${onChange} />`;
  }
}

const Begin = ({ label, onBegin }) => html`<p><span class="small soft">${label}: none</span> <${Button} kind="small"
  onClick=${onBegin}>Set ${label.toLowerCase()}<//></p>`;

function Switch({ shape, input, value, onChange, gone }) {
  if (shape.mayBeNull) return html`<${Select} label=${shape.label} ...${input} any="usual" value=${String(value ?? "")}
    options=${[["true", "yes"], ["false", "no"]]} onChange=${(text) => onChange(text ? text === "true" : gone)} />`;
  return html`<label class="check"><input type="checkbox" ...${input} checked=${value === true}
    onChange=${(e) => onChange(e.target.checked)} /> ${shape.label}</label>`;
}

const Choice = ({ shape, input, value, onChange, gone }) => html`<${Select} label=${shape.label} ...${input}
  any=${shape.mayBeNull || value === null ? "usual" : ""} value=${value ?? ""} options=${shape.choices}
  onChange=${(chosen) => onChange(chosen || gone)} />`;

function Numeric({ shape, input, value, onChange, gone }) {
  const { least, most, isWhole } = shape;
  const hasSlider = least != null && most != null && most - least <= WIDEST;
  const tell = (text) => onChange(text === "" ? gone : Number(text));
  return html`<label>${shape.label} <input type="number" ...${input} value=${value ?? ""} min=${least} max=${most}
    step=${isWhole ? 1 : "any"} required=${shape.isRequired} placeholder=${shape.isRequired ? "" : "usual"}
    onInput=${(e) => tell(e.target.value)} /></label>
    ${hasSlider && html`<input type="range" class="slider" tabindex="-1" aria-hidden="true" min=${least} max=${most}
      step=${isWhole ? 1 : (most - least) / 100} value=${value ?? least} onInput=${(e) => tell(e.target.value)} />`}`;
}

function Text({ shape, input, value, onChange, gone }) {
  const known = useContext(Known);
  const offered = known[OFFERED[shape.name]];
  return html`<label>${shape.label} <input ...${input} value=${value ?? ""} maxlength=${shape.most}
    required=${shape.isRequired} list=${offered && `${input.id}-list`} autocomplete="off" spellcheck=${false}
    onInput=${(e) => onChange(e.target.value || (shape.isRequired ? "" : gone))} /></label>
    ${offered && html`<datalist id=${`${input.id}-list`}>${offered.map((each) => html`<option value=${each} />`)}
      </datalist>`}`;
}

function Several({ shape, value, choices, onChange }) {
  const own = value ?? [];
  const all = [...choices, ...own.filter((each) => !choices.includes(each))];
  const toggled = (each, isIn) => (isIn ? [...own, each] : own.filter((one) => one !== each));
  return html`<fieldset class="choices"><legend class="small soft">${shape.label}</legend>${all.map((each) =>
    html`<label class="inline" key=${each}><input type="checkbox" checked=${own.includes(each)}
    onChange=${(e) => onChange(toggled(each, e.target.checked))} /> ${each}</label> `)}
    ${!all.length && html`<span class="small soft">There is none to choose.</span>`}</fieldset>`;
}

function Lines({ shape, input, value, onChange, gone }) {
  const offered = useContext(Known)[OFFERED[shape.name]];
  if (offered && offered.length <= 40) return html`<${Several} shape=${shape} value=${value} choices=${offered}
    onChange=${(names) => onChange(names.length || !shape.mayBeNull ? names : gone)} />`;
  const own = value ?? [];
  if (own.some((each) => !each || each.includes("\n"))) return html`<${JsonField} ...${input} value=${value} rows=${2}
    label=${`${shape.label}, as JSON`} onChange=${onChange} />`;
  const tell = (text) => {
    const lines = text.split("\n").filter(Boolean);
    onChange(lines.length || !shape.mayBeNull ? lines : gone);
  };
  return html`<label>${shape.label}, one on each line <textarea rows="2" ...${input} value=${own.join("\n")}
    onChange=${(e) => tell(e.target.value)}></textarea></label>`;
}

/** One model, or several models: if a model fails, the next model is tried. */
function Models({ shape, input, value, onChange }) {
  const { models = [] } = useContext(Known);
  const own = [value ?? ""].flat();
  const tell = (at, text) => {
    const now = own.with(at, text);
    const left = now.filter((each, place) => each || place === at);
    onChange(left.length > 1 ? left : left[0] || null);
  };
  return html`${own.map((each, at) => html`<label key=${at}>${at ? `${shape.label} ${at + 1}, if those before fail`
    : shape.label} <input ...${at ? {} : input} value=${each} list=${`${input.id}-models`} autocomplete="off"
    placeholder="the default model" spellcheck=${false} onInput=${(e) => tell(at, e.target.value)} /></label>`)}
    <datalist id=${`${input.id}-models`}>${models.map((each) => html`<option value=${each} />`)}</datalist>
    ${value && own.at(-1) !== "" && html`<${Button} kind="small"
      onClick=${() => onChange([...own, models.find((each) => !own.includes(each)) ?? own[0]])}>Add another
        model<//>`}`;
}

/** The limits of a rule that asks twice above them, by argument; null: a different rule. */
function aboveOf(value) {
  const bounds = value?.always === true && Object.keys(value).length === 2 ? value.confirm_above : null;
  return bounds && Object.values(bounds).every((each) => typeof each === "number") ? bounds : null;
}

/** A rule about people: words, or a condition. */
function Rule({ shape, input, value, onChange, gone, at }) {
  const isWhen = value !== null && typeof value === "object" && "when" in value && Object.keys(value).length === 1;
  const above = shape.confirms && aboveOf(value);
  if (value !== null && !isWhen && !above && !shape.choices.includes(value)) return html`<${JsonField} ...${input}
    value=${value} label=${`${shape.label}, as JSON`} rows=${2} onChange=${onChange} />`;
  const begin = { feature: "arguments.amount", op: "gt", value: 100 };
  const asTold = { when: { when: begin }, above: { always: true, confirm_above: { [begin.feature]: begin.value } } };
  const tell = (word) => onChange(asTold[word] ?? (word || gone));
  return html`<label>${shape.label} <select ...${input} value=${isWhen ? "when" : above ? "above" : value ?? ""}
    onChange=${(e) => tell(e.target.value)}>${shape.mayBeNull && html`<option value="">usual</option>`}
    ${shape.choices.map((each) => html`<option value=${each}>${each}</option>`)}<option value="when">
    under a condition</option>${shape.confirms && html`<option value="above">always, and large ones twice</option>`}
    </select></label>
    ${above && Object.entries(above).map(([name, most], place) => html`<div class="row" key=${place}>
      <label>Argument <input value=${name} required spellcheck=${false}
        onChange=${(e) => onChange({ ...value, confirm_above: renamed(above, name, e.target.value) })} /></label>
      <label>Twice above <input type="number" step="any" required value=${most}
        onInput=${(e) => onChange({ ...value, confirm_above: { ...above, [name]: Number(e.target.value) } })} /></label>
      </div>`)}
    ${isWhen && html`<${ConditionRows} label=${`${shape.label} when`} value=${value.when} at=${`${at}/when`}
      onChange=${(when) => onChange({ when })} />`}`;
}

/** An object inside another one, perhaps of one of several kinds; null: it is not there. */
function Part({ shape, value, at, onChange, gone }) {
  const { schemas } = useContext(Known);
  const isPlain = shape.name === "params"; // sliders are shown before one is moved
  const [schema] = shape.kinds ? Object.values(shape.kinds) : [shape.schema];
  if (value === null && !isPlain) return html`<${Begin} label=${shape.label}
    onBegin=${() => onChange(begun(schema, schemas))} />`;
  const keep = (next) => onChange(isPlain && !Object.keys(next).length ? gone : next);
  const given = { schema, value: value ?? {}, at, onChange: keep };
  return html`<fieldset class="part"><legend>${shape.label}</legend>
    ${shape.kinds ? html`<${Kind} ...${given} kinds=${shape.kinds} by=${shape.by} />` : html`<${Fields} ...${given} />`}
    ${shape.mayBeNull && !isPlain && html`<div><${Button} kind="small" onClick=${() => onChange(gone)}>Remove
      ${shape.label.toLowerCase()}<//></div>`}</fieldset>`;
}

function Kind({ kinds, by, value, at, onChange }) {
  const { schemas } = useContext(Known);
  const kind = value[by] in kinds ? value[by] : Object.keys(kinds)[0];
  return html`<${Select} label=${labelOf(by)} value=${kind}
    options=${Object.keys(kinds).map((each) => [each, TOOL_WORDS[each] ?? each])}
    onChange=${(chosen) => onChange(changedTo(kinds[chosen], value, by, schemas))} />
    ${[true, false].map((isRequired) => html`<${Fields} schema=${kinds[kind]} value=${value} at=${at}
      onChange=${onChange} shown=${(each) => each.name !== by && each.isRequired === isRequired
        && !RARE.includes(each.name)} />`)}
    ${RARE.some((name) => kinds[kind].properties[name]) && html`<${FoldedFields} title="More" names=${RARE}
      schema=${kinds[kind]} value=${value} at=${at} onChange=${onChange} />`}`;
}

/** A list of objects, as cards. */
function List({ shape, value, at, onChange }) {
  const { schemas, onTry } = useContext(Known);
  const found = shape.item.oneOf ? kindsIn(shape, schemas) : null;
  const items = value ?? [];
  const one = shape.label.toLowerCase().replace(/s$/, "");
  const add = (schema) => onChange([...items, begun(schema, schemas)]);
  const set = (place, item) => onChange(items.with(place, item.type === "http" && item.url !== items[place].url
    ? withPlaceholders(items[place], item) : item));
  return html`<fieldset class="part"><legend>${shape.label}</legend>
    ${items.map((item, place) => html`<fieldset class="card" key=${place}>
      <legend>${`${labelOf(one)} ${place + 1}${item.name ? `: ${item.name}` : ""}`}</legend>
      ${found ? html`<${Kind} ...${found} value=${item} at=${`${at}/${place}`}
        onChange=${(next) => set(place, next)} />`
        : html`<${Fields} schema=${shape.item} value=${item} at=${`${at}/${place}`}
          onChange=${(next) => set(place, next)} />`}
      <div class="actions">${shape.name === "tools" && onTry && html`<${Button} kind="small"
        onClick=${() => onTry(item)}>Try this tool<//>`}
        <${Button} kind="small" aria-label=${`Remove ${one} ${place + 1}`}
          onClick=${() => onChange(items.filter((_, other) => other !== place))}>Remove<//></div></fieldset>`)}
    <div class="actions">${found
      ? Object.entries(found.kinds).map(([kind, schema]) => html`<${Button} kind="small" key=${kind}
        onClick=${() => add(schema)}>Add: ${TOOL_WORDS[kind] ?? kind}<//>`)
      : html`<${Button} kind="small" onClick=${() => add(shape.item)}>Add a ${one}<//>`}</div></fieldset>`;
}

const kindsIn = (shape, schemas) => {
  const { by, kinds } = fieldsOf({ properties: { one: shape.item } }, schemas)[0];
  return { by, kinds };
};

const renamed = (value, from, to) => Object.fromEntries(Object.entries(value).map(([name, each]) =>
  [name === from ? to : name, each]));
const fresh = (value, name) => (name in value ? fresh(value, `${name}_`) : name);

/** Objects by name, as cards. */
function Named({ shape, value, at, onChange, gone }) {
  const own = value ?? {};
  const keep = (next) => onChange(Object.keys(next).length ? next : gone);
  return html`<fieldset class="part"><legend>${shape.label}</legend>
    ${Object.entries(own).map(([name, each], place) => html`<fieldset class="card" key=${place}>
      <legend>${name}</legend>
      <${Name} label="Name" value=${name} taken=${Object.keys(own)} onChange=${(to) => keep(renamed(own, name, to))} />
      <${Fields} schema=${shape.item} value=${each} at=${`${at}/${name}`}
        onChange=${(next) => keep({ ...own, [name]: next })} />
      <div><${Button} kind="small" aria-label=${`Remove ${name}`}
        onClick=${() => keep(withField(own, name, undefined))}>Remove<//></div></fieldset>`)}
    <div><${Button} kind="small" onClick=${() => keep({ ...own, [fresh(own, "name")]: {} })}>
      ${addOf(shape)}<//></div></fieldset>`;
}

const addOf = ({ label }) => `Add: ${label.toLowerCase().replace(/s$/, "")}`;

/** Values by name, a row for each; `children` draws what a row has beside its name. `first`: the name of a new one. */
const NamedRows = ({ label, own, onChange, first, add, children }) => html`<fieldset class="part">
    <legend>${label}</legend>
    ${Object.entries(own).map(([name, each], place) => html`<div class="row" key=${place}>
      <${Name} label="Name" value=${name} taken=${Object.keys(own)}
        onChange=${(to) => onChange(renamed(own, name, to))} />
      ${children(each, (next) => onChange({ ...own, [name]: next }))}
      <${Button} kind="small" aria-label=${`Remove ${name}`} onClick=${() => onChange(withField(own, name, undefined))}>
        Remove<//></div>`)}
    <div><${Button} kind="small" onClick=${() => onChange({ ...own, [fresh(own, first)]: "" })}>${add}<//></div>
  </fieldset>`;

/** Texts by name; `hasSecrets`: or secrets, as of headers. */
const Texts = ({ shape, value, onChange }) => html`<${NamedRows} label=${shape.label} own=${value ?? {}} first="X-Name"
  onChange=${onChange} add=${addOf(shape)}>${(each, set) => html`
      ${shape.hasSecrets && html`<label>Kind <select value=${typeof each === "string" ? "text" : "secret"}
        onChange=${(e) => set(e.target.value === "text" ? "" : { secret: "" })}>
        <option value="text">text</option><option value="secret">secret</option></select></label>`}
      <label>${typeof each === "string" ? "Value" : "Name of the secret"} <input required
        value=${typeof each === "string" ? each : each.secret} spellcheck=${false} autocomplete="off"
        onInput=${(e) => set(typeof each === "string" ? e.target.value : { secret: e.target.value })} /></label>`}<//>`;

const isFrom = (each) => typeof each?.from === "string" && Object.keys(each).every((name) =>
  name === "from" || name === "pointer");

/** Arguments of a tool: values, or what another node said. */
function Arguments({ shape, value, onChange }) {
  const { nodes = [] } = useContext(Known);
  return html`<${NamedRows} label=${shape.label} own=${value ?? {}} first="name" onChange=${onChange}
    add="Add an argument">${(each, set) => html`
      <label>Comes from <select value=${isFrom(each) ? each.from : ""} onChange=${(e) => set(e.target.value
        ? { from: e.target.value, pointer: isFrom(each) ? each.pointer ?? "" : "" } : "")}>
        <option value="">a fixed value</option>${[...new Set(["run", ...nodes, ...(isFrom(each) ? [each.from] : [])])]
          .map((node) => html`<option value=${node}>${node}</option>`)}</select></label>
      ${isFrom(each)
        ? html`<label>Place in it <input value=${each.pointer ?? ""} placeholder="/amount" spellcheck=${false}
          onInput=${(e) => set({ ...each, pointer: e.target.value })} /></label>`
        : html`<label>Value <input value=${typedOf(each)} onInput=${(e) => set(meantBy(e.target.value))} /></label>`}`}
    <//>`;
}

/** Arguments of a tool's call, in the fields of its schema; JSON where it has none. `schema`: or null. */
export const GivenFields = ({ schema, value, onChange }) => html`<${Known.Provider}
  value=${{ schemas: schema?.$defs ?? {}, problems: [] }}>${schema?.properties
    ? html`<${Fields} schema=${schema} value=${value} at="" onChange=${onChange} />`
    : html`<${JsonField} label="Arguments, as JSON" value=${value} rows=${4} onChange=${onChange} />`}<//>`;
