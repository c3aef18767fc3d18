/* The tooltip of a plot: the curves' values under the pointer, or the text of marks. */
(() => {
  "use strict";

  const { nearest } = Instar;
  const MAX_VALUES = 10;
  const MAX_MARKS = 4;

  const element = (tag, className, parent, text) => {
    const node = document.createElement(tag);
    if (className) node.className = className;
    if (text != null) node.textContent = text;
    if (parent) parent.append(node);
    return node;
  };

  class Tip {
    static count = 0;

    constructor(plot) {
      this.plot = plot;
      this.root = element("div", "ic-tip", plot);
      this.root.setAttribute("role", "tooltip");
      this.root.id = `ic-tip-${(Tip.count += 1)}`;
      this.root.hidden = true;
    }

    /** Shows the values of the curves nearest to the pointer. Returns the nearest point, or null. */
    showValues(u, lines, { log, colour, formatX }) {
      const { left, top } = u.cursor;
      const x = u.posToVal(left, "x");
      const points = [];
      for (const line of lines) {
        if (!line.isVisible) continue;
        const i = nearest(line, x);
        if (i < 0) continue;
        const y = line.ys[i];
        if (log && y <= 0) continue;
        points.push({ line, i, x: line.xs[i], y, distance: Math.abs(u.valToPos(y, "y") - top) });
      }
      if (!points.length) return null;
      points.sort((a, b) => a.distance - b.distance);
      const closest = points[0];
      this.root.replaceChildren();
      element("div", "ic-at", this.root, formatX(closest.x));
      for (const { line, i } of points.slice(0, MAX_VALUES).sort((a, b) => b.y - a.y)) {
        const row = element("div", line === closest.line ? "ic-row ic-closest" : "ic-row", this.root);
        const swatch = element("span", "ic-swatch", row);
        swatch.style.borderTopColor = colour(line);
        element("span", "ic-name", row, line.label);
        element("b", "", row, line.textAt(i));
      }
      this.#addRemainder(points.length - MAX_VALUES);
      this.#placeAt(u, left);
      return closest;
    }

    /** Shows the texts of the marks at `left`; `formatPosition(mark)` gives the line below a title. */
    showMarks(u, marks, left, formatPosition) {
      this.root.replaceChildren();
      marks.slice(0, MAX_MARKS).forEach((mark) => {
        const part = element("div", `ic-detail ic-${mark.kind}`, this.root);
        element("strong", "", part, mark.title);
        element("div", "ic-at", part, formatPosition(mark));
        for (const line of mark.text.split("\n")) if (line) element("div", "", part, line);
      });
      this.#addRemainder(marks.length - MAX_MARKS);
      this.#placeAt(u, left);
    }

    hide() {
      this.root.hidden = true;
    }

    #addRemainder(count) {
      if (count > 0) element("div", "ic-at", this.root, `and ${count} more`);
    }

    /** Shows the tooltip beside `left`, on the side that has room. */
    #placeAt(u, left) {
      const box = u.over;
      this.root.hidden = false;
      const x = box.offsetLeft + left;
      const { offsetWidth } = this.root;
      const isRight = x + 14 + offsetWidth <= this.plot.clientWidth;
      const tipLeft = isRight ? x + 14 : x - 14 - offsetWidth;
      const maxLeft = this.plot.clientWidth - offsetWidth;
      this.root.style.left = `${Math.max(0, Math.min(tipLeft, maxLeft))}px`;
      this.root.style.top = `${box.offsetTop + 8}px`;
    }
  }

  Object.assign(Instar, { Tip, element });
})();
