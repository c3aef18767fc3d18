/* The controls of a drawn chart, set as they were asked for; report.js has made them. */
(() => {
  "use strict";

  const { wanted } = JSON.parse(document.getElementById("data").textContent);
  const { x, smooth, log, marks } = document.getElementById("controls").elements;
  const set = (input, key, value, event) => {
    if (input[key] === value) return;
    input[key] = value;
    input.dispatchEvent(new Event(event));
  };
  set(x, "value", wanted.x, "change");
  set(smooth, "value", String(wanted.smooth), "input");
  set(log, "checked", wanted.log, "change");
  set(marks, "checked", wanted.marks, "change");
})();
