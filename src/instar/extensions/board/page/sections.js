/* Sections of a run as elements: tables, lists, texts. What they say comes as text from
   extensions/board/sections.py. */
"use strict";

const SVG = "http://www.w3.org/2000/svg";

function svg(tag, attributes, text) {
  const made = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  if (text != null) made.textContent = text;
  return made;
}

const scroller = (label, ...children) =>
  el("div", { className: "scroll", tabIndex: 0, attrs: { role: "region", "aria-label": label } }, ...children);

const tableOf = (label, heads, rows, numbers = []) =>
  el("table", { attrs: { "aria-label": label } },
    el("thead", {}, el("tr", {}, heads.map((head, n) => el("th", { className: numbers.includes(n) ? "n" : "", textContent: head, scope: "col" })))),
    el("tbody", {}, rows));

function tableCell(value, isNumber) {
  const { text, strong, note, full, class: kind } = typeof value === "string" ? { text: value } : value;
  const made = el("td", { className: [isNumber ? "n" : "", kind || ""].join(" ").trim() });
  if (strong) made.append(el("strong", { textContent: strong }), text ? " " : "");
  if (full) made.append(el("details", { title: full.slice(0, 1000) }, el("summary", { textContent: text }), full));
  else if (text) made.append(text);
  if (note) made.append(el("div", { className: "note", textContent: note }));
  return made;
}

/** A row for each run; which columns are shown, and by which it is sorted, is kept in the address. */
class RunsTable {
  constructor({ title, heads, shown, rows }) {
    Object.assign(this, { title, heads, rows, shown });
    this.short = InstarChart.shortNames(rows.map((row) => row.name));
    this.table = el("div");
    this.root = el("div", {}, this.table);
    if (heads.length > 1) this.root.append(this.#choice());
    this.draw();
  }

  get columns() {
    const chosen = state.list("columns").filter((head) => this.heads.includes(head));
    return chosen.length ? chosen : this.shown;
  }

  #choice() {
    const boxes = this.heads.map((head) => {
      const box = el("input", { type: "checkbox", checked: this.columns.includes(head) });
      box.addEventListener("change", () => {
        state.setList("columns", this.heads.filter((each) => (each === head ? box.checked : this.columns.includes(each))));
        this.draw();
      });
      return el("label", { className: "check" }, box, head);
    });
    return el("details", { className: "columns" }, el("summary", { textContent: "Columns" }), el("div", { className: "choices" }, boxes));
  }

  /** The rows in order: by a number where there is one; runs without a value come last. */
  #sorted() {
    const { order } = state.values;
    const down = order.startsWith("-");
    const column = this.heads.indexOf(down ? order.slice(1) : order);
    const rows = this.rows.map((row, place) => ({ ...row, short: this.short[place], by: row.cells[column] }));
    if (column < 0) return rows;
    const less = ([a, , x], [b, , y]) => (x != null && y != null ? x - y : a.localeCompare(b));
    return rows.sort((a, b) => (a.by && b.by ? (down ? -1 : 1) * less(a.by, b.by) : Boolean(b.by) - Boolean(a.by)));
  }

  #head(head) {
    const { order } = state.values;
    const sorted = { [head]: "ascending", [`-${head}`]: "descending" }[order];
    const sign = { ascending: " ▴", descending: " ▾" }[sorted] || "";
    const button = el("button", { type: "button", className: "plain", textContent: head + sign });
    button.addEventListener("click", () => {
      state.set({ order: sorted === "ascending" ? `-${head}` : head });
      this.draw();
      this.table.querySelectorAll("thead button")[this.columns.indexOf(head)]?.focus();
    });
    return el("th", { scope: "col", className: this.#isNumber(head) ? "n" : "", attrs: sorted ? { "aria-sort": sorted } : {} }, button);
  }

  #isNumber(head) {
    const column = this.heads.indexOf(head);
    return this.rows.some((row) => row.cells[column]?.[2] != null);
  }

  draw() {
    const { columns } = this;
    const rows = this.#sorted().map(({ name, short, cells }) =>
      el("tr", {}, el("th", { scope: "row", title: name }, embedded ? short : el("a", { href: addressOf({ runs: pack([name]) }), textContent: short })),
        columns.map((head) => {
          const [text, note] = cells[this.heads.indexOf(head)] || ["–"];
          const value = head === "state" ? badgeOf(text) : text;
          return el("td", { className: this.#isNumber(head) ? "n" : "", title: note || "" }, value);
        })));
    const head = el("tr", {}, el("th", { scope: "col", textContent: "run" }), columns.map((each) => this.#head(each)));
    const made = scroller(this.title, el("table", { className: "runs", attrs: { "aria-label": this.title } }, el("thead", {}, head), el("tbody", {}, rows)));
    made.classList.toggle("tall", rows.length > 16);
    this.table.replaceChildren(made);
  }
}

const DRAW = {
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

  table: ({ title, heads: full, rows, numbers, superseded, runs }) => {
    const named = full[0] === "";
    const heads = runs ? ["", ...InstarChart.shortNames(full.slice(1))] : full;
    const body = rows.map((row, n) => {
      const cells = row.map((value, column) => (named && !column ? el("th", { scope: "row", textContent: value }) : tableCell(value, numbers.includes(column))));
      const lost = superseded.includes(n);
      return el("tr", { className: lost ? "superseded" : "", title: lost ? "superseded: the run went on from an earlier step" : "" }, cells);
    });
    const made = scroller(title || heads[0], tableOf(title || heads[0], heads, body, numbers));
    made.classList.toggle("tall", rows.length > 16);
    return made;
  },

  notices: ({ items }) => {
    const made = el("ul", { className: "notices" }, items.map(([kind, step, text]) =>
      el("li", { className: kind }, kind ? el("span", { className: "kind", textContent: `${kind} ` }) : null, step ? el("span", { className: "faint", textContent: `${step} ` }) : null, text)));
    made.classList.toggle("tall", items.length > 16);
    if (items.length > 16) made.tabIndex = 0;
    return made;
  },

  matrix: ({ target, counts, shares }) => {
    const rows = counts.map((row, n) => el("tr", {}, el("th", { className: "n", textContent: String(n) }), row.map((count, m) => {
      const made = el("td", { className: "n", textContent: count.toLocaleString("en") });
      made.style.setProperty("--share", `${Math.round(100 * shares[n][m])}%`);
      return made;
    })));
    const label = `${target}: true class by row, predicted by column`;
    return el("figure", { className: "tested" }, el("figcaption", { textContent: label }),
      scroller(label, tableOf(label, ["true ↓ predicted →", ...counts.map((_, n) => String(n))], rows)));
  },

  scatter: ({ target, caption, side, path, low, high }) => {
    const made = svg("svg", { class: "scatter", viewBox: `-66 -10 ${side + 80} ${side + 50}`, role: "img", "aria-label": `${target}: ${caption}, from ${low} to ${high}` });
    const middle = { "text-anchor": "middle" };
    const end = { "text-anchor": "end" };
    made.append(
      svg("rect", { width: side, height: side, class: "frame" }),
      svg("path", { d: `M0 ${side}L${side} 0`, class: "identity" }),
      svg("path", { d: path, class: "dots" }),
      svg("text", { x: 0, y: side + 18 }, low),
      svg("text", { x: side, y: side + 18, ...end }, high),
      svg("text", { x: side / 2, y: side + 32, ...middle }, "true"),
      svg("text", { x: -6, y: side, ...end }, low),
      svg("text", { x: -6, y: 10, ...end }, high),
      svg("text", { transform: `translate(-50 ${side / 2}) rotate(-90)`, ...middle }, "predicted"));
    return el("figure", { className: "tested" }, el("figcaption", { textContent: `${target}: ${caption}` }), made);
  },

  samples: ({ items }) => {
    const [latest, ...earlier] = items.map((each) =>
      el("figure", { className: "written" },
        el("figcaption", {}, `step ${each.step.toLocaleString("en")}`, each.prompt ? [", prompt ", el("code", { textContent: each.from })] : []),
        el("pre", { className: "paper", tabIndex: 0, attrs: { "aria-label": `Sample at step ${each.step}` } }, el("span", { className: "prompt", textContent: each.prompt }), each.text)));
    const folded = earlier.length ? el("details", { className: "earlier" }, el("summary", { textContent: `Earlier (${earlier.length}, the latest first)` }), earlier) : null;
    return el("div", {}, latest, folded);
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
  const { kind, title, note, left_out: leftOut, folded } = section;
  const more = leftOut ? el("p", { className: "faint", textContent: `${leftOut.toLocaleString("en")} earlier ones are left out.` }) : null;
  const body = [more, DRAW[kind](section)];
  const heading = title ? el("h3", { textContent: title }) : null;
  const remark = note ? el("span", { className: "faint", textContent: ` ${note}` }) : null;
  if (folded == null && kind !== "config") return el("section", { className: "part", data: { kind } }, heading, remark, body);
  return el("details", { className: "part printed", open: !embedded || folded === false, data: { kind } }, el("summary", {}, heading, remark), body);
}

function drawSections(parent, sections) {
  parent.replaceChildren(...sections.map(sectionOf));
}
