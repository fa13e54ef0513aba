/** A conversation with the agent in the form, before the agent is stored. */
import { useEffect, useRef, useState } from "preact/hooks";

import { url } from "../api.js";
import { GivenFields } from "../forms/typed.js";
import { begun } from "../forms/shape.js";
import { excerpt } from "../format.js";
import { html } from "../html.js";
import { Button, Failure, Link, Panel, Select, Status } from "../parts/basics.js";
import { Decision } from "../parts/decision.js";
import { Author } from "../parts/readable.js";
import { instead, useWork } from "../parts/work.js";
import { useRunState } from "../run/use_run.js";
import { info } from "../setup/model.js";
import { trialOf } from "./schema.js";

const MODELS = { demo: "Demo model: tools are not called", real: "Its own model: tools are called" };

/**
 * `draft`: the agent's content; `name`: the agent's name; `asked`: `{definition, input, model}` that the page sends by
 * itself, a new object each time; `onProblems` gets the errors of the draft, as `[{pointer, detail}]`.
 */
export function DraftChat({ name, draft, asked, onProblems }) {
  const [turns, setTurns] = useState([]);
  const [chosen, setChosen] = useState(null);
  const model = chosen ?? (info.value && !info.value.demo_model ? "real" : "demo");
  const [text, setText] = useState("");
  const [open, setOpen] = useState(null);
  const { busy, error, work, postOnce } = useWork();
  const [state] = useRunState(open, (ended) => {
    const answer = { role: "assistant", content: outputOf(ended), run: open, error: ended.error,
      calls: callsOf(ended) };
    setTurns((old) => [...old, answer]);
    setOpen(null);
  });
  const send = (body, said) => work(async () => {
    onProblems([]);
    const run = await postOnce(url`/v1/agents/${name || "draft"}/draft-runs`, body);
    setTurns((old) => [...old, { role: "user", content: said }]);
    setText("");
    setOpen(run.id);
  });
  useEffect(() => void (error && onProblems((error.problem?.errors ?? []).map((each) => ({ ...each,
    pointer: each.pointer?.replace(/^\/definition/, "") })))), [error]);
  const ask = instead(() => {
    const before = turns.filter((each) => each.content).map(({ role, content }) => ({ role, content }));
    send({ definition: draft, input: [...before, { role: "user", content: text }], model }, text);
  });
  useEffect(() => void (asked && send(asked, asked.input)), [asked]);
  const root = state.tasks.values().next().value;
  const pending = [...state.interrupts.values()].filter((each) => each.status === "pending");
  const box = useRef(null);
  useEffect(() => void (box.current.scrollTop = box.current.scrollHeight), [turns.length, root?.live?.text, open]);
  return html`<${Panel} title="Try the draft" kind="draft-chat" needs="define" actions=${turns.length > 0 && !open
    && html`<${Button} kind="small" onClick=${() => setTurns([])}>Start over<//>`}>
    <div class="draft-log" role="log" aria-label="Draft conversation" tabindex="0" ref=${box}>
      ${!turns.length && !open && html`<p class="small soft">Ask the agent as it stands in the form, before it
        is saved. With its own model, its tools act for real.</p>`}
      ${turns.map((each, at) => html`<${Turn} key=${at} of=${each} agent=${name || "The draft"} />`)}
      ${open && html`<div class="said assistant" aria-busy="true"><${Author} role="assistant" agent=${name
        || "The draft"} /><${Calls} calls=${callsOf(state)} />
        <pre class="text">${root?.live?.text || ""}</pre>
        <p class="small soft"><${Status} value=${state.status ?? "queued"} /></p></div>`}
      ${pending.map((each) => html`<${Decision} key=${each.id} interrupt=${each} />`)}
    </div>
    ${error && html`<${Failure} error=${error} />`}
    <form class="form body" onSubmit=${ask}>
      <${Select} label="Answered by" value=${model} options=${Object.entries(MODELS)} onChange=${setChosen} />
      <label>Question <textarea rows="2" value=${text} onInput=${(e) => setText(e.target.value)}></textarea></label>
      <div class="actions"><${Button} type="submit" kind="primary" busy=${busy || open !== null}
        disabled=${!text.trim()}>Ask<//></div></form><//>`;
}

/** The arguments that a person types to try a tool. `parameters`: the tool's schema, if the schema is known. */
export function TrialForm({ definition, parameters, onAsk, onCancel = null }) {
  const [values, setValues] = useState(parameters?.properties ? begun(parameters, parameters.$defs ?? {}) : {});
  return html`<${Panel} title=${`Try ${definition.name ?? definition.server}`}><form class="form body"
    onSubmit=${instead(() => onAsk(trialOf(definition, values)))}>
    <${GivenFields} schema=${parameters} value=${values} onChange=${(next) => setValues(next ?? {})} />
    <p class="small soft">Your default model is asked to call it with these arguments. The call is a real one; nothing
      is stored but its run.</p>
    <div class="actions"><${Button} type="submit" kind="primary">Call it<//>
      ${onCancel && html`<${Button} onClick=${onCancel}>Close<//>`}</div></form><//>`;
}

const outputOf = (state) => (typeof state.output === "string" ? state.output
  : state.tasks.values().next().value?.output ?? "");
const callsOf = (state) => [...state.tasks.values()].flatMap((task) =>
  task.tools.map(({ name, arguments: args, status }) => ({ name, args, isBroken: status === "failed" })));

const Calls = ({ calls }) => calls.map(({ name, args, isBroken }) => html`<p
  class=${`small ${isBroken ? "bad-text" : "soft"}`}>${isBroken && "✕ "}calls <code>${name}</code>${args
  && html` <code>${excerpt(JSON.stringify(args), 120)}</code>`}${isBroken && " which did not work"}</p>`);

const Turn = ({ of: { role, content, run, error, calls = [] }, agent }) => html`<div class="said ${role}">
  <${Author} role=${role} user="You" agent=${agent} />
  <${Calls} calls=${calls} />
  ${content && html`<pre class="text">${content}</pre>`}
  ${error && html`<p class="note bad" role="alert">${error.message}</p>`}
  ${run && html`<p class="small soft"><${Link} path=${["runs", run]}>the whole run<//></p>`}</div>`;
