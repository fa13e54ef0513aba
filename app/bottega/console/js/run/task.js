/** One task in detail: its text as it comes, prompt, model and tool calls, what it received. */
import { useEffect, useRef, useState } from "preact/hooks";

import { post, url, withQuery } from "../api.js";
import { count, duration, excerpt, money, plain, tokens } from "../format.js";
import { html } from "../html.js";
import { Button, chosenOf, Copy, Empty, Panel, permitted, Read, Select, Status, Tabs, Value } from "../parts/basics.js";
import { DialogForm } from "../parts/dialog.js";
import { Act, Pages, Rows } from "../parts/lists.js";
import { Readable, ResultOf, ToolCall } from "../parts/readable.js";
import { Source } from "../parts/source.js";
import { may } from "../person.js";
import { follow } from "../router.js";
import { isFinal } from "./state.js";

/** The name of the list of tool calls: "Tools 3, 1 failed". */
function toolsOf({ tools }) {
  const failed = tools.filter(({ status }) => status === "failed").length;
  return `Tools ${tools.length}${failed ? `, ${failed} failed` : ""}`;
}

/** `tab` and `call` are those of the address; `onChange` gets other ones. */
export function TaskDetail({ run, state, task, now, tab: wanted, call, onChange }) {
  const setCall = (number) => onChange({ call: number });
  const showPrompt = (number) => onChange({ detail: "prompt", call: number });
  if (!task) return html`<${Panel} title="Agent"><${Empty} title="No agent has begun yet." /><//>`;
  const tabs = permitted([["text", "Text"], ["prompt", "Prompt", "read"], ["calls", `Model calls ${task.calls.length}`],
    ["tools", toolsOf(task)],
    ["received", `Received ${task.received.length}`], ["messages", "Messages"]]);
  const tab = chosenOf(tabs, wanted);
  const actions = html`<${Status} value=${task.status} /><${Fork} key=${`fork ${task.key}`} run=${run} state=${state}
    task=${task} /><${CancelTask} key=${task.key} run=${run} task=${task} />`;
  return html`<${Panel} title=${task.title ? `${task.agent}: ${task.title}` : task.agent} actions=${actions}>
    <p class="small soft numbers">${duration(task.startedAt
      && (task.endedAt ?? now) - task.startedAt)} · ${tokens(task.tokens)} tokens · ${money(task.cost)}</p>
    <${Tabs} tabs=${tabs} chosen=${tab} onChoose=${(name) => onChange({ detail: name })} label="Details of the agent" />
    <div class="body" role="tabpanel" aria-label=${tab}>
      ${tab === "text" && html`<${Text} task=${task} />`}
      ${tab === "prompt" && html`<${Prompt} run=${run} task=${task} call=${call} onChoose=${setCall} />`}
      ${tab === "calls" && html`<${Calls} task=${task} onPrompt=${showPrompt} />`}
      ${tab === "tools" && html`<${Tools} task=${task} state=${state} />`}
      ${tab === "received" && html`<${Received} task=${task} state=${state} />`}
      ${tab === "messages" && html`<${Messages} run=${run} task=${task} />`}
    </div>
  <//>`;
}

function CancelTask({ run, task }) {
  if (isFinal(task.status) || task.id === null) return null;
  return html`<${Act} needs="run" kind="small danger" label="Cancel task"
    act=${() => post(url`/v1/runs/${run.id}/tasks/${task.id}/cancel`)} />`;
}

function Text({ task }) {
  const box = useRef(null);
  const text = task.live?.text || task.output || task.calls.findLast((each) => each.message?.content)?.message.content;
  useEffect(() => {
    if (task.live && box.current) box.current.scrollTop = box.current.scrollHeight;
  }, [text]);
  return html`
    ${task.prompt && html`<h3>Asked</h3><${Value} value=${task.prompt} />`}
    ${task.error && html`<p class="note bad"><strong>${task.error.code}</strong> ${task.error.message}</p>`}
    <h3>${task.live ? "Writing…" : "Said"}</h3>
    ${text ? html`<pre class="text live" ref=${box} tabindex="0" aria-live="off">${plain(text)}</pre><div
      class="actions"><${Copy} text=${plain(text)} /></div>` : html`<p class="soft">Nothing yet.</p>`}`;
}

const Calls = ({ task, onPrompt }) => html`<${Rows} label="Model calls" items=${task.calls} id=${({ call }) => call}
  empty="No model call yet." head=${["Call", "Model", "#Time", "#In", "#Out", "#Cost", "Result"]} cells=${(each) => [
    may("read") ? html`<${Button} kind="small ghost" onClick=${() => onPrompt(each.call)}
      aria-label=${`Prompt of call ${each.call}`}>${each.call}<//>` : each.call, each.model, duration(each.ms),
    tokens(each.usage?.input), tokens(each.usage?.output), money(each.usage?.cost),
    each.error && !each.message ? html`<span class="bad-text">${excerpt(each.error.message)}</span>`
      : excerpt(plain(each.message?.content) || (each.message?.tool_calls ?? []).map((call) => call.name).join(", "),
        80)]} />`;

/** More calls than these are folded. */
const FEW = 6;

function Tools({ task, state }) {
  if (!task.tools.length) return html`<${Empty} title="No tool call." />`;
  const [box, head] = task.tools.length < FEW ? ["div", "p"] : ["details", "summary"];
  return task.tools.map((tool) => html`<${box} class="tool" key=${`${tool.call}:${tool.id}`}>
    <${head}><code>${tool.name}</code> <${Status} value=${tool.status} /> <span class="small soft numbers">
      ${duration(tool.to && tool.to - tool.from)}</span></${head}>
    ${Object.keys(tool.arguments ?? {}).length > 0 && html`<h3>Arguments</h3><${Readable} value=${tool.arguments} />`}
    <h3>${tool.status === "denied" ? "What the agent was told"
      : tool.error ? `Error: ${tool.error.type}` : "Result"}</h3><${Readable}
      value=${tool.error?.message ?? tool.result ?? (tool.answerSeq ? state.textOf({ answer_seq: tool.answerSeq })
        : "–")} /></${box}>`);
}

const Received = ({ task, state }) => task.received.length === 0
  ? html`<${Empty} title="Nothing from other agents or memory." />`
  : task.received.map((item) => html`<details class="tool" key=${item.seq} open=${task.received.length < 3}>
      <summary>${item.isRecalled ? "recalled from" : "from"} <strong><${Source} of=${item.source} /></strong> <span
        class="small soft">version ${item.version}${item.data.policy ? ` · ${item.data.policy}`
          : ""}${item.data.score != null ? ` · likeness ${item.data.score}` : ""}${item.data.arm
            ? ` · ${item.data.arm}`
            : ""}</span></summary>
      <${Value} value=${state.textOf(item.data)} /></details>`);

function Messages({ run, task }) {
  const path = withQuery(url`/v1/runs/${run.id}/messages`, { task_id: task.id });
  return html`<${Pages} path=${path} what="messages" everyMs=${isFinal(task.status) ? 0 : 3000}>
    ${(items) => items.length
    ? items.map((each) => html`<${Piece} key=${`${each.seq}:${each.role}`} message=${each}
      about=${[each.name, each.source && `from ${each.source}`].filter(Boolean).join(" · ")} />`)
    : html`<${Empty} title="No messages yet." />`}<//>`;
}

/** The node of a task, if the run can be repeated from it; nodes of graphs in the graph cannot. */
function nodeOf(run, task) {
  const name = task.node ?? task.agent;
  return run.mode === "dag" && isFinal(run.status) && task.parent === null && !name.includes("/") ? name : null;
}

/** The button beside a node, with what it opens. */
function Fork({ run, state, task }) {
  const [open, setOpen] = useState(false);
  const node = nodeOf(run, task);
  if (node === null) return null;
  const published = state.published.findLast((each) => each.agent === node);
  return html`<${Button} needs="run" kind="small" onClick=${() => setOpen(true)}>Repeat from here<//>
    ${open && html`<${Form} run=${run} node=${node} text=${published ? state.textOf(published.data) : ""}
      onClose=${() => setOpen(false)} />`}`;
}

function Form({ run, node, text, onClose }) {
  const [gives, setGives] = useState(false);
  const [publication, setPublication] = useState(text);
  const body = gives ? { node, publication } : { node };
  const start = (postOnce) => follow(postOnce(url`/v1/runs/${run.id}/fork`, body), ({ id }) => ["runs", id]);
  return html`<${DialogForm} title=${`Repeat from ${node}`} label="Repeat" send=${start}
    disabled=${gives && !publication.trim()} onClose=${onClose}>
      <p class="small soft">A new run takes over what came before, at no cost. ${node} and all nodes that follow it are
        done again.</p>
      <label class="inline"><input type="checkbox" checked=${gives} onChange=${(e) => setGives(e.target.checked)} />
        Publish my text, and do not ask ${node}</label>
      <label>What ${node} publishes
        <textarea rows="8" disabled=${!gives} value=${publication}
          onInput=${(e) => setPublication(e.target.value)}></textarea></label>
  <//>`;
}

const ORIGINS = {
  agent: "its own instructions", graph: "order of its sub-agents", context: "from another agent", memory: "from memory",
  input: "the question", user: "sent during the run", model: "the model", tool: "result of",
};

/** `call`: number of the chosen model call; null: the last one. */
function Prompt({ run, task, call, onChoose }) {
  const chosen = call ?? task.calls.at(-1)?.call ?? null;
  if (chosen === null) return html`<${Empty} title="No model call yet." />`;
  return html`
    <${Select} kind="choice" label="Model call" value=${chosen} onChange=${(call) => onChoose(Number(call))}
      options=${task.calls.map(({ call, model }) => [call, `${call}${model ? ` · ${model}` : ""}`])} />
    <${Read} what="the prompt"
      path=${withQuery(url`/v1/runs/${run.id}/prompt`, { task_id: task.id, call: chosen })}>${(prompt) => html`
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
const Piece = ({ message, about = originOf(message) }) => html`<div class=${`message ${message.role}`}>
  <p class="small soft"><strong>${message.role}</strong>${about && ` · ${about}`}</p>
  ${message.status === "error" && html`<${ResultOf} message=${message} />`}
  ${message.content && (message.role === "tool" ? html`<${Readable} value=${message.content} />`
    : html`<pre class="text">${message.content}</pre>`)}
  ${message.parts?.filter((part) => part.type !== "text").map((part) => html`<p class="small">[${part.type}]</p>`)}
  ${message.tool_calls?.map((call) => html`<${ToolCall} key=${call.id} call=${call} />`)}
</div>`;
