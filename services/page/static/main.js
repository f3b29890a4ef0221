// Wires feed, state and views. Addresses are views: / the river, /table, /plans, /compare, /r/ID one request.

import { Comparison } from "./compare.js";
import { faster, Feed } from "./feed.js";
import { ask as askSimulation, Orders } from "./orders.js";
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
/** Of a run that is over, whatever its past frames say. */
const OVER = { recorded: true, simulated: false };

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
    feed.pace = cluster.c.page?.pace ?? 1;
    runs = cluster.c.page?.runs ?? runs;
    if (cluster.c.page?.recorded && !feed.recorded) return recorded(news.whole);
    if (feed.recorded && cluster.c.page) Object.assign(cluster.c.page, OVER);
    if (flows() || news.whole) river.take(news, performance.now());
    else river.stale = true;
  },
  changed: () => renderTime(),
  key: () => sessionStorage.getItem(VIEWER_KEY) ?? "",
});

/** The run is over: it plays from its beginning, or stays where somebody saw it end. */
async function recorded(anew) {
  feed.recorded = true;
  if (!anew) return feed.pause(false);
  const spans = await feed.kept();
  await feed.go(spans[0][0]);
  if (shown() === "compare") show();
}

/** Names of the runs that can be compared. @type {string[]} */
let runs = [];
const comparison = new Comparison({ cluster, feed, river }, byId("other"), ({ instance: name, members, sequence }) => {
  if (sequence) visit(`/r/${sequence.replace(/\.\d+$/, "")}`);
  else choose(name ?? members[0]);
});
const simulated = () => feed.live && cluster.c.page?.simulated;
const flows = () => shown() === "river" || shown() === "compare";

/** The view that the address names. */
function shown() {
  const path = location.pathname;
  if (path === "/compare" && runs.length > 1 && feed.recorded) return "compare";
  return path === "/table" ? "table" : path === "/plans" ? "plans" : path.startsWith("/r/") ? "request" : "river";
}

function visit(path) {
  history.pushState(null, "", path);
  show();
}

function choose(name) {
  chosen = name;
  if (!flows()) visit("/");
  renderText();
}

/** Shows what the address says. */
function show() {
  const view = shown();
  document.body.dataset.view = view;
  byId("river").hidden = !flows();
  byId("view").hidden = flows();
  byId("other").hidden = view !== "compare";
  if (view === "compare") compare();
  else river.call("");
  for (const anchor of /** @type {NodeListOf<HTMLAnchorElement>} */ (document.querySelectorAll("nav a"))) anchor.toggleAttribute("aria-current", anchor.pathname === location.pathname);
  if (view === "request" && request.id !== requestId()) request = { id: requestId(), known: null, asked: 0 };
  if (flows() && river.stale) {
    river.stale = false;
    river.take({ whole: true }, performance.now());
  }
  renderText();
}

function compare() {
  const run = (name, otherwise) => Math.min(runs.length - 1, Number(new URLSearchParams(location.search).get(name) ?? otherwise));
  comparison.choose(run("a", 0), run("b", 1), runs);
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
  const answer = await feed.ask(`request/${encodeURIComponent(id)}`);
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
  byId("comparing").hidden = runs.length < 2;
  if (feed.refused) return fresh(panel, [keyForm()]);
  if (shown() === "compare" && !chosen) fresh(panel, comparison.panel(runs));
  else fresh(panel, chosen ? instance(cluster, chosen, t, orders.open) : overview(cluster, t));
  for (const card of byId("river").querySelectorAll(".card")) card.toggleAttribute("aria-current", card.dataset.name === chosen);
  const view = shown();
  if (view === "table") fresh(byId("view"), tablesView(cluster, t));
  if (view === "plans") fresh(byId("view"), plansView(cluster, t, orders));
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
  const playing = feed.playing && feed.pace > 0;
  say(byId("play"), playing ? "❚❚" : "▶");
  byId("play").setAttribute("aria-label", playing ? "pause" : "play");
  byId("live").hidden = feed.recorded;
  say(byId("speed"), `${simulated() ? feed.pace : feed.speed}×`);
  const [first, end] = [feed.spans[0]?.[0] ?? cluster.t, Math.max(feed.spans.at(-1)?.[1] ?? 0, feed.live ? cluster.t : 0)];
  const now = feed.now();
  if (document.activeElement !== byId("slider") || feed.live) byId("slider").value = feed.live ? 1000 : (1000 * (now - first)) / Math.max(1, end - first);
  const state = feed.live ? (feed.connected ? "" : "the page's service does not answer") : `${span(Math.max(0, end - now))} ago`;
  say(byId("time"), `${cluster.t ? clock(feed.live ? cluster.t : now) : ""} ${state}`);
}

/** Pauses or plays; of a simulation that is watched live, the simulation. */
const pause = () => (simulated() ? askSimulation(`pace ${feed.pace ? 0 : 1}`) : feed.pause(!feed.playing));
byId("play").addEventListener("click", pause);
byId("speed").addEventListener("click", () => (simulated() ? askSimulation(`pace ${faster(feed.pace || 1)}`) : feed.faster()));
byId("live").addEventListener("click", () => feed.goLive());
byId("slider").addEventListener("change", async () => {
  await feed.kept();
  if (!feed.spans.length) return;
  const [first, end] = [feed.spans[0][0], feed.spans.at(-1)[1]];
  const share = Number(byId("slider").value) / 1000;
  await (share >= 0.999 && !feed.recorded ? feed.goLive() : feed.go(first + share * (end - first)));
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
  const keys = { Escape: () => (chosen ? choose("") : visit("/")), " ": () => event.target === document.body && pause(), l: () => feed.goLive(), r: () => visit("/"), t: () => visit("/table"), p: () => visit("/plans"), "/": () => byId("find").elements.id.focus() };
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
  if (flows() && !document.hidden) river.draw(performance.now(), feed.now());
  if (shown() === "compare" && !document.hidden) comparison.draw();
  requestAnimationFrame(draw);
})();
show();
feed.kept().catch(() => {});
feed.follow();
Object.assign(window, { millrace: { cluster, feed, river, comparison } }); // for tests, and for the curious
