/* The view of curves, with its panels and controls. */
"use strict";

/** A grid of charts, each with a title and the latest value. */
class Panels {
  /** `onClose(title)`: what a panel's close button does; without it, panels have none. */
  constructor(parent, onClose) {
    this.root = el("div", { className: "panels" });
    parent.append(this.root);
    this.onClose = onClose;
    this.panels = new Map();
    this.runs = [];
    this.groups = null;
  }

  /** Shows these charts, `{title, metrics, log, wide}`, in this order, and no others. */
  show(charts, options) {
    const titles = charts.map((chart) => chart.title);
    for (const [title, panel] of this.panels) {
      if (titles.includes(title)) continue;
      panel.chart.destroy();
      panel.root.remove();
      this.panels.delete(title);
    }
    for (const chart of charts) {
      const chartOptions = { ...options, log: chart.log || options.log };
      const panel = this.panels.get(chart.title);
      if (panel) panel.chart.setOptions(chartOptions);
      else this.panels.set(chart.title, this.#makePanel(chart, chartOptions));
      this.root.append(this.panels.get(chart.title).root);
    }
    this.root.classList.toggle("single", charts.length === 1);
  }

  #makePanel({ title, metrics, wide }, options) {
    const value = el("span", { className: "last" });
    const name = Instar.metricName(title);
    const head = el("div", { className: "head" }, el("h2", { textContent: name, title }), value);
    const container = el("div", { className: "chart" });
    const root = el("section", { className: wide ? "panel wide" : "panel", data: { metric: metrics.join(" ") }, attrs: { "aria-label": name } }, head, container);
    if (this.onClose) {
      const button = el("button", { type: "button", className: "plain close", textContent: "×", attrs: { "aria-label": `Remove ${title}` } });
      button.addEventListener("click", () => this.onClose(title));
      head.append(button);
    }
    this.root.append(root);
    const message = el("p", { className: "none faint", hidden: true });
    const chart = new InstarChart(container, { metric: metrics, legend: Boolean(embedded), height: 300, ...options });
    root.append(message);
    chart.setGroups(this.groups);
    const panel = { root, chart, value, message, metrics };
    if (this.runs.length) this.#draw(panel);
    return panel;
  }

  /** Draws the mean of each group of runs; null: the runs. */
  setGroups(groups) {
    this.groups = groups;
    for (const panel of this.panels.values()) panel.chart.setGroups(groups);
  }

  setRuns(runs) {
    this.runs = runs;
    for (const panel of this.panels.values()) this.#draw(panel);
  }

  #draw(panel) {
    panel.chart.setRuns(this.runs);
    this.#updateSummary(panel);
  }

  /** Adds points, `[[metric, points], …]`, to the curves of a run. */
  appendPoints(key, series) {
    for (const [metric, points] of series) {
      for (const panel of this.panels.values()) {
        if (!panel.metrics.includes(metric)) continue;
        panel.chart.append(key, metric, points);
        this.#updateSummary(panel);
      }
    }
  }

  #updateSummary(panel) {
    const curves = this.runs
      .flatMap((run) => panel.metrics.map((metric) => run.series[metric]?.value || []))
      .filter((values) => values.length);
    panel.root.dataset.points = curves.reduce((sum, values) => sum + values.length, 0);
    panel.root.dataset.runs = curves.length;
    const value = curves.length === 1 ? curves[0].at(-1) : null;
    panel.value.textContent = value == null ? "" : InstarChart.valueText(panel.metrics[0], value);
    const isLoading = this.runs.some((run) => panel.metrics.some((metric) => run.pendingMetrics?.has(metric)));
    panel.message.hidden = curves.length > 0;
    panel.root.classList.toggle("empty", !curves.length && !isLoading);
    panel.message.textContent = isLoading ? "reading" : emptyText(panel.metrics[0]);
  }

  fit() {
    for (const panel of this.panels.values()) panel.chart.fit();
  }

  destroy() {
    for (const panel of this.panels.values()) panel.chart.destroy();
    this.panels.clear();
    this.root.remove();
  }
}

/** The message of a chart without points. */
const emptyText = (metric) => {
  if (metric === "loss") return "no training step is recorded: see record.log_interval";
  if (metric === "val/loss") return "no evaluation is recorded: see eval.eval_interval";
  if (SYSTEM.includes(metric)) return "not recorded by this run";
  return "not measured";
};

/** Whether one of these groups has a mean to draw. */
const hasMeans = (groups) => groups.some((group) => group.runs.length > 1);

const panelOf = (metric) => ({ title: metric, metrics: [metric] });

class CurvesView {
  /** `app`: an App, or its `chartRuns()` and `groups` in an exported page. `charts`: those of an exported page;
      without them, one for each metric of the state. */
  constructor(parent, app, charts) {
    this.app = app;
    this.charts = charts;
    const axis = el("select", { name: "x", attrs: { "aria-label": "Over" } });
    for (const [value, text] of this.#axes()) axis.append(el("option", { value, textContent: text }));
    axis.value = state.x;
    axis.addEventListener("change", () => this.#set({ x: axis.value }));
    const mean = el("select", { name: "mean", attrs: { "aria-label": "Draw" } },
      el("option", { value: "", textContent: "runs" }), el("option", { value: "1", textContent: "mean and band" }));
    mean.value = state.mean ? "1" : "";
    mean.addEventListener("change", () => {
      state.set({ mean: mean.value });
      this.#updateGroups();
      app.recolour?.();
    });
    this.meanLabel = el("label", { title: "The band is the mean ± one standard deviation over runs that differ only in the seed or the fold." }, "Draw", mean);
    const log = el("input", { type: "checkbox", name: "log", checked: state.log });
    log.addEventListener("change", () => this.#set({ log: log.checked ? "1" : "" }));
    const marks = el("input", { type: "checkbox", name: "marks", checked: state.marks });
    marks.addEventListener("change", () => this.#set({ marks: marks.checked ? "1" : "0" }));
    const smooth = el("input", { type: "range", name: "smooth", min: "0", max: "0.999", step: "any", value: String(state.smooth) });
    const weightText = el("output", { textContent: state.smooth.toFixed(2) });
    smooth.addEventListener("input", () => {
      const weight = Number(smooth.value);
      weightText.textContent = weight.toFixed(2);
      this.#set({ smooth: Number(weight.toFixed(3)) });
    });
    this.metricChoice = el("select", { attrs: { "aria-label": "Add a metric" } });
    this.metricChoice.addEventListener("change", () => {
      if (this.metricChoice.value) app.setMetrics([...this.metrics, this.metricChoice.value]);
    });
    const tools = el("div", { className: "tools", attrs: { role: "group", "aria-label": "Curves" } },
      el("label", {}, "Over", axis),
      this.meanLabel,
      el("label", { className: "smooth" }, "Smooth", smooth, weightText),
      el("label", { className: "check" }, log, "Log"),
      el("label", { className: "check" }, marks, "Operations"),
      charts ? el("span", { className: "faint", textContent: "Drag to zoom, double-click to go back." }) : this.metricChoice);
    this.signKey = el("p", { className: "key" });
    parent.append(tools, this.signKey);
    const removeMetric = (metric) => app.setMetrics(this.metrics.filter((m) => m !== metric));
    this.panels = new Panels(parent, charts ? null : removeMetric);
    this.panels.setRuns(app.chartRuns());
    this.#updateGroups();
    this.draw();
  }

  #updateGroups() {
    const { groups } = this.app;
    this.meanLabel.hidden = !hasMeans(groups);
    this.panels.setGroups(state.mean && hasMeans(groups) ? groups : null);
  }

  /** The axes to choose from; in an exported page, only those with data. */
  #axes() {
    const axes = Object.entries(InstarChart.AXES);
    if (!this.charts) return axes;
    const runs = this.app.chartRuns();
    const hasData = (axis) => runs.some((run) => Object.values(run.series).some((series) => (series.x[axis] || []).some(Boolean)));
    const units = new Set(runs.map((run) => run.unit));
    const name = (axis, text) => (axis === "tokens" && units.size === 1 ? `${[...units][0]}s` : text);
    return axes.filter(([axis]) => hasData(axis)).map(([axis, text]) => [axis, name(axis, text)]);
  }

  get metrics() {
    return state.list("metrics");
  }

  #set(changes) {
    state.set(changes);
    this.#drawPanels();
  }

  #drawPanels() {
    const options = { x: state.x, log: state.log, smooth: state.smooth, marks: state.marks };
    this.panels.show(this.charts || this.metrics.map(panelOf), options);
    this.#updateSignKey();
  }

  draw() {
    this.#drawPanels();
    this.#updateMetricChoice();
  }

  /** Explains the signs of the marks in the charts. */
  #updateSignKey() {
    const runs = this.app.chartRuns();
    const signs = new Set(state.marks ? runs.flatMap((run) => run.marks.map((mark) => mark.sign)) : []);
    const meanings = Object.entries(Instar.MEANINGS).filter(([sign]) => signs.has(sign));
    const hasRuns = runs.filter((run) => run.marks.length).length > 1;
    const content = JSON.stringify([meanings, hasRuns]);
    if (content === this.signKeyContent) return;
    this.signKeyContent = content;
    this.signKey.classList.toggle("several", hasRuns);
    this.signKey.replaceChildren(...meanings.map(([sign, [kind, meaning]]) =>
      el("span", {}, el("i", { className: `ic-glyph ic-${kind} ic-sign-${sign}`, attrs: { "aria-hidden": "true" } }), meaning)), hasRuns ? "in the colours of their runs" : "");
  }

  #updateMetricChoice() {
    const names = new Set(METRICS);
    for (const run of this.app.chartRuns()) for (const name of run.names || []) names.add(name);
    const newNames = [...names].filter((name) => !this.metrics.includes(name)).sort();
    const content = newNames.join("\n");
    if (content === this.metricChoiceContent) {
      this.metricChoice.value = "";
      return;
    }
    this.metricChoiceContent = content;
    this.metricChoice.replaceChildren(el("option", { value: "", textContent: "Add a metric" }), ...newNames.map((name) => el("option", { value: name, textContent: Instar.metricName(name) })));
    this.metricChoice.disabled = !newNames.length;
  }

  updateCurves() {
    this.#updateGroups();
    this.panels.setRuns(this.app.chartRuns());
    this.#updateSignKey();
    this.#updateMetricChoice();
  }

  appendPoints(key, series) {
    this.panels.appendPoints(key, series);
  }

  fit() {
    this.panels.fit();
  }

  destroy() {
    this.panels.destroy();
  }
}
