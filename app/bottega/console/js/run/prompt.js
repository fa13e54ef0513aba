/** The prompt of one model call: what the model got, and where each part of it came from. */
import { url, withQuery } from "../api.js";
import { count } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Empty, Loaded, Value } from "../parts/basics.js";
import { Readable, ToolCall } from "../parts/readable.js";
import { ResultOf } from "../parts/said.js";

const ORIGINS = {
  agent: "its own instructions", graph: "order of its sub-agents", context: "from another agent", memory: "from memory",
  input: "the question", user: "sent during the run", model: "the model", tool: "result of",
};

/** `call`: number of the chosen model call; null: the last one. */
export function Prompt({ run, task, call, onChoose }) {
  const chosen = call ?? task.calls.at(-1)?.call ?? null;
  const found = useData(chosen && withQuery(url`/v1/runs/${run.id}/prompt`, { task_id: task.id, call: chosen }));
  if (chosen === null) return html`<${Empty} title="No model call yet." />`;
  return html`
    <label class="choice">Model call <select value=${chosen} onChange=${(e) => onChoose(Number(e.target.value))}>
      ${task.calls.map((each) =>
        html`<option value=${each.call}>
          ${each.call}${each.model ? ` · ${each.model}` : ""}</option>`)}</select></label>
    <${Loaded} from=${found} what="the prompt">${(prompt) => html`
      <p class="small soft">${prompt.version && `version ${prompt.version} of the agent · `}${prompt.model}
        ${params(prompt.params)}</p>
      ${prompt.shortened && html`<p
        class="note small">The working memory shortened it to
          about ${count(prompt.shortened.tokens)} tokens: ${count(prompt.shortened.shrunk)} results as
          summaries, ${count(prompt.shortened.left)} messages left out.</p>`}
      ${prompt.messages.map((each, i) => html`<${Piece} key=${i} message=${each} />`)}
      ${prompt.more && html`<p class="note small">Messages in between are not shown.</p>`}
      <details class="tool"><summary>Tools and sub-agents <span class="small soft">${count(prompt.tools.length)}</span>
        </summary>
        ${prompt.tools.length ? prompt.tools.map(
          (tool) => html`<h3 key=${tool.name}><code>${tool.name}</code> ${tool.type}</h3>
          ${tool.description && html`<p class="small">${tool.description}</p>`}
            ${tool.parameters && html`<${Value} value=${tool.parameters} />`}`)
              : html`<p class="small soft">None of its definition.</p>`}
      </details>`}<//>`;
}

const params = (given) => Object.entries(given).map(([name, value]) => ` · ${name} ${JSON.stringify(value)}`).join("");

const originOf = ({ origin, source, version, name }) => [ORIGINS[origin],
  source && `${source}, version ${version}`, name].filter(Boolean).join(" ");

/** A message; `about`: where it came from. */
export const Piece = ({ message, about = originOf(message) }) => html`<div class=${`message ${message.role}`}>
  <p class="small soft"><strong>${message.role}</strong>${about && ` · ${about}`}</p>
  ${message.status === "error" && html`<${ResultOf} message=${message} />`}
  ${message.content && (message.role === "tool" ? html`<${Readable} value=${message.content} />`
    : html`<pre class="text">${message.content}</pre>`)}
  ${message.parts?.filter((part) => part.type !== "text").map((part) => html`<p class="small">[${part.type}]</p>`)}
  ${message.tool_calls?.map((call) => html`<${ToolCall} key=${call.id} call=${call} />`)}
</div>`;
