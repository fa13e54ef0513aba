/** What editors of values share. */
import { createContext } from "preact";
import { useState } from "preact/hooks";

import { html } from "../html.js";

/**
 * What the editors offer to choose from: `{schemas, problems, agents, graphs, servers, models, tools, nodes, onTry}`;
 * names are lists. `problems`: `[{pointer, detail}]` of the last try to store it.
 *
 * @type {import("preact").Context<any>}
 */
export const Known = createContext({ schemas: {}, problems: [] });

/** A text field whose content is told when it is left: the name of a row. */
export function Name({ label, value, taken = [], onChange }) {
  const [typed, setTyped] = useState(null);
  const keep = (event) => {
    const name = event.target.value.trim();
    event.target.setCustomValidity(taken.includes(name) && name !== value ? "There is one of this name." : "");
    if (!event.target.reportValidity()) return;
    setTyped(null);
    if (name !== value) onChange(name);
  };
  return html`<label>${label} <input value=${typed ?? value} required spellcheck=${false} autocomplete="off"
    onInput=${(e) => (e.target.setCustomValidity(""), setTyped(e.target.value))} onChange=${keep} /></label>`;
}

/** A value as JSON text; while the text is no JSON, the value stays as it was, and its form is not sent. */
export function JsonField({ label, value, rows, onChange, ...rest }) {
  const [typed, setTyped] = useState(null);
  const [wrong, setWrong] = useState("");
  const shown = typed ?? JSON.stringify(value, null, 2) ?? "null";
  const type = (box) => {
    setTyped(box.value);
    let problem = "";
    try {
      onChange(JSON.parse(box.value || "null"));
    } catch (error) {
      problem = `This is no JSON yet: ${error.message}`;
    }
    setWrong(problem);
    box.setCustomValidity(problem);
  };
  return html`<label>${label} <textarea spellcheck=${false} rows=${rows} ...${rest} value=${shown}
    onInput=${(e) => type(e.target)} onBlur=${() => wrong || setTyped(null)}></textarea></label>
    ${wrong && html`<p class="small bad-text" role="alert">${wrong}</p>`}`;
}
