/* The report's controls and charts, from the data in the page. */
(() => {
  "use strict";

  const { runs, panels } = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;

  const theme = document.getElementById("theme");
  const dark = () =>
    root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  const name = () => (theme.textContent = dark() ? "Light" : "Dark");
  theme.hidden = false;
  theme.addEventListener("click", () => {
    root.dataset.theme = dark() ? "light" : "dark";
    name();
  });
  name();

  const controls = document.getElementById("controls");
  if (!controls) return;
  controls.hidden = false;
  // without a program there is a sentence in place of the charts
  document.getElementById("unscripted")?.remove();
  const places = document.querySelector(".panels[hidden]");
  if (places) places.hidden = false;
  const { x, smooth, log, marks, weight } = controls.elements;
  const has = (axis) =>
    runs.some((run) =>
      Object.values(run.series).some((found) => (found.x[axis] || []).some((value) => value)),
    );
  const unit = runs[0]?.unit;
  for (const [axis, label] of Object.entries(InstarChart.AXES)) {
    if (!has(axis)) continue;
    const shown = axis === "tokens" && unit && unit !== "token" ? `${unit}s` : label;
    x.append(new Option(shown, axis));
  }

  const charts = [...document.querySelectorAll(".chart")].map((place) => {
    const { metrics, log: steep, wide } = panels[place.dataset.panel];
    const chart = new InstarChart(place, {
      metric: metrics, x: x.value || "step", log: steep, height: wide ? 320 : 220,
    });
    chart.setRuns(runs);
    return { chart, steep };
  });

  const change = (options) => charts.forEach(({ chart, steep }) => chart.setOptions(options(steep)));
  x.addEventListener("change", () => change(() => ({ x: x.value })));
  log.addEventListener("change", () => change((steep) => ({ log: steep || log.checked })));
  marks.addEventListener("change", () => change(() => ({ marks: marks.checked })));
  smooth.addEventListener("input", () => {
    weight.value = smooth.value;
    change(() => ({ smooth: Number(smooth.value) }));
  });

  // on paper the page is light and narrow, and what is folded is open
  let before = null;
  addEventListener("beforeprint", () => {
    const folded = [...document.querySelectorAll("details.printed:not([open])")];
    before = { theme: root.dataset.theme, folded };
    root.dataset.theme = "light";
    root.classList.add("printing");
    folded.forEach((each) => (each.open = true));
    charts.forEach(({ chart }) => chart.fit());
  });
  addEventListener("afterprint", () => {
    if (!before) return;
    if (before.theme) root.dataset.theme = before.theme;
    else delete root.dataset.theme;
    root.classList.remove("printing");
    before.folded.forEach((each) => (each.open = false));
    before = null;
    charts.forEach(({ chart }) => chart.fit());
  });
  controls.addEventListener("submit", (event) => event.preventDefault());
})();
