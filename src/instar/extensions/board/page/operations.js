/* What the user of a running run asks it for, and what waits there. */
"use strict";

class OperationsPanel {
  constructor(key) {
    this.key = key;
    this.input = el("input", { type: "text", placeholder: "change_lr=0.5", autocomplete: "off", spellcheck: false, attrs: { "aria-label": "Operation" } });
    this.input.addEventListener("keydown", (event) => {
      if (event.key === "Enter") this.#do("check");
    });
    this.said = el("p", { className: "said", attrs: { role: "status" } });
    this.waiting = el("ul", { attrs: { "aria-label": "Waiting operations" } });
    this.form = el("div", { className: "tools" }, this.input, this.#button("Check", () => this.#do("check")), this.#button("Apply", () => this.#do("apply")));
    this.root = el("section", { className: "operations", hidden: true, attrs: { "aria-label": "Live operations" } },
      el("h3", { textContent: "Live operations" }), this.form, this.said, this.waiting);
  }

  #button(text, act) {
    const button = el("button", { type: "button", className: "act", textContent: text });
    button.addEventListener("click", act);
    return button;
  }

  /** What waits, and whether the run can be asked for more. */
  async load() {
    try {
      const { refusal, rows, left_out: more } = await ask(about(this.key, "waiting"));
      this.form.hidden = Boolean(refusal);
      if (refusal) this.#say(`Operations cannot be asked for here: ${refusal}.`);
      this.waiting.replaceChildren(...rows.map((row) => this.#row(row, refusal)), more ? el("li", { className: "faint", textContent: `and ${whole(more)} more` }) : "");
    } catch (error) {
      this.waiting.replaceChildren(el("li", { className: "faint", textContent: error.message }));
    }
    this.root.hidden = false;
  }

  #row({ which, what, when, by }, refusal) {
    const button = this.#button("Cancel", async () => {
      button.disabled = true;
      await this.#send("cancel", which, "It is asked to be given up");
      button.disabled = false;
    });
    button.setAttribute("aria-label", `Cancel ${what}`);
    return el("li", {}, el("span", {}, el("strong", { textContent: what }), ` ${when}`), el("span", { className: "faint", textContent: by }), refusal ? null : button);
  }

  async #do(command) {
    const text = this.input.value;
    if (await this.#send(command, { text }, command === "apply" ? "It is asked for" : "Nothing speaks against it")) this.input.value = "";
  }

  /** Whether something was posted; what became of it comes with the run's events. */
  async #send(command, content, done) {
    try {
      const { refusal, id } = await send(about(this.key, command), content);
      this.#say(refusal || (id ? `${done} (${id}); the run takes it in between two steps.` : `${done}.`), refusal);
      return Boolean(id);
    } catch (error) {
      this.#say(error.message, true);
      return false;
    }
  }

  #say(text, isRefusal = false) {
    this.said.textContent = text;
    this.said.classList.toggle("refused", Boolean(isRefusal));
  }
}
