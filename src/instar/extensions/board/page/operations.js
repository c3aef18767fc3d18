/* Requests operations of a running run, and lists those that wait. */
"use strict";

class OperationsPanel {
  constructor(key) {
    this.key = key;
    this.input = el("input", { type: "text", placeholder: "change_lr=0.5", autocomplete: "off", spellcheck: false, attrs: { "aria-label": "Operation" } });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.#submit("check");
    });
    this.message = el("p", { className: "message", attrs: { role: "status" } });
    this.entries = el("ul", { attrs: { "aria-label": "Waiting operations" } });
    this.form = el("div", { className: "tools" }, this.input, this.#button("Check", () => this.#submit("check")), this.#button("Apply", () => this.#submit("apply")));
    this.root = el("section", { className: "operations", hidden: true, attrs: { "aria-label": "Live operations" } },
      el("h3", { textContent: "Live operations" }), this.form, this.message, this.entries);
  }

  #button(text, onClick) {
    const button = el("button", { type: "button", className: "act", textContent: text });
    button.addEventListener("click", onClick);
    return button;
  }

  /** Loads the waiting operations, and whether the run accepts more. */
  async load() {
    try {
      const { refusal, rows, left_out: more } = await fetchJson(runPath(this.key, "waiting"));
      this.form.hidden = Boolean(refusal);
      if (refusal) this.#showMessage(`Operations cannot be requested here: ${refusal}.`);
      this.entries.replaceChildren(...rows.map((row) => this.#row(row, refusal)), more ? el("li", { className: "faint", textContent: `and ${formatCount(more)} more` }) : "");
    } catch (error) {
      this.entries.replaceChildren(el("li", { className: "faint", textContent: error.message }));
    }
    this.root.hidden = false;
  }

  #row({ which: target, what: operation, when, by }, refusal) {
    const button = this.#button("Cancel", async () => {
      button.disabled = true;
      await this.#post("cancel", target, "Cancellation requested");
      button.disabled = false;
    });
    button.setAttribute("aria-label", `Cancel ${operation}`);
    return el("li", {}, el("span", {}, el("strong", { textContent: operation }), ` ${when}`), el("span", { className: "faint", textContent: by }), refusal ? null : button);
  }

  async #submit(command) {
    const text = this.input.value;
    if (await this.#post(command, { text }, command === "apply" ? "Requested" : "Possible")) this.input.value = "";
  }

  /** Posts a command and shows the outcome. Returns whether the run will receive it; its result comes as an event. */
  async #post(command, content, success) {
    try {
      const { refusal, id } = await postJson(runPath(this.key, command), content);
      this.#showMessage(refusal || (id ? `${success} (${id}); the run handles it between two steps.` : `${success}.`), refusal);
      return Boolean(id);
    } catch (error) {
      this.#showMessage(error.message, true);
      return false;
    }
  }

  #showMessage(text, isRefusal = false) {
    this.message.textContent = text;
    this.message.classList.toggle("refused", Boolean(isRefusal));
  }
}
