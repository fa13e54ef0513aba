/** A dialog above the page; Escape and its own buttons close it. The focus goes back to where it was. */
import { useEffect, useRef } from "preact/hooks";

import { html } from "../html.js";

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
