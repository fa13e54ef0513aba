/** API keys and stored secrets: names and rights, never a value that was given before. */
import { useState } from "preact/hooks";

import { call, post, url } from "../api.js";
import { html } from "../html.js";
import { Button, Copy, Empty, Panel, Time, Value } from "../parts/basics.js";
import { Confirmed, Pages, Sending, Table } from "../parts/lists.js";

const SCOPES = { read: "sees everything", run: "starts and cancels runs", define: "changes agents and graphs",
  approve: "decides on approvals", admin: "everything, keys too" };

/** Scopes that often go together. */
const PRESETS = { "a program that asks agents": ["run"], "a person who approves": ["approve"],
  "a deployment": ["define"], "a person who builds": ["run", "define"], "an administrator": ["admin"] };

/** Choose the scopes of a preset in the form of the button. */
const choose = (event, scopes) => {
  for (const box of event.currentTarget.form.elements.scope) box.checked = scopes.includes(box.value);
};

export function Keys() {
  const [made, setMade] = useState(null);
  const [version, setVersion] = useState(0);
  const make = async (form) => {
    setMade(await post("/v1/keys", { name: form.get("name"), scopes: form.getAll("scope") }));
    setVersion((n) => n + 1);
  };
  const state = (key) => (key.revoked_at ? html`revoked <${Time} at=${key.revoked_at}
    />` : key.expires_at ? html`until <${Time} at=${key.expires_at} />` : "valid");
  return html`
    <${Panel} title="API keys"><${Pages} key=${version} path="/v1/keys?order=desc" what="keys">
      ${(keys, reload) => keys.length
      ? html`<${Table} label="API keys" head=${["Name", "Prefix", "Scopes", "Made", "Last used", "State", ""]}>
        ${keys.map((each) => html`<tr key=${each.id}><td>${each.name}</td><td class="mono">${each.prefix}</td><td>
          ${each.scopes.join(", ")}</td>
          <td><${Time} at=${each.created_at} /></td><td><${Time} at=${each.last_used_at} /></td><td>${state(each)}</td>
          <td>${!each.revoked_at && html`<${Confirmed} label="Revoke"
            question=${`Revoke ${each.name}? Its programs stop working.`}
              act=${async () => (await call("DELETE", url`/v1/keys/${each.id}`), reload())} />`}</td></tr>`)}<//>`
      : html`<${Empty} title="There is no key: only this machine can use the server.">
        <p>From the first key on, every request needs one.</p><//>`}<//><//>
    <${Panel} title="Make a key">
      ${made && html`<div class="state" role="status"><p><strong>The key ${made.name}. It is shown only now.</strong>
        </p><${Value} value=${made.key} /><${Copy} text=${made.key} label="Copy the key" /></div>`}
      <${Sending} label="Create" send=${make}>
        <label>Name <input name="name" required maxlength="100" /></label>
        <div class="actions"><span class="small soft">For</span>${Object.entries(PRESETS).map(([words, scopes]) => html`
          <${Button} kind="small" onClick=${(e) => choose(e, scopes)}>${words}<//>`)}</div>
        <fieldset class="choices"><legend>Scopes</legend>${Object.entries(SCOPES).map(([scope, means]) => html`<label
          class="check"><input type="checkbox" name="scope" value=${scope} defaultChecked=${scope === "run"}
            /> ${scope}: ${means}</label>`)}</fieldset>
      <//><//>`;
}

export function Secrets() {
  const [version, setVersion] = useState(0);
  const store = async (form) => {
    const hosts = form.get("hosts").split(/[\s,]+/).filter(Boolean);
    await call("PUT", url`/v1/secrets/${form.get("name")}`, { value: form.get("value"), hosts });
    setVersion((n) => n + 1);
  };
  return html`<${Panel} title="Secrets that tools and providers send"><${Pages} key=${version} path="/v1/secrets"
    what="secrets">${(secrets, reload) => secrets.length
      ? html`<${Table} label="Secrets" head=${["Name", "Only to", "#Version", "Changed", ""]}>
        ${secrets.map((each) => html`<tr key=${each.name}><td class="mono">${each.name}</td>
        <td>${each.hosts.join(", ")}</td><td class="right">${each.version}</td>
        <td><${Time} at=${each.updated_at} /></td>
        <td><${Confirmed} needs="define" label="Delete" question=${`Delete ${each.name}? What sends it fails.`}
          act=${async () => (await call("DELETE", url`/v1/secrets/${each.name}`), reload())} /></td></tr>`)}<//>`
      : html`<${Empty} title="No secret is stored." />`}<//><//>
    <${Panel} title="Store a secret" needs="define">
      <p class="small soft body">Its value is never shown again. Under a name that exists it is the next version.</p>
      <${Sending} label="Save" send=${store}>
      <label>Name <input name="name" required /></label>
      <label>Hosts that may get it <input name="hosts" required placeholder="api.example.com" /></label>
      <label>Value <input name="value" type="password" autocomplete="off" required /></label><//><//>`;
}
