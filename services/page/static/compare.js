// Two runs side by side: the second follows the first one's clock, and what differs is marked.

import { Feed } from "./feed.js";
import { River } from "./river.js";
import { Cluster, fill, totals } from "./state.js";
import { count, el, link, percent, short, span, table } from "./text.js";

const REQUESTS = 8;
/** Below this share two figures are the same. */
const SAME = 0.05;

export class Comparison {
  /** `left`: cluster, feed and river of the first run; `root`: where the second one's river goes. */
  constructor(left, root, open) {
    this.left = left;
    this.cluster = new Cluster();
    this.river = new River(root, this.cluster, open);
    this.feed = new Feed({ take: (frame) => this.river.take(this.cluster.apply(frame), performance.now()), changed: () => {}, key: left.feed.key });
    this.feed.live = this.feed.playing = false;
    this.feed.run = -1;
    /** @type {any[][]} ids and ends of both runs */ this.ended = [[], []];
  }

  /** Compares these two runs, by number. */
  async choose(a, b, names) {
    const { feed, river } = this.left;
    river.call(names[a]);
    this.river.call(names[b]);
    if (feed.run === a && this.feed.run === b) return;
    if (feed.run !== a) {
      const since = this.#elapsed();
      feed.run = a;
      await feed.go((await feed.kept())[0][0]); // its clock may be another one
      if (since > 0) await feed.go(this.#begin(this.left.cluster) + since);
    }
    if (this.feed.run !== b) {
      this.feed.run = b;
      this.feed.segment = 0;
      await this.feed.kept();
      await this.feed.show(this.feed.spans[0]?.[0] ?? 0);
    }
    this.ended = await Promise.all([feed, this.feed].map((each) => each.ended()));
  }

  #begin = (cluster) => cluster.c.page?.begin ?? cluster.t0;

  /** Time since the load of the first run began, ms. */
  #elapsed = () => this.left.feed.now() - this.#begin(this.left.cluster);

  /** Draws the second run at the time of the first. */
  draw() {
    const t = this.#begin(this.cluster) + this.#elapsed();
    if (this.feed.spans.length) this.feed.show(t);
    this.river.draw(performance.now(), t);
  }

  /** Marks cards that differ, and returns the panel's content. */
  panel(runs) {
    const clusters = [this.left.cluster, this.cluster];
    this.left.river.marks = differences(clusters[0], clusters[1]);
    this.river.marks = differences(clusters[1], clusters[0]);
    const since = this.#elapsed();
    const done = this.ended.map((rows, n) => rows.filter(([, row]) => row.t + clusters[n].t0 - this.#begin(clusters[n]) <= since));
    return [
      el("section", {}, el("h2", {}, "Two runs"), this.#select("a", "left", runs, this.left.feed.run), this.#select("b", "right", runs, this.feed.run)),
      el("section", {}, figures("So far", done.map((rows) => ended(rows.map(([, row]) => row))))),
      el("section", {}, figures("Now", clusters.map(present))),
      el("section", {}, el("h2", {}, "Requests that differ most"), apart(done[0], new Map(done[1]))),
    ];
  }

  #select(name, where, runs, chosen) {
    const pick = (event) => {
      const address = new URLSearchParams(location.search);
      address.set(name, event.target.value);
      history.pushState(null, "", `/compare?${address}`);
      dispatchEvent(new PopStateEvent("popstate"));
    };
    return el("label", {}, `${where} `, el("select", { change: pick, "data-run": name }, runs.map((run, n) => el("option", { value: n, selected: n === chosen }, run))));
  }
}

/** What marks each instance beside that of the same name in the other run; none where they are alike. */
function differences(cluster, other) {
  const marks = new Map();
  for (const [name, row] of Object.entries(cluster.i)) {
    const text = different(row, other.i[name]);
    if (text) marks.set(name, text);
  }
  return marks;
}

function different(row, twin) {
  if (!twin) return "only here";
  if (row.state !== twin.state) return `${row.state}, not ${twin.state}`;
  const waiting = row.waiting - twin.waiting;
  if (Math.abs(waiting) > 2) return `${signed(waiting)} wait`;
  const used = 100 * (fill(row) - fill(twin));
  return Math.abs(used) >= 10 ? `${signed(Math.round(used))} % KV` : "";
}

const signed = (n) => (n > 0 ? `+${count(n)}` : `−${count(-n)}`);

/** Figures of requests that ended: name, value, text, and whether less is better (1), more (-1), or neither (0). */
function ended(rows) {
  const done = rows.filter((row) => row.what === "completed");
  const quantile = (values, share) => values.toSorted((a, b) => a - b)[Math.floor(share * (values.length - 1))];
  const [first, end] = [done.map((row) => row.ttft).filter((ms) => ms !== null), done.map((row) => row.e2e)];
  const each = done.filter((row) => row.out > 1 && row.ttft !== null).map((row) => (row.e2e - row.ttft) / (row.out - 1));
  const sum = (name) => rows.reduce((total, row) => total + row[name], 0);
  return [
    ["completed", done.length, count(done.length), -1],
    ["failed", rows.length - done.length, count(rows.length - done.length), 1],
    ["TTFT, median", quantile(first, 0.5), span(quantile(first, 0.5)), 1],
    ["TTFT, p99", quantile(first, 0.99), span(quantile(first, 0.99)), 1],
    ["TPOT, median", quantile(each, 0.5), span(quantile(each, 0.5)), 1],
    ["end to end, median", quantile(end, 0.5), span(quantile(end, 0.5)), 1],
    ["end to end, p99", quantile(end, 0.99), span(quantile(end, 0.99)), 1],
    ["moves", sum("moves"), count(sum("moves")), 0],
    ["failovers", sum("cont"), count(sum("cont")), 0],
  ];
}

function present(cluster) {
  const all = totals(cluster);
  return [
    ["ready", all.ready, count(all.ready), -1],
    ["run", all.running, count(all.running), 0],
    ["wait", all.waiting, count(all.waiting), 1],
    ["tokens a second", all.tps, count(all.tps), -1],
    ["KV in use", all.used, percent(all.used / Math.max(1, all.total)), 0],
  ];
}

/** @param {any[]} sides figures of both */
function figures(caption, sides) {
  const [left, right] = sides;
  const rows = left.map(([name, a, textA, better], n) => {
    const [, b, textB] = right[n];
    const same = a === undefined || b === undefined || Math.abs(b - a) <= SAME * Math.max(Math.abs(a), Math.abs(b));
    const change = same ? "" : a ? `${signed(Math.round((100 * (b - a)) / a))} %` : signed(b - a);
    return [name, textA, textB, el("strong", { class: same || !better ? "quiet" : (b - a) * better < 0 ? "better" : "worse" }, change)];
  });
  return table(caption, ["", "left", "right", "change"], rows);
}

/** Requests of both runs whose ends are furthest apart. */
function apart(rows, others) {
  const both = rows.filter(([id]) => others.has(id)).map(([id, row]) => ({ id, row, other: others.get(id) }));
  const worst = both.sort((a, b) => Math.abs(b.other.e2e - b.row.e2e) - Math.abs(a.other.e2e - a.row.e2e)).slice(0, REQUESTS);
  if (!worst.length) return el("p", { class: "quiet" }, "None has ended in both.");
  return el("ol", { class: "own" }, worst.map(({ id, row, other }) =>
    el("li", {}, link(`/r/${id}`, short(id), { class: "id" }), ` ${span(row.e2e)} at ${row.inst || "no instance"}, `, el("strong", { class: other.e2e < row.e2e ? "better" : "worse" }, span(other.e2e)), ` at ${other.inst || "no instance"}`)));
}
