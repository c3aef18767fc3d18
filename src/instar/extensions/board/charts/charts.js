/* A chart of one or several runs, on top of uPlot.

   const chart = new InstarChart(element, {metric: "loss", x: "step", log: false, smooth: 0, marks: true});
   chart.setRuns([chartData, …]);            // see `chart_data` in extensions/board/curves.py
   chart.setGroups([{name, runs: [key, …], of: "seeds"}, …]);    // means instead of runs; null: runs
   chart.setOptions({x: "tokens"});          // any of the options
   chart.append(runId, "loss", {x: {step: 9, …}, value: 3.2});   // numbers or arrays
   chart.appendMark(runId, mark);
   chart.destroy();

   Options: metric (one or several names), x (one of InstarChart.AXES), log (y axis), smooth (weight of the
   moving average, 0 ≤ weight < 1), marks (true, false, or kinds), height (CSS pixels), legend (boolean).

   uPlot provides axes, grid, zoom and cursor. Each run has its own x values, so paint.js draws the curves. */
(() => {
  "use strict";

  const { AXES, BYTES, DURATIONS, Line, Marks, Mean, Tip } = Instar;
  const { axisText, dateTicks, drawEnds, drawLines, element, logTicks, lower, mixColours, shortNames, valueText } = Instar;
  const COLOUR_COUNT = 8;
  /** Number of consecutive runs whose curves have the same dashes. */
  const RUNS_PER_DASH = 4;
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
      this.hiddenKeys = new Set();
      this.focusedLine = null;
      this.root = element("div", "ic", parent);
      this.plot = element("div", "ic-plot", this.root);
      this.legend = element("div", "ic-legend", this.root);
      this.tip = new Tip(this.plot);
      this.colour = (line) => this.#colour(line);
      this.marks = new Marks(this.tip, (button) => this.#showMarks(button), () => {
        this.markButton = null;
        this.#hideTip();
      });
      this.resizeObserver = new ResizeObserver(() => this.fit());
      this.resizeObserver.observe(this.plot);
      this.scheme = matchMedia("(prefers-color-scheme: dark)");
      this.recolour = () => this.#recolour();
      this.scheme.addEventListener("change", this.recolour);
      this.themeObserver = new MutationObserver(this.recolour);
      this.themeObserver.observe(document.documentElement, { attributeFilter: ["data-theme"] });
      this.#build();
    }

    /** Replaces the runs; keeps the zoom if they have the same ids. */
    setRuns(runs) {
      const ids = (list) => list.map((run) => run.id).join("\n");
      if (ids(runs) !== ids(this.runs)) this.isZoomed = false;
      this.runs = runs;
      this.#makeLines();
      this.#requestDraw();
    }

    /** Draws the mean of each group of runs, with a band of one standard deviation; null: the runs. */
    setGroups(groups) {
      if (groups === this.groups) return;
      this.groups = groups;
      this.#makeLines();
      this.#requestDraw();
    }

    setOptions(options) {
      const changes = Object.keys(options).filter(
        (name) => String(options[name]) !== String(this.options[name]),
      );
      if (!changes.length) return;
      this.options = { ...this.options, ...options };
      if (changes.every((name) => name === "smooth" || name === "marks")) {
        if (changes.includes("smooth")) this.#makeLines();
        this.#requestDraw();
      } else this.#build();
    }

    /** Adds points at the end of a curve; drawn with the next frame. */
    append(id, metric, points) {
      const run = this.#run(id);
      if (!run) return;
      const series = (run.series[metric] ||= { x: {}, value: [], superseded: [] });
      const list = (value) => (Array.isArray(value) ? value : [value]);
      const values = list(points.value).map((value) => (Number.isFinite(value) ? value : null));
      // the arrays may be shared: their owner or another chart may already have appended the points
      const { x } = this.options;
      const hasPoints =
        series.value.at(-1) === values.at(-1) &&
        series.x[x]?.at(-1) === list(points.x[x]).at(-1);
      if (!hasPoints) {
        for (const [axis, xs] of Object.entries(points.x)) (series.x[axis] ||= []).push(...list(xs));
        series.value.push(...values);
      }
      if (!this.#metrics().includes(metric)) return;
      const line = this.lines.find((other) => other.runs.includes(run) && other.metric === metric);
      if (line && line.labelCount === line.count) line.update();
      else this.#makeLines();
      this.#requestDraw();
    }

    appendMark(id, mark) {
      const run = this.#run(id);
      if (!run) return;
      if (!run.marks.includes(mark)) run.marks.push(mark);
      this.#requestDraw();
    }

    destroy() {
      this.resizeObserver.disconnect();
      this.themeObserver.disconnect();
      this.scheme.removeEventListener("change", this.recolour);
      cancelAnimationFrame(this.frame);
      cancelAnimationFrame(this.resizeFrame);
      this.u?.destroy();
      this.root.remove();
    }

    #run(id) {
      return this.runs.find((run) => run.id === id);
    }

    /** Name of the x axis; for tokens, the unit that all runs count in. */
    #axisName() {
      const { x } = this.options;
      const units = new Set(this.runs.map((run) => run.unit || "token"));
      return x === "tokens" && units.size === 1 ? `${[...units][0]}s` : AXES[x];
    }

    #metrics() {
      return [this.options.metric].flat();
    }

    #requestDraw() {
      if (this.frame) return;
      this.frame = requestAnimationFrame(() => {
        this.frame = 0;
        const { isZoomed, view, u } = this;
        u.setData(this.#extent(), !isZoomed);
        if (isZoomed) u.setScale("x", { min: view[0], max: view[1] });
      });
    }

    /** The groups with their runs; without groups, each run is a group without a name. */
    #runGroups() {
      if (!this.groups) return this.runs.map((run) => ({ runs: [run] }));
      return this.groups.map((group) => ({ ...group, runs: this.runs.filter((run) => group.runs.includes(run.key)) }));
    }

    #makeLines() {
      const { x, smooth } = this.options;
      const metrics = this.#metrics();
      const groups = this.#runGroups();
      const hasGroups = groups.length > 1;
      this.lines = [];
      this.focusedLine = null;
      groups.forEach(({ name, runs, of }, groupIndex) => {
        metrics.forEach((metric, metricIndex) => {
          if (!runs.some((run) => run.series[metric])) return;
          const line = runs.length > 1 ? new Mean(runs, metric, x, smooth) : new Line(runs[0], metric, x, smooth);
          const index = hasGroups ? groupIndex : metricIndex;
          // many metrics of one run are ordered parts, such as layers: their colours form a ramp
          const share = !hasGroups && metrics.length > COLOUR_COUNT ? metricIndex / (metrics.length - 1) : null;
          line.colour = share ?? index % COLOUR_COUNT;
          line.hasRampColour = share != null;
          line.dash = hasGroups
            ? DASHES[(metrics.length > 1 ? metricIndex : Math.floor(index / RUNS_PER_DASH)) % DASHES.length]
            : [];
          line.labelCount = line.count;
          line.key = name ? `${name} ${metric}` : this.#label(runs[0], metric, hasGroups, metrics.length > 1);
          line.label = name ? this.#groupLabel(name, line, runs.length, of) : line.key;
          line.isVisible = !this.hiddenKeys.has(line.key);
          this.lines.push(line);
        });
      });
      this.#drawLegend();
    }

    #label(run, metric, hasRuns, hasMetrics) {
      const isAmbiguous = this.runs.filter((other) => other.name === run.name).length > 1;
      const name = isAmbiguous && run.id !== run.name ? `${run.name}-${run.id}` : run.name;
      const hasPrefix = this.#metrics().every((other) => other.split("/")[0] === metric.split("/")[0]);
      if (!hasRuns) return hasPrefix && hasMetrics ? metric.slice(metric.indexOf("/") + 1) : metric;
      return hasMetrics ? `${name} ${metric}` : name;
    }

    /** A group's name, how many of its `size` runs have points, and the metric if the chart has several. */
    #groupLabel(name, { metric, count }, size, of) {
      const countText = count < size ? `${count} of ${size}` : size;
      return `${name}${size > 1 ? ` (${countText} ${of})` : ""}${this.#metrics().length > 1 ? ` ${metric}` : ""}`;
    }

    #drawLegend() {
      this.legend.replaceChildren();
      this.legend.hidden = this.groups ? !this.lines.length : !this.options.legend || this.lines.length < 2;
      if (this.legend.hidden) return;
      const labels = shortNames(this.lines.map((line) => line.label), 40);
      for (const [number, line] of this.lines.entries()) {
        const button = element("button", "ic-key", this.legend);
        button.type = "button";
        button.setAttribute("aria-pressed", String(line.isVisible));
        const swatch = element("span", "ic-swatch", button);
        swatch.style.borderTopColor = this.#colour(line);
        swatch.style.borderTopStyle = line.dash.length ? "dashed" : "solid";
        element("span", "", button, labels[number]);
        button.title = line.label;
        button.addEventListener("click", () => {
          line.isVisible = !line.isVisible;
          this.hiddenKeys[line.isVisible ? "delete" : "add"](line.key);
          button.setAttribute("aria-pressed", String(line.isVisible));
          this.#requestDraw();
        });
        const focus = (isOver) => {
          this.focusedLine = isOver && line.isVisible ? line : null;
          this.u?.redraw(false);
        };
        button.addEventListener("pointerenter", () => focus(true));
        button.addEventListener("pointerleave", () => focus(false));
      }
    }

    #visibleLines() {
      return this.lines.filter((line) => line.isVisible);
    }

    #visibleRuns() {
      return new Set(this.#visibleLines().flatMap((line) => line.runs));
    }

    /** uPlot's data: the range of x over all metrics of the runs, so that their charts have the same range. */
    #extent() {
      let low = Infinity;
      let high = -Infinity;
      const { x } = this.options;
      for (const run of this.#visibleRuns()) {
        for (const series of Object.values(run.series)) {
          for (const piece of [series, ...(series.superseded || [])]) {
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
      this.isZoomed = low > start || high < end;
      this.view = [low, high];
      return this.view;
    }

    /** The range of y over the points within the view. */
    #rangeY() {
      const [from, to] = this.view;
      const { log } = this.options;
      let low = Infinity;
      let high = -Infinity;
      for (const [xs, ys] of this.#visibleLines().flatMap((line) => line.extents)) {
        const end = Math.min(xs.length, lower(xs, to) + 1);
        for (let i = Math.max(0, lower(xs, from) - 1); i < end; i++) {
          const y = ys[i];
          if (y == null || (log && y <= 0)) continue;
          if (y < low) low = y;
          if (y > high) high = y;
        }
      }
      if (low > high) return log ? [0.1, 1] : [0, 1];
      if (log) return [low / 1.08, high * 1.08];
      const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
      return [low >= 0 && low < margin ? 0 : low - margin, high + margin];
    }

    #build() {
      this.u?.destroy();
      this.marks.clear();
      this.isZoomed = false;
      this.#readColours();
      this.#makeLines();
      const { x, log, height } = this.options;
      const isDuration = x === "wall_s" || x === "active_s";
      const metric = this.#metrics()[0];
      const isBytes = metric.endsWith("_bytes");
      const axis = { stroke: () => this.colours.text, font: "12px system-ui, sans-serif" };
      const gridLines = { stroke: () => this.colours.grid, width: 1 };
      const options = {
        width: this.plot.clientWidth || 600,
        height,
        padding: [() => 12 + (this.options.marks ? this.marks.height : 0), 14, 0, 0],
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
            // dates have two lines and need no label
            ...(x === "time" ? {} : { label: () => this.#axisName(), labelSize: 18, labelFont: axis.font }),
            size: x === "time" ? 44 : 26,
            space: 70,
            grid: { show: false },
            ticks: { ...gridLines, size: 4 },
            values: (_, splits) => (x === "time" ? dateTicks(splits) : splits.map((v) => (v == null ? "" : axisText(x, v)))),
            ...(isDuration ? { incrs: DURATIONS } : {}),
          },
          {
            ...axis,
            // wide enough for most numbers, so that the plot does not move when they change
            size: (u, values) => 14 + 7 * Math.max(isBytes ? 7 : 6, ...(values || []).map((v) => String(v).length)),
            grid: gridLines,
            ticks: { show: false },
            ...(isBytes ? { incrs: BYTES } : {}),
            ...(log ? { splits: (u, _, low, high) => logTicks(low, high), filter: (_, all) => all } : {}),
            values: (_, splits) => splits.map((v) => (v == null ? "" : valueText(metric, v))),
          },
        ],
        hooks: {
          drawAxes: [() => this.#drawLines()],
          draw: [() => this.#placeMarks()],
          setCursor: [() => this.#showValues()],
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

    /** Adapts to the width at once; otherwise this happens with the next frame. */
    fit() {
      if (this.plot.clientWidth !== this.u?.width) this.#resize();
    }

    #resize() {
      const width = this.plot.clientWidth;
      if (this.u && width) this.u.setSize({ width, height: this.options.height });
    }

    /** Resolves the CSS colours of the current theme, which a canvas does not know. */
    #readColours() {
      const probe = element("i", "", this.root);
      const colour = (name) => {
        probe.style.color = `var(--ic-${name})`;
        return getComputedStyle(probe).color;
      };
      this.colours = { text: colour("text"), grid: colour("grid"), paper: colour("paper"), lines: [] };
      for (let i = 0; i < COLOUR_COUNT; i++) this.colours.lines.push(colour(i));
      this.colours.ramp = ["low", "middle", "high"].map(colour);
      probe.remove();
    }

    #colour(line) {
      const { lines } = this.colours;
      return line.hasRampColour ? mixColours(line.colour, ...this.colours.ramp) : lines[line.colour];
    }

    #recolour() {
      this.#readColours();
      this.#drawLegend();
      this.u?.redraw(false);
    }

    #drawLines() {
      const { view = [0, 1], focusedLine, colour } = this;
      const { log } = this.options;
      drawLines(this.u, this.lines, { view, log, focusedLine, colour });
      const visibleLines = this.#visibleLines();
      if (this.lines.length > 1 && visibleLines.length <= COLOUR_COUNT) {
        const names = shortNames(this.lines.map((line) => line.label), 20);
        const texts = visibleLines.map((line) => names[this.lines.indexOf(line)]);
        drawEnds(this.u, visibleLines, texts, { view, log, colour, paper: this.colours.paper });
      }
    }

    #placeMarks() {
      const { marks: kinds, x } = this.options;
      const marks = kinds ? Marks.of(this.#visibleRuns(), kinds, x) : [];
      const hasRuns = this.lines.some((line) => line.runs[0] !== this.lines[0].runs[0]);
      const colour = (run) => (hasRuns ? this.#colour(this.lines.find((line) => line.runs.includes(run))) : "");
      // not at once: the plot is being drawn
      if (this.marks.place(this.u, marks, x, colour)) this.resizeFrame = requestAnimationFrame(() => this.#resize());
    }

    #showMarks(button) {
      this.markButton = button;
      this.dot.hidden = true;
      const { x } = this.options;
      const formatPosition = (mark) => {
        const parts = [`step ${axisText("step", mark.x.step, true)}`];
        if (x !== "step") parts.push(`${this.#axisName()} ${axisText(x, mark.x[x], true)}`);
        if (this.runs.length > 1) parts.unshift(this.#label(mark.run, "", true, false));
        if (mark.superseded) parts.push("superseded");
        return parts.join(" · ");
      };
      this.tip.showMarks(this.u, button.marks, this.u.valToPos(button.marks[0].x[x], "x"), formatPosition);
    }

    /** Shows the values under the cursor. */
    #showValues() {
      if (this.markButton) return;
      const { u, colour } = this;
      const { x, log } = this.options;
      const { left } = u.cursor;
      const formatX = (value) => `${this.#axisName()} ${axisText(x, value, true)}`;
      const isInside = left != null && left >= 0;
      const closest = isInside ? this.tip.showValues(u, this.lines, { log, colour, formatX }) : null;
      if (!closest) {
        this.#hideTip();
        return;
      }
      this.dot.hidden = false;
      this.dot.style.backgroundColor = colour(closest.line);
      const [dotX, dotY] = [u.valToPos(closest.x, "x"), u.valToPos(closest.y, "y")];
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
