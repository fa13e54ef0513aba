/** Patterns: what was learnt from many runs, and the evidence that it helps. */
import { useState } from "preact/hooks";

import { post, url, withQuery } from "../api.js";
import { differenceCells, differenceOf, percent, rateOf } from "../figures/rates.js";
import { count, excerpt, plain } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Empty, Link, Loaded, Panel, Read, Time, Value } from "../parts/basics.js";
import { Act, Confirmed, filtersOf, Pages, Rows } from "../parts/lists.js";

const TONES = { CANDIDATE: "wait", VALIDATED: "ok", IN_REVIEW: "bad", DEPRECATED: "quiet" };
const stateOf = (value) => ({ CANDIDATE: "on trial" }[value] ?? value.toLowerCase().replace("_", " "));
const State = ({ value }) => html`<span class="status ${TONES[value] ?? "quiet"}">${stateOf(value)}</span>`;

export function Patterns({ query }) {
  const path = withQuery("/v1/patterns", { order: "desc", state: query.state });
  const { choice } = filtersOf(["memory", "patterns"], query);
  return html`<${Panel} title="Patterns" actions=${choice("state", "State",
    Object.keys(TONES).map((each) => [each, stateOf(each)]), { kind: "inline" })}>
    <${Pages} key=${path} path=${path} what="patterns" isSaved everyMs=${10_000}>${(items) => html`<${Rows}
      label="Patterns" items=${items} empty="No pattern is like that."
      hint=${html`<p>Patterns are found in the episodes of many runs, mostly at night; see Reports.</p>`}
      head=${["Pattern", "Kind", "State", "#Applied", "#Good with it", "#Confidence", "Changed"]} cells=${(each) => [
        html`<${Link} path=${["memory", "patterns", each.id]}>${each.name}<//> <span class="small soft">${
          excerpt(each.summary, 80)}</span>`, each.category.toLowerCase(), html`<${State}
          value=${each.lifecycle.state} />`, count(each.evidence.applications), percent(each.evidence.success_rate),
        each.evidence.confidence.toFixed(2), html`<${Time} at=${each.updated_at} />`]} />`}<//><//>`;
}

export function Pattern({ id }) {
  const found = useData(url`/v1/patterns/${id}`);
  const evidence = useData(url`/v1/patterns/${id}/evidence`);
  const [told, setTold] = useState(null);
  const validate = async () => {
    const said = await post(url`/v1/patterns/${id}/validate`);
    setTold(`${said.verdict.toLowerCase().replaceAll("_", " ")}${said.decision ? `: ${said.decision}` : ""}`);
    found.reload();
    evidence.reload();
  };
  return html`<${Loaded} from=${found} what="the pattern">${(pattern) => html`
    <div class="head"><div><h2>${pattern.name}</h2><p class="small soft"><${State} value=${pattern.lifecycle.state}
      /> ${pattern.category.toLowerCase()}, version ${pattern.version}, changed <${Time} at=${pattern.updated_at} />
        ${pattern.lifecycle.reason && ` · ${pattern.lifecycle.reason}`}</p></div>
      <div class="actions"><${Act} needs="run" label="Judge it now" act=${validate} />
        ${pattern.lifecycle.state !== "DEPRECATED" && html`<${Confirmed} needs="run" label="Deprecate"
          question="Runs no longer get it." act=${async () => (await post(url`/v1/patterns/${id}/deprecate`,
            { reason: "deprecated in the console" }), found.reload())} />`}</div></div>
    ${told && html`<p class="note" role="status">${told}</p>`}
    <p>${pattern.summary}</p>
    <p class="small soft">${count(pattern.lifecycle.uses)} runs got it${pattern.lifecycle.last_used && html`, the
      last <${Time} at=${pattern.lifecycle.last_used} />`}. Its confidence is${" "}
      ${pattern.evidence.confidence.toFixed(2)} of 1.</p>
    <${Panel} title="Did it help?"><${Loaded} from=${evidence} what="the evidence">${({ points }) => html`<${Stages}
      points=${points} />`}<//><${Decision} text=${pattern.lifecycle.decision} /><//>
    <${Panel} title="Evidence over time"><${Loaded} from=${evidence} what="the evidence">
      ${(history) => html`<${EvidenceTable} ...${history} />`}<//><//>
    <div class="columns">
      <${Panel} title="What it says"><div class="body"><pre class="text">${pattern.detail || pattern.description}</pre>
        <${Value} value=${pattern.content.fields} /></div><//>
      <${Panel} title="When it applies"><div class="body"><${Value} value=${pattern.applicability} /></div><//>
    </div>
    <${Panel} title="From these episodes"><${Sources} evidence=${pattern.evidence} /><//>
    <${Panel} title="Patterns like it"><${Read} path=${url`/v1/patterns/${id}/similar`} what="patterns like it">
      ${({ items }) => items.length
      ? html`<ul class="rows">${items.map((each) => html`<li key=${each.pattern.id}><${Link}
        path=${["memory", "patterns", each.pattern.id]}>${each.pattern.name}<//> <${State}
          value=${each.pattern.lifecycle.state} /> <span class="small soft">${percent(each.likeness)} alike</span>
            </li>`)}</ul>`
      : html`<${Empty} title="There is none." />`}<//><//>`}<//>`;
}

function Sources({ evidence }) {
  const lists = [["It was found in", evidence.mined_from], ["Went well with it", evidence.supporting],
    ["Went badly with it", evidence.contrary]].filter(([, ids]) => ids.length);
  if (!lists.length) return html`<${Empty} title="None is recorded." />`;
  return html`<div class="body">${lists.map(([title, ids]) => html`<p><strong>
    ${title}:</strong> ${ids.slice(0, 20).map((id) => html`<${Link} path=${["memory", "episodes", id]}
      class="mono small">${plain(id).slice(0, 8)}…<//> `)}</p>`)}</div>`;
}

const STAGES = { trial: "on trial", validated: "validated", reported: "told by a client" };
const sidesOf = (point) => [{ good: point.given_good, runs: point.given },
  { good: point.others_good, runs: point.others }];

/** What came of the pattern in each of its states, with it and without. */
function Stages({ points }) {
  const last = Object.keys(STAGES).flatMap((stage) => points.findLast((each) => each.stage === stage) ?? []);
  return last.length > 0 && html`<${Rows} label="Evidence by state" items=${last} id=${({ stage }) => stage}
    head=${["Runs while it was", "#Good with it", "#Good without it", "#Difference", "#95 % certainty", "Did it help?"]}
    cells=${(point) => [STAGES[point.stage], ...sidesOf(point).map(rateOf),
      ...differenceCells(differenceOf(...sidesOf(point)))]} />`;
}

/** The last decision, with what its p means: a validated pattern is tested for harm, one on trial for help. */
const Decision = ({ text }) => text && html`<p class="body">The last decision: ${text}. <span class="small soft">${
  /(stays validated|goes into review)$/.test(text) ? `A validated pattern is tested for harm: p is the chance of a
    result at least as bad if it does no harm, so a p near 1 speaks for it; below the level it goes into review.`
    : `A pattern on trial is tested for help: p is the chance of a result at least as good if it does not help; below
    the level it is validated.`}
  ${" "}The runs are those of this series of looks, after 8, 16, 32 and 64; each look has its level, so that many looks
  prove nothing by luck.</span></p>`;

const EvidenceTable = ({ points, more }) => html`<${Rows} label="Evidence over time" items=${points}
    empty="No application has been judged yet." id=${(each) => `${each.at} ${each.stage}`}
    head=${["When", "While it was", "#Good with it", "#Good without it"]}
    cells=${(each) => [html`<${Time} at=${each.at} />`, STAGES[each.stage], ...sidesOf(each).map(rateOf)]} />
  ${more && html`<p class="small soft body">Older applications than the 500 counted are left out.</p>`}`;
