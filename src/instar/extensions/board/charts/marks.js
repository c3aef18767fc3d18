/* What happened on the way, as buttons over the plot that explain themselves. */
(() => {
  "use strict";

  const { element } = Instar;
  const NEAR_PX = 7;
  const CROWD = 40;
  const ROWS = 3;
  const ROW_PX = 14;
  const RANK = { failed: 0, alert: 1, operation: 2, resume: 3, stop: 4, asked: 5, checkpoint: 6 };

  const LOUD = { failed: true, alert: true };

  class Marks {
    /** `explain(button)` and `hide()`: when one is pointed at or has the focus, and after. */
    constructor(tip, explain, hide) {
      this.tip = tip;
      this.explain = explain;
      this.hide = hide;
      this.buttons = new Map();
      this.rows = 1;
      this.pen = document.createElement("canvas").getContext("2d");
      this.pen.font = "11px system-ui, sans-serif";
    }

    /** Pixels above the plot that the names take; a row is free for what may come. */
    get above() {
      return this.rows * ROW_PX;
    }

    /** The marks of these runs that are wanted, the weightiest first. */
    static of(runs, wanted, x) {
      const found = [];
      for (const run of runs) {
        for (const mark of run.marks || []) {
          const kind = wanted === true || wanted.includes(mark.kind);
          if (kind && mark.x[x] != null) found.push({ ...mark, run });
        }
      }
      return found.sort((a, b) => RANK[a.kind] - RANK[b.kind] || a.x[x] - b.x[x]);
    }

    /** Buttons over the plot; marks that are less than a few pixels apart share one. `colour(run)`: that
        of its curve where there are several runs. Returns whether the names need more or less room. */
    place(u, marks, x, colour) {
      const width = u.bbox.width / devicePixelRatio;
      const groups = new Map();
      const crowded = marks.filter((mark) => mark.kind !== "checkpoint").length > CROWD;
      u.over.classList.toggle("ic-crowded", crowded);
      const apart = crowded ? 10 : 4;
      for (const mark of marks) {
        const left = u.valToPos(mark.x[x], "x");
        if (left < -1 || left > width + 1) continue;
        const low = mark.kind === "checkpoint";
        const key = `${low ? "low" : "high"} ${Math.round(left / apart)}`;
        if (!groups.has(key)) groups.set(key, { left, low, marks: [] });
        groups.get(key).marks.push(mark);
      }
      const rows = this.#name([...groups.values()], width, crowded);
      const before = new Set(this.buttons.keys());
      for (const group of groups.values()) {
        const first = group.marks[0];
        const id = `${first.run.id} ${first.kind} ${first.x.step} ${first.superseded}`;
        before.delete(id);
        if (!this.buttons.has(id)) this.buttons.set(id, this.#make(u.over));
        this.#tell(this.buttons.get(id), group, colour(first.run));
      }
      for (const id of before) {
        this.buttons.get(id).remove();
        this.buttons.delete(id);
      }
      this.#stop(this.current);
      const changed = rows !== this.rows;
      this.rows = rows;
      return changed;
    }

    /** Gives each group a name and a row above the plot, from right to left: above those that its name
        would cover, so that no line crosses a name. Those beyond the last row stay without. Returns
        how many rows there are. */
    #name(groups, width, crowded) {
      const placed = [];
      for (const group of groups.sort((a, b) => b.left - a.left)) {
        const names = [...new Set(group.marks.map((mark) => mark.name).filter(Boolean))];
        group.name = crowded || !names.length ? "" : names[0] + (names.length > 1 ? ` +${names.length - 1}` : "");
        if (!group.name) continue;
        const length = this.pen.measureText(group.name).width + 12;
        group.before = group.left + length > width + 14;
        const begin = group.before ? group.left - length : group.left;
        const covered = placed.filter(({ left, from, to }) => left >= begin && left <= begin + length || from < begin + length && to > begin);
        group.row = 1 + Math.max(-1, ...covered.map(({ row }) => row));
        if (group.row < ROWS && begin > -40) placed.push({ left: group.left, from: begin, to: begin + length, row: group.row });
        else group.name = "";
      }
      return Math.max(1, ...placed.map(({ row }) => row + 1));
    }

    /** One of them is reached by Tab, the others from it by the arrows. */
    #stop(current) {
      const all = [...this.buttons.values()].sort((a, b) => a.left - b.left);
      this.current = all.includes(current) ? current : all[0];
      for (const button of all) button.tabIndex = button === this.current ? 0 : -1;
      return all;
    }

    #walk(button, steps) {
      const all = this.#stop(button);
      const next = all[all.indexOf(button) + steps];
      if (next) next.focus();
    }

    #tell(button, { left, low, marks, name, row, before }, colour) {
      button.marks = marks;
      button.left = left;
      const old = marks.every((mark) => mark.superseded) ? " ic-superseded" : "";
      button.className = `ic-mark ic-${marks[0].kind}${old}`;
      // no transform: names would be drawn below the lines of other marks
      button.style.left = `${left - NEAR_PX}px`;
      const ofRun = (kind) => colour && !(kind in LOUD);
      button.style.setProperty("--mark", ofRun(marks[0].kind) ? colour : "");
      const signs = [...new Map(marks.map((mark) => [mark.sign, mark.kind]))].slice(0, 3);
      const text = JSON.stringify([signs, colour, name, row, before]);
      if (!low && button.dataset.told !== text) {
        button.dataset.told = text;
        button.replaceChildren(...signs.map(([sign, kind]) => {
          const glyph = element("i", `ic-glyph ic-${kind} ic-sign-${sign}`);
          if (ofRun(kind)) glyph.style.setProperty("--mark", colour);
          return glyph;
        }));
        if (name) {
          button.style.setProperty("--row", row);
          button.append(element("span", before ? "ic-label ic-before" : "ic-label", null, name));
        }
      }
      const words = marks.map((mark) => `${mark.title}. ${mark.text}`).join(" ");
      button.setAttribute("aria-label", words.replace(/\n/g, ". "));
    }

    #make(over) {
      const button = element("button", "", over);
      button.type = "button";
      button.setAttribute("aria-describedby", this.tip.root.id);
      const show = () => this.explain(button);
      button.addEventListener("pointerenter", show);
      button.addEventListener("pointerleave", this.hide);
      button.addEventListener("focus", () => {
        this.#stop(button);
        show();
      });
      button.addEventListener("blur", this.hide);
      button.addEventListener("click", show);
      button.addEventListener("keydown", (event) => {
        if (event.key === "Escape") this.hide();
        const steps = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!steps) return;
        event.preventDefault();
        this.#walk(button, steps);
      });
      return button;
    }

    /** Forgets the buttons, which went with their plot. */
    clear() {
      this.buttons.clear();
      this.current = null;
    }
  }

  /** What each sign means, with the kind of its marks. */
  const MEANINGS = {
    growth: ["operation", "growth"],
    setting: ["operation", "settings change"],
    resume: ["resume", "resume or rewind"],
    alert: ["alert", "alert"],
    failed: ["failed", "failure"],
    stop: ["stop", "end"],
    asked: ["asked", "asked for: waits, refused or cancelled"],
    checkpoint: ["checkpoint", "checkpoint"],
  };

  Object.assign(Instar, { MEANINGS, Marks });
})();
