/* What the page shows, kept in the address: it can be shared, and outlives a reload. An exported
   page keeps it to itself. */
"use strict";

const METRICS = ["loss", "val/loss"];
const TABS = ["curves", "overview", "stages", "results", "events", "system", "logs", "config"];

const DEFAULTS = {
  runs: "", tab: "curves", metrics: METRICS.join(","), x: "step", log: "", smooth: "0", marks: "1", mean: "",
  q: "", states: "", sort: "started", of: "", rank: "0", fleet: "", fleet_log: "",
  columns: "", order: "",
  ...embedded?.wanted,
};

// a comma parts names, and may be in one
const pack = (names) => names.map((name) => name.replace(/[%,]/g, encodeURIComponent)).join(",");
const unpack = (text) => text.split(",").filter(Boolean).map((name) => {
  try {
    return decodeURIComponent(name);
  } catch {
    return name;
  }
});

/** The address of the page that shows this; what is not given is at its default. */
const addressOf = (values) => `#${new URLSearchParams(values)}`;

class State {
  constructor() {
    this.told = new EventTarget();
    this.#read();
    addEventListener("hashchange", () => {
      if (this.#text() === location.hash.slice(1)) return;
      this.#read();
      this.told.dispatchEvent(new Event("anew"));
    });
  }

  #read() {
    this.values = { ...DEFAULTS };
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
      if (name in DEFAULTS) this.values[name] = value;
    }
  }

  #text() {
    const changed = Object.entries(this.values).filter(([name, value]) => value !== DEFAULTS[name]);
    return new URLSearchParams(changed).toString();
  }

  set(changes) {
    for (const [name, value] of Object.entries(changes)) this.values[name] = String(value);
    if (embedded) return;
    const text = this.#text();
    history.replaceState(null, "", text ? `#${text}` : location.pathname);
  }

  list(name) {
    return unpack(this.values[name]);
  }

  setList(name, names) {
    this.set({ [name]: pack(names) });
  }

  get tab() {
    return TABS.includes(this.values.tab) ? this.values.tab : TABS[0];
  }

  get x() {
    return this.values.x in InstarChart.AXES ? this.values.x : "step";
  }

  get smooth() {
    return Math.min(0.999, Math.max(0, Number(this.values.smooth) || 0));
  }

  get log() {
    return this.values.log === "1";
  }

  get mean() {
    return this.values.mean === "1";
  }

  get marks() {
    return this.values.marks === "1";
  }
}

const state = new State();

const THEMES = { "": "◐ Auto", light: "○ Light", dark: "● Dark" };

/** The button that chooses light or dark; without a choice the system's holds. */
function makeThemeButton() {
  const button = byId("theme");
  const names = Object.keys(THEMES);
  let theme = "";
  try {
    theme = localStorage.getItem("instar-theme") || "";
  } catch {
    theme = "";
  }
  const apply = () => {
    if (theme) document.documentElement.dataset.theme = theme;
    else delete document.documentElement.dataset.theme;
    button.textContent = THEMES[theme] || THEMES[""];
    button.setAttribute("aria-label", `Colours: ${button.textContent.slice(2)}`);
  };
  button.addEventListener("click", () => {
    theme = names[(names.indexOf(theme) + 1) % names.length];
    try {
      localStorage.setItem("instar-theme", theme);
    } catch {
      button.title = "not kept";
    }
    apply();
  });
  apply();
}

/** On paper the page is light and narrow, and what is folded is open; `fit` draws the charts anew. */
function preparePrint(fit) {
  const root = document.documentElement;
  let before = null;
  addEventListener("beforeprint", () => {
    const folded = [...document.querySelectorAll("details.printed:not([open])")];
    before = { theme: root.dataset.theme, folded };
    root.dataset.theme = "light";
    root.classList.add("printing");
    folded.forEach((each) => (each.open = true));
    fit();
  });
  addEventListener("afterprint", () => {
    if (!before) return;
    if (before.theme) root.dataset.theme = before.theme;
    else delete root.dataset.theme;
    root.classList.remove("printing");
    before.folded.forEach((each) => (each.open = false));
    before = null;
    fit();
  });
}
