// Wires feed, state and views. Addresses are views: / the river, /table, /plans, /r/ID one request.

import { Feed } from "./feed.js";
import { Orders } from "./orders.js";
import { instance, overview, sums } from "./panel.js";
import { requestView } from "./request.js";
import { River } from "./river.js";
import { Cluster } from "./state.js";
import { clock, el, say, span } from "./text.js";
import { plansView, tablesView } from "./views.js";

/** @returns {any} an element of index.html */
const byId = (id) => document.getElementById(id);
const VIEWER_KEY = "millrace-viewer-key";
/** Time between two renderings of what is text. */
const TEXT_MS = 500;

const cluster = new Cluster();
const orders = new Orders(byId("order"));
const panel = byId("panel");
let chosen = "";
/** What each node shows; and whether a button is held down, which must not be replaced under the pointer. */
const written = new WeakMap();
let pressed = false;
addEventListener("pointerdown", () => (pressed = true));
for (const kind of ["pointerup", "pointercancel"]) addEventListener(kind, () => setTimeout(() => (pressed = false), 50));
let request = { id: "", known: null, asked: 0 };

const river = new River(byId("river"), cluster, ({ instance: name, members, sequence }) => {
  if (sequence) visit(`/r/${sequence.replace(/\.\d+$/, "")}`);
  else choose(name ?? members[0]);
});

const feed = new Feed({
  take: (frame) => {
    const news = cluster.apply(frame);
    if (cluster.c.page?.recorded && !feed.recorded) return playRecorded();
    if (shown() === "river" || news.whole) river.take(news, performance.now());
    else river.stale = true;
  },
  changed: () => renderTime(),
  key: () => sessionStorage.getItem(VIEWER_KEY) ?? "",
});

/** A simulation's run is over: it plays from its beginning. */
async function playRecorded() {
  feed.recorded = true;
  const spans = await feed.kept();
  await feed.go(spans[0][0]);
}

/** The view that the address names. */
function shown() {
  const path = location.pathname;
  return path === "/table" ? "table" : path === "/plans" ? "plans" : path.startsWith("/r/") ? "request" : "river";
}

function visit(path) {
  history.pushState(null, "", path);
  show();
}

function choose(name) {
  chosen = name;
  if (shown() !== "river") visit("/");
  renderText();
}

/** Shows what the address says. */
function show() {
  const view = shown();
  byId("river").hidden = view !== "river";
  byId("view").hidden = view === "river";
  for (const anchor of /** @type {NodeListOf<HTMLAnchorElement>} */ (document.querySelectorAll("nav a"))) anchor.toggleAttribute("aria-current", anchor.pathname === location.pathname);
  if (view === "request" && request.id !== requestId()) request = { id: requestId(), known: null, asked: 0 };
  if (view === "river" && river.stale) {
    river.stale = false;
    river.take({ whole: true, touched: new Set() }, performance.now());
  }
  renderText();
}

const requestId = () => decodeURIComponent(location.pathname.slice(3)).replace(/^(chatcmpl|cmpl)-/, "");

/** Asks the service about the request that is shown; again while it is open. */
async function ask() {
  const open = Object.keys(cluster.q).some((id) => id.startsWith(`${request.id}.`));
  const settled = request.known && !open && performance.now() - request.ended > 3000;
  if (!request.known || open) request.ended = performance.now();
  if (settled || performance.now() - request.asked < 1000) return;
  request.asked = performance.now();
  const { id } = request;
  const answer = await fetch(`/request/${encodeURIComponent(id)}`, { headers: feed.headers() });
  const known = await answer.json();
  if (id === request.id) request.known = answer.ok ? known : { error: known.error ?? true };
}

/** Replaces those of a node's children that have changed, so that what a person is about to use stays. */
function fresh(node, children) {
  const now = children.flat(Infinity).filter(Boolean);
  if (pressed) return;
  const was = written.get(node) ?? [];
  const html = now.map((child) => child.outerHTML);
  const focus = node.contains(document.activeElement) ? document.activeElement : null;
  const name = (/** @type {any} */ each) => `${each.dataset.open ?? each.dataset.verb ?? each.getAttribute("href")} ${each.textContent}`;
  now.forEach((child, n) => {
    if (was[n] === html[n]) return;
    if (node.children[n]) node.children[n].replaceWith(child);
    else node.append(child);
  });
  while (node.children.length > now.length) node.lastElementChild.remove();
  written.set(node, html);
  if (focus && !node.contains(focus)) [...node.querySelectorAll("button, a")].find((/** @type {any} */ each) => name(each) === name(focus))?.focus();
}

function renderText() {
  const t = feed.now();
  say(byId("cluster"), cluster.c.page?.cluster ?? "");
  say(byId("sums"), sums(cluster));
  if (feed.refused) return fresh(panel, [keyForm()]);
  fresh(panel, chosen ? instance(cluster, chosen, t, orders.open) : overview(cluster, t));
  for (const card of byId("river").querySelectorAll(".card")) card.toggleAttribute("aria-current", card.dataset.name === chosen);
  const view = shown();
  if (view === "table") fresh(byId("view"), tablesView(cluster, t));
  if (view === "plans") fresh(byId("view"), plansView(cluster, t));
  if (view === "request") {
    ask();
    fresh(byId("view"), requestView(cluster, request.id, request.known, t, orders.open));
  }
}

/** Elsewhere than on this machine a key is asked for. */
function keyForm() {
  const key = el("input", { type: "password", name: "key", autocomplete: "off" });
  const keep = (event) => {
    event.preventDefault();
    sessionStorage.setItem(VIEWER_KEY, key.value);
  };
  return el("form", { submit: keep }, el("h2", {}, "A key is needed"), el("p", {}, "The observer's password on the bus."), el("label", {}, "Viewer's key ", key), el("button", { type: "submit" }, "Look"));
}

// Time

function renderTime() {
  document.body.dataset.time = feed.live ? (feed.connected ? "live" : "lost") : "past";
  say(byId("play"), feed.playing ? "❚❚" : "▶");
  byId("play").setAttribute("aria-label", feed.playing ? "pause" : "play");
  say(byId("speed"), `${feed.speed}×`);
  const [first, end] = [feed.spans[0]?.[0] ?? cluster.t, Math.max(feed.spans.at(-1)?.[1] ?? 0, feed.live ? cluster.t : 0)];
  const now = feed.now();
  if (document.activeElement !== byId("slider") || feed.live) byId("slider").value = feed.live ? 1000 : (1000 * (now - first)) / Math.max(1, end - first);
  const state = feed.live ? (feed.connected ? "" : "the page's service does not answer") : `${span(end - now)} ago`;
  say(byId("time"), `${cluster.t ? clock(feed.live ? cluster.t : now) : ""} ${state}`);
}

byId("play").addEventListener("click", () => feed.pause(!feed.playing));
byId("speed").addEventListener("click", () => feed.faster());
byId("live").addEventListener("click", () => feed.goLive());
byId("slider").addEventListener("change", async () => {
  await feed.kept();
  if (!feed.spans.length) return;
  const [first, end] = [feed.spans[0][0], feed.spans.at(-1)[1]];
  const share = Number(byId("slider").value) / 1000;
  await (share >= 0.999 && !cluster.c.page?.recorded ? feed.goLive() : feed.go(first + share * (end - first)));
});

// People

document.addEventListener("click", (/** @type {any} */ event) => {
  const anchor = event.target.closest("a[href^='/']");
  if (anchor && !event.ctrlKey && !event.metaKey && event.button === 0) {
    event.preventDefault();
    if (anchor.classList.contains("brand")) chosen = "";
    visit(anchor.getAttribute("href"));
  }
  const opener = event.target.closest("[data-open]");
  if (opener) choose(opener.dataset.open);
});

document.addEventListener("keydown", (/** @type {any} */ event) => {
  if (event.target.matches("input") || event.ctrlKey || event.metaKey || event.altKey || byId("order").open) return;
  const keys = { Escape: () => (chosen ? choose("") : visit("/")), " ": () => event.target === document.body && feed.pause(!feed.playing), l: () => feed.goLive(), r: () => visit("/"), t: () => visit("/table"), p: () => visit("/plans"), "/": () => byId("find").elements.id.focus() };
  const act = keys[event.key];
  if (!act) return moveFocus(event);
  if (event.key === "/" || (event.key === " " && event.target === document.body)) event.preventDefault();
  act();
});

/** Arrow keys go from card to card. */
function moveFocus(event) {
  const cards = [...document.querySelectorAll(".card")];
  const at = cards.indexOf(document.activeElement);
  const step = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 1, ArrowUp: -1 }[event.key];
  if (at < 0 || !step) return;
  event.preventDefault();
  const here = cards[at].getBoundingClientRect();
  const sideways = event.key === "ArrowRight" || event.key === "ArrowLeft";
  const there = sideways ? cards[at + step] : nearestLine(cards, here, step);
  there?.focus();
}

function nearestLine(cards, here, step) {
  const beyond = cards.map((card) => [card, card.getBoundingClientRect()]).filter(([, box]) => (box.top - here.top) * step > 4);
  beyond.sort(([, a], [, b]) => Math.abs(a.top - here.top) - Math.abs(b.top - here.top) || Math.abs(a.left - here.left) - Math.abs(b.left - here.left));
  return beyond[0]?.[0];
}

byId("find").addEventListener("submit", (event) => {
  event.preventDefault();
  const id = byId("find").elements.id.value.trim();
  if (id) visit(`/r/${encodeURIComponent(id.replace(/^(chatcmpl|cmpl)-/, ""))}`);
});

byId("theme").addEventListener("click", () => {
  const dark = document.documentElement.dataset.theme ? document.documentElement.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  localStorage.setItem("millrace-theme", document.documentElement.dataset.theme);
  river.repaint();
});

document.documentElement.dataset.theme = localStorage.getItem("millrace-theme") ?? "";
addEventListener("popstate", show);
setInterval(renderText, TEXT_MS);
setInterval(renderTime, 250);
(function draw() {
  if (shown() === "river" && !document.hidden) river.draw(performance.now(), feed.now());
  requestAnimationFrame(draw);
})();
show();
feed.kept().catch(() => {});
feed.follow();
Object.assign(window, { millrace: { cluster, feed, river } }); // for tests, and for the curious
