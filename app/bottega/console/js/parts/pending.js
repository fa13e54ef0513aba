/** What waits for people. It is read once for all pages: its number is in the navigation. */
import { signal } from "@preact/signals";

/** What `useData` returns of `GET /v1/interrupts?status=pending`. */
export const pending = signal(/** @type {any} */ ({ data: null, error: null, retries: true }));
