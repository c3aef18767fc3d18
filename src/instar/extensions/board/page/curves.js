/* The view of curves: which charts, over which axis, how smooth. */
"use strict";

/** Charts side by side; each `{title, metrics, log, wide}`. */
class Panels {
  /** `close(metric)` takes a chart away; without it they stay. */
  constructor(parent, close) {
    this.root = el("div", { className: "panels" });
    parent.append(this.root);
    this.close = close;
    this.panels = new Map();
    this.runs = [];
    this.groups = null;
  }

  /** These charts, in this order. */
  show(wanted, options) {
    const titles = wanted.map((each) => each.title);
    for (const [title, panel] of this.panels) {
      if (titles.includes(title)) continue;
      panel.chart.destroy();
      panel.root.remove();
      this.panels.delete(title);
    }
    for (const each of wanted) {
      const known = this.panels.get(each.title);
      const own = { ...options, log: each.log || options.log };
      if (known) known.chart.setOptions(own);
      else this.panels.set(each.title, this.#make(each, own));
      this.root.append(this.panels.get(each.title).root);
    }
    this.root.classList.toggle("single", wanted.length === 1);
  }

  #make({ title, metrics, wide }, options) {
    const last = el("span", { className: "last" });
    const name = Instar.metricName(title);
    const head = el("div", { className: "head" }, el("h2", { textContent: name, title }), last);
    const place = el("div", { className: "chart" });
    const root = el("section", { className: wide ? "panel wide" : "panel", data: { metric: metrics.join(" ") }, attrs: { "aria-label": name } }, head, place);
    if (this.close) {
      const button = el("button", { type: "button", className: "plain close", textContent: "×", attrs: { "aria-label": `Remove ${title}` } });
      button.addEventListener("click", () => this.close(title));
      head.append(button);
    }
    this.root.append(root);
    const none = el("p", { className: "none faint", hidden: true });
    const chart = new InstarChart(place, { metric: metrics, legend: Boolean(embedded), height: 300, ...options });
    root.append(none);
    chart.setGroups(this.groups);
    const panel = { root, chart, last, none, metrics };
    if (this.runs.length) this.#draw(panel);
    return panel;
  }

  /** The mean of each of these groups of runs, or, with null, the runs. */
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
    this.#tell(panel);
  }

  /** Points that a run's curves have grown by. */
  grow(key, grown) {
    for (const [metric, added] of grown) {
      for (const panel of this.panels.values()) {
        if (!panel.metrics.includes(metric)) continue;
        panel.chart.append(key, metric, added);
        this.#tell(panel);
      }
    }
  }

  #tell(panel) {
    const found = this.runs.flatMap((run) => panel.metrics.map((metric) => run.series[metric]?.value || []));
    const there = found.filter((values) => values.length);
    panel.root.dataset.points = found.reduce((sum, values) => sum + values.length, 0);
    panel.root.dataset.runs = there.length;
    const value = there.length === 1 ? there[0].at(-1) : null;
    panel.last.textContent = value == null ? "" : InstarChart.valueText(panel.metrics[0], value);
    const loading = this.runs.some((run) => panel.metrics.some((metric) => run.coming?.has(metric)));
    panel.none.hidden = there.length > 0;
    panel.root.classList.toggle("empty", !there.length && !loading);
    panel.none.textContent = loading ? "reading" : emptyText(panel.metrics[0]);
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

/** What a chart without a point says. */
const emptyText = (metric) => {
  if (metric === "loss") return "no training step is recorded: see record.log_interval";
  if (metric === "val/loss") return "no evaluation is recorded: see eval.eval_interval";
  if (SYSTEM.includes(metric)) return "not recorded by this run";
  return "not measured";
};

/** Whether there is a mean to draw of one of these groups. */
const repeated = (groups) => groups.some((group) => group.runs.length > 1);

const panelOf = (metric) => ({ title: metric, metrics: [metric] });

class CurvesView {
  /** `app`: `drawn()` gives the runs, `groups` those that differ only in the seed or the fold, `setMetrics` changes
      what is shown, and `recolour` what has the colours of the curves. `charts`: those of an exported
      page; without them, one for each chosen metric. */
  constructor(parent, app, charts) {
    this.app = app;
    this.charts = charts;
    this.axis = el("select", { name: "x", attrs: { "aria-label": "Over" } });
    for (const [value, text] of this.#axes()) this.axis.append(el("option", { value, textContent: text }));
    this.axis.value = state.x;
    this.axis.addEventListener("change", () => this.#set({ x: this.axis.value }));
    this.mean = el("select", { name: "mean", attrs: { "aria-label": "Draw" } },
      el("option", { value: "", textContent: "runs" }), el("option", { value: "1", textContent: "mean and band" }));
    this.mean.value = state.mean ? "1" : "";
    this.mean.addEventListener("change", () => {
      state.set({ mean: this.mean.value });
      this.#group();
      app.recolour?.();
    });
    this.of = el("label", { title: "The band is the mean ± one standard deviation over runs that differ only in the seed or the fold." }, "Draw", this.mean);
    this.log = el("input", { type: "checkbox", name: "log", checked: state.log });
    this.log.addEventListener("change", () => this.#set({ log: this.log.checked ? "1" : "" }));
    this.marks = el("input", { type: "checkbox", name: "marks", checked: state.marks });
    this.marks.addEventListener("change", () => this.#set({ marks: this.marks.checked ? "1" : "0" }));
    this.smooth = el("input", { type: "range", name: "smooth", min: "0", max: "0.999", step: "any", value: String(state.smooth) });
    this.amount = el("output", { textContent: state.smooth.toFixed(2) });
    this.smooth.addEventListener("input", () => {
      const weight = Number(this.smooth.value);
      this.amount.textContent = weight.toFixed(2);
      this.#set({ smooth: Number(weight.toFixed(3)) });
    });
    this.add = el("select", { attrs: { "aria-label": "Add a metric" } });
    this.add.addEventListener("change", () => {
      if (this.add.value) app.setMetrics([...state.list("metrics"), this.add.value]);
    });
    const tools = el("div", { className: "tools", attrs: { role: "group", "aria-label": "Curves" } },
      el("label", {}, "Over", this.axis),
      this.of,
      el("label", { className: "smooth" }, "Smooth", this.smooth, this.amount),
      el("label", { className: "check" }, this.log, "Log"),
      el("label", { className: "check" }, this.marks, "Operations"),
      charts ? el("span", { className: "faint", textContent: "Drag to zoom, double-click to go back." }) : this.add);
    this.key = el("p", { className: "key" });
    parent.append(tools, this.key);
    const close = (metric) => app.setMetrics(state.list("metrics").filter((m) => m !== metric));
    this.panels = new Panels(parent, charts ? null : close);
    this.panels.setRuns(app.drawn());
    this.#group();
    this.draw();
  }

  #group() {
    const { groups } = this.app;
    this.of.hidden = !repeated(groups);
    this.panels.setGroups(state.mean && !this.of.hidden ? groups : null);
  }

  /** In an exported page those axes over which there is something. */
  #axes() {
    const all = Object.entries(InstarChart.AXES);
    if (!this.charts) return all;
    const runs = this.app.drawn();
    const has = (axis) => runs.some((run) => Object.values(run.series).some((found) => (found.x[axis] || []).some(Boolean)));
    const units = new Set(runs.map((run) => run.unit));
    const name = (axis, text) => (axis === "tokens" && units.size === 1 ? `${[...units][0]}s` : text);
    return all.filter(([axis]) => has(axis)).map(([axis, text]) => [axis, name(axis, text)]);
  }

  get metrics() {
    return state.list("metrics");
  }

  #set(changes) {
    state.set(changes);
    this.#show();
  }

  #show() {
    const options = { x: state.x, log: state.log, smooth: state.smooth, marks: state.marks };
    this.panels.show(this.charts || this.metrics.map(panelOf), options);
    this.#explain();
  }

  draw() {
    this.#show();
    this.choices();
  }

  /** What the signs over the curves mean. */
  #explain() {
    const runs = this.app.drawn();
    const signs = new Set(state.marks ? runs.flatMap((run) => run.marks.map((mark) => mark.sign)) : []);
    const there = Object.entries(Instar.MEANINGS).filter(([sign]) => signs.has(sign));
    const several = runs.filter((run) => run.marks.length).length > 1;
    const text = JSON.stringify([there, several]);
    if (text === this.explained) return;
    this.explained = text;
    this.key.classList.toggle("several", several);
    this.key.replaceChildren(...there.map(([sign, [kind, meaning]]) =>
      el("span", {}, el("i", { className: `ic-glyph ic-${kind} ic-sign-${sign}`, attrs: { "aria-hidden": "true" } }), meaning)), several ? "in the colours of their runs" : "");
  }

  /** The metrics that can be added. */
  choices() {
    const names = new Set(METRICS);
    for (const run of this.app.drawn()) for (const name of run.names || []) names.add(name);
    const left = [...names].filter((name) => !this.metrics.includes(name)).sort();
    const text = left.join("\n");
    if (text === this.text && this.add.options.length) {
      this.add.value = "";
      return;
    }
    this.text = text;
    this.add.replaceChildren(el("option", { value: "", textContent: "Add a metric" }), ...left.map((name) => el("option", { value: name, textContent: Instar.metricName(name) })));
    this.add.disabled = !left.length;
  }

  curves() {
    this.#group();
    this.panels.setRuns(this.app.drawn());
    this.#explain();
    this.choices();
  }

  points(key, grown) {
    this.panels.grow(key, grown);
  }

  fit() {
    this.panels.fit();
  }

  destroy() {
    this.panels.destroy();
  }
}
