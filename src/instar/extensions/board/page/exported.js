/* The exported page: all sections of its runs, one below the other. */
"use strict";

const RUN_PARTS = ["stages", "results", "system", "config"];

function showExported({ title, lead, footer, panels, answers }) {
  const { runs } = answers["/api/curves"];
  const main = byId("main");
  const add = (parent, path) => {
    if (!answers[path]?.sections.length) return;
    const container = el("section", { className: "detail" });
    parent.append(container);
    drawSections(container, answers[path].sections);
  };
  makeThemeButton();
  const isSingle = runs.length === 1 && answers[runPath("0", "overview")];
  main.replaceChildren(el("h1", {}, title, isSingle ? [" ", badgeOf(runs[0].state)] : []), lead ? el("p", { className: "faint", textContent: lead }) : "");
  if (isSingle) add(main, runPath("0", "failure"));
  add(main, isSingle ? runPath("0", "overview") : "/api/compare");
  const curves = el("section", { id: "curves", attrs: { "aria-label": "Curves" } });
  main.append(curves);
  const view = panels.length ? new CurvesView(curves, { chartRuns: () => runs, groups: answers["/api/groups"]?.groups || [] }, panels) : null;
  preparePrint(() => view?.fit());
  if (isSingle) RUN_PARTS.forEach((part) => add(main, runPath("0", part)));
  else {
    for (const run of runs) {
      if (!answers[runPath(run.key, "overview")]) continue;
      const details = el("details", { className: "one", open: runs.length <= 3 }, el("summary", {}, el("h2", {}, labelOf(run), " ", badgeOf(run.state))));
      main.append(details);
      ["failure", "overview", ...RUN_PARTS].forEach((part) => add(details, runPath(run.key, part)));
    }
  }
  if (footer) main.append(el("footer", { className: "faint", textContent: footer }));
}
