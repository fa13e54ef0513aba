/** The drawing of a graph: nodes in layers, and edges around nodes. Only pages with a graph load the layout's code. */
import { useEffect, useMemo, useRef, useState } from "preact/hooks";

import { html } from "../html.js";
import { Button, Loading } from "./basics.js";
import { arrange, cut, HEIGHT, MARGIN, pathOf, WIDTH, widthOf } from "./layout.js";

const FLASH_MS = 1600;
const MOST_SCALE = 1.1;
const ZOOM = { least: 0.3, most: 8, step: 1.2 };
/** The view of all nodes. */
const WHOLE = { zoom: 1, x: 0, y: 0 };

function Node({ node: { id, label, classes }, at: { x, y }, isAim, ...listeners }) {
  const lines = label.split("\n");
  return html`<g class=${`node ${classes.join(" ")} ${isAim ? "aim" : ""}`} data-node=${id}
    transform=${`translate(${x} ${y})`} ...${listeners}>
    <title>${label}</title>
    <rect x=${-WIDTH / 2} y=${-HEIGHT / 2} width=${WIDTH} height=${HEIGHT} rx="8" />
    ${lines.map((line, place) => html`<text y=${(place - (lines.length - 1) / 2) * 16 + 4}>
      ${cut(line, "node")}</text>`)}</g>`;
}

function Edge({ edge: { classes }, points, isFlash, arrow, onClick }) {
  const path = pathOf(points);
  return html`<g class=${`edge ${classes.join(" ")} ${isFlash ? "flash" : ""}`} onClick=${onClick}>
    <path class="reach" d=${path} /><path d=${path} marker-end=${`url(#${arrow})`} /></g>`;
}

/** The ids of edges whose `seq` has grown since the previous drawing. */
function useFlashes(edges) {
  const seqs = useRef(null);
  const [flashes, setFlashes] = useState(new Set());
  useEffect(() => {
    const before = seqs.current;
    seqs.current = new Map(edges.map(({ id, seq = 0 }) => [id, seq]));
    const grown = before ? edges.filter(({ id, seq = 0 }) => seq > (before.get(id) ?? 0)).map(({ id }) => id) : [];
    if (!grown.length) return;
    setFlashes((old) => new Set([...old, ...grown]));
    setTimeout(() => setFlashes((old) => new Set([...old].filter((id) => !grown.includes(id)))), FLASH_MS);
  }, [edges]);
  return flashes;
}

/** The width and height of a ref's element, in pixels. */
function useSize(box) {
  const [size, setSize] = useState({ width: 0, height: 0 });
  useEffect(() => {
    const look = () => {
      const { clientWidth: width, clientHeight: height } = box.current ?? {};
      if (width) setSize({ width, height });
    };
    const observer = new ResizeObserver(look);
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  return size;
}

const nodeAt = (event) =>
  document.elementFromPoint(event.clientX, event.clientY)?.closest("[data-node]")?.getAttribute("data-node") ?? null;

let drawings = 0;

/**
 * `nodes`: `[{id, label, classes}]`; `edges`: `[{id, source, target, label, room, classes, seq}]`: an edge lights up
 * when its `seq` grows, and reserves the space of the text `room` for a later label.
 *
 * `onNode` and `onEdge` get the id of a clicked node or edge; `onConnect` gets two ids when the user draws a line from
 * node to node. The wheel zooms, and the mouse moves the background.
 *
 * @param {{nodes: any[], edges: any[], label: string, onNode?: (id: string) => void,
 *   onEdge?: (id: string) => void, onConnect?: (source: string, target: string) => void}} properties
 */
export function Canvas({ nodes, edges, label, onNode, onEdge, onConnect }) {
  const box = useRef(null);
  const [dagre, setDagre] = useState(null);
  useEffect(() => {
    let left = false;
    import("@dagrejs/dagre").then((library) => left || setDagre(() => library.default));
    return () => void (left = true);
  }, []);
  const arrow = useMemo(() => `arrow-${++drawings}`, []);
  const size = useSize(box);
  const shape = JSON.stringify([nodes.map(({ id }) => id), edges.map(({ id }) => id)]);
  const rooms = edges.map(widthOf).join();
  const places = useMemo(() => dagre && arrange(dagre, nodes, edges), [dagre, shape, rooms]);
  const [view, setView] = useState(WHOLE);
  useEffect(() => setView(WHOLE), [shape]);
  const [pulled, setPulled] = useState({ from: null, aim: null });
  const flashes = useFlashes(edges);
  const held = useRef(null);
  if (!places || !size.width) return html`<div class="canvas-box"><div class="canvas" ref=${box} role="img"
    aria-label=${label}></div></div>${!places && html`<${Loading} what="the graph" />`}`;
  const scale = view.zoom * Math.min(MOST_SCALE, (size.width - 2 * MARGIN) / places.width,
    (size.height - 2 * MARGIN) / places.height);
  const shown = { width: size.width / scale, height: size.height / scale };
  const corner = { x: (places.width - shown.width) / 2 + view.x, y: (places.height - shown.height) / 2 + view.y };
  const isMoved = view !== WHOLE;
  const press = (event) => {
    const from = nodeAt(event);
    if (onConnect && from !== null) setPulled({ from, aim: null });
    else if (from === null) held.current = { x: event.clientX, y: event.clientY };
  };
  const move = (event) => {
    if (pulled.from !== null) setPulled({ ...pulled, aim: nodeAt(event) });
    if (!held.current) return;
    const by = { x: (event.clientX - held.current.x) / scale, y: (event.clientY - held.current.y) / scale };
    held.current = { x: event.clientX, y: event.clientY };
    setView((old) => ({ ...old, x: old.x - by.x, y: old.y - by.y }));
  };
  const release = (event) => {
    const to = nodeAt(event);
    if (pulled.from !== null && to !== null && to !== pulled.from) onConnect(pulled.from, to);
    held.current = null;
    setPulled({ from: null, aim: null });
  };
  const wheel = (event) => {
    event.preventDefault();
    const factor = event.deltaY < 0 ? ZOOM.step : 1 / ZOOM.step;
    setView((old) => ({ ...old, zoom: Math.max(ZOOM.least, Math.min(ZOOM.most, old.zoom * factor)) }));
  };
  return html`<div class="canvas-box"><div class="canvas" ref=${box} role="img" aria-label=${label} onWheel=${wheel}
    onPointerDown=${press} onPointerMove=${move} onPointerUp=${release} onPointerLeave=${() => (held.current = null)}>
    <svg viewBox=${`${corner.x} ${corner.y} ${shown.width} ${shown.height}`}>
      <defs><marker id=${arrow} viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">
        <path d="M0 0 8 4 0 8z" /></marker></defs>
      ${edges.map((edge) => places.edges.has(edge.id) && html`<${Edge} key=${edge.id} edge=${edge} arrow=${arrow}
        points=${places.edges.get(edge.id).points} isFlash=${flashes.has(edge.id)}
        onClick=${() => onEdge?.(edge.id)} />`)}
      ${nodes.map((node) => places.nodes.has(node.id) && html`<${Node} key=${node.id} node=${node}
        at=${places.nodes.get(node.id)} isAim=${pulled.aim === node.id && pulled.from !== node.id}
        onClick=${() => onNode?.(node.id)} />`)}
      ${edges.map((edge) => edge.label && places.edges.has(edge.id) && html`<text key=${edge.id} class="edge-label"
        x=${places.edges.get(edge.id).x} y=${places.edges.get(edge.id).y + 4} onClick=${() => onEdge?.(edge.id)}>
        ${cut(edge.label, "edge") !== edge.label && html`<title>${edge.label}</title>`}${cut(edge.label, "edge")}
        </text>`)}
    </svg>
    ${isMoved && html`<${Overview} places=${places} corner=${corner} shown=${shown} />`}</div>
    ${isMoved && html`<${Button} kind="small fit" onClick=${() => setView(WHOLE)}>Show all<//>`}</div>`;
}

/** A small drawing of all nodes with the visible part, shown when the user has moved the drawing. */
const Overview = ({ places, corner, shown }) => html`<svg class="overview" aria-hidden="true"
  viewBox=${`${-MARGIN} ${-MARGIN} ${places.width + 2 * MARGIN} ${places.height + 2 * MARGIN}`}>
  ${[...places.nodes.values()].map(({ x, y }) => html`<rect x=${x - WIDTH / 2} y=${y - HEIGHT / 2} width=${WIDTH}
    height=${HEIGHT} />`)}
  <rect class="window" x=${corner.x} y=${corner.y} width=${shown.width} height=${shown.height} /></svg>`;
