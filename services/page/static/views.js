// Tables of everything, and the plans.

import { age, context, fill, overdue, river, scaleEffect, STARTED_ANEW, STATES } from "./state.js";
import { count, el, link, percent, plural, short, span, svg, table } from "./text.js";
import { offer } from "./orders.js";
import { events } from "./panel.js";

const REQUESTS = 100;
const requestOf = (sequence) => sequence.replace(/\.\d+$/, "");

/** Everything as tables. */
export function tablesView(cluster, t) {
  const natural = new Intl.Collator("en", { numeric: true }).compare;
  const instances = Object.entries(cluster.i)
    .sort(([a], [b]) => natural(a, b))
    .map(([name, row]) => [el("button", { type: "button", class: "id", "data-open": name }, name), row.model, row.stage, row.role, row.state, row.running, row.waiting, percent(fill(row)), row.step ? span(row.step) : "", row.tps, row.preempted ?? 0, row.hit === undefined ? "" : percent(row.hit)]);
  const late = (row) => overdue(cluster, row, t) ?? -Infinity;
  const open = Object.entries(cluster.q).sort(([, a], [, b]) => late(b) - late(a) || a.at - b.at);
  const requests = open.slice(0, REQUESTS).map(([id, row]) => [link(`/r/${requestOf(id)}`, short(requestOf(id)), { class: "id", title: id }), row.inst || "none", STATES[row.st], context(cluster, row, t), span(age(cluster, row, t)), row.e2e ? span(row.e2e) : "none", row.moves, row.cont]);
  const ended = Object.entries(cluster.f).reverse().map(([id, row]) => [link(`/r/${id}`, short(id), { class: "id", title: id }), row.model, row.what, row.out, row.ttft === null ? "none" : span(row.ttft), span(row.e2e), row.said === null ? "none" : span(row.said), row.inst, row.moves, row.cont]);
  const moving = Object.entries(cluster.m).map(([id, row]) => [short(id), row.a, row.b || "?", row.step]);
  const services = Object.entries(cluster.s).sort().map(([name, row]) => [name, row.state, row.trouble]);
  return [
    table("Instances", ["instance", "model", "stage", "role", "state", "run", "wait", "KV", "step", "tok/s", "preempted", "prefix hits"], instances),
    table(`Open requests, those furthest past their forecast first${open.length > REQUESTS ? ` (${REQUESTS} of ${count(open.length)})` : ""}`, ["request", "instance", "state", "tokens", "open for", "forecast", "moves", "failovers"], requests),
    table("Requests that ended last", ["request", "model", "outcome", "tokens", "TTFT", "end to end", "forecast", "instance", "moves", "failovers"], ended),
    moving.length ? table("Migrations under way", ["sequence", "from", "to", "step"], moving) : null,
    table("Services", ["service", "state", "trouble"], services),
  ].filter(Boolean);
}

/** Plans: stages with their cuts and why, roles, cascades, and what changed. */
export function plansView(cluster, t, orders) {
  const shapes = new Map(river(cluster).map((model) => [model.name, model]));
  const plans = Object.entries(cluster.plan).map(([name, plan]) => planSection(cluster, name, plan, shapes.get(name), orders));
  const cascades = Object.entries(cluster.cascade).map(([name, plan]) => cascadeSection(name, plan));
  const kinds = new Set(["plan", "scale", "order", "state"]);
  const changes = Object.values(cluster.e).filter((event) => kinds.has(event.k));
  const nothing = plans.length ? null : el("p", { class: "quiet" }, cluster.c.page?.recorded ? "This run has no plan." : "No plan is known yet: the coordinator writes one when instances are there.");
  const file = cluster.c.page?.folder ? el("section", {}, el("h2", {}, "The cluster's file"), el("p", {}, "What runs here, as a file: change it, see what would become of each process, and apply it."), el("button", { type: "button", class: "order", "data-verb": "apply", click: orders.edit }, "Change the cluster")) : null;
  return [nothing, changeSection(cluster, t), ...plans, ...cascades, file, el("section", {}, el("h2", {}, "What changed"), events(cluster, changes, t))].filter(Boolean);
}

function planSection(cluster, name, plan, shape, orders) {
  const stages = shape?.stages ?? [];
  const limit = Math.max(...stages.map((stage) => stage.from * 1.6), 1024, ...stages.flatMap((stage) => stage.instances.map((each) => cluster.instance[each]?.max_model_len ?? 0)));
  const scale = (tokens) => (100 * Math.log2(1 + tokens / 16)) / Math.log2(1 + limit / 16);
  const bar = el("div", { class: "ranges", role: "img", "aria-label": stages.map((stage) => `${stage.name || "outside"}: ${stage.from} to ${stage.to ?? "any"} tokens`).join("; ") });
  bar.append(...stages.map((stage, n) => {
    const part = el("span", { class: `range hue${n % 6}` }, `${stage.name || "outside"} · ${stage.instances.length}`);
    part.style.left = `${scale(stage.from)}%`;
    part.style.width = `${scale(stage.to ?? limit) - scale(stage.from)}%`;
    return part;
  }));
  const rows = plan.stages.map((stage, n) => {
    const cut = cluster.boundary[`${plan.model}/${stage.name}`];
    const expected = plan.expects?.stages?.[n];
    const roles = Object.entries(stage.roles ?? {}).map(([who, role]) => `${who}: ${role}`).join(", ");
    const own = stage.instances.map((each) => cluster.i[each]).filter(Boolean);
    const used = own.reduce((sum, row) => sum + fill(row), 0) / Math.max(1, own.length);
    return [stage.name, `${count(stage.length_min)} to ${stage.length_max == null ? "any" : count(stage.length_max)}`, cut ? `now ${count(cut.length)}: ${cut.why}` : "as planned", stage.instances.length, roles || "all do both", expected ? `${span(expected.step_ns / 1e6)} a token, ${percent(expected.kv_used)} KV` : "none", `${percent(used)} KV`];
  });
  const better = plan.expects ? `Expected cost ${plan.expects.cost.toPrecision(3)}, with one stage ${plan.expects.one_stage_cost.toPrecision(3)}, from ${count(plan.expects.requests)} requests.` : "";
  const advised = plan.advice ? el("p", {}, `Autopilot: ${[plan.advice.settings, plan.advice.evidence].filter(Boolean).join(": ")}.`) : null;
  const adopted = (plan.advice?.adopted ?? []).map((each) => el("p", {}, `Autopilot, ${each.phase}: ${each.settings} in place of ${each.before}: ${each.evidence}.`));
  return el("section", {}, el("h2", {}, name), el("p", {}, `Plan ${plan.epoch} by ${plan.coordinator}${plan.policy ? ` (policy ${plan.policy})` : ""}: ${plan.reason || "no reason given"}. ${better}`), advised, adopted, bar,
    table("Stages", ["stage", "lengths", "boundary", "instances", "roles", "expected", "now"], rows),
    cluster.c.page?.recorded || cluster.c.page?.simulated ? null : [1, -1].map((change) => offer(orders.open, { verb: "scale", what: plan.model, to: change > 0 ? "+1" : "-1", label: change > 0 ? "One instance more" : "One less", effect: () => scaleEffect(cluster, plan.model, change, cluster.t) })));
}

/** What the planner of a cascade chose of its front: thresholds, and what it expects of them. */
function cascadeSection(name, plan) {
  const delivers = (tier, n) => (n === plan.tiers.length - 1 ? "every answer" : tier.threshold ? `from a score of ${tier.threshold.toFixed(1)}` : "every answer");
  const rows = plan.tiers.map((tier, n) => [n + 1, tier.model, delivers(tier, n), `${tier.instances}${tier.awaited ? ", more to come" : ""}`, percent(tier.share), tier.p95_ns ? span(tier.p95_ns / 1e6) : "unknown"]);
  const quality = plan.quality === null ? "Nothing was judged yet." : `Expected quality ${plan.quality.toFixed(1)} of 100${plan.quality_low === null ? "" : `, at least ${plan.quality_low.toFixed(1)} with 95 % confidence`}${plan.p95_ns ? `; 95 % end within ${span(plan.p95_ns / 1e6)}` : ""}.`;
  return el("section", {}, el("h2", {}, `Cascade ${name}`), el("p", {}, `Plan ${plan.epoch}${plan.coordinator ? ` by ${plan.coordinator}` : ""}, judged by ${plan.judge}: ${plan.reason || "no reason given"}. ${quality}`),
    plan.meets ? null : el("p", { class: "late" }, "No plan reaches what is asked; this is the best that was found."),
    table("Tiers", ["tier", "model", "delivers", "instances", "share of requests", "95 % of attempts end within"], rows),
    frontOf(plan));
}

/** What there was to choose from: thresholds that no others beat in both quality and latency, as a picture and a table. */
function frontOf(plan) {
  const front = plan.front ?? [];
  if (!front.length) return el("p", { class: "quiet" }, "There is no front to show: a planner works where a target (quality or latency) and recorded answers are configured, once 50 requests have ended.");
  const chosen = front.findIndex((point) => point.thresholds.every((value, n) => Math.abs(value - plan.tiers[n].threshold) < 1e-6));
  const fixed = (values, digits) => values.map((value) => value.toFixed(digits)).join(", ");
  const rows = front.map((point, n) => [n === chosen ? el("strong", { class: "chosen" }, "in force") : "", span(1000 * point.p95_s), fixed([point.quality], 1), fixed([point.quality_low], 1), fixed(point.thresholds, 1), `${fixed(point.shares.map((share) => 100 * share), 0)} %`, point.instances.join(", ")]);
  return el("div", { class: "front" }, scatter(front, chosen),
    table("Its front: no other thresholds are both better and faster", ["", "95 % within", "quality", "at least", "thresholds", "reach each tier", "instances"], rows));
}

/** Quality over latency, a point for each of the front; the chosen one is filled. */
function scatter(front, chosen) {
  const [width, height, left, low] = [380, 260, 48, 44];
  const scale = (values, from, to) => {
    const [least, most] = [Math.min(...values), Math.max(...values)];
    return { least, most, at: (value) => (most > least ? from + ((to - from) * (value - least)) / (most - least) : (from + to) / 2) };
  };
  const x = scale(front.map((point) => point.p95_s), left + 16, width - 20);
  const y = scale(front.map((point) => point.quality), height - low - 14, 16);
  const text = (words, at, more = {}) => svg("text", { x: at[0], y: at[1], ...more }, words);
  const words = (point) => `quality ${point.quality.toFixed(1)}, 95 % end within ${span(1000 * point.p95_s)}`;
  const label = `${plural(front.length, "choice")}, from ${words(front[0])}, to ${words(front.at(-1))}${chosen < 0 ? "" : `; in force: ${words(front[chosen])}`}`;
  return svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label },
    svg("path", { class: "axis", d: `M ${left} 6 V ${height - low} H ${width - 6}` }),
    text(y.most.toFixed(1), [left - 8, y.at(y.most) + 4], { "text-anchor": "end" }), text(y.least.toFixed(1), [left - 8, y.at(y.least) + 4], { "text-anchor": "end" }),
    text(span(1000 * x.least), [x.at(x.least), height - low + 18], { "text-anchor": "middle" }), text(span(1000 * x.most), [x.at(x.most), height - low + 18], { "text-anchor": "middle" }),
    text("expected quality", [left + 8, 16]), text("95 % of requests end within", [(left + width) / 2, height - 8], { "text-anchor": "middle" }),
    svg("polyline", { class: "front", points: front.map((point) => `${x.at(point.p95_s)},${y.at(point.quality)}`).join(" ") }),
    front.map((point, n) => svg("circle", { class: n === chosen ? "chosen" : "", cx: x.at(point.p95_s), cy: y.at(point.quality), r: n === chosen ? 8 : 5 }, svg("title", {}, words(point)))));
}

/** Engines of a model's instances where they differ: how many have which version. */
function versions(cluster, names) {
  const counts = new Map();
  for (const { engine, engine_version } of names.map((name) => cluster.instance[name]).filter(Boolean)) counts.set(`${engine} ${engine_version}`, (counts.get(`${engine} ${engine_version}`) ?? 0) + 1);
  return counts.size > 1 ? [...counts].sort().map(([what, n]) => `${plural(n, "instance")} with ${what}`).join(", ") : "";
}

/** Instances that start, drain or ended, how many of each model have started anew, and with what: an upgrade or `millrace apply`. */
function changeSection(cluster, t) {
  const RECENT_MS = 600_000;
  const anew = new Set(Object.values(cluster.e).filter((event) => event.k === "state" && event.n === STARTED_ANEW && t - cluster.t0 - event.t < RECENT_MS).map((event) => event.a));
  const busy = (name) => Object.values(cluster.q).filter((row) => row.inst === name).length;
  const rows = Object.entries(cluster.i).filter(([, row]) => row.state !== "ready").map(([name, row]) => [name, row.model, row.state, busy(name)]);
  const models = [...new Set(Object.values(cluster.i).map((row) => row.model))];
  const of = (model) => Object.keys(cluster.i).filter((name) => cluster.i[name].model === model);
  const done = models.map((model) => [model, of(model).filter((name) => anew.has(name)).length, of(model).length, versions(cluster, of(model))]).filter(([, some, , mixed]) => some || mixed);
  if (!rows.length && !done.length) return null;
  return el("section", {}, el("h2", {}, "Under way"),
    done.map(([model, some, all, mixed]) => el("p", {}, `${some} of ${plural(all, "instance")} of ${model} started anew within ten minutes${mixed ? `: ${mixed}` : ""}.`)),
    rows.length ? table("Instances that are not ready", ["instance", "model", "state", "requests there"], rows) : null);
}
