/* One curve: its points, its moving average, and what of it was superseded. */
(() => {
  "use strict";

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

    /** The place of the point nearest to `x`; -1: there is none. */
    nearest(x) {
      const { xs, ys } = this;
      const at = lower(xs, x);
      let best = -1;
      for (const i of [at - 1, at]) {
        if (ys[i] != null && (best < 0 || Math.abs(xs[i] - x) < Math.abs(xs[best] - x))) best = i;
      }
      return best;
    }
  }

  Object.assign((window.Instar ||= {}), { Line, lower });
})();
