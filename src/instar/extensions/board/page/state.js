/* The state of the page, stored in the URL's fragment so that it can be shared and survives a reload;
   an exported page keeps it in memory. */
"use strict";

const METRICS = ["loss", "val/loss"];
const TABS = ["curves", "overview", "stages", "results", "events", "system", "logs", "config"];

const DEFAULTS = {
  runs: "", tab: "curves", metrics: METRICS.join(","), x: "step", log: "", smooth: "0", marks: "1", mean: "",
  q: "", states: "", sort: "started", of: "", rank: "0", fleet: "", fleet_log: "",
  columns: "", order: "",
  ...embedded?.defaults,
};

// names are separated by commas, and may contain them
const pack = (names) => names.map((name) => name.replace(/[%,]/g, encodeURIComponent)).join(",");
const unpack = (text) => text.split(",").filter(Boolean).map((name) => {
  try {
    return decodeURIComponent(name);
  } catch {
    return name;
  }
});

/** The address of a page with these values, and defaults for all others. */
const addressOf = (values) => `#${new URLSearchParams(values)}`;

/** Dispatches "navigate" when the user has changed the fragment. */
class State extends EventTarget {
  constructor() {
    super();
    this.#readFragment();
    addEventListener("hashchange", () => {
      if (this.#toFragment() === location.hash.slice(1)) return;
      this.#readFragment();
      this.dispatchEvent(new Event("navigate"));
    });
  }

  #readFragment() {
    this.values = { ...DEFAULTS };
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) {
      if (name in DEFAULTS) this.values[name] = value;
    }
  }

  #toFragment() {
    const entries = Object.entries(this.values).filter(([name, value]) => value !== DEFAULTS[name]);
    return new URLSearchParams(entries).toString();
  }

  set(changes) {
    for (const [name, value] of Object.entries(changes)) this.values[name] = String(value);
    if (embedded) return;
    const fragment = this.#toFragment();
    history.replaceState(null, "", fragment ? `#${fragment}` : location.pathname);
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

/** Sets up the button that cycles through the themes; "" follows the system. */
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

/** Prints the page in light colours with its details open; `fit` adapts the charts to the paper's width. */
function preparePrint(fit) {
  const root = document.documentElement;
  let previous = null;
  addEventListener("beforeprint", () => {
    const details = [...document.querySelectorAll("details.printed:not([open])")];
    previous = { theme: root.dataset.theme, details };
    root.dataset.theme = "light";
    root.classList.add("printing");
    details.forEach((element) => (element.open = true));
    fit();
  });
  addEventListener("afterprint", () => {
    if (!previous) return;
    if (previous.theme) root.dataset.theme = previous.theme;
    else delete root.dataset.theme;
    root.classList.remove("printing");
    previous.details.forEach((element) => (element.open = false));
    previous = null;
    fit();
  });
}
