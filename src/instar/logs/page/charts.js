/* One chart of one or several runs, drawn over uPlot.

   const chart = new InstarChart(element, {metric: "loss", x: "step", log: false, smooth: 0, marks: true});
   chart.setRuns([chartData, …]);            // as `chart_data` of logs/reporting/chartdata.py makes them
   chart.setOptions({x: "tokens"});          // any of the options
   chart.append(runId, "loss", {x: {step: 9, …}, value: 3.2});   // numbers, or arrays of them
   chart.appendMark(runId, mark);
   chart.destroy();

   Options: metric (a name or several), x (one of InstarChart.AXES), log (y), smooth (weight of the
   moving average, 0 to below 1), marks (true, false, or kinds), height (CSS pixels), legend (bool).

   uPlot gives axes, grid, zoom and cursor. Runs have x values of their own, so the curves are drawn
   by the chart itself, at most a few points to a pixel; nothing is joined or copied on the way. */
(() => {
  "use strict";

  const AXES = {
    step: "step",
    samples: "samples",
    tokens: "tokens",
    epoch: "epoch",
    flops: "training FLOPs",
    wall_s: "wall time",
    active_s: "active time",
    time: "date",
  };
  const COLOURS = 8;
  const DASHES = [[], [7, 4], [2, 3], [10, 3, 2, 3]];
  const READ_OUT = 10;
  const EXPLAINED = 4;
  const NEAR_PX = 7;
  const CROWD = 40;
  const DURATIONS = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600,
    900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000, 2592000,
  ];
  const BYTES = Array.from({ length: 50 }, (_, power) => 2 ** power);
  const RANK = { failed: 0, alert: 1, operation: 2, resume: 3, stop: 4, checkpoint: 5 };

  /* ---- numbers as text ---- */

  const trimmed = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

  function scaled(value, base, units, figures) {
    let size = Math.abs(value);
    let unit = 0;
    while (size >= base * 0.9995 && unit < units.length - 1) {
      size /= base;
      unit += 1;
    }
    const digits = size >= 100 ? 0 : size >= 10 ? 1 : 2;
    const shown = trimmed(size.toFixed(Math.min(digits, figures)));
    return (value < 0 ? "−" : "") + shown + units[unit];
  }

  const exponential = (value, digits) =>
    value.toExponential(digits).replace(/\.?0*e\+?/, "e");

  const si = (value) => {
    if (value !== 0 && Math.abs(value) < 0.01) return exponential(value, 1);
    if (Math.abs(value) < 10 && !Number.isInteger(value)) return trimmed(value.toPrecision(3));
    return scaled(value, 1000, ["", "k", "M", "B", "T", "P", "E"], 2);
  };

  const bytes = (value) => scaled(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"], 2);

  function duration(seconds) {
    if (seconds < 60) return `${trimmed(seconds.toFixed(seconds < 1 ? 3 : 1))} s`;
    const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
    const first = parts.findIndex(([length]) => seconds >= length);
    const [length, unit] = parts[first];
    const whole = Math.floor(seconds / length);
    const rest = parts[first + 1] && Math.floor((seconds - whole * length) / parts[first + 1][0]);
    return `${whole} ${unit}${rest ? ` ${rest} ${parts[first + 1][1]}` : ""}`;
  }

  const flops = (value) => (value < 1e6 ? si(value) : exponential(value, 2));

  const axisText = (axis, value, exact) => {
    if (axis === "wall_s" || axis === "active_s") return duration(value);
    if (axis === "time") return new Date(value * 1000).toLocaleString();
    if (axis === "flops") return flops(value);
    if (axis === "epoch") return trimmed(value.toPrecision(4));
    return exact ? Math.round(value).toLocaleString("en") : si(value);
  };

  const valueText = (metric, value, exact) => {
    if (value == null) return "–";
    if (metric.endsWith("_bytes")) return bytes(value);
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e9)) return exponential(value, 2);
    if (size >= 1e4) return si(value);
    return exact ? value.toPrecision(4) : trimmed(value.toPrecision(4));
  };

  /** Places for a logarithmic axis: whole decades, or more of them where these are too few. */
  function logTicks(low, high) {
    const decades = Math.log10(high / low);
    const parts = decades > 4 ? [1] : decades > 1.5 ? [1, 2, 5] : [1, 2, 3, 4, 5, 6, 7, 8, 9];
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const part of parts) {
        const tick = Number(`${part}e${power}`);
        if (tick >= low && tick <= high) found.push(tick);
      }
    }
    if (found.length > 2) return found.length > 12 ? found.filter((_, i) => i % 2 === 0) : found;
    const step = 10 ** Math.floor(Math.log10((high - low) / 2));
    const steps = Math.floor(high / step) - Math.ceil(low / step);
    const wide = steps > 8 ? step * 5 : steps > 4 ? step * 2 : step;
    const even = [];
    for (let i = Math.ceil(low / wide); i * wide <= high; i++) even.push(Number((i * wide).toPrecision(12)));
    return even;
  }

  /* ---- one curve ---- */

  /** A metric of a run over one axis, with its moving average: freed of its bias towards 0. */
  class Line {
    constructor(run, metric, axis, weight) {
      this.run = run;
      this.metric = metric;
      this.axis = axis;
      this.weight = weight;
      this.shown = true;
      this.restart();
    }

    restart() {
      const found = this.run.series[this.metric];
      this.xs = found.x[this.axis] || [];
      this.raw = found.value;
      this.lost = (found.superseded || []).map((piece) => [piece.x[this.axis] || [], piece.value]);
      this.sum = 0;
      this.bias = 0;
      this.smooth = [];
      this.grown();
    }

    /** Takes in what was appended to the run's arrays. */
    grown() {
      if (!this.weight) return;
      for (let i = this.smooth.length; i < this.raw.length; i++) {
        const value = this.raw[i];
        if (value == null) {
          this.smooth.push(null);
          continue;
        }
        this.sum = this.weight * this.sum + (1 - this.weight) * value;
        this.bias = this.weight * this.bias + (1 - this.weight);
        this.smooth.push(this.sum / this.bias);
      }
    }

    get ys() {
      return this.weight ? this.smooth : this.raw;
    }
  }

  /** A colour between three of the form #rrggbb; `share`: 0 is the first, 1 the last. */
  function mixed(share, ...stops) {
    const at = share * 2;
    const [from, to] = at < 1 ? stops : stops.slice(1);
    const part = (colour, i) => parseInt(colour.slice(1 + 2 * i, 3 + 2 * i), 16);
    const parts = [0, 1, 2].map((i) => part(from, i) + (at - (at < 1 ? 0 : 1)) * (part(to, i) - part(from, i)));
    return `rgb(${parts.map(Math.round).join(", ")})`;
  }

  /** The first place in ascending `xs` that is not below `x`. */
  function lower(xs, x) {
    let low = 0;
    let high = xs.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (xs[middle] < x) low = middle + 1;
      else high = middle;
    }
    return low;
  }

  function nearest(xs, ys, x) {
    const at = lower(xs, x);
    let best = -1;
    for (const i of [at - 1, at]) {
      if (ys[i] != null && (best < 0 || Math.abs(xs[i] - x) < Math.abs(xs[best] - x))) best = i;
    }
    return best;
  }

  /** Traces a curve; of the points on one pixel column the first, lowest, highest and last. */
  function trace(ctx, u, xs, ys, from, to, log) {
    const toX = projector(u, "x");
    const toY = projector(u, "y");
    let column = NaN;
    let low = 0;
    let high = 0;
    let last = 0;
    let open = false;
    const alone = [];
    let length = 0;
    const flush = () => {
      if (low !== high) {
        ctx.lineTo(column, low);
        ctx.lineTo(column, high);
        ctx.lineTo(column, last);
      }
    };
    for (let i = from; i < to; i++) {
      const value = ys[i];
      if (value == null || (log && value <= 0)) {
        if (open) flush();
        if (length === 1) alone.push(i - 1);
        open = false;
        length = 0;
        continue;
      }
      const x = Math.round(toX(xs[i]));
      const y = toY(value);
      length += 1;
      if (open && x === column) {
        low = Math.min(low, y);
        high = Math.max(high, y);
        last = y;
        continue;
      }
      if (open) {
        flush();
        ctx.lineTo(x, y);
      } else ctx.moveTo(x, y);
      column = x;
      low = high = last = y;
      open = true;
    }
    if (open) flush();
    if (length === 1) alone.push(to - 1);
    return alone;
  }

  /** `valToPos` in canvas pixels with everything that does not change taken out of the loop. */
  function projector(u, key) {
    const { min, max, distr } = u.scales[key];
    const { left, top, width, height } = u.bbox;
    const f = distr === 3 ? Math.log10 : (value) => value;
    const low = f(min);
    const span = f(max) - low || 1;
    return key === "x"
      ? (value) => left + (width * (f(value) - low)) / span
      : (value) => top + height * (1 - (f(value) - low) / span);
  }

  const element = (tag, name, parent, text) => {
    const made = document.createElement(tag);
    if (name) made.className = name;
    if (text != null) made.textContent = text;
    if (parent) parent.append(made);
    return made;
  };

  /* ---- the chart ---- */

  class InstarChart {
    constructor(parent, options = {}) {
      this.options = {
        metric: "loss", x: "step", log: false, smooth: 0, marks: true, height: 280, legend: true,
        ...options,
      };
      this.runs = [];
      this.lines = [];
      this.hidden = new Set();
      this.focused = null;
      this.markElements = new Map();
      this.root = element("div", "ic", parent);
      this.plot = element("div", "ic-plot", this.root);
      this.legend = element("div", "ic-legend", this.root);
      this.tip = element("div", "ic-tip", this.plot);
      this.tip.setAttribute("role", "tooltip");
      this.tip.id = `ic-tip-${(InstarChart.made = (InstarChart.made || 0) + 1)}`;
      this.tip.hidden = true;
      this.resized = new ResizeObserver(() => this.#resize());
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
      const line = this.lines.find((each) => each.run === run && each.metric === metric);
      if (line) line.grown();
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

    #makeLines() {
      const { x, smooth } = this.options;
      const metrics = this.#metrics();
      const several = this.runs.length > 1;
      this.lines = [];
      this.runs.forEach((run, place) => {
        metrics.forEach((metric, number) => {
          if (!run.series[metric]) return;
          const line = new Line(run, metric, x, smooth);
          const order = several ? place : number;
          // many parts of one run are in an order, such as layers: so are their colours
          const share = !several && metrics.length > COLOURS ? number / (metrics.length - 1) : null;
          line.colour = share ?? order % COLOURS;
          line.ramp = share != null;
          line.dash = several
            ? DASHES[(metrics.length > 1 ? number : Math.floor(order / COLOURS)) % DASHES.length]
            : [];
          line.label = this.#label(run, metric, several, metrics.length > 1);
          line.shown = !this.hidden.has(line.label);
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

    #drawLegend() {
      this.legend.replaceChildren();
      this.legend.hidden = !this.options.legend || this.lines.length < 2;
      if (this.legend.hidden) return;
      for (const line of this.lines) {
        const button = element("button", "ic-key", this.legend);
        button.type = "button";
        button.setAttribute("aria-pressed", String(line.shown));
        const swatch = element("span", "ic-swatch", button);
        swatch.style.borderTopColor = this.#colour(line);
        swatch.style.borderTopStyle = line.dash.length ? "dashed" : "solid";
        element("span", "", button, line.label);
        button.addEventListener("click", () => {
          line.shown = !line.shown;
          this.hidden[line.shown ? "delete" : "add"](line.label);
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
      return new Set(this.lines.filter((line) => line.shown).map((line) => line.run));
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
        see(line.xs, line.raw);
        for (const [xs, ys] of line.lost) see(xs, ys);
      }
      if (low > high) return log ? [0.1, 1] : [0, 1];
      if (log) return [low / 1.08, high * 1.08];
      const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
      return [low >= 0 && low < room ? 0 : low - room, high + room];
    }

    #build() {
      this.u?.destroy();
      this.markElements.clear();
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
        padding: [12, 14, 0, 0],
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
            ...(x === "time"
              ? {}
              : { values: (_, splits) => splits.map((v) => (v == null ? "" : axisText(x, v))) }),
            ...(clocked ? { incrs: DURATIONS } : {}),
          },
          {
            ...axis,
            size: (u, values) => 14 + 7 * Math.max(x === "time" ? 5 : 2, ...(values || []).map((v) => String(v).length)),
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

    #resize() {
      const width = this.plot.clientWidth;
      if (this.u && width && width !== this.u.width) {
        this.u.setSize({ width, height: this.options.height });
      }
    }

    #readColours() {
      const style = getComputedStyle(this.root);
      const colour = (name) => style.getPropertyValue(`--ic-${name}`).trim();
      this.colours = { text: colour("text"), grid: colour("grid"), lines: [] };
      for (let i = 0; i < COLOURS; i++) this.colours.lines.push(colour(i));
    }

    #colour(line) {
      const { lines } = this.colours;
      return line.ramp ? mixed(line.colour, lines[6], lines[3], lines[4]) : lines[line.colour];
    }

    #recolour() {
      this.#readColours();
      this.#drawLegend();
      this.u?.redraw(false);
    }

    #drawLines() {
      const { u } = this;
      const { ctx, bbox } = u;
      const [from, to] = this.view || [0, 1];
      const ratio = devicePixelRatio;
      ctx.save();
      ctx.beginPath();
      const edge = 3 * ratio;
      ctx.rect(bbox.left - edge, bbox.top - edge, bbox.width + 2 * edge, bbox.height + 2 * edge);
      ctx.clip();
      ctx.lineJoin = "round";
      const thin = this.lines.length > 20 ? 1 : 1.6;
      const draw = (xs, ys, width, alpha, dash, dots) => {
        const first = Math.max(0, lower(xs, from) - 1);
        const end = Math.min(xs.length, lower(xs, to) + 2);
        ctx.globalAlpha = alpha;
        ctx.lineWidth = width * ratio;
        ctx.setLineDash(dash.map((length) => length * ratio));
        ctx.beginPath();
        const alone = trace(ctx, u, xs, ys, first, end, this.options.log);
        ctx.stroke();
        const sparse = dots && end - first < bbox.width / ratio / 12;
        this.#drawDots(xs, ys, sparse ? null : alone, first, end, 2.4 * ratio);
      };
      for (const line of this.lines) {
        if (!line.shown || line === this.focused) continue;
        this.#drawLine(line, draw, thin, this.focused ? 0.25 : 1);
      }
      if (this.focused) this.#drawLine(this.focused, draw, thin + 0.8, 1);
      ctx.restore();
    }

    #drawLine(line, draw, width, alpha) {
      const { ctx } = this.u;
      ctx.strokeStyle = ctx.fillStyle = this.#colour(line);
      for (const [xs, ys] of line.lost) draw(xs, ys, 1.2, 0.45 * alpha, [3, 3], false);
      if (line.weight) draw(line.xs, line.raw, 1, 0.28 * alpha, [], false);
      draw(line.xs, line.ys, width, alpha, line.dash, !line.weight);
    }

    /** Dots on some places of a curve, or on all of it. */
    #drawDots(xs, ys, places, first, end, radius) {
      const { ctx } = this.u;
      const toX = projector(this.u, "x");
      const toY = projector(this.u, "y");
      const dot = (i) => {
        if (ys[i] == null || (this.options.log && ys[i] <= 0)) return;
        ctx.beginPath();
        ctx.arc(toX(xs[i]), toY(ys[i]), radius, 0, 2 * Math.PI);
        ctx.fill();
      };
      ctx.setLineDash([]);
      if (places) places.forEach(dot);
      else for (let i = first; i < end; i++) dot(i);
    }

    /* ---- marks ---- */

    #marks() {
      const { marks, x } = this.options;
      if (!marks) return [];
      const wanted = (kind) => marks === true || marks.includes(kind);
      const shown = this.#shownRuns();
      const found = [];
      this.runs.forEach((run, place) => {
        if (!shown.has(run)) return;
        for (const mark of run.marks || []) {
          if (wanted(mark.kind) && mark.x[x] != null) found.push({ ...mark, run, place });
        }
      });
      return found.sort((a, b) => RANK[a.kind] - RANK[b.kind] || a.x[x] - b.x[x]);
    }

    /** Buttons over the plot; marks that are less than a few pixels apart share one. */
    #placeMarks() {
      const { u } = this;
      const width = u.bbox.width / devicePixelRatio;
      const groups = new Map();
      const marks = this.#marks();
      const crowded = marks.filter((mark) => mark.kind !== "checkpoint").length > CROWD;
      u.over.classList.toggle("ic-crowded", crowded);
      const apart = crowded ? 10 : 4;
      for (const mark of marks) {
        const left = u.valToPos(mark.x[this.options.x], "x");
        if (left < -1 || left > width + 1) continue;
        const low = mark.kind === "checkpoint";
        const key = `${low ? "low" : "high"} ${Math.round(left / apart)}`;
        if (!groups.has(key)) groups.set(key, { left, low, marks: [] });
        groups.get(key).marks.push(mark);
      }
      const before = new Set(this.markElements.keys());
      for (const group of groups.values()) {
        const first = group.marks[0];
        const id = `${first.run.id} ${first.kind} ${first.x.step} ${first.superseded}`;
        before.delete(id);
        let button = this.markElements.get(id);
        if (!button) {
          button = this.#makeMark();
          this.markElements.set(id, button);
        }
        button.marks = group.marks;
        const old = group.marks.every((mark) => mark.superseded) ? " ic-superseded" : "";
        button.className = `ic-mark ic-${first.kind}${old}`;
        button.style.transform = `translateX(${group.left - NEAR_PX}px)`;
        const kinds = [...new Set(group.marks.map((mark) => mark.kind))].slice(0, 3);
        if (!group.low && button.dataset.kinds !== kinds.join()) {
          button.dataset.kinds = kinds.join();
          button.replaceChildren(...kinds.map((kind) => element("i", `ic-glyph ic-${kind}`)));
        }
        const words = group.marks.map((mark) => `${mark.title}. ${mark.text}`).join(" ");
        button.setAttribute("aria-label", words.replace(/\n/g, ". "));
      }
      for (const id of before) {
        this.markElements.get(id).remove();
        this.markElements.delete(id);
      }
    }

    #makeMark() {
      const button = element("button", "", this.u.over);
      button.type = "button";
      button.setAttribute("aria-describedby", this.tip.id);
      const show = () => this.#explain(button);
      const hide = () => {
        this.explaining = null;
        this.#hideTip();
      };
      button.addEventListener("pointerenter", show);
      button.addEventListener("pointerleave", hide);
      button.addEventListener("focus", show);
      button.addEventListener("blur", hide);
      button.addEventListener("click", show);
      button.addEventListener("keydown", (event) => {
        if (event.key === "Escape") hide();
      });
      return button;
    }

    #explain(button) {
      this.explaining = button;
      this.dot.hidden = true;
      this.tip.replaceChildren();
      button.marks.slice(0, EXPLAINED).forEach((mark) => {
        const part = element("div", `ic-told ic-${mark.kind}`, this.tip);
        element("strong", "", part, mark.title);
        const { x } = this.options;
        const at = [`step ${axisText("step", mark.x.step, true)}`];
        if (x !== "step") at.push(`${this.#axisName()} ${axisText(x, mark.x[x], true)}`);
        if (this.runs.length > 1) at.unshift(this.#label(mark.run, "", true, false));
        if (mark.superseded) at.push("superseded");
        element("div", "ic-at", part, at.join(" · "));
        for (const line of mark.text.split("\n")) if (line) element("div", "", part, line);
      });
      const more = button.marks.length - EXPLAINED;
      if (more > 0) element("div", "ic-at", this.tip, `and ${more} more`);
      const left = this.u.valToPos(button.marks[0].x[this.options.x], "x");
      this.#showTip(left, 8);
    }

    /* ---- values under the cursor ---- */

    #read() {
      if (this.explaining) return;
      const { u } = this;
      const { left, top } = u.cursor;
      if (left == null || left < 0 || !this.lines.length) {
        this.#hideTip();
        return;
      }
      const x = u.posToVal(left, "x");
      let found = [];
      for (const line of this.lines) {
        if (!line.shown) continue;
        const i = nearest(line.xs, line.ys, x);
        if (i < 0) continue;
        const y = line.ys[i];
        if (this.options.log && y <= 0) continue;
        found.push({ line, at: line.xs[i], y, away: Math.abs(u.valToPos(y, "y") - top) });
      }
      if (!found.length) {
        this.#hideTip();
        return;
      }
      found.sort((a, b) => a.away - b.away);
      const closest = found[0];
      const others = found.length - READ_OUT;
      found = found.slice(0, READ_OUT).sort((a, b) => b.y - a.y);
      this.tip.replaceChildren();
      const axis = this.options.x;
      element("div", "ic-at", this.tip, `${this.#axisName()} ${axisText(axis, closest.at, true)}`);
      for (const { line, y } of found) {
        const row = element("div", line === closest.line ? "ic-row ic-closest" : "ic-row", this.tip);
        const swatch = element("span", "ic-swatch", row);
        swatch.style.borderTopColor = this.#colour(line);
        element("span", "ic-name", row, line.label);
        element("b", "", row, valueText(line.metric, y, true));
      }
      if (others > 0) element("div", "ic-at", this.tip, `and ${others} more`);
      this.dot.hidden = false;
      this.dot.style.backgroundColor = this.#colour(closest.line);
      const [dotX, dotY] = [u.valToPos(closest.at, "x"), u.valToPos(closest.y, "y")];
      this.dot.style.transform = `translate(${dotX - 4}px, ${dotY - 4}px)`;
      this.#showTip(left, 8);
    }

    /** Beside a place of the plot, on the side that has room. */
    #showTip(left, top) {
      const box = this.u.over;
      this.tip.hidden = false;
      const x = box.offsetLeft + left;
      const { offsetWidth } = this.tip;
      const right = x + 14 + offsetWidth <= this.plot.clientWidth;
      const wanted = right ? x + 14 : x - 14 - offsetWidth;
      const room = this.plot.clientWidth - offsetWidth;
      this.tip.style.left = `${Math.max(0, Math.min(wanted, room))}px`;
      this.tip.style.top = `${box.offsetTop + top}px`;
    }

    #hideTip() {
      this.tip.hidden = true;
      this.dot.hidden = true;
    }
  }

  InstarChart.AXES = AXES;
  InstarChart.axisText = axisText;
  InstarChart.valueText = valueText;
  window.InstarChart = InstarChart;
})();
