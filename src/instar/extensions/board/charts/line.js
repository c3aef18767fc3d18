/* One curve: its points, its moving average, and what of it was superseded; or the mean of several. */
(() => {
  "use strict";

  const { valueText } = Instar;

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

  /** A metric of a run over one axis, with its moving average: freed of its bias towards 0. */
  class Line {
    constructor(run, metric, axis, weight) {
      this.run = run;
      this.runs = [run];
      this.count = 1;
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

    /** All that is drawn, as pairs of places and values. */
    get extents() {
      return [[this.xs, this.raw], ...this.lost];
    }

    textAt(i) {
      return valueText(this.metric, this.ys[i], true);
    }
  }

  /** The mean of a metric over runs, each smoothed, and their sample standard deviation: what `band` of
      logs/plot/transforms.py makes of them. */
  class Mean {
    constructor(runs, metric, axis, weight) {
      Object.assign(this, { runs, metric, axis, weight: 0, lost: [], shown: true, smoothing: weight });
    }

    /** Of how many runs there are points. */
    get count() {
      return this.runs.filter((run) => run.series[this.metric]?.value.length).length;
    }

    grown() {
      this.known = null;
    }

    get band() {
      this.known ||= band(this.runs.map((run) => evenly(run, this.metric, this.axis, this.smoothing)));
      return this.known;
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
      const [middle, spread] = [mean[i], deviation[i]].map((value) => valueText(this.metric, value, true));
      return this.count > 1 ? `${middle} ± ${spread}` : middle;
    }
  }

  /** The finite points of a curve that are evenly spaced, whatever its extremes are: [places, values]. */
  function evenly(run, metric, axis, weight) {
    const found = run.series[metric];
    if (!found) return [[], []];
    const places = found.x[axis] || [];
    // what was appended since it was thinned is all there
    const every = [...places.keys()];
    const kept = found.even ? [...found.even, ...every.slice((found.even.at(-1) ?? -1) + 1)] : every;
    const of = (values) => kept.map((i) => values[i]);
    const even = { x: { [axis]: of(places) }, value: of(found.value) };
    const { xs, ys } = new Line({ series: { [metric]: even } }, metric, axis, weight);
    const finite = every.slice(0, ys.length).filter((i) => ys[i] != null);
    return [finite.map((i) => xs[i]), finite.map((i) => ys[i])];
  }

  /** Mean and deviation of curves over the range that they have in common, at the places of the one
      with the fewest points; curves without any are left out. */
  function band(curves) {
    const known = curves.filter(([xs]) => xs.length);
    const start = Math.max(...known.map(([xs]) => xs[0]));
    const end = Math.min(...known.map(([xs]) => xs.at(-1)));
    if (!known.length || start > end) return { xs: [], mean: [], deviation: [], low: [], high: [] };
    const [fewest] = known.reduce((one, other) => (other[0].length < one[0].length ? other : one));
    const xs = [...new Set([start, ...fewest.filter((x) => x > start && x < end), end])];
    const values = known.map(([places, ys]) => interpolated(xs, places, ys));
    const mean = xs.map((_, i) => values.reduce((sum, each) => sum + each[i], 0) / values.length);
    const deviation = mean.map((middle, i) =>
      Math.sqrt(values.reduce((sum, each) => sum + (each[i] - middle) ** 2, 0) / Math.max(1, values.length - 1)));
    const beside = (sign) => mean.map((middle, i) => middle + sign * deviation[i]);
    return { xs, mean, deviation, low: beside(-1), high: beside(1) };
  }

  /** The values at `wanted` of a curve that goes from its first to its last place. */
  function interpolated(wanted, xs, ys) {
    let after = 0;
    return wanted.map((x) => {
      while (xs[after] < x) after += 1;
      if (xs[after] === x) return ys[after];
      const share = (x - xs[after - 1]) / (xs[after] - xs[after - 1]);
      return ys[after - 1] + share * (ys[after] - ys[after - 1]);
    });
  }

  /** The place of a curve's point nearest to `x`; -1: there is none. */
  function nearest({ xs, ys }, x) {
    const at = lower(xs, x);
    let best = -1;
    for (const i of [at - 1, at]) {
      if (ys[i] != null && (best < 0 || Math.abs(xs[i] - x) < Math.abs(xs[best] - x))) best = i;
    }
    return best;
  }

  Object.assign(Instar, { Line, Mean, lower, nearest });
})();
