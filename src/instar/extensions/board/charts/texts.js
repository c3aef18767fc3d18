/* Formats numbers, dates and names of runs, and places the ticks of axes. */
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

  const trimZeros = (text) => (text.includes(".") ? text.replace(/\.?0+$/, "") : text);

  function withUnit(value, base, units) {
    let size = Math.abs(value);
    let unit = 0;
    while (size >= base * 0.9995 && unit < units.length - 1) {
      size /= base;
      unit += 1;
    }
    const decimals = size >= 100 ? 0 : size >= 10 ? 1 : 2;
    return (value < 0 ? "−" : "") + trimZeros(size.toFixed(decimals)) + units[unit];
  }

  const exponential = (value, digits) =>
    value.toExponential(digits).replace(/\.?0*e\+?/, "e");

  const si = (value) => {
    if (value !== 0 && Math.abs(value) < 0.01) return exponential(value, 1);
    if (Math.abs(value) < 10 && !Number.isInteger(value)) return trimZeros(value.toPrecision(3));
    return withUnit(value, 1000, ["", "k", "M", "B", "T", "P", "E"]);
  };

  const bytes = (value) => withUnit(value, 1024, [" B", " KiB", " MiB", " GiB", " TiB"]);

  function duration(seconds) {
    if (seconds < 60) return `${trimZeros(seconds.toFixed(seconds < 1 ? 3 : 1))} s`;
    const parts = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]];
    const first = parts.findIndex(([length]) => seconds >= length);
    const [length, unit] = parts[first];
    const count = Math.floor(seconds / length);
    const [nextLength, nextUnit] = parts[first + 1] || [Infinity];
    const nextCount = Math.floor((seconds - count * length) / nextLength);
    return `${count} ${unit}${nextCount ? ` ${nextCount} ${nextUnit}` : ""}`;
  }

  const flops = (value) => (value < 1e6 ? si(value) : exponential(value, 2));

  const twoDigits = (number) => String(number).padStart(2, "0");
  const dayText = (date) => `${date.getFullYear()}-${twoDigits(date.getMonth() + 1)}-${twoDigits(date.getDate())}`;
  const minuteText = (date) => `${twoDigits(date.getHours())}:${twoDigits(date.getMinutes())}`;

  /** Local time as `2026-11-21 22:35:07`, independent of the browser's language. */
  function dateText(seconds) {
    const date = new Date(seconds * 1000);
    return `${dayText(date)} ${minuteText(date)}:${twoDigits(date.getSeconds())}`;
  }

  /** Labels of the ticks of a date axis: the time of day, with the date below the first of each day. */
  function dateTicks(ticks) {
    let previousDay = "";
    const spacing = ticks[1] - ticks[0];
    return ticks.map((seconds) => {
      const date = new Date(seconds * 1000);
      const day = dayText(date);
      if (spacing >= 86400) return day;
      const time = spacing < 60 ? dateText(seconds).slice(11) : minuteText(date);
      const text = day === previousDay ? time : `${time}\n${day}`;
      previousDay = day;
      return text;
    });
  }

  /** Titles of metrics; other metrics are shown under their recorded names. */
  const METRIC_NAMES = {
    lr: "Learning rate",
    grad_norm: "Gradient norm, before clipping",
    tokens_per_s: "Throughput, per second",
    memory_bytes: "Memory",
    mfu: "Model FLOPs utilization",
    data_wait: "Time spent waiting for data",
    delta_bytes: "Size of a delta",
    delta_density: "Weights changed since the last delta",
    delta_overlap: "Overlap of changed weights with the delta before",
    gpu_memory_bytes: "GPU memory",
    gpu_utilization: "GPU utilization",
    gpu_power_w: "GPU power",
    cpu_percent: "CPU",
    disk_free_bytes: "Free disk space",
  };
  const SHARES = ["mfu", "data_wait", "delta_density", "delta_overlap", "gpu_utilization"];
  const UNITS = [[/_w$/, " W"], [/_(percent|pct)$/, "%"], [/_celsius$/, " °C"]];
  const metricName = (metric) => (Object.hasOwn(METRIC_NAMES, metric) ? METRIC_NAMES[metric] : metric);

  const axisText = (axis, value, exact) => {
    if (axis === "wall_s" || axis === "active_s") return duration(value);
    if (axis === "time") return dateText(value);
    if (axis === "flops") return flops(value);
    if (axis === "epoch") return trimZeros(value.toPrecision(4));
    return exact ? Math.round(value).toLocaleString("en") : si(value);
  };

  const valueText = (metric, value, exact) => {
    if (value == null) return "–";
    if (metric.endsWith("_bytes")) return bytes(value);
    if (SHARES.includes(metric.split("/")[0])) return `${trimZeros((100 * value).toPrecision(3))}%`;
    const unit = UNITS.find(([ending]) => ending.test(metric));
    if (unit) return `${trimZeros(value.toPrecision(3))}${unit[1]}`;
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e9)) return exponential(value, 2);
    if (size >= 1e4) return si(value);
    return exact ? value.toPrecision(4) : trimZeros(value.toPrecision(4));
  };

  /** Ticks of a logarithmic axis: powers of ten, subdivided or evenly spaced over short ranges. */
  function logTicks(low, high) {
    const decades = Math.log10(high / low);
    const digits = decades > 4 ? [1] : decades > 1.5 ? [1, 2, 5] : [1, 2, 3, 4, 5, 6, 7, 8, 9];
    const ticks = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const digit of digits) {
        const tick = Number(`${digit}e${power}`);
        if (tick >= low && tick <= high) ticks.push(tick);
      }
    }
    if (ticks.length > 2) return ticks.length > 12 ? ticks.filter((_, i) => i % 2 === 0) : ticks;
    const step = 10 ** Math.floor(Math.log10((high - low) / 2));
    const steps = Math.floor(high / step) - Math.ceil(low / step);
    const spacing = steps > 8 ? step * 5 : steps > 4 ? step * 2 : step;
    const evenTicks = [];
    for (let i = Math.ceil(low / spacing); i * spacing <= high; i++) evenTicks.push(Number((i * spacing).toPrecision(12)));
    return evenTicks;
  }

  /** Names without the words that all of them start with, long ones abbreviated in the middle; unchanged
      if two would become equal. The "-" of 1e-3 does not end a word. */
  function shortNames(names, maxLength = 32) {
    const [first = ""] = names;
    let shared = names.length > 1 ? first.length : 0;
    for (const name of names) while (!name.startsWith(first.slice(0, shared))) shared -= 1;
    const words = [...first.slice(0, shared).matchAll(/(?<!\d[eE])[-_/ ]/g)];
    const starts = [0, ...words.map((word) => word.index + 1)];
    // a number alone is not a name
    if (names.some((name) => /^\d*( |$)/.test(name.slice(starts.at(-1))))) starts.pop();
    const start = starts.at(-1) ?? 0;
    const short = names.map((name) => name.slice(start) || name).map((name) =>
      name.length <= maxLength ? name : `${name.slice(0, maxLength / 2 - 1)}…${name.slice(-maxLength / 2)}`);
    return new Set(short).size === new Set(names).size ? short : names;
  }

  Object.assign((window.Instar ||= {}), { AXES, BYTES, DURATIONS, axisText, dateText, dateTicks, logTicks, metricName, shortNames, valueText });
})();
