/** Connect a model: its vendor, address and key, a test, and the model that answers by default. */
import { useEffect, useRef, useState } from "preact/hooks";

import { call, get, post, url, withQuery } from "../api.js";
import { count } from "../format.js";
import { html } from "../html.js";
import { Button, Failure } from "../parts/basics.js";
import { Dialog } from "../parts/dialog.js";
import { instead, useWork } from "../parts/work.js";

/** The tiles. `prefers`: of a long list, the model to begin with. */
const VENDORS = {
  OpenAI: { id: "openai", dialect: "chat", address: "https://api.openai.com/v1", prefers: /^gpt-5-mini$/ },
  Anthropic: { id: "anthropic", dialect: "anthropic", address: "https://api.anthropic.com" },
  Gemini: { id: "gemini", dialect: "gemini", address: "https://generativelanguage.googleapis.com/v1beta",
    prefers: /^gemini-[\d.]+-flash$/ },
  Ollama: { id: "ollama", dialect: "chat", address: "http://127.0.0.1:11434/v1" },
  vLLM: { id: "vllm", dialect: "chat", address: "http://127.0.0.1:8000/v1" },
  "OpenAI-compatible": { id: "models", dialect: "chat", address: "" },
};

/** The first of `name`, `name_2`, … that is not taken. */
function freeName(name, taken) {
  const names = new Set(taken);
  let free = name;
  for (let number = 2; names.has(free); number++) free = `${name}_${number}`;
  return free;
}

const namesOf = async (path) => (await get(withQuery(path, { limit: 100 }))).items.map(({ name }) => name);

/** The host of an address, as secrets name it; "": it has none. */
function hostOf(address) {
  try {
    return new URL(address).hostname.replace(/^\[|\]$/g, "");
  } catch {
    return "";
  }
}

/** `onConnected(model)` is called once new runs get the model. */
export function Wizard({ onConnected, onClose }) {
  const [tile, setTile] = useState(null);
  const [address, setAddress] = useState("");
  const [key, setKey] = useState("");
  const [tested, setTested] = useState(null);
  const [model, setModel] = useState("");
  const [price, setPrice] = useState({ input: "", output: "" });
  const { busy, error, work, setError, postOnce } = useWork();
  const secret = useRef(null);
  const provider = useRef(null);
  const first = useRef(null);
  const vendor = VENDORS[tile];
  useEffect(() => void first.current?.focus(), [tile]);

  const choose = (name) => {
    setTile(name);
    setAddress(VENDORS[name].address);
    setTested(null);
    setError(null);
  };
  const change = (set) => (event) => {
    set(event.target.value);
    setTested(null);
  };
  const doing = (what, act) => instead(() => work(act, what));
  const definition = () => ({ dialect: vendor.dialect, base_url: address.trim(),
    ...(key && { key: { secret: secret.current } }) });
  const prices = () => (price.input === "" ? {}
    : { prices: { [model.trim()]: { input: Number(price.input), output: Number(price.output) } } });

  const test = doing("test", async () => {
    setTested(null);
    if (key) {
      const wanted = `${vendor.id.toUpperCase()}_KEY`;
      secret.current ??= freeName(wanted, await namesOf("/v1/secrets"));
      await call("PUT", url`/v1/secrets/${secret.current}`, { value: key.trim(), hosts: [hostOf(address.trim())] });
    }
    const found = await post("/v1/providers/test", definition());
    setTested(found);
    setModel(found.models.find((id) => vendor.prefers?.test(id)) ?? found.models[0] ?? "");
  });
  const save = doing("save", async () => {
    if (provider.current === null) {
      const name = freeName(vendor.id, await namesOf("/v1/providers"));
      await postOnce("/v1/providers", { name, ...definition(), ...prices() });
      provider.current = name;
    }
    const reference = `${provider.current}/${model.trim()}`;
    await call("PUT", "/v1/default-model", { model: reference });
    await onConnected(reference);
  });
  const leave = () => {
    const unused = provider.current === null && secret.current;
    if (unused) call("DELETE", url`/v1/secrets/${unused}`).catch(() => {});
    onClose();
  };

  return html`<${Dialog} title="Connect a model" onClose=${leave}>
    <div class="tiles" role="group" aria-label="Whose model">${Object.keys(VENDORS).map((name) => html`<button
      type="button" class="button" key=${name} aria-pressed=${name === tile} onClick=${() => choose(name)}>${name}
      </button>`)}</div>
    ${vendor && html`<form class="form" onSubmit=${tested?.ok ? save : test}>
      <label>Address <input ref=${address && vendor.address ? null : first} type="url" required value=${address}
        placeholder="https://models.example.com/v1" onInput=${change(setAddress)} /></label>
      <label>Key <input ref=${vendor.address ? first : null} type="password" autocomplete="off" value=${key}
        aria-describedby="key-help" onInput=${change(setKey)} /></label>
      <p id="key-help" class="small soft">It is stored sealed, and sent to this address only. It has at least
        8 characters; leave it empty if the server checks none.</p>
      <div aria-live="polite">${tested && html`<${Outcome} tested=${tested} />`}</div>
      ${tested?.ok && html`<label>Default model <input required list="models-found" value=${model}
        onInput=${(e) => setModel(e.target.value)} /></label>
        <datalist id="models-found">${tested.models.map((id) => html`<option key=${id} value=${id} />`)}</datalist>
        <${Prices} of=${price} onChange=${setPrice} />`}
      ${error && html`<${Failure} error=${error} />`}
      <div class="actions">
        <${Button} type=${tested?.ok ? "button" : "submit"} kind=${tested?.ok ? "" : "primary"} busy=${busy === "test"}
          onClick=${tested?.ok ? test : null}>Test<//>
        ${tested?.ok && html`<${Button} type="submit" kind="primary" busy=${busy === "save"}>Save<//>`}
        <${Button} onClick=${leave}>Cancel<//>
      </div></form>`}
    ${!vendor && html`<div class="actions"><${Button} onClick=${leave}>Cancel<//></div>`}
  <//>`;
}

const PRICED = { input: "Price of input", output: "Price of output" };

/** What the default model costs; both fields, or none. */
const Prices = ({ of, onChange }) => html`<div class="field"><div class="row" role="group"
  aria-label="Price" aria-describedby="price-help">
  ${Object.entries(PRICED).map(([name, label]) => html`<label key=${name}>${label} (USD for a million tokens)
    <input type="number" min="0" max="1000000" step="any" value=${of[name]} placeholder="as the public price lists"
      required=${of.input !== "" || of.output !== ""}
      onInput=${(e) => onChange({ ...of, [name]: e.target.value })} /></label>`)}</div></div>
  <p id="price-help" class="small soft">A model that no public list knows, such as one of your own, has no cost until
    its price is set: here, or later under Operations, Providers.</p>`;

function Outcome({ tested }) {
  if (!tested.ok) return html`<p class="note bad" role="alert">${tested.error}</p>`;
  return html`<p class="note ok">It answers, in ${count(tested.latency_ms)} ms: ${count(tested.models.length)}
    ${tested.models.length === 1 ? " model" : " models"}.</p>`;
}
