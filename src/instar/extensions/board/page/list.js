/* The list of runs, with search, states and sorting, and the selection of runs. */
"use strict";

const STATES = ["running", "finished", "stopped", "crashed", "unread"];
const ARCHIVED = "archived";
const SORTS = {
  started: ["latest first", (row) => -(row.started || 0)],
  seen: ["last heard of", (row) => -(row.seen || 0)],
  name: ["name", (row) => `${row.name} ${row.id}`.toLowerCase()],
  loss: ["loss", (row) => finiteOrInfinity(row.loss)],
  best: ["best value", (row) => finiteOrInfinity(row.higher_is_better && row.best != null ? -toNumber(row.best) : row.best)],
  step: ["most steps", (row) => -(row.step || 0)],
};
/** The held-out metric of `best`; metrics of named sets already have a prefix. */
const bestMetric = (row) => (row.best_metric?.includes("/") ? row.best_metric : `val/${row.best_metric || "loss"}`);

const finiteOrInfinity = (value) => (Number.isFinite(toNumber(value)) ? toNumber(value) : Infinity);

const stateText = (row) => ({ unread: "unreadable", unseen: "…" })[row.state] || row.state;

const labelOf = (row) => (row.id && row.id !== row.name ? `${row.name}-${row.id}` : row.name);

/** Moves branches below their trunks, ordered by the steps that they start from. */
const sortIntoTrees = (rows) => {
  const keys = new Set(rows.map((row) => row.key));
  const branchesByTrunk = new Map();
  for (const row of rows) {
    if (keys.has(row.trunk)) branchesByTrunk.set(row.trunk, [...(branchesByTrunk.get(row.trunk) || []), row]);
  }
  const tree = (row) => {
    const branches = (branchesByTrunk.get(row.key) || []).sort((a, b) => a.branched_at - b.branched_at);
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
    byId("all").addEventListener("click", () => this.selection.select(this.rows().map((row) => row.key)));
    byId("runs").addEventListener("keydown", (event) => this.#moveFocus(event));
    addEventListener("keydown", (event) => {
      if (event.key !== "/" || event.target.matches("input, select, textarea")) return;
      event.preventDefault();
      search.focus();
    });
    setInterval(() => this.#updateAges(), 30000);
  }

  #stateButton(name) {
    const button = el("button", { type: "button", data: { state: name }, className: "state" });
    button.addEventListener("click", () => {
      const names = new Set(state.list("states"));
      if (!names.delete(name)) names.add(name);
      state.setList("states", [...names]);
      this.draw();
    });
    return button;
  }

  /** The sorted rows that match the search and the states. */
  rows() {
    const words = state.values.q.toLowerCase().split(/\s+/).filter(Boolean);
    const states = state.list("states").filter((name) => name !== ARCHIVED);
    const isArchive = state.list("states").includes(ARCHIVED);
    const sortKey = (SORTS[state.values.sort] || SORTS.started)[1];
    const rows = [...this.runs.rows.values()]
      .filter((row) => Boolean(row.archived) === isArchive)
      .filter((row) => !states.length || states.includes(row.state))
      .filter((row) => {
        const text = `${row.key} ${row.name} ${row.id} ${row.model || ""} ${row.state} ${row.note || ""} ${(row.tags || []).map((tag) => `#${tag}`).join(" ")}`.toLowerCase();
        return words.every((word) => text.includes(word));
      })
      .map((row) => [sortKey(row), row])
      .sort(([a, rowA], [b, rowB]) => (a < b ? -1 : a > b ? 1 : rowA.key < rowB.key ? -1 : 1))
      .map(([, row]) => row);
    return sortIntoTrees(rows);
  }

  draw() {
    const allRows = [...this.runs.rows.values()];
    byId("sort").value = state.values.sort in SORTS ? state.values.sort : "started";
    if (document.activeElement !== byId("search")) byId("search").value = state.values.q;
    for (const [name, button] of this.buttons) {
      const count = allRows.filter((row) => (name === ARCHIVED ? row.archived : row.state === name && !row.archived)).length;
      button.hidden = !count;
      button.textContent = `${stateText({ state: name })} ${count}`;
      button.setAttribute("aria-pressed", String(state.list("states").includes(name)));
    }
    const rows = this.rows();
    const count = byId("count");
    const total = allRows.length;
    byId("all").hidden = rows.length < 2;
    if (!total) count.textContent = "No run yet";
    else count.textContent = rows.length === total ? `${formatCount(total)} run${total === 1 ? "" : "s"}` : `${formatCount(rows.length)} of ${formatCount(total)} runs`;
    const keys = new Set(rows.map((row) => row.key));
    for (const [key, item] of this.items) {
      if (keys.has(key)) continue;
      item.root.remove();
      this.items.delete(key);
    }
    const parent = byId("runs");
    rows.forEach((row, index) => {
      let item = this.items.get(row.key);
      if (!item) this.items.set(row.key, (item = this.#item(row.key)));
      this.#updateItem(item, row);
      if (parent.children[index] !== item.root) parent.insertBefore(item.root, parent.children[index] || null);
    });
  }

  #item(key) {
    const checkbox = el("input", { type: "checkbox" });
    const name = el("span", { className: "name" });
    const id = el("span", { className: "faint" });
    const badge = el("span", { className: "badge" });
    const facts = el("span", { className: "facts" });
    const age = el("span", { className: "age" });
    const tags = el("span", { className: "tags", hidden: true });
    const reason = el("span", { className: "why small", hidden: true });
    const button = el("button", { type: "button", className: "run" },
      el("span", { className: "line" }, el("span", { className: "title" }, name, id), badge),
      el("span", { className: "line faint small" }, facts, age), tags, reason);
    checkbox.addEventListener("change", () => this.selection.toggle(key));
    button.addEventListener("click", (event) => {
      if (event.ctrlKey || event.metaKey || event.shiftKey) this.selection.toggle(key);
      else this.selection.select([key]);
    });
    return { root: el("li", { data: { key } }, checkbox, button), checkbox, name, id, badge, facts, age, tags, reason, button };
  }

  #updateItem(item, row) {
    const isSelected = this.selection.slotOf(row.key) >= 0;
    item.root.classList.toggle("on", isSelected);
    item.root.style.setProperty("--swatch", isSelected ? this.selection.colour(row.key) : "transparent");
    item.checkbox.checked = isSelected;
    const rowJson = JSON.stringify(row);
    if (item.rowJson === rowJson) return;
    item.rowJson = rowJson;
    item.row = row;
    const label = labelOf(row);
    item.checkbox.setAttribute("aria-label", `Show ${label}`);
    item.name.textContent = row.trunk ? `└ ${row.name}` : row.name;
    item.id.textContent = row.id && row.id !== row.name ? row.id : "";
    item.badge.textContent = stateText(row);
    item.badge.dataset.state = row.state;
    item.button.title = [row.note, row.reason].filter(Boolean).join("\n");
    item.tags.hidden = !row.tags;
    item.tags.replaceChildren(...(row.tags || []).map((tag) => el("span", { className: "tag", textContent: tag })));
    item.reason.hidden = row.state !== "crashed" || !row.reason;
    item.reason.textContent = row.reason || "";
    this.#updateFacts(item);
  }

  #updateFacts(item) {
    const { row } = item;
    item.age.textContent = formatAge(row.started);
    if (row.step == null) {
      item.facts.textContent = row.reason || "";
      return;
    }
    const parts = [`step ${formatCount(row.step)}`];
    if (row.imported_from) parts.unshift(`imported from ${row.imported_from}`);
    if (row.trunk) parts.push(`from ${formatCount(row.branched_at)}`);
    if (row.loss != null) parts.push(`loss ${formatValue("loss", row.loss)}`);
    if (row.best != null) parts.push(`best ${row.best_metric === "loss" ? "" : `${row.best_metric} `}${formatValue("loss", row.best)}`);
    item.facts.textContent = parts.join(" · ");
  }

  #updateAges() {
    for (const item of this.items.values()) this.#updateFacts(item);
  }

  /** Moves the focus to the next or previous run with the arrow keys. */
  #moveFocus(event) {
    const steps = { ArrowDown: 1, ArrowUp: -1 };
    if (!(event.key in steps)) return;
    const item = event.target.closest("li");
    const next = steps[event.key] > 0 ? item?.nextElementSibling : item?.previousElementSibling;
    if (!next) return;
    event.preventDefault();
    next.querySelector(event.target.matches("input") ? "input" : "button").focus();
  }
}

/** The selected runs, each in a slot that determines its colour; free slots are null. Dispatches "change". */
class RunSelection extends EventTarget {
  constructor() {
    super();
    this.groups = [];
    this.readState();
  }

  readState() {
    this.slots = [...new Set(state.list("runs"))];
  }

  get keys() {
    return this.slots.filter((key) => key !== null);
  }

  slotOf(key) {
    return this.slots.indexOf(key);
  }

  /** The colour of the run's curve, or of its group's where means are drawn. */
  colour(key) {
    const drawsMeans = state.mean && hasMeans(this.groups);
    const index = drawsMeans ? this.groups.findIndex(({ runs }) => runs.includes(key)) : this.slotOf(key);
    return `var(--ic-${Math.max(0, index) % 8})`;
  }

  /** The run that the views of a single run show. */
  get detailKey() {
    const { of } = state.values;
    return this.keys.includes(of) ? of : this.keys[0];
  }

  toggle(key) {
    const slot = this.slotOf(key);
    if (slot >= 0) this.slots[slot] = null;
    else {
      const freeSlot = this.slotOf(null);
      if (freeSlot >= 0) this.slots[freeSlot] = key;
      else this.slots.push(key);
    }
    while (this.slots.at(-1) === null) this.slots.pop();
    this.#dispatchChange();
  }

  select(keys) {
    this.slots = [...keys];
    this.#dispatchChange();
  }

  #dispatchChange() {
    state.set({ fleet: "", fleet_log: "" });
    state.setList("runs", this.keys);
    this.dispatchEvent(new Event("change"));
  }
}
