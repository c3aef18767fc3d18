/* Charts side by side, one for each metric. */

import { el } from "./dom.js";

export class Panels {
  /** `close(metric)` takes a chart away; without it they stay. */
  constructor(parent, close) {
    this.root = el("div", { className: "panels" });
    parent.append(this.root);
    this.close = close;
    this.panels = new Map();
    this.runs = [];
  }

  /** Charts of these metrics, in this order. */
  show(metrics, options) {
    for (const [metric, panel] of this.panels) {
      if (metrics.includes(metric)) continue;
      panel.chart.destroy();
      panel.root.remove();
      this.panels.delete(metric);
    }
    for (const metric of metrics) {
      const known = this.panels.get(metric);
      if (known) known.chart.setOptions(options);
      else this.panels.set(metric, this.#make(metric, options));
      this.root.append(this.panels.get(metric).root);
    }
    this.root.classList.toggle("single", metrics.length === 1);
  }

  #make(metric, options) {
    const title = el("h2", { textContent: metric });
    const last = el("span", { className: "last" });
    const head = el("div", { className: "head" }, title, last);
    const root = el("section", { className: "panel", data: { metric }, attrs: { "aria-label": metric } }, head);
    if (this.close) {
      const button = el("button", { type: "button", className: "plain close", textContent: "×", attrs: { "aria-label": `Remove ${metric}` } });
      button.addEventListener("click", () => this.close(metric));
      head.append(button);
    }
    this.root.append(root);
    const none = el("p", { className: "none faint", hidden: true });
    const chart = new InstarChart(root, { metric, legend: false, height: 300, ...options });
    root.append(none);
    const panel = { root, chart, last, none, metric };
    if (this.runs.length) this.#draw(panel);
    return panel;
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
      const panel = this.panels.get(metric);
      if (!panel) continue;
      panel.chart.append(key, metric, added);
      this.#tell(panel);
    }
  }

  #tell(panel) {
    const lasts = this.runs.map((run) => run.series[panel.metric]?.value.at(-1));
    const there = lasts.filter((value) => value !== undefined);
    panel.root.dataset.points = this.runs.reduce((sum, run) => sum + (run.series[panel.metric]?.value.length || 0), 0);
    panel.root.dataset.runs = there.length;
    const value = there.length === 1 ? there[0] : null;
    panel.last.textContent = value == null ? "" : InstarChart.valueText(panel.metric, value);
    const loading = this.runs.some((run) => run.coming?.has(panel.metric));
    panel.none.hidden = there.length > 0;
    panel.none.textContent = loading ? "reading" : "not measured";
  }

  destroy() {
    for (const panel of this.panels.values()) panel.chart.destroy();
    this.panels.clear();
    this.root.remove();
  }
}
