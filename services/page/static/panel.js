// The panel beside the river: is it well, what is slow, what is full, what happened; or one instance, with its orders.

import { age, context, drainEffect, fill, fullest, last, overdue, roleEffect, slowest, STATES, told, totals, verdict } from "./state.js";
import { harm, offer } from "./orders.js";
import { clock, count, el, link, percent, plural, short, span } from "./text.js";

const EVENTS = 12;
const requestOf = (sequence) => sequence.replace(/\.\d+$/, "");

/** The panel's content for the whole cluster. */
export function overview(cluster, t) {
  const [state, sentence] = verdict(cluster, t);
  return [
    el("section", { class: `verdict ${state}` }, el("h2", {}, { well: "All is well", strained: "Under strain", ill: "Something is wrong" }[state]), el("p", {}, sentence)),
    slowSection(cluster, t),
    fullSection(cluster),
    failoverSection(cluster, t),
    el("section", {}, el("h2", {}, "Latest"), latest(cluster, t)),
    simulated(cluster) ? el("section", {}, el("h2", {}, "Do harm, for 10 s"), harm("stop_bus", "", "Stop the bus"), harm("slow_disk", "", "Slow disk of the bus"), el("p", { class: "quiet" }, "Choose an instance to kill it, or its link.")) : null,
  ];
}

const simulated = (cluster) => cluster.c.page?.simulated;

/** Faults of one instance of a simulation. */
function harmSection(name) {
  const kinds = { kill: "Kill", stall: "Stall its engine", partition: "Cut its link", slow_link: "Slow link" };
  return el("section", {}, el("h2", {}, "Do harm"), Object.entries(kinds).map(([verb, label]) => harm(verb, name, label)), el("p", { class: "quiet" }, "All but a kill last 10 s; what was killed starts anew."));
}

function slowSection(cluster, t) {
  const worst = slowest(cluster, t);
  if (!worst) return el("section", {}, el("h2", {}, "Slowest request now"), el("p", { class: "quiet" }, "Nothing is open."));
  const { id, row, why } = worst;
  const forecast = row.e2e ? `open for ${span(age(cluster, row, t))}, forecast ${span(row.e2e)}` : `open for ${span(age(cluster, row, t))}, without a forecast`;
  const late = overdue(cluster, row, t) > 0;
  return el(
    "section",
    {},
    el("h2", {}, "Slowest request now"),
    el("p", {}, link(`/r/${requestOf(id)}`, short(requestOf(id)), { class: "id" }), ` ${STATES[row.st] ?? ""}${row.inst ? ` at ${row.inst}` : ""}; `, el("strong", { class: late ? "late" : "" }, forecast), "."),
    el("p", { class: "quiet" }, why),
  );
}

function fullSection(cluster) {
  const most = fullest(cluster);
  if (!most) return null;
  const { name, row } = most;
  const queue = row.waiting ? `, ${count(row.waiting)} wait` : "";
  return el(
    "section",
    {},
    el("h2", {}, "Fullest instance"),
    el("p", {}, el("button", { type: "button", class: "id", "data-open": name }, name), ` ${percent(fill(row))} of ${count(row.total)} KV blocks, ${row.running} run${queue}`),
    meter(fill(row)),
    el("p", { class: "quiet" }, "Choose any instance to see what a drain of it would do."),
  );
}

function failoverSection(cluster, t) {
  const found = last(cluster, "failover") ?? last(cluster, "dead");
  const heading = el("h2", {}, "Last failover");
  if (!found) return el("section", {}, heading, el("p", { class: "quiet" }, "None since the page began."));
  const { event, near } = found;
  const since = span(t - cluster.t0 - event.t);
  const left = Object.values(cluster.q).filter((row) => row.inst === event.a).length;
  const text = event.k === "failover" ? `${near > 1 ? `${count(near)} requests went on elsewhere within a minute, the last` : "a request went on elsewhere"} after ${event.a || "an instance"} was lost.` : `${told(event)}; ${left ? `${plural(left, "request")} there wait for another instance` : "nothing runs there"}.`;
  return el("section", {}, heading, el("p", {}, el("strong", {}, `${since} ago`), `, at ${clock(cluster.t0 + event.t)}: ${text}`));
}

/** What happened last; where nothing did, what ended last. */
function latest(cluster, t) {
  const all = Object.values(cluster.e);
  if (all.length) return events(cluster, all, t);
  const ended = Object.entries(cluster.f).slice(-8).reverse();
  if (!ended.length) return el("p", { class: "quiet" }, "Nothing has happened yet.");
  const text = (row) => `${row.what} at ${row.inst || "no instance"} after ${span(row.e2e)}${row.said === null ? "" : `, forecast ${span(row.said)}`}`;
  return el("ol", { class: "events" }, ended.map(([id, row]) => el("li", {}, el("time", {}, span(t - cluster.t0 - row.t)), " ", link(`/r/${id}`, `${short(id)} ${text(row)}`))));
}

/** A list of events, newest first. */
export function events(cluster, all, t) {
  const rows = all.slice(-EVENTS).reverse();
  if (!rows.length) return el("p", { class: "quiet" }, "Nothing has happened yet.");
  return el(
    "ol",
    { class: "events" },
    rows.map((event) => el("li", { class: event.k }, el("time", {}, `${span(t - cluster.t0 - event.t)}`), " ", event.q ? link(`/r/${requestOf(event.q)}`, told(event)) : told(event))),
  );
}

/** The panel's content for one instance. */
export function instance(cluster, name, t, order) {
  const row = cluster.i[name];
  const close = el("button", { type: "button", class: "close", "data-open": "", "aria-label": "back to the cluster" }, "✕");
  if (!row) return [el("section", {}, el("h2", {}, name, close), el("p", { class: "quiet" }, "It is not there any more."))];
  const record = cluster.instance[name] ?? {};
  const own = Object.entries(cluster.q).filter(([, each]) => each.inst === name);
  own.sort(([, a], [, b]) => context(cluster, b, t) - context(cluster, a, t));
  const facts = [
    ["state", row.state],
    ["role", row.role],
    ["stage", row.stage || "none"],
    ["batch", `${row.running} of ${record.max_sequences ?? "?"}`],
    ["waiting", count(row.waiting)],
    ["a step", row.step ? span(row.step) : row.running ? "not known yet" : "none now"],
    ["tokens", `${count(row.tps)} a second`],
    ["preemptions", count(row.preempted)],
    ["prefix hits", row.hit === undefined ? "unknown" : percent(row.hit)],
    ["runs on", [record.shape, record.host].filter(Boolean).join(", ") || "unknown"],
  ];
  const effect = drainEffect(cluster, name, t);
  const others = Object.keys(cluster.i).filter((other) => other !== name && cluster.i[other].model === row.model);
  return [
    el("section", {}, el("h2", {}, name, close), el("p", { class: "quiet" }, row.model), meter(fill(row)), el("p", { class: "quiet" }, `${count(row.used)} of ${count(row.total)} KV blocks`),
      el("dl", {}, facts.map(([term, value]) => [el("dt", {}, term), el("dd", {}, value)]))),
    el("section", {}, el("h2", {}, "Its broker"), el("p", {}, row.why || "says nothing of moves."), row.risk > 0.01 ? el("p", { class: "quiet" }, `It may run short of KV memory: ${percent(row.risk)}.`) : null),
    row.state !== "ready" ? null : el("section", {}, el("h2", {}, "What a drain would do"), effect.lines.map((line) => el("p", {}, line))),
    simulated(cluster) ? harmSection(name) : cluster.c.page?.recorded ? null : row.state === "drained"
      ? el("section", {}, el("h2", {}, "Drained"), offer(order, { verb: "back", what: name, label: "Start it again", effect: () => [`${name} starts anew; it takes requests as soon as its engine is ready.`] }))
      : el("section", {}, el("h2", {}, "Orders"),
          effect.last ? null : offer(order, { verb: "drain", what: name, label: "Drain", effect: () => drainEffect(cluster, name, cluster.t).lines }),
          ["both", "prefill", "decode"].filter((role) => role !== row.role).map((role) =>
            offer(order, { verb: "role", what: name, to: role, label: `Make it ${role === "both" ? "do both" : role}`, effect: () => roleEffect(cluster, name, role) }))),
    el("section", {}, el("h2", {}, `${plural(own.length, "request")} there`),
      el("ol", { class: "own" }, own.slice(0, 14).map(([id, each]) => el("li", {}, link(`/r/${requestOf(id)}`, short(requestOf(id)), { class: "id" }),
        ` ${STATES[each.st]}, ${count(context(cluster, each, t))} tokens, ${span(age(cluster, each, t))}`)))),
    others.length ? null : el("p", { class: "quiet" }, "It is the only instance of its model."),
  ];
}

/** One line under the header: sums. */
export function sums(cluster) {
  const all = totals(cluster);
  return `${all.ready} of ${all.instances} ready · ${count(all.running)} run · ${count(all.waiting)} wait · ${count(all.tps)} tok/s · KV ${percent(all.used / Math.max(1, all.total))}`;
}

export function meter(share) {
  const level = el("span", { class: "level", "data-high": share > 0.9 ? "very" : share > 0.75 ? "yes" : "" });
  level.style.width = `${Math.round(100 * share)}%`;
  return el("span", { class: "bar" }, level);
}

