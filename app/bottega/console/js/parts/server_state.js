/** What the server of a provider does now, in words, the same on every page. */
import { count } from "../format.js";
import { html } from "../html.js";
import { Time } from "./basics.js";

/** `health`: an item of `GET /v1/provider-health`; missing: not known yet. */
export function ServerState({ health }) {
  if (!health) return "–";
  const { breaker, calls } = health;
  const failing = Object.entries(breaker).filter(([, { state }]) => state !== "closed");
  return html`${failing.map(([model, { state, retry_at: at }]) => html`<p key=${model} class="bad-text"><code>${model}
    </code> keeps failing: calls are held back until one trial call succeeds, ${state === "half_open"
      ? "which is under way" : Date.parse(at) > Date.now() ? html`due <${Time} at=${at} />` : "due now"}.</p>`)}
    <p>${count(calls.under_way)} under way${calls.waiting > 0 && `, ${count(calls.waiting)} held back`}</p>`;
}
