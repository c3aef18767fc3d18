/* Curves on a canvas, at most a few points to a pixel: nothing is joined or copied on the way. */
(() => {
  "use strict";

  const { lower } = Instar;

  /** A colour between three of the form rgb(r, g, b); `share`: 0 is the first, 1 the last. */
  function mixed(share, ...stops) {
    const at = share * 2;
    const [from, to] = at < 1 ? stops : stops.slice(1);
    const part = (colour, i) => Number(colour.match(/\d+/g)[i]);
    const parts = [0, 1, 2].map((i) => part(from, i) + (at - (at < 1 ? 0 : 1)) * (part(to, i) - part(from, i)));
    return `rgb(${parts.map(Math.round).join(", ")})`;
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

  /** Draws what is shown of `lines`; `focused`, if there is one, stands out. `view`: from and to. */
  function drawLines(u, lines, { view, log, focused, colour }) {
    const { ctx, bbox } = u;
    const [from, to] = view;
    const ratio = devicePixelRatio;
    ctx.save();
    ctx.beginPath();
    const edge = 3 * ratio;
    ctx.rect(bbox.left - edge, bbox.top - edge, bbox.width + 2 * edge, bbox.height + 2 * edge);
    ctx.clip();
    ctx.lineJoin = "round";
    const thin = lines.length > 20 ? 1 : 1.6;
    const draw = (xs, ys, width, alpha, dash, dots) => {
      const first = Math.max(0, lower(xs, from) - 1);
      const end = Math.min(xs.length, lower(xs, to) + 2);
      ctx.globalAlpha = alpha;
      ctx.lineWidth = width * ratio;
      ctx.setLineDash(dash.map((length) => length * ratio));
      ctx.beginPath();
      const alone = trace(ctx, u, xs, ys, first, end, log);
      ctx.stroke();
      const sparse = dots && end - first < bbox.width / ratio / 12;
      drawDots(u, xs, ys, sparse ? null : alone, first, end, log);
    };
    const drawLine = (line, width, alpha) => {
      ctx.strokeStyle = ctx.fillStyle = colour(line);
      if (line.band) drawBand(u, line.band, view, log, 0.17 * alpha);
      for (const [xs, ys] of line.lost) draw(xs, ys, 1.2, 0.45 * alpha, [3, 3], false);
      if (line.weight) draw(line.xs, line.raw, 1, 0.28 * alpha, [], false);
      draw(line.xs, line.ys, width, alpha, line.dash, !line.weight);
    };
    for (const line of lines) {
      if (line.shown && line !== focused) drawLine(line, thin, focused ? 0.25 : 1);
    }
    if (focused) drawLine(focused, thin + 0.8, 1);
    ctx.restore();
  }

  /** What is within a deviation of a mean. */
  function drawBand(u, { xs, mean, low, high }, [from, to], log, alpha) {
    const { ctx } = u;
    const toX = projector(u, "x");
    const toY = projector(u, "y");
    ctx.globalAlpha = alpha;
    ctx.beginPath();
    const trip = (edge, i) => {
      const y = log && edge[i] <= 0 ? mean[i] : edge[i];
      if (!log || y > 0) ctx.lineTo(toX(xs[i]), toY(y));
    };
    const first = Math.max(0, lower(xs, from) - 1);
    const last = Math.min(xs.length, lower(xs, to) + 2) - 1;
    for (let i = first; i <= last; i++) trip(high, i);
    for (let i = last; i >= first; i--) trip(low, i);
    ctx.fill();
  }

  /** Dots on some places of a curve, or on all of it. */
  function drawDots(u, xs, ys, places, first, end, log) {
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
    if (places) places.forEach(dot);
    else for (let i = first; i < end; i++) dot(i);
  }

  /** The name of each curve at its end, in its colour: above it, and apart from the others. */
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
    const high = 13 * ratio;
    ctx.save();
    ctx.font = `${11 * ratio}px system-ui, sans-serif`;
    ctx.textAlign = "right";
    ctx.textBaseline = "alphabetic";
    ctx.lineWidth = 3 * ratio;
    ctx.strokeStyle = paper;
    let free = bbox.top + high;
    ends.forEach(({ line, text, x, y }, n) => {
      // those below need room too
      const at = Math.min(Math.max(y - 5 * ratio, free), bbox.top + bbox.height - (ends.length - 1 - n) * high - 2 * ratio);
      const right = Math.min(x, bbox.left + bbox.width) - 3 * ratio;
      ctx.strokeText(text, right, at);
      ctx.fillStyle = colour(line);
      ctx.fillText(text, right, at);
      free = at + high;
    });
    ctx.restore();
  }

  Object.assign(Instar, { drawEnds, drawLines, mixed });
})();
