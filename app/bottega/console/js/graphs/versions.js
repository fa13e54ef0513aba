/** The versions of a graph, newest first: what each changed, and the way back. */
import { url } from "../api.js";
import { html } from "../html.js";
import { useData } from "../load.js";
import { Button, Loaded, Panel, Time } from "../parts/basics.js";
import { changes, draftOf } from "./draft.js";

const LIMIT = 50;

/** `current`: the stored version's number; `onTake` gets the content of a version. */
export function Versions({ name, current, onTake }) {
  const versions = useData(url`/v1/graphs/${name}/versions?order=desc&view=full&limit=${LIMIT}`);
  return html`<${Panel} title="Versions">
    <${Loaded} from=${versions} what="versions">${({ items, next_cursor }) => html`
      <ol class="rows">${items.map((graph, at) => html`<li key=${graph.version}>
        <strong>Version ${graph.version}</strong> <span class="small soft"><${Time} at=${graph.created_at}
          /> · ${graph.nodes.length} agents, ${graph.edges.length} edges</span>
        ${graph.version === current ? html` <span class="status ok">current</span>` : html` <${Button} needs="define"
          kind="small" aria-label=${`Edit version ${graph.version}`}
            onClick=${() => onTake(draftOf(graph))}>Go back to it<//>`}
        <div class="small soft">${items[at + 1] ? changes(items[at + 1], graph).join(" · ") || "no change"
          : graph.version === 1 ? "the first" : ""}</div></li>`)}</ol>
      ${next_cursor && html`<p class="small soft">Older ones: <code>GET /v1/graphs/${name}/versions</code></p>`}`}<//>
  <//>`;
}
