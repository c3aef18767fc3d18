/* Numbers and the axes of runs as texts. */
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
  const DURATIONS = [
    0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600,
    900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 432000, 864000, 2592000,
  ];
  const BYTES = Array.from({ length: 50 }, (_, power) => 2 ** power);

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

  Object.assign((window.Instar ||= {}), { AXES, BYTES, DURATIONS, axisText, logTicks, valueText });
})();
