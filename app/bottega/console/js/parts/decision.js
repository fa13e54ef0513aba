/** A form for what a person is asked: an approval, a question, or the result of a client's tool. */
import { useState } from "preact/hooks";

import { post, url } from "../api.js";
import { html } from "../html.js";
import { may } from "../person.js";
import { Button, Time, Value } from "./basics.js";

const TITLES = { approval: "Approve this call?", question: "A question for you", client_tool: "A call for your program" };

/** `interrupt`: as of `GET /v1/interrupts`; `onDone` is called after the server has taken the decision. */
export function Decision({ interrupt, onDone }) {
  const [busy, setBusy] = useState(false);
  const [error, setError] = useState(null);
  const [comment, setComment] = useState("");
  const [answer, setAnswer] = useState("");
  const [edited, setEdited] = useState(null);
  const id = `decision-${interrupt.id}`;

  const send = async (make) => {
    setBusy(true);
    setError(null);
    try {
      await post(url`/v1/interrupts/${interrupt.id}/resolve`, make());
      onDone?.();
    } catch (problem) {
      setError(problem instanceof SyntaxError ? `This is not JSON: ${problem.message}` : problem.message);
      setBusy(false); // else it stays so until the page learns that nobody waits
    }
  };
  const said = comment ? { comment } : {};
  const approve = () => send(() => ({ decision: "approve", ...(edited === null ? {} : { arguments: JSON.parse(edited) }), ...said }));
  const deny = () => send(() => ({ decision: "deny", ...said }));
  const isApproval = interrupt.kind === "approval";
  const mayDecide = may(isApproval || interrupt.who === "approve" ? "approve" : "run approve");
  const plain = !interrupt.schema || interrupt.schema.type === "string";
  const reply = () => send(() => ({ answer: plain ? answer : JSON.parse(answer) }));
  const result = () => send(() => ({ result: JSON.parse(answer) }));

  return html`<article class="decision" aria-labelledby=${id}>
    <h2 id=${id}>${interrupt.server ? `The MCP server ${interrupt.server} asks` : TITLES[interrupt.kind] ?? interrupt.kind}</h2>
    <p class="small soft">${interrupt.agent} · <code>${interrupt.tool}</code>
      ${interrupt.reason && html` · ${interrupt.reason}`}${interrupt.expires_at && html` · ends <${Time} at=${interrupt.expires_at} />`}</p>
    ${interrupt.question && html`<p class="question">${interrupt.question}</p>`}
    ${interrupt.kind !== "question" && (edited === null
      ? html`<${Value} value=${interrupt.arguments} />`
      : html`<label>Arguments <textarea rows="6" value=${edited} onInput=${(e) => setEdited(e.target.value)}></textarea></label>`)}
    ${!mayDecide && html`<p class="small soft">You may see this, but not decide it.</p>`}
    ${mayDecide && isApproval && html`
      <label>Comment <input value=${comment} maxlength="2000" onInput=${(e) => setComment(e.target.value)} /></label>
      <div class="actions">
        <${Button} kind="primary" busy=${busy} onClick=${approve}>Approve<//>
        <${Button} kind="danger" busy=${busy} onClick=${deny}>Deny<//>
        ${edited === null && html`<${Button} onClick=${() => setEdited(JSON.stringify(interrupt.arguments, null, 2))}>Edit arguments<//>`}
      </div>`}
    ${mayDecide && !isApproval && html`
      <form onSubmit=${(e) => (e.preventDefault(), interrupt.kind === "question" ? reply() : result())}>
        <label>${interrupt.kind === "question" ? "Answer" : "Result (JSON)"}
          <textarea rows="3" value=${answer} required onInput=${(e) => setAnswer(e.target.value)}></textarea></label>
        ${interrupt.schema && html`<details><summary>Form of the answer</summary><${Value} value=${interrupt.schema} /></details>`}
        <div class="actions"><${Button} type="submit" kind="primary" busy=${busy}>Send<//></div>
      </form>`}
    ${error && html`<p class="note bad" role="alert">${error}</p>`}
  </article>`;
}
