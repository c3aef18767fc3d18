/* The same page with its data in it: everything that is told of its runs, one below the other. */
"use strict";

const STACK = ["stages", "results", "system", "config"];

function showExported({ title, lead, footer, panels, answers }) {
  const { runs } = answers["/api/curves"];
  const main = byId("main");
  const add = (parent, address) => {
    if (!answers[address]?.sections.length) return;
    const place = el("section", { className: "detail" });
    parent.append(place);
    drawSections(place, answers[address].sections);
  };
  makeThemeButton();
  const single = runs.length === 1 && answers[about("0", "overview")];
  main.replaceChildren(el("h1", {}, title, single ? [" ", badgeOf(runs[0].state)] : []), lead ? el("p", { className: "faint", textContent: lead }) : "");
  if (single) add(main, about("0", "failure"));
  add(main, single ? about("0", "overview") : "/api/compare");
  const curves = el("section", { id: "curves", attrs: { "aria-label": "Curves" } });
  main.append(curves);
  const view = panels.length ? new CurvesView(curves, { drawn: () => runs, groups: answers["/api/groups"]?.groups || [] }, panels) : null;
  preparePrint(() => view?.fit());
  if (single) STACK.forEach((part) => add(main, about("0", part)));
  else {
    for (const run of runs) {
      if (!answers[about(run.key, "overview")]) continue;
      const one = el("details", { className: "one", open: runs.length <= 3 }, el("summary", {}, el("h2", {}, labelOf(run), " ", badgeOf(run.state))));
      main.append(one);
      ["failure", "overview", ...STACK].forEach((part) => add(one, about(run.key, part)));
    }
  }
  if (footer) main.append(el("footer", { className: "faint", textContent: footer }));
}
