/** Servers of models, and whether they answer. */
import { useState } from "preact/hooks";

import { call, url } from "../api.js";
import { count } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { usePostOnce } from "../once.js";
import { Button, Empty, Link, Loaded, Panel, Time } from "../parts/basics.js";
import { Confirmed, Pages, Sending, Table } from "../parts/lists.js";
import { go } from "../router.js";
import { ProviderForm } from "./provider_form.js";

const DIALECTS = ["chat", "responses", "anthropic", "gemini"];

/** The tenant's own server that a model without a price may be of; null: the operator's servers answer it. */
const serverOf = (providers, model) => providers.find(({ owner, models }) => owner === "tenant"
  && (!models || models.includes(model)))?.name ?? null;

/** What can be done about a model whose calls have no known price. */
const NoServer = ({ model }) => html`<div class="note" role="status"><p>This page cannot set the price of
    ${" "}<code>${model}</code>: its server is set up by the environment of this service. Its operator adds the price,
    in US dollars for a million tokens, to the server's <code>prices</code> in <code>BOTTEGA_PROVIDERS</code>:</p>
  <pre class="value" tabindex="0">${`"prices": {"${model}": {"input": 1, "output": 2}}`}</pre>
  <p>Or add the model's server below, and its price there.</p></div>`;

/** The form of the provider that the address names, or of that of a model. */
function Wanted({ query: { of, model }, providers, onDone }) {
  const name = of ?? (model && serverOf(providers, model));
  return name ? html`<${ProviderForm} key=${name} ...${{ name, model, onDone }} />`
    : model && html`<${NoServer} model=${model} />`;
}

/** `query`: `of`, a provider to change; `model`, one whose price is wanted. */
export function Providers({ query }) {
  const [postOnce] = usePostOnce();
  const show = (change) => go(["operations", "providers"], change, { replace: true });
  const [version, setVersion] = useState(0);
  const [chosen, setChosen] = useState(null);
  const make = async (form) => {
    const { name, base_url, dialect, secret, models } = Object.fromEntries(form);
    const listed = models.split(/[\s,]+/).filter(Boolean);
    await postOnce("/v1/providers", { name, base_url, dialect, ...(secret && { key: { secret } }), ...(listed.length
      && { models: listed }) });
    setVersion((n) => n + 1);
  };
  return html`<${Panel} title="Providers"><${Pages} key=${version} path="/v1/providers?view=full" what="providers">
    ${(providers, reload) => html`${providers.length
      ? html`<${Table} label="Providers" head=${["Name", "Address", "Dialect", "Key", "Limits", "Of", ""]}>
        ${providers.map((each) => html`<tr key=${each.name}><td>${each.name}</td><td class="small">
          ${each.base_url ?? "–"}</td><td>${each.dialect}</td>
        <td class="small">${each.key ? html`secret <code>${each.key.secret}</code>` : "none"}</td><td class="small">
          ${limits(each)}</td><td>${each.owner}</td>
        <td class="actions"><${Button} kind="small" aria-expanded=${chosen === each.name}
          onClick=${() => setChosen(chosen === each.name ? null : each.name)}>Health<//>
          ${each.owner === "tenant" && html`<${Button} kind="small" needs="define" aria-label=${`Change ${each.name}`}
            onClick=${() => show({ of: each.name })}>Change<//> <${Confirmed} needs="define" label="Delete"
            question=${`Delete ${each.name}?`} act=${async () => (await call("DELETE", url`/v1/providers/${each.name}`),
              setChosen((old) => (old === each.name ? null : old)), reload())} />`}</td></tr>`)}<//>`
      : html`<${Empty} title="There is no provider but the server's own." />`}
      <${Wanted} ...${{ query, providers }} onDone=${() => (show({}), reload())} />`}<//>
      ${chosen && html`<${Health} key=${chosen} name=${chosen} />`}<//>
    <${Panel} title="Add a provider" needs="define"><${Sending} label="Save" send=${make}>
      <label>Name <input name="name" required /></label><label>Address <input name="base_url" type="url" required
        placeholder="https://api.example.com/v1" /></label>
      <label>Dialect <select name="dialect">${DIALECTS.map((each) => html`<option>${each}</option>`)}</select></label>
      <label>Name of the secret with its key (see Secrets) <input name="secret" /></label>
        <label>Models, if only these <input name="models" /></label><//><//>`;
}

function limits(provider) {
  const named = { max_concurrent: "calls at once", requests_per_minute: "requests a minute",
    tokens_per_minute: "tokens a minute" };
  return Object.entries(named).filter(([name]) => provider[name] != null).map(([name,
    text]) => `${count(provider[name])} ${text}`).join(", ") || "none";
}

function Health({ name }) {
  const found = useData(url`/v1/providers/${name}`, { everyMs: 3000 });
  return html`<div class="body"><h3>Health of ${name}</h3><${Loaded} from=${found} what="its health">
    ${(provider) => html`
    <p class="small">${count(provider.calls.under_way)} calls under way, ${count(provider.calls.waiting)} wait for a
      limit or a breaker.</p>
    ${Object.entries(provider.breaker).length
      ? html`<ul class="rows">${Object.entries(provider.breaker).map(([model, breaker]) => html`<li><code>${model}
        </code> ${breaker.state === "closed" ? "answers" : html`<span class="bad-text">${breaker.state}
          </span>, tried again <${Time} at=${breaker.retry_at} />`}</li>`)}</ul>`
      : html`<p class="small soft">No circuit breaker is open. <${Link} path=${["health"]}>Its last
        calls<//></p>`}`}<//></div>`;
}
