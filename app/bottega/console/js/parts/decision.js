/** A form in which a person decides: an approval, a question, or the result of a client tool. */
import { useEffect, useRef, useState } from "preact/hooks";

import { post, url } from "../api.js";
import { ASKED } from "../en.js";
import { excerpt } from "../format.js";
import { GivenFields } from "../forms/typed.js";
import { html } from "../html.js";
import { may, me } from "../person.js";
import { Button, Link, Time, Value } from "./basics.js";
import { largeArguments } from "./approval_facts.js";
import { Dialog } from "./dialog.js";
import { useKeys, useReason } from "./keys.js";
import { Readable } from "./readable.js";
import { useWork } from "./work.js";

/** Time until keyboard shortcuts work, so that a key for the previous item has no effect. */
const SETTLED_MS = 400;

/** Arguments by name, with marks on arguments that have facts, and the facts about the whole call. */
function Arguments({ of, facts }) {
  const about = (name) => facts.filter((each) => each.name === name);
  return html`<${Readable} value=${of} isMarked=${(name) => about(name).length > 0}
    about=${(name) => about(name).map((each) => html`<${Fact} of=${each} />`)} />
  ${about(null).map((each) => html`<p class="flagged"><${Fact} of=${each} /></p>`)}`;
}

const Fact = ({ of: { text, run, isGrave } }) => html`<span class="about"><strong
  class=${isGrave ? "fact grave" : "fact"}>${text}</strong>
  ${run && html` <${Link} class="small" path=${["runs", run]}>the other run<//>`}</span>`;

/**
 * `interrupt`: as of `GET /v1/interrupts`; `onDone` is called after the server stored the decision. `facts`: result
 * of `factsOf`; null: not known yet, so nobody can approve. `asking`: the user's last text. `byKey`: the keys
 * a, d, e and c approve, deny, edit and comment. `isThere`: the call still waits; false: somebody else decided, or the
 * time is over. `user`: the user of the call's run.
 */
export function Decision({ interrupt, user = interrupt.user, onDone, facts = [], asking = "", byKey = false,
  isThere = true }) {
  const { busy: sending, error, work } = useWork();
  const [isSent, setSent] = useState(false); // the form stays busy until the page knows that the call no longer waits
  const busy = isSent || sending !== "";
  const [comment, setComment] = useState("");
  const [answer, setAnswer] = useState("");
  const [edited, setEdited] = useState(null);
  const [doubts, setDoubts] = useState([]); // facts that the person must confirm once more
  const id = `decision-${interrupt.id}`;
  const box = useRef(null);
  const enter = () => box.current?.querySelector("input, textarea, select")?.focus();
  useEffect(enter, [edited === null]);

  const send = (make) => work(async () => {
    await post(url`/v1/interrupts/${interrupt.id}/resolve`, make());
    setSent(true);
    onDone?.();
  });
  const said = comment ? { comment } : {};
  const given = edited ?? interrupt.arguments;
  const approveNow = () => {
    setDoubts([]);
    return send(() => ({ decision: "approve", ...(edited && { arguments: edited }), ...said }));
  };
  const grave = edited === null ? (facts ?? []).filter(({ isGrave }) => isGrave) : [];
  const approve = () => {
    if (box.current?.querySelector(":invalid")?.reportValidity() === false) return;
    const found = [...largeArguments(interrupt, given).map(({ name, value, limit }) =>
      `${name} ${value} is above ${limit}`), ...grave.map(({ text }) => text)];
    if (found.length) setDoubts(found);
    else approveNow();
  };
  const deny = () => send(() => ({ decision: "deny", ...said }));
  const reason = useReason(() => busy || deny());
  const edit = () => {
    if (edited === null) setEdited(interrupt.arguments);
    else enter(); // keeps the typed text
  };
  const isApproval = interrupt.kind === "approval";
  const isOthers = interrupt.who === "user" && (!me.value?.user || me.value.user !== user);
  const mayDecide = !isOthers && may(isApproval || interrupt.who === "approve" ? "approve" : "run approve");
  const isOpen = isThere || busy; // a decision that this form sends is not somebody else's decision
  const [isSettled, setSettled] = useState(false);
  useEffect(() => {
    if (!byKey || facts === null) return undefined;
    const timer = setTimeout(() => setSettled(true), SETTLED_MS);
    return () => clearTimeout(timer);
  }, [byKey, facts === null]);
  const heedsKeys = byKey && facts !== null && isSettled && isThere && isApproval && mayDecide;
  const keyed = (key) => (heedsKeys ? { "aria-keyshortcuts": key } : {});
  useKeys(heedsKeys && !busy ? { a: approve, d: reason.ask, e: edit, c: reason.note } : {});
  const plain = !interrupt.schema || interrupt.schema.type === "string";
  const reply = () => send(() => ({ answer: plain ? answer : JSON.parse(answer) }));
  const result = () => send(() => ({ result: JSON.parse(answer) }));
  const title = interrupt.server ? `The MCP server ${interrupt.server} asks` : ASKED[interrupt.kind] ?? interrupt.kind;

  return html`<article class="decision" aria-labelledby=${id}>
    <h2 id=${id}>${title}</h2>
    <p class="small soft">${interrupt.agent} · <code>${interrupt.tool}</code>
      ${interrupt.reason && html` · ${interrupt.reason}`}
      ${interrupt.expires_at && html` · ends <${Time} at=${interrupt.expires_at} />`}</p>
    ${interrupt.question && html`<p class="question">${interrupt.question}</p>`}
    ${interrupt.kind !== "question" && (edited === null
      ? html`<${Arguments} of=${interrupt.arguments} facts=${facts ?? []} />`
      : html`<div class="form" role="group" aria-label="Other arguments" ref=${box}><${GivenFields}
          schema=${interrupt.schema} value=${edited} onChange=${setEdited} /></div>`)}
    ${!mayDecide && html`<p class="small soft">${isOthers ? "Only the run's user may answer this."
      : "You may see this, but not decide it."}</p>`}
    ${!isOpen && html`<p class="note" role="status">This was decided elsewhere, or its time is over.</p>`}
    ${isOpen && mayDecide && isApproval && html`
      <label>Comment <input ref=${reason.field} value=${comment} maxlength="2000" readonly=${busy}
        onKeyDown=${reason.onKeyDown} onInput=${(e) => setComment(e.target.value)} /></label>
      <p class="small soft" role="status">${facts === null && "Approve waits until what was said is checked."}
        ${reason.isAsked && html`Say why, if you like: <kbd>Enter</kbd> denies the call, <kbd>Escape</kbd> goes back.`}
        ${reason.isKept && (comment ? "The comment goes with your decision." : "No comment.")}</p>
      <div class="actions">
        <${Button} kind="primary" busy=${busy || facts === null} ...${keyed("a")} onClick=${approve}>Approve<//>
        <${Button} kind="danger" busy=${busy} ...${keyed("d")} 
          onClick=${reason.isAsked ? deny : reason.ask}>${reason.isAsked ? "Deny now" : "Deny"}<//>
        ${edited === null ? html`<${Button} ...${keyed("e")} onClick=${edit}>Edit arguments<//>`
          : html`<${Button} onClick=${() => setEdited(null)}>Cancel the changes<//>`}
      </div>`}
    ${isOpen && mayDecide && !isApproval && html`
      <form onSubmit=${(e) => (e.preventDefault(), interrupt.kind === "question" ? reply() : result())}>
        <label>${interrupt.kind === "question" ? "Answer" : "Result (JSON)"}
          <textarea rows="3" value=${answer} required onInput=${(e) => setAnswer(e.target.value)}></textarea></label>
        ${interrupt.schema && html`<details><summary>Form of the answer</summary>
          <${Value} value=${interrupt.schema} /></details>`}
        <div class="actions"><${Button} type="submit" kind="primary" busy=${busy}>Send<//></div>
      </form>`}
    ${error && html`<p class="note bad" role="alert">
      ${error instanceof SyntaxError && "This is not JSON: "}${error.message}</p>`}
    ${doubts.length > 0 && html`<${Dialog} onClose=${() => setDoubts([])}
      title=${`Approve it although ${doubts.length > 1 ? `there are ${doubts.length} warnings` : doubts[0]}?`}>
      <p>${interrupt.tool}${interrupt.user ?? user ? ` for ${interrupt.user ?? user}` : ""}:</p>
      <${Readable} value=${given} />
      ${asking && html`<p class="small soft">The user wrote:</p><pre class="text">${excerpt(asking, 300)}</pre>`}
      ${doubts.length > 1 && html`<ul>${doubts.map((each) => html`<li><strong>${each}</strong></li>`)}</ul>`}
      <p class="small soft">Once you approve it, ${interrupt.agent} calls ${interrupt.tool} at once. That cannot be
        taken back.</p>
      <div class="actions"><${Button} kind="primary" onClick=${approveNow}>Approve it<//>
        <${Button} autofocus onClick=${() => setDoubts([])}>Back<//></div><//>`}
  </article>`;
}
