/** A form of the fields that the API has for something. */
import { useState } from "preact/hooks";

import { html } from "../html.js";
import { Button, Failure, Loading } from "../parts/basics.js";
import { instead, useWork } from "../parts/work.js";
import { Known } from "./parts.js";
import { useSchemas } from "./schemas.js";
import { begun } from "./shape.js";
import { Fields } from "./typed.js";

/**
 * `schema`: its name; `value`: what the form begins with; `label`: of the button; `send` gets what was filled in.
 * `show` gets what makes some of the fields, by their shapes, and returns the form's content; all fields if left out.
 */
export function SchemaForm({ schema, value, label, send, onCancel = null, show = (fields) => fields(() => true) }) {
  const [schemas, failed] = useSchemas();
  const [draft, setDraft] = useState(value);
  const { busy, error, work } = useWork();
  if (failed) return html`<${Failure} error=${failed} />`;
  if (!schemas) return html`<${Loading} what="the form" />`;
  const filled = draft ?? begun(schemas[schema], schemas);
  const fields = (shown) => html`<${Fields} schema=${schemas[schema]} value=${filled} at="" onChange=${setDraft}
    shown=${shown} />`;
  const submit = instead(() => work(async () => {
    await send(filled);
    setDraft(value);
  }));
  return html`<form class="form body" onSubmit=${submit}>
    <${Known.Provider} value=${{ schemas, problems: error?.problem?.errors ?? [] }}>${show(fields)}<//>
    ${error && html`<${Failure} error=${error} />`}
    <div class="actions"><${Button} needs="define" type="submit" kind="primary" busy=${busy}>${label}<//>
      ${onCancel && html`<${Button} onClick=${onCancel}>Cancel<//>`}</div></form>`;
}
