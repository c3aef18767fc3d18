/* Fleets: their list above that of the runs, and the page of one, with the log of one of its processes. */
"use strict";

const FLEET_HEADS = ["#", "instance", "state", "step", "loss", "time left", "operations", "restarts", "GPU", "port", "note", ""];
const FLEET_NUMBERS = [0, 3, 4, 5, 6, 7];

const countsOf = (counts) => Object.entries(counts).map(([word, count]) => `${whole(count)} ${word}`).join(", ");

/** The list of fleets; hidden without one. */
function drawFleets(rows) {
  byId("fleets-part").hidden = !rows.length;
  byId("fleets").replaceChildren(...rows.map((row) =>
    el("li", {},
      el("a", { href: addressOf({ fleet: row.name }), title: row.reason || "", attrs: row.name === state.values.fleet ? { "aria-current": "page" } : {} },
        el("span", { className: "line" }, el("span", { className: "name", textContent: row.name }), badgeOf(row.state)),
        el("span", { className: "faint small", textContent: row.reason || countsOf(row.counts) })))));
}

/** The page of a fleet: its instances, and the log of one of its processes. */
class FleetView {
  constructor(parent, app) {
    this.app = app;
    this.name = state.values.fleet;
    this.head = el("div", { className: "fleet-head" });
    this.body = el("div", { className: "detail" });
    this.bar = el("div", { className: "tools" });
    this.paper = el("div", { className: "detail" });
    parent.append(this.head, this.body, this.bar, this.paper);
    this.body.append(el("p", { className: "none faint", textContent: "…" }));
    this.#showLog(state.values.fleet_log);
    this.timer = setInterval(() => this.#countDown(), 1000);
  }

  /** Shows a fleet's state, as the stream sends it. */
  fleet(data) {
    if (data.name !== this.name) return;
    this.#showHead(data);
    this.#showInstances(data);
  }

  #showHead({ name, state: word, counts = {}, reason, instances = [], best, means = [] }) {
    const runs = instances.map((each) => each.run).filter(Boolean);
    this.head.replaceChildren(
      el("h2", {}, name, " ", word ? badgeOf(word) : "no such fleet"),
      el("p", { className: "faint", textContent: reason || countsOf(counts) }),
      ...means.map((textContent) => el("p", { textContent })),
      best ? el("p", {}, best.run ? this.#link([best.run], best.text) : best.text) : "",
      runs.length > 1 ? this.#link(runs, `Curves of its ${whole(runs.length)} runs`) : "");
  }

  #link(runs, textContent) {
    return el("a", { href: addressOf({ runs: pack(runs), ...(runs.length > 1 ? { mean: "1" } : {}) }), textContent });
  }

  #showInstances({ name, instances = [], left_out: leftOut }) {
    const focused = document.activeElement?.dataset.log;
    const scrolled = this.body.firstChild?.scrollLeft || 0;
    const rows = instances.flatMap((each) => [this.#instance(each), ...each.processes.map((process) => this.#process(process))]);
    const table = scroller(`Instances of ${name}`, tableOf(`Instances of ${name}`, FLEET_HEADS, rows, FLEET_NUMBERS));
    this.body.replaceChildren(table);
    table.scrollLeft = scrolled;
    if (leftOut) this.body.append(el("p", { className: "faint", textContent: `${whole(leftOut)} more, which wait or have ended.` }));
    if (focused) this.#logButtons().find((one) => one.dataset.log === focused)?.focus();
    this.#countDown();
  }

  /** The time left of each run, which shrinks without a message. */
  #countDown() {
    for (const each of this.body.querySelectorAll("[data-ends-at]")) {
      each.textContent = InstarChart.axisText("active_s", Math.max(0, each.dataset.endsAt - Date.now() / 1000), false);
    }
  }

  #logButtons() {
    return [...this.body.querySelectorAll("button[data-log]")];
  }

  #instance(row) {
    const name = row.run ? this.#link([row.run], row.name) : row.name;
    const left = row.ends_at == null ? "" : el("span", { data: { endsAt: row.ends_at } });
    const cells = [String(row.index), name, badgeOf(row.state), row.step == null ? "" : whole(row.step), row.loss == null ? "" : figure("loss", row.loss), left, row.operations || "", row.restarts || "", "", "", row.reason, ""];
    return this.#row("instance", row.index, cells);
  }

  #process(row) {
    const button = row.log ? el("button", { type: "button", className: "plain", textContent: "Log", data: { log: row.log }, attrs: { "aria-label": `Log of ${row.log}`, "aria-pressed": String(row.log === this.log) } }) : "";
    if (button) button.addEventListener("click", () => this.#choose(row.log));
    const note = [row.attempt > 1 ? `attempt ${row.attempt}` : "", row.reason].filter(Boolean).join(", ");
    const cells = ["", el("span", {}, row.name, " ", el("span", { className: "faint", textContent: row.kind })), badgeOf(row.state), "", "", "", "", "", row.gpus, row.ports, note, button];
    return this.#row("process", row.name, cells);
  }

  #row(kind, id, cells) {
    return el("tr", { className: kind, data: { id: String(id) } }, cells.map((cell, n) => el("td", { className: FLEET_NUMBERS.includes(n) ? "n" : "" }, cell)));
  }

  #choose(log) {
    state.set({ fleet_log: log });
    this.#showLog(log);
    for (const button of this.#logButtons()) button.setAttribute("aria-pressed", String(button.dataset.log === log));
    this.app.follow();
  }

  #showLog(log) {
    this.log = log;
    this.offset = 0;
    this.bar.replaceChildren();
    this.paper.replaceChildren();
    this.lines = log ? new LogPaper(this.bar, this.paper, `Log of ${log}`, log) : null;
  }

  /** The log and the offset up to which it is shown, for the stream. */
  get followed() {
    return this.log ? `${this.log}:${this.offset}` : "";
  }

  /** Appends lines of the log, as the stream sends them. */
  hear({ fleet, log, text, offset, skipped }) {
    if (fleet !== this.name || log !== this.log || offset === this.offset) return;
    this.offset = offset;
    this.lines.append(text, skipped);
  }

  destroy() {
    clearInterval(this.timer);
  }
}
