/** The form of an agent. When the user leaves the page, the form keeps changes that are not stored. */
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
 * The edited state of an agent, the same on all pages. `stored`: the agent when the page was opened. If somebody else
 * stores a later version, the form keeps its version. `begin(old, now)` begins to edit a version; null: the current
 * version. `form`: the properties of `Editor`.
 */
export function useEdited(stored, known) {
  const place = `agents/${stored.name}`;
  const left = unsaved(place); // the draft when the user left the page
  const [agent, setAgent] = useState(left?.agent ?? stored);
  const [base, setBase] = useState(left?.base ?? null);
  const [turn, setTurn] = useState(0); // number of the version with which the form began
  const path = url`/v1/agents/${agent.name}`;
  const schema = known?.schemas.AgentContent;
  const put = (content) => call("PUT", path, content, { headers: { "If-Match": `"${agent.version}"` } });
  const save = async (content, draft) => {
    const now = await put(content);
    if (unsaved(place)?.draft === draft) keep(place, null); // also if the user has left the page
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
 * `left`: the draft when the user left the page; `onDraft` gets each draft; null: no changes. `stored`: the stored
 * agent. `isAlone`: true on the agent's own page, where the user can try the draft.
 */
export function Editor({ known, name, content, label, save, again, stored, isChanged = false, left, onDraft,
  isAlone = true, children }) {
  const [draft, setDraft] = useState(left ?? content);
  const [note, setNote] = useState("");
  const { busy, error, work, setError } = useWork();
  const [problems, setProblems] = useState([]);
  const [turn, setTurn] = useState(0); // counts how often the user dropped all changes
  const [asked, setAsked] = useState(null);
  const [tried, setTried] = useState(null); // the tool for which the user types arguments
  const [isWrong, setIsWrong] = useState(false); // the text in a field is not valid JSON yet
  const touched = isChanged || isWrong || JSON.stringify(draft) !== JSON.stringify(content);
  useEffect(() => onDraft(touched ? draft : null));
  useEffect(() => setProblems(error?.problem?.errors ?? []), [error]);
  const submit = instead(() => work(async () => {
    const now = await save(withNote(draft, note), draft);
    setNote("");
    if (now) setDraft((other) => (other === draft ? now : other)); // keeps what the user typed meanwhile
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
