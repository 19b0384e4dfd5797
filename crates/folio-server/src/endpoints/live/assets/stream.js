// Events as they come, with a key where one is needed. The key stays in this tab.

const KEY = "folio-key";

function headers(more = {}) {
  const key = sessionStorage.getItem(KEY);
  return key ? { authorization: "Bearer " + key, ...more } : more;
}

/** What a refusal says. */
async function refusal(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error.message ?? text;
  } catch {
    return text || response.statusText;
  }
}

/** Calls `take(name, data)` for each event of a response, until it ends. */
async function events(response, take) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    text += value;
    for (let end; (end = text.indexOf("\n\n")) >= 0; text = text.slice(end + 2)) {
      let name = "message", data = "";
      for (const line of text.slice(0, end).split("\n")) {
        if (line.startsWith("event: ")) name = line.slice(7);
        if (line.startsWith("data: ")) data += line.slice(6);
      }
      if (data) take(name, data);
    }
  }
}

/** Follows the figures while it is wanted: not while it is paused, or nobody sees the page. */
class Live {
  constructor(take, tell, askKey) {
    Object.assign(this, { take, tell, askKey, abort: null, paused: false, failures: 0, timer: 0 });
    document.addEventListener("visibilitychange", () => this.update());
  }

  pause(paused) {
    this.paused = paused;
    this.update();
  }

  update() {
    const wanted = !this.paused && !document.hidden;
    if (wanted && !this.abort) this.follow();
    if (!wanted) this.stop(this.paused ? "Paused: the server samples nothing." : "Hidden.");
  }

  again() {
    this.stop("Connecting …");
    this.update();
  }

  stop(why) {
    clearTimeout(this.timer);
    this.abort?.abort();
    this.abort = null;
    this.tell(why);
  }

  async follow() {
    const abort = this.abort = new AbortController();
    let wait = Math.min(1000 * 2 ** this.failures, 15000);
    let why = "The connection ended.";
    try {
      const response = await fetch("/v1/why/live", { headers: headers(), signal: abort.signal, cache: "no-store" });
      if (response.ok) {
        this.failures = 0;
        this.tell("Live");
        wait = 1000;
        await events(response, (name, data) => this.take(name, JSON.parse(data)));
      } else {
        why = await refusal(response);
        if (response.status === 401 || response.status === 403) {
          this.tell("A key is needed.");
          this.askKey(why);
          return;
        }
        this.failures += 1;
      }
    } catch (error) {
      if (abort.signal.aborted) return;
      this.failures += 1;
      why = "The server cannot be reached.";
    }
    if (this.abort !== abort) return;
    this.abort = null;
    this.tell(why + " Trying again …");
    this.timer = setTimeout(() => this.update(), wait);
  }
}
