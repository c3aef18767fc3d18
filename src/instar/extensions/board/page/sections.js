/* Renders sections, whose content comes from extensions/board/sections.py, as elements. */
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, text) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  if (text != null) node.textContent = text;
  return node;
}

const scroller = (label, ...children) =>
  el("div", { className: "scroll", tabIndex: 0, attrs: { role: "region", "aria-label": label } }, ...children);

const tableOf = (label, heads, rows, numbers = []) =>
  el("table", { attrs: { "aria-label": label } },
    el("thead", {}, el("tr", {}, heads.map((head, n) => el("th", { className: numbers.includes(n) ? "n" : "", textContent: head, scope: "col" })))),
    el("tbody", {}, rows));

function tableCell(value, isNumber) {
  const { text, strong, note, full, class: className } = typeof value === "string" ? { text: value } : value;
  const cell = el("td", { className: [isNumber ? "n" : "", className || ""].join(" ").trim() });
  if (strong) cell.append(el("strong", { textContent: strong }), text ? " " : "");
  if (full) cell.append(el("details", { title: full.slice(0, 1000) }, el("summary", { textContent: text }), full));
  else if (text) cell.append(text);
  if (note) cell.append(el("div", { className: "note", textContent: note }));
  return cell;
}

/** A table with a row for each run, whose columns and order are part of the state. */
class RunsTable {
  constructor({ title, heads, shown: defaultColumns, rows }) {
    Object.assign(this, { title, heads, rows, defaultColumns });
    this.shortNames = InstarChart.shortNames(rows.map((row) => row.name));
    this.container = el("div");
    this.root = el("div", {}, this.container);
    if (heads.length > 1) this.root.append(this.#columnChoice());
    this.draw();
  }

  get columns() {
    const columns = state.list("columns").filter((head) => this.heads.includes(head));
    return columns.length ? columns : this.defaultColumns;
  }

  #columnChoice() {
    const labels = this.heads.map((head) => {
      const checkbox = el("input", { type: "checkbox", checked: this.columns.includes(head) });
      checkbox.addEventListener("change", () => {
        state.setList("columns", this.heads.filter((other) => (other === head ? checkbox.checked : this.columns.includes(other))));
        this.draw();
      });
      return el("label", { className: "check" }, checkbox, head);
    });
    return el("details", { className: "columns" }, el("summary", { textContent: "Columns" }), el("div", { className: "choices" }, labels));
  }

  /** The rows sorted by the chosen column, by its numbers if it has any; rows without a value come last. */
  #sortedRows() {
    const { order } = state.values;
    const isDescending = order.startsWith("-");
    const column = this.heads.indexOf(isDescending ? order.slice(1) : order);
    const rows = this.rows.map((row, i) => ({ ...row, shortName: this.shortNames[i], sortCell: row.cells[column] }));
    if (column < 0) return rows;
    const compare = ([a, , x], [b, , y]) => (x != null && y != null ? x - y : a.localeCompare(b));
    return rows.sort(({ sortCell: a }, { sortCell: b }) => (a && b ? (isDescending ? -1 : 1) * compare(a, b) : Boolean(b) - Boolean(a)));
  }

  #head(head) {
    const { order } = state.values;
    const direction = { [head]: "ascending", [`-${head}`]: "descending" }[order];
    const sign = { ascending: " ▴", descending: " ▾" }[direction] || "";
    const button = el("button", { type: "button", className: "plain", textContent: head + sign });
    button.addEventListener("click", () => {
      state.set({ order: direction === "ascending" ? `-${head}` : head });
      this.draw();
      this.container.querySelectorAll("thead button")[this.columns.indexOf(head)]?.focus();
    });
    return el("th", { scope: "col", className: this.#isNumber(head) ? "n" : "", attrs: direction ? { "aria-sort": direction } : {} }, button);
  }

  #isNumber(head) {
    const column = this.heads.indexOf(head);
    return this.rows.some((row) => row.cells[column]?.[2] != null);
  }

  draw() {
    const { columns } = this;
    const rows = this.#sortedRows().map(({ name, shortName, cells }) =>
      el("tr", {}, el("th", { scope: "row", title: name }, embedded ? shortName : el("a", { href: addressOf({ runs: pack([name]) }), textContent: shortName })),
        columns.map((head) => {
          const [text, note] = cells[this.heads.indexOf(head)] || ["–"];
          const value = head === "state" ? badgeOf(text) : text;
          return el("td", { className: this.#isNumber(head) ? "n" : "", title: note || "" }, value);
        })));
    const head = el("tr", {}, el("th", { scope: "col", textContent: "run" }), columns.map((column) => this.#head(column)));
    const table = el("table", { className: "runs", attrs: { "aria-label": this.title } }, el("thead", {}, head), el("tbody", {}, rows));
    this.container.replaceChildren(limitHeight(scroller(this.title, table), rows.length));
  }
}

/** Limits the height of an element with more than 16 rows, which then scrolls. */
function limitHeight(node, rowCount) {
  node.classList.toggle("tall", rowCount > 16);
  return node;
}

const RENDERERS = {
  runs: (section) => new RunsTable(section).root,

  failure: ({ type, where, message, resume, log }) =>
    el("div", { className: "failure" },
      el("p", {}, el("strong", { textContent: type }), ` ${where}`),
      el("p", { className: "lines", textContent: message }),
      resume ? el("p", {}, "Resume with ", el("code", { textContent: resume })) : null,
      log.length ? el("details", { className: "printed", open: true }, el("summary", { textContent: "The end of its log" }),
        el("pre", { className: "paper", tabIndex: 0, attrs: { "aria-label": "The end of its log" }, textContent: log.join("\n") })) : null),

  facts: ({ items }) =>
    el("dl", { className: "figures" }, items.map(([label, value, note]) =>
      el("div", {}, el("dt", { textContent: label }), el("dd", { textContent: value }), note ? el("dd", { className: "note", textContent: note }) : null))),

  text: ({ lines }) => (lines.length ? el("div", { className: "lines" }, lines.map((line) => el("p", { textContent: line }))) : null),

  table: ({ title, heads: fullHeads, rows, numbers, superseded, runs }) => {
    const hasRowHeads = fullHeads[0] === "";
    const heads = runs ? ["", ...InstarChart.shortNames(fullHeads.slice(1))] : fullHeads;
    const body = rows.map((row, n) => {
      const cells = row.map((value, column) => (hasRowHeads && !column ? el("th", { scope: "row", textContent: value }) : tableCell(value, numbers.includes(column))));
      const isSuperseded = superseded.includes(n);
      return el("tr", { className: isSuperseded ? "superseded" : "", title: isSuperseded ? "superseded: the run went on from an earlier step" : "" }, cells);
    });
    const label = title || heads[0];
    return limitHeight(scroller(label, tableOf(label, heads, body, numbers)), rows.length);
  },

  notices: ({ items }) => {
    const list = el("ul", { className: "notices" }, items.map(([kind, step, text]) =>
      el("li", { className: kind }, kind ? el("span", { className: "kind", textContent: `${kind} ` }) : null, step ? el("span", { className: "faint", textContent: `${step} ` }) : null, text)));
    if (items.length > 16) list.tabIndex = 0;
    return limitHeight(list, items.length);
  },

  matrix: ({ target, counts, shares }) => {
    const rows = counts.map((row, n) => el("tr", {}, el("th", { className: "n", textContent: String(n) }), row.map((count, m) => {
      const cell = el("td", { className: "n", textContent: count.toLocaleString("en") });
      cell.style.setProperty("--share", `${Math.round(100 * shares[n][m])}%`);
      return cell;
    })));
    const label = `${target}: true class by row, predicted by column`;
    return el("figure", { className: "tested" }, el("figcaption", { textContent: label }),
      scroller(label, tableOf(label, ["true ↓ predicted →", ...counts.map((_, n) => String(n))], rows)));
  },

  scatter: ({ target, caption, side, path, low, high }) => {
    const plot = svg("svg", { class: "scatter", viewBox: `-66 -10 ${side + 80} ${side + 50}`, role: "img", "aria-label": `${target}: ${caption}, from ${low} to ${high}` });
    const middle = { "text-anchor": "middle" };
    const end = { "text-anchor": "end" };
    plot.append(
      svg("rect", { width: side, height: side, class: "frame" }),
      svg("path", { d: `M0 ${side}L${side} 0`, class: "identity" }),
      svg("path", { d: path, class: "dots" }),
      svg("text", { x: 0, y: side + 18 }, low),
      svg("text", { x: side, y: side + 18, ...end }, high),
      svg("text", { x: side / 2, y: side + 32, ...middle }, "true"),
      svg("text", { x: -6, y: side, ...end }, low),
      svg("text", { x: -6, y: 10, ...end }, high),
      svg("text", { transform: `translate(-50 ${side / 2}) rotate(-90)`, ...middle }, "predicted"));
    return el("figure", { className: "tested" }, el("figcaption", { textContent: `${target}: ${caption}` }), plot);
  },

  samples: ({ items }) => {
    const [latest, ...earlier] = items.map(({ step, prompt, from: promptJson, text }) =>
      el("figure", { className: "written" },
        el("figcaption", {}, `step ${step.toLocaleString("en")}`, prompt ? [", prompt ", el("code", { textContent: promptJson })] : []),
        el("pre", { className: "paper", tabIndex: 0, attrs: { "aria-label": `Sample at step ${step}` } }, el("span", { className: "prompt", textContent: prompt }), text)));
    const earlierDetails = earlier.length ? el("details", { className: "earlier" }, el("summary", { textContent: `Earlier (${earlier.length}, the latest first)` }), earlier) : null;
    return el("div", {}, latest, earlierDetails);
  },

  images: ({ items }) =>
    el("div", { className: "images" }, items.map(({ label, src }) =>
      el("figure", {}, el("img", { src, alt: label }), el("figcaption", { textContent: label })))),

  config: ({ lines }) =>
    el("pre", { className: "paper config", tabIndex: 0, attrs: { "aria-label": "run.yaml" } }, lines.flatMap(([text, origin]) =>
      [origin ? el("mark", { title: origin, textContent: text }) : text, "\n"])),

  pairs: ({ items }) =>
    el("dl", { className: "pairs" }, items.flatMap(([name, value]) => [el("dt", { textContent: name }), el("dd", { textContent: value })])),
};

function sectionOf(section) {
  const { kind, title, note, left_out: leftOut, folded: isFolded } = section;
  const omission = leftOut ? el("p", { className: "faint", textContent: `${leftOut.toLocaleString("en")} earlier ones are left out.` }) : null;
  const body = [omission, RENDERERS[kind](section)];
  const heading = title ? el("h3", { textContent: title }) : null;
  const remark = note ? el("span", { className: "faint", textContent: ` ${note}` }) : null;
  if (isFolded == null && kind !== "config") return el("section", { className: "part", data: { kind } }, heading, remark, body);
  return el("details", { className: "part printed", open: !embedded || isFolded === false, data: { kind } }, el("summary", {}, heading, remark), body);
}

function drawSections(parent, sections) {
  parent.replaceChildren(...sections.map(sectionOf));
}
