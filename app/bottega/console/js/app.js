/** The frame of all pages: navigation, key, connection, theme. */
import { signal } from "@preact/signals";
import { render } from "preact";
import { useEffect, useRef, useState } from "preact/hooks";

import { connected, get, isKept, isPerson, key, needsKey, useKey } from "./api.js";
import { html } from "./html.js";
import { begin, comeBack, failure, isKnown, may, me, provider, signIn, signOut } from "./person.js";
import { Approvals } from "./pages/approvals.js";
import { Chat } from "./pages/chat.js";
import { Home } from "./pages/home.js";
import { Run } from "./pages/run.js";
import { Runs } from "./pages/runs.js";
import { pending, useData } from "./load.js";
import { Button, Failure, Link, Loading } from "./parts/basics.js";
import { Dialog } from "./parts/dialog.js";
import { periodIn } from "./parts/series.js";
import { dates, theme } from "./preferences.js";
import { route, scrollBack, title } from "./router.js";
import { DemoModel } from "./setup/model.js";

const REVIEW = "read approve";
const WAITING_EVERY_MS = 10_000;
const COMPARE = { name: "Comparison", needs: "read", load: () => import("./pages/compare.js").then((m) => m.Compare) };
/**
 * The pages by the first word of the address, with scopes: a caller needs one of these. The modules of pages with
 * `load` are loaded when the page is first shown; so are the modules in `below`, by the third word.
 */
const PAGES = {
  "": { name: "Home", needs: REVIEW, view: Home },
  runs: { name: "Runs", needs: REVIEW, view: Runs, one: Run, below: { compare: COMPARE } },
  batches: { name: "Batches", needs: REVIEW, load: () => import("./pages/batches.js").then((m) => m.Batches) },
  approvals: { name: "Approvals", needs: REVIEW, view: Approvals },
  ratings: { name: "Ratings", needs: "run", load: () => import("./pages/ratings.js").then((m) => m.Ratings) },
  chat: { name: "Chat", view: Chat, needs: "run" },
  agents: { name: "Agents", needs: "read", load: () => import("./pages/agents.js").then((m) => m.Agents) },
  graphs: { name: "Graphs", needs: "read", load: () => import("./pages/graphs.js").then((m) => m.Graphs) },
  tools: { name: "Tools", needs: "read", load: () => import("./pages/tools.js").then((m) => m.Tools) },
  mcp: { name: "MCP", needs: "read", load: () => import("./pages/mcp.js").then((m) => m.Mcp) },
  memory: { name: "Memory", needs: "read", load: () => import("./pages/memory.js").then((m) => m.Memory) },
  health: { name: "Health", needs: "read", load: () => import("./pages/health.js").then((m) => m.Health) },
  usage: { name: "Usage", needs: "read", load: () => import("./pages/usage.js").then((m) => m.Usage) },
  operations: {
    name: "Operations", needs: "read", load: () => import("./pages/operations.js").then((m) => m.Operations),
  },
  settings: { name: "Settings", load: () => import("./pages/settings.js").then((m) => m.Settings) },
};
const asksForKey = signal(false);
const signedOut = signal(null);

/** Other names of pages, as in the API. */
const ALSO = { interrupts: "approvals" };

/** Pages that keep the period of the previous page. */
const PERIODIC = ["health", "usage", "memory"];

/** A page gets `rest`, all words of the address but the first, and `query`; `id` is the first word of `rest`. */
function page({ path: [area = "", ...rest], query }) {
  const meant = PAGES[ALSO[area] ?? area];
  const found = meant?.below?.[rest[1]] ?? meant;
  if (!isKnown.value) return html`<${Loading} />`;
  if (!found || !may(found.needs)) {
    const why = found ? "You may not see this page" : "There is no such page";
    const way = may(REVIEW)
      ? html`<${Link} path=${[]}>Go to the first page<//>`
      : "No role lets you see anything here. Ask who runs this server for one.";
    return html`<div class="head"><h1>${why}</h1></div><p>${way}</p>`;
  }
  const view = (rest.length && found.one) || found.view;
  const given = { id: rest[0], rest, query };
  if (found.load) return html`<${Later} key=${found.name} name=${found.name} load=${found.load} given=${given} />`;
  return html`<${view} key=${rest[0]} ...${given} />`;
}

/** A page whose module is loaded when the page is first shown. `load` returns a promise of the component. */
function Later({ name, load, given }) {
  const [view, setView] = useState(null);
  const [error, setError] = useState(null);
  const read = () => load().then((found) => setView(() => found),
    () => setError({ message: "The page could not be loaded. Load it again." }));
  useEffect(() => void read(), []);
  if (error) return html`<${Failure} error=${error} again=${() => location.reload()} />`;
  return view ? html`<${view} ...${given} />` : html`<${Loading} what=${name} />`;
}

const THEMES = ["system", "light", "dark"];

function KeyDialog({ onClose }) {
  const [value, setValue] = useState(key.value);
  const [keep, setKeep] = useState(isKept());
  const save = (event) => {
    event.preventDefault();
    useKey(value.trim(), keep);
    onClose();
  };
  return html`<${Dialog} title="API key" onClose=${onClose}>
    <p>Make one on the server with <code>bottega keys create --scope run --scope define</code>.</p>
    <form onSubmit=${save} class="form">
      <label>Key <input type="password" autocomplete="off" autofocus value=${value}
        onInput=${(e) => setValue(e.target.value)} /></label>
      <label class="check"><input type="checkbox" checked=${keep} onChange=${(e) => setKeep(e.target.checked)}
        /> Keep it in this browser</label>
      <div class="actions"><button class="button primary">Use it</button><${Button} onClick=${onClose}>Cancel<//></div>
    </form>
  <//>`;
}

/** The name of the caller, and the buttons to sign in and out. */
function Person() {
  const name = me.value && html`<span class="small soft" title=${me.value.user ?? ""}>${me.value.name}</span>`;
  if (isPerson.value) return html`${name}<${Button} kind="small"
    onClick=${() => (signedOut.value = { elsewhere: signOut() })}>Sign out<//>`;
  return html`${name}${provider.value && html`<${Button} kind="small" onClick=${signIn}>Sign in<//>`}`;
}

function SignedOut() {
  if (failure.value) return html`<p class="banner bad" role="alert">You are not signed in. ${failure.value}</p>`;
  if (!signedOut.value || isPerson.value) return null;
  const { elsewhere } = signedOut.value;
  return html`<p class="banner" role="status">You are signed out here. ${elsewhere && html`<a
    href=${elsewhere}>End the provider's session, too</a>`}</p>`;
}

function Connection() {
  useEffect(() => {
    if (connected.value) return undefined;
    const timer = setInterval(() => get("/v1/info").catch(() => {}), 2000);
    return () => clearInterval(timer);
  }, [connected.value]);
  if (connected.value) return null;
  return html`<p class="banner bad"
    role="alert">The server cannot be reached. What you see is old; it is tried again.</p>`;
}

/**
 * The number of calls and questions that wait for people, also in the tab's title. It is a separate component, so that
 * a new number draws no page again. `name`: the page's name; "": the first page.
 */
function Waiting({ name }) {
  const found = useData(needsKey.value ? null : "/v1/interrupts?status=pending", { everyMs: WAITING_EVERY_MS });
  useEffect(() => void (pending.value = found), [found.data, found.error]);
  const { items = [], next_cursor: more } = found.data ?? {};
  const number = items.length ? `${items.length}${more ? "+" : ""}` : "";
  useEffect(() => {
    document.title = `${number && `(${number}) `}${name ? `${name} · ` : ""}Bottega`;
  }, [name, number]);
  return number && html` <span class="badge">${number}</span>`;
}

function App() {
  const main = useRef(null);
  const at = route.value;
  const here = ALSO[at.path[0]] ?? at.path[0] ?? "";
  const shown = title.value || (here && PAGES[here]?.name);
  const mayReview = isKnown.value && may(REVIEW);
  useEffect(() => {
    if (!mayReview) document.title = shown ? `${shown} · Bottega` : "Bottega";
  }, [shown, mayReview]);
  useEffect(() => {
    // A tab keeps the focus; otherwise the next arrow key would have no effect.
    if (document.activeElement?.role !== "tab") main.current?.focus({ preventScroll: true });
    scrollBack();
    document.querySelector(".top nav [aria-current]")?.scrollIntoView({ block: "nearest", inline: "center" });
  }, [at.path.join("/")]);
  const next = THEMES[(THEMES.indexOf(theme.value) + 1) % THEMES.length];
  return html`
    <a class="skip" href="#main" onClick=${(e) => (e.preventDefault(), main.current.focus())}>Skip to the page</a>
    <header class="top">
      <a class="brand" href="#/"><img src="icon.svg" alt="" width="22" height="22" /> Bottega</a>
      <nav aria-label="Pages">
        ${Object.entries(PAGES).map(([area, { name, needs }]) => html`<${Link} needs=${needs} path=${area ? [area] : []}
          query=${PERIODIC.includes(area) ? periodIn(at.query) : {}}
          aria-current=${area === here ? "page" : null}>${name}
          ${area === "approvals" && mayReview && html`<${Waiting} name=${shown} />`}<//>`)}
      </nav>
      <div class="actions">
        <${Button} kind="small ghost" onClick=${() => (theme.value = next)}
          aria-label=${`Colours: ${theme.value}. Change to ${next}`}>
            ${{ system: "◐", light: "☀", dark: "☾" }[theme.value]}<//>
        <${Person} />
        ${!isPerson.value && html`<${Button} kind="small" onClick=${() => (asksForKey.value = true)}>
          ${key.value ? "Key ✓" : "Key"}<//>`}
      </div>
    </header>
    <${Connection} />
    <${SignedOut} />
    <${DemoModel} />
    ${needsKey.value && html`<p class="banner wait" role="alert">This server needs ${provider.value
      ? "you to sign in, or " : ""}an API key.
      ${provider.value && html`<${Button} kind="small" onClick=${signIn}>Sign in<//>`} <${Button} kind="small"
        onClick=${() => (asksForKey.value = true)}>Enter a key<//></p>`}
    <main id="main" ref=${main} tabindex="-1"
      key=${`${key.value} ${dates.value.language} ${dates.value.zone}`}>${page(at)}</main>
    ${asksForKey.value && html`<${KeyDialog} onClose=${() => (asksForKey.value = false)} />`}`;
}

await comeBack();
begin();
render(html`<${App} />`, document.getElementById("app"));
