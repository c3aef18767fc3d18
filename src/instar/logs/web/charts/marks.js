/* What happened on the way, as buttons over the plot that explain themselves. */
(() => {
  "use strict";

  const { element } = Instar;
  const NEAR_PX = 7;
  const CROWD = 40;
  const RANK = { failed: 0, alert: 1, operation: 2, resume: 3, stop: 4, checkpoint: 5 };

  class Marks {
    /** `explain(button)` and `hide()`: when one is pointed at or has the focus, and after. */
    constructor(tip, explain, hide) {
      this.tip = tip;
      this.explain = explain;
      this.hide = hide;
      this.buttons = new Map();
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

    /** Buttons over the plot; marks that are less than a few pixels apart share one. */
    place(u, marks, x) {
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
      const before = new Set(this.buttons.keys());
      for (const group of groups.values()) {
        const first = group.marks[0];
        const id = `${first.run.id} ${first.kind} ${first.x.step} ${first.superseded}`;
        before.delete(id);
        if (!this.buttons.has(id)) this.buttons.set(id, this.#make(u.over));
        this.#tell(this.buttons.get(id), group);
      }
      for (const id of before) {
        this.buttons.get(id).remove();
        this.buttons.delete(id);
      }
      this.#stop(this.current);
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

    #tell(button, { left, low, marks }) {
      button.marks = marks;
      button.left = left;
      const old = marks.every((mark) => mark.superseded) ? " ic-superseded" : "";
      button.className = `ic-mark ic-${marks[0].kind}${old}`;
      button.style.transform = `translateX(${left - NEAR_PX}px)`;
      const kinds = [...new Set(marks.map((mark) => mark.kind))].slice(0, 3);
      if (!low && button.dataset.kinds !== kinds.join()) {
        button.dataset.kinds = kinds.join();
        button.replaceChildren(...kinds.map((kind) => element("i", `ic-glyph ic-${kind}`)));
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

  Object.assign(Instar, { Marks });
})();
