// What the page knows of the cluster, merged from frames, and what follows from it. Pure: no clock, no document.

import { count, percent, plural, short, span } from "./text.js";

/** A whole frame that follows so soon on another one tells of the same run. */
const NEAR_MS = 3000;
const TABLES = ["c", "report", "q", "f", "s", "e", "boundary", "plan", "instance", "cascade"];
/** An instance is silent that has told nothing for so long since its last turn to be asked; turns are TURN_MS for each
 * SAMPLES of them, at least two. */
const SILENT_MS = 1500;
const TURN_MS = 250;
const SAMPLES = 40;
/** Place of an instance that no plan names. */
const OUTSIDE = { stage: "", role: "both" };
/** What an instance that has told nothing, or runs no more, holds. */
const EMPTY = { running: 0, waiting: 0, used: 0, step: 0, tps: 0 };

/** States of a sequence, in words. */
export const STATES = { w: "waits", p: "computes its prompt", r: "decodes", x: "preempted" };

/** What is said of a service whose process is another one. */
export const STARTED_ANEW = "has started anew";

/** An instance takes requests. */
export const takes = (row) => row.state === "ready";

/** @typedef {Record<string, any>} Rows */

export class Cluster {
  constructor() {
    this.t = 0;
    /** @type {Rows} */ this.c = {};
    /** @type {Rows} what instances told last */ this.report = {};
    /** @type {Rows} instances: what they told, and what follows */ this.i = {};
    /** @type {Rows} */ this.q = {};
    /** @type {Rows} */ this.f = {};
    /** @type {Rows} */ this.m = {};
    /** @type {Rows} */ this.s = {};
    /** @type {Rows} */ this.e = {};
    /** @type {Rows} */ this.boundary = {};
    /** @type {Rows} */ this.plan = {};
    /** @type {Rows} */ this.instance = {};
    /** @type {Rows} */ this.cascade = {};
  }

  /** Start of the page's process, unix ms; times in rows count from it. */
  get t0() {
    return this.c.page?.t0 ?? 0;
  }

  /** Merges a frame; returns what came, moved and went with it. A whole frame only tells that it was one. */
  apply(frame) {
    const near = frame.k && this.t && frame.t >= this.t && frame.t - this.t < NEAR_MS && this.t0 === frame.k.c?.page?.t0;
    this.t = frame.t;
    const news = { whole: false, born: [], moved: [], gone: [], events: [], bids: frame.b ?? [] };
    if (near) frame = { t: frame.t, d: this.#difference(frame.k) };
    if (frame.k) {
      for (const name of TABLES) this[name] = frame.k[name] ?? {};
      this.i = {};
      for (const [name, of] of Object.entries(READ)) for (const [key, row] of Object.entries(this[name])) this[name][key] = of(row, null);
      this.#conclude();
      return { ...news, whole: true };
    }
    for (const [name, rows] of Object.entries(frame.d ?? {})) {
      const table = (this[name] ??= {});
      for (const [key, change] of Object.entries(rows)) this.#merge(name, table, key, change, news);
    }
    this.#conclude();
    return news;
  }

  /** What a whole frame changes, so that what moves goes on moving where one follows on another. */
  #difference(whole) {
    const gone = (name) => Object.keys(this[name]).filter((key) => !whole[name]?.[key]).map((key) => [key, null]);
    return Object.fromEntries(TABLES.map((name) => [name, { ...Object.fromEntries(gone(name)), ...whole[name] }]));
  }

  #merge(name, table, key, change, news) {
    const row = table[key];
    if (change === null) {
      if (name === "q" && row) news.gone.push({ id: key, row });
      delete table[key];
      return;
    }
    if (name === "q" && change.inst !== undefined && change.inst !== row?.inst) {
      if (row) news.moved.push({ id: key, from: row.inst, to: change.inst });
      else news.born.push(key);
    }
    if (name in READ) change = READ[name](change, row);
    if (name === "e" && !row) news.events.push(change);
    table[key] = Object.assign(row ?? {}, change);
  }

  /** Stage, role and state of each instance, and migrations under way, from what plans and services say. */
  #conclude() {
    const places = Object.values(this.plan).flatMap((plan) => plan.stages).flatMap((stage) => stage.instances.map((name) => [name, { stage: stage.name, role: stage.roles[name] ?? "both" }]));
    const placed = new Map(places);
    const alive = Object.values(this.s).filter((service) => service.state === "alive");
    /** @type {Map<string, string>} models of instances that an operator drained */
    const drained = new Map(alive.flatMap((service) => service.drained));
    this.m = Object.fromEntries(alive.flatMap((service) => service.migrations).map(([id, a, b, step]) => [id, { a, b, step }]));
    const hits = hitsOf(Object.values(this.f));
    const known = new Set([...Object.keys(this.report), ...Object.keys(this.instance), ...drained.keys()]);
    const silentSince = this.t - this.t0 - SILENT_MS - TURN_MS * Math.max(2, Math.ceil(known.size / SAMPLES));
    for (const name of Object.keys(this.i)) if (!known.has(name)) delete this.i[name];
    for (const name of known) {
      const record = this.instance[name];
      const row = (this.i[name] ??= { ...EMPTY, model: record?.model ?? drained.get(name), total: record?.blocks_total ?? 0 });
      Object.assign(row, this.report[name], placed.get(name) ?? OUTSIDE);
      if (hits.has(name)) row.hit = hits.get(name);
      if (!row.running) row.step = row.tps = 0;
      row.silent = row.sums?.[0] < silentSince;
      row.state = drained.has(name) ? "drained" : stateOf(row, this.s[`worker/${name}`]);
      if (row.state === "dead" || row.state === "drained") Object.assign(row, EMPTY);
    }
  }
}

/** State of an instance by its row and its worker's last presence, which may be of another process than its row. */
function stateOf(row, worker) {
  if (worker?.state === "dead" && !(row.inc > worker.incarnation)) return "dead";
  if (!row.inc || row.inc < worker?.incarnation) return "starting";
  if (row.silent) return "suspect";
  return row.draining || (worker?.state === "leaving" && row.inc === worker.incarnation) ? "draining" : "ready";
}

/** Share of prompt tokens that were in the prefix cache of each instance, of requests that ended there. */
function hitsOf(requests) {
  const sums = new Map();
  for (const { inst, cached, prompt } of requests) {
    const [had, all] = sums.get(inst) ?? [0, 0];
    sums.set(inst, [had + cached, all + prompt]);
  }
  return new Map([...sums].map(([name, [had, all]]) => [name, had / Math.max(1, all)]));
}

/** What an instance tells; from its sums (when, ms; busy ms; steps; tokens) follow a step's time and tokens a second. */
function reported(change, row) {
  if (!change.sums) return change;
  const [at, busy, steps, tokens] = change.sums;
  const [before, wasBusy, wasSteps, wasTokens] = row?.sums ?? [0, 0, Infinity, 0];
  if (steps <= wasSteps) return change; // nothing to compare with, or a long step
  return { ...change, step: (busy - wasBusy) / (steps - wasSteps), tps: Math.round((1000 * (tokens - wasTokens)) / (at - before)) };
}

/** The end of a request, from its message. */
function ended(row) {
  const ms = (ns) => (ns === null ? null : ns / 1e6);
  const out = row.output_tokens.reduce((sum, n) => sum + n, 0);
  return { t: row.t, model: row.model, what: row.outcome, inst: row.instances.at(-1) ?? "", prompt: row.prompt_tokens, cached: row.cached_tokens, out, e2e: ms(row.e2e_ns), ttft: ms(row.ttft_ns), said: ms(row.predicted_e2e_ns), moves: row.migrations, cont: row.continuations };
}

/** An event, from its message: what (`k`), of which request (`q`), from where (`a`) to where (`b`), and how in words. */
function happened(row) {
  const { t } = row;
  switch (row.k) {
    case "DecisionMade":
      return { t, k: "failover", q: row.sequence, a: row.source, b: row.chosen, n: row.reason };
    case "MigrationFinished": {
      const way = { t, q: row.sequence, a: row.source, b: row.target, r: row.reason, ms: (row.cost.frozen_ns ?? 0) / 1e6 };
      return row.outcome === "moved" ? { ...way, k: "move", n: row.note } : { ...way, k: "unmoved", n: `${row.refusal || row.outcome} ${row.detail}` };
    }
    case "RequestFinished":
      return { t, k: row.outcome, q: row.request, a: row.instances.at(-1) ?? "", n: row.detail };
    case "ServicePresence":
      return { t, k: row.state === "dead" ? "dead" : "state", a: row.name, n: { dead: `its process, a ${row.role}, ended`, leaving: "leaves", alive: STARTED_ANEW }[row.state] };
    case "Plan":
      return { t, k: "plan", a: row.model, n: `plan ${row.epoch}: ${row.reason}` };
    case "ProvisioningDecided":
      return { t, k: "scale", a: row.model, n: `${row.action} ${row.count} by ${row.strategy}: ${row.reason}` };
    default:
      return { t, k: "order", n: row.text, r: row.code === null ? "" : row.code ? `failed (${row.code})` : "done" };
  }
}

/** Tables of messages, and what is kept of each. */
const READ = { report: reported, f: ended, e: happened };

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
  if (!row.inst || !at) return row.inst ? `${row.inst} is not heard of` : `No instance could take it: ${row.why ?? ""}.`;
  const blocks = `${percent(fill(at))} of the KV blocks of ${row.inst} are in use`;
  if (row.st === "w") return `It waits at ${row.inst}; ${at.waiting > 1 ? `${count(at.waiting)} wait and ` : ""}${at.running} run there, and ${blocks}.`;
  if (row.st === "x") return `It was preempted: ${blocks}, and it will be computed again when there is room.`;
  if (row.st === "p") return `Its prompt of ${count(row.prompt)} tokens is being computed at ${row.inst}, in a batch of ${at.running}.`;
  const had = [];
  if (row.cont) had.push(`it lost its instance ${row.cont === 1 ? "once" : `${row.cont} times`} and was continued`);
  if (row.exp && tokens(cluster, row, t) > 1.25 * row.exp)
    had.push(`it has ${count(tokens(cluster, row, t))} tokens where ${count(row.exp)} were expected`);
  if (at.step) had.push(`a step of ${row.inst} takes ${span(at.step)} with a batch of ${at.running}`);
  if (row.moves) had.push(`it moved ${row.moves === 1 ? "once" : `${row.moves} times`}`);
  const text = had.join("; ") || `it decodes at ${row.inst}, ${count(tokens(cluster, row, t))} of at most ${count(row.max)} tokens so far`;
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

/** How a share changes, in words. */
const change = (from, to) => (percent(from) === percent(to) ? (to < 0.005 ? "stay below 1 %" : `stay at ${percent(to)}`) : `go from ${percent(from)} to ${percent(to)}`);

/** What a drain of an instance would do, from what is known now: sentences, and whether it is the last of its model. */
export function drainEffect(cluster, name, t) {
  const row = cluster.i[name];
  const peers = Object.entries(cluster.i).filter(([other, each]) => other !== name && each.model === row.model && takes(each));
  const own = Object.values(cluster.q).filter((each) => each.inst === name);
  const running = own.filter((each) => each.st === "r" || each.st === "p").length;
  if (!peers.length) {
    const fate = own.length ? `Its ${plural(own.length, "request")} have nowhere to go and would fail.` : "";
    return { last: true, lines: [`${name} is the last ready instance of ${row.model}: the order is refused. ${fate}`] };
  }
  const left = `${row.model} keeps ${plural(peers.length, "ready instance")}.`;
  if (!own.length) return { last: false, lines: [`Nothing runs or waits there: it stops at once, and nothing moves. ${left}`] };
  const stage = peers.filter(([, each]) => each.stage === row.stage);
  const takers = stage.length ? stage : peers;
  const sum = (field) => takers.reduce((total, [, each]) => total + each[field], 0);
  const total = Math.max(1, sum("total"));
  const after = (sum("used") + row.used) / total;
  const length = own.reduce((tokens, each) => tokens + context(cluster, each, t), 0);
  const batch = (extra) => Math.round((sum("running") + extra) / takers.length);
  const lines = [
    `${plural(running, "running request")} with ${count(length)} tokens of KV move to ${plural(takers.length, "instance")}` +
      `${row.stage && stage.length ? ` of stage ${row.stage}` : ""}${own.length > running ? `; ${own.length - running} that wait there are placed anew` : ""}.`,
    `Their KV blocks in use ${change(sum("used") / total, after)}, their mean batch ${batch(0) === batch(running) ? `stays at ${batch(0)}` : `goes from ${batch(0)} to ${batch(running)}`}.`,
    left,
  ];
  if (after > 0.95) lines.push("That is more than they can hold: requests would wait, or be preempted.");
  return { last: false, lines };
}

/** What one instance of a model more (1) or less (-1) would do: sentences. */
export function scaleEffect(cluster, model, more, t) {
  const own = Object.entries(cluster.i).filter(([, row]) => row.model === model && takes(row));
  if (more < 0) {
    if (own.length < 2) return [`${model} has no other instance that is ready: the order is refused.`];
    const least = own.reduce((a, b) => (b[1].used < a[1].used ? b : a));
    return [`The one with the least KV to move goes, now ${least[0]}.`, ...drainEffect(cluster, least[0], t).lines];
  }
  const sum = (field) => own.reduce((total, [, row]) => total + row[field], 0);
  const [used, total, batch, n] = [sum("used"), Math.max(1, sum("total")), sum("running") + sum("waiting"), Math.max(1, own.length)];
  const lines = [`A spare instance of ${model} starts, where one is left: else the order is refused, with the reason.`];
  if (!batch) return [...lines, `Nothing runs now: ${model} has then ${plural(own.length + 1, "ready instance")} for what comes.`];
  return [
    ...lines,
    `When it is ready, ${model}'s KV blocks in use ${change(used / total, used / total / (1 + 1 / n))} and its mean batch goes from ${Math.round(batch / n)} to ${Math.round(batch / (own.length + 1))}, as requests end and come.`,
  ];
}

/** What another role would do to an instance, in sentences. */
export function roleEffect(cluster, name, role) {
  const row = cluster.i[name];
  const running = Object.values(cluster.q).filter((each) => each.inst === name && each.st === "r").length;
  const moved = running ? `the ${plural(running, "request")} that decode there move away` : "none decodes there now, so nothing moves";
  const first = {
    both: `${name} takes new requests and decodes them.`,
    prefill: `${name} takes new requests and hands each over after its first token; ${moved}.`,
    decode: `${name} takes no new requests while others can; it goes on with those handed to it.`,
  }[role];
  const kept = Object.entries(cluster.i).filter(([other, each]) => other !== name && each.stage === row.stage && each.model === row.model && each.role !== role);
  const needs = role === "prefill" ? "decode" : "prefill";
  return role !== "both" && !kept.length ? [first, `No other instance of its stage could ${needs}: the coordinator refuses it.`] : [first];
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
  if (!sums.ready) return ["strained", "No instance is ready."];
  const open = Object.values(cluster.q);
  const late = open.filter((row) => (overdue(cluster, row, t) ?? -1) > Math.max(2000, row.e2e)).length;
  if (late > 3 && late > open.length / 10) return ["strained", `${late} of ${open.length} requests take more than twice as long as forecast.`];
  if (sums.waiting > sums.running / 2 && sums.waiting > 4) return ["strained", `${count(sums.waiting)} requests wait while ${count(sums.running)} run.`];
  if (sums.used > 0.92 * sums.total) return ["strained", `${percent(sums.used / sums.total)} of all KV blocks are in use.`];
  const all = sums.instances === 1 ? "The only instance" : `All ${count(sums.instances)} instances`;
  const ready = `${sums.ready < sums.instances ? `${count(sums.ready)} of ${plural(sums.instances, "instance")}` : all} ${sums.ready === 1 ? "is" : "are"} ready`;
  return ["well", `${ready}; ${sums.running ? `${plural(sums.running, "request")} run` : "nothing runs"}.`];
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
      return `${event.a} ${event.n}`;
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
  for (const plan of Object.values(cluster.plan)) {
    for (const stage of plan.stages) {
      const instances = stage.instances.filter((name) => cluster.i[name]);
      instances.forEach((name) => placed.add(name));
      const cut = cluster.boundary[`${plan.model}/${stage.name}`];
      const to = cut && cut.plan_epoch >= plan.boundary_epoch && stage.length_max !== null ? cut.length : stage.length_max;
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
