/** The page in the address: `#/runs/ID?tab=events`. */
import { computed, signal } from "@preact/signals";
import { useEffect } from "preact/hooks";

const hash = signal(location.hash);

/** The scroll position and list pages of each entry in the browser's history: `{top, pages: {path: number}}`. */
const places = new Map();
let entries = history.state?.entry ?? 0;
/** Scroll position to restore after "back"; unset again when the page is scrolled to this position. */
let goal = 0;
history.scrollRestoration = "manual";
history.replaceState({ entry: entries }, "");

/** The history entry of the current page. */
export function place() {
  const { entry } = history.state;
  if (!places.has(entry)) places.set(entry, { top: 0, pages: {} });
  return places.get(entry);
}

addEventListener("scroll", () => void (goal || (place().top = scrollY)), { passive: true });
addEventListener("popstate", () => {
  if (history.state === null) history.replaceState({ entry: ++entries }, ""); // after a link, not after "back"
  goal = page() === location.hash.split("?")[0] ? 0 : place().top;
});
addEventListener("hashchange", () => (hash.value = location.hash));

const ACTS = ["wheel", "keydown", "pointerdown"];
const PATIENCE_MS = 3000;

/** Scroll to the old position when the page is long enough, unless the reader scrolls or types before. */
export function scrollBack() {
  scrollTo(0, 0);
  const until = performance.now() + PATIENCE_MS;
  const stop = new AbortController();
  stop.signal.onabort = () => (goal = 0);
  for (const each of ACTS) addEventListener(each, () => stop.abort(), { signal: stop.signal });
  const look = () => {
    if (stop.signal.aborted) return;
    const isThere = document.documentElement.scrollHeight >= goal + innerHeight;
    if (!isThere && performance.now() < until) return void requestAnimationFrame(look);
    scrollTo(0, goal);
    stop.abort();
  };
  look();
}

/** Decode a word of an address. Return a word with an incomplete encoded character unchanged. */
function word(text) {
  try {
    return decodeURIComponent(text);
  } catch {
    return text;
  }
}

/** `{path: ["runs", "ID"], query: {tab: "events"}}` */
export const route = computed(() => {
  const [path, query] = hash.value.replace(/^#\/?/, "").split("?");
  return {
    path: path.split("/").filter(Boolean).map(word),
    query: Object.fromEntries(new URLSearchParams(query ?? "")),
  };
});

/** Text for the tab's title; "": the page's name is used. */
export const title = signal("");

/** Show the page's content in the tab's title while the page is shown. */
export function useTitle(text) {
  useEffect(() => {
    title.value = text ?? "";
    return () => (title.value = "");
  }, [text]);
}

/** The address of a page. */
export function to(path, query = {}) {
  const named = Object.entries(query).filter(([, value]) => value !== "" && value != null);
  const text = new URLSearchParams(named).toString();
  return `#/${path.map(encodeURIComponent).join("/")}${text ? `?${text}` : ""}`;
}

const page = () => hash.value.split("?")[0];

/** Open the page to which an answer leads, unless the user left this page before the answer arrived. */
export async function follow(answer, pathOf) {
  const here = page();
  const found = await answer;
  if (page() === here) go(pathOf(found));
}

export function go(path, query = {}, { replace = false } = {}) {
  const address = to(path, query);
  if (replace) history.replaceState(history.state, "", address);
  else history.pushState({ entry: ++entries }, "", address);
  hash.value = location.hash;
}
