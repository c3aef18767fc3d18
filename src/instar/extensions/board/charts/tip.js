/* What is told beside a place of the plot: the values of the curves there, or what a mark means. */
(() => {
  "use strict";

  const { nearest } = Instar;
  const READ_OUT = 10;
  const EXPLAINED = 4;

  const element = (tag, name, parent, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text != null) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };

  class Tip {
    static made = 0;

    constructor(plot) {
      this.plot = plot;
      this.root = element("div", "ic-tip", plot);
      this.root.setAttribute("role", "tooltip");
      this.root.id = `ic-tip-${(Tip.made += 1)}`;
      this.root.hidden = true;
    }

    /** The curves' values at `x`, those that are nearest to the pointer's height. */
    read(u, lines, { log, colour, at }) {
      const { left, top } = u.cursor;
      const x = u.posToVal(left, "x");
      let found = [];
      for (const line of lines) {
        if (!line.shown) continue;
        const i = nearest(line, x);
        if (i < 0) continue;
        const y = line.ys[i];
        if (log && y <= 0) continue;
        found.push({ line, i, at: line.xs[i], y, away: Math.abs(u.valToPos(y, "y") - top) });
      }
      if (!found.length) return null;
      found.sort((a, b) => a.away - b.away);
      const closest = found[0];
      const others = found.length - READ_OUT;
      found = found.slice(0, READ_OUT).sort((a, b) => b.y - a.y);
      this.root.replaceChildren();
      element("div", "ic-at", this.root, at(closest.at));
      for (const { line, i } of found) {
        const row = element("div", line === closest.line ? "ic-row ic-closest" : "ic-row", this.root);
        const swatch = element("span", "ic-swatch", row);
        swatch.style.borderTopColor = colour(line);
        element("span", "ic-name", row, line.label);
        element("b", "", row, line.textAt(i));
      }
      if (others > 0) element("div", "ic-at", this.root, `and ${others} more`);
      this.#show(u, left);
      return closest;
    }

    /** What marks mean that stand at `left`; `at` says where each is. */
    explain(u, marks, left, at) {
      this.root.replaceChildren();
      marks.slice(0, EXPLAINED).forEach((mark) => {
        const part = element("div", `ic-told ic-${mark.kind}`, this.root);
        element("strong", "", part, mark.title);
        element("div", "ic-at", part, at(mark));
        for (const line of mark.text.split("\n")) if (line) element("div", "", part, line);
      });
      const more = marks.length - EXPLAINED;
      if (more > 0) element("div", "ic-at", this.root, `and ${more} more`);
      this.#show(u, left);
    }

    hide() {
      this.root.hidden = true;
    }

    /** Beside a place of the plot, on the side that has room. */
    #show(u, left) {
      const box = u.over;
      this.root.hidden = false;
      const x = box.offsetLeft + left;
      const { offsetWidth } = this.root;
      const right = x + 14 + offsetWidth <= this.plot.clientWidth;
      const wanted = right ? x + 14 : x - 14 - offsetWidth;
      const room = this.plot.clientWidth - offsetWidth;
      this.root.style.left = `${Math.max(0, Math.min(wanted, room))}px`;
      this.root.style.top = `${box.offsetTop + 8}px`;
    }
  }

  Object.assign(Instar, { Tip, element });
})();
