/** Patterns: what was learnt from many runs, and the evidence that it helps. */
import { useState } from "preact/hooks";

import { post, url, withQuery } from "../api.js";
import { percent } from "../figures/rates.js";
import { count, excerpt, plain } from "../format.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Empty, Figure, Figures, Link, Loaded, Panel, Time, Value } from "../parts/basics.js";
import { Act, Confirmed, Pages, Table } from "../parts/lists.js";
import { go } from "../router.js";

const STATES = ["CANDIDATE", "VALIDATED", "IN_REVIEW", "DEPRECATED"];
const TONES = { CANDIDATE: "wait", VALIDATED: "ok", IN_REVIEW: "bad", DEPRECATED: "quiet" };
const State = ({ value }) => html`<span class="status ${TONES[value] ?? "quiet"}">
  ${value.toLowerCase().replace("_", " ")}</span>`;

export function Patterns({ query }) {
  const path = withQuery("/v1/patterns", { order: "desc", state: query.state });
  const set = (state) => go(["memory", "patterns"], { ...query, state }, { replace: true });
  return html`<${Panel} title="Patterns" actions=${html`<label class="inline">State <select value=${query.state ?? ""}
    onChange=${(e) => set(e.target.value)}><option value="">any</option>${STATES.map((each) => html`<option>${each}
      </option>`)}</select></label>`}>
    <${Pages} key=${path} path=${path} what="patterns" isSaved everyMs=${10_000}>${(items) => items.length
      ? html`<${Table} label="Patterns" head=${["Pattern", "Kind", "State", "#Applied", "#Went well", "#Confidence",
        "Changed"]}>${items.map((each) => html`<tr key=${each.id}><td><${Link} path=${["memory", "patterns", each.id]}>
          ${each.name}<//> <span class="small soft">${excerpt(each.summary, 80)}</span></td>
        <td>${each.category.toLowerCase()}</td><td><${State} value=${each.lifecycle.state} /></td><td class="right">
          ${count(each.evidence.applications)}</td><td class="right">${percent(each.evidence.success_rate)}</td><td
            class="right">${each.evidence.confidence.toFixed(2)}</td><td><${Time} at=${each.updated_at} /></td></tr>`)}
              <//>`
      : html`<${Empty} title="No pattern is like that.">
        <p>Patterns are found in the episodes of many runs, mostly at night; see Reports.</p><//>`}<//><//>`;
}

export function Pattern({ id }) {
  const found = useData(url`/v1/patterns/${id}`);
  const evidence = useData(url`/v1/patterns/${id}/evidence`);
  const similar = useData(url`/v1/patterns/${id}/similar`);
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
    ${pattern.lifecycle.decision && html`<p>When its evidence was judged last: ${pattern.lifecycle.decision}. <span
      class="small soft">A pattern is validated once the chance p that it does not help is below the level; the level
      is lower at each look, so that many looks prove nothing by luck.</span></p>`}
    <${Figures}>
      <${Figure} name="Went well with it" value=${percent(pattern.evidence.success_rate)}
        note=${`of ${count(pattern.evidence.applications)} lately`} />
      <${Figure} name="Without it" value=${percent(pattern.evidence.baseline.rate)}
        note=${`${pattern.evidence.baseline.name.replaceAll("_", " ")}, ${count(pattern.evidence.baseline.n)} runs`} />
      <${Figure} name="Confidence" value=${pattern.evidence.confidence.toFixed(2)} />
      <${Figure} name="p-value" value=${pattern.evidence.p_value == null ? "–"
        : pattern.evidence.p_value.toPrecision(2)} />
      <${Figure} name="Uses" value=${count(pattern.lifecycle.uses)}
        note=${pattern.lifecycle.last_used && html`last <${Time} at=${pattern.lifecycle.last_used} />`} />
    <//>
    <${Panel} title="Evidence over time"><${Loaded} from=${evidence} what="the evidence">
      ${(history) => html`<${EvidenceTable} ...${history} />`}<//><//>
    <div class="columns">
      <${Panel} title="What it says"><div class="body"><pre class="text">${pattern.detail || pattern.description}</pre>
        <${Value} value=${pattern.content.fields} /></div><//>
      <${Panel} title="When it applies"><div class="body"><${Value} value=${pattern.applicability} /></div><//>
    </div>
    <${Panel} title="From these episodes"><${Sources} evidence=${pattern.evidence} /><//>
    <${Panel} title="Patterns like it"><${Loaded} from=${similar} what="patterns like it">${({ items }) => items.length
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

function EvidenceTable({ points, more }) {
  if (!points.length) return html`<${Empty} title="No application has been judged yet." />`;
  const rate = (good, n) => (n ? `${count(good)} of ${count(n)}` : "–");
  return html`<div class="body">
    <${Table} label="Evidence over time" head=${["When", "#Went well with it", "#Without it (control)", "#p-value"]}>
      ${points.map((each, i) =>
        html`<tr key=${i}><td><${Time} at=${each.at} /></td><td class="right">${rate(each.given_good, each.given)}</td>
          <td class="right">${rate(each.others_good, each.others)}</td>
          <td class="right">${each.p_value.toPrecision(2)}</td></tr>`)}<//>
    ${more && html`<p class="small soft">Older applications than the 500 counted are left out.</p>`}
  </div>`;
}
