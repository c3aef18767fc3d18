/* The data of the page: the list of runs, the curves of the selected ones, and the stream of server-sent
   events that updates both. */
"use strict";

const CONCURRENT_REQUESTS = 5;
const RUNS_PER_REQUEST = 10;

/** Maximum number of points per curve that is requested. */
const maxPoints = (runCount) => (runCount <= 8 ? 2000 : runCount <= 24 ? 1000 : 400);

/** The rows of the list by key, and the chart data of the selected runs. Dispatches "rows", "curves",
    "points" (`{key, series}`: the points added to each metric) and "events" (`{key, hasMarks, hasOperation}`). */
class Runs extends EventTarget {
  constructor() {
    super();
    this.rows = new Map();
    this.chartRuns = new Map();
    this.version = "";
  }

  async load() {
    const response = await fetchJson("/api/runs");
    this.folder = response.folder;
    this.updateRows({ ...response, all: true, gone: [] });
  }

  /** Applies changed rows and the keys of removed ones (`gone`); `all`: the rows replace all others. */
  updateRows({ rows, gone: removedKeys, seen: version, all }) {
    if (all) this.rows.clear();
    for (const row of rows) this.rows.set(row.key, row);
    for (const key of removedKeys) this.rows.delete(key);
    this.version = version;
    this.#dispatch("rows");
  }

  /** Loads the curves of these runs that were not requested before, and drops all other runs. */
  async loadCurves(keys, metrics) {
    for (const key of [...this.chartRuns.keys()]) if (!keys.includes(key)) this.chartRuns.delete(key);
    for (const key of keys) if (!this.chartRuns.has(key)) this.chartRuns.set(key, this.#newChartRun(key));
    const keysByMetrics = new Map();
    for (const key of keys) {
      const run = this.chartRuns.get(key);
      const missing = metrics.filter((metric) => !run.requestedMetrics.has(metric));
      if (!missing.length && run.isLoaded) continue;
      for (const metric of missing) {
        run.requestedMetrics.add(metric);
        run.pendingMetrics.add(metric);
      }
      const metricsJson = JSON.stringify(missing);
      keysByMetrics.set(metricsJson, [...(keysByMetrics.get(metricsJson) || []), key]);
    }
    const requests = [];
    for (const [metricsJson, runKeys] of keysByMetrics) {
      for (let i = 0; i < runKeys.length; i += RUNS_PER_REQUEST) {
        requests.push([runKeys.slice(i, i + RUNS_PER_REQUEST), JSON.parse(metricsJson)]);
      }
    }
    const work = async () => {
      for (let request = requests.shift(); request; request = requests.shift()) {
        await this.#fetchCurves(...request, maxPoints(keys.length));
      }
    };
    await Promise.all(Array.from({ length: CONCURRENT_REQUESTS }, work));
  }

  /** Loads all curves of a run again, after its record was replaced or the stream skipped a part of it. */
  async reload(key) {
    const previous = this.chartRuns.get(key);
    if (!previous) return;
    const run = this.#newChartRun(key);
    for (const metric of previous.requestedMetrics) {
      run.requestedMetrics.add(metric);
      run.pendingMetrics.add(metric);
    }
    this.chartRuns.set(key, run);
    await this.#fetchCurves([key], [...run.requestedMetrics], maxPoints(this.chartRuns.size));
  }

  async reloadMarks(key) {
    const run = this.chartRuns.get(key);
    if (!run) return;
    const [data] = (await fetchJson("/api/curves", [["run", key]])).runs;
    if (!data || data.error) return;
    run.marks = data.marks;
    this.#dispatch("curves");
  }

  #newChartRun(key) {
    const row = this.rows.get(key) || {};
    return {
      id: key, key, name: key, unit: row.unit || "token", series: {}, marks: [], names: new Set(),
      requestedMetrics: new Set(), pendingMetrics: new Set(), pendingPoints: [],
      offset: null, needsStream: false, isLoaded: false,
    };
  }

  async #fetchCurves(keys, metrics, points) {
    const parameters = [["points", points], ...keys.map((key) => ["run", key])];
    let response;
    try {
      response = await fetchJson("/api/curves", [...parameters, ...metrics.map((m) => ["metric", m])]);
    } catch (error) {
      keys.forEach((key) => this.#resetRequests(key));
      throw error;
    }
    const presentKeys = new Set(response.runs.map((data) => data.key));
    for (const key of keys) if (!presentKeys.has(key)) this.#resetRequests(key);
    for (const data of response.runs) {
      const run = this.chartRuns.get(data.key);
      if (!run) continue;
      if (data.error) {
        this.#resetRequests(data.key);
        continue;
      }
      data.names.forEach((name) => run.names.add(name));
      run.marks = data.marks;
      Object.assign(run.series, data.series);
      run.isLoaded = true;
      // the stream resumes from the end of the oldest curve; points that others have already are skipped
      run.offset = run.offset == null ? data.offset : Math.min(run.offset, data.offset);
      run.needsStream = true;
      metrics.forEach((metric) => run.pendingMetrics.delete(metric));
      run.pendingPoints.splice(0).forEach((pending) => this.#appendPoints(run, ...pending));
    }
    this.#dispatch("curves");
  }

  /** Forgets what was requested of a run that is missing or unreadable: it is requested again when shown again. */
  #resetRequests(key) {
    const run = this.chartRuns.get(key);
    run?.pendingMetrics.clear();
    run?.requestedMetrics.clear();
  }

  /** Applies a message of the stream, see `stream_messages` in extensions/board/stream.py. */
  update(message) {
    const run = this.chartRuns.get(message.key);
    if (!run) return;
    if (!run.needsStream) run.offset = Math.max(run.offset ?? 0, message.offset);
    if (message.rewind) this.#rewind(run, message.rewind);
    for (const name of message.names || []) run.names.add(name);
    const series = [];
    for (const [metric, points] of Object.entries(message.points || {})) {
      const newPoints = this.#appendPoints(run, metric, points);
      if (newPoints) series.push([metric, newPoints]);
    }
    const marks = (message.marks || []).filter((mark) => !run.marks.some((other) => isSameMark(other, mark)));
    run.marks.push(...marks);
    if (series.length) this.#dispatch("points", { key: run.id, series });
    if (marks.length || message.rewind) this.#dispatch("curves");
    if (!message.has_events) return;
    const hasOperation = marks.some((mark) => mark.kind === "operation");
    this.#dispatch("events", { key: run.id, hasMarks: Boolean(message.marks), hasOperation });
  }

  /** Appends the points that the curve does not have yet, and returns them; null if there are none. */
  #appendPoints(run, metric, points) {
    if (!run.requestedMetrics.has(metric)) return null;
    if (run.pendingMetrics.has(metric)) {
      run.pendingPoints.push([metric, points]);
      return null;
    }
    const axes = Object.keys(points.x);
    const series = (run.series[metric] ||= {
      x: Object.fromEntries(axes.map((axis) => [axis, []])), value: [], superseded: [], segment: 0,
    });
    const lastStep = series.x.step.at(-1) ?? -1;
    const lastTime = series.x.time.at(-1) ?? -1;
    // a step is evaluated again after a growth
    const isNew = (step, i) => step > lastStep || (step === lastStep && points.x.time[i] > lastTime);
    const first = points.x.step.findIndex((step, i) => points.segment > series.segment || isNew(step, i));
    if (first < 0 || points.segment < Math.max(series.segment, run.rewindSegment || 0)) return null;
    const newPoints = { x: {}, value: points.value.slice(first) };
    for (const axis of axes) {
      newPoints.x[axis] = points.x[axis].slice(first);
      series.x[axis].push(...newPoints.x[axis]);
    }
    series.value.push(...newPoints.value);
    series.segment = points.segment;
    return newPoints;
  }

  /** Moves the points after `step` to the superseded ones, as a new segment starts there. */
  #rewind(run, { step, segment }) {
    if (segment <= (run.rewindSegment || 0)) return;
    run.rewindSegment = segment;
    for (const series of Object.values(run.series)) {
      if (series.segment >= segment) continue;
      const first = series.x.step.findIndex((pointStep) => pointStep > step);
      if (first < 0) continue;
      const x = {};
      for (const axis of Object.keys(series.x)) x[axis] = series.x[axis].splice(first);
      series.even = series.even?.filter((i) => i < first);
      series.superseded.push({ segment: series.segment, x, value: series.value.splice(first) });
    }
  }

  #dispatch(name, detail) {
    this.dispatchEvent(new CustomEvent(name, { detail }));
  }
}

const isSameMark = (a, b) => a.kind === b.kind && a.x.step === b.x.step && a.title === b.title;

const SILENCE_MS = 25000;
const RECONNECT_MS = 1500;

/** The stream of server-sent events, reopened when other runs are shown or the page becomes visible.
    Dispatches "state" with "live" or "lost". */
class Stream extends EventTarget {
  /** `getRequest()` returns `subject`, which identifies what is streamed; `isBehind`, whether the open
      stream started too late for it; and `query()`, the query that resumes from the data that is loaded. */
  constructor(getRequest, onMessage) {
    super();
    this.getRequest = getRequest;
    this.onMessage = onMessage;
    this.state = "waiting";
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.#close();
      else this.open();
    });
    setInterval(() => this.#checkSilence(), 5000);
  }

  /** Opens the stream if it is closed, or again if it does not fit the request. */
  open() {
    if (document.hidden) return;
    const { subject, isBehind, query } = this.getRequest();
    if (this.source && subject === this.subject && !isBehind) return;
    this.#close();
    this.subject = subject;
    const source = new EventSource(`/api/stream?${query()}`);
    this.source = source;
    this.messageTime = Date.now();
    source.onopen = () => {
      this.messageTime = Date.now();
      this.#setState("live");
    };
    source.onerror = () => {
      if (source !== this.source) return;
      this.#setState("lost");
      if (source.readyState === EventSource.CLOSED) this.#reopenLater();
    };
    source.addEventListener("beat", () => (this.messageTime = Date.now()));
    for (const name of ["runs", "news", "anew", "log", "fleets", "fleet", "fleet_log"]) {
      source.addEventListener(name, (event) => {
        if (source !== this.source) return;
        this.messageTime = Date.now();
        this.#setState("live");
        this.onMessage(name, JSON.parse(event.data));
      });
    }
  }

  #reopenLater() {
    this.#close();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.open(), RECONNECT_MS);
  }

  #close() {
    this.source?.close();
    this.source = null;
  }

  /** Detects a connection that broke without an error. */
  #checkSilence() {
    if (!this.source || Date.now() - this.messageTime < SILENCE_MS) return;
    if (this.source.readyState === EventSource.CONNECTING) return;
    this.#setState("lost");
    this.#reopenLater();
  }

  #setState(newState) {
    if (newState === this.state) return;
    this.state = newState;
    this.dispatchEvent(new CustomEvent("state", { detail: newState }));
  }
}
