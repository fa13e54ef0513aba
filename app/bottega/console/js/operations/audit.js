/** Who changed what: the audit log. */
import { excerpt, shortId } from "../format.js";
import { html } from "../html.js";
import { withQuery } from "../api.js";
import { Empty, Panel, Time } from "../parts/basics.js";
import { go } from "../router.js";
import { Pages, Table } from "../parts/lists.js";

export function Audit({ query }) {
  const set = (value) => go(["operations", "audit"], { ...query, action: value.trim() }, { replace: true });
  const path = withQuery("/v1/audit", { order: "desc", action: query.action });
  const target = (text) => (text.length === 36 ? shortId(text) : excerpt(text, 60));
  return html`<${Panel} title="Audit log"
    actions=${html`<label class="inline">Action <input value=${query.action ?? ""} placeholder="any, such as run.cancel"
      onChange=${(e) => set(e.target.value)} /></label>`}>
    <${Pages} key=${path} path=${path} what="the audit log" isSaved>${(entries) => entries.length
      ? html`<${Table} label="Audit log" head=${["When", "Who", "Action", "What", "Details"]}>
        ${entries.map((each) => html`<tr key=${each.id}><td><${Time} at=${each.at} /></td>
          <td class="mono small">${each.actor}</td><td>${each.action}</td>
          <td class="mono small" title=${each.target}>${target(each.target)}</td>
          <td class="small">${Object.keys(each.details).length
          ? excerpt(JSON.stringify(each.details), 120) : "–"}</td>
          </tr>`)}<//>`
      : html`<${Empty} title="Nothing is noted yet." />`}<//><//>`;
}
