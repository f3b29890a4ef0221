// The river: models, their stages, their instances as cards; requests as particles on a canvas above them.
//
// Cards are elements, so that they are read aloud, reached by the keyboard and coloured by the style sheet. The canvas
// shows what moves: where a particle belongs follows from the state, how it gets there from what changed. With more than
// BUNDLED instances cards stand for groups, and particles for counts.

import { context, fill, overdue, river, tokens } from "./state.js";
import { count, el, percent, plural, say, span } from "./text.js";

const BUNDLED = 160;
const GROUP = 16;
/** Particles that are drawn one by one; the rest of them only count. */
const DRAWN_MAX = 6000;
const FLIGHT_MS = 900;
const ENDING_MS = 450;
const HUES = 6;
/** What margins and gaps take of the river's height, pixels. */
const BESIDE = 74;
/** Height of a pool at most, pixels. */
const POOL_MAX = 250;
/** Particles that sit are drawn again so soon after one came or went, and else. */
const SETTLE_MS = 120;
const GROW_MS = 700;

export class River {
  /** `open` is told which instance or request was chosen. */
  constructor(root, cluster, open) {
    this.cluster = cluster;
    this.open = open;
    this.source = el("div", { class: "source" });
    this.body = el("div", { class: "models" });
    this.still = el("canvas", { "aria-hidden": "true" });
    this.moving = el("canvas", { "aria-hidden": "true" });
    this.tip = el("div", { class: "tip", role: "status", hidden: true });
    root.replaceChildren(this.source, this.body, this.still, this.moving, this.tip);
    this.root = root;
    this.hint = el("p", { class: "hint" });
    this.name = el("h2", { class: "run", hidden: true });
    root.append(this.hint);
    root.prepend(this.name);
    /** What marks cards, by instance. @type {Map<string, string>} */
    this.marks = new Map();
    this.cards = new Map();
    this.particles = new Map();
    this.links = [];
    this.shape = "";
    this.stale = false;
    this.sprites = new Map();
    this.drawn = { frames: 0, ms: 0 };
    new ResizeObserver(() => this.measure()).observe(root);
    root.addEventListener("pointermove", (event) => this.#point(event));
    root.addEventListener("pointerleave", () => (this.tip.hidden = true));
    root.addEventListener("click", (event) => this.#click(event), true); // before the card that lies below
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => this.repaint());
  }

  /** The name of its run, above it; empty for none. */
  call(name) {
    say(this.name, name);
    this.name.hidden = !name;
    if (!name) this.marks = new Map();
  }

  /** Colours have changed. */
  repaint() {
    this.sprites.clear();
    this.unsettled = true;
    const known = new Map();
    this.colour = (name) => known.get(name) ?? known.set(name, this.#computed(name)).get(name);
  }

  #computed(name) {
    this.tip.style.borderColor = `var(--${name})`;
    return getComputedStyle(this.tip).borderTopColor;
  }

  /** Builds the cards anew where instances, stages or models are others; a boundary that moves changes a title only. */
  arrange() {
    const models = river(this.cluster);
    const shape = JSON.stringify(models.map(({ name, stages }) => [name, stages.map((each) => [each.name, each.instances])]));
    if (shape === this.shape) {
      for (const model of models) for (const stage of model.stages) say(this.titles.get(`${model.name}/${stage.name}`), titleOf(stage));
      return false;
    }
    this.shape = shape;
    this.titles = new Map();
    this.cards.clear();
    const all = Object.keys(this.cluster.i).length;
    this.bundled = all > BUNDLED;
    this.root.dataset.size = all <= 4 ? "large" : all <= 16 ? "middle" : "small";
    let hue = 0;
    const several = models.length > 1;
    this.hues = new Map();
    this.body.replaceChildren(
      ...models.map((model) => {
        const colour = hue++ % HUES;
        const stages = model.stages.map((stage, n) => this.#stage(model, stage, several ? colour : n % HUES));
        return el("section", { class: "model", "aria-label": `model ${model.name}` }, el("h2", {}, model.name), stages);
      }),
    );
    return true;
  }

  #stage(model, stage, hue) {
    const title = el("h3", { hidden: stage.alone }, titleOf(stage));
    this.titles.set(`${model.name}/${stage.name}`, title);
    const groups = this.bundled ? bundles(stage.instances) : stage.instances.map((name) => [name, [name]]);
    const cards = groups.map(([name, members]) => this.#card(name, members, hue));
    const grid = el("div", { class: "cards" }, cards);
    return el("div", { class: `stage hue${hue}` }, title, grid);
  }

  #card(name, members, hue) {
    const part = (kind) => el("span", { class: kind });
    const parts = { role: part("role"), load: part("load"), rate: part("rate"), mark: part("mark"), kv: part("kv"), pool: part("pool") };
    parts.level = part("level");
    parts.pool.append(parts.level);
    const number = name.search(/[-_.]?\d*$/); // the end of a long name tells instances apart, and is always shown
    const node = el(
      "button",
      { class: "card", type: "button", "data-name": name, click: () => this.open({ instance: members.length > 1 ? null : name, members }) },
      el("span", { class: "title" }, el("span", { class: "name", title: name }, el("span", {}, name.slice(0, number)), el("span", {}, name.slice(number))), parts.role, parts.mark, parts.kv),
      parts.pool,
      el("span", { class: "foot" }, parts.load, parts.rate),
    );
    const card = { name, members, hue, node, ...parts, slots: [], rect: null, flash: 0 };
    for (const member of members) this.cards.set(member, card);
    return node;
  }

  /** Where everything is. */
  measure() {
    this.#stretch();
    const outer = this.root.getBoundingClientRect();
    const box = { left: outer.left, top: outer.top - this.root.scrollTop, width: outer.width };
    const scale = Math.min(devicePixelRatio || 1, 2);
    const [width, height] = [this.root.clientWidth, Math.max(this.root.clientHeight, this.body.offsetTop + this.body.offsetHeight + 60)];
    for (const canvas of [this.still, this.moving]) {
      canvas.width = Math.round(width * scale);
      canvas.height = Math.round(height * scale);
      canvas.style.width = `${width}px`;
      canvas.style.height = `${height}px`;
    }
    this.scale = scale;
    for (const card of new Set(this.cards.values())) {
      const pool = card.pool.getBoundingClientRect();
      const node = card.node.getBoundingClientRect();
      card.rect = { x: pool.left - box.left, y: pool.top - box.top, w: pool.width, h: pool.height };
      card.centre = { x: node.left - box.left + node.width / 2, y: pool.top - box.top + pool.height / 2 };
      card.edge = { x: node.left - box.left, y: node.top - box.top, w: node.width, h: node.height };
    }
    const source = this.source.getBoundingClientRect();
    this.from = { x: source.right - box.left, y: source.top - box.top + source.height / 2, below: source.bottom - box.top };
    this.stages = [...this.body.querySelectorAll(".stage")].map((node) => {
      const rect = node.getBoundingClientRect();
      return { x: rect.left - box.left, y: rect.top - box.top + rect.height / 2, hue: Number(node.className.at(-1)) };
    });
    this.unsettled = true;
    this.settledAt = 0;
  }

  /** Pools take the height that is left, within reason. */
  #stretch() {
    this.root.style.removeProperty("--pool");
    const nodes = [...this.body.querySelectorAll(".card")];
    if (!nodes.length || !this.root.clientHeight) return;
    const lines = new Set(nodes.map((node) => Math.round(node.getBoundingClientRect().top))).size;
    const pool = nodes[0].querySelector(".pool").clientHeight;
    const others = BESIDE + this.hint.offsetHeight + this.name.offsetHeight;
    const left = this.root.clientHeight - others - this.body.scrollHeight;
    const height = Math.min(POOL_MAX, pool + left / lines);
    if (height > pool) this.root.style.setProperty("--pool", `${Math.floor(height)}px`);
  }

  /** Takes what changed. */
  take(news, now) {
    if (!this.colour) this.repaint();
    const fresh = this.arrange();
    for (const card of new Set(this.cards.values())) this.#write(card);
    this.#writeSource();
    if (fresh) this.measure(); // only now is everything as high as it will be
    if (news.whole || fresh) this.#reset(news.whole);
    if (news.whole) return;
    for (const { id } of news.gone) this.#end(id, now);
    for (const id of news.born) this.#place(id, now, true);
    for (const { id } of news.moved) this.#place(id, now, true);
    for (const [from, to, refused] of news.bids) this.#link(from, to, refused ? "refused" : "bid", now);
    for (const event of news.events) this.#happen(event, now);
  }

  #reset(whole) {
    if (whole) this.particles.clear();
    for (const card of this.cards.values()) card.slots = [];
    for (const particle of this.particles.values()) if (!particle.ends) particle.card = null;
    for (const id of Object.keys(this.cluster.q)) this.#place(id, 0, false);
  }

  #happen(event, now) {
    if (event.k === "move") this.#link(event.a, event.b, "move", now);
    if (event.k === "failover" && event.b) this.#link(event.a, event.b, "failover", now);
    const card = this.cards.get(event.a);
    if (card && (event.k === "dead" || event.k === "failover")) card.flash = now;
  }

  #link(from, to, kind, now) {
    const [a, b] = [this.cards.get(from), this.cards.get(to)];
    if (!a || !b || a === b) return;
    const known = this.links.find((link) => link.a === a && link.b === b && link.kind === kind && now - link.at < 400);
    if (known) known.weight += 1; // bundled
    else if (this.links.length < 300) this.links.push({ a, b, kind, at: now, weight: 1 });
  }

  #write(card) {
    const rows = card.members.map((name) => this.cluster.i[name]).filter(Boolean);
    if (!rows.length) return;
    const sum = (field) => rows.reduce((total, row) => total + (row[field] || 0), 0);
    const share = sum("used") / Math.max(1, sum("total"));
    const states = new Set(rows.map((row) => row.state));
    const state = ["dead", "suspect", "draining", "starting", "drained", "ready"].find((each) => states.has(each)) ?? "ready";
    const few = card.members.length === 1;
    const role = few ? (state === "ready" ? (rows[0].role === "both" ? "" : rows[0].role) : state) : `${rows.length} instances`;
    card.node.dataset.state = state;
    say(card.mark, this.marks.get(card.name) ?? "");
    say(card.role, role);
    const waiting = sum("waiting");
    say(card.load, `${count(sum("running"))} run${waiting ? ` · ${count(waiting)} wait` : ""}`);
    say(card.rate, few && rows[0].step && this.root.dataset.size === "large" ? `${span(rows[0].step)} a step · ${count(sum("tps"))} tok/s` : `${count(sum("tps"))} t/s`);
    card.level.hidden = !share;
    card.level.style.height = percent(share).replace(" ", "");
    say(card.kv, `${this.root.dataset.size === "small" ? "" : "KV "}${percent(share)}`);
    const hits = rows.map((row) => row.hit).filter((hit) => hit !== undefined);
    const warmth = percent(hits.reduce((total, hit) => total + hit, 0) / Math.max(1, hits.length));
    card.pool.style.setProperty("--warmth", warmth.replace(" ", ""));
    card.level.dataset.high = share > 0.9 ? "very" : share > 0.75 ? "yes" : "";
    const label = `${card.name}: ${state}${role && role !== state ? `, ${role}` : ""}, ${card.load.textContent}, ${percent(share)} of KV, ${card.rate.textContent}${hits.length ? `, ${warmth} prefix hits` : ""}`;
    if (card.node.getAttribute("aria-label") !== label) card.node.setAttribute("aria-label", label);
    if (!few) this.#cells(card, rows);
  }

  /** A group shows a cell per instance, as high as its KV is full. */
  #cells(card, rows) {
    if (card.pool.childElementCount !== rows.length) card.pool.replaceChildren(...rows.map(() => el("i", {}, el("b", {}))));
    rows.forEach((row, n) => {
      const cell = card.pool.children[n];
      cell.dataset.state = row.state;
      cell.firstChild.style.height = `${Math.round(100 * fill(row))}%`;
    });
  }

  #writeSource() {
    const unplaced = Object.values(this.cluster.q).filter((row) => !row.inst).length;
    const parts = this.source.children.length ? this.source.children : (this.source.append(el("span", { class: "label" }, "ingress"), el("strong"), el("span")), this.source.children);
    const idle = "Nothing runs. Requests show here as they are sent: the line `try` that `./task up` printed sends one.";
    say(this.hint, Object.keys(this.cluster.q).length ? "● decodes   ◉ computes its prompt   ○ waits   larger: longer context   red: more than twice its forecast   water: KV in use   warm edge: prefix hits" : idle);
    say(parts[1], count(Object.keys(this.cluster.q).length));
    say(parts[2], unplaced ? `open, ${plural(unplaced, "request")} without an instance` : "open requests");
  }

  // Particles

  #place(id, now, flies) {
    const row = this.cluster.q[id];
    const known = this.particles.get(id);
    if (!row || (this.particles.size >= DRAWN_MAX && !known)) return;
    const card = this.cards.get(row.inst) ?? null;
    const particle = known ?? { x: this.from?.x ?? 0, y: this.from?.y ?? 0, id };
    if (known?.card) known.card.slots[known.slot] = undefined;
    particle.card = card;
    particle.bundled = card !== null && card.members.length > 1;
    if (card && !particle.bundled) {
      particle.slot = card.slots.indexOf(undefined);
      if (particle.slot < 0) particle.slot = card.slots.length;
      card.slots[particle.slot] = id;
    }
    particle.settled = false;
    particle.flight = flies ? { at: now, x: particle.x, y: particle.y } : null;
    this.unsettled = true;
    this.particles.set(id, particle);
  }

  #end(id, now) {
    const particle = this.particles.get(id);
    if (!particle) return;
    if (particle.card && !particle.bundled) particle.card.slots[particle.slot] = undefined;
    particle.ends = now;
    particle.settled = false;
    this.unsettled = true;
  }

  /** Where a particle of a card sits: in its pool, from the ground up, in a grid whose cells shrink as it fills. */
  #home(particle) {
    const { card } = particle;
    if (!card) return { x: (this.from?.x ?? 0) - 14 - ((hash(particle.id) % 1000) / 1000) * 40, y: (this.from?.below ?? 0) + 10 + (hash(particle.id) % 60), size: 5 };
    if (particle.bundled) return { x: card.centre.x, y: card.centre.y, size: 5 };
    const places = Math.max(12, card.slots.length);
    const size = this.#cell(card, places);
    const columns = Math.max(1, Math.floor(card.rect.w / size));
    const column = particle.slot % columns;
    const line = Math.floor(particle.slot / columns);
    return { x: card.rect.x + (column + 0.5) * size, y: card.rect.y + card.rect.h - (line + 0.5) * size, size };
  }

  /** The largest cell of which a card's pool holds so many. */
  #cell(card, places) {
    const { w, h } = card.rect;
    if (card.fit?.places === places && card.fit.h === h && card.fit.w === w) return card.fit.size;
    let size = this.root.dataset.size === "large" ? 34 : 24;
    while (size > 3 && Math.floor(w / size) * Math.floor(h / size) < places) size -= 0.5;
    card.fit = { places, w, h, size };
    return size;
  }

  /** Draws one picture; `now` is performance time, `t` the cluster's, unix ms.
   *
   * Two canvases: one for particles that sit, drawn again a few times a second as they grow, come or go; and one for what
   * moves, every frame. So a picture costs what moves in it.
   */
  draw(now, t) {
    if (!this.from) return;
    const began = performance.now();
    if (this.unsettled ? now - this.settledAt > SETTLE_MS : now - this.settledAt > GROW_MS) this.#drawSettled(now, t);
    const pen = this.#clear(this.moving);
    this.#drawLinks(pen, now);
    for (const [id, particle] of this.particles) {
      if (particle.settled) continue;
      if (particle.ends && now - particle.ends > ENDING_MS) this.particles.delete(id);
      else this.#fly(pen, particle, now, t);
    }
    for (const card of new Set(this.cards.values())) if (now - card.flash < 1800 && card.flash) this.#drawFlash(pen, card, now);
    this.drawn.frames += 1;
    this.drawn.ms += performance.now() - began;
  }

  #clear(canvas) {
    const pen = canvas.getContext("2d");
    pen.setTransform(1, 0, 0, 1, 0, 0);
    pen.clearRect(0, 0, canvas.width, canvas.height);
    pen.setTransform(this.scale, 0, 0, this.scale, 0, 0);
    return pen;
  }

  #drawSettled(now, t) {
    const pen = this.#clear(this.still);
    this.#drawCurrent(pen);
    for (const particle of this.particles.values()) {
      if (particle.ends || particle.flight) continue;
      particle.settled = true;
      const home = this.#home(particle);
      [particle.x, particle.y] = [home.x, home.y];
      if (!particle.bundled) this.#stamp(pen, particle, home.size, 0, t);
    }
    this.settledAt = now;
    this.unsettled = false;
  }

  /** Faint streams from ingress to each stage. */
  #drawCurrent(pen) {
    for (const stage of this.stages) {
      const bend = (stage.x - this.from.x) * 0.6;
      pen.beginPath();
      pen.moveTo(this.from.x, this.from.y);
      pen.bezierCurveTo(this.from.x + bend, this.from.y, stage.x - bend, stage.y, stage.x, stage.y);
      pen.strokeStyle = this.colour(`hue${stage.hue}`);
      pen.globalAlpha = 0.22;
      pen.lineWidth = 7;
      pen.stroke();
    }
    pen.globalAlpha = 1;
  }

  #drawLinks(pen, now) {
    const lasting = { bid: 900, refused: 600, move: 1300, failover: 2200 };
    this.links = this.links.filter((link) => now - link.at < lasting[link.kind]);
    for (const link of this.links) this.#arc(pen, link.a, link.b, link.kind, 1 - (now - link.at) / lasting[link.kind], link.weight, now);
    for (const row of Object.values(this.cluster.m)) {
      const [a, b] = [this.cards.get(row.a), this.cards.get(row.b)];
      if (a && b && a !== b) this.#arc(pen, a, b, "move", 0.55, 1, now);
    }
  }

  #arc(pen, a, b, kind, strength, weight, now) {
    const lift = 24 + Math.abs(a.centre.x - b.centre.x) * 0.12;
    pen.beginPath();
    pen.moveTo(a.centre.x, a.centre.y);
    pen.quadraticCurveTo((a.centre.x + b.centre.x) / 2, Math.min(a.centre.y, b.centre.y) - lift, b.centre.x, b.centre.y);
    pen.strokeStyle = this.colour({ bid: "bid", refused: "faint", move: "move", failover: "bad" }[kind]);
    pen.globalAlpha = Math.max(0, strength) * (kind === "refused" ? 0.5 : 0.9);
    pen.lineWidth = Math.min(6, kind === "bid" || kind === "refused" ? 1 : 1.5 + Math.log2(weight));
    pen.setLineDash(kind === "move" ? [] : [4, 5]);
    pen.lineDashOffset = -now / 40;
    pen.stroke();
    pen.setLineDash([]);
    pen.globalAlpha = 1;
  }

  #drawFlash(pen, card, now) {
    const { x, y, w, h } = card.edge;
    pen.strokeStyle = this.colour("bad");
    pen.globalAlpha = 1 - (now - card.flash) / 1800;
    pen.lineWidth = 3;
    pen.strokeRect(x - 2, y - 2, w + 4, h + 4);
    pen.globalAlpha = 1;
  }

  #fly(pen, particle, now, t) {
    if (particle.ends) {
      const share = (now - particle.ends) / ENDING_MS;
      pen.globalAlpha = Math.max(0, 1 - share);
      this.#stamp(pen, particle, 40, 5 * share, t);
      pen.globalAlpha = 1;
      return;
    }
    const home = this.#home(particle);
    const { at, x, y } = particle.flight ?? { at: 0, x: home.x, y: home.y };
    const share = Math.min(1, (now - at) / FLIGHT_MS);
    const eased = share < 0.5 ? 2 * share * share : 1 - (-2 * share + 2) ** 2 / 2;
    const lift = Math.sin(Math.PI * share) * Math.min(60, Math.abs(home.x - x) * 0.15);
    particle.x = x + (home.x - x) * eased;
    particle.y = y + (home.y - y) * eased - lift;
    this.#stamp(pen, particle, home.size, 2, t);
    if (share < 1) return;
    particle.flight = null;
    this.unsettled = true;
  }

  /** Draws a particle where it is, no larger than its place, `more` pixels larger than its context says. */
  #stamp(pen, particle, place, more, t) {
    const row = this.cluster.q[particle.id];
    if (row) {
      const length = context(this.cluster, row, t);
      particle.size = Math.max(2.4, Math.min(place * 0.92, 3 + Math.sqrt(length) * 0.36));
      const late = overdue(this.cluster, row, t);
      particle.look = `${row.st}${particle.card?.hue ?? 0}${late !== null && late > Math.max(1500, row.e2e) ? "late" : ""}`;
    }
    const size = Math.round(((particle.size ?? 5) + more) * this.scale);
    const picture = this.#sprite(particle.look ?? "r0", size);
    pen.drawImage(picture, particle.x - size / this.scale / 2, particle.y - size / this.scale / 2, size / this.scale, size / this.scale);
  }

  /** A particle's picture: a disc while it decodes, a ring while it waits, with a light core while its prompt is computed. */
  #sprite(look, size) {
    const known = this.sprites.get(look + size);
    if (known) return known;
    const canvas = el("canvas", { width: size, height: size });
    const pen = canvas.getContext("2d");
    const middle = size / 2;
    const colour = look.endsWith("late") ? this.colour("late") : this.colour(`hue${look[1]}`);
    const disc = (radius, fill) => {
      pen.beginPath();
      pen.arc(middle, middle, radius, 0, 7);
      pen.fillStyle = fill;
      pen.fill();
    };
    pen.strokeStyle = look[0] === "x" ? this.colour("bad") : colour;
    pen.lineWidth = Math.max(1.2, size / 8);
    if (look[0] === "w" || look[0] === "x") {
      pen.beginPath();
      pen.arc(middle, middle, Math.max(0.5, middle - pen.lineWidth), 0, 7);
      pen.stroke();
    } else {
      disc(middle - 0.5, colour);
      if (look[0] === "p") disc(middle / 2.2, this.colour("ground"));
    }
    this.sprites.set(look + size, canvas);
    return canvas;
  }

  // Pointing

  #near(event) {
    const box = this.root.getBoundingClientRect();
    const [x, y] = [event.clientX - box.left, event.clientY - box.top + this.root.scrollTop];
    let [found, best] = [null, 10];
    for (const particle of this.particles.values()) {
      const far = Math.hypot(particle.x - x, particle.y - y);
      if (!particle.ends && !particle.bundled && far < best) [found, best] = [particle, far];
    }
    return found && { particle: found, x, y };
  }

  #point(event) {
    const near = this.#near(event);
    this.tip.hidden = !near;
    if (!near) return;
    const row = this.cluster.q[near.particle.id];
    if (!row) return;
    const now = this.cluster.t;
    say(this.tip, `${near.particle.id}\n${count(row.prompt)} prompt + ${count(tokens(this.cluster, row, now))} output tokens${row.exp ? ` of about ${count(row.exp)}` : ""}`);
    this.tip.style.left = `${Math.min(near.x + 14, this.root.clientWidth - 260)}px`;
    this.tip.style.top = `${near.y + 14}px`;
  }

  #click(event) {
    const near = this.#near(event);
    if (!near || !event.detail) return; // a click by keyboard is the card's
    event.stopPropagation();
    event.preventDefault();
    this.open({ sequence: near.particle.id });
  }
}

/** A stage's name and lengths. */
function titleOf(stage) {
  const range = stage.to === null ? `from ${count(stage.from)} tokens` : `${count(stage.from)} to ${count(stage.to)} tokens`;
  return stage.name ? `${stage.name} · ${range}` : "not in the plan";
}

/** Groups of instances that stand together. */
function bundles(names) {
  const groups = [];
  for (let at = 0; at < names.length; at += GROUP) {
    const members = names.slice(at, at + GROUP);
    groups.push([members.length > 1 ? `${members[0]} … ${members.at(-1)}` : members[0], members]);
  }
  return groups;
}

function hash(text) {
  let sum = 0;
  for (let at = Math.max(0, text.length - 6); at < text.length; at++) sum = (sum * 31 + text.charCodeAt(at)) % 65536;
  return sum;
}
