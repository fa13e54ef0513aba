/** MCP servers: add one, ask it for its tools, see what changed. */
import { useState } from "preact/hooks";

import { call, post, url } from "../api.js";
import { SchemaForm } from "../forms/schema_form.js";
import { html } from "../html.js";
import { usePostOnce } from "../once.js";
import { Button, Empty, Failure, Link, Panel, Time } from "../parts/basics.js";
import { Confirmed, Pages } from "../parts/lists.js";
import { useWork } from "../parts/work.js";

export function Mcp() {
  const [turn, setTurn] = useState(0);
  return html`<div class="head"><h1>MCP servers</h1></div>
    <${Panel} title="Servers"><${Pages} key=${turn} path="/v1/mcp-servers?view=full" what="MCP servers">
      ${(servers, reload) => servers.length
        ? servers.map((each) => html`<${Server} key=${each.name} server=${each} reload=${reload} />`)
        : html`<${Empty} title="There is no MCP server yet."><p>Add one below: its tools are then tools of agents.</p>
          <//>`}<//><//>
    <${Add} onAdded=${() => setTurn(turn + 1)} />`;
}

function Server({ server, reload }) {
  const { busy, error, work } = useWork();
  const [said, setSaid] = useState(null);
  const refresh = () => work(async () => {
    setSaid(null);
    const found = await post(url`/v1/mcp-servers/${server.name}/refresh`);
    setSaid(`It answers, with ${found.tools.length} tools.`);
    await reload();
  });
  const remove = async () => {
    await call("DELETE", url`/v1/mcp-servers/${server.name}`);
    reload();
  };
  return html`<article class="body stacked" aria-label=${server.name}><div class="head"><div><h3>${server.name}</h3>
    <p class="small soft">${server.url ?? server.command} · ${server.tools_at ? html`tools read <${Time}
      at=${server.tools_at} />` : "its tools were not read yet"}</p></div>
    <div class="actions">${server.stale && html`<span class="status wait">stale</span>`}
      <${Button} needs="define" kind="small" busy=${busy} onClick=${refresh}>${server.tools ? "Refresh" : "Test"}<//>
      <${Confirmed} needs="define" label="Delete" question=${`Delete ${server.name}?`} act=${remove} /></div></div>
    ${server.stale && html`<p class="note">It has other tools by now: refresh them.</p>`}
    <p class="small" role="status">${said}</p>
    ${error && html`<${Failure} error=${error} />`}
    ${server.warnings?.map((each) => html`<p class="small soft">${each}</p>`)}
    ${server.tools?.length > 0 && html`<details><summary>${server.tools.length} tools</summary><ul class="rows">
      ${server.tools.map((tool) => html`<li key=${tool.name}><code>${tool.name}</code> <span class="small soft">
        ${tool.description}</span> <${Link} class="small" needs="define" path=${["tools"]}
          query=${{ server: server.name, tool: tool.name }}>Try it<//></li>`)}</ul></details>`}</article>`;
}

function Add({ onAdded }) {
  const [postOnce] = usePostOnce();
  return html`<${Panel} title="Add a server" needs="define"><${SchemaForm} schema="NewMcpServerAtUrl" label="Add"
    send=${(draft) => postOnce("/v1/mcp-servers", draft).then(onAdded)} /><//>`;
}
