/** What messages have in common wherever they are shown: who wrote them, and whether a tool's call went wrong. */
import { html } from "../html.js";

/** Who wrote a message: the run's user, the agent, or the agent that passed it on. `user`, `agent`: names, or null. */
export const Author = ({ role = "user", source = null, user, agent }) => html`<p class="small author">
  <b><bdi>${source ?? (role === "assistant" ? agent : role === "user" ? user ?? "User" : role)}</bdi></b></p>`;

/** "result of lookup", or in red that the call did not work. */
export const ResultOf = ({ message: { name, status } }) => html`<p
  class=${`small ${status === "error" ? "bad-text" : "soft"}`}>${status === "error"
    ? html`✕ <code>${name}</code> did not work` : html`result of <code>${name}</code>`}</p>`;
