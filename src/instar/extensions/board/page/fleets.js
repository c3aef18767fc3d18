/* The list of fleets, and the view of a fleet with the log of one of its processes. */
"use strict";

const FLEET_HEADS = ["#", "instance", "state", "step", "loss", "time left", "operations", "restarts", "GPU", "port", "note", ""];
const FLEET_NUMBERS = [0, 3, 4, 5, 6, 7];

const formatCounts = (counts) => Object.entries(counts).map(([word, count]) => `${formatCount(count)} ${word}`).join(", ");

/** Draws the list of fleets; it is hidden if there are none. */
function drawFleets(rows) {
  byId("fleets-part").hidden = !rows.length;
  byId("fleets").replaceChildren(...rows.map((row) =>
    el("li", {},
      el("a", { href: addressOf({ fleet: row.name }), title: row.reason || "", attrs: row.name === state.values.fleet ? { "aria-current": "page" } : {} },
        el("span", { className: "line" }, el("span", { className: "name", textContent: row.name }), badgeOf(row.state)),
        el("span", { className: "faint small", textContent: row.reason || formatCounts(row.counts) })))));
}

class FleetView {
  constructor(parent, app) {
    this.app = app;
    this.name = state.values.fleet;
    this.head = el("div", { className: "fleet-head" });
    this.body = el("div", { className: "detail" });
    this.logBar = el("div", { className: "tools" });
    this.logBody = el("div", { className: "detail" });
    parent.append(this.head, this.body, this.logBar, this.logBody);
    this.body.append(el("p", { className: "none faint", textContent: "…" }));
    this.#showLog(state.values.fleet_log);
    this.timer = setInterval(() => this.#countDown(), 1000);
  }

  /** Shows the fleet's state, as the stream sends it. */
  updateFleet(fleet) {
    if (fleet.name !== this.name) return;
    this.#showHead(fleet);
    this.#showInstances(fleet);
  }

  #showHead({ name, state: fleetState, counts = {}, reason, instances = [], best, means = [] }) {
    const runs = instances.map((instance) => instance.run).filter(Boolean);
    this.head.replaceChildren(
      el("h2", {}, name, " ", fleetState ? badgeOf(fleetState) : "no such fleet"),
      el("p", { className: "faint", textContent: reason || formatCounts(counts) }),
      ...means.map((textContent) => el("p", { textContent })),
      best ? el("p", {}, best.run ? this.#link([best.run], best.text) : best.text) : "",
      runs.length > 1 ? this.#link(runs, `Curves of its ${formatCount(runs.length)} runs`) : "");
  }

  #link(runs, textContent) {
    return el("a", { href: addressOf({ runs: pack(runs), ...(runs.length > 1 ? { mean: "1" } : {}) }), textContent });
  }

  #showInstances({ name, instances = [], left_out: leftOut }) {
    const focusedLog = document.activeElement?.dataset.log;
    const scrollLeft = this.body.firstChild?.scrollLeft || 0;
    const rows = instances.flatMap((instance) => [this.#instanceRow(instance), ...instance.processes.map((process) => this.#processRow(process))]);
    const table = scroller(`Instances of ${name}`, tableOf(`Instances of ${name}`, FLEET_HEADS, rows, FLEET_NUMBERS));
    this.body.replaceChildren(table);
    table.scrollLeft = scrollLeft;
    if (leftOut) this.body.append(el("p", { className: "faint", textContent: `${formatCount(leftOut)} more, which wait or have ended.` }));
    if (focusedLog) this.#logButtons().find((button) => button.dataset.log === focusedLog)?.focus();
    this.#countDown();
  }

  /** Updates the remaining time of each run between messages. */
  #countDown() {
    for (const cell of this.body.querySelectorAll("[data-ends-at]")) {
      cell.textContent = InstarChart.axisText("active_s", Math.max(0, cell.dataset.endsAt - Date.now() / 1000), false);
    }
  }

  #logButtons() {
    return [...this.body.querySelectorAll("button[data-log]")];
  }

  #instanceRow({ index, name, run, state: instanceState, step, loss, ends_at: endsAt, operations, restarts, reason }) {
    const timeLeft = endsAt == null ? "" : el("span", { data: { endsAt } });
    const cells = [String(index), run ? this.#link([run], name) : name, badgeOf(instanceState), step == null ? "" : formatCount(step), loss == null ? "" : formatValue("loss", loss), timeLeft, operations || "", restarts || "", "", "", reason, ""];
    return this.#row("instance", index, cells);
  }

  #processRow({ name, kind, state: processState, log, attempt, reason, gpus, ports }) {
    const button = log ? el("button", { type: "button", className: "plain", textContent: "Log", data: { log }, attrs: { "aria-label": `Log of ${log}`, "aria-pressed": String(log === this.logName) } }) : "";
    if (button) button.addEventListener("click", () => this.#chooseLog(log));
    const note = [attempt > 1 ? `attempt ${attempt}` : "", reason].filter(Boolean).join(", ");
    const cells = ["", el("span", {}, name, " ", el("span", { className: "faint", textContent: kind })), badgeOf(processState), "", "", "", "", "", gpus, ports, note, button];
    return this.#row("process", name, cells);
  }

  #row(kind, id, cells) {
    return el("tr", { className: kind, data: { id: String(id) } }, cells.map((cell, n) => el("td", { className: FLEET_NUMBERS.includes(n) ? "n" : "" }, cell)));
  }

  #chooseLog(name) {
    state.set({ fleet_log: name });
    this.#showLog(name);
    for (const button of this.#logButtons()) button.setAttribute("aria-pressed", String(button.dataset.log === name));
    this.app.openStream();
  }

  #showLog(name) {
    this.logName = name;
    this.offset = 0;
    this.logBar.replaceChildren();
    this.logBody.replaceChildren();
    this.logPaper = name ? new LogPaper(this.logBar, this.logBody, `Log of ${name}`, name) : null;
  }

  /** The fleet's log and its end, for the stream. */
  get fleetLogPosition() {
    return this.logName ? `${this.logName}:${this.offset}` : "";
  }

  /** Appends lines of the log, as the stream sends them. */
  appendLog({ fleet, log, text, offset, skipped: isCut }) {
    if (fleet !== this.name || log !== this.logName || offset === this.offset) return;
    this.offset = offset;
    this.logPaper.append(text, isCut);
  }

  destroy() {
    clearInterval(this.timer);
  }
}
