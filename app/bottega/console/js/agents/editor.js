/** An agent while it is edited: its form, which keeps what is not stored when the page is left. */
import { useEffect, useState } from "preact/hooks";

import { call, get, url } from "../api.js";
import { html } from "../html.js";
import { Button, Failure, Panel } from "../parts/basics.js";
import { Diff } from "../parts/diff.js";
import { instead, useWork } from "../parts/work.js";
import { keep, unsaved } from "../unsaved.js";
import { DraftChat, TrialForm } from "./draft_chat.js";
import { AgentForm } from "./form.js";
import { asText, contentOf, withNote } from "./schema.js";

/**
 * The edited state of an agent, which is the same on all pages. `stored`: the agent when the page was opened; a later
 * version that somebody else stores is not taken unasked. `begin(old, now)` begins to edit a version, or null: the
 * present one; `form`: what `Editor` needs.
 */
export function useEdited(stored, known) {
  const place = `agents/${stored.name}`;
  const left = unsaved(place); // when the page was left
  const [agent, setAgent] = useState(left?.agent ?? stored);
  const [base, setBase] = useState(left?.base ?? null);
  const [turn, setTurn] = useState(0); // counts what the form began with
  const path = url`/v1/agents/${agent.name}`;
  const schema = known?.schemas.AgentContent;
  const put = (content) => call("PUT", path, content, { headers: { "If-Match": `"${agent.version}"` } });
  const save = async (content, draft) => {
    const now = await put(content);
    if (unsaved(place)?.draft === draft) keep(place, null); // also if the page was left
    setBase(null);
    setAgent(now);
    return contentOf(now, schema);
  };
  const begin = (old, now) => {
    keep(place, null);
    setBase(old);
    setAgent(now);
    setTurn(turn + 1);
  };
  const form = known && { key: turn, known, name: agent.name, content: contentOf(base ?? agent, schema), save,
    again: async () => begin(null, await get(path)), isChanged: base !== null, stored: agent, left: left?.draft,
    onDraft: (draft) => keep(place, draft && { agent, base, draft }) };
  return { agent, base, path, put, begin, form };
}

/**
 * `left`: the draft when the page was left; `onDraft` gets each draft, or null if it is what is stored. `stored`: the
 * agent that a draft is compared with. `isAlone`: on a page of its own, where the draft can be tried.
 */
export function Editor({ known, name, content, label, save, again, stored, isChanged = false, left, onDraft,
  isAlone = true, children }) {
  const [draft, setDraft] = useState(left ?? content);
  const [note, setNote] = useState("");
  const { busy, error, work, setError } = useWork();
  const [problems, setProblems] = useState([]);
  const [turn, setTurn] = useState(0); // counts how often all was undone
  const [asked, setAsked] = useState(null);
  const [tried, setTried] = useState(null); // a tool, for which arguments are typed
  const [isWrong, setIsWrong] = useState(false); // a field has a text that is no JSON yet
  const touched = isChanged || isWrong || JSON.stringify(draft) !== JSON.stringify(content);
  useEffect(() => onDraft(touched ? draft : null));
  useEffect(() => setProblems(error?.problem?.errors ?? []), [error]);
  const submit = instead(() => work(async () => {
    const now = await save(withNote(draft, note), draft);
    setNote("");
    if (now) setDraft((other) => (other === draft ? now : other)); // what was typed meanwhile stays
  }));
  const undo = () => {
    setDraft(content);
    setError(null);
    setIsWrong(false);
    setTurn(turn + 1);
  };
  return html`<div class=${isAlone ? "build" : "stacked"}><form onSubmit=${submit} aria-label=${`Agent ${name}`}
    onInput=${(e) => setIsWrong([...e.currentTarget.elements].some((each) => each.validity.customError))}
      class="stacked"><${Panel}>${children}
      <${AgentForm} known=${{ ...known, problems, onTry: setTried }} draft=${draft}
        turn=${turn} onChange=${setDraft} />
    <//>
    ${error && html`<${Failure} error=${error} />`}
    ${error?.status === 412 && html`<p class="note bad">Somebody stored another version meanwhile. <${Button}
      kind="small" onClick=${() => again().catch(setError)}>Show theirs, and drop this change<//></p>`}
    ${stored && touched && html`<details class="panel"><summary>What differs from version ${stored.version}</summary>
      <${Diff} before=${asText(contentOf(stored, known.schemas.AgentContent))} after=${asText(draft)} /></details>`}
    <div class="composer"><${Button} needs="define" type="submit" kind="primary" busy=${busy} disabled=${!touched}>
      ${label}<//>${touched && html`<${Button} onClick=${undo}>Undo all<//>
      <label class="grow">Note on this version <input value=${note} maxlength="500"
        onInput=${(e) => setNote(e.target.value)} /></label>`}</div></form>
    ${isAlone && html`<div class="stacked">${tried && html`<${TrialForm} key=${JSON.stringify(tried)}
        definition=${tried} parameters=${tried.parameters} onAsk=${setAsked} onCancel=${() => setTried(null)} />`}
      <${DraftChat} name=${name} draft=${draft} asked=${asked} onProblems=${setProblems} /></div>`}</div>`;
}
