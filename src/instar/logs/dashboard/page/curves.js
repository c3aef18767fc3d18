/* The view of curves: which metrics, over which axis, how smooth. */

import { el } from "./dom.js";
import { Panels } from "./panels.js";
import { METRICS, state } from "./state.js";

export class CurvesView {
  constructor(parent, app) {
    this.app = app;
    this.axis = el("select", { attrs: { "aria-label": "Over" } });
    for (const [value, text] of Object.entries(InstarChart.AXES)) this.axis.append(el("option", { value, textContent: text }));
    this.axis.value = state.x;
    this.axis.addEventListener("change", () => this.#set({ x: this.axis.value }));
    this.log = el("input", { type: "checkbox", checked: state.log });
    this.log.addEventListener("change", () => this.#set({ log: this.log.checked ? "1" : "" }));
    this.marks = el("input", { type: "checkbox", checked: state.marks });
    this.marks.addEventListener("change", () => this.#set({ marks: this.marks.checked ? "1" : "0" }));
    this.smooth = el("input", { type: "range", min: "0", max: "0.99", step: "0.01", value: String(state.smooth) });
    this.amount = el("output", { textContent: state.smooth.toFixed(2) });
    this.smooth.addEventListener("input", () => {
      this.amount.textContent = Number(this.smooth.value).toFixed(2);
      this.#set({ smooth: this.smooth.value });
    });
    this.add = el("select", { attrs: { "aria-label": "Add a metric" } });
    this.add.addEventListener("change", () => {
      if (this.add.value) app.setMetrics([...state.list("metrics"), this.add.value]);
    });
    const tools = el("div", { className: "tools", attrs: { role: "group", "aria-label": "Curves" } },
      el("label", {}, "Over", this.axis),
      el("label", { className: "smooth" }, "Smooth", this.smooth, this.amount),
      el("label", { className: "check" }, this.log, "Log"),
      el("label", { className: "check" }, this.marks, "Operations"),
      this.add);
    parent.append(tools);
    this.panels = new Panels(parent, (metric) => app.setMetrics(state.list("metrics").filter((m) => m !== metric)));
    this.panels.setRuns(app.drawn());
    this.draw();
  }

  get metrics() {
    return state.list("metrics");
  }

  get options() {
    return { x: state.x, log: state.log, smooth: state.smooth, marks: state.marks };
  }

  #set(changes) {
    state.set(changes);
    this.panels.show(this.metrics, this.options);
  }

  draw() {
    this.panels.show(this.metrics, this.options);
    this.choices();
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
    this.add.replaceChildren(el("option", { value: "", textContent: "Add a metric" }), ...left.map((name) => el("option", { value: name, textContent: name })));
    this.add.disabled = !left.length;
  }

  curves() {
    this.panels.setRuns(this.app.drawn());
    this.choices();
  }

  points(key, grown) {
    this.panels.grow(key, grown);
  }

  destroy() {
    this.panels.destroy();
  }
}
