/** Tools of agents and of MCP servers, and a trial of one with arguments by its schema. */
import { useState } from "preact/hooks";

import { DraftChat, TrialForm } from "../agents/draft_chat.js";
import { trialOf } from "../agents/schema.js";
import { excerpt } from "../format.js";
import { html } from "../html.js";
import { getAll } from "../load.js";
import { Button, Link, Panel, Read } from "../parts/basics.js";
import { Rows } from "../parts/lists.js";
import { go } from "../router.js";

/** `[{place, name, description, definition, parameters}]`: tools of agents that are called outside. */
const ofAgents = ({ items }) => items.flatMap((agent) => (agent.tools ?? []).filter((each) => each.type === "http")
  .map((tool) => ({ place: agent.name, path: ["agents", agent.name], name: tool.name, description: tool.description,
    definition: tool, parameters: tool.parameters })));

const ofServers = ({ items }) => items.flatMap((server) => (server.tools ?? []).map((tool) => ({ place: server.name,
  path: ["mcp"], name: tool.name, description: tool.description, parameters: tool.input_schema,
  definition: { type: "mcp", server: server.name, tools: [tool.name] } })));

export const Tools = ({ query }) => html`
  <div class="head"><h1>Tools</h1><div class="actions"><${Link} path=${["mcp"]}>MCP servers<//></div></div>
    <${Read} path="/v1/agents?view=full&limit=100 /v1/mcp-servers?view=full&limit=100" from=${getAll}
      what="tools">${([own, others]) => {
      const tools = [...ofAgents(own), ...ofServers(others)];
      const chosen = tools.find((each) => each.place === (query.server ?? query.agent) && each.name === query.tool);
      return html`<${Listed} tools=${tools} />${chosen && html`<${Trial} key=${`${chosen.place} ${chosen.name}`}
        tool=${chosen} />`}`;
    }}<//>`;

const Listed = ({ tools }) => html`<${Panel} title="Tools that are called outside"><${Rows} label="Tools" items=${tools}
  id=${(each) => `${each.place} ${each.name}`} empty="There is none yet."
  hint=${html`<p>Give an agent an HTTP request, or add an MCP server.</p>`} head=${["Tool", "Of", "What it does", ""]}
  cells=${(each) => [html`<code>${each.name}</code>`, html`<${Link} path=${each.path}>${each.place}<//>`,
    excerpt(each.description ?? "", 120), html`<${Button} kind="small" needs="define"
      aria-label=${`Try ${each.name} of ${each.place}`} onClick=${() => go(["tools"],
        { [each.path[0] === "mcp" ? "server" : "agent"]: each.place, tool: each.name })}>Try<//>`]} /><//>`;

function Trial({ tool }) {
  const [asked, setAsked] = useState(null);
  return html`<div class="build"><${TrialForm} definition=${tool.definition} parameters=${tool.parameters}
      onAsk=${setAsked} />
    <${DraftChat} name="" draft=${trialOf(tool.definition, {}).definition} asked=${asked} onProblems=${() => {}} />
    </div>`;
}
