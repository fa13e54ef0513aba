/** The user of the console: sign-in by OpenID Connect (authorization code with PKCE), and the user's scopes. */
import { effect, signal } from "@preact/signals";

import { forgetPerson, get, key, post, ROOT, usePerson } from "./api.js";

const STARTED = `bottega.sign-in${ROOT}`;
const HERE = new URL(document.baseURI.replace(/[?#].*/, ""));
const SCOPES = ["read", "run", "define", "approve", "admin"];
const INCLUDED = { run: ["read"], define: ["read"], admin: SCOPES };

/** The OpenID Connect provider from the server's settings; null: people sign in with keys. */
export const provider = signal(null);
/** `name`, `user` and `scopes` of the caller; null: not known yet, or the server has no keys. */
export const me = signal(null);
/** False until the caller is known: pages send no requests before. */
export const isKnown = signal(false);
/** Reason why the last sign-in failed; "": it did not fail. */
export const failure = signal("");

const encoded = (bytes) => btoa(String.fromCharCode(...new Uint8Array(bytes))).replace(/\+/g, "-").replace(/\//g,
  "_").replace(/=+$/, "");
const secret = () => encoded(crypto.getRandomValues(new Uint8Array(32)));

/** Go to the provider, which sends the browser back to this page with a code. */
export async function signIn() {
  if (!crypto.subtle) return void (failure.value = "Signing in needs HTTPS.");
  const verifier = secret(), state = secret();
  sessionStorage.setItem(STARTED, JSON.stringify({ verifier, state, hash: location.hash }));
  const challenge = encoded(await crypto.subtle.digest("SHA-256", new TextEncoder().encode(verifier)));
  const to = new URL(provider.value.authorization_endpoint);
  const sent = { response_type: "code", client_id: provider.value.client_id, redirect_uri: HERE.href,
    scope: "openid profile email", state, code_challenge: challenge, code_challenge_method: "S256" };
  for (const [name, value] of Object.entries(sent)) to.searchParams.set(name, value);
  location.assign(to);
}

/** Forget the person's token. The provider's session continues: return the address that ends the session, if known. */
export function signOut() {
  forgetPerson();
  const end = provider.value?.end_session_endpoint;
  if (!end) return "";
  const to = new URL(end);
  to.searchParams.set("client_id", provider.value.client_id);
  to.searchParams.set("post_logout_redirect_uri", HERE.href);
  return /^https?:$/.test(to.protocol) ? to.href : "";
}

/** Finish a sign-in, if the provider has just sent the browser back. */
export async function comeBack() {
  const { code, state, error, error_description } = Object.fromEntries(new URLSearchParams(location.search));
  if (!code && !error) return;
  const started = JSON.parse(sessionStorage.getItem(STARTED) ?? "{}");
  sessionStorage.removeItem(STARTED); // a code works once
  history.replaceState(history.state, "", `${HERE.pathname}${started.hash ?? ""}`);
  dispatchEvent(new HashChangeEvent("hashchange")); // the router began with a different address
  // Some providers send an error without the state.
  if (!started.state || (state ?? (error
    && started.state)) !== started.state) return void (failure.value = "This page did not ask for that sign-in.");
  if (error) return void (failure.value = error_description || error);
  try {
    usePerson((await post("/v1/sign-in", { code, verifier: started.verifier, redirect_uri: HERE.href })).token);
  } catch (problem) {
    failure.value = problem.message;
  }
}

const holds = (scope) => me.value.scopes.some((each) => each === scope || INCLUDED[each]?.includes(scope));

/** Whether the caller has one of the scopes in `needs`, such as "read approve"; true without it, or without keys. */
export const may = (needs) => !needs || !me.value || needs.split(" ").some(holds);

/** Load the provider's settings, and load the caller after each change of the key or token. */
export async function begin() {
  effect(() => {
    const used = key.value;
    me.value = null;
    isKnown.value = !used;
    const learn = (found) => {
      if (key.value !== used) return; // the user entered another key meanwhile
      me.value = found;
      isKnown.value = true;
    };
    if (used) get("/v1/me").then(learn, () => learn(null));
  });
  const found = await get("/v1/sign-in").catch(() => null);
  if (found?.client_id) provider.value = found;
}
