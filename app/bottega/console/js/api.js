/** Requests to the public API, and the key or the person's token for these requests. */
import { signal } from "@preact/signals";

/**
 * Bodies of requests and answers, by their names in the OpenAPI document.
 *
 * @typedef {import("#api").components["schemas"]} Schemas
 */

/** Path below which a proxy serves the API and this console; usually empty. */
export const ROOT = new URL("..", document.baseURI).pathname.slice(0, -1);
const KEPT = `bottega.key${ROOT}`, SIGNED_IN = `bottega.person${ROOT}`;

/**
 * The signed-in person's token, or the API key; "": none. A key is only in memory unless the user keeps the key; a
 * token lasts as long as the tab.
 */
export const key = signal(sessionStorage.getItem(SIGNED_IN) ?? localStorage.getItem(KEPT) ?? "");
/** True while `key` is a person's token. */
export const isPerson = signal(sessionStorage.getItem(SIGNED_IN) !== null);
/** True after the server refused a request without a valid key. */
export const needsKey = signal(false);
/** False after a request did not reach the server, until the next request that does. */
export const connected = signal(true);

export function useKey(value, keep) {
  key.value = value;
  needsKey.value = false;
  isPerson.value = false;
  sessionStorage.removeItem(SIGNED_IN);
  if (value && keep) localStorage.setItem(KEPT, value);
  else localStorage.removeItem(KEPT);
}

/** Use a person's token in this tab; a kept key stays kept. */
export function usePerson(token) {
  key.value = token;
  needsKey.value = false;
  isPerson.value = true;
  sessionStorage.setItem(SIGNED_IN, token);
}

/** Forget a person's token. */
export function forgetPerson() {
  sessionStorage.removeItem(SIGNED_IN);
  isPerson.value = false;
  key.value = localStorage.getItem(KEPT) ?? "";
}

export const isKept = () => localStorage.getItem(KEPT) !== null;

/** An answer that is an error. `code` is stable; `status` 0: the request did not reach the server. */
export class ApiError extends Error {
  constructor(status, code, detail, problem = {}) {
    super(detail);
    this.status = status;
    this.code = code;
    this.problem = problem;
  }
}

/**
 * Send a request. Return the answer's JSON; null: no JSON. `body`: a form, or a value that is sent as JSON.
 *
 * @param {string} method
 * @param {string} path
 * @param {unknown} [body]
 * @param {{signal?: AbortSignal, headers?: Record<string, string>}} [options]
 * @returns {Promise<any>}
 */
export async function call(method, path, body, { signal: abort, headers } = {}) {
  /** @type {{method: string, headers: Record<string, string>, signal: AbortSignal, body?: BodyInit}} */
  const options = { method, headers: { Accept: "application/json", ...headers }, signal: abort };
  const used = key.value;
  if (used) options.headers.Authorization = `Bearer ${used}`;
  if (body instanceof FormData) options.body = body;
  else if (body !== undefined) {
    options.headers["Content-Type"] = "application/json";
    options.body = JSON.stringify(body);
  }
  let response, text;
  try {
    response = await fetch(ROOT + path, options);
    text = await response.text();
  } catch (error) {
    if (error.name === "AbortError") throw error;
    connected.value = false;
    throw new ApiError(0, "unreachable", "The server cannot be reached.");
  }
  connected.value = true;
  const is_json = response.headers.get("content-type")?.includes("json");
  const answer = text && is_json ? JSON.parse(text) : null;
  if (response.ok) return answer;
  if (response.status === 401 && key.value === used) needsKey.value = true;
  const detail = answer?.detail ?? `${response.status} ${response.statusText}`;
  throw new ApiError(response.status, answer?.code ?? "", detail, answer ?? {});
}

export const get = (path, options) => call("GET", path, undefined, options);
export const post = (path, body = {}, options) => call("POST", path, body, options);
/** A random id. (`crypto.randomUUID` exists only with HTTPS, and on the server's own machine.) */
export const newId = () => Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16)
  .padStart(2, "0")).join("");

/** A value as one word of an address. A word of dots would change the path even if encoded once. */
const word = (value) => encodeURIComponent(value)
  .replace(/^\.{1,2}$/, (dots) => encodeURIComponent(dots.replaceAll(".", "%2E")));

/** Tag of an address: each value becomes one word, with any content. Only this tag makes addresses. */
export const url = (texts, ...values) => texts.reduce((before, text, number) => before + word(values[number - 1])
  + text);

/** A path with the parameters that have a value; a list is several values of a parameter. */
export function withQuery(path, parameters) {
  const query = new URLSearchParams();
  for (const [name, values] of Object.entries(parameters)) {
    for (const value of [values].flat()) {
      if (value !== undefined && value !== null && value !== "") query.append(name, value);
    }
  }
  const text = query.toString();
  return text ? `${path}${path.includes("?") ? "&" : "?"}${text}` : path;
}

/** Store a file; return the API's answer. `session`: the session with which the file is deleted. */
export function upload(file, session) {
  const form = new FormData();
  form.append("session_id", session);
  form.append("file", file);
  return post("/v1/files", form);
}

/** The content of a path that is not JSON. */
export async function fetchBlob(path) {
  const response = await fetch(ROOT + path, { headers: key.value ? { Authorization: `Bearer ${key.value}` } : {} });
  if (!response.ok) throw new ApiError(response.status, "", `${response.status} ${response.statusText}`);
  return response.blob();
}
