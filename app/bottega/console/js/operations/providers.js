/** Servers of models, and whether they answer. */
import { useEffect, useRef, } from "preact/hooks";

import { call, url } from "../api.js";
import { count } from "../format.js";
import { SchemaForm } from "../forms/schema_form.js";
import { useSchemas } from "../forms/schemas.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Link, Panel, Read } from "../parts/basics.js";
import { Confirmed, Pages, Rows } from "../parts/lists.js";
import { ServerState } from "../parts/waits.js";
import { go } from "../router.js";
import { isOpen } from "../setup/model.js";

const STATES_EVERY_MS = 5000, PROVIDERS_EVERY_MS = 10_000;

/** The tenant's own server that a model without a price may be of; null: the operator's servers answer it. */
const serverOf = (providers, model) => providers.find(({ owner, models }) => owner === "tenant"
  && (!models || models.includes(model)))?.name ?? null;

/** What can be done about a model whose calls have no known price. */
const NoServer = ({ model }) => html`<div class="note" role="status"><p>This page cannot set the price of
    ${" "}<code>${model}</code>: its server is set up by the environment of this service. Its operator adds the price,
    in US dollars for a million tokens, to the server's <code>prices</code> in <code>BOTTEGA_PROVIDERS</code>:</p>
  <p>Or connect the model's server above, and set its price there.</p></div>`;

/** The form of the provider that the address names, or of that of a model. */
function Wanted({ query: { of, model }, providers, onDone }) {
  const name = of ?? (model && serverOf(providers, model));
  return name ? html`<${ProviderForm} key=${name} ...${{ name, model, onDone }} />`
    : model && html`<${NoServer} model=${model} />`;
}

/** `query`: `of`, a provider to change; `model`, one whose price is wanted. */
export function Providers({ query }) {
  const show = (change) => go(["operations", "providers"], change, { replace: true });
  const states = useData("/v1/provider-health", { everyMs: STATES_EVERY_MS });
  return html`<${Panel} title="Providers" actions=${html`<${Button} kind="small" needs="define"
    onClick=${() => (isOpen.value = true)}>Connect a model<//>`}>
    <${Pages} everyMs=${PROVIDERS_EVERY_MS} path="/v1/providers?view=full" what="providers">
    ${(providers, reload) => html`<${Rows} label="Providers" items=${providers} id=${({ name }) => name}
      empty="There is no provider but the server's own."
      head=${["Name", "Address", "Dialect", "Key", "Limits", "Prices", "Of", "Now", ""]} cells=${(each) => [each.name,
        each.base_url ?? "–", each.dialect, each.key ? html`secret <code>${each.key.secret}</code>` : "none",
        limits(each), html`${pricesOf(each)}${each.owner === "tenant" && html` <${Link} needs="define"
          path=${["operations", "providers"]} query=${{ of: each.name }}>Set prices<//>`}`, each.owner,
        html`<${ServerState} health=${states.data?.items.find(({ name }) => name === each.name)} />`,
        each.owner === "tenant" && html`<span class="actions"><${Button} kind="small" needs="define"
          aria-label=${`Change ${each.name}`} onClick=${() => show({ of: each.name })}>Change<//>
          <${Confirmed} needs="define" label="Delete" question=${`Delete ${each.name}?`}
            act=${async () => (await call("DELETE", url`/v1/providers/${each.name}`), reload())} /></span>`]} />
      <${Wanted} ...${{ query, providers }} onDone=${() => (show({}), reload())} />`}<//><//>`;
}

/** The models whose price is set, such as "qwen: 0.2 in, 0.6 out"; else public list prices count. */
const pricesOf = ({ owner, prices }) => (owner === "operator" ? "–"
  : Object.entries(prices ?? {}).map(([model, { input, output }]) => `${model}: ${input} in, ${output} out`).join("; ")
    || "as the public lists");

function limits(provider) {
  const named = { max_concurrent: "calls at once", requests_per_minute: "requests a minute",
    tokens_per_minute: "tokens a minute" };
  return Object.entries(named).filter(([name]) => provider[name] != null).map(([name,
    text]) => `${count(provider[name])} ${text}`).join(", ") || "none";
}

/** `model`: one whose price is wanted. `onDone` is called once it is stored, or left. */
function ProviderForm({ name, model, onDone }) {
  const [schemas] = useSchemas();
  return schemas && html`<${Read} path=${url`/v1/providers/${name}`} what="the provider">${(provider) => html`<${Form}
    ...${{ provider, model, schema: schemas.ProviderBody, onDone }} />`}<//>`;
}

function Form({ provider, model, schema, onDone }) {
  const content = Object.fromEntries(Object.entries(provider).filter(([name]) => name in schema.properties));
  const value = model && !content.prices?.[model]
    ? { ...content, prices: { ...content.prices, [model]: {} } } : content;
  const box = useRef(null);
  useEffect(() => box.current.scrollIntoView({ block: "nearest" }), []);
  const send = (draft) => call("PUT", url`/v1/providers/${provider.name}`, draft,
    { headers: { "If-Match": `"${provider.version}"` } }).then(onDone);
  return html`<div ref=${box}><h3 class="body">Change ${provider.name}</h3><${SchemaForm} schema="ProviderBody"
    value=${value} label="Save" send=${send} onCancel=${onDone} show=${(fields) => html`
      <p class="small soft">Prices are in US dollars for a million tokens. They count from the next call on: what past
        calls cost stays as it was counted.</p>
      ${fields(({ name }) => name === "prices")}
      <details open=${!model}><summary>All else</summary><div class="form">
        ${fields(({ name }) => !["prices", "name"].includes(name))}</div></details>`} /></div>`;
}
