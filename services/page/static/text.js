// Words for numbers, and elements. Pure but for `el`, which makes nodes; text goes in as text, never as markup.

/** A count as people read it, whole: 1,234. */
export const count = (n) => Math.round(n ?? 0).toLocaleString("en-US");

/** Milliseconds: 340 ms, 4.2 s, 3 min. */
export function span(ms) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "?";
  const size = Math.abs(ms);
  if (size < 1) return `${ms.toFixed(2)} ms`;
  if (size < 950) return `${Math.round(ms)} ms`;
  if (size < 99_500) return `${(ms / 1000).toFixed(size < 9_950 ? 1 : 0)} s`;
  if (size < 5_400_000) return `${Math.round(ms / 60_000)} min`;
  return `${(ms / 3_600_000).toFixed(1)} h`;
}

/** A share as a percentage. */
export const percent = (share) => `${Math.round(100 * (share || 0))} %`;

/** Bytes: 12 MiB. */
export const bytes = (n) => (n < 1 << 20 ? `${Math.round(n / 1024)} KiB` : `${(n / (1 << 20)).toFixed(1)} MiB`);

/** `3 requests`, `1 request`. */
export const plural = (n, noun) => `${count(n)} ${noun}${n === 1 ? "" : "s"}`;

/** A request's id, short: its last eight characters. */
export const short = (id) => (id.length > 12 ? `…${id.slice(-8)}` : id);

/** Time of day, local. */
export const clock = (ms) => new Date(ms).toLocaleTimeString("en-GB");

/** An element with attributes (functions are listeners) and children (text or nodes). */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value !== false && value !== undefined) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return node;
}

/** The same of a picture: an element of SVG. */
export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children.flat(Infinity));
  return node;
}

/** Sets a node's text where it differs: an unchanged node costs no layout. */
export function say(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** A link within the page. */
export const link = (path, text, attributes = {}) => el("a", { href: path, ...attributes }, text);

/** A table: heads and rows of cells; a cell is text or a node; columns of numbers stand at the right. */
export function table(caption, heads, rows) {
  const numeric = heads.map((_, n) => rows.some((row) => /^\d[\d.,]*( (%|ms|s|min))?$/.test(row[n])));
  const side = (n) => ({ class: numeric[n] ? "number" : "" });
  const cell = (value, n) => el("td", side(n), typeof value === "number" ? count(value) : value);
  return el(
    "table",
    {},
    el("caption", {}, caption),
    el("thead", {}, el("tr", {}, heads.map((head, n) => el("th", { scope: "col", ...side(n) }, head)))),
    el("tbody", {}, rows.map((row) => el("tr", {}, row.map(cell)))),
  );
}
