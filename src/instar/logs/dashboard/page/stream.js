/* The one stream of server-sent events: opened anew when something else is shown, and when the
   page is looked at again; told where it left off each time. */

const SILENT_MS = 25000;
const AGAIN_MS = 1500;

export class Stream {
  /** `where()` gives `about`, what is shown; `behind`, whether more must be told of it than the
      open stream will; and `query()`, with up to where it is known. */
  constructor(where, hear) {
    this.where = where;
    this.hear = hear;
    this.told = new EventTarget();
    this.state = "waiting";
    document.addEventListener("visibilitychange", () => {
      if (document.hidden) this.#close();
      else this.open();
    });
    setInterval(() => this.#watch(), 5000);
  }

  /** (Re)opens the stream, if what it would be asked has changed or it is closed. */
  open() {
    if (document.hidden) return;
    const { about, behind, query } = this.where();
    if (this.source && about === this.about && !behind) return;
    this.#close();
    this.about = about;
    const source = new EventSource(`/api/stream?${query()}`);
    this.source = source;
    this.heard = Date.now();
    source.onopen = () => {
      this.heard = Date.now();
      this.#say("live");
    };
    source.onerror = () => {
      if (source !== this.source) return;
      this.#say("lost");
      if (source.readyState === EventSource.CLOSED) this.#later();
    };
    source.addEventListener("beat", () => (this.heard = Date.now()));
    for (const name of ["runs", "news", "anew", "log"]) {
      source.addEventListener(name, (event) => {
        if (source !== this.source) return;
        this.heard = Date.now();
        this.#say("live");
        this.hear(name, JSON.parse(event.data));
      });
    }
  }

  #later() {
    this.#close();
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.open(), AGAIN_MS);
  }

  #close() {
    this.source?.close();
    this.source = null;
  }

  /** A connection may die without a word. */
  #watch() {
    if (!this.source || Date.now() - this.heard < SILENT_MS) return;
    if (this.source.readyState === EventSource.CONNECTING) return;
    this.#say("lost");
    this.#later();
  }

  #say(state) {
    if (state === this.state) return;
    this.state = state;
    this.told.dispatchEvent(new CustomEvent("state", { detail: state }));
  }
}
