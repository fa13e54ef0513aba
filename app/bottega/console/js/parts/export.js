/** A button that saves a list as a file of comma-separated values. */
import { useState } from "preact/hooks";

import { get, withQuery } from "../api.js";
import { count } from "../format.js";
import { html } from "../html.js";
import { Button } from "./basics.js";
import { csvOf } from "./csv.js";
import { useWork } from "./work.js";

/** Save a blob as a file on the person's machine.
 *
 * @param {Blob} blob
 */
export function save(blob, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(blob);
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 1000);
}

const PAGE = 200;
/** Maximum number of items in a file; after it, the file says that there are more. */
const MOST = 10_000;

/** The items of a list, page by page: `{items, isCut}`. `most`: approximate maximum number. */
export async function allOf(path, most = MOST) {
  const items = [];
  let cursor = null;
  do {
    const page = await get(withQuery(path, { limit: PAGE, cursor }));
    items.push(...page.items);
    cursor = page.next_cursor;
  } while (cursor && items.length < most);
  return { items, isCut: cursor !== null };
}

/**
 * Args:
 *   name: plural name of the items, such as "runs", which is the file's name.
 *   path: path of the list, of which all pages are read; or `items`, if the page has all items.
 *   columns: see `csvOf`.
 *   label: of the button.
 */
export function Export({ name, path, items, columns, label = "Export all" }) {
  const [said, setSaid] = useState("");
  const { busy, error, work } = useWork();
  const write = () => work(async () => {
    const found = items ? { items, isCut: false } : await allOf(path);
    save(new Blob([csvOf(found.items, columns)], { type: "text/csv" }), `${name.replaceAll(" ", "-")}.csv`);
    setSaid(`${count(found.items.length)} ${name} saved${found.isCut ? "; there are more" : ""}`);
  });
  return html`<${Button} kind="small" busy=${busy} onClick=${write} aria-label=${`${label} ${name}`}
    title="Save as CSV">${label}<//>
    <span class="small soft" role="status">${error?.message ?? said}</span>`;
}
