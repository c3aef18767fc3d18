/* Marks of events over a plot: buttons whose tooltips describe them. */
(() => {
  "use strict";

  const { element } = Instar;
  const HALF_BUTTON_PX = 7;
  const CROWD_SIZE = 40;
  const MAX_ROWS = 3;
  const ROW_PX = 14;
  const PRIORITY = { failed: 0, alert: 1, operation: 2, resume: 3, stop: 4, asked: 5, checkpoint: 6 };
  /** Kinds that keep their own colour where marks have the colours of their runs. */
  const WARNING_KINDS = ["failed", "alert"];

  class Marks {
    /** `onShow(button)` is called when a mark is hovered, focused or clicked, `onHide()` afterwards. */
    constructor(tip, onShow, onHide) {
      this.tip = tip;
      this.onShow = onShow;
      this.onHide = onHide;
      this.buttons = new Map();
      this.rowCount = 1;
      this.context = document.createElement("canvas").getContext("2d");
      this.context.font = "11px system-ui, sans-serif";
    }

    /** Height of the names above the plot in pixels; at least one row, also without marks. */
    get height() {
      return this.rowCount * ROW_PX;
    }

    /** The marks of these runs, the most important first; `kinds`: true for all. */
    static of(runs, kinds, x) {
      const marks = [];
      for (const run of runs) {
        for (const mark of run.marks || []) {
          const isChosen = kinds === true || kinds.includes(mark.kind);
          if (isChosen && mark.x[x] != null) marks.push({ ...mark, run });
        }
      }
      return marks.sort((a, b) => PRIORITY[a.kind] - PRIORITY[b.kind] || a.x[x] - b.x[x]);
    }

    /** Places the buttons over the plot; marks within a few pixels share one. `colour(run)`: the colour of
        its marks, or "". Returns whether the height has changed. */
    place(u, marks, x, colour) {
      const width = u.bbox.width / devicePixelRatio;
      const groups = new Map();
      const isCrowded = marks.filter((mark) => mark.kind !== "checkpoint").length > CROWD_SIZE;
      u.over.classList.toggle("ic-crowded", isCrowded);
      const groupWidth = isCrowded ? 10 : 4;
      for (const mark of marks) {
        const left = u.valToPos(mark.x[x], "x");
        if (left < -1 || left > width + 1) continue;
        const isLow = mark.kind === "checkpoint";
        const key = `${isLow ? "low" : "high"} ${Math.round(left / groupWidth)}`;
        if (!groups.has(key)) groups.set(key, { left, isLow, marks: [] });
        groups.get(key).marks.push(mark);
      }
      const rowCount = this.#placeNames([...groups.values()], width, isCrowded);
      const unusedIds = new Set(this.buttons.keys());
      for (const group of groups.values()) {
        const first = group.marks[0];
        const id = `${first.run.id} ${first.kind} ${first.x.step} ${first.superseded}`;
        unusedIds.delete(id);
        if (!this.buttons.has(id)) this.buttons.set(id, this.#makeButton(u.over));
        this.#updateButton(this.buttons.get(id), group, colour(first.run));
      }
      for (const id of unusedIds) {
        this.buttons.get(id).remove();
        this.buttons.delete(id);
      }
      this.#setTabStop(this.tabStop);
      const hasChanged = rowCount !== this.rowCount;
      this.rowCount = rowCount;
      return hasChanged;
    }

    /** Gives each group a name and a row above the plot, from right to left: a row above the groups that the
        name would cover, so that no line crosses a name. Groups beyond the last row get no name. Returns
        the number of rows. */
    #placeNames(groups, width, isCrowded) {
      const boxes = [];
      for (const group of groups.sort((a, b) => b.left - a.left)) {
        const names = [...new Set(group.marks.map((mark) => mark.name).filter(Boolean))];
        group.name = isCrowded || !names.length ? "" : names[0] + (names.length > 1 ? ` +${names.length - 1}` : "");
        if (!group.name) continue;
        const length = this.context.measureText(group.name).width + 12;
        group.isNameBefore = group.left + length > width + 14;
        const start = group.isNameBefore ? group.left - length : group.left;
        const end = start + length;
        const overlaps = boxes.filter((box) => box.left >= start && box.left <= end || box.start < end && box.end > start);
        group.row = 1 + Math.max(-1, ...overlaps.map(({ row }) => row));
        if (group.row < MAX_ROWS && start > -40) boxes.push({ left: group.left, start, end, row: group.row });
        else group.name = "";
      }
      return Math.max(1, ...boxes.map(({ row }) => row + 1));
    }

    /** Lets Tab reach `button`, or the first one; arrows move from it to the others. Returns all from left to right. */
    #setTabStop(button) {
      const buttons = [...this.buttons.values()].sort((a, b) => a.left - b.left);
      this.tabStop = buttons.includes(button) ? button : buttons[0];
      for (const other of buttons) other.tabIndex = other === this.tabStop ? 0 : -1;
      return buttons;
    }

    #moveFocus(button, steps) {
      const buttons = this.#setTabStop(button);
      buttons[buttons.indexOf(button) + steps]?.focus();
    }

    #updateButton(button, { left, isLow, marks, name, row, isNameBefore }, colour) {
      button.marks = marks;
      button.left = left;
      const superseded = marks.every((mark) => mark.superseded) ? " ic-superseded" : "";
      button.className = `ic-mark ic-${marks[0].kind}${superseded}`;
      // no transform: names would be drawn below the lines of other marks
      button.style.left = `${left - HALF_BUTTON_PX}px`;
      const hasRunColour = (kind) => colour && !WARNING_KINDS.includes(kind);
      button.style.setProperty("--mark", hasRunColour(marks[0].kind) ? colour : "");
      const signs = [...new Map(marks.map((mark) => [mark.sign, mark.kind]))].slice(0, 3);
      const content = JSON.stringify([signs, colour, name, row, isNameBefore]);
      if (!isLow && button.dataset.content !== content) {
        button.dataset.content = content;
        button.replaceChildren(...signs.map(([sign, kind]) => {
          const glyph = element("i", `ic-glyph ic-${kind} ic-sign-${sign}`);
          if (hasRunColour(kind)) glyph.style.setProperty("--mark", colour);
          return glyph;
        }));
        if (name) {
          button.style.setProperty("--row", row);
          button.append(element("span", isNameBefore ? "ic-label ic-before" : "ic-label", null, name));
        }
      }
      const label = marks.map((mark) => `${mark.title}. ${mark.text}`).join(" ");
      button.setAttribute("aria-label", label.replace(/\n/g, ". "));
    }

    #makeButton(parent) {
      const button = element("button", "", parent);
      button.type = "button";
      button.setAttribute("aria-describedby", this.tip.root.id);
      const show = () => this.onShow(button);
      button.addEventListener("pointerenter", show);
      button.addEventListener("pointerleave", this.onHide);
      button.addEventListener("focus", () => {
        this.#setTabStop(button);
        show();
      });
      button.addEventListener("blur", this.onHide);
      button.addEventListener("click", show);
      button.addEventListener("keydown", (event) => {
        if (event.key === "Escape") this.onHide();
        const steps = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
        if (!steps) return;
        event.preventDefault();
        this.#moveFocus(button, steps);
      });
      return button;
    }

    /** Drops the buttons, after their plot was destroyed. */
    clear() {
      this.buttons.clear();
      this.tabStop = null;
    }
  }

  /** Kind and meaning of each sign. */
  const MEANINGS = {
    growth: ["operation", "growth"],
    setting: ["operation", "settings change"],
    resume: ["resume", "resume or rewind"],
    alert: ["alert", "alert"],
    failed: ["failed", "failure"],
    stop: ["stop", "end"],
    asked: ["asked", "requested: waiting, refused or cancelled"],
    checkpoint: ["checkpoint", "checkpoint"],
  };

  Object.assign(Instar, { MEANINGS, Marks });
})();
