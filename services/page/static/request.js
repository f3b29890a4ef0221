// One request: its life as a waterfall, candidates with what was forecast and what came, its moves, the text of `explain`.

import { offer } from "./orders.js";
import { age, context, STATES, takes, whySlow } from "./state.js";
import { bytes, count, el, span, table } from "./text.js";

/** Spans that others contain, or that say nothing of time. */
const LEFT_OUT = new Set(["ingress", "request", "worker"]);

/** Builds the view. `known`: what the service told; null while it is asked. */
export function requestView(cluster, id, known, t, order) {
  const open = Object.entries(cluster.q).filter(([sequence]) => sequence.replace(/\.\d+$/, "") === id);
  const head = el("h2", {}, "Request ", el("code", {}, id));
  if (!known) return [head, el("p", { class: "quiet" }, "asking …")];
  if (known.error && !open.length) return [head, el("p", {}, "Nothing of it was heard: the page keeps the latest 4,000 requests since its start. Ids are in the answer's ", el("code", {}, "id"), " and in the table of requests.")];
  const own = id.replace(/\.\d+$/, ""); // of a cascade's attempt only what was heard of it
  const messages = (known.messages ?? []).map(([at_ns, body]) => ({ t: at_ns / 1e6, kind: body.type.split("/")[0], body })).filter(({ body }) => (body.request ?? body.sequence).startsWith(own));
  const spans = (known.spans ?? []).map((each) => ({ ...each, instance: each.instance || each.attributes?.["millrace.instance"], start: each.start_ns / 1e6, end: each.end_ns / 1e6 }));
  const decisions = messages.filter(({ kind }) => kind === "DecisionMade");
  const moves = messages.filter(({ kind }) => kind === "MigrationFinished");
  const end = messages.find(({ kind, body }) => kind === "RequestFinished" && body.request === id) ?? messages.find(({ kind }) => kind === "RequestFinished");
  return [
    head,
    el("p", { class: "lead" }, summary(cluster, open, end?.body, t)),
    ...open.map(([sequence, row]) => now(cluster, sequence, row, t, order)),
    waterfall(spans, { decisions, moves, end: end?.body, t, open: open.length > 0 }),
    ...decisions.map(({ body }) => candidates(body, end?.body)),
    moveTable(moves),
    el("section", {}, el("h3", {}, "In words"), el("pre", { class: "words" }, known.text?.length ? known.text.join("\n") : "It was not traced."), known.text?.length ? el("p", { class: "quiet" }, "The same as ", el("code", {}, `millrace explain ${id}`), ".") : null),
  ].filter(Boolean);
}

function summary(cluster, open, end, t) {
  if (end) {
    const tokens = (end.output_tokens ?? []).reduce((sum, n) => sum + n, 0);
    return `${end.outcome[0].toUpperCase()}${end.outcome.slice(1)} after ${span(end.e2e_ns / 1e6)}: ${count(end.prompt_tokens)} prompt and ${count(tokens)} output tokens, first token after ${span(end.ttft_ns == null ? null : end.ttft_ns / 1e6)}.`;
  }
  if (!open.length) return "It is not open, and its end was not heard.";
  const [, row] = open[0];
  return `Open for ${span(age(cluster, row, t))}${row.e2e ? `, forecast ${span(row.e2e)}` : ""}. ${whySlow(cluster, row, t)}`;
}

function now(cluster, sequence, row, t, order) {
  const targets = Object.entries(cluster.i).filter(([name, each]) => name !== row.inst && each.model === row.model && takes(each));
  const target = targets.sort(([, a], [, b]) => b.total - b.used - (a.total - a.used))[0]?.[0] ?? "";
  const to = target ? `to the instance with the most idle KV, now ${target}` : "nowhere: no other instance of its model is ready";
  const effect = () => [`${count(context(cluster, row, t))} tokens of KV move ${to}; its stream goes on after a short pause.`];
  return el("p", {}, `${sequence} ${STATES[row.st]} at ${row.inst || "no instance"}, ${count(context(cluster, row, t))} tokens long. `, target && row.st === "r" && !cluster.c.page?.recorded && !cluster.c.page?.simulated ? offer(order, { verb: "migrate", what: sequence, label: "Migrate", effect }) : null);
}

/** Bars over time: of spans where it was traced, else of what was published. */
function waterfall(spans, heard) {
  const bars = spans.some(({ name }) => name === "decode") ? traced(spans) : published(heard);
  if (!bars.length) return null;
  const whole = spans.length ? spans : bars; // what waited for its first placement is part of a life
  const from = Math.min(...whole.map((each) => each.start));
  const length = Math.max(...whole.map((each) => each.end)) - from || 1;
  const rows = bars.map((bar) => {
    const fill = el("span", { class: `span ${bar.kind}` });
    fill.style.left = `${(100 * (bar.start - from)) / length}%`;
    fill.style.width = `${Math.max(0.25, (100 * (bar.end - bar.start)) / length)}%`;
    return el("tr", {}, el("th", { scope: "row" }, bar.name), el("td", { class: "where" }, bar.where ?? ""), el("td", { class: "lane" }, fill), el("td", { class: "number" }, span(bar.end - bar.start)));
  });
  return el("section", {}, el("h3", {}, "Its life"), el("table", { class: "waterfall" }, el("caption", {}, `${span(length)} in all${spans.length ? "" : "; it was not traced (telemetry.trace_sample), so this is from what was published"}`), el("tbody", {}, rows)));
}

const KINDS = { tag: "ask", forecast: "ask", dispatch: "ask", continuation: "bad", queue: "wait", prefill: "prefill", decode: "decode", move: "move", migration: "move", reasoning: "decode", parser: "wait" };

function traced(spans) {
  return spans.filter(({ name }) => !LEFT_OUT.has(name)).map((each) => ({ name: each.name, where: each.service === "ingress" ? "ingress" : each.instance, kind: each.error ? "bad" : (KINDS[each.name] ?? "ask"), start: each.start, end: each.end })).sort((a, b) => a.start - b.start || a.end - b.end).slice(0, 60);
}

function published({ decisions, moves, end, t, open }) {
  const ms = (ns) => ns / 1e6;
  const bars = [];
  const first = decisions[0]?.body;
  const arrival = end ? ms(end.arrival_ns) : first && ms(first.at_ns);
  if (!arrival) return bars;
  const over = end ? arrival + ms(end.e2e_ns) : open ? t : ms(first.at_ns);
  if (end?.placed_ns) bars.push({ name: "tag, forecast", where: "ingress", kind: "ask", start: arrival, end: ms(end.placed_ns) });
  const token = end?.ttft_ns != null ? arrival + ms(end.ttft_ns) : null;
  if (token) bars.push({ name: "queue, prefill", where: first?.chosen ?? end.instances[0], kind: "prefill", start: end.placed_ns ? ms(end.placed_ns) : arrival, end: token });
  const turns = [...decisions.slice(1).map(({ body }) => ({ at: ms(body.at_ns), where: body.chosen, kind: "bad" })), ...moves.filter(({ body }) => body.outcome === "moved").map(({ t: at, body }) => ({ at, where: body.target, kind: "move", body }))].sort((a, b) => a.at - b.at);
  let [start, where] = [token ?? (end?.placed_ns ? ms(end.placed_ns) : ms(first?.at_ns ?? end.arrival_ns)), first?.chosen ?? end?.instances?.[0]];
  for (const turn of turns) {
    bars.push({ name: "decode", where, kind: "decode", start, end: Math.max(start, turn.at) });
    const pause = turn.body ? ms(turn.body.cost?.duration_ns ?? 0) : 0;
    bars.push({ name: turn.kind === "move" ? `move (${turn.body.reason})` : "continuation", where: turn.where, kind: turn.kind, start: turn.at - pause, end: turn.at });
    [start, where] = [turn.at, turn.where];
  }
  bars.push({ name: token || !end ? "decode" : "no token came", where, kind: end && end.outcome !== "completed" ? "bad" : "decode", start, end: Math.max(start, over) });
  return bars;
}

/** What was forecast for each candidate, and for the chosen one what came. */
function candidates(decision, end) {
  const by = `${decision.policy}${decision.fallback ? `, whose fallback ${decision.fallback} decided` : ""}`;
  const heads = ["instance", "end to end", "TTFT", "TPOT", "others later", "preempted", "cached"];
  const rows = (decision.forecasts ?? []).map((each) =>
    each.length && each[7] ? [name(each[0], decision), each[7], "", "", "", "", ""] : [name(each[0], decision), span(each[2] / 1e6), span(each[1] / 1e6), span(each[3] / 1e6), span(each[5] / 1e6), each[4], each[9] ?? 0],
  );
  const known = rows.length ? table(`Forecasts, counted from the decision${end ? "; and what came" : ""}`, heads, end && decision.kind === "dispatch" ? [...rows, came(decision, end)] : rows) : el("p", { class: "quiet" }, `No instance was asked for a forecast. Scores: ${(decision.scores ?? []).map(([who, score, note]) => `${who} ${note || score.toPrecision(3)}`).join(", ") || "none"}`);
  return el("section", {}, el("h3", {}, `${decision.kind} to ${decision.chosen || "nobody"}`), el("p", {}, `By ${by}: ${decision.reason}`), known);
}

const name = (who, decision) => el("strong", { class: who === decision.chosen ? "chosen" : "" }, who === decision.chosen ? `→ ${who}` : who);

function came(decision, end) {
  const since = (ns) => (ns == null ? "none" : span((end.arrival_ns + ns - decision.at_ns) / 1e6));
  const tokens = (end.output_tokens ?? [0])[0];
  const each = end.ttft_ns != null && tokens > 1 ? span((end.e2e_ns - end.ttft_ns) / 1e6 / (tokens - 1)) : "?";
  return [el("em", {}, "what came"), since(end.e2e_ns), since(end.ttft_ns), each, "", "", end.cached_tokens ?? 0];
}

function moveTable(moves) {
  if (!moves.length) return null;
  const rows = moves.map(({ body }) => {
    const cost = body.cost ?? {};
    return [`${body.source} → ${body.target || "?"}`, body.outcome, body.reason, body.note || body.detail || "", cost.tokens ?? 0, bytes(cost.bytes ?? 0), span((cost.frozen_ns ?? 0) / 1e6)];
  });
  return el("section", {}, el("h3", {}, "Its moves"), table("Of its KV", ["way", "outcome", "reason", "why", "tokens", "copied", "no token for"], rows));
}

