/** A conversation with an agent: what was said in a session, the answer as it comes, decisions. */
import { signal } from "@preact/signals";
import { useEffect, useRef, useState } from "preact/hooks";

import { newId, post, url, withQuery } from "../api.js";
import { plain } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { usePostOnce } from "../once.js";
import { Button, Copy, Empty, Folded, Link, Loading, Panel, Read, Stale, Status, Time } from "../parts/basics.js";
import { Conversations } from "../parts/conversations.js";
import { Decision } from "../parts/decision.js";
import { ChosenFiles, FilePart, partsOf, useFiles } from "../parts/files.js";
import { Markdown } from "../parts/markdown.js";
import { Author, Readable, ResultOf, ToolCall } from "../parts/readable.js";
import { see } from "../parts/seen.js";
import { instead } from "../parts/work.js";
import { may } from "../person.js";
import { isFinal } from "../run/state.js";
import { Rating } from "../run/story.js";
import { useRunState } from "../run/use_run.js";
import { go } from "../router.js";

export function Chat({ query }) {
  return query.session
    ? html`<${Conversation} key=${query.session} session=${query.session} agent=${query.agent} user=${query.user}
      exists=${query.known === "1"} />`
    : html`<${Choice} wanted=${query.agent} query=${query} />`;
}

/** Choose an agent for a new conversation, or go on with an old one. */
function Choice({ wanted, query }) {
  const start = instead(({ target }) =>
    go(["chat"], { agent: new FormData(target).get("agent"), session: `chat-${newId()}` }));
  return html`
    <div class="head"><h1>Chat</h1></div>
    <${Panel} title="A new conversation">
      <${Read} path="/v1/agents?limit=100" what="agents">${(page) => page.items.length
        ? html`<form class="body filters" onSubmit=${start}><label>Agent <${AgentField} page=${page} wanted=${wanted} />
          </label>
            <button class="button primary">Start</button></form>`
        : html`<${Empty} title="There is no agent yet."><p>Define one with <code>POST /v1/agents</code>.</p><//>`}<//>
    <//>
    <${Conversations} query=${query} />`;
}

/** A choice among all agents; if there are more than a page of them, a name to type. */
const AgentField = ({ page, wanted }) => page.next_cursor
  ? html`<input name="agent" required list="chat-agents" defaultValue=${wanted ?? ""} autocomplete="off" />
    <datalist id="chat-agents">${page.items.map((each) => html`<option value=${each.name} />`)}</datalist>`
  : html`<select name="agent">${page.items.map((each) => html`<option value=${each.name}
    selected=${each.name === wanted}>${each.name}</option>`)}</select>`;

function Conversation({ session, agent: wanted, user: named, exists }) {
  const [isKnown, setIsKnown] = useState(exists); // a run was accepted, so there is such a session
  const [over, setOver] = useState(new Set()); // ended runs whose messages were read
  const last = useData(withQuery("/v1/runs", { session_id: session, limit: 1, order: "desc" }),
    { everyMs: 4000 }); // others may talk in it too
  const latest = last.data?.items[0];
  const asked = useRef(wanted);
  const agent = (asked.current ??= latest?.agent); // it stays, though another one may be asked in the session
  const user = latest?.user ?? named; // the session's, which all of its runs name
  const path = withQuery(url`/v1/sessions/${session}/messages`, { limit: 100, order: "desc", agent });
  const said = useData(latest || isKnown ? path : null);
  const [sent, setSent] = useState(null);
  const [sending, setSending] = useState(null);
  const [posted, setPosted] = useState({});
  const [error, setError] = useState(null);
  const [note, setNote] = useState("");
  const running = latest && !isFinal(latest.status) ? latest.id : null;
  const open = [sent?.id, running].find((id) => id && !over.has(id)) ?? null;
  const reload = async (id, { error: failure, status }) => {
    if (failure) setError(`${failure.code}: ${failure.message}`);
    last.reload();
    const isRead = await said.reload();
    if (isRead || !isFinal(status)) setOver((old) => new Set(old).add(id));
  };
  const [state] = useRunState(open, (ended) => reload(open, ended));
  useEffect(() => void (latest && latest.id !== sent?.id && said.reload()), [latest?.id]); // somebody else's
  useEffect(() => () => see(session), []);
  useEffect(() => see(session), [latest?.id, latest?.status]);
  const end = useRef(null);
  const messages = [...(said.data?.items ?? [])].reverse();
  const root = state.tasks.values().next().value;
  useEffect(() => end.current?.scrollIntoView({ block: "end" }), [messages.length, open, sending, root?.live?.text]);

  const [start, lostStart] = usePostOnce(`start ${session}`);
  const [steer, lostSteer] = usePostOnce(`steer ${session}`);
  const send = async (content) => {
    setError(null);
    setNote("");
    setSending(content);
    const input = typeof content === "string" ? content : [{ role: "user", content }];
    const wanted = { agent, session_id: session, ...(user && { user }), input };
    try {
      const isRepeated = lostStart(wanted) !== null;
      const taking = open !== null && !isFinal(state.status) && !isRepeated ? url`/v1/runs/${open}/messages` : null;
      const path = lostSteer({ content }) ?? taking; // the run that may have got it, though it has ended since
      const added = path && (await steered(steer, path, content));
      if (added) {
        setPosted((old) => ({ ...old, [added]: content }));
        return;
      }
      const run = await start("/v1/runs", wanted);
      setSent(run);
      setIsKnown(true);
      if (isRepeated && shown.has(run.id)) setNote("This message had come already. It was not sent again.");
    } catch (problem) {
      setError(problem.message);
      throw problem;
    } finally {
      setSending(null);
    }
  };
  const by = { user, agent };
  const pending = [...state.interrupts.values()].filter((each) => each.status === "pending");
  const shown = new Set(messages.map((each) => each.run_id));
  const question = sent && !shown.has(sent.id) ? sent.input : null;
  const read = new Set(messages.map((each) => each.message_id));
  const added = state.messages.filter((each) => !read.has(each.id));
  return html`
    <div class="head"><div><h1>${agent ?? "Chat"}</h1><p class="soft small">
      ${user && html`with <b>${user}</b> `}<${Copy} text=${session} label="Copy the session's id" /></p></div>
      <div class="actions">${open && html`<${Status} value=${state.status} />`}
        ${(open ?? latest?.id) && html`<${Link} path=${["runs", open ?? latest.id]} class="small">Show
          the ${open ? "run" : "last run"}<//>`}
        <${Button} onClick=${() => go(["chat"])}>Other conversations<//></div></div>
    <section class="chat panel" role="log" aria-live=${said.data ? "polite" : "off"} aria-relevant="additions"
      aria-label="Conversation">
      ${!messages.length && !question && !sending && (last.loading || said.loading ? html`<${Loading}
        what="the conversation" />` : html`<${Empty} title="Say something." />`)}
      ${said.data?.next_cursor && html`<p class="small soft">Only the last 100 messages are shown.</p>`}
      ${inSteps(messages).map((each) => each.steps
        ? html`<${Steps} key=${each.key} of=${each} by=${by} />`
        : html`<${Said} key=${keyOf(each)} message=${each} by=${by} />`)}
      ${question && html`<div class="said user"><${Author} ...${by} /><pre class="text">${plain(question)}</pre></div>`}
      ${added.map((each) => html`<div class="said user" key=${each.id}><${Author} ...${by} />
        <pre class="text">${plain(each.content ?? posted[each.id]) || "A message"}</pre>
        <p class="small soft">${each.delivered ? "read" : "not read yet"}</p></div>`)}
      ${open && html`<${Coming} ...${{ state, root, by }} said=${messages.filter((each) => each.run_id === open)} />`}
      <${Stale} from=${said} again=${() => (open ? reload(open, state) : said.reload())} />
      ${sending && html`<div class="said user"><${Author} ...${by} /><pre class="text">${plain(sending)}</pre><p
        class="small soft">being sent</p></div>`}
      ${pending.map((each) => html`<${Decision} key=${each.id} interrupt=${each} user=${user} />`)}
      ${error && html`<p class="note bad" role="alert">${error}</p>`}
      <p class="small soft" role="status">${note}</p>
      <div ref=${end} class="end"></div>
    </section>
    <${Composer} session=${session} busy=${open !== null && !isFinal(state.status)} disabled=${!agent} onSend=${send}
      onStop=${() => post(url`/v1/runs/${open}/cancel`).catch((problem) => setError(problem.message))} />`;
}

/** Send a message to a run under way by `steer`; return its id, or null if the run has ended meanwhile. */
async function steered(steer, path, content) {
  try {
    return (await steer(path, { content })).message_id;
  } catch (problem) {
    if (problem.code === "final") return null;
    throw problem;
  }
}

const keyOf = (message) => `${message.run_id}:${message.seq}:${message.role}:${message.tool_call_id ?? ""}`;

/** Messages, with those between question and answer put together as the steps of a run. */
function inSteps(messages) {
  const found = [];
  for (const message of messages) {
    const isStep = message.role === "tool" || (message.role === "assistant" && message.tool_calls?.length > 0);
    const last = found.at(-1);
    if (!isStep) found.push(message);
    else if (last?.steps && last.run === message.run_id) last.steps.push(message);
    else found.push({ key: `steps ${keyOf(message)}`, run: message.run_id, steps: [message] });
  }
  for (const each of found) {
    const called = each.steps?.flatMap((step) => step.tool_calls?.map((call) => call.name) ?? []);
    if (called) each.names = [...new Set(called)].join(", ");
  }
  return found;
}

/** What an agent did between question and answer; a call that went wrong is red. */
function Steps({ of: { steps, names }, by }) {
  const failed = steps.filter(({ status }) => status === "error");
  return html`<details class="said tool-said"><summary>
    ${steps.length} ${steps.length === 1 ? "step" : "steps"}: <span class="soft small">${names}</span>
    ${failed.length > 0 && html` <span class="small bad-text">✕ ${failed.map(({ name }) => name).join(", ")} did not
      work</span>`}</summary>
    ${steps.map((step) => html`<${Said} key=${keyOf(step)} message=${step} by=${by} />`)}</details>`;
}

/** `by`: names of the user and the agent. */
function Said({ message, by }) {
  if (message.role === "tool") return html`<${ResultOf} message=${message} /><${Readable} value=${message.content} />`;
  return html`<div class=${`said ${message.role} ${message.discarded ? "discarded" : ""}`}>
    <${Author} role=${message.role} source=${message.source} ...${by} />
    ${message.content && (message.role === "assistant" ? html`<${Markdown} text=${message.content} />`
      : html`<pre class="text">${message.content}</pre>`)}
    ${message.parts?.filter((part) => part.type !== "text").map((part) => html`<${FilePart} key=${part.file ?? part.url}
      part=${part} />`)}
    ${message.tool_calls?.map((call) => html`<${ToolCall} key=${call.id} call=${call} />`)}
    <div class="small soft">${message.discarded ? "of a run that did not complete · " : ""}<${Time} at=${message.at} />
      ${message.role === "assistant" && !message.tool_calls?.length && html` · <${Link}
        path=${["runs", message.run_id]}>how it came about<//><${Rate} run=${message.run_id} />`}</div></div>`;
}

/** The rating of an answer; what it is now is read once it is asked for. */
const Rate = ({ run }) => may("run") && may("read") && html`<${Folded} class="rate" summary="Rate it">${() => html`
  <${Read} path=${url`/v1/runs/${run}`} what="its rating">${(now, reload) => html`<${Rating} run=${now}
    onRated=${reload} />`}<//>`}<//>`;

/** The text of the answer so far, and what the agents do; nothing once the answer was read. */
function Coming({ state, root, said, by }) {
  const tools = [...state.tasks.values()].flatMap((task) => task.tools);
  const doing = tools.filter((tool) => tool.status === "running").map((tool) => tool.name);
  const text = root?.live?.text || root?.output || state.output;
  const isRead = said.some((each) => each.role === "assistant" && each.content === text);
  const moves = !isFinal(state.status);
  if (!moves && (isRead || !text)) return null;
  return html`<div class="said assistant" aria-busy=${moves}><${Author} role="assistant" ...${by} />
    <pre class="text">${isRead ? "" : text}</pre>
    ${moves && html`<p class="small soft"><span class="spinner" aria-hidden="true">
      </span> ${doing.length ? `calls ${doing.join(", ")}` : state.status === "waiting" ? `waits for ${{ person: "you",
        client: "you" }[state.waitsFor] ?? `its ${state.waitsFor}`}` : "thinks"}</p>`}</div>`;
}

/** What was typed and not sent, by session: it stays while another page is shown, or another key is entered. */
const typed = new Map();

function typedIn(session) {
  if (!typed.has(session)) typed.set(session, signal(""));
  return typed.get(session);
}

function Composer({ session, busy, disabled, onSend, onStop }) {
  const kept = typedIn(session);
  const text = kept.value;
  const chosen = useFiles(session);
  const chooser = useRef(null);
  const [isSending, setIsSending] = useState(false);
  const isReady = !disabled && !isSending && !chosen.isBusy && (text.trim() || chosen.ready.length > 0);
  const send = async (event) => {
    event?.preventDefault();
    const said = text.trim();
    if (!isReady) return;
    kept.value = "";
    setIsSending(true);
    try {
      await onSend(chosen.ready.length ? partsOf(said, chosen.ready) : said);
      chosen.clear(chosen.files);
    } catch {
      kept.value = [said, kept.value].filter(Boolean).join("\n"); // before what was typed meanwhile
    }
    setIsSending(false);
  };
  const onKeyDown = (event) => event.key === "Enter" && !event.shiftKey && !event.isComposing && send(event);
  const take = (event, files) => {
    if (!files?.length) return;
    event.preventDefault();
    chosen.add(files);
  };
  return html`<form class="composer" onSubmit=${send} onDragOver=${(e) => e.preventDefault()}
    onDrop=${(e) => take(e, e.dataTransfer?.files)}>
    <${ChosenFiles} of=${chosen} />
    <input type="file" multiple class="hidden" tabindex="-1" aria-hidden="true" ref=${chooser}
      onChange=${(e) => (chosen.add([...e.target.files]), (e.target.value = ""))} />
    <${Button} disabled=${disabled} onClick=${() => chooser.current.click()}>Add files<//>
    <label class="grow">Message <textarea rows="2" value=${text} disabled=${disabled}
      placeholder="Enter sends, Shift+Enter begins a line"
      onInput=${(e) => (kept.value = e.target.value)} onKeyDown=${onKeyDown}
        onPaste=${(e) => take(e, e.clipboardData?.files)}></textarea></label>
    <button class="button primary" disabled=${!isReady}>Send</button>
    ${busy && html`<${Button} kind="danger" onClick=${onStop}>Stop<//>`}
  </form>`;
}
