/* The list of runs: search, states, sorting, and which of them are shown. */
"use strict";

const STATES = ["running", "finished", "stopped", "crashed", "unread"];
const ARCHIVED = "archived";
const SORTS = {
  started: ["latest first", (row) => -(row.started || 0)],
  seen: ["last heard of", (row) => -(row.seen || 0)],
  name: ["name", (row) => `${row.name} ${row.id}`.toLowerCase()],
  loss: ["loss", (row) => last(row.loss)],
  best: ["best value", (row) => last(row.higher_is_better && row.best != null ? -numeric(row.best) : row.best)],
  step: ["most steps", (row) => -(row.step || 0)],
};
/** The held-out metric that `best` follows; those of sets and of parts name their samples. */
const bestMetric = (row) => (row.best_metric?.includes("/") ? row.best_metric : `val/${row.best_metric || "loss"}`);

const last = (value) => (Number.isFinite(numeric(value)) ? numeric(value) : Infinity);

const inState = (row) => ({ unread: "unreadable", unseen: "…" })[row.state] || row.state;

const labelOf = (row) => (row.id && row.id !== row.name ? `${row.name}-${row.id}` : row.name);

/** Branches below their trunk, in the order of their steps, where both are listed. */
const inTrees = (rows) => {
  const keys = new Set(rows.map((row) => row.key));
  const below = new Map();
  for (const row of rows) {
    if (keys.has(row.trunk)) below.set(row.trunk, [...(below.get(row.trunk) || []), row]);
  }
  const tree = (row) => {
    const branches = (below.get(row.key) || []).sort((a, b) => a.branched_at - b.branched_at);
    return [row, ...branches.flatMap(tree)];
  };
  return rows.filter((row) => !keys.has(row.trunk)).flatMap(tree);
};

class List {
  constructor(runs, selection) {
    this.runs = runs;
    this.selection = selection;
    this.items = new Map();
    const search = byId("search");
    search.value = state.values.q;
    search.addEventListener("input", () => {
      state.set({ q: search.value });
      this.draw();
    });
    const sort = byId("sort");
    for (const [value, [text]] of Object.entries(SORTS)) sort.append(el("option", { value, textContent: text }));
    sort.addEventListener("change", () => {
      state.set({ sort: sort.value });
      this.draw();
    });
    this.buttons = new Map([...STATES, ARCHIVED].map((name) => [name, this.#stateButton(name)]));
    byId("states").append(...this.buttons.values());
    byId("all").addEventListener("click", () => this.selection.all(this.rows().map((row) => row.key)));
    byId("runs").addEventListener("keydown", (event) => this.#move(event));
    addEventListener("keydown", (event) => {
      if (event.key !== "/" || event.target.matches("input, select, textarea")) return;
      event.preventDefault();
      search.focus();
    });
    setInterval(() => this.#age(), 30000);
  }

  #stateButton(name) {
    const button = el("button", { type: "button", data: { state: name }, className: "state" });
    button.addEventListener("click", () => {
      const chosen = new Set(state.list("states"));
      if (!chosen.delete(name)) chosen.add(name);
      state.setList("states", [...chosen]);
      this.draw();
    });
    return button;
  }

  /** The rows that search and states let through, in order. */
  rows() {
    const words = state.values.q.toLowerCase().split(/\s+/).filter(Boolean);
    const states = state.list("states").filter((name) => name !== ARCHIVED);
    const archived = state.list("states").includes(ARCHIVED);
    const by = (SORTS[state.values.sort] || SORTS.started)[1];
    const found = [...this.runs.rows.values()]
      .filter((row) => Boolean(row.archived) === archived)
      .filter((row) => !states.length || states.includes(row.state))
      .filter((row) => {
        const text = `${row.key} ${row.name} ${row.id} ${row.model || ""} ${row.state} ${row.note || ""} ${(row.tags || []).map((tag) => `#${tag}`).join(" ")}`.toLowerCase();
        return words.every((word) => text.includes(word));
      })
      .map((row) => [by(row), row])
      .sort(([a, one], [b, two]) => (a < b ? -1 : a > b ? 1 : one.key < two.key ? -1 : 1))
      .map(([, row]) => row);
    return inTrees(found);
  }

  draw() {
    const all = [...this.runs.rows.values()];
    byId("sort").value = state.values.sort in SORTS ? state.values.sort : "started";
    if (document.activeElement !== byId("search")) byId("search").value = state.values.q;
    for (const [name, button] of this.buttons) {
      const count = all.filter((row) => (name === ARCHIVED ? row.archived : row.state === name && !row.archived)).length;
      button.hidden = !count;
      button.textContent = `${inState({ state: name })} ${count}`;
      button.setAttribute("aria-pressed", String(state.list("states").includes(name)));
    }
    const rows = this.rows();
    const count = byId("count");
    byId("all").hidden = rows.length < 2;
    if (!all.length) count.textContent = "No run yet";
    else count.textContent = rows.length === all.length ? `${whole(all.length)} run${all.length === 1 ? "" : "s"}` : `${whole(rows.length)} of ${whole(all.length)} runs`;
    const there = new Set(rows.map((row) => row.key));
    for (const [key, item] of this.items) {
      if (there.has(key)) continue;
      item.root.remove();
      this.items.delete(key);
    }
    const parent = byId("runs");
    rows.forEach((row, place) => {
      let item = this.items.get(row.key);
      if (!item) this.items.set(row.key, (item = this.#item(row.key)));
      this.#fill(item, row);
      if (parent.children[place] !== item.root) parent.insertBefore(item.root, parent.children[place] || null);
    });
  }

  #item(key) {
    const box = el("input", { type: "checkbox" });
    const name = el("span", { className: "name" });
    const id = el("span", { className: "faint" });
    const badge = el("span", { className: "badge" });
    const facts = el("span", { className: "facts" });
    const age = el("span", { className: "age" });
    const tags = el("span", { className: "tags", hidden: true });
    const why = el("span", { className: "why small", hidden: true });
    const open = el("button", { type: "button", className: "run" },
      el("span", { className: "line" }, el("span", { className: "title" }, name, id), badge),
      el("span", { className: "line faint small" }, facts, age), tags, why);
    box.addEventListener("change", () => this.selection.toggle(key));
    open.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) this.selection.toggle(key);
      else this.selection.only(key);
    });
    return { root: el("li", { data: { key } }, box, open), box, name, id, badge, facts, age, tags, why, open };
  }

  #fill(item, row) {
    const place = this.selection.place(row.key);
    item.root.classList.toggle("on", place >= 0);
    item.root.style.setProperty("--swatch", place >= 0 ? this.selection.colour(row.key) : "transparent");
    item.box.checked = place >= 0;
    const text = JSON.stringify(row);
    if (item.text === text) return;
    item.text = text;
    item.row = row;
    const label = labelOf(row);
    item.box.setAttribute("aria-label", `Show ${label}`);
    item.name.textContent = row.trunk ? `└ ${row.name}` : row.name;
    item.id.textContent = row.id && row.id !== row.name ? row.id : "";
    item.badge.textContent = inState(row);
    item.badge.dataset.state = row.state;
    item.open.title = [row.note, row.reason].filter(Boolean).join("\n");
    item.tags.hidden = !row.tags;
    item.tags.replaceChildren(...(row.tags || []).map((tag) => el("span", { className: "tag", textContent: tag })));
    item.why.hidden = row.state !== "crashed" || !row.reason;
    item.why.textContent = row.reason || "";
    this.#facts(item);
  }

  #facts(item) {
    const { row } = item;
    item.age.textContent = ago(row.started);
    if (row.step == null) {
      item.facts.textContent = row.reason || "";
      return;
    }
    const parts = [`step ${whole(row.step)}`];
    if (row.imported_from) parts.unshift(`imported from ${row.imported_from}`);
    if (row.trunk) parts.push(`from ${whole(row.branched_at)}`);
    if (row.loss != null) parts.push(`loss ${figure("loss", row.loss)}`);
    if (row.best != null) parts.push(`best ${row.best_metric === "loss" ? "" : `${row.best_metric} `}${figure("loss", row.best)}`);
    item.facts.textContent = parts.join(" · ");
  }

  #age() {
    for (const item of this.items.values()) if (item.row) this.#facts(item);
  }

  /** Arrows go from run to run. */
  #move(event) {
    const steps = { ArrowDown: 1, ArrowUp: -1 };
    if (!(event.key in steps)) return;
    const item = event.target.closest("li");
    const next = steps[event.key] > 0 ? item?.nextElementSibling : item?.previousElementSibling;
    if (!next) return;
    event.preventDefault();
    next.querySelector(event.target.matches("input") ? "input" : "button").focus();
  }
}

/** The runs that are shown, each with a place, and so a colour, that it keeps. */
class RunSelection {
  constructor() {
    this.places = [];
    this.groups = [];
    this.told = new EventTarget();
    this.read();
  }

  read() {
    this.places = [...new Set(state.list("runs"))];
  }

  get keys() {
    return this.places.filter((key) => key !== null);
  }

  place(key) {
    return this.places.indexOf(key);
  }

  /** That of its curve: of its place, or where means are drawn, of its group. */
  colour(key) {
    const means = state.mean && repeated(this.groups);
    const number = means ? this.groups.findIndex(({ runs }) => runs.includes(key)) : this.place(key);
    return `var(--ic-${Math.max(0, number) % 8})`;
  }

  /** The run that the other views tell of. */
  get first() {
    const { of } = state.values;
    return this.keys.includes(of) ? of : this.keys[0];
  }

  only(key) {
    this.places = [key];
    this.#changed();
  }

  toggle(key) {
    const place = this.place(key);
    if (place >= 0) this.places[place] = null;
    else {
      const free = this.places.indexOf(null);
      if (free >= 0) this.places[free] = key;
      else this.places.push(key);
    }
    while (this.places.at(-1) === null) this.places.pop();
    this.#changed();
  }

  all(keys) {
    this.places = [...keys];
    this.#changed();
  }

  #changed() {
    state.set({ fleet: "", fleet_log: "" });
    state.setList("runs", this.keys);
    this.told.dispatchEvent(new Event("change"));
  }
}
