/* What the page shows, kept in the address: it can be shared, and outlives a reload. */

export const METRICS = ["loss", "val/loss"];
export const TABS = ["curves", "events", "stages", "system", "logs", "config"];

const DEFAULTS = {
  runs: "", tab: "curves", metrics: METRICS.join(","), x: "step", log: "", smooth: "0", marks: "1",
  q: "", states: "", sort: "started", of: "", rank: "0",
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
    return Math.min(0.99, Math.max(0, Number(this.values.smooth) || 0));
  }

  get log() {
    return this.values.log === "1";
  }

  get marks() {
    return this.values.marks === "1";
  }
}

export const state = new State();
