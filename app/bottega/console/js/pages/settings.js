/** What a person chooses for this browser, and what the server is set to. */
import { useState } from "preact/hooks";

import { call, url } from "../api.js";
import { exact } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Empty, Link, Loaded, Panel, Time } from "../parts/basics.js";
import { Confirmed } from "../parts/lists.js";
import { may, me } from "../person.js";
import { dates, theme } from "../preferences.js";

const THEMES = { system: "as the system", light: "light", dark: "dark" };
const LANGUAGES = ["en", "de", "fr", "es", "it", "pt", "nl", "pl", "sv", "tr", "ja", "zh", "ko", "ar", "he", "hi"];
const ZONES = Intl.supportedValuesOf("timeZone");

const nameOf = (language) => new Intl.DisplayNames([language], { type: "language" }).of(language);

export function Settings() {
  const set = (part) => (dates.value = { ...dates.value, ...part });
  const own = Intl.DateTimeFormat().resolvedOptions().timeZone;
  return html`<div class="head"><h1>Settings</h1></div>
    <${Panel} title="This browser"><form class="form body" onSubmit=${(e) => e.preventDefault()}>
      <label>Theme <select value=${theme.value} onChange=${(e) => (theme.value = e.target.value)}>
        ${Object.entries(THEMES).map(([value, word]) => html`<option value=${value}>${word}</option>`)}</select></label>
      <label>Language of dates <select value=${dates.value.language}
        onChange=${(e) => set({ language: e.target.value })}>
        ${LANGUAGES.map((each) => html`<option value=${each}>${nameOf(each)}</option>`)}</select></label>
      <label>Time zone <select value=${dates.value.zone} onChange=${(e) => set({ zone: e.target.value })}>
        <option value="">of this browser (${own})</option>${["UTC", ...ZONES].map((each) => html`<option value=${each}>
          ${each}</option>`)}</select></label>
      <p class="small soft">Now: ${exact(new Date().toISOString())}</p></form><//>
    <${Panel} title="You"><dl class="body">${me.value ? html`<dt>Name</dt><dd>${me.value.name}</dd>
      <dt>May</dt><dd>${me.value.scopes.join(", ")}</dd>` : html`<dt>Name</dt>
      <dd>the user of this machine</dd>`}</dl><//>
    ${may("read") && html`<${Server} />`}
    <${User} />`;
}

function Server() {
  const info = useData("/v1/info");
  return html`<${Panel} title="Server"><${Loaded} from=${info} what="the server">${(server) => html`<dl class="body">
    <dt>Version</dt><dd>${server.version}</dd><dt>Default model</dt><dd>${server.model}${server.demo_model
      && " (the demo model)"}</dd><dt>Retention</dt><dd>set by the operator: see <a
      href=${server.docs_url}>the documentation</a></dd></dl>`}<//>
    <p class="small soft"><${Link} path=${["operations", "keys"]} needs="admin">API keys<//> <${Link}
      path=${["operations", "secrets"]}>Secrets<//> <${Link} path=${["operations", "providers"]}>Providers<//></p><//>`;
}

/** What is stored of one end user, and its erasure. */
function User() {
  const [name, setName] = useState("");
  const [chosen, setChosen] = useState(null);
  return html`<${Panel} title="End users" needs="admin"><form class="filters body"
    onSubmit=${(e) => (e.preventDefault(), setChosen(name.trim()))}><label class="grow">Name of the user <input required
      value=${name} onInput=${(e) => setName(e.target.value)} /></label><button class="button">Look up</button></form>
    ${chosen && html`<${Stored} key=${chosen} name=${chosen} />`}<//>`;
}

function Stored({ name }) {
  const found = useData(url`/v1/users/${name}`);
  const counts = (user) => Object.entries(user).filter(([, value]) => typeof value === "number");
  return html`<${Loaded} from=${found} what="the user">${(user) => html`<div class="body stacked"><dl>
    ${counts(user).map(([what, number]) => html`<dt>${what.replaceAll("_", " ")}</dt><dd>${number}</dd>`)}</dl>
    ${!counts(user).length && html`<${Empty} title="Nothing is stored of it." />`}
    ${user.erasure_requested_at && html`<p class="note">Its erasure was asked for <${Time}
      at=${user.erasure_requested_at} />.</p>`}
    <div class="actions"><${Link} class="button" path=${["chat"]} query=${{ user: name }}>Conversations<//>
      <${Confirmed} needs="admin" label="Erase" question=${`Erase all that is stored of ${name}? It cannot be undone.`}
        act=${async () => (await call("DELETE", url`/v1/users/${name}`), found.reload())} /></div></div>`}<//>`;
}
