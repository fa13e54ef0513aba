/** A dialog above the page; Escape and its own buttons close it. The focus goes back to where it was. */
import { useEffect, useRef } from "preact/hooks";

import { html } from "../html.js";
import { Button, Failure } from "./basics.js";
import { instead, useWork } from "./work.js";

export function Dialog({ title, onClose, children }) {
  const box = useRef(null);
  useEffect(() => {
    const dialog = box.current;
    const before = /** @type {HTMLElement | null} */ (document.activeElement);
    dialog.showModal();
    return () => {
      dialog.close();
      before?.focus();
    };
  }, []);
  return html`<dialog ref=${box} class="dialog" aria-label=${title} onCancel=${(e) => (e.preventDefault(), onClose())}>
    <h2>${title}</h2>${children}
  </dialog>`;
}

/** A dialog with a form; `send` gets `postOnce`, and the dialog closes after a success. `label`: of the button. */
export function DialogForm({ title, about = null, label, send, disabled = false, onClose, children }) {
  const { busy, error, work, postOnce } = useWork();
  const submit = instead(() => work(async () => {
    await send(postOnce);
    onClose();
  }));
  return html`<${Dialog} title=${title} onClose=${onClose}>${about}
    <form class="form" onSubmit=${submit}>${children}
      ${error && html`<${Failure} error=${error} />`}
      <div class="actions"><${Button} type="submit" kind="primary" busy=${busy} disabled=${disabled}>${label}<//>
        <${Button} onClick=${onClose}>Cancel<//></div>
    </form>
  <//>`;
}
