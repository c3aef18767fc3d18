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

  const two = (number) => String(number).padStart(2, "0");
  const day = (at) => `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
  const minute = (at) => `${two(at.getHours())}:${two(at.getMinutes())}`;

  /** Local time as `2026-11-21 22:35:07`, whatever the language of the browser. */
  function dateText(seconds) {
    const at = new Date(seconds * 1000);
    return `${day(at)} ${minute(at)}:${two(at.getSeconds())}`;
  }

  /** Ticks of an axis of dates: the time of day, with the date under the first of each day. */
  function dateTicks(places) {
    let before = "";
    const apart = places[1] - places[0];
    return places.map((place) => {
      const at = new Date(place * 1000);
      const date = day(at);
      if (apart >= 86400) return date;
      const time = apart < 60 ? dateText(place).slice(11) : minute(at);
      const text = date === before ? time : `${time}\n${date}`;
      before = date;
      return text;
    });
  }

  /** What is measured, in words; other metrics have the names that they were recorded with. */
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
    if (axis === "epoch") return trimmed(value.toPrecision(4));
    return exact ? Math.round(value).toLocaleString("en") : si(value);
  };

  const valueText = (metric, value, exact) => {
    if (value == null) return "–";
    if (metric.endsWith("_bytes")) return bytes(value);
    if (SHARES.includes(metric.split("/")[0])) return `${trimmed((100 * value).toPrecision(3))}%`;
    const unit = UNITS.find(([ending]) => ending.test(metric));
    if (unit) return `${trimmed(value.toPrecision(3))}${unit[1]}`;
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

  /** Names without the words that all of them begin with, the middle of long ones left out; in full if
      two would become equal. In 1e-3 no word ends. */
  function shortNames(names, most = 32) {
    const [first = ""] = names;
    let shared = names.length > 1 ? first.length : 0;
    for (const name of names) while (!name.startsWith(first.slice(0, shared))) shared -= 1;
    const words = [...first.slice(0, shared).matchAll(/(?<!\d[eE])[-_/ ]/g)];
    const begins = [0, ...words.map((word) => word.index + 1)];
    // a number alone names nothing
    if (names.some((name) => /^\d*( |$)/.test(name.slice(begins.at(-1))))) begins.pop();
    const begin = begins.at(-1) ?? 0;
    const short = names.map((name) => name.slice(begin) || name).map((name) =>
      name.length <= most ? name : `${name.slice(0, most / 2 - 1)}…${name.slice(-most / 2)}`);
    return new Set(short).size === new Set(names).size ? short : names;
  }

  Object.assign((window.Instar ||= {}), { AXES, BYTES, DURATIONS, axisText, dateText, dateTicks, logTicks, metricName, shortNames, valueText });
})();
