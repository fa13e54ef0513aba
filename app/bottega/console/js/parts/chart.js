/** Charts of values over time; each has a table of its values. */
import { useEffect, useRef, useState } from "preact/hooks";

import { clock, exact } from "../format.js";
import { html } from "../html.js";
import { Table } from "./lists.js";

const HEIGHT = 200;
/** The width of a letter beside the chart. */
const LETTER = 7;
/** Names of colours, and dashes for more series than colours. */
const COLOURS = ["accent", "bad", "ok", "wait", "busy", "quiet"];
const DASHES = [[], [6, 4], [2, 3]];
const MOST_ROWS = 200;

const colourOf = (place, series) => series.colour ?? COLOURS[place % COLOURS.length];
/** A computed colour, because a canvas does not support light-dark(). */
function paint(name) {
  const probe = document.body.appendChild(document.createElement("i"));
  probe.style.color = `var(--${name})`;
  const { color } = getComputedStyle(probe);
  probe.remove();
  return color;
}

/** A plugin of uPlot: a vertical line for each mark. */
const marksOf = (marks) => ({
  hooks: {
    draw: ({ ctx, valToPos, bbox, scales }) => {
      ctx.save();
      ctx.strokeStyle = paint("line-strong");
      ctx.setLineDash([4, 4]);
      for (const at of marks.map((each) => Date.parse(each.at) / 1000)) {
        if (at < scales.x.min || at > scales.x.max) continue;
        const x = Math.round(valToPos(at, "x", true));
        ctx.beginPath();
        ctx.moveTo(x, bbox.top);
        ctx.lineTo(x, bbox.top + bbox.height);
        ctx.stroke();
      }
      ctx.restore();
    },
  },
});

const dayOf = new Intl.DateTimeFormat("en", { month: "short", day: "numeric" });
const timeOf = new Intl.DateTimeFormat("en", { timeStyle: "short", hourCycle: "h23" });
const whenOf = (at) => (at.getHours() + at.getMinutes() ? timeOf : dayOf).format(at);
/** Texts without repetitions of the text before, which counts between two whole numbers would have. */
const distinct = (texts) => texts.map((text, place) => (text === texts[place - 1] ? "" : text));

function optionsOf(series, format, marks, width) {
  const axis = { stroke: () => paint("text-soft"), grid: { stroke: () => paint("line"), width: 1 },
    ticks: { show: false } };
  const line = (each, place) => ({ label: each.key, width: 2, stroke: () => paint(colourOf(place, each)),
    dash: DASHES[Math.floor(place / COLOURS.length) % DASHES.length], points: { show: true, size: 4 } });
  return {
    width, height: HEIGHT, legend: { show: false }, cursor: { drag: { x: false, y: false } },
    scales: { y: { range: (_, _low, high) => [0, high > 0 ? high * 1.1 : 1] } },
    axes: [
      { ...axis, values: (_, times) => times.map((each) => whenOf(new Date(1000 * each))) },
      { ...axis, size: (_, texts) => Math.max(64, ...(texts ?? []).map((each) => 16 + LETTER * each.length)),
        values: (_, values) => distinct(values.map(format)) },
    ],
    series: [{}, ...series.map(line)], plugins: [marksOf(marks)],
  };
}

/** The canvas, which is drawn again when the data, the width or the colours change. */
function Plot({ series, format, marks, label }) {
  const box = useRef(null);
  useEffect(() => {
    let plot = null, gone = false;
    const place = box.current;
    const resize = new ResizeObserver(() => !gone && plot.setSize({ width: place.clientWidth, height: HEIGHT }));
    const redraw = () => plot?.redraw(false);
    const theme = new MutationObserver(redraw);
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    import("uplot").then(({ default: UPlot }) => {
      if (gone) return;
      const times = series[0].points.map(({ at }) => Date.parse(at) / 1000);
      const values = series.map(({ points }) => points.map(({ value }) => value));
      plot = new UPlot(optionsOf(series, format, marks, place.clientWidth), [times, ...values], place);
      resize.observe(place);
      theme.observe(document.documentElement, { attributes: true, attributeFilter: ["data-theme"] });
      scheme.addEventListener("change", redraw);
    });
    return () => {
      gone = true;
      resize.disconnect();
      theme.disconnect();
      scheme.removeEventListener("change", redraw);
      plot?.destroy();
    };
  }, [series, marks]);
  return html`<div class="plot" ref=${box} role="img" aria-label=${label}></div>`;
}

/** The values, the newest first, without times at which no series has a value. */
function Values({ label, series, format }) {
  const rows = series[0].points
    .map(({ at }, place) => ({ at, values: series.map(({ points }) => points[place].value) }))
    .filter(({ values }) => values.some(Boolean)).reverse();
  return html`<${Table} label=${`Values: ${label}`} head=${["Time", ...series.map(({ key }) => `#${key}`)]}>
    ${rows.slice(0, MOST_ROWS).map(({ at, values }) => html`<tr key=${at}><td>${exact(at)}</td>
      ${values.map((value) => html`<td class="right">${value == null ? "–" : format(value)}</td>`)}</tr>`)}<//>
    ${rows.length > MOST_ROWS && html`<p class="small soft">The newest ${MOST_ROWS} are shown.</p>`}`;
}

/** One bar for each series, if only one time has values. */
const Bars = ({ label, series, format, place }) => {
  const shown = series.map(({ key, points }) => ({ key, value: points[place].value }))
    .filter(({ value }) => value != null);
  const most = Math.max(...shown.map(({ value }) => value), 1e-9);
  return html`<div class="plot bars" role="img" tabindex="0" aria-label=${`${label}. ${shown.map(({ key, value }) =>
    `${key}: ${format(value)}`).join(", ")}`}><p class="small soft">All in one step, from
    ${" "}${exact(series[0].points[place].at)}:</p>
    ${shown.map(({ key, value }) => html`<p key=${key}><span>${key}</span><i style=${{
      width: `${(35 * value) / most}%`, background: `var(--${colourOf(series.findIndex((each) => each.key === key),
        series.find((each) => each.key === key))})` }}></i> ${format(value)}</p>`)}</div>`;
};

const NO_MARKS = [];

/**
 * Values over time as lines, with a table of the values.
 *
 * @param {{label: string, series: {key: string, colour?: string, points: {at: string, value: number | null}[]}[],
 *   format: (value: number) => string, marks?: {at: string, text: string}[], none?: string}} properties
 */
export function Chart({ label, series, format, marks = NO_MARKS, none = "There was nothing." }) {
  const [isOpen, setOpen] = useState(false);
  const filled = (series[0]?.points ?? []).flatMap((_, place) => (series.some(({ points }) => points[place].value)
    ? [place] : []));
  if (!filled.length) return html`<p class="small soft body">${none}</p>`;
  const last = series.map(({ key, points }) => {
    const value = points.findLast((each) => each.value)?.value;
    return `${key}: ${value == null ? "none" : format(value)}`;
  });
  if (filled.length === 1) {
    return html`<figure class="chart"><${Bars} ...${{ label, series, format }} place=${filled[0]} /></figure>`;
  }
  return html`<figure class="chart">
    <${Plot} series=${series} format=${format} marks=${marks} label=${`${label}. Last values: ${last.join(", ")}`} />
    <p class="legend small soft">${series.map((each, place) => html`<span key=${each.key}>
      <i style=${{ background: `var(--${colourOf(place, each)})` }}></i> ${each.key}</span>`)}
      ${marks.map((each) => html`<span key=${each.text + each.at}>┆ ${each.text}, ${clock(each.at)}</span>`)}</p>
    <details onToggle=${(e) => setOpen(e.currentTarget.open)}><summary class="small">Values</summary>
      ${isOpen && html`<${Values} label=${label} series=${series} format=${format} />`}</details>
  </figure>`;
}
