/** Change a model's server: the prices of its models, and all else that is set of it. */
import { useEffect, useRef, useState } from "preact/hooks";

import { call, url } from "../api.js";
import { Known } from "../forms/parts.js";
import { useSchemas } from "../forms/schemas.js";
import { Fields } from "../forms/typed.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Failure, Loaded } from "../parts/basics.js";
import { instead, useWork } from "../parts/work.js";

/** `model`: one whose price is wanted. `onDone` is called once it is stored, or left. */
export function ProviderForm({ name, model, onDone }) {
  const stored = useData(url`/v1/providers/${name}`);
  const [schemas, failed] = useSchemas();
  if (failed) return html`<${Failure} error=${failed} />`;
  return schemas && html`<${Loaded} from=${stored} what="the provider">${(provider) => html`<${Form}
    ...${{ provider, model, schema: schemas.ProviderBody, schemas, onDone }} />`}<//>`;
}

function Form({ provider, model, schema, schemas, onDone }) {
  const content = Object.fromEntries(Object.entries(provider).filter(([name]) => name in schema.properties));
  const [draft, setDraft] = useState(model && !content.prices?.[model]
    ? { ...content, prices: { ...content.prices, [model]: {} } } : content);
  const { busy, error, work } = useWork();
  const box = useRef(null);
  useEffect(() => box.current.scrollIntoView({ block: "nearest" }), []);
  const save = instead(() => work(() => call("PUT", url`/v1/providers/${provider.name}`, draft,
    { headers: { "If-Match": `"${provider.version}"` } }).then(onDone)));
  const fields = (isShown) => html`<${Fields} schema=${schema} value=${draft} at="" onChange=${setDraft}
    shown=${({ name }) => isShown(name)} />`;
  return html`<form class="form body" ref=${box} onSubmit=${save}><h3>Change ${provider.name}</h3>
    <${Known.Provider} value=${{ schemas, problems: error?.problem?.errors ?? [] }}>
      <p class="small soft">Prices are in US dollars for a million tokens. They count from the next call on: what past
        calls cost stays as it was counted.</p>
      ${fields((name) => name === "prices")}
      <details open=${!model}><summary>All else</summary><div class="form">
        ${fields((name) => !["prices", "name"].includes(name))}</div></details><//>
    ${error && html`<${Failure} error=${error} />`}
    <div class="actions"><${Button} type="submit" kind="primary" busy=${busy} needs="define">Save<//>
      <${Button} onClick=${onDone}>Cancel<//></div></form>`;
}
