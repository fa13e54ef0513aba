/** Choices of a person for this browser: theme, and the language and time zone of dates. */
import { effect, signal } from "@preact/signals";

import { objectIn, setDates } from "./format.js";

const THEME = "bottega.theme", DATES = "bottega.dates";

/** `system`, `light` or `dark`. */
export const theme = signal(localStorage.getItem(THEME) ?? "system");
/** `{language, zone}`; "": the browser's time zone. */
export const dates = signal({ language: "en", zone: "", ...keptIn(DATES) });

/** The object that this browser keeps under a name; empty: none. */
export function keptIn(name) {
  return objectIn(localStorage.getItem(name) ?? "") ?? {};
}

effect(() => {
  if (theme.value === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme.value;
  localStorage.setItem(THEME, theme.value);
});
effect(() => {
  setDates(dates.value.language, dates.value.zone);
  localStorage.setItem(DATES, JSON.stringify(dates.value));
});
