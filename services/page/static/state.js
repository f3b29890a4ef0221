// What the page knows of the cluster, merged from frames, and what follows from it. Pure: no clock, no document.

import { count, percent, plural, short, span } from "./text.js";

/** A whole frame that follows so soon on another one tells of the same run. */
const NEAR_MS = 3000;
const TABLES = ["c", "i", "q", "f", "m", "s", "p", "e"];

/** States of a sequence, in words. */
export const STATES = { w: "waits", p: "computes its prompt", r: "decodes", x: "preempted" };

/** An instance takes requests. */
export const takes = (row) => row.state === "ready";

/** @typedef {Record<string, any>} Rows */

export class Cluster {
  constructor() {
    this.t = 0;
    /** @type {Rows} */ this.c = {};
    /** @type {Rows} */ this.i = {};
    /** @type {Rows} */ this.q = {};
    /** @type {Rows} */ this.f = {};
    /** @type {Rows} */ this.m = {};
    /** @type {Rows} */ this.s = {};
    /** @type {Rows} */ this.p = {};
    /** @type {Rows} */ this.e = {};
  }

  /** Start of the page's process, unix ms; times in rows count from it. */
  get t0() {
    return this.c.page?.t0 ?? 0;
  }

  /** Merges a frame; returns what came, moved and went with it. A whole frame only tells that it was one. */
  apply(frame) {
    const near = frame.k && this.t && frame.t >= this.t && frame.t - this.t < NEAR_MS && this.t0 === frame.k.c?.page?.t0;
    this.t = frame.t;
    const news = { whole: false, born: [], moved: [], gone: [], events: [], bids: frame.b ?? [], touched: new Set() };
    if (near) frame = { t: frame.t, d: this.#difference(frame.k) };
    if (frame.k) {
      for (const name of TABLES) this[name] = frame.k[name] ?? {};
      return { ...news, whole: true };
    }
    for (const [name, rows] of Object.entries(frame.d ?? {})) {
      const table = (this[name] ??= {});
      for (const [key, change] of Object.entries(rows)) this.#merge(name, table, key, change, news);
    }
    return news;
  }

  /** What a whole frame changes, so that what moves goes on moving where one follows on another. */
  #difference(whole) {
    const gone = (name) => Object.keys(this[name]).filter((key) => !whole[name]?.[key]).map((key) => [key, null]);
    return Object.fromEntries(TABLES.map((name) => [name, { ...Object.fromEntries(gone(name)), ...whole[name] }]));
  }

  #merge(name, table, key, change, news) {
    const row = table[key];
    if (name === "i" || name === "p") news.touched.add(name === "i" ? key : "plan");
    if (change === null) {
      if (name === "q" && row) news.gone.push({ id: key, row });
      delete table[key];
      return;
    }
    if (name === "q" && change.inst !== undefined && change.inst !== row?.inst) {
      if (row) news.moved.push({ id: key, from: row.inst, to: change.inst });
      else news.born.push(key);
    }
    if (name === "e" && !row) news.events.push(change);
    table[key] = Object.assign(row ?? {}, change);
  }
}

/** Output tokens of a sequence at a time (unix ms): as told, and counted on by its rate. */
export function tokens(cluster, row, t) {
  const [told, at, rate] = row.o ?? [0, 0, 0];
  const since = row.st === "r" ? Math.max(0, t - cluster.t0 - at) / 1000 : 0;
  return Math.round(Math.min(told + rate * Math.min(since, 5), row.max || Infinity));
}

/** Length of its context, tokens. */
export const context = (cluster, row, t) => (row.prompt ?? 0) + tokens(cluster, row, t);

/** How long it has been open, ms. */
export const age = (cluster, row, t) => Math.max(0, t - cluster.t0 - row.at);

/** How far it is past its forecast end, ms; below 0 before it; null without a forecast. */
export const overdue = (cluster, row, t) => (row.e2e ? age(cluster, row, t) - row.e2e : null);

/** KV blocks in use, 0 to 1. */
export const fill = (row) => (row.total ? row.used / row.total : 0);

/** The open sequence that is furthest past its forecast; without forecasts the oldest. Null where none is open. */
export function slowest(cluster, t) {
  let worst = null;
  for (const [id, row] of Object.entries(cluster.q)) {
    const late = overdue(cluster, row, t) ?? age(cluster, row, t);
    if (!worst || late > worst.late) worst = { id, row, late };
  }
  return worst && { ...worst, why: whySlow(cluster, worst.row, t) };
}

/** Why a sequence is where it is, in a sentence. */
export function whySlow(cluster, row, t) {
  const at = cluster.i[row.inst];
  if (!row.inst || !at) return row.inst ? `${row.inst} is not heard of` : `no instance could take it: ${row.why ?? ""}`;
  const blocks = `${percent(fill(at))} of the KV blocks of ${row.inst} are in use`;
  if (row.st === "w") return `It waits at ${row.inst} with ${count(at.waiting)} others; ${at.running} run there, and ${blocks}.`;
  if (row.st === "x") return `It was preempted: ${blocks}, and it will be computed again when there is room.`;
  if (row.st === "p") return `Its prompt of ${count(row.prompt)} tokens is being computed at ${row.inst}, in a batch of ${at.running}.`;
  const had = [];
  if (row.cont) had.push(`it lost its instance ${row.cont === 1 ? "once" : `${row.cont} times`} and was continued`);
  if (row.exp && tokens(cluster, row, t) > 1.25 * row.exp)
    had.push(`it has ${count(tokens(cluster, row, t))} tokens where ${count(row.exp)} were expected`);
  if (at.step) had.push(`a step of ${row.inst} takes ${span(at.step)} with a batch of ${at.running}`);
  if (row.moves) had.push(`it moved ${row.moves === 1 ? "once" : `${row.moves} times`}`);
  const text = had.join("; ") || `it decodes at ${row.inst}`;
  return `${text[0].toUpperCase()}${text.slice(1)}.`;
}

/** The instance with the least KV left; more waiting requests decide between equals. Null where there is none. */
export function fullest(cluster) {
  let most = null;
  for (const [name, row] of Object.entries(cluster.i)) {
    const load = fill(row) + Math.min(1, row.waiting / 1e4);
    if (row.state !== "dead" && row.state !== "drained" && (!most || load > most.load)) most = { name, row, load };
  }
  return most;
}

/** The last event of some kinds, and how many there were of its kind within a minute before it. Null where none is kept. */
export function last(cluster, ...kinds) {
  const found = Object.values(cluster.e).filter((event) => kinds.includes(event.k));
  const event = found.at(-1);
  return event ? { event, near: found.filter((each) => each.k === event.k && event.t - each.t < 60_000).length } : null;
}

/** What a drain of an instance would do, from what is known now: sentences, and whether it is the last of its model. */
export function drainEffect(cluster, name, t) {
  const row = cluster.i[name];
  const peers = Object.entries(cluster.i).filter(([other, each]) => other !== name && each.model === row.model && takes(each));
  const own = Object.values(cluster.q).filter((each) => each.inst === name);
  const running = own.filter((each) => each.st === "r" || each.st === "p").length;
  const length = own.reduce((sum, each) => sum + context(cluster, each, t), 0);
  if (!peers.length) {
    const fate = own.length ? `Its ${plural(own.length, "request")} have nowhere to go and would fail.` : "";
    return { last: true, lines: [`${name} is the last ready instance of ${row.model}: the order is refused. ${fate}`] };
  }
  const stage = peers.filter(([, each]) => each.stage === row.stage);
  const takers = stage.length ? stage : peers;
  const sum = (field) => takers.reduce((total, [, each]) => total + each[field], 0);
  const [used, total] = [sum("used"), sum("total")];
  const after = (used + row.used) / Math.max(1, total);
  const lines = [
    own.length
      ? `${plural(running, "running request")} with ${count(length)} tokens of KV move to ${plural(takers.length, "instance")}` +
        `${stage.length ? ` of stage ${row.stage}` : ""}${own.length > running ? `; ${own.length - running} that wait there are placed anew` : ""}.`
      : "Nothing runs there: it stops at once.",
    `Their KV blocks go from ${percent(used / Math.max(1, total))} to ${percent(after)} in use, ` +
      `their mean batch from ${Math.round(sum("running") / takers.length)} to ${Math.round((sum("running") + running) / takers.length)}.`,
    `${row.model} keeps ${plural(peers.length, "ready instance")}.`,
  ];
  if (after > 0.95) lines.push("That is more than they can hold: requests would wait, or be preempted.");
  return { last: false, lines };
}

/** What one instance of a model more (1) or less (-1) would do: sentences. */
export function scaleEffect(cluster, model, change, t) {
  const own = Object.entries(cluster.i).filter(([, row]) => row.model === model && takes(row));
  if (change < 0) {
    const least = own.reduce((a, b) => (b[1].used < a[1].used ? b : a), own[0]);
    return own.length < 2 ? [`${model} has no other instance: the order is refused.`] : [`The one with the least KV to move goes, now ${least[0]}.`, ...drainEffect(cluster, least[0], t).lines];
  }
  const sum = (field) => own.reduce((total, [, row]) => total + row[field], 0);
  const [used, total, batch] = [sum("used"), sum("total"), sum("running") + sum("waiting")];
  const more = total * (1 + 1 / Math.max(1, own.length));
  return [
    `A spare instance of ${model} starts, where one is left: else the order is refused, with the reason.`,
    `When it is ready, KV blocks in use go from ${percent(used / Math.max(1, total))} to ${percent(used / Math.max(1, more))} of ${model}'s, and the mean batch from ${Math.round(batch / Math.max(1, own.length))} to ${Math.round(batch / (own.length + 1))}, as requests end and come.`,
  ];
}

/** Sums over instances. */
export function totals(cluster) {
  const sums = { instances: 0, ready: 0, running: 0, waiting: 0, tps: 0, used: 0, total: 0 };
  for (const row of Object.values(cluster.i)) {
    sums.instances += 1;
    sums.ready += takes(row) ? 1 : 0;
    for (const name of ["running", "waiting", "tps", "used", "total"]) sums[name] += row[name] || 0;
  }
  return sums;
}

/** Whether all is well: `well`, `strained` or `ill`, and why in a sentence. */
export function verdict(cluster, t) {
  if (cluster.c.page?.connected === false) return ["ill", "The page has lost the NATS server; what you see is what it knew last."];
  const sums = totals(cluster);
  const gone = Object.entries(cluster.i).filter(([, row]) => row.state === "dead" || row.state === "suspect");
  const troubled = Object.entries(cluster.s).find(([, row]) => row.trouble || row.state === "dead");
  if (!sums.instances) return ["strained", "No instance is heard of yet."];
  if (gone.length) return ["ill", `${gone.slice(0, 3).map(([name, row]) => `${name} is ${row.state}`).join(", ")}${gone.length > 3 ? ` and ${gone.length - 3} more` : ""}.`];
  if (troubled) return ["ill", `${troubled[0]}: ${troubled[1].trouble || troubled[1].state}.`];
  const open = Object.values(cluster.q);
  const late = open.filter((row) => (overdue(cluster, row, t) ?? -1) > Math.max(2000, row.e2e)).length;
  if (late > 3 && late > open.length / 10) return ["strained", `${late} of ${open.length} requests take more than twice as long as forecast.`];
  if (sums.waiting > sums.running / 2 && sums.waiting > 4) return ["strained", `${count(sums.waiting)} requests wait while ${count(sums.running)} run.`];
  if (sums.used > 0.92 * sums.total) return ["strained", `${percent(sums.used / sums.total)} of all KV blocks are in use.`];
  return ["well", `All ${plural(sums.ready, "instance")} ${sums.ready === 1 ? "is" : "are"} ready; ${sums.running ? `${plural(sums.running, "request")} run` : "nothing runs"}.`];
}

/** An event in a sentence. */
export function told(event) {
  const request = event.q ? short(event.q) : "";
  switch (event.k) {
    case "failover":
      return `${request} goes on at ${event.b || "no instance yet"} after ${event.a || "its instance"} was lost: ${event.n}`;
    case "move":
      return `${request} moved from ${event.a} to ${event.b} (${event.r}), no token for ${span(event.ms)}${event.n ? `: ${event.n}` : ""}`;
    case "unmoved":
      return `${request} did not move from ${event.a} (${event.r}): ${event.n}`;
    case "dead":
      return `${event.a} died (${event.n})`;
    case "state":
      return `${event.a} is ${event.r} (${event.n})`;
    case "order":
      return `operator: ${event.n} ${event.r}`;
    case "plan":
    case "scale":
      return `${event.a}: ${event.n}`;
    default:
      return `${request} ${event.k}${event.a ? ` at ${event.a}` : ""}${event.n ? `: ${event.n}` : ""}`;
  }
}

/** Stages of each model with their instances, in the plan's order; instances outside of any plan in one of their own. */
export function river(cluster) {
  const models = new Map();
  const of = (name) => models.get(name) ?? models.set(name, { name, stages: [] }).get(name);
  const placed = new Set();
  for (const plan of Object.values(cluster.p)) {
    if (!plan.stages || !plan.epoch) continue;
    for (const stage of plan.stages) {
      const instances = stage.instances.filter((name) => cluster.i[name]);
      instances.forEach((name) => placed.add(name));
      const cut = cluster.p[`${plan.model}/${stage.name}`]?.boundary;
      const to = cut && cut.epoch >= plan.boundary_epoch && stage.length_max !== null ? cut.length : stage.length_max;
      of(plan.model).stages.push({ name: stage.name, from: stage.length_min, to, instances, alone: plan.stages.length === 1 });
    }
  }
  for (const { stages } of models.values()) stages.forEach((stage, n) => n && (stage.from = stages[n - 1].to ?? stage.from));
  const outside = Object.keys(cluster.i).filter((name) => !placed.has(name));
  for (const name of outside) {
    const model = of(cluster.i[name].model);
    let rest = model.stages.find((stage) => stage.name === "");
    if (!rest) model.stages.push((rest = { name: "", from: 0, to: null, instances: [], alone: false }));
    rest.instances.push(name);
  }
  const natural = new Intl.Collator("en", { numeric: true }).compare;
  for (const model of models.values()) {
    if (model.stages.length === 1) model.stages[0].alone = true;
    model.stages.forEach((stage) => stage.instances.sort(natural));
  }
  return [...models.values()].sort((a, b) => natural(a.name, b.name));
}
