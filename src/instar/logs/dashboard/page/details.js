/* What is told of one run: what happened, its shapes, its machine, its logs, its config. */

import { about, ask, clock, el, figure, inWords, numeric, onAxis, whole } from "./dom.js";
import { labelOf } from "./list.js";
import { Panels } from "./panels.js";
import { state } from "./state.js";

const SYSTEM = ["tokens_per_s", "memory_bytes", "mfu", "data_wait"];
const LINES = 4000;

const SIGNS = {
  operation: "◆", checkpoint: "▪", run_started: "▸", alert: "▲", failed: "▲", stop: "■",
  warning: "!", skip: "∅", run_finished: "●", new_gradients: "∇", analysis: "◇",
};

/** A view of one of the shown runs: its name, or a choice where several are shown. */
class Detail {
  constructor(parent, app) {
    this.app = app;
    this.bar = el("div", { className: "tools" });
    this.body = el("div", { className: "detail" });
    parent.append(this.bar, this.body);
    this.#choose();
    this.key = app.selection.first;
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

  curves() {}

  points() {}

  destroy() {
    this.over = true;
  }
}

const table = (heads, rows, caption) =>
  el("div", { className: "scroll", tabIndex: 0, attrs: { role: "region", "aria-label": caption } },
    el("table", {},
      el("caption", { textContent: caption }),
      el("thead", {}, el("tr", {}, heads.map((head) => el("th", { textContent: head, scope: "col" })))),
      el("tbody", {}, rows)));

const cell = (text, className = "") => el("td", { className }, text);

export class EventsView extends Detail {
  get what() {
    return "events";
  }

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

export class StagesView extends Detail {
  get what() {
    return "stages";
  }

  fill({ stages }) {
    if (!stages.length) {
      this.say("The run has not started yet.");
      return;
    }
    const heads = ["Stage", "Steps", "Begins with", "Because", "Model", "Parameters", "FLOPs", "Time", "loss", "val/loss"];
    const rows = stages.map((stage, number) => el("tr", {},
      el("th", { scope: "row", textContent: String(number + 1) }),
      cell(`${whole(stage.from_step)}–${whole(stage.to_step)}`),
      cell(stage.operation || "the start"),
      cell(stage.reason || "–"),
      cell(stage.model),
      cell(whole(stage.parameters), "number"),
      cell(onAxis("flops", numeric(stage.flops)), "number"),
      cell(onAxis("active_s", numeric(stage.active_s)), "number"),
      cell(figure("loss", stage.loss), "number"),
      cell(figure("loss", stage.val_loss), "number")));
    const names = [...new Set(stages.flatMap((stage) => Object.keys(stage.architecture)))];
    const shapes = names.map((name) => el("tr", {},
      el("th", { scope: "row", textContent: name }),
      stages.map((stage, number) => {
        const value = inWords(stage.architecture[name] ?? "–");
        const changed = number > 0 && value !== inWords(stages[number - 1].architecture[name] ?? "–");
        return cell(value, changed ? "number changed" : "number");
      })));
    this.body.replaceChildren(
      table(heads, rows, "Stages"),
      table(["", ...stages.map((_, number) => `Stage ${number + 1}`)], shapes, "Architecture"));
  }
}

export class SystemView extends Detail {
  get what() {
    return "system";
  }
  get metrics() {
    return SYSTEM;
  }

  async load() {
    this.panels ||= new Panels(this.body);
    this.panels.setRuns(this.app.drawn());
    this.panels.show(SYSTEM, { x: state.x, log: false, smooth: 0, marks: state.marks, height: 220 });
    await super.load();
  }

  fill({ segments }) {
    this.machine?.remove();
    const flat = (segment) => ({ started: clock(segment.time), "from step": whole(segment.step), devices: segment.devices, ranks: segment.world_size, ...segment.machine, ...segment.versions });
    const columns = segments.map(flat);
    const names = [...new Set(columns.flatMap(Object.keys))];
    const shown = (name, value) => (value == null ? "–" : name.endsWith("_bytes") ? figure(name, value) : inWords(value));
    const rows = names.map((name) => el("tr", {}, el("th", { scope: "row", textContent: name.replaceAll("_", " ") }), columns.map((column) => cell(shown(name, column[name])))));
    this.machine = table(["", ...segments.map((segment) => `Segment ${segment.segment}`)], rows, "Machine and versions");
    this.body.append(this.machine);
  }

  say(text) {
    this.machine?.remove();
    this.machine = el("p", { className: "faint", textContent: text });
    this.body.append(this.machine);
  }

  curves() {
    this.panels.setRuns(this.app.drawn());
  }

  points(key, grown) {
    this.panels.grow(key, grown);
  }

  destroy() {
    super.destroy();
    this.panels?.destroy();
  }
}

export class ConfigView extends Detail {
  get what() {
    return "config";
  }

  happened() {}

  fill({ text }) {
    if (!text) this.say("The run has no config.");
    else this.body.replaceChildren(el("pre", { className: "paper", tabIndex: 0, textContent: text, attrs: { "aria-label": "run.yaml" } }));
  }
}

export class LogsView extends Detail {
  get what() {
    return "logs";
  }

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
    this.search = el("input", { type: "search", placeholder: "Only lines with", attrs: { "aria-label": "Only lines with" } });
    this.search.addEventListener("input", () => this.#filter());
    this.follow = el("input", { type: "checkbox", checked: true });
    this.follow.addEventListener("change", () => this.#end());
    this.bar.append(el("label", {}, "Rank", choice), this.search, el("label", { className: "check" }, this.follow, "Follow"));
    this.lines = el("div", { className: "paper log", tabIndex: 0, attrs: { role: "log", "aria-label": `Log of rank ${rank}`, "aria-live": "off" } });
    this.body.replaceChildren(this.lines);
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
    if (skipped) this.lines.append(el("div", { className: "faint", textContent: "… earlier lines are left out" }));
    for (const line of text.split("\n").slice(0, -1)) {
      const found = / (WARNING|ERROR|CRITICAL): /.exec(line);
      this.lines.append(el("div", { textContent: line, className: found ? found[1].toLowerCase() : "" }));
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
