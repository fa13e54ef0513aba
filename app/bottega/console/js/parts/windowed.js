/** A long list of which only the visible rows are in the page. */
import { useEffect, useRef, useState } from "preact/hooks";

import { html } from "../html.js";

/**
 * Args:
 *   items, rowHeight (px), row: `(item, index) => element`.
 *   label: the list's name for screen readers.
 *   follow: true: stay at the end while items are added, unless the reader scrolled away.
 */
export function Windowed({ items, rowHeight, row, label, follow = false, role = "list" }) {
  const box = useRef(null);
  const atEnd = useRef(true);
  const made = useRef(/** @type {any} */ ({}));
  const [view, setView] = useState({ top: 0, height: 600 });
  useEffect(() => {
    const observer = new ResizeObserver(([entry]) => setView((old) => ({ ...old, height: entry.contentRect.height })));
    observer.observe(box.current);
    return () => observer.disconnect();
  }, []);
  useEffect(() => {
    if (follow && atEnd.current) box.current.scrollTop = box.current.scrollHeight;
  }, [items.length, follow]);
  const onScroll = ({ currentTarget: at }) => {
    atEnd.current = at.scrollTop + at.clientHeight > at.scrollHeight - rowHeight * 2;
    setView((old) => ({ ...old, top: at.scrollTop }));
  };
  const first = Math.max(0, Math.floor(view.top / rowHeight) - 8);
  const last = Math.min(items.length, Math.ceil((view.top + view.height) / rowHeight) + 8);
  // While only the view moves, rows that stay are the same objects, which preact does not compare.
  const kept = made.current.row === row && made.current.items === items ? made.current.rows : new Map();
  const rows = new Map();
  for (let i = first; i < last; i++) rows.set(i, kept.get(i) ?? row(items[i], i));
  made.current = { row, items, rows };
  return html`<div class="windowed" ref=${box} onScroll=${onScroll} tabindex="0" role=${role} aria-label=${label}>
    <div class="windowed-rows"
      style=${{ height: `${items.length * rowHeight}px`, paddingTop: `${first * rowHeight}px` }} role="presentation">
      ${[...rows.values()]}</div>
  </div>`;
}
