/* The views of a single run: sections, events, system and logs. */
"use strict";

const SYSTEM = ["tokens_per_s", "memory_bytes", "mfu", "data_wait"];
const MACHINE_METRIC = /^(gpu|cpu|disk|power|network|system)[_/]/;
const MAX_LINES = 4000;

const EMPTY = {
  stages: "The run has not started yet.",
  results: "Neither a final test nor text samples are recorded. The test of the best checkpoint:",
  config: "There is no run.yaml.",
};

const SIGNS = {
  operation: "◆", asked: "?", checkpoint: "▪", run_started: "▸", alert: "▲", failed: "▲", stop: "■",
  warning: "!", skip: "∅", run_finished: "●", new_gradients: "∇", analysis: "◇",
};

/** A view of one of the selected runs, with a choice if there are several; subclasses render the response. */
class Detail {
  constructor(parent, app, part) {
    this.app = app;
    this.part = part;
    this.bar = el("div", { className: "tools" });
    this.body = el("div", { className: "detail" });
    parent.append(this.bar, this.body);
    this.#makeRunChoice();
    this.key = app.selection.detailKey;
    this.body.append(el("p", { className: "none faint reading", textContent: "reading" }));
    this.load();
  }

  #makeRunChoice() {
    const { keys, detailKey } = this.app.selection;
    if (keys.length < 2) return;
    const choice = el("select", { attrs: { "aria-label": "Run" } });
    for (const key of keys) {
      const row = this.app.runs.rows.get(key);
      choice.append(el("option", { value: key, textContent: row ? labelOf(row) : key }));
    }
    choice.value = detailKey;
    choice.addEventListener("change", () => {
      state.set({ of: choice.value });
      this.app.draw();
    });
    this.bar.append(el("label", {}, "Run", choice));
  }

  /** Loads and renders the data, unless the view is destroyed meanwhile. */
  async load() {
    if (this.key) await this.loadFrom(runPath(this.key, this.part));
  }

  async loadFrom(path, parameters) {
    try {
      const response = await fetchJson(path, parameters);
      if (!this.isDestroyed) await this.render(response);
    } catch (error) {
      if (!this.isDestroyed) this.showMessage(error.message);
    }
  }

  showMessage(text) {
    this.body.replaceChildren(el("p", { className: "none faint", textContent: text }));
  }

  onEvents(key) {
    if (key === this.key) this.load();
  }

  destroy() {
    this.isDestroyed = true;
  }
}

class SectionsView extends Detail {
  render({ sections }) {
    if (!sections.length) {
      const text = EMPTY[this.part] || "Nothing is recorded yet.";
      const test = `instar test ${shellQuote(`${this.app.runs.folder}/${this.key}`)}`;
      this.body.replaceChildren(emptyState(text, ...(this.part === "results" ? [test] : [])));
      return;
    }
    const openTitles = [...this.body.querySelectorAll("details[open] summary")].map((summary) => summary.textContent);
    drawSections(this.body, sections);
    for (const details of this.body.querySelectorAll("details")) if (openTitles.includes(details.firstChild.textContent)) details.open = true;
  }
}

/** Operations and stages; for a running run, also the panel that requests operations. */
class StagesView extends SectionsView {
  async load() {
    const isRunning = this.app.runs.rows.get(this.key)?.state === "running";
    if (!isRunning) this.panel?.root.remove();
    this.panel = isRunning ? this.panel || new OperationsPanel(this.key) : null;
    if (this.panel && !this.panel.root.isConnected) this.body.before(this.panel.root);
    await Promise.all([this.panel?.load(), super.load()]);
  }
}

/** The key figures of a run, or a comparison of several. */
class OverviewView extends SectionsView {
  async load() {
    const { keys } = this.app.selection;
    if (keys.length < 2) {
      await super.load();
      return;
    }
    this.bar.replaceChildren();
    await this.loadFrom("/api/compare", keys.map((key) => ["run", key]));
  }
}

class EventsView extends Detail {
  render({ events, total, faults }) {
    const kinds = [...new Set(events.map((event) => event.kind))];
    if (!events.length) {
      this.showMessage("Nothing has happened yet.");
      return;
    }
    const choice = (this.kindChoice ||= el("select", { attrs: { "aria-label": "Kind" } }));
    const kindBefore = choice.value;
    choice.replaceChildren(el("option", { value: "", textContent: "everything" }), ...kinds.map((kind) => el("option", { value: kind, textContent: kind.replaceAll("_", " ") })));
    choice.value = kinds.includes(kindBefore) ? kindBefore : "";
    choice.onchange = () => this.render({ events, total, faults });
    if (!choice.isConnected) this.bar.append(el("label", {}, "Show", choice));
    const openIds = new Set([...this.body.querySelectorAll("details[open]")].map((details) => details.dataset.id));
    const items = events
      .filter((event) => !choice.value || event.kind === choice.value)
      .map((event) => this.#item(event, openIds))
      .reverse();
    const notes = [];
    if (total > events.length) notes.push(`The latest ${formatCount(events.length)} of ${formatCount(total)}.`);
    notes.push(...faults);
    this.body.replaceChildren(...notes.map((note) => el("p", { className: "faint", textContent: note })), el("ol", { className: "events" }, items));
  }

  #item(event, openIds) {
    const id = `${event.time} ${event.kind} ${event.step}`;
    const position = [event.step == null ? "" : `step ${formatCount(event.step)}`, formatTime(event.time)];
    if (event.superseded) position.push("superseded");
    const head = [
      el("span", { className: "sign", textContent: SIGNS[event.kind] || "·", attrs: { "aria-hidden": "true" } }),
      el("span", { className: "what" }, el("strong", { textContent: event.title }), event.text ? el("span", { className: "text", textContent: event.text }) : null),
      el("span", { className: "faint when", textContent: position.filter(Boolean).join(" · ") }),
    ];
    const fields = Object.entries(event.fields);
    const item = el("li", { className: event.superseded ? "superseded" : "", data: { kind: event.kind } });
    if (!fields.length) item.append(el("div", { className: "summary" }, head));
    else {
      item.append(el("details", { open: openIds.has(id), data: { id } },
        el("summary", { className: "summary" }, head),
        el("dl", { className: "facts" }, fields.flatMap(([name, value]) => [el("dt", { textContent: name }), el("dd", { textContent: formatJson(value) })]))));
    }
    return item;
  }
}

class SystemView extends SectionsView {
  get metrics() {
    return this.charts().map(({ title }) => title);
  }

  async load() {
    if (!this.panels) {
      const container = el("div");
      this.body.before(container);
      this.panels = new Panels(container);
      this.panels.setRuns(this.app.chartRuns());
      this.panels.show(this.charts(), this.options);
    }
    await super.load();
  }

  get options() {
    return { x: state.x, log: false, smooth: 0, marks: false, height: 200 };
  }

  /** The metrics of every run, and those of the machines that these runs recorded. Not private: Detail's
      constructor calls `load` before the private methods of subclasses exist. */
  charts() {
    const names = new Set(this.app.chartRuns().flatMap((run) => [...(run.names || [])]));
    return [...SYSTEM, ...[...names].filter((name) => MACHINE_METRIC.test(name) && !SYSTEM.includes(name))].map(panelOf);
  }

  updateCurves() {
    const charts = this.charts();
    const hasNewCharts = charts.length > this.panels.panels.size;
    this.panels.show(charts, this.options);
    this.panels.setRuns(this.app.chartRuns());
    if (hasNewCharts) this.app.load();
  }

  appendPoints(key, series) {
    this.panels.appendPoints(key, series);
  }

  fit() {
    this.panels.fit();
  }

  destroy() {
    super.destroy();
    this.panels.destroy();
  }
}

/** The lines of a log, with a search and a checkbox that keeps its end in view. */
class LogPaper {
  constructor(bar, parent, label, title = "") {
    this.search = el("input", { type: "search", placeholder: "Only lines with", attrs: { "aria-label": "Only lines with" } });
    this.search.addEventListener("input", () => this.#filter());
    this.follow = el("input", { type: "checkbox", checked: true });
    this.follow.addEventListener("change", () => this.#scrollToEnd());
    bar.append(...(title ? [el("strong", { textContent: title })] : []), this.search, el("label", { className: "check" }, this.follow, "Follow"));
    this.lines = el("div", { className: "paper log", tabIndex: 0, attrs: { role: "log", "aria-label": label, "aria-live": "off" } });
    parent.append(this.lines);
  }

  /** Appends complete lines; `isCut`: lines before them are missing. */
  append(text, isCut) {
    if (isCut) this.lines.append(el("div", { className: "faint", textContent: "… earlier lines are left out" }));
    for (const line of text.split("\n").slice(0, -1)) {
      const level = / (WARNING|ERROR|CRITICAL): /.exec(line)?.[1].toLowerCase();
      // progress bars return to the start of their line; only their last state is shown
      const textContent = line.replace(/\r$/, "").split("\r").at(-1);
      this.lines.append(el("div", { textContent, className: level || "" }));
    }
    while (this.lines.childElementCount > MAX_LINES) this.lines.firstChild.remove();
    this.#filter();
    this.#scrollToEnd();
  }

  #filter() {
    const query = this.search.value.toLowerCase();
    for (const line of this.lines.children) line.hidden = query !== "" && !line.textContent.toLowerCase().includes(query);
  }

  #scrollToEnd() {
    if (this.follow.checked) this.lines.scrollTop = this.lines.scrollHeight;
  }
}

class LogsView extends Detail {
  onEvents() {}

  async render({ ranks }) {
    if (!ranks.length) {
      this.showMessage("No rank has written a log yet.");
      return;
    }
    const rank = ranks.includes(Number(state.values.rank)) ? Number(state.values.rank) : ranks[0];
    const choice = el("select", { attrs: { "aria-label": "Rank" } }, ranks.map((number) => el("option", { value: String(number), textContent: String(number) })));
    choice.value = String(rank);
    choice.addEventListener("change", () => {
      state.set({ rank: choice.value });
      this.app.draw();
    });
    this.bar.append(el("label", {}, "Rank", choice));
    this.body.replaceChildren();
    this.logPaper = new LogPaper(this.bar, this.body, `Log of rank ${rank}`);
    const response = await fetchJson(runPath(this.key, `logs/${rank}`));
    if (this.isDestroyed) return;
    this.rank = rank;
    this.appendLog({ ...response, key: this.key });
    this.app.openStream();
  }

  /** The log and its end, for the stream. */
  get logPosition() {
    return this.rank == null ? null : { log: `${this.key}/${this.rank}`, offset: this.offset };
  }

  appendLog({ key, rank, text, offset, skipped: isCut }) {
    if (key !== this.key || rank !== this.rank || (this.offset ?? -1) >= offset) return;
    this.offset = offset;
    this.logPaper.append(text, isCut);
  }
}
