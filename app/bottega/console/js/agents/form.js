/** An agent in a form, or as JSON. */
import { useState } from "preact/hooks";

import { JsonField, Known } from "../forms/parts.js";
import { Fields, FoldedFields } from "../forms/typed.js";
import { html } from "../html.js";
import { Tabs } from "../parts/basics.js";
import { groupsOf } from "./schema.js";

/** Features that conditions of approvals can use: the arguments of tools. */
const featuresOf = (tools) => [...new Set(tools.flatMap((each) => Object.keys(each?.parameters?.properties ?? {}))
  .map((name) => `arguments.${name}`))];

/**
 * Args:
 *   known: what the editors offer; see `Known`.
 *   draft: the agent's content; onChange: gets a changed copy.
 *   turn: a new value drops typed text that is not valid JSON yet.
 */
export function AgentForm({ known, draft, turn, onChange }) {
  const [view, setView] = useState("form");
  const schema = known.schemas.AgentContent;
  const tools = Array.isArray(draft.tools) ? draft.tools : [];
  const names = tools.map((each) => each?.name).filter(Boolean);
  return html`<${Tabs} tabs=${[["form", "Form"], ["json", "JSON"]]} chosen=${view} onChoose=${setView}
    label="Ways to edit" />
    ${view === "json"
      ? html`<div class="body">
        <${JsonField} key=${turn} label="The agent as JSON" value=${draft} rows=${26}
          onChange=${(value) => onChange(value && typeof value === "object" ? value : {})} /></div>`
      : html`<${Known.Provider} value=${{ ...known, tools: names, features: featuresOf(tools) }}>
        ${groupsOf(schema).map(([title, names], place) => {
          const given = { schema, value: draft, at: "", onChange };
          return place ? html`<${FoldedFields} key=${`${title} ${turn}`} title=${title} names=${names} ...${given} />`
            : html`<fieldset class="fields" key=${`${title} ${turn}`}><legend>${title}</legend><${Fields} ...${given}
              shown=${({ name }) => names.includes(name)} /></fieldset>`;
        })}<//>`}`;
}
