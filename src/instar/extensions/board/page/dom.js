/* Builds elements, formats values and requests data. Text of runs is never parsed as HTML. */
"use strict";

/** The data of an exported page; null on a page that is served. */
const embedded = JSON.parse(document.getElementById("data")?.textContent || "null");

/** Creates an element with properties, attributes (`attrs`), a dataset (`data`) and children. */
function el(tag, { attrs = {}, data = {}, ...properties } = {}, ...children) {
  const node = document.createElement(tag);
  Object.assign(node, properties);
  for (const [name, value] of Object.entries(attrs)) node.setAttribute(name, value);
  Object.assign(node.dataset, data);
  node.append(...children.flat().filter((child) => child != null));
  return node;
}

/** A text in the colour of a state. */
const badgeOf = (state, text = state) => el("span", { className: "badge", data: { state: state.replaceAll(" ", "-") }, textContent: text });

const byId = (id) => document.getElementById(id);

/** A number from JSON, where those that are not finite are strings; null for other strings. */
const toNumber = (value) => {
  if (typeof value !== "string") return value;
  return { NaN, Infinity, "-Infinity": -Infinity }[value] ?? null;
};

const formatValue = (metric, value) => {
  const number = toNumber(value);
  if (number == null) return "–";
  return Number.isFinite(number) ? InstarChart.valueText(metric, number) : String(number);
};

const formatCount = (value) => (value == null ? "–" : Math.round(value).toLocaleString("en"));

const formatAxisValue = (axis, value) => (value == null ? "–" : InstarChart.axisText(axis, value, false));

const formatTime = (seconds) => (seconds ? Instar.dateText(seconds) : "–");

/** The time since a Unix time, in its largest unit. */
function formatAge(seconds) {
  if (!seconds) return "";
  const age = Math.max(0, Date.now() / 1000 - seconds);
  const [length, unit] = [[86400, "d"], [3600, "h"], [60, "min"]].find(([l]) => age >= l) || [1, "s"];
  return `${Math.floor(age / length)} ${unit}`;
}

/** A JSON value in one line; strings without quotes. */
const formatJson = (value) => (typeof value === "object" && value !== null ? JSON.stringify(value) : String(value));

/** Quotes a word for a shell, so that a copied command is safe. */
const shellQuote = (text) => (/^[\w@%+=:,./-]+$/.test(text) ? text : `'${text.replaceAll("'", `'\\''`)}'`);

/** A message in place of missing data, with commands to copy. */
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

/** Returns the server's response, or the one stored in an exported page; throws the server's error message. */
async function fetchJson(path, parameters = []) {
  if (embedded) return embedded.answers[path];
  const query = new URLSearchParams(parameters).toString();
  return parseResponse(await fetch(query ? `${path}?${query}` : path, { credentials: "same-origin" }));
}

/** Posts JSON and returns the server's response. */
const postJson = async (path, content) =>
  parseResponse(await fetch(path, { method: "POST", credentials: "same-origin", headers: { "Content-Type": "application/json" }, body: JSON.stringify(content) }));

async function parseResponse(response) {
  if (response.ok) return response.json();
  let message = response.statusText;
  try {
    message = (await response.json()).error || message;
  } catch {
    message = message || `status ${response.status}`;
  }
  throw new Error(message);
}

const runPath = (key, resource) => `/api/runs/${encodeURIComponent(key)}/${resource}`;
