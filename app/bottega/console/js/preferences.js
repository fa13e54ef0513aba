/** Choices of a person for this browser: theme, and the language and time zone of dates. */
import { effect, signal } from "@preact/signals";

import { setDates } from "./format.js";

const THEME = "bottega.theme", DATES = "bottega.dates";

/** `system`, `light` or `dark`. */
export const theme = signal(localStorage.getItem(THEME) ?? "system");
/** `{language, zone}`; "": the browser's time zone. */
export const dates = signal(readDates());

function readDates() {
  const usual = { language: "en", zone: "" };
  try {
    return { ...usual, ...JSON.parse(localStorage.getItem(DATES) ?? "{}") };
  } catch {
    return usual;
  }
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
