/* Draws curves on a canvas with at most four points per pixel column, without copying their arrays. */
(() => {
  "use strict";

  const { lower } = Instar;

  /** Interpolates three colours of the form rgb(r, g, b); `share`: 0 is the first, 1 the last. */
  function mixColours(share, ...stops) {
    const position = share * 2;
    const [from, to] = position < 1 ? stops : stops.slice(1);
    const channel = (colour, i) => Number(colour.match(/\d+/g)[i]);
    const channels = [0, 1, 2].map((i) => channel(from, i) + (position - (position < 1 ? 0 : 1)) * (channel(to, i) - channel(from, i)));
    return `rgb(${channels.map(Math.round).join(", ")})`;
  }

  /** Adds a curve to the path: the first, lowest, highest and last point of each pixel column. Returns the
      indices of points without neighbours. */
  function trace(ctx, u, xs, ys, from, to, log) {
    const toX = projector(u, "x");
    const toY = projector(u, "y");
    let column = NaN;
    let low = 0;
    let high = 0;
    let last = 0;
    let open = false;
    const isolated = [];
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
        if (length === 1) isolated.push(i - 1);
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
    if (length === 1) isolated.push(to - 1);
    return isolated;
  }

  /** uPlot's `valToPos` in canvas pixels, with all constants computed once. */
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

  /** Draws the visible ones of `lines` within `view`, `[from, to]`; the others are faint beside `focusedLine`. */
  function drawLines(u, lines, { view, log, focusedLine, colour }) {
    const { ctx, bbox } = u;
    const [from, to] = view;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    const margin = 3 * ratio;
    ctx.rect(bbox.left - margin, bbox.top - margin, bbox.width + 2 * margin, bbox.height + 2 * margin);
    ctx.clip();
    ctx.lineJoin = "round";
    const lineWidth = lines.length > 20 ? 1 : 1.6;
    const draw = (xs, ys, width, alpha, dash, dots) => {
      const first = Math.max(0, lower(xs, from) - 1);
      const end = Math.min(xs.length, lower(xs, to) + 2);
      ctx.globalAlpha = alpha;
      ctx.lineWidth = width * ratio;
      ctx.setLineDash(dash.map((length) => length * ratio));
      ctx.beginPath();
      const isolated = trace(ctx, u, xs, ys, first, end, log);
      ctx.stroke();
      const isSparse = dots && end - first < bbox.width / ratio / 12;
      drawDots(u, xs, ys, isSparse ? null : isolated, first, end, log);
    };
    const drawLine = (line, width, alpha) => {
      ctx.strokeStyle = ctx.fillStyle = colour(line);
      if (line.band) drawBand(u, line.band, view, log, 0.17 * alpha);
      for (const [xs, ys] of line.oldPieces) draw(xs, ys, 1.2, 0.45 * alpha, [3, 3], false);
      if (line.weight) draw(line.xs, line.raw, 1, 0.28 * alpha, [], false);
      draw(line.xs, line.ys, width, alpha, line.dash, !line.weight);
    };
    for (const line of lines) {
      if (line.isVisible && line !== focusedLine) drawLine(line, lineWidth, focusedLine ? 0.25 : 1);
    }
    if (focusedLine) drawLine(focusedLine, lineWidth + 0.8, 1);
    ctx.restore();
  }

  /** Fills the area within one deviation of a mean. */
  function drawBand(u, { xs, mean, low, high }, [from, to], log, alpha) {
    const { ctx } = u;
    const toX = projector(u, "x");
    const toY = projector(u, "y");
    ctx.globalAlpha = alpha;
    ctx.beginPath();
    const addPoint = (edge, i) => {
      const y = log && edge[i] <= 0 ? mean[i] : edge[i];
      if (!log || y > 0) ctx.lineTo(toX(xs[i]), toY(y));
    };
    const first = Math.max(0, lower(xs, from) - 1);
    const last = Math.min(xs.length, lower(xs, to) + 2) - 1;
    for (let i = first; i <= last; i++) addPoint(high, i);
    for (let i = last; i >= first; i--) addPoint(low, i);
    ctx.fill();
  }

  /** Draws dots on the curve's points of these `indices`; null: on all from `first` to `end`. */
  function drawDots(u, xs, ys, indices, first, end, log) {
    const { ctx } = u;
    const toX = projector(u, "x");
    const toY = projector(u, "y");
    const dot = (i) => {
      if (ys[i] == null || (log && ys[i] <= 0)) return;
      ctx.beginPath();
      ctx.arc(toX(xs[i]), toY(ys[i]), 2.4 * devicePixelRatio, 0, 2 * Math.PI);
      ctx.fill();
    };
    ctx.setLineDash([]);
    if (indices) indices.forEach(dot);
    else for (let i = first; i < end; i++) dot(i);
  }

  /** Draws the name of each curve above its end, in its colour, without overlaps. */
  function drawEnds(u, lines, texts, { view, log, colour, paper }) {
    const { ctx, bbox } = u;
    const ratio = devicePixelRatio;
    const toX = projector(u, "x");
    const toY = projector(u, "y");
    const ends = lines.map((line, n) => {
      let last = Math.min(line.xs.length, lower(line.xs, view[1] * (1 + 1e-9))) - 1;
      while (last >= 0 && (line.ys[last] == null || (log && line.ys[last] <= 0))) last -= 1;
      return last < 0 || line.xs[last] < view[0] ? null : { line, text: texts[n], x: toX(line.xs[last]), y: toY(line.ys[last]) };
    }).filter(Boolean).sort((a, b) => a.y - b.y);
    const rowHeight = 13 * ratio;
    ctx.save();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.textBaseline = "alphabetic";
    ctx.lineWidth = 3 * ratio;
    ctx.strokeStyle = paper;
    let minY = bbox.top + rowHeight;
    ends.forEach(({ line, text, x, y }, n) => {
      // the names below need room too
      const maxY = bbox.top + bbox.height - (ends.length - 1 - n) * rowHeight - 2 * ratio;
      const textY = Math.min(Math.max(y - 5 * ratio, minY), maxY);
      const right = Math.min(x, bbox.left + bbox.width) - 3 * ratio;
      ctx.strokeText(text, right, textY);
      ctx.fillStyle = colour(line);
      ctx.fillText(text, right, textY);
      minY = textY + rowHeight;
    });
    ctx.restore();
  }

  Object.assign(Instar, { drawEnds, drawLines, mixColours });
})();
