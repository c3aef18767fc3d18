/* The curve of one run, with its moving average and superseded points, and the mean curve of several runs. */
(() => {
  "use strict";

  const { valueText } = Instar;

  /** Index of the first element of ascending `xs` that is not below `x`. */
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

  /** A metric of a run over one axis, with its bias-corrected exponential moving average. */
  class Line {
    constructor(run, metric, axis, weight) {
      this.runs = [run];
      this.count = 1;
      this.metric = metric;
      this.weight = weight;
      this.isVisible = true;
      const series = run.series[metric];
      this.xs = series.x[axis] || [];
      this.raw = series.value;
      this.oldPieces = (series.superseded || []).map((piece) => [piece.x[axis] || [], piece.value]);
      this.sum = 0;
      this.bias = 0;
      this.smooth = [];
      this.update();
    }

    /** Extends the average over the points that were appended to the run's arrays. */
    update() {
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

    /** All points that are drawn, as pairs `[xs, ys]`. */
    get extents() {
      return [[this.xs, this.raw], ...this.oldPieces];
    }

    textAt(i) {
      return valueText(this.metric, this.ys[i], true);
    }
  }

  /** The mean of a metric over smoothed runs and their sample standard deviation, as computed by `band` in
      logs/plot/transforms.py. */
  class Mean {
    constructor(runs, metric, axis, weight) {
      Object.assign(this, { runs, metric, axis, weight: 0, oldPieces: [], isVisible: true, runWeight: weight });
    }

    /** Number of runs that have points. */
    get count() {
      return this.runs.filter((run) => run.series[this.metric]?.value.length).length;
    }

    /** Discards the cached mean, after points were appended to the runs' arrays. */
    update() {
      this.cachedBand = null;
    }

    get band() {
      this.cachedBand ||= meanBand(this.runs.map((run) => evenPoints(run, this.metric, this.axis, this.runWeight)));
      return this.cachedBand;
    }

    get xs() {
      return this.band.xs;
    }

    get ys() {
      return this.band.mean;
    }

    get extents() {
      const { xs, low, high } = this.band;
      return [[xs, low], [xs, high]];
    }

    textAt(i) {
      const { mean, deviation } = this.band;
      const [meanText, deviationText] = [mean[i], deviation[i]].map((value) => valueText(this.metric, value, true));
      return this.count > 1 ? `${meanText} ± ${deviationText}` : meanText;
    }
  }

  /** The finite, evenly spaced points of a smoothed curve, without the extremes that thinning preserved: `[xs, ys]`. */
  function evenPoints(run, metric, axis, weight) {
    const series = run.series[metric];
    if (!series) return [[], []];
    const allXs = series.x[axis] || [];
    const indices = [...allXs.keys()];
    // points appended after thinning are complete
    const evenIndices = series.even ? [...series.even, ...indices.slice((series.even.at(-1) ?? -1) + 1)] : indices;
    const take = (values) => evenIndices.map((i) => values[i]);
    const evenSeries = { x: { [axis]: take(allXs) }, value: take(series.value) };
    const { xs, ys } = new Line({ series: { [metric]: evenSeries } }, metric, axis, weight);
    const finite = indices.slice(0, ys.length).filter((i) => ys[i] != null);
    return [finite.map((i) => xs[i]), finite.map((i) => ys[i])];
  }

  /** Mean and deviation of curves `[xs, ys]` over the range that they share, at the xs of the curve with
      the fewest points; curves without points are ignored. */
  function meanBand(curves) {
    const nonEmpty = curves.filter(([xs]) => xs.length);
    const start = Math.max(...nonEmpty.map(([xs]) => xs[0]));
    const end = Math.min(...nonEmpty.map(([xs]) => xs.at(-1)));
    if (!nonEmpty.length || start > end) return { xs: [], mean: [], deviation: [], low: [], high: [] };
    const [sparsestXs] = nonEmpty.reduce((a, b) => (b[0].length < a[0].length ? b : a));
    const xs = [...new Set([start, ...sparsestXs.filter((x) => x > start && x < end), end])];
    const rows = nonEmpty.map(([curveXs, ys]) => interpolate(xs, curveXs, ys));
    const mean = xs.map((_, i) => rows.reduce((sum, row) => sum + row[i], 0) / rows.length);
    const deviation = mean.map((center, i) =>
      Math.sqrt(rows.reduce((sum, row) => sum + (row[i] - center) ** 2, 0) / Math.max(1, rows.length - 1)));
    const edge = (sign) => mean.map((center, i) => center + sign * deviation[i]);
    return { xs, mean, deviation, low: edge(-1), high: edge(1) };
  }

  /** The curve's values at ascending `targets` between its first and its last x. */
  function interpolate(targets, xs, ys) {
    let next = 0;
    return targets.map((x) => {
      while (xs[next] < x) next += 1;
      if (xs[next] === x) return ys[next];
      const share = (x - xs[next - 1]) / (xs[next] - xs[next - 1]);
      return ys[next - 1] + share * (ys[next] - ys[next - 1]);
    });
  }

  /** Index of the curve's point nearest to `x`, or -1 if there is none. */
  function nearest({ xs, ys }, x) {
    const next = lower(xs, x);
    let best = -1;
    for (const i of [next - 1, next]) {
      if (ys[i] != null && (best < 0 || Math.abs(xs[i] - x) < Math.abs(xs[best] - x))) best = i;
    }
    return best;
  }

  Object.assign(Instar, { Line, Mean, lower, nearest });
})();
