/** Files of messages: chosen, pasted or dropped files before they are sent, and files of sent messages. */
import { useEffect, useState } from "preact/hooks";

import { fetchBlob, upload, url } from "../api.js";
import { count } from "../format.js";
import { html } from "../html.js";
import { Button } from "./basics.js";

const kindOf = (type) => (type.startsWith("image/") ? "image" : type.startsWith("audio/") ? "audio"
  : type === "application/pdf" ? "document" : "file");

/** The parts of a message: a text, and files in the form of the server's answers to the uploads. */
export const partsOf = (text, files) => [
  ...(text ? [{ type: "text", text }] : []),
  ...files.map((file) => ({ type: kindOf(file.media_type), file: file.id })),
];

/**
 * The files to send. `add` takes a list of the browser's files; each file has `id` after it was
 * stored, or `error` in words.
 */
export function useFiles(session) {
  const [files, setFiles] = useState([]);
  const change = (key, fields) => setFiles(
    (old) => old.map((each) => (each.key === key ? { ...each, ...fields } : each)));
  const add = (list) => {
    for (const file of list) {
      const key = `${file.name} ${file.size} ${file.lastModified}`;
      setFiles((old) => [...old.filter((each) => each.key !== key), { key, name: file.name }]);
      upload(file, session).then((stored) => change(key, stored), (problem) => change(key, { error: problem.message }));
    }
  };
  const remove = (key) => setFiles((old) => old.filter((each) => each.key !== key));
  return { files, add, remove, clear: (sent) => setFiles((old) => old.filter((each) => !sent.includes(each))),
    ready: files.filter((each) => each.id), isBusy: files.some((each) => !each.id && !each.error) };
}

export const ChosenFiles = ({ of }) => of.files.length > 0
  && html`<ul class="files" aria-label="Files to send">${of.files.map((each) => html`<li key=${each.key}>
  ${each.name} <span class="small soft" role="status">
    ${each.error ? html`<span class="bad-text">${each.error}</span>` : each.id ? `${count(each.size)} bytes`
      : "being stored…"}</span>
  <${Button} kind="small ghost" aria-label=${`Remove ${each.name}`} onClick=${() => of.remove(each.key)}>✕<//></li>`)}
    </ul>`;

/** A part that is not text: an image is shown, all other files can be downloaded. */
export function FilePart({ part }) {
  const [address, setAddress] = useState(null);
  const [error, setError] = useState(null);
  const name = part.name ?? part.type;
  const load = () => fetchBlob(url`/v1/files/${part.file}/content`)
    .then((blob) => setAddress(URL.createObjectURL(blob)), (problem) => setError(problem.message));
  useEffect(() => void (part.type === "image" && part.file && load()), [part.file]);
  useEffect(() => () => address && URL.revokeObjectURL(address), [address]);
  if (part.url) return html`<p class="small">${part.type}: <code>${part.url}</code></p>`;
  if (error) return html`<p class="small bad-text">${name}: ${error}</p>`;
  if (part.type === "image") return address ? html`<img class="shown-image" src=${address} alt=${name} />`
    : html`<p class="small soft">Loading ${name}…</p>`;
  return address ? html`<a class="button small" href=${address} download=${name}>Save ${name}</a>`
    : html`<${Button} kind="small" onClick=${load}>Load ${name}<//>`;
}
