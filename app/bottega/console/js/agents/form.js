/** An agent in a form, or as JSON. */
import { useState } from "preact/hooks";

import { html } from "../html.js";
import { Button, Tabs } from "../parts/basics.js";
import { fieldsOf } from "./schema.js";

const EXAMPLE = "https://api.example.com/weather?city={city}";
const TOOLS = {
  "a calculator": { type: "builtin", name: "calculator" },
  "the time": { type: "builtin", name: "current_time" },
  "questions to people": { type: "builtin", name: "ask_user" },
  "an HTTP request": { type: "http", name: "weather", description: "Tells the weather of a city.", method: "GET",
    url: EXAMPLE, parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] } },
  "a tool of the client": { type: "client", name: "locate", description: "Says where the user is.",
    parameters: { type: "object", properties: {} } },
};

/**
 * Args:
 *   draft: the agent's content; onChange: gets a changed copy.
 *   turn: another one drops what was typed and is no JSON yet.
 *   problems: `[{pointer, detail}]` of the last try to store it.
 */
export function AgentForm({ schema, draft, turn, onChange, problems }) {
  const [view, setView] = useState("form");
  return html`<${Tabs} tabs=${[["form", "Form"], ["json", "JSON"]]} chosen=${view} onChoose=${setView}
    label="Ways to edit" />
    ${view === "json"
      ? html`<div class="body">
        <${JsonField} key=${turn} label="The agent as JSON" value=${draft} rows=${26} onChange=${onChange} /></div>`
      : fieldsOf(schema).map(([title, fields]) => html`<fieldset class="fields" key=${title}><legend>${title}</legend>
        ${fields.map((field) => html`<${Field} key=${`${field.name} ${turn}`} field=${field}
          value=${draft[field.name] ?? field.usual ?? null}
          problems=${problems.filter((each) => each.pointer === `/${field.name}`
            || each.pointer?.startsWith(`/${field.name}/`))}
          onChange=${(value) => onChange({ ...draft, [field.name]: value })} />`)}</fieldset>`)}`;
}

function Field({ field, value, problems, onChange }) {
  const id = `field-${field.name}`;
  return html`<div class=${`field ${problems.length ? "wrong" : ""}`}>
    <${Input} id=${id} field=${field} value=${value} isWrong=${problems.length > 0} onChange=${onChange} />
    <p class="small soft" id=${`${id}-help`}>${field.help}
      ${field.most != null && field.kind === "number" ? ` From ${field.least ?? 0} to ${field.most}.` : ""}</p>
    ${problems.map((each) => html`<p class="small bad-text" role="alert">
      ${each.pointer !== `/${field.name}` && html`<code>${each.pointer}</code> `}${each.detail}</p>`)}
  </div>`;
}

function Input({ id, field, value, isWrong, onChange }) {
  const shared = { id, "aria-describedby": `${id}-help`, "aria-invalid": isWrong, required: field.isRequired };
  const orNull = (text) => (text === "" && field.mayBeNull ? null : text);
  switch (field.kind) {
    case "switch":
      return html`<label class="check">
        <input type="checkbox" ...${shared} required=${false} checked=${value === true}
          onChange=${(e) => onChange(e.target.checked)} /> ${field.label}</label>`;
    case "choice":
      return html`<label>${field.label} <select ...${shared} value=${value ?? ""}
        onChange=${(e) => onChange(orNull(e.target.value))}>${field.mayBeNull && html`<option value="">usual</option>`}
        ${field.choices.map((each) => html`<option value=${each}>${each}</option>`)}</select></label>`;
    case "number":
      return html`<label>${field.label} <input type="number" ...${shared} value=${value ?? ""} min=${field.least}
        max=${field.most} step="any"
        onInput=${(e) => onChange(e.target.value === "" ? null : Number(e.target.value))} /></label>`;
    case "text":
      return html`<label>${field.label} <input ...${shared} value=${value ?? ""} maxlength=${field.most}
        onInput=${(e) => onChange(orNull(e.target.value))} /></label>`;
    case "long":
      return html`<label>${field.label} <textarea rows="8" ...${shared} value=${value ?? ""}
        onInput=${(e) => onChange(e.target.value)}></textarea></label>`;
    case "several":
      return html`<fieldset><legend>${field.label}</legend>
        ${field.choices.map((each) =>
          html`<label class="inline">
            <input type="checkbox" checked=${(value ?? []).includes(each)}
              onChange=${(e) => onChange(
                field.choices.filter((one) => (one === each ? e.target.checked : (value ?? [])
                  .includes(one))))} /> ${each}</label> `)}</fieldset>`;
    case "lines":
      return html`<label>${field.label}, one on each line <textarea rows="2" ...${shared}
        value=${(value ?? []).join("\n")} onInput=${(e) => onChange(e.target.value.split("\n").filter(Boolean))}>
        </textarea></label>`;
    default:
      return field.name === "tools" ? html`<${Tools} ...${{ shared, field, value, onChange }} />`
        : html`<${JsonField} ...${shared}
          label=${field.name === "model" ? "Model, in quotes, or a list" : `${field.label}, as JSON`} value=${value}
          rows=${rowsOf(value)} onChange=${onChange} />`;
  }
}

/** The list of tools as JSON, and buttons that add one. */
function Tools({ shared, field, value, onChange }) {
  const [turn, setTurn] = useState(0);
  const add = (tool) => {
    onChange([...(value ?? []), tool]);
    setTurn(turn + 1);
  };
  return html`<${JsonField} key=${turn} ...${shared} label=${`${field.label}, as JSON`} value=${value}
    rows=${rowsOf(value)} onChange=${onChange} />
    <div class="actions"><span class="small soft">Add</span>
      ${Object.entries(TOOLS).map(
        ([label, tool]) => html`<${Button} kind="small" onClick=${() => add(tool)}>${label}<//>`)}</div>`;
}

const rowsOf = (value) => Math.min(16, JSON.stringify(value, null, 2)?.split("\n").length ?? 1);

/** A value as JSON text; while the text is no JSON, the value stays as it was, and its form is not sent. */
function JsonField({ label, value, rows, onChange, ...rest }) {
  const [typed, setTyped] = useState(null);
  const [wrong, setWrong] = useState("");
  const shown = typed ?? JSON.stringify(value, null, 2) ?? "null";
  const type = (box) => {
    setTyped(box.value);
    let problem = "";
    try {
      onChange(JSON.parse(box.value || "null"));
    } catch (error) {
      problem = `This is no JSON yet: ${error.message}`;
    }
    setWrong(problem);
    box.setCustomValidity(problem);
  };
  return html`<label>${label} <textarea spellcheck=${false} rows=${rows} ...${rest} value=${shown}
    onInput=${(e) => type(e.target)} onBlur=${() => wrong || setTyped(null)}></textarea></label>
    ${wrong && html`<p class="small bad-text" role="alert">${wrong}</p>`}`;
}
