/** All that an agent was told, called and answered, in two runs: prompts, arguments and results line by line. */
import { useState } from "preact/hooks";

import { get, url, withQuery } from "../api.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Empty, Loaded } from "../parts/basics.js";
import { rowsOfTexts } from "./rows.js";
import { Sides } from "./sides.js";
import { linesOf } from "./talk_lines.js";

/** Beside the answers of models, a run's end and its waits come, whatever was asked for. */
const LATEST = { types: "llm.completed", order: "desc", limit: 20 };

/** The prompt of the last model call of an agent, and its answer, as lines; "": it made no call. */
async function readTalk(id, agent) {
  const { items } = await get(withQuery(url`/v1/runs/${id}/events`, { agents: agent, ...LATEST }));
  const last = items.find(({ type }) => type === "llm.completed");
  if (!last) return "";
  const about = { task_id: last.task_id, call: last.data.call };
  const prompt = await get(withQuery(url`/v1/runs/${id}/prompt`, about));
  return linesOf([...prompt.messages, { role: "assistant", origin: "model", ...last.data.message }]);
}

/** `before` and `after`: ids of the runs. It is read once it is opened; `isOpen`: at first. */
export function Talk({ agent, before, after, isOpen: opens }) {
  const [isOpen, setOpen] = useState(opens);
  const found = useData(isOpen ? `${before} ${after} ${agent}` : null, {
    from: () => Promise.all([before, after].map((id) => readTalk(id, agent))) });
  return html`<details class="talk" open=${isOpen} onToggle=${(e) => setOpen(e.currentTarget.open)}>
    <summary>Prompts, tool calls and arguments of ${agent}</summary>
    ${isOpen && html`<${Loaded} from=${found} what="what was said">${([old, now]) => old || now
      ? html`${old === now && html`<p class="small soft">The same in both.</p>`}<${Sides} rows=${rowsOfTexts(old, now)}
        label=${`What ${agent} was told, called and said`} />`
      : html`<${Empty} title="It called no model in either run." />`}<//>`}</details>`;
}
