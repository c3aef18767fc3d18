/* The dashboard: shows the selected runs, and updates them from the stream. */
"use strict";

const VIEWS = { curves: CurvesView, overview: OverviewView, stages: StagesView, events: EventsView, system: SystemView, logs: LogsView };
const LINK_TEXTS = { waiting: "connecting", live: "live", lost: "no connection" };
const DEFER_MS = 400;
const MAX_SELECTED = 11;

class App {
  constructor() {
    this.runs = new Runs();
    this.selection = new RunSelection();
    this.list = new List(this.runs, this.selection);
    this.stream = new Stream(() => this.#streamRequest(), (name, data) => this.#onMessage(name, data));
    this.timers = new Map();
    this.shapes = new Map();
    this.#makeTabs();
    makeThemeButton();
    preparePrint(() => this.view?.fit?.());
    this.#makeDrawer();
    this.runs.addEventListener("rows", () => this.#onRows());
    this.runs.addEventListener("curves", () => this.#requestUpdate());
    this.runs.addEventListener("points", ({ detail }) => this.#onPoints(detail));
    this.runs.addEventListener("events", ({ detail }) => this.#onEvents(detail));
    this.selection.addEventListener("change", () => this.draw());
    state.addEventListener("navigate", () => {
      this.selection.readState();
      this.draw();
    });
    this.stream.addEventListener("state", ({ detail }) => this.#setLink(detail));
  }

  async start() {
    for (;;) {
      try {
        await this.runs.load();
        break;
      } catch {
        this.#setLink("lost");
        await new Promise((resolve) => setTimeout(resolve, RECONNECT_MS));
      }
    }
    byId("folder").textContent = this.runs.folder;
    this.draw();
    this.stream.open();
  }

  /** The selected runs as charts take them; a free slot is an empty run, so that the others keep their colours. */
  chartRuns() {
    return this.selection.slots.map((key) => {
      const run = this.runs.chartRuns.get(key);
      if (!run) return { id: "", name: "", series: {}, marks: [], names: [] };
      const row = this.runs.rows.get(key);
      if (row) run.name = labelOf(row);
      return run;
    });
  }

  get groups() {
    return this.selection.groups;
  }

  /** Updates the colours of the lists to those of the curves. */
  recolour() {
    this.list.draw();
    this.#drawSelected();
  }

  setMetrics(metrics) {
    state.setList("metrics", [...new Set(metrics)]);
    this.view.draw?.();
    this.load();
  }

  /** Draws everything again, with a new view. */
  draw() {
    this.#selectLatest();
    this.recolour();
    this.#drawFigures();
    const { tab } = state;
    for (const button of byId("tabs").children) {
      const isSelected = button.dataset.tab === tab;
      button.setAttribute("aria-selected", String(isSelected));
      button.tabIndex = isSelected ? 0 : -1;
    }
    this.view?.destroy();
    const view = byId("view");
    view.replaceChildren();
    view.setAttribute("aria-labelledby", `tab-${tab}`);
    this.view = null;
    const { fleet } = state.values;
    document.body.classList.toggle("of-fleet", Boolean(fleet));
    drawFleets(this.fleets || []);
    if (fleet) {
      this.view = new FleetView(view, this);
      this.openStream();
      return;
    }
    const { keys } = this.selection;
    const missingKeys = keys.filter((key) => !this.runs.rows.has(key));
    const isEmpty = missingKeys.length === keys.length;
    document.body.classList.toggle("nothing", isEmpty);
    if (isEmpty) view.append(this.#emptyView(missingKeys));
    else this.view = tab === "curves" ? new CurvesView(view, this) : new (VIEWS[tab] || SectionsView)(view, this, tab);
    this.load();
  }

  /** What is shown in place of a view: why the selected runs are missing, or how to start a run. */
  #emptyView(missingKeys) {
    if (missingKeys.length) {
      const names = missingKeys.slice(0, 5).join(", ") + (missingKeys.length > 5 ? ` and ${missingKeys.length - 5} more` : "");
      const message = emptyState(`${names}: not in this folder. ${missingKeys.length > 1 ? "They were" : "It was"} moved, renamed or deleted since this address was kept.`);
      if (this.runs.rows.size) message.append(el("a", { href: "#", textContent: "Show the existing runs" }));
      return message;
    }
    if (this.runs.rows.size) return emptyState("Choose a run. All of them are archived.");
    return emptyState("No run yet. The first one is shown here as soon as it starts.", "instar demo", "instar init gpt && instar train gpt.yaml");
  }

  /** Selects the latest run if none is selected. */
  #selectLatest() {
    if (this.selection.keys.length) return;
    const rows = [...this.runs.rows.values()].filter((row) => !row.archived).sort((a, b) => (b.started || 0) - (a.started || 0) || (b.seen || 0) - (a.seen || 0));
    // runs that have not started have nothing to show
    const latest = rows.find((row) => row.seen !== null) || rows[0];
    this.selection.slots = latest ? [latest.key] : [];
  }

  async load() {
    if (state.values.fleet) {
      this.openStream();
      return;
    }
    const metrics = this.view?.metrics || state.list("metrics");
    const loading = this.runs.loadCurves(this.selection.keys, metrics);
    this.#requestUpdate();
    this.#loadGroups().catch(() => this.#loadLater());
    try {
      await loading;
    } catch {
      this.#loadLater();
      return;
    }
    this.openStream();
    const { keys, detailKey } = this.selection;
    if (keys.length === 1 && this.runs.rows.has(detailKey)) await this.#loadShape(detailKey);
  }

  #loadLater() {
    this.#defer("load", () => this.load());
  }

  /** Loads which of the selected runs differ only in the seed or the fold. */
  async #loadGroups() {
    const { keys } = this.selection;
    const keysJson = JSON.stringify(keys);
    if (keysJson === this.groupedKeysJson) return;
    const { groups } = keys.length > 1 ? await fetchJson("/api/groups", keys.map((key) => ["run", key])) : { groups: [] };
    if (keysJson !== JSON.stringify(this.selection.keys)) return;
    this.groupedKeysJson = keysJson;
    this.selection.groups = groups;
    this.recolour();
    this.#requestUpdate();
  }

  /** Loads the current architecture of a run's model. */
  async #loadShape(key) {
    try {
      const { shape } = await fetchJson(runPath(key, "stages"));
      if (shape) this.shapes.set(key, shape);
    } catch {
      this.shapes.delete(key);
    }
    this.#drawFigures();
  }

  /** Opens the stream for what is shown now, unless it is open already. */
  openStream() {
    this.stream.open();
  }

  #streamRequest() {
    const runs = [...this.runs.chartRuns.values()].filter((run) => run.isLoaded && run.offset != null);
    const metrics = new Set(runs.flatMap((run) => [...run.requestedMetrics]));
    const { logPosition, logName, fleetLogPosition } = this.view || {};
    const { fleet } = state.values;
    const subject = JSON.stringify([runs.map((run) => run.id), [...metrics].sort(), logPosition?.log, fleet, logName]);
    const query = () => {
      const parameters = new URLSearchParams({ seen: this.runs.version });
      for (const run of runs) {
        parameters.append("run", `${run.id}:${run.offset}`);
        run.needsStream = false;
      }
      for (const metric of metrics) parameters.append("metric", metric);
      if (logPosition) parameters.append("log", `${logPosition.log}:${logPosition.offset}`);
      if (fleet) parameters.append("fleet", fleet);
      if (fleetLogPosition) parameters.append("fleet_log", fleetLogPosition);
      return parameters;
    };
    return { subject, isBehind: runs.some((run) => run.needsStream), query };
  }

  #onMessage(name, data) {
    if (name === "runs") this.runs.updateRows(data);
    else if (name === "news") this.runs.update(data);
    else if (name === "anew") this.#reloadRun(data.key);
    else if (name === "fleets") drawFleets((this.fleets = data.rows));
    else if (name === "fleet") this.view?.updateFleet?.(data);
    else this.view?.appendLog?.(data);
  }

  async #reloadRun(key) {
    try {
      await this.runs.reload(key);
    } catch {
      this.#loadLater();
      return;
    }
    this.openStream();
    this.#onEvents({ key, hasMarks: true, hasOperation: true });
  }

  #onRows() {
    if (!this.view) {
      // the first rows are drawn by start()
      if (this.hasRows) this.draw();
      this.hasRows = true;
      return;
    }
    this.recolour();
    this.#drawFigures();
  }

  #onPoints({ key, series }) {
    this.view?.appendPoints?.(key, series);
    if (key === this.selection.detailKey) this.#drawFigures();
  }

  #onEvents({ key, hasMarks, hasOperation }) {
    this.#defer(`view ${key}`, () => this.view?.onEvents?.(key));
    if (!hasMarks) this.#defer(`marks ${key}`, () => this.runs.reloadMarks(key).catch(() => {}));
    if (hasOperation && this.selection.keys.length === 1) this.#defer(`shape ${key}`, () => this.#loadShape(key));
  }

  /** Calls `action` after a delay; further calls of the same name until then are dropped. */
  #defer(name, action) {
    if (this.timers.has(name)) return;
    this.timers.set(name, setTimeout(() => {
      this.timers.delete(name);
      action();
    }, DEFER_MS));
  }

  #requestUpdate() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.view?.updateCurves?.();
      this.#drawFigures();
    });
  }

  /** Draws the error of a crashed run above its views. */
  async #drawFailure() {
    const { keys, detailKey } = this.selection;
    const row = keys.length === 1 && !state.values.fleet ? this.runs.rows.get(detailKey) : null;
    const failure = row?.state === "crashed" ? `${row.key} ${row.reason}` : "";
    if (failure === this.failure) return;
    this.failure = failure;
    const box = byId("failure");
    box.hidden = !failure;
    box.replaceChildren();
    if (!failure) return;
    try {
      const { sections } = await fetchJson(runPath(detailKey, "failure"));
      if (failure !== this.failure) return;
      drawSections(box, sections);
      box.hidden = !sections.length;
    } catch {
      this.failure = null;
    }
  }

  /** Draws the list of selected runs, the note and the document's title. */
  #drawSelected() {
    this.#drawFailure();
    const { keys, detailKey } = this.selection;
    const isSingle = keys.length < 2;
    const labels = keys.map((key) => (this.runs.rows.has(key) ? labelOf(this.runs.rows.get(key)) : key));
    const shortLabels = isSingle ? labels : InstarChart.shortNames(labels, 40);
    const items = keys.map((key, i) => {
      const row = this.runs.rows.get(key);
      const remove = el("button", { type: "button", className: "plain", textContent: "×", attrs: { "aria-label": `Hide ${labels[i]}` } });
      remove.addEventListener("click", () => this.selection.toggle(key));
      const item = el("li", {},
        el("span", { className: "swatch" }),
        el("span", { className: "name", textContent: shortLabels[i], title: labels[i] }),
        row ? badgeOf(row.state, stateText(row)) : badgeOf("gone", "not here"),
        row?.reason && row.state !== "crashed" ? el("span", { className: "faint reason", textContent: row.reason }) : null,
        isSingle ? null : remove);
      item.style.setProperty("--swatch", this.selection.colour(key));
      return item;
    });
    const hiddenCount = items.length - MAX_SELECTED;
    if (hiddenCount > 1 && !this.isExpanded) {
      const button = el("button", { type: "button", className: "plain", textContent: `and ${formatCount(hiddenCount)} more` });
      button.addEventListener("click", () => {
        this.isExpanded = true;
        this.#drawSelected();
      });
      items.splice(MAX_SELECTED, hiddenCount, el("li", {}, button));
    }
    byId("chosen").classList.toggle("unfolded", Boolean(this.isExpanded));
    byId("chosen").replaceChildren(...items);
    const row = this.runs.rows.get(detailKey);
    this.#drawNote(isSingle && row ? row : {});
    const title = isSingle ? row && labelOf(row) : `${keys.length} runs`;
    document.title = [state.values.fleet || title, "Instar"].filter(Boolean).join(" – ");
  }

  #drawNote({ tags = [], note = "" }) {
    const box = byId("note");
    box.hidden = !tags.length && !note;
    box.replaceChildren(...tags.map((tag) => el("span", { className: "tag", textContent: tag })), note);
  }

  /** Draws the key figures of a single run. */
  #drawFigures() {
    const key = this.selection.detailKey;
    const row = this.runs.rows.get(key);
    const box = byId("figures");
    box.hidden = !row || row.step == null || this.selection.keys.length > 1;
    if (box.hidden) return;
    const { series = {} } = this.runs.chartRuns.get(key) || {};
    const longest = Object.values(series).reduce((a, b) => ((b.x.step?.at(-1) ?? -1) > (a?.x.step?.at(-1) ?? -1) ? b : a), null);
    const end = (axis) => longest?.x[axis]?.at(-1);
    const unit = row.unit || "token";
    const shape = this.shapes.get(key) || {};
    const figures = [
      ["Step", formatCount(end("step") > row.step ? end("step") : row.step)],
      ["Loss", formatValue("loss", series.loss?.value.at(-1) ?? row.loss)],
      [`Best ${bestMetric(row)}`, formatValue("loss", row.best)],
      [`${unit[0].toUpperCase()}${unit.slice(1)}s`, formatAxisValue("tokens", end("tokens"))],
      ["FLOPs", formatAxisValue("flops", end("flops"))],
      ["Active time", formatAxisValue("active_s", end("active_s"))],
      ["Model", shape.model || row.model || "–"],
      ["Parameters", shape.parameters ? formatAxisValue("tokens", shape.parameters) : "–"],
    ];
    const figuresJson = JSON.stringify(figures);
    if (figuresJson === this.figuresJson) return;
    this.figuresJson = figuresJson;
    box.replaceChildren(...figures.map(([name, value]) => el("div", {}, el("dt", { textContent: name }), el("dd", { textContent: value }))));
  }

  #setLink(link) {
    const sign = byId("link");
    sign.dataset.state = link;
    sign.textContent = LINK_TEXTS[link];
    byId("lost").hidden = link !== "lost";
    if (link === "live" && this.link === "lost") this.load();
    this.link = link;
  }

  #makeTabs() {
    const tabs = byId("tabs");
    for (const tab of TABS) {
      const button = el("button", { type: "button", id: `tab-${tab}`, textContent: tab[0].toUpperCase() + tab.slice(1), data: { tab }, attrs: { role: "tab", "aria-controls": "view" } });
      button.addEventListener("click", () => {
        state.set({ tab });
        this.draw();
      });
      tabs.append(button);
    }
    tabs.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const next = TABS[(TABS.indexOf(state.tab) + step + TABS.length) % TABS.length];
      byId(`tab-${next}`).click();
      byId(`tab-${next}`).focus();
    });
  }

  /** Sets up the button that opens the list on a narrow screen. */
  #makeDrawer() {
    const button = byId("show-list");
    const setOpen = (isOpen) => {
      document.body.classList.toggle("listing", isOpen);
      button.setAttribute("aria-expanded", String(isOpen));
    };
    button.addEventListener("click", () => setOpen(!document.body.classList.contains("listing")));
    byId("runs").addEventListener("click", (event) => {
      if (event.target.closest("button.run")) setOpen(false);
    });
    addEventListener("keydown", (event) => {
      if (event.key === "Escape") setOpen(false);
    });
  }
}

if (embedded) showExported(embedded);
else new App().start();
