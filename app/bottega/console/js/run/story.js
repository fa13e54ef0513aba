/** A run for its reader: what was asked, what was answered, and one sentence that says why it is so. */
import { useState } from "preact/hooks";

import { post, url, withQuery } from "../api.js";
import { DIAGNOSIS_PLACES, OUTCOME_WORDS, RETRY_HINTS } from "../en.js";
import { clock, count, plain, stopAfter } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Copy, Link, Panel, Time } from "../parts/basics.js";
import { useKeys, useReason } from "../parts/keys.js";
import { Markdown } from "../parts/markdown.js";
import { useWork } from "../parts/work.js";
import { may, me } from "../person.js";
import { alike, brokenVersion, diagnose, judgedOf } from "./diagnosis.js";
import { isFinal } from "./state.js";

const LOOKED_AT = 100;

/** The answer of a run: of a graph with several last nodes a text for each. */
export const textOf = (output) => (output === null || typeof output === "string" ? output
  : Object.entries(output).map(([node, text]) => `${node}:\n${text}`).join("\n\n"));

export const Question = ({ run }) => html`<${Panel} title="Question">
  <div class="body"><pre class="text story">${plain(run.input)}</pre></div><//>`;

/** `moves`: the run is not over, so there may be an answer later; `isPlayed`: it is shown as it was before its end. */
export const Answer = ({ run, answer, moves, isPlayed, onRated }) => html`<${Panel} title="Answer"
  actions=${answer && html`<${Copy} text=${answer} />`}>
  ${answer
    ? html`<div class="body"><${Markdown} text=${answer} kind="story" /></div>`
    : html`<p class="body soft">${moves || isPlayed ? "Not yet." : "There is none."}</p>`}
  ${!moves && may("run") && html`<div class="body"><${Rating} key=${run.id} run=${run} onRated=${onRated} /></div>`}
    <//>`;

/**
 * Good or bad, with a comment, and what a person said before. `run`: with its outcome; `onRated` gets the outcome once
 * the server has it. `byKey`: g and b rate, c comments.
 */
export function Rating({ run, onRated, byKey = false }) {
  const { value, source } = run.outcome;
  const [given, setGiven] = useState(null);
  const isRead = source === "feedback" && !given && may("read") && !me.value?.user;
  const before = useData(isRead ? url`/v1/runs/${run.id}/feedback` : null);
  const said = given ?? before.data;
  const [typed, setTyped] = useState(null);
  const comment = typed ?? said?.comment ?? "";
  const { busy, error, work } = useWork();
  const isBusy = busy !== "" || before.loading;
  const rated = source === "feedback" && value;
  const rate = (outcome) => work(async () => {
    setGiven(await post(url`/v1/runs/${run.id}/feedback`, { outcome, comment: comment.trim() || null }));
    setTyped(null);
    reason.leave();
    await onRated?.(outcome);
  });
  const reason = useReason(() => isBusy || rate("FAILURE"));
  useKeys(byKey && !isBusy ? { g: () => rate("SUCCESS"), b: reason.ask, c: reason.note } : {});
  const choice = (outcome, name, act) => html`<${Button} busy=${isBusy} aria-pressed=${rated === outcome}
    kind=${rated === outcome ? "primary" : ""} onClick=${act}>${name}<//>`;
  return html`<div class="filters rating" role="group" aria-label="Rate it">
    ${choice("SUCCESS", "Good", () => rate("SUCCESS"))} ${choice("FAILURE", reason.isAsked ? "Bad: send" : "Bad",
      reason.isAsked || typed?.trim() ? () => rate("FAILURE") : reason.ask)}
    <label class="grow">Comment <input ref=${reason.field} value=${comment} maxlength="2000" readonly=${isBusy}
      onKeyDown=${reason.onKeyDown} placeholder="why; it is sent with the choice"
      onInput=${(e) => setTyped(e.target.value)} /></label>
    ${reason.isAsked && html`<p class="small soft">Say why, if you like: <kbd>Enter</kbd> rates it
      bad, <kbd>Escape</kbd> goes back.</p>`}
    ${rated && html`<p class="small soft">${said && html`Rated ${OUTCOME_WORDS[said.outcome]} by ${said.by}
      ${" "}<${Time} at=${said.at} />${said.comment && html`: <q class="text">${said.comment}</q>`}${
      stopAfter(said.comment ?? "")} `}Another rating
      replaces this one and its comment.</p>`}
    ${error && html`<p class="bad-text small" role="alert">${error.message}</p>`}</div>`;
}

/** The sentence, what else happened alike, and where to look next. */
export function Diagnosis({ run, state, now }) {
  const { text, place, trouble } = diagnose(state, now);
  const failed = ["failed", "timeout"].includes(run.status) && isFinal(state.status) ? run.status : null;
  const others = useData(failed && withQuery("/v1/runs", { status: failed, order: "desc", limit: LOOKED_AT }));
  const same = failed && run.agent && may("read") ? run.agent : null;
  const ofAgent = useData(same && withQuery("/v1/runs", { agent: same, order: "desc", limit: LOOKED_AT }));
  const versions = useData(same && url`/v1/agents/${same}/versions?order=desc&limit=1`);
  const like = alike(run, others.data?.items ?? []);
  const since = like.map((each) => each.ended_at).sort()[0];
  const version = versions.data?.items[0];
  const broken = version && ofAgent.data ? brokenVersion(run, ofAgent.data.items, version) : "";
  const isSaid = isFinal(state.status); // before that it has a time, which changes all the while
  return html`<div class=${`note diagnosis ${failed ? "bad" : ""}`}>
    <p role="status" aria-live=${isSaid ? "polite" : "off"}><strong>${text}</strong>${trouble && html` <strong
      class="bad-text">But ${trouble}</strong>`}</p>
    ${state.error && html`<details class="small"><summary>As reported: <code>${state.error.code}</code></summary>
      <p>${state.error.message}</p></details>`}
    ${run.outcome.source && html`<p>It ${judgedOf(run)}</p>`}
    ${like.length > 0 && html`<p>${count(like.length)} other ${like.length === 1 ? "run" : "runs"} failed alike
      since ${clock(since)}. <${Link} path=${["runs"]} query=${{ status: failed,
        error_code: run.error?.code }}>Show them<//></p>`}
    ${broken && html`<p>${broken}
      ${" "}<${Link} path=${["agents", run.agent]} query=${{ tab: "versions" }}>What changed<//></p>`}
    ${failed && may("run") && RETRY_HINTS[state.error?.code]
      && html`<p class="small">${RETRY_HINTS[state.error.code]}</p>`}
    ${place && may("read") && html`<p><${Link} path=${["operations", place]}>${DIAGNOSIS_PLACES[place]}<//></p>`}
  </div>`;
}
