/** What a person chooses for this browser, and what the server is set to. */
import { useState } from "preact/hooks";

import { call, fetchBlob, url, withQuery } from "../api.js";
import { count, exact } from "../format.js";
import { html } from "../html.js";
import { Button, Failure, Link, Panel, Read, Select, Time } from "../parts/basics.js";
import { FilePart } from "../parts/files.js";
import { Confirmed, Pages, Rows, Table } from "../parts/lists.js";
import { save } from "../parts/export.js";
import { useWork } from "../parts/work.js";
import { may, me } from "../person.js";
import { dates, theme } from "../preferences.js";

const THEMES = { system: "as the system", light: "light", dark: "dark" };
const LANGUAGES = ["en", "de", "fr", "es", "it", "pt", "nl", "pl", "sv", "tr", "ja", "zh", "ko", "ar", "he", "hi"];
const ZONES = Intl.supportedValuesOf("timeZone");

const KEPT = { runs: "Runs are kept", episodes: "Archived episodes are kept", audit: "The audit log is kept" };
const keptFor = (days) => (days == null ? "for ever" : days === 1 ? "for a day" : `for ${count(days)} days`);

const nameOf = (language) => new Intl.DisplayNames([language], { type: "language" }).of(language);

export function Settings() {
  const set = (part) => (dates.value = { ...dates.value, ...part });
  const own = Intl.DateTimeFormat().resolvedOptions().timeZone;
  return html`<div class="head"><h1>Settings</h1></div>
    <${Panel} title="This browser"><form class="form body" onSubmit=${(e) => e.preventDefault()}>
      <${Select} label="Theme" value=${theme.value} options=${Object.entries(THEMES)}
        onChange=${(value) => (theme.value = value)} />
      <${Select} label="Language of dates" value=${dates.value.language}
        options=${LANGUAGES.map((each) => [each, nameOf(each)])} onChange=${(language) => set({ language })} />
      <${Select} label="Time zone" any=${`of this browser (${own})`} value=${dates.value.zone}
        options=${["UTC", ...ZONES]} onChange=${(zone) => set({ zone })} />
      <p class="small soft">Now: ${exact(new Date().toISOString())}</p></form><//>
    <${Panel} title="You"><dl class="body">${me.value ? html`<dt>Name</dt><dd>${me.value.name}</dd>
      <dt>May</dt><dd>${me.value.scopes.join(", ")}</dd>` : html`<dt>Name</dt>
      <dd>the user of this machine</dd>`}</dl><//>
    ${may("read") && html`<${Server} />`}
    <${User} />`;
}

const Server = () => html`<${Panel} title="Server"><${Read} path="/v1/info" what="the server">
  ${(server) => html`<dl class="body">
    <dt>Version</dt><dd>${server.version}</dd><dt>Default model</dt><dd>${server.model}${server.demo_model
      && " (the demo model)"}</dd>${Object.entries(KEPT)
      .map(([kind, words]) => html`<dt>${words}</dt><dd>${keptFor(server.retention[kind])}</dd>`)}</dl>
    <p class="small soft body">How long things are kept is set by the operator (<code>BOTTEGA_RETENTION_RUNS_DAYS</code>
      and the like).</p>`}<//>
    <p class="small soft"><${Link} path=${["operations", "keys"]} needs="admin">API keys<//> <${Link}
      path=${["operations", "secrets"]}>Secrets<//> <${Link} path=${["operations", "providers"]}>Providers<//> <${Link}
      path=${["operations"]}>Limits<//></p><//>`;

/** What is stored of one end user, its export and its erasure. */
function User() {
  const [name, setName] = useState("");
  const [chosen, setChosen] = useState(null);
  return html`<${Panel} title="End users" needs="admin"><form class="filters body"
    onSubmit=${(e) => (e.preventDefault(), setChosen(name.trim()))}><label class="grow">Name of the user <input required
      value=${name} onInput=${(e) => setName(e.target.value)} /></label><button class="button">Look up</button></form>
    ${chosen && html`<${Stored} key=${chosen} name=${chosen} />`}<//>`;
}

function Stored({ name }) {
  const { busy, error, work } = useWork();
  const write = () => work(async () => save(await fetchBlob(url`/v1/users/${name}/export`), "user.ndjson"));
  const at = (path, words) => html`<${Link} class="button" path=${path} query=${{ user: name }}>${words}<//>`;
  return html`<${Read} path=${url`/v1/users/${name}`} what="the user">${(user, reload) => html`
    <div class="body stacked">
    ${user.status === "erasing" && html`<p class="note" role="status">All that is stored of ${name} is being erased,
      since <${Time} at=${user.requested_at} />.</p>`}
    ${error && html`<${Failure} error=${error} />`}
    <div class="actions">${at(["chat"], "Conversations")} ${at(["runs"], "Runs")} ${at(["memory"], "Episodes")}
      ${at(["memory", "lessons"], "Lessons")}
      <${Button} busy=${busy} onClick=${write}>Export<//>
      <${Confirmed} needs="admin" label="Erase" question=${`Erase all that is stored of ${name}? It cannot be undone.`}
        act=${async () => (await call("DELETE", url`/v1/users/${name}`), reload())} /></div>
    <h3>Facts</h3><${UserFacts} name=${name} />
    <h3>Files</h3><${UserFiles} name=${name} /></div>`}<//>`;
}

/** What agents that use facts know of the user. */
function UserFacts({ name }) {
  const path = url`/v1/users/${name}/facts`;
  const [text, setText] = useState("");
  const [error, setError] = useState(null);
  return html`<${Pages} path=${withQuery(path, { order: "desc" })} what="facts">${(facts, reload) => {
    const add = async (e) => {
      e.preventDefault();
      await call("POST", path, { text }).then(() => (setText(""), setError(null), reload()), setError);
    };
    return html`${facts.length ? html`<${Table} label=${`Facts about ${name}`} head=${["Fact", "Set by", "Set", ""]}>
      ${facts.map((each) => html`<${FactRow} key=${`${each.id} ${each.text} ${each.confirmed}`} fact=${each}
        user=${name} reload=${reload} />`)}<//>` : html`<p class="small soft">There is none.</p>`}
      ${error && html`<${Failure} error=${error} />`}
      <form class="filters" onSubmit=${add}><label class="grow">New fact <input required maxlength="200" value=${text}
        onInput=${(e) => setText(e.target.value)} /></label><button class="button">Add</button></form>`;
  }}<//>`;
}

function FactRow({ fact, user, reload }) {
  const [text, setText] = useState(fact.text);
  const [error, setError] = useState(null);
  const at = url`/v1/users/${user}/facts/${fact.id}`;
  const keep = () => call("PATCH", at, { text }).then(reload, setError);
  const isChanged = text !== fact.text;
  return html`<tr><td><input aria-label="Fact" maxlength="200" value=${text}
      onInput=${(e) => setText(e.target.value)} />${error && html`<${Failure} error=${error} />`}
      ${!fact.confirmed && html`<p class="small">Not given to a model: the run had read outside content before.</p>`}
    </td>
    <td>${fact.source.run_id ? html`<${Link} path=${["runs", fact.source.run_id]}>a run<//>` : "a person"}</td>
    <td><${Time} at=${fact.created_at} /></td>
    <td class="actions">${(isChanged || !fact.confirmed) && html`<${Button} onClick=${keep}>
        ${isChanged ? "Save" : "Confirm"}<//>`}
      <${Confirmed} label="Delete" question=${`Delete "${fact.text}"?`}
        act=${async () => (await call("DELETE", at), reload())} /></td></tr>`;
}

function UserFiles({ name }) {
  const path = withQuery("/v1/files", { user: name, order: "desc" });
  const remove = ({ id }) => call("DELETE", withQuery(url`/v1/files/${id}`, { user: name }));
  return html`<${Pages} path=${path} what="files">${(files, reload) => html`<${Rows} label=${`Files of ${name}`}
    items=${files} empty="It has none." head=${["Name", "#Bytes", "Stored", ""]} cells=${(each) => [
      html`<${FilePart} part=${{ ...each, type: "file", file: each.id }} />`, count(each.size),
      html`<${Time} at=${each.created_at} />`, html`<${Confirmed} label="Delete"
        question=${`Delete ${each.name ?? "it"}?`} act=${() => remove(each).then(reload)} />`]} />`}<//>`;
}
