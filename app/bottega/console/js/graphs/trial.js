/** A question to a graph's team: as a dry run, which shows what would happen, or as a run. */
import { useState } from "preact/hooks";

import { post, url } from "../api.js";
import { html } from "../html.js";
import { usePostOnce } from "../once.js";
import { Button, Failure, Panel, Value } from "../parts/basics.js";
import { instead, useWork } from "../parts/work.js";
import { follow } from "../router.js";
import { POLICIES } from "./draft.js";

/** `name`: of the graph; `agents`: names, or null; `isChanged`: the page has changes that are not stored. */
export function Trial({ name, agents, isChanged }) {
  const [postOnce] = usePostOnce();
  const [agent, setAgent] = useState("");
  const [input, setInput] = useState("");
  const { busy, error, work } = useWork();
  const [found, setFound] = useState(null);
  const asked = agent ? { agent, input } : { input };
  const dryRun = instead(() => work(async () => setFound(await post(url`/v1/graphs/${name}/dry-run`, asked)), "dry"));
  const start = () => work(() =>
    follow(postOnce("/v1/runs", { ...asked, graph: name, mode: agent ? "orchestrated" : "dag" }),
      ({ id }) => ["runs", id]));
  return html`
    <${Panel} title="Try it">
      <form class="body form" onSubmit=${dryRun}>
        ${isChanged && html`<p class="note">It tries the stored version, without your changes.</p>`}
        <label>Ask <input value=${agent} list="trial-agents" placeholder="all agents of the graph" autocomplete="off"
          onInput=${(e) => setAgent(e.target.value.trim())} /></label>
        <datalist id="trial-agents">${(agents ?? []).map((each) => html`<option value=${each} />`)}</datalist>
        <label>Question <textarea rows="2" required maxlength="20000" value=${input}
          onInput=${(e) => setInput(e.target.value)}></textarea></label>
        <div class="actions">
          <${Button} type="submit" kind="primary" busy=${Boolean(busy)}>${busy === "dry" ? "Working…" : "Dry run"}<//>
          <${Button} busy=${Boolean(busy)} disabled=${!input} onClick=${start}>Start a run<//>
          <span class="small soft">A dry run uses the demo model, calls no tool that has an effect, and stores
            nothing.</span>
        </div>
      </form>
      ${error && html`<${Failure} error=${error} />`}
    <//>
    ${found && html`<${Result} found=${found} />`}`;
}

function Result({ found }) {
  const flows = found.tasks.flatMap(
    (task) => task.received.map((each) => ({ ...each, number: task.number, target: task.agent })));
  return html`
    <${Panel} title=${`What version ${found.version} would do`}>
      <div class="body" role="status">
        <p>${found.tasks.length} tasks, ${flows.length} texts received.
          Levels: ${found.levels.map((level) => level.join(", ")).join(" → ")}.</p>
        ${found.error && html`<p class="note bad">${found.error}</p>`}
        ${found.warnings.map(({ message }) => html`<p class="note">${message}</p>`)}
        <${Tools} agents=${found.agents} />
      </div>
      ${found.tasks.map((task) => html`<${Task} key=${task.number} task=${task} />`)}
    <//>
    <${Panel} title="The answer"><div class="body">
      ${typeof found.output === "string" ? html`<pre class="text">${found.output}</pre>`
        : html`<${Value} value=${found.output} />`}
    </div><//>`;
}

function Tools({ agents }) {
  const having = agents.filter(({ tools }) => tools.some((tool) => !tool.agent));
  if (!having.length) return null;
  return html`<ul class="small">
    ${having.map(({ agent, tools }) =>
      html`<li key=${agent}>${agent} would
        have: ${tools.filter((tool) => !tool.agent)
          .map((tool) => `${tool.name}${tool.called ? "" : " (not called here)"}`).join(", ")}</li>`)}</ul>`;
}

function Task({ task }) {
  const from = task.received.map((each) => `${each.source} v${each.version}`);
  return html`<details class="trial-task">
    <summary><span class="numbers soft">${task.number}</span> <strong>${task.agent}</strong> <span class="small soft">
      ${task.parent === null ? "asked by the run" : `asked by task ${task.parent}`}
      ${from.length ? ` · received ${from.join(", ")}` : ""}</span>
        ${task.error && html` <span class="status bad">${task.error}</span>`}</summary>
    <div class="body">
      ${task.received.map((each) =>
        html`<div key=${`${each.source}${each.version}`}>
          <h3>From ${each.source}, version ${each.version}: ${POLICIES[each.policy] ?? "recalled"}</h3>
          <pre class="text">${each.content}</pre></div>`)}
      <h3>As the model sees it</h3>
      ${task.messages.map((message, at) =>
        html`<div key=${at} class=${`message ${message.role}`}><span class="small soft">${message.role}</span>
        ${message.content && html`<pre class="text">${message.content}</pre>`}
        ${message.tool_calls.map(
          (call) => html`<p key=${call.id}
            class="small">calls <code>${call.name}</code> <code>${JSON.stringify(call.arguments)}</code></p>`)}</div>`)}
    </div>
  </details>`;
}
