// Frames of one run, live from the service or from what it keeps of the past, at any speed.

import { Cluster } from "./state.js";

const RETRY_MS = 1000;
/** A clock that is followed may go back so far; further, and the past is read again. */
const BACK_MS = 1000;
const SPEEDS = [0.25, 1, 4, 16];

/** The next speed after one; the slowest after the fastest. */
export const faster = (speed) => SPEEDS[(SPEEDS.indexOf(speed) + 1) % SPEEDS.length];

export class Feed {
  /** `take` gets each frame; `changed` is told when live, speed or connection change; `key` gives a viewer's key or "". */
  constructor({ take, changed, key }) {
    this.take = take;
    this.changed = changed;
    this.key = key;
    this.run = 0;
    this.recorded = false;
    this.live = true;
    this.playing = true;
    this.speed = 1;
    /** How fast the live run goes: a simulation's may be changed. */
    this.pace = 1;
    this.connected = false;
    this.refused = false;
    /** @type {number[][]} */
    this.spans = [];
    this.segment = 0;
    this.at = 0;
    this.heard = 0;
    this.coming = [];
    this.waiting = null;
    this.wanted = null;
    this.reading = false;
  }

  /** Unix ms of what is shown. */
  now() {
    if (this.live || this.playing) return this.at + (performance.now() - this.heard) * (this.live ? this.pace : this.speed);
    return this.at;
  }

  headers() {
    return this.key() ? { authorization: `Bearer ${this.key()}` } : {};
  }

  /** What the service tells of this run. */
  ask(what) {
    return fetch(`/run/${this.run}/${what}`, { headers: this.headers() });
  }

  /** Follows the live stream for ever; while the past is shown its frames only keep the end of the slider. */
  async follow() {
    for (;;) {
      try {
        const answer = await fetch("/stream", { headers: this.headers() });
        this.refused = answer.status === 401;
        if (answer.ok) for await (const text of events(answer)) this.#live(text);
      } catch {
        // the service is gone, or going; it is asked again
      }
      this.connected = false;
      this.changed();
      await new Promise((done) => setTimeout(done, RETRY_MS));
    }
  }

  #live(text) {
    if (!this.connected) {
      this.connected = true;
      this.changed();
    }
    if (!this.live) return;
    const frame = JSON.parse(text);
    if (this.waiting) return this.waiting.push(frame);
    this.at = frame.t;
    this.heard = performance.now();
    this.take(frame);
  }

  /** What the service keeps: from and to, unix ms. */
  async kept() {
    const answer = await this.ask("history");
    this.spans = answer.ok ? await answer.json() : [];
    return this.spans;
  }

  /** Shows a time of the past, and plays on from there. */
  async go(at) {
    if (!(await this.kept()).length) return;
    this.live = false;
    this.segment = 0;
    await this.show(at);
    this.heard = performance.now();
    this.changed();
    this.#play();
  }

  /** Shows a time of the past; of several that are asked for while one is read, the last. */
  async show(at) {
    this.wanted = at;
    if (this.reading) return;
    this.reading = true;
    try {
      while (this.wanted !== null) {
        const next = this.wanted;
        this.wanted = null;
        await this.#show(next);
      }
    } finally {
      this.reading = false;
    }
  }

  async #show(at) {
    const span = this.spans.findLast(([from]) => from <= at) ?? this.spans[0];
    if (!span) return;
    if (span[0] === this.segment && at < this.at && this.at - at < BACK_MS) return;
    if (span[0] !== this.segment || at < this.at) {
      const frames = await this.#segment(span[0]);
      if (span[0] > this.segment && this.segment) this.#until(Infinity);
      this.coming = frames;
      this.segment = span[0];
    }
    this.at = Math.max(at, span[0]);
    this.#until(this.at);
  }

  #until(at) {
    while (this.coming.length && this.coming[0].t <= at) this.take(this.coming.shift());
  }

  async #segment(from) {
    const answer = await this.ask(`history/${from}`);
    return answer.ok ? (await answer.text()).split("\n").map((line) => JSON.parse(line)) : [];
  }

  /** Ids and ends of all requests that ended in what is kept. */
  async ended() {
    const past = new Cluster();
    const found = new Map();
    for (const [from] of await this.kept()) {
      for (const frame of await this.#segment(from)) {
        const { f = {} } = frame.k ?? frame.d;
        past.apply({ t: frame.t, d: { f } });
        for (const id of Object.keys(f)) if (past.f[id]) found.set(id, past.f[id]);
      }
    }
    return [...found];
  }

  #play() {
    clearTimeout(this.timer);
    this.timer = setTimeout(async () => {
      if (this.live) return;
      if (this.playing) await this.#advance();
      if (!this.live) this.#play();
    }, 50);
  }

  async #advance() {
    const at = this.now();
    if (at > this.spans.at(-1)[1] && at > (await this.kept()).at(-1)?.[1]) {
      await this.show(this.spans.at(-1)[1]);
      return this.recorded ? this.pause(false) : this.goLive();
    }
    await this.show(at);
    this.heard = performance.now();
  }

  /** Plays, or stops the picture; from live, the past begins here. */
  pause(playing) {
    if (this.live && !playing) {
      this.playing = false;
      return this.go(this.at);
    }
    this.at = this.now();
    this.heard = performance.now();
    this.playing = playing;
    this.changed();
  }

  /** Back to what happens now: the last segment is read, as it begins with a whole frame. */
  async goLive() {
    if (this.recorded) return this.go(this.spans.at(-1)[1]);
    this.live = this.playing = true;
    clearTimeout(this.timer);
    this.waiting = [];
    await this.kept();
    const frames = this.spans.length ? await this.#segment(this.spans.at(-1)[0]) : [];
    const until = frames.at(-1)?.t ?? 0;
    for (const frame of [...frames, ...this.waiting.filter(({ t }) => t > until)]) this.take(frame);
    this.waiting = null;
    this.changed();
  }

  faster() {
    this.at = this.now();
    this.heard = performance.now();
    this.speed = faster(this.speed);
    this.changed();
  }
}

/** Texts of the events of a stream, as they come. */
export async function* events(answer) {
  const reader = answer.body.getReader();
  const decoder = new TextDecoder();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield part.slice("data: ".length);
  }
}
