/** The page that the address names: `#/runs/ID?tab=events`. */
import { computed, signal } from "@preact/signals";
import { useEffect } from "preact/hooks";

const hash = signal(location.hash);
addEventListener("hashchange", () => (hash.value = location.hash));

/** Decode a word of an address; a word that ends in the middle of an encoded character stays as it is. */
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

/** Name what the page shows in the tab's title, while it is shown. */
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

/** Open the page to which an answer leads, unless the user has left this page before the answer came. */
export async function follow(answer, pathOf) {
  const here = page();
  const found = await answer;
  if (page() === here) go(pathOf(found));
}

export function go(path, query = {}, { replace = false } = {}) {
  const address = to(path, query);
  if (replace) history.replaceState(null, "", address);
  else history.pushState(null, "", address);
  hash.value = location.hash;
}
