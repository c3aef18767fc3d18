/* The page over a server: what is chosen is shown, and what comes by the stream is added. */
"use strict";

const VIEWS = { curves: CurvesView, overview: OverviewView, stages: StagesView, events: EventsView, system: SystemView, logs: LogsView };
const LINKS = { waiting: "connecting", live: "live", lost: "no connection" };
const SETTLE_MS = 400;
const MOST_CHOSEN = 11;

class App {
  constructor() {
    this.runs = new Runs();
    this.selection = new RunSelection();
    this.list = new List(this.runs, this.selection);
    this.stream = new Stream(() => this.#where(), (name, data) => this.#hear(name, data));
    this.timers = new Map();
    this.shapes = new Map();
    this.#tabs();
    makeThemeButton();
    preparePrint(() => this.view?.fit?.());
    this.#drawer();
    this.runs.told.addEventListener("list", () => this.#listed());
    this.runs.told.addEventListener("curves", () => this.#soon());
    this.runs.told.addEventListener("points", ({ detail }) => this.#grown(detail));
    this.runs.told.addEventListener("happened", ({ detail }) => this.#happened(detail));
    this.selection.told.addEventListener("change", () => this.draw());
    state.told.addEventListener("anew", () => {
      this.selection.read();
      this.list.draw();
      this.draw();
    });
    this.stream.told.addEventListener("state", ({ detail }) => this.#linked(detail));
  }

  async start() {
    for (;;) {
      try {
        await this.runs.load();
        break;
      } catch {
        this.#linked("lost");
        await new Promise((done) => setTimeout(done, 1500));
      }
    }
    byId("folder").textContent = this.runs.folder;
    this.draw();
    this.stream.open();
  }

  /** The runs as charts take them; a place that is free now keeps its colour. */
  drawn() {
    return this.selection.places.map((key) => {
      const run = key === null ? null : this.runs.shown.get(key);
      if (!run) return { id: "", name: "", series: {}, marks: [], names: [] };
      const row = this.runs.rows.get(key);
      if (row) run.name = labelOf(row);
      return run;
    });
  }

  get groups() {
    return this.selection.groups;
  }

  /** The colours of the lists, as those of the curves are now. */
  recolour() {
    this.list.draw();
    this.#chosen();
  }

  setMetrics(metrics) {
    state.setList("metrics", [...new Set(metrics)]);
    this.view.draw?.();
    this.load();
  }

  /** Everything anew: other runs, or another view. */
  draw() {
    this.#latest();
    this.list.draw();
    this.#chosen();
    this.#figures();
    const { tab } = state;
    for (const button of byId("tabs").children) {
      const on = button.dataset.tab === tab;
      button.setAttribute("aria-selected", String(on));
      button.tabIndex = on ? 0 : -1;
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
      this.follow();
      return;
    }
    const { keys } = this.selection;
    const gone = keys.filter((key) => !this.runs.rows.has(key));
    const empty = gone.length === keys.length;
    document.body.classList.toggle("nothing", empty);
    if (empty) view.append(this.#nothing(gone));
    else this.view = tab === "curves" ? new CurvesView(view, this) : new (VIEWS[tab] || SectionsView)(view, this, tab);
    this.load();
  }

  /** Instead of a view: what to do without runs, and what has become of those of a bookmark. */
  #nothing(gone) {
    if (gone.length) {
      const all = el("a", { href: "#", textContent: "Show the runs that are there" });
      const names = gone.slice(0, 5).join(", ") + (gone.length > 5 ? ` and ${gone.length - 5} more` : "");
      const made = emptyState(`${names}: not in this folder. ${gone.length > 1 ? "They were" : "It was"} moved, renamed or deleted since this address was kept.`);
      made.append(this.runs.rows.size ? all : "");
      return made;
    }
    if (this.runs.rows.size) return emptyState("Choose a run. All of them are archived.");
    return emptyState("No run yet. The first one is shown here as soon as it starts.", "instar demo", "instar init gpt && instar train gpt.yaml");
  }

  /** Without a choice, the latest run is shown. */
  #latest() {
    if (this.selection.keys.length) return;
    const rows = [...this.runs.rows.values()].filter((row) => !row.archived).sort((a, b) => (b.started || 0) - (a.started || 0) || (b.seen || 0) - (a.seen || 0));
    // a run that awaits its start has nothing to show yet
    const first = rows.find((row) => row.seen !== null) || rows[0];
    this.selection.places = first ? [first.key] : [];
  }

  async load() {
    if (state.values.fleet) {
      this.follow();
      return;
    }
    const metrics = this.view?.metrics || state.list("metrics");
    const loading = this.runs.show(this.selection.keys, metrics);
    this.#soon();
    this.#group().catch(() => this.#settle("load", () => this.load()));
    try {
      await loading;
    } catch {
      this.#settle("load", () => this.load());
      return;
    }
    this.follow();
    const { keys, first } = this.selection;
    if (keys.length === 1 && this.runs.rows.has(first)) await this.#shape(first);
  }

  /** Which of the shown runs differ only in the seed or the fold. */
  async #group() {
    const { keys } = this.selection;
    const asked = JSON.stringify(keys);
    if (asked === this.grouped) return;
    const { groups } = keys.length > 1 ? await ask("/api/groups", keys.map((key) => ["run", key])) : { groups: [] };
    if (asked !== JSON.stringify(this.selection.keys)) return;
    this.grouped = asked;
    this.selection.groups = groups;
    this.recolour();
    this.#soon();
  }

  /** What the model of a run has grown to. */
  async #shape(key) {
    try {
      const { shape } = await ask(about(key, "stages"));
      if (shape) this.shapes.set(key, shape);
    } catch {
      this.shapes.delete(key);
    }
    this.#figures();
  }

  /** Has the stream tell of what is shown now. */
  follow() {
    this.stream.open();
  }

  #where() {
    const runs = [...this.runs.shown.values()].filter((run) => run.loaded && run.offset != null);
    const metrics = new Set(runs.flatMap((run) => [...run.asked]));
    const log = this.view?.place;
    const { fleet } = state.values;
    const shown = JSON.stringify([runs.map((run) => run.id), [...metrics].sort(), log?.log, fleet, this.view?.log]);
    const query = () => {
      const asked = new URLSearchParams({ seen: this.runs.seen });
      for (const run of runs) {
        asked.append("run", `${run.id}:${run.offset}`);
        run.held = false;
      }
      for (const metric of metrics) asked.append("metric", metric);
      if (log) asked.append("log", `${log.log}:${log.offset}`);
      if (fleet) asked.append("fleet", fleet);
      if (this.view?.followed) asked.append("fleet_log", this.view.followed);
      return asked;
    };
    return { about: shown, behind: runs.some((run) => run.held), query };
  }

  #hear(name, data) {
    if (name === "runs") this.runs.take(data);
    else if (name === "news") this.runs.grow(data);
    else if (name === "anew") this.#again(data.key);
    else if (name === "fleets") drawFleets((this.fleets = data.rows));
    else if (name === "fleet") this.view?.fleet?.(data);
    else this.view?.hear?.(data);
  }

  async #again(key) {
    try {
      await this.runs.again(key);
    } catch {
      this.#settle("load", () => this.load());
      return;
    }
    this.follow();
    this.#happened({ key, placed: true, operated: true });
  }

  #listed() {
    if (!this.view) {
      if (this.started) this.draw();
      this.started = true;
      return;
    }
    this.list.draw();
    this.#chosen();
    this.#figures();
  }

  #grown({ key, grown }) {
    this.view?.points?.(key, grown);
    if (key === this.selection.first) this.#figures();
  }

  #happened({ key, placed, operated }) {
    this.#settle(`view ${key}`, () => this.view?.happened?.(key));
    if (!placed) this.#settle(`marks ${key}`, () => this.runs.marksAgain(key).catch(() => {}));
    if (operated && this.selection.keys.length === 1) this.#settle(`shape ${key}`, () => this.#shape(key));
  }

  /** Does what is asked for again and again once, a little later. */
  #settle(name, act) {
    if (this.timers.has(name)) return;
    this.timers.set(name, setTimeout(() => {
      this.timers.delete(name);
      act();
    }, SETTLE_MS));
  }

  #soon() {
    if (this.frame) return;
    this.frame = requestAnimationFrame(() => {
      this.frame = 0;
      this.view?.curves?.();
      this.#figures();
    });
  }

  /** The error of a crashed run, above its views. */
  async #failure() {
    const { keys, first } = this.selection;
    const row = keys.length === 1 && !state.values.fleet ? this.runs.rows.get(first) : null;
    const asked = row?.state === "crashed" ? `${row.key} ${row.reason}` : "";
    if (asked === this.failed) return;
    this.failed = asked;
    const box = byId("failure");
    box.hidden = !asked;
    box.replaceChildren();
    if (!asked) return;
    try {
      const { sections } = await ask(about(first, "failure"));
      if (asked !== this.failed) return;
      drawSections(box, sections);
      box.hidden = !sections.length;
    } catch {
      this.failed = null;
    }
  }

  #chosen() {
    this.#failure();
    const several = this.selection.keys.length > 1;
    const labels = this.selection.keys.map((key) => (this.runs.rows.has(key) ? labelOf(this.runs.rows.get(key)) : key));
    const short = several ? InstarChart.shortNames(labels, 40) : labels;
    const items = this.selection.keys.map((key, number) => {
      const row = this.runs.rows.get(key);
      const remove = el("button", { type: "button", className: "plain", textContent: "×", attrs: { "aria-label": `Hide ${labels[number]}` } });
      remove.addEventListener("click", () => this.selection.toggle(key));
      const item = el("li", {},
        el("span", { className: "swatch" }),
        el("span", { className: "name", textContent: short[number], title: labels[number] }),
        row ? badgeOf(row.state, inState(row)) : badgeOf("gone", "not here"),
        row?.reason && row.state !== "crashed" ? el("span", { className: "faint reason", textContent: row.reason }) : null,
        several ? remove : null);
      item.style.setProperty("--swatch", this.selection.colour(key));
      return item;
    });
    const more = items.length - MOST_CHOSEN;
    if (more > 1 && !this.unfolded) {
      const button = el("button", { type: "button", className: "plain", textContent: `and ${whole(more)} more` });
      button.addEventListener("click", () => {
        this.unfolded = true;
        this.#chosen();
      });
      items.splice(MOST_CHOSEN, more, el("li", {}, button));
    }
    byId("chosen").classList.toggle("unfolded", Boolean(this.unfolded));
    byId("chosen").replaceChildren(...items);
    this.#note();
    const row = this.runs.rows.get(this.selection.first);
    const of = several ? `${this.selection.keys.length} runs` : row && labelOf(row);
    document.title = [state.values.fleet || of, "Instar"].filter(Boolean).join(" – ");
  }

  /** The tags and the note of the one run that is shown. */
  #note() {
    const { keys, first } = this.selection;
    const { tags = [], note = "" } = (keys.length === 1 && this.runs.rows.get(first)) || {};
    const box = byId("note");
    box.hidden = !tags.length && !note;
    box.replaceChildren(...tags.map((tag) => el("span", { className: "tag", textContent: tag })), note);
  }

  #figures() {
    const key = this.selection.first;
    const row = this.runs.rows.get(key);
    const box = byId("figures");
    box.hidden = !row || row.step == null || this.selection.keys.length > 1;
    if (box.hidden) return;
    const { series = {} } = this.runs.shown.get(key) || {};
    const far = Object.values(series).reduce((a, b) => ((b.x.step?.at(-1) ?? -1) > (a?.x.step?.at(-1) ?? -1) ? b : a), null);
    const at = (axis) => far?.x[axis]?.at(-1);
    const unit = row.unit || "token";
    const shape = this.shapes.get(key) || {};
    const facts = [
      ["Step", whole(at("step") > row.step ? at("step") : row.step)],
      ["Loss", figure("loss", series.loss?.value.at(-1) ?? row.loss)],
      [`Best ${bestMetric(row)}`, figure("loss", row.best)],
      [`${unit[0].toUpperCase()}${unit.slice(1)}s`, onAxis("tokens", at("tokens"))],
      ["FLOPs", onAxis("flops", at("flops"))],
      ["Active time", onAxis("active_s", at("active_s"))],
      ["Model", shape.model || row.model || "–"],
      ["Parameters", shape.parameters ? onAxis("tokens", shape.parameters) : "–"],
    ];
    const text = JSON.stringify(facts);
    if (text === this.told) return;
    this.told = text;
    box.replaceChildren(...facts.map(([name, value]) => el("div", {}, el("dt", { textContent: name }), el("dd", { textContent: value }))));
  }

  #linked(link) {
    const sign = byId("link");
    sign.dataset.state = link;
    sign.textContent = LINKS[link];
    byId("lost").hidden = link !== "lost";
    if (link === "live" && this.lost) this.load();
    this.lost = link === "lost";
  }

  #tabs() {
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

  /** On a narrow screen the list is folded away. */
  #drawer() {
    const button = byId("show-list");
    const set = (open) => {
      document.body.classList.toggle("listing", open);
      button.setAttribute("aria-expanded", String(open));
    };
    button.addEventListener("click", () => set(!document.body.classList.contains("listing")));
    byId("runs").addEventListener("click", (event) => {
      if (event.target.closest("button.run")) set(false);
    });
    addEventListener("keydown", (event) => {
      if (event.key === "Escape") set(false);
    });
  }
}

if (embedded) showExported(embedded);
else new App().start();
