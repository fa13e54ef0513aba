/** An agent's text as Markdown. The text may be hostile: no scripts, styles or forms, and only some addresses. */
import DOMPurify from "dompurify";
import { Marked } from "marked";
import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";

import { fetchBlob, ROOT } from "../api.js";
import { objectIn } from "../format.js";
import { html } from "../html.js";
import { Button, copied } from "./basics.js";

/** A longer text is shown without Markdown, because its rendering would block the page. */
const LONGEST = 50_000;
/** Maximum number of characters without a blank: the search for addresses and emphasis takes quadratic time. */
const LONG_WORD = /[!-~]{5000}/;
/**
 * A text that takes longer is shown without Markdown. Some constructs take quadratic time. Shorter texts than
 * this length are always rendered, even on a busy machine.
 */
const MOST_MS = 300, QUICK = 10_000;
/** Headings of a text have lower levels than headings of the page. */
const TOP_HEADING = 3;
const FILE = new RegExp(`^${ROOT}(/v1/files/[0-9a-f-]{36}/content)$`);
/** HTML tags that a text may have, without attributes; all other tags are shown as text. */
const PLAIN_TAG = /^<\/?(b|br|code|del|em|hr|i|ins|kbd|mark|p|s|small|strong|sub|sup|u)\s*\/?>$/i;
const ALLOWED = {
  ALLOWED_TAGS: ["a", "b", "blockquote", "br", "code", "del", "em", "h3", "h4", "h5", "h6", "hr", "i", "img", "ins",
    "kbd", "li", "mark", "ol", "p", "pre", "s", "small", "strong", "sub", "sup", "table", "tbody", "td", "th", "thead",
    "tr", "u", "ul"],
  ALLOWED_ATTR: ["align", "alt", "href", "src", "start", "title"],
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: /** @type {true} */ (true),
};

const SIGNS = { "&": "&amp;", "<": "&lt;", ">": "&gt;" };
const asText = (text) => text.replace(/[&<>]/g, (sign) => SIGNS[sign]);

let deadline = Infinity;
/**
 * Called at each step of the rendering, because only here the rendering can stop. False: the step continues.
 *
 * @returns {false}
 */
const stopLate = () => {
  if (performance.now() > deadline) throw new Error("The text takes too long to render.");
  return false;
};
DOMPurify.addHook("uponSanitizeElement", stopLate);

const marked = new Marked({
  gfm: true,
  tokenizer: { space: stopLate, escape: stopLate },
  renderer: {
    heading({ tokens, depth }) {
      const level = Math.min(TOP_HEADING + depth - 1, 6);
      return `<h${level}>${this.parser.parseInline(tokens)}</h${level}>`;
    },
    html: ({ text }) => text.replace(/<[^>]*>?/g, (tag) => (PLAIN_TAG.test(tag) ? tag : asText(tag))),
    checkbox: ({ checked }) => (checked ? "☑ " : "☐ "),
  },
});

/** An address as the browser reads it; null: the text is no address. */
function addressOf(text) {
  try {
    return new URL(text, document.baseURI);
  } catch {
    return null;
  }
}

/** A link that opens an address outside the console in a new tab; text if the address is inside the console. */
function openOutside(link) {
  const text = link.getAttribute("href") ?? "";
  if (!/^(https?:\/\/|mailto:)/i.test(text) || !addressOf(text)) {
    link.removeAttribute("href");
    return;
  }
  link.target = "_blank";
  link.rel = "noopener noreferrer nofollow";
}

/** An image of this server; for another server only the address, so that the other server learns nothing. */
function keepOwn(image) {
  const at = addressOf(image.getAttribute("src") ?? "");
  const alt = image.getAttribute("alt") || "image";
  if (at?.origin === location.origin && /^(\/(?!\/)|https?:)/.test(image.getAttribute("src"))) {
    image.alt = alt;
    if (!FILE.test(at.pathname)) return;
    image.removeAttribute("src");
    fetchBlob(FILE.exec(at.pathname)[1]).then((blob) => {
      image.src = URL.createObjectURL(blob);
      image.onload = () => URL.revokeObjectURL(image.src);
    }, () => image.replaceWith(alt));
    return;
  }
  const link = document.createElement("a");
  link.href = image.getAttribute("src") ?? "";
  link.textContent = `${alt} (an image of ${at?.host || "nowhere"})`;
  openOutside(link);
  image.replaceWith(link);
}

/** Make scrollable elements reachable by keyboard, and add a copy button to code. */
function finishCode(block) {
  block.tabIndex = 0;
  const button = document.createElement("button");
  const text = block.textContent;
  Object.assign(button, { type: "button", className: "button small ghost", textContent: "Copy" });
  button.onclick = async () => {
    button.textContent = (await copied(text, button)) ? "Copied" : "Copy";
    setTimeout(() => (button.textContent = "Copy"), 1500);
  };
  const box = document.createElement("div");
  box.className = "code";
  block.replaceWith(box);
  box.append(block, button);
}

const isJson = (text) => objectIn(text) !== null;

/** A text as elements; null: no Markdown, or too long, too deep or too slow, so the text is shown without Markdown. */
export function rendered(text) {
  if (text.length > LONGEST || LONG_WORD.test(text) || isJson(text)) return null;
  let made;
  deadline = text.length > QUICK ? performance.now() + MOST_MS : Infinity;
  try {
    made = DOMPurify.sanitize(/** @type {string} */ (marked.parse(text)), ALLOWED);
  } catch {
    return null; // such as thousands of quotes within each other
  }
  for (const link of made.querySelectorAll("a")) openOutside(link);
  for (const image of made.querySelectorAll("img")) keepOwn(image);
  for (const block of made.querySelectorAll("pre")) finishCode(block);
  for (const table of made.querySelectorAll("table")) table.tabIndex = 0;
  return made;
}

/** A text with Markdown or, after a click, without. `kind`: a CSS class. */
export function Markdown({ text, kind = "" }) {
  const [isRaw, setRaw] = useState(false);
  const [isPlain, setPlain] = useState(false);
  const box = useRef(null);
  const shown = isRaw || isPlain;
  useEffect(() => setPlain(false), [text]);
  useLayoutEffect(() => {
    if (shown) return;
    const made = rendered(text);
    if (made) box.current.replaceChildren(made);
    else setPlain(true);
  }, [text, shown]);
  return html`<div class="answer">
    ${shown ? html`<pre key="raw" class="text ${kind}" tabindex=${kind ? 0 : null}>${text}</pre>`
      : html`<div key="rendered" class="text markdown ${kind}" tabindex=${kind ? 0 : null} ref=${box}></div>`}
    ${isPlain && !isJson(text) && html`<p class="small soft">Shown as plain text: it is too long or too intricate to lay
      out.</p>`}
    ${!isPlain && html`<${Button} kind="small ghost" aria-pressed=${isRaw} onClick=${() => setRaw(!isRaw)}>Raw<//>`}
  </div>`;
}
