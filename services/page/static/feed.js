// Frames, live from the service or from what it keeps of the past, at any speed. Calls `take(frame)` for each.

const RETRY_MS = 1000;

export class Feed {
  /** `take` gets each frame; `changed` is told when live, speed or connection change; `key` gives a viewer's key or "". */
  constructor({ take, changed, key }) {
    this.take = take;
    this.changed = changed;
    this.key = key;
    this.recorded = false;
    this.live = true;
    this.playing = true;
    this.speed = 1;
    this.connected = false;
    this.refused = false;
    this.spans = [];
    this.at = 0;
    this.heard = 0;
    this.coming = [];
    this.waiting = null;
  }

  /** Unix ms of what is shown. */
  now() {
    if (this.live || this.playing) return this.at + (performance.now() - this.heard) * (this.live ? 1 : this.speed);
    return this.at;
  }

  headers() {
    return this.key() ? { authorization: `Bearer ${this.key()}` } : {};
  }

  /** Follows the live stream for ever; while the past is shown its frames only keep the end of the slider. */
  async follow() {
    for (;;) {
      try {
        const answer = await fetch("/stream", { headers: this.headers() });
        this.refused = answer.status === 401;
        if (answer.ok) await this.#read(answer.body.getReader());
      } catch {
        // the service is gone, or going; it is asked again
      }
      this.connected = false;
      this.changed();
      await new Promise((done) => setTimeout(done, RETRY_MS));
    }
  }

  async #read(reader) {
    const decoder = new TextDecoder();
    let rest = "";
    for (;;) {
      const { done, value } = await reader.read();
      if (done) return;
      const parts = (rest + decoder.decode(value, { stream: true })).split("\n\n");
      rest = parts.pop();
      for (const part of parts) this.#live(part.slice("data: ".length));
      if (!this.connected) {
        this.connected = true;
        this.changed();
      }
    }
  }

  #live(text) {
    this.end = performance.now();
    if (!this.live) return;
    const frame = JSON.parse(text);
    if (this.waiting) return this.waiting.push(frame);
    this.at = frame.t;
    this.heard = performance.now();
    this.take(frame);
  }

  /** What the service keeps: from and to, unix ms. */
  async kept() {
    const answer = await fetch("/history", { headers: this.headers() });
    this.spans = answer.ok ? await answer.json() : [];
    return this.spans;
  }

  /** Shows a time of the past, and plays on from there. */
  async go(at) {
    await this.kept();
    const span = this.spans.findLast(([from]) => from <= at) ?? this.spans[0];
    if (!span) return;
    this.live = false;
    this.coming = await this.#segment(span[0]);
    this.next = span[0];
    this.at = Math.max(at, span[0]);
    this.heard = performance.now();
    while (this.coming.length && this.coming[0].t <= this.at) this.take(this.coming.shift());
    this.changed();
    this.#play();
  }

  async #segment(from) {
    const answer = await fetch(`/history/${from}`, { headers: this.headers() });
    return answer.ok ? (await answer.text()).split("\n").map((line) => JSON.parse(line)) : [];
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
    this.at = this.now();
    this.heard = performance.now();
    while (this.coming.length && this.coming[0].t <= this.at) this.take(this.coming.shift());
    if (this.coming.length) return;
    await this.kept();
    const following = this.spans.find(([from]) => from > this.next);
    if (!following) return this.recorded ? this.pause(false) : this.goLive();
    this.next = following[0];
    this.coming = await this.#segment(this.next);
    this.at = Math.min(this.at, this.coming[0]?.t ?? this.at);
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

  /** Back to what happens now: the stream is read anew, as it begins with a whole frame. */
  async goLive() {
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
    this.speed = { 1: 4, 4: 16, 16: 0.25, 0.25: 1 }[this.speed];
    this.changed();
  }
}
