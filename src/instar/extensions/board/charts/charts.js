/* One chart of one or several runs, drawn over uPlot.

   const chart = new InstarChart(element, {metric: "loss", x: "step", log: false, smooth: 0, marks: true});
   chart.setRuns([chartData, …]);            // as `chart_data` of extensions/board/curves.py makes them
   chart.setGroups([{name, runs: [key, …], of: "seeds"}, …]);    // means in place of runs; null: runs
   chart.setOptions({x: "tokens"});          // any of the options
   chart.append(runId, "loss", {x: {step: 9, …}, value: 3.2});   // numbers, or arrays of them
   chart.appendMark(runId, mark);
   chart.destroy();

   Options: metric (a name or several), x (one of InstarChart.AXES), log (y), smooth (weight of the
   moving average, 0 to below 1), marks (true, false, or kinds), height (CSS pixels), legend (bool).

   uPlot gives axes, grid, zoom and cursor. Runs have x values of their own, so the curves are drawn
   over them by paint.js. */
(() => {
  "use strict";

  const { AXES, BYTES, DURATIONS, Line, Marks, Mean, Tip } = Instar;
  const { axisText, dateTicks, drawEnds, drawLines, element, logTicks, lower, mixed, shortNames, valueText } = Instar;
  const COLOURS = 8;
  /** Of so many runs in a row the curves have the same dashes. */
  const ALIKE = 4;
  const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];

  class InstarChart {
    constructor(parent, options = {}) {
      this.options = {
        metric: "loss", x: "step", log: false, smooth: 0, marks: true, height: 280, legend: true,
        ...options,
      };
      this.runs = [];
      this.groups = null;
      this.lines = [];
      this.hidden = new Set();
      this.focused = null;
      this.root = element("div", "ic", parent);
      this.plot = element("div", "ic-plot", this.root);
      this.legend = element("div", "ic-legend", this.root);
      this.tip = new Tip(this.plot);
      this.colour = (line) => this.#colour(line);
      this.marks = new Marks(this.tip, (button) => this.#explain(button), () => {
        this.explaining = null;
        this.#hideTip();
      });
      this.resized = new ResizeObserver(() => this.fit());
      this.resized.observe(this.plot);
      this.scheme = matchMedia("(prefers-color-scheme: dark)");
      this.recolour = () => this.#recolour();
      this.scheme.addEventListener("change", this.recolour);
      this.themed = new MutationObserver(this.recolour);
      this.themed.observe(document.documentElement, { attributeFilter: ["data-theme"] });
      this.#build();
    }

    /** Draws these runs in place of those before; of the same ones, without losing the zoom. */
    setRuns(runs) {
      const ids = (list) => list.map((run) => run.id).join("\n");
      if (ids(runs) !== ids(this.runs)) this.zoomed = false;
      this.runs = runs;
      this.#makeLines();
      this.#soon();
    }

    /** Draws the mean of each of these groups of runs, with a band of a standard deviation. */
    setGroups(groups) {
      if (groups === this.groups) return;
      this.groups = groups;
      this.#makeLines();
      this.#soon();
    }

    setOptions(changes) {
      const changed = Object.keys(changes).filter(
        (name) => String(changes[name]) !== String(this.options[name]),
      );
      if (!changed.length) return;
      this.options = { ...this.options, ...changes };
      if (changed.every((name) => name === "smooth" || name === "marks")) {
        if (changed.includes("smooth")) this.#makeLines();
        this.#soon();
      } else this.#build();
    }

    /** Adds points at the end of a curve; drawn with the next frame. */
    append(id, metric, points) {
      const run = this.runs.find((each) => each.id === id);
      if (!run) return;
      const found = (run.series[metric] ||= { x: {}, value: [], superseded: [] });
      const list = (value) => (Array.isArray(value) ? value : [value]);
      const values = list(points.value).map((value) => (Number.isFinite(value) ? value : null));
      // the data may be shared: what their owner or another chart has appended is there already
      const key = this.options.x;
      const there =
        found.value.at(-1) === values.at(-1) &&
        found.x[key]?.at(-1) === list(points.x[key]).at(-1);
      if (!there) {
        for (const [axis, x] of Object.entries(points.x)) (found.x[axis] ||= []).push(...list(x));
        found.value.push(...values);
      }
      if (!this.#metrics().includes(metric)) return;
      const line = this.lines.find((each) => each.runs.includes(run) && each.metric === metric);
      if (line && line.counted === line.count) line.grown();
      else this.#makeLines();
      this.#soon();
    }

    appendMark(id, mark) {
      const run = this.runs.find((each) => each.id === id);
      if (!run) return;
      if (!run.marks.includes(mark)) run.marks.push(mark);
      this.#soon();
    }

    destroy() {
      this.resized.disconnect();
      this.themed.disconnect();
      this.scheme.removeEventListener("change", this.recolour);
      cancelAnimationFrame(this.frame);
      cancelAnimationFrame(this.sizing);
      this.u?.destroy();
      this.root.remove();
    }

    /** What x is; tokens by what these runs count. */
    #axisName() {
      const { x } = this.options;
      const units = new Set(this.runs.map((run) => run.unit || "token"));
      return x === "tokens" && units.size === 1 ? `${[...units][0]}s` : AXES[x];
    }

    #metrics() {
      return [this.options.metric].flat();
    }

    #soon() {
      if (this.frame) return;
      this.frame = requestAnimationFrame(() => {
        this.frame = 0;
        const { zoomed, view, u } = this;
        u.setData(this.#extent(), !zoomed);
        if (zoomed) u.setScale("x", { min: view[0], max: view[1] });
      });
    }

    /** The runs by themselves, or those of each group. */
    #strands() {
      if (!this.groups) return this.runs.map((run) => ({ runs: [run] }));
      return this.groups.map((group) => ({ ...group, runs: this.runs.filter((run) => group.runs.includes(run.key)) }));
    }

    #makeLines() {
      const { x, smooth } = this.options;
      const metrics = this.#metrics();
      const strands = this.#strands();
      const several = strands.length > 1;
      this.lines = [];
      this.focused = null;
      strands.forEach(({ name, runs, of }, place) => {
        metrics.forEach((metric, number) => {
          if (!runs.some((run) => run.series[metric])) return;
          const line = runs.length > 1 ? new Mean(runs, metric, x, smooth) : new Line(runs[0], metric, x, smooth);
          const order = several ? place : number;
          // many parts of one run are in an order, such as layers: so are their colours
          const share = !several && metrics.length > COLOURS ? number / (metrics.length - 1) : null;
          line.colour = share ?? order % COLOURS;
          line.ramp = share != null;
          line.dash = several
            ? DASHES[(metrics.length > 1 ? number : Math.floor(order / ALIKE)) % DASHES.length]
            : [];
          line.counted = line.count;
          line.key = name ? `${name} ${metric}` : this.#label(runs[0], metric, several, metrics.length > 1);
          line.label = name ? this.#groupLabel(name, line, runs.length, of) : line.key;
          line.shown = !this.hidden.has(line.key);
          this.lines.push(line);
        });
      });
      this.#drawLegend();
    }

    #label(run, metric, several, many) {
      const same = this.runs.filter((each) => each.name === run.name).length > 1;
      const name = same && run.id !== run.name ? `${run.name}-${run.id}` : run.name;
      const group = this.#metrics().every((each) => each.split("/")[0] === metric.split("/")[0]);
      if (!several) return group && many ? metric.slice(metric.indexOf("/") + 1) : metric;
      return many ? `${name} ${metric}` : name;
    }

    /** A group's name, of how many seeds there are points, and the metric if there are several. */
    #groupLabel(name, { metric, count }, size, of) {
      const counted = count < size ? `${count} of ${size}` : size;
      return `${name}${size > 1 ? ` (${counted} ${of})` : ""}${this.#metrics().length > 1 ? ` ${metric}` : ""}`;
    }

    #drawLegend() {
      this.legend.replaceChildren();
      this.legend.hidden = this.groups ? !this.lines.length : !this.options.legend || this.lines.length < 2;
      if (this.legend.hidden) return;
      const labels = shortNames(this.lines.map((line) => line.label), 40);
      for (const [number, line] of this.lines.entries()) {
        const button = element("button", "ic-key", this.legend);
        button.type = "button";
        button.setAttribute("aria-pressed", String(line.shown));
        const swatch = element("span", "ic-swatch", button);
        swatch.style.borderTopColor = this.#colour(line);
        swatch.style.borderTopStyle = line.dash.length ? "dashed" : "solid";
        element("span", "", button, labels[number]);
        button.title = line.label;
        button.addEventListener("click", () => {
          line.shown = !line.shown;
          this.hidden[line.shown ? "delete" : "add"](line.key);
          button.setAttribute("aria-pressed", String(line.shown));
          this.#soon();
        });
        const focus = (on) => {
          this.focused = on && line.shown ? line : null;
          this.u?.redraw(false);
        };
        button.addEventListener("pointerenter", () => focus(true));
        button.addEventListener("pointerleave", () => focus(false));
      }
    }

    #shownRuns() {
      return new Set(this.lines.filter((line) => line.shown).flatMap((line) => line.runs));
    }

    /** uPlot's data: where x begins and ends, the same in the charts of all metrics of a run. */
    #extent() {
      let low = Infinity;
      let high = -Infinity;
      const { x } = this.options;
      for (const run of this.#shownRuns()) {
        for (const found of Object.values(run.series)) {
          for (const piece of [found, ...(found.superseded || [])]) {
            const xs = piece.x[x];
            if (!xs?.length) continue;
            low = Math.min(low, xs[0]);
            high = Math.max(high, xs[xs.length - 1]);
          }
        }
      }
      if (low === high) [low, high] = [low - 1, high + 1];
      return low < high ? [[low, high], [null, null]] : [[0, 1], [null, null]];
    }

    #rangeX(u, low, high) {
      const [start, end] = u.data[0];
      this.zoomed = low > start || high < end;
      this.view = [low, high];
      return this.view;
    }

    /** What is between the sides of the view decides how high it is. */
    #rangeY() {
      const [from, to] = this.view;
      const { log } = this.options;
      let low = Infinity;
      let high = -Infinity;
      const see = (xs, ys) => {
        const last = Math.min(xs.length, lower(xs, to) + 1);
        for (let i = Math.max(0, lower(xs, from) - 1); i < last; i++) {
          const y = ys[i];
          if (y == null || (log && y <= 0)) continue;
          if (y < low) low = y;
          if (y > high) high = y;
        }
      };
      for (const line of this.lines) {
        if (!line.shown) continue;
        for (const [xs, ys] of line.extents) see(xs, ys);
      }
      if (low > high) return log ? [0.1, 1] : [0, 1];
      if (log) return [low / 1.08, high * 1.08];
      const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
      return [low >= 0 && low < room ? 0 : low - room, high + room];
    }

    #build() {
      this.u?.destroy();
      this.marks.clear();
      this.zoomed = false;
      this.#readColours();
      this.#makeLines();
      const { x, log, height } = this.options;
      const clocked = x === "wall_s" || x === "active_s";
      const metric = this.#metrics()[0];
      const axis = { stroke: () => this.colours.text, font: "12px system-ui, sans-serif" };
      const lines = { stroke: () => this.colours.grid, width: 1 };
      const options = {
        width: this.plot.clientWidth || 600,
        height,
        padding: [() => 12 + (this.options.marks ? this.marks.above : 0), 14, 0, 0],
        legend: { show: false },
        cursor: { y: false, drag: { x: true, y: false }, points: { show: false } },
        scales: {
          x: { time: x === "time", range: (u, low, high) => this.#rangeX(u, low, high) },
          y: { distr: log ? 3 : 1, range: () => this.#rangeY() },
        },
        series: [{}, { paths: () => null, points: { show: false } }],
        axes: [
          {
            ...axis,
            // dates have two lines, and speak for themselves
            ...(x === "time" ? {} : { label: () => this.#axisName(), labelSize: 18, labelFont: axis.font }),
            size: x === "time" ? 44 : 26,
            space: 70,
            grid: { show: false },
            ticks: { ...lines, size: 4 },
            values: (_, splits) => (x === "time" ? dateTicks(splits) : splits.map((v) => (v == null ? "" : axisText(x, v)))),
            ...(clocked ? { incrs: DURATIONS } : {}),
          },
          {
            ...axis,
            // room for most numbers from the start, so that the plot stays where it is
            size: (u, values) => 14 + 7 * Math.max(metric.endsWith("_bytes") ? 7 : 6, ...(values || []).map((v) => String(v).length)),
            grid: lines,
            ticks: { show: false },
            ...(metric.endsWith("_bytes") ? { incrs: BYTES } : {}),
            ...(log ? { splits: (u, _, low, high) => logTicks(low, high), filter: (_, all) => all } : {}),
            values: (_, splits) => splits.map((v) => (v == null ? "" : valueText(metric, v))),
          },
        ],
        hooks: {
          drawAxes: [() => this.#drawLines()],
          draw: [() => this.#placeMarks()],
          setCursor: [() => this.#read()],
        },
      };
      this.u = new uPlot(options, this.#extent(), this.plot);
      this.u.root.setAttribute("role", "group");
      this.u.ctx.canvas.setAttribute("role", "img");
      this.u.ctx.canvas.setAttribute("aria-label", `${this.#metrics().join(", ")} over ${this.#axisName()}`);
      this.dot = element("div", "ic-dot", this.u.over);
      this.dot.hidden = true;
      this.u.over.addEventListener("pointerleave", () => this.#hideTip());
    }

    /** Takes the width that there is now: it does so by itself, but with the next frame. */
    fit() {
      if (this.plot.clientWidth !== this.u?.width) this.#resize();
    }

    #resize() {
      const width = this.plot.clientWidth;
      if (this.u && width) this.u.setSize({ width, height: this.options.height });
    }

    /** The canvas needs colours as they are, light or dark. */
    #readColours() {
      const probe = element("i", "", this.root);
      const colour = (name) => {
        probe.style.color = `var(--ic-${name})`;
        return getComputedStyle(probe).color;
      };
      this.colours = { text: colour("text"), grid: colour("grid"), paper: colour("paper"), lines: [] };
      for (let i = 0; i < COLOURS; i++) this.colours.lines.push(colour(i));
      this.colours.ramp = ["low", "middle", "high"].map(colour);
      probe.remove();
    }

    #colour(line) {
      const { lines } = this.colours;
      return line.ramp ? mixed(line.colour, ...this.colours.ramp) : lines[line.colour];
    }

    #recolour() {
      this.#readColours();
      this.#drawLegend();
      this.u?.redraw(false);
    }

    #drawLines() {
      const { view = [0, 1], focused, colour } = this;
      drawLines(this.u, this.lines, { view, log: this.options.log, focused, colour });
      const ends = this.lines.filter((line) => line.shown);
      if (this.lines.length > 1 && ends.length <= COLOURS) {
        const names = shortNames(this.lines.map((line) => line.label), 20);
        const texts = ends.map((line) => names[this.lines.indexOf(line)]);
        drawEnds(this.u, ends, texts, { view, log: this.options.log, colour, paper: this.colours.paper });
      }
    }

    #placeMarks() {
      const { marks, x } = this.options;
      const found = marks ? Marks.of(this.#shownRuns(), marks, x) : [];
      const several = this.lines.some((line) => line.runs[0] !== this.lines[0].runs[0]);
      const colour = (run) => (several ? this.#colour(this.lines.find((line) => line.runs.includes(run))) : "");
      // the plot makes room for the names with the next frame: it is being drawn
      if (this.marks.place(this.u, found, x, colour)) this.sizing = requestAnimationFrame(() => this.#resize());
    }

    #explain(button) {
      this.explaining = button;
      this.dot.hidden = true;
      const { x } = this.options;
      const at = (mark) => {
        const words = [`step ${axisText("step", mark.x.step, true)}`];
        if (x !== "step") words.push(`${this.#axisName()} ${axisText(x, mark.x[x], true)}`);
        if (this.runs.length > 1) words.unshift(this.#label(mark.run, "", true, false));
        if (mark.superseded) words.push("superseded");
        return words.join(" · ");
      };
      this.tip.explain(this.u, button.marks, this.u.valToPos(button.marks[0].x[x], "x"), at);
    }

    /** The values under the cursor. */
    #read() {
      if (this.explaining) return;
      const { u, colour } = this;
      const { x, log } = this.options;
      const { left } = u.cursor;
      const at = (place) => `${this.#axisName()} ${axisText(x, place, true)}`;
      const inside = left != null && left >= 0;
      const closest = inside ? this.tip.read(u, this.lines, { log, colour, at }) : null;
      if (!closest) {
        this.#hideTip();
        return;
      }
      this.dot.hidden = false;
      this.dot.style.backgroundColor = colour(closest.line);
      const [dotX, dotY] = [u.valToPos(closest.at, "x"), u.valToPos(closest.y, "y")];
      this.dot.style.transform = `translate(${dotX - 4}px, ${dotY - 4}px)`;
    }

    #hideTip() {
      this.tip.hide();
      this.dot.hidden = true;
    }
  }

  InstarChart.AXES = AXES;
  InstarChart.axisText = axisText;
  InstarChart.valueText = valueText;
  InstarChart.shortNames = shortNames;
  window.InstarChart = InstarChart;
})();
