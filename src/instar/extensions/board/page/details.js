/* What is told of one run: sections about it, what happened, its machine, its logs. */
"use strict";

const SYSTEM = ["tokens_per_s", "memory_bytes", "mfu", "data_wait"];
const OF_THE_MACHINE = /^(gpu|cpu|disk|power|network|system)[_/]/;
const LINES = 4000;

const EMPTY = {
  stages: "The run has not started yet.",
  results: "Neither a final test nor text samples are recorded. The test of the best checkpoint:",
  config: "There is no run.yaml.",
};

const SIGNS = {
  operation: "◆", asked: "?", checkpoint: "▪", run_started: "▸", alert: "▲", failed: "▲", stop: "■",
  warning: "!", skip: "∅", run_finished: "●", new_gradients: "∇", analysis: "◇",
};

/** A view of one of the shown runs: its name, or a choice where several are shown. */
class Detail {
  constructor(parent, app, what) {
    this.app = app;
    this.what = what;
    this.bar = el("div", { className: "tools" });
    this.body = el("div", { className: "detail" });
    parent.append(this.bar, this.body);
    this.#choose();
    this.key = app.selection.first;
    this.body.append(el("p", { className: "none faint reading", textContent: "reading" }));
    this.load();
  }

  #choose() {
    const { keys, first } = this.app.selection;
    if (keys.length < 2) return;
    const choice = el("select", { attrs: { "aria-label": "Run" } });
    for (const key of keys) {
      const row = this.app.runs.rows.get(key);
      choice.append(el("option", { value: key, textContent: row ? labelOf(row) : key }));
    }
    choice.value = first;
    choice.addEventListener("change", () => {
      state.set({ of: choice.value });
      this.app.draw();
    });
    this.bar.append(el("label", {}, "Run", choice));
  }

  /** Asks, and draws the answer unless another one was asked for meanwhile. */
  async load() {
    if (!this.key) return;
    try {
      const answer = await ask(about(this.key, this.what));
      if (!this.over) this.fill(answer);
    } catch (error) {
      if (!this.over) this.say(error.message);
    }
  }

  say(text) {
    this.body.replaceChildren(el("p", { className: "none faint", textContent: text }));
  }

  happened(key) {
    if (key === this.key) this.load();
  }

  destroy() {
    this.over = true;
  }
}

class SectionsView extends Detail {
  fill({ sections }) {
    if (!sections.length) {
      const text = EMPTY[this.what] || "Nothing is recorded yet.";
      const test = `instar test ${quoted(`${this.app.runs.folder}/${this.key}`)}`;
      this.body.replaceChildren(emptyState(text, ...(this.what === "results" ? [test] : [])));
      return;
    }
    const open = [...this.body.querySelectorAll("details[open] summary")].map((one) => one.textContent);
    drawSections(this.body, sections);
    for (const one of this.body.querySelectorAll("details")) if (open.includes(one.firstChild.textContent)) one.open = true;
  }
}

/** Operations and stages; of a running run, what its user asks it for. */
class StagesView extends SectionsView {
  async load() {
    const running = this.app.runs.rows.get(this.key)?.state === "running";
    if (!running) this.panel?.root.remove();
    this.panel = running ? this.panel || new OperationsPanel(this.key) : null;
    if (this.panel && !this.panel.root.isConnected) this.body.before(this.panel.root);
    await Promise.all([this.panel?.load(), super.load()]);
  }
}

/** One run's key figures, or several runs side by side. */
class OverviewView extends SectionsView {
  async load() {
    const { keys } = this.app.selection;
    if (keys.length < 2) {
      await super.load();
      return;
    }
    this.bar.replaceChildren();
    try {
      const answer = await ask("/api/compare", keys.map((key) => ["run", key]));
      if (!this.over) this.fill(answer);
    } catch (error) {
      if (!this.over) this.say(error.message);
    }
  }
}

class EventsView extends Detail {
  fill({ events, total, faults }) {
    const kinds = [...new Set(events.map((event) => event.kind))];
    if (!events.length) {
      this.say("Nothing has happened yet.");
      return;
    }
    const choice = (this.choice ||= el("select", { attrs: { "aria-label": "Kind" } }));
    const chosen = choice.value;
    choice.replaceChildren(el("option", { value: "", textContent: "everything" }), ...kinds.map((kind) => el("option", { value: kind, textContent: kind.replaceAll("_", " ") })));
    choice.value = kinds.includes(chosen) ? chosen : "";
    choice.onchange = () => this.fill({ events, total, faults });
    if (!choice.isConnected) this.bar.append(el("label", {}, "Show", choice));
    const open = new Set([...this.body.querySelectorAll("details[open]")].map((one) => one.dataset.id));
    const items = events
      .filter((event) => !choice.value || event.kind === choice.value)
      .map((event) => this.#item(event, open))
      .reverse();
    const notes = [];
    if (total > events.length) notes.push(`The latest ${whole(events.length)} of ${whole(total)}.`);
    notes.push(...faults);
    this.body.replaceChildren(...notes.map((note) => el("p", { className: "faint", textContent: note })), el("ol", { className: "events" }, items));
  }

  #item(event, open) {
    const id = `${event.time} ${event.kind} ${event.step}`;
    const at = [event.step == null ? "" : `step ${whole(event.step)}`, clock(event.time)];
    if (event.superseded) at.push("superseded");
    const head = [
      el("span", { className: "sign", textContent: SIGNS[event.kind] || "·", attrs: { "aria-hidden": "true" } }),
      el("span", { className: "what" }, el("strong", { textContent: event.title }), event.text ? el("span", { className: "text", textContent: event.text }) : null),
      el("span", { className: "faint when", textContent: at.filter(Boolean).join(" · ") }),
    ];
    const facts = Object.entries(event.fields);
    const item = el("li", { className: event.superseded ? "superseded" : "", data: { kind: event.kind } });
    if (!facts.length) item.append(el("div", { className: "summary" }, head));
    else {
      item.append(el("details", { open: open.has(id), data: { id } },
        el("summary", { className: "summary" }, head),
        el("dl", { className: "facts" }, facts.flatMap(([name, value]) => [el("dt", { textContent: name }), el("dd", { textContent: inWords(value) })]))));
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
      const place = el("div");
      this.body.before(place);
      this.panels = new Panels(place);
      this.panels.setRuns(this.app.drawn());
      this.panels.show(this.charts(), this.options);
    }
    await super.load();
  }

  get options() {
    return { x: state.x, log: false, smooth: 0, marks: false, height: 200 };
  }

  /** What every run measures, and what else of their machines these do. Not private: `load` needs it before
      private methods are there. */
  charts() {
    const names = new Set(this.app.drawn().flatMap((run) => [...(run.names || [])]));
    return [...SYSTEM, ...[...names].filter((name) => OF_THE_MACHINE.test(name) && !SYSTEM.includes(name))].map(panelOf);
  }

  curves() {
    const charts = this.charts();
    const more = charts.length > this.panels.panels.size;
    this.panels.show(charts, this.options);
    this.panels.setRuns(this.app.drawn());
    if (more) this.app.load();
  }

  points(key, grown) {
    this.panels.grow(key, grown);
  }

  fit() {
    this.panels.fit();
  }

  destroy() {
    super.destroy();
    this.panels.destroy();
  }
}

/** The lines of a log that grows, with a search; its end stays in view unless that is switched off. */
class LogPaper {
  constructor(bar, parent, label, title = "") {
    this.search = el("input", { type: "search", placeholder: "Only lines with", attrs: { "aria-label": "Only lines with" } });
    this.search.addEventListener("input", () => this.#filter());
    this.follow = el("input", { type: "checkbox", checked: true });
    this.follow.addEventListener("change", () => this.#end());
    bar.append(...(title ? [el("strong", { textContent: title })] : []), this.search, el("label", { className: "check" }, this.follow, "Follow"));
    this.lines = el("div", { className: "paper log", tabIndex: 0, attrs: { role: "log", "aria-label": label, "aria-live": "off" } });
    parent.append(this.lines);
  }

  /** Whole lines; `skipped`: some before them are left out. */
  append(text, skipped) {
    if (skipped) this.lines.append(el("div", { className: "faint", textContent: "… earlier lines are left out" }));
    for (const line of text.split("\n").slice(0, -1)) {
      const found = / (WARNING|ERROR|CRITICAL): /.exec(line);
      // of a progress bar that returns to the beginning of its line, the last state
      const last = line.replace(/\r$/, "").split("\r").at(-1);
      this.lines.append(el("div", { textContent: last, className: found ? found[1].toLowerCase() : "" }));
    }
    while (this.lines.childElementCount > LINES) this.lines.firstChild.remove();
    this.#filter();
    this.#end();
  }

  #filter() {
    const words = this.search.value.toLowerCase();
    for (const line of this.lines.children) line.hidden = words !== "" && !line.textContent.toLowerCase().includes(words);
  }

  #end() {
    if (this.follow.checked) this.lines.scrollTop = this.lines.scrollHeight;
  }
}

class LogsView extends Detail {
  happened() {}

  async fill({ ranks }) {
    if (!ranks.length) {
      this.say("No rank has said anything yet.");
      return;
    }
    const rank = ranks.includes(Number(state.values.rank)) ? Number(state.values.rank) : ranks[0];
    const choice = el("select", { attrs: { "aria-label": "Rank" } }, ranks.map((each) => el("option", { value: String(each), textContent: String(each) })));
    choice.value = String(rank);
    choice.addEventListener("change", () => {
      state.set({ rank: choice.value });
      this.app.draw();
    });
    this.bar.append(el("label", {}, "Rank", choice));
    this.body.replaceChildren();
    this.lines = new LogPaper(this.bar, this.body, `Log of rank ${rank}`);
    const told = await ask(about(this.key, `logs/${rank}`));
    if (this.over) return;
    this.rank = rank;
    this.hear({ ...told, key: this.key });
    this.app.follow();
  }

  /** Up to where the log is known, for the stream. */
  get place() {
    return this.rank == null ? null : { log: `${this.key}/${this.rank}`, offset: this.offset };
  }

  hear({ key, rank, text, offset, skipped }) {
    if (key !== this.key || rank !== this.rank || (this.offset ?? -1) >= offset) return;
    this.offset = offset;
    this.lines.append(text, skipped);
  }
}
