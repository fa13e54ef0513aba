/** New events of a run, from a WebSocket that continues after the last event when it reconnects. */
import { ROOT, connected, get, key, post, url } from "../api.js";
import { FINAL } from "./state.js";

const FIRST_PAUSE_MS = 300;
const LONGEST_PAUSE_MS = 10_000;
/** Minimum time between two calls of `onEvents`, because each call draws the page. */
const SHOWN_EVERY_MS = 50;

/**
 * Watch a run.
 *
 * Args:
 *   onEvents: called at most a few times a second, with the events since the last call.
 *   onState: called with "live", "connecting", "ended" or "gone".
 *
 * Return a function that stops the watch.
 */
export function watch(runId, { onEvents, onState }) {
  let stopped = false, socket = null, after = 0, pause = FIRST_PAUSE_MS, timer = 0, isDue = false, shownAt = 0;
  let waiting = [];

  const flush = () => {
    isDue = false;
    shownAt = performance.now();
    const events = waiting;
    waiting = [];
    if (!stopped && events.length) onEvents(events);
  };
  const take = (event) => {
    waiting.push(event);
    if (event.seq != null) after = event.seq;
    if (isDue) return;
    isDue = true;
    // The browser draws no frames of a hidden page.
    if (document.hidden) setTimeout(flush, 200);
    else setTimeout(() => requestAnimationFrame(flush), Math.max(0, shownAt + SHOWN_EVERY_MS - performance.now()));
  };
  const again = () => {
    if (stopped) return;
    onState("connecting");
    timer = setTimeout(connect, pause * (0.75 + Math.random() / 2));
    pause = Math.min(pause * 2, LONGEST_PAUSE_MS);
  };

  async function connect() {
    timer = 0;
    if (stopped) return;
    const protocols = ["bottega.v1"];
    try {
      if (key.value) protocols.push(`ticket.${(await post("/v1/ws-tickets", { run_id: runId })).ticket}`);
      else await get("/v1/info"); // so that a missing key is noticed
    } catch (error) {
      if (error.status === 404) onState("gone");
      else again();
      return;
    }
    if (stopped) return;
    const scheme = location.protocol === "https:" ? "wss" : "ws";
    const path = url`/v1/runs/${runId}/ws?after=${after}`;
    socket = new WebSocket(`${scheme}://${location.host}${ROOT}${path}`, protocols);
    let ended = false;
    socket.onopen = () => {
      pause = FIRST_PAUSE_MS;
      onState("live");
    };
    socket.onmessage = ({ data }) => {
      const event = JSON.parse(data);
      if (event.run_id) take(event);
      ended ||= event.type in FINAL;
    };
    socket.onclose = ({ code }) => {
      if (stopped) return;
      flush();
      if (ended || code === 1000) onState("ended");
      else if (code === 4010) onState("gone");
      else if (code === 4011) location.reload(); // the log lost events that are shown here
      else again();
    };
  }

  // Another request reached the server, so the rest of the pause is skipped.
  const forget = connected.subscribe((isUp) => {
    if (!isUp || !timer) return;
    clearTimeout(timer);
    connect();
  });
  onState("connecting");
  connect();
  return () => {
    stopped = true;
    forget();
    clearTimeout(timer);
    socket?.close();
  };
}
