/* Elements, numbers as text, and answers. What comes from a run is only ever set as text. */
"use strict";

/** The data of an exported page; null where a server answers. */
const embedded = JSON.parse(document.getElementById("data")?.textContent || "null");

/** An element with properties, attributes (`attrs`), data and children: texts or elements. */
function el(tag, properties = {}, ...children) {
  const { attrs = {}, data = {}, ...rest } = properties;
  const made = document.createElement(tag);
  Object.assign(made, rest);
  for (const [name, value] of Object.entries(attrs)) made.setAttribute(name, value);
  Object.assign(made.dataset, data);
  made.append(...children.flat().filter((child) => child != null));
  return made;
}

/** A word in the colour of its state. */
const badgeOf = (state, text = state) => el("span", { className: "badge", data: { state: state.replaceAll(" ", "-") }, textContent: text });

const byId = (id) => document.getElementById(id);

/** The value of a number that JSON has no form for, too. */
const numeric = (value) => {
  if (typeof value !== "string") return value;
  return { NaN, Infinity, "-Infinity": -Infinity }[value] ?? null;
};

const figure = (metric, value) => {
  const known = numeric(value);
  if (known == null) return "–";
  return Number.isFinite(known) ? InstarChart.valueText(metric, known) : String(known);
};

const whole = (value) => (value == null ? "–" : Math.round(value).toLocaleString("en"));

const onAxis = (axis, value) => (value == null ? "–" : InstarChart.axisText(axis, value, false));

const clock = (seconds) => (seconds ? Instar.dateText(seconds) : "–");

/** How long ago, in short. */
function ago(seconds) {
  if (!seconds) return "";
  const past = Math.max(0, Date.now() / 1000 - seconds);
  const [length, unit] = [[86400, "d"], [3600, "h"], [60, "min"], [1, "s"]].find(([l]) => past >= l) || [1, "s"];
  return `${Math.floor(past / length)} ${unit}`;
}

/** Any JSON value in one line. */
const inWords = (value) => (typeof value === "object" && value !== null ? JSON.stringify(value) : String(value));

/** A word for a shell: what is copied must not do more than it says. */
const quoted = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

/** What there is instead of data: a sentence, and commands to copy. */
function emptyState(text, ...commands) {
  const lines = commands.map((command) => {
    const copy = el("button", { type: "button", className: "plain", textContent: "Copy", attrs: { "aria-label": `Copy ${command}` } });
    copy.hidden = !navigator.clipboard;
    copy.addEventListener("click", async () => {
      await navigator.clipboard.writeText(command);
      copy.textContent = "Copied";
    });
    return el("p", { className: "command" }, el("code", { textContent: command }), copy);
  });
  return el("div", { className: "none" }, el("p", { textContent: text }), lines);
}

/** The answer of the server, or the one that is in the page; an error has the server's words. */
async function ask(path, parameters = []) {
  if (embedded) return embedded.answers[path];
  const query = new URLSearchParams(parameters).toString();
  return read(await fetch(query ? `${path}?${query}` : path, { credentials: "same-origin" }));
}

/** The server's answer to what is sent to it as JSON. */
const send = async (path, content) =>
  read(await fetch(path, { method: "POST", credentials: "same-origin", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) }));

async function read(answer) {
  if (answer.ok) return answer.json();
  let words = answer.statusText;
  try {
    words = (await answer.json()).error || words;
  } catch {
    words = words || `status ${answer.status}`;
  }
  throw new Error(words);
}

const about = (key, what) => `/api/runs/${encodeURIComponent(key)}/${what}`;
