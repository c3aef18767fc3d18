/* What the page knows of the runs: the list, the curves of those that are shown, and the stream of
   server-sent events that brings what is new. */
"use strict";

const AT_ONCE = 5;
const IN_ONE = 10;

/** As many points of a curve as so many curves leave room for. */
const pointsOf = (runs) => (runs <= 8 ? 2000 : runs <= 24 ? 1000 : 400);

class Runs {
  constructor() {
    this.rows = new Map();
    this.shown = new Map();
    this.seen = "";
    this.told = new EventTarget();
  }

  async load() {
    const answer = await ask("/api/runs");
    this.folder = answer.folder;
    this.take({ ...answer, all: true, gone: [] });
  }

  /** Rows that changed; `all`: there are no others. */
  take({ rows, gone, seen, all }) {
    if (all) this.rows.clear();
    for (const row of rows) this.rows.set(row.key, row);
    for (const key of gone) this.rows.delete(key);
    this.seen = seen;
    this.#tell("list");
  }

  /** Show these runs, with these metrics; what is there already is not asked for again. */
  async show(keys, metrics) {
    for (const key of [...this.shown.keys()]) if (!keys.includes(key)) this.shown.delete(key);
    for (const key of keys) if (!this.shown.has(key)) this.shown.set(key, this.#empty(key));
    const lacking = new Map();
    for (const key of keys) {
      const run = this.shown.get(key);
      const missing = metrics.filter((metric) => !run.asked.has(metric));
      if (!missing.length && run.loaded) continue;
      for (const metric of missing) {
        run.asked.add(metric);
        run.coming.add(metric);
      }
      const together = JSON.stringify(missing);
      lacking.set(together, [...(lacking.get(together) || []), key]);
    }
    const parts = [];
    for (const [missing, those] of lacking) {
      for (let i = 0; i < those.length; i += IN_ONE) {
        parts.push([those.slice(i, i + IN_ONE), JSON.parse(missing)]);
      }
    }
    const next = async () => {
      for (let part = parts.shift(); part; part = parts.shift()) {
        await this.#fetch(...part, pointsOf(keys.length));
      }
    };
    await Promise.all(Array.from({ length: AT_ONCE }, next));
  }

  /** Reads a run anew: it has become another one, or too much was missed. */
  async again(key) {
    const before = this.shown.get(key);
    if (!before) return;
    const run = this.#empty(key);
    for (const metric of before.asked) {
      run.asked.add(metric);
      run.coming.add(metric);
    }
    this.shown.set(key, run);
    await this.#fetch([key], [...run.asked], pointsOf(this.shown.size));
    this.#tell("curves", { key, anew: true });
  }

  async marksAgain(key) {
    const run = this.shown.get(key);
    if (!run) return;
    const [found] = (await ask("/api/curves", [["run", key]])).runs;
    if (!found || found.error) return;
    run.marks = found.marks;
    this.#tell("curves", { key, anew: true });
  }

  #empty(key) {
    const row = this.rows.get(key) || {};
    return {
      id: key, key, name: key, unit: row.unit || "token", series: {}, marks: [],
      names: new Set(), asked: new Set(), coming: new Set(), waiting: [],
      offset: null, held: false, loaded: false,
    };
  }

  async #fetch(keys, metrics, points) {
    const parameters = [["points", points], ...keys.map((key) => ["run", key])];
    let answer;
    try {
      answer = await ask("/api/curves", [...parameters, ...metrics.map((m) => ["metric", m])]);
    } catch (error) {
      keys.forEach((key) => this.#forget(key));
      throw error;
    }
    const answered = new Set(answer.runs.map((found) => found.key));
    for (const key of keys) if (!answered.has(key)) this.#forget(key);
    for (const found of answer.runs) {
      const run = this.shown.get(found.key);
      if (!run) continue;
      if (found.error) {
        this.#forget(found.key);
        continue;
      }
      found.names.forEach((name) => run.names.add(name));
      run.marks = found.marks;
      Object.assign(run.series, found.series);
      run.loaded = true;
      // the stream goes on from where the oldest of the curves ends; what is known is passed over
      run.offset = run.offset == null ? found.offset : Math.min(run.offset, found.offset);
      run.held = true;
      metrics.forEach((metric) => run.coming.delete(metric));
      const waiting = run.waiting.splice(0);
      waiting.forEach(([metric, points]) => this.#append(run, metric, points));
    }
    for (const key of keys) this.#tell("curves", { key, anew: true });
  }

  /** A run that is not there, or cannot be read, is asked for again when it is shown again. */
  #forget(key) {
    const run = this.shown.get(key);
    run?.coming.clear();
    run?.asked.clear();
  }

  /** What a record has grown by. */
  grow(message) {
    const run = this.shown.get(message.key);
    if (!run) return;
    if (!run.held) run.offset = Math.max(run.offset ?? 0, message.offset);
    if (message.rewind) this.#rewind(run, message.rewind);
    for (const name of message.names || []) run.names.add(name);
    const grown = [];
    for (const [metric, points] of Object.entries(message.points || {})) {
      const added = this.#append(run, metric, points);
      if (added) grown.push([metric, added]);
    }
    const marks = (message.marks || []).filter((mark) => !run.marks.some((m) => same(m, mark)));
    run.marks.push(...marks);
    if (grown.length) this.#tell("points", { key: run.id, grown });
    if (marks.length || message.rewind) this.#tell("curves", { key: run.id, anew: true });
    if (!message.told) return;
    const operated = marks.some((mark) => mark.kind === "operation");
    this.#tell("happened", { key: run.id, placed: Boolean(message.marks), operated });
  }

  /** The points that the curve does not have yet; null: none. */
  #append(run, metric, points) {
    if (!run.asked.has(metric)) return null;
    if (run.coming.has(metric)) {
      run.waiting.push([metric, points]);
      return null;
    }
    const axes = Object.keys(points.x);
    const found = (run.series[metric] ||= {
      x: Object.fromEntries(axes.map((axis) => [axis, []])), value: [], superseded: [], segment: 0,
    });
    const last = found.x.step.at(-1) ?? -1;
    const later = (step) => points.segment > found.segment || step > last;
    const first = points.x.step.findIndex(later);
    if (first < 0 || points.segment < Math.max(found.segment, run.rewound || 0)) return null;
    const added = { x: {}, value: points.value.slice(first) };
    for (const axis of axes) {
      added.x[axis] = points.x[axis].slice(first);
      found.x[axis].push(...added.x[axis]);
    }
    found.value.push(...added.value);
    found.segment = points.segment;
    return added;
  }

  /** A new segment goes on from `step`: what lies behind it is superseded. */
  #rewind(run, { step, segment }) {
    if (segment <= (run.rewound || 0)) return;
    run.rewound = segment;
    for (const found of Object.values(run.series)) {
      if (found.segment >= segment) continue;
      const from = found.x.step.findIndex((at) => at > step);
      if (from < 0) continue;
      const x = {};
      for (const axis of Object.keys(found.x)) x[axis] = found.x[axis].splice(from);
      found.even = found.even?.filter((at) => at < from);
      found.superseded.push({ segment: found.segment, x, value: found.value.splice(from) });
    }
  }

  #tell(name, detail) {
    this.told.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

const same = (a, b) => a.kind === b.kind && a.x.step === b.x.step && a.title === b.title;

/* The one stream: opened anew when something else is shown, and when the page is looked at again;
   told where it left off each time. */

const SILENT_MS = 25000;
const AGAIN_MS = 1500;

class Stream {
  /** `where()` gives `about`, what is shown; `behind`, whether more must be told of it than the
      open stream will; and `query()`, with up to where it is known. */
  constructor(where, hear) {
    this.where = where;
    this.hear = hear;
    this.told = new EventTarget();
    this.state = "waiting";
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.#close();
      else this.open();
    });
    setInterval(() => this.#watch(), 5000);
  }

  /** (Re)opens the stream, if what it would be asked has changed or it is closed. */
  open() {
    if (document.hidden) return;
    const { about, behind, query } = this.where();
    if (this.source && about === this.about && !behind) return;
    this.#close();
    this.about = about;
    const source = new EventSource(`/api/stream?${query()}`);
    this.source = source;
    this.heard = Date.now();
    source.onopen = () => {
      this.heard = Date.now();
      this.#say("live");
    };
    source.onerror = () => {
      if (source !== this.source) return;
      this.#say("lost");
      if (source.readyState === EventSource.CLOSED) this.#later();
    };
    source.addEventListener("beat", () => (this.heard = Date.now()));
    for (const name of ["runs", "news", "anew", "log", "fleets", "fleet", "fleet_log"]) {
      source.addEventListener(name, (event) => {
        if (source !== this.source) return;
        this.heard = Date.now();
        this.#say("live");
        this.hear(name, JSON.parse(event.data));
      });
    }
  }

  #later() {
    this.#close();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.open(), AGAIN_MS);
  }

  #close() {
    this.source?.close();
    this.source = null;
  }

  /** A connection may die without a word. */
  #watch() {
    if (!this.source || Date.now() - this.heard < SILENT_MS) return;
    if (this.source.readyState === EventSource.CONNECTING) return;
    this.#say("lost");
    this.#later();
  }

  #say(state) {
    if (state === this.state) return;
    this.state = state;
    this.told.dispatchEvent(new CustomEvent("state", { detail: state }));
  }
}
