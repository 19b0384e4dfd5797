// A conversation with the model, over the API that everybody uses.

class Chat {
  constructor() {
    Object.assign(this, { messages: [], abort: null, model: "" });
    $("chat-form").addEventListener("submit", event => {
      event.preventDefault();
      this.send();
    });
    $("chat-text").addEventListener("keydown", event => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.send();
      }
    });
    $("chat-stop").addEventListener("click", () => this.abort?.abort());
    $("chat-clear").addEventListener("click", () => {
      this.abort?.abort();
      this.messages = [];
      $("chat-log").replaceChildren();
      $("chat-text").focus();
    });
  }

  begin(hello) {
    this.model = hello.model;
    $("chat").hidden = !hello.chat;
    $("chat-note").textContent = hello.chat ? "Its requests are in the figures like anybody's."
      : "Not from here: the model has no chat template, or this is the operators' listener.";
  }

  say(who, text) {
    const words = make("span", {}, text);
    const log = $("chat-log");
    log.append(make("p", {}, make("b", {}, who), words));
    log.scrollTop = log.scrollHeight;
    return words;
  }

  async send() {
    const text = $("chat-text").value.trim();
    if (!text || this.abort) return;
    $("chat-text").value = "";
    this.messages.push({ role: "user", content: text });
    this.say("You", text);
    const answer = this.say("Model", "");
    const abort = this.abort = new AbortController();
    $("chat-stop").disabled = false;
    $("chat-send").disabled = true;
    let said = "";
    try {
      const response = await fetch("/v1/chat/completions", {
        method: "POST",
        headers: headers({ "content-type": "application/json" }),
        body: JSON.stringify({ model: this.model, messages: this.messages, stream: true }),
        signal: abort.signal,
      });
      if (!response.ok) throw new Error(await refusal(response));
      await events(response, (_, data) => {
        if (data === "[DONE]") return;
        const told = JSON.parse(data);
        if (told.error) throw new Error(told.error.message);
        said += told.choices?.[0]?.delta?.content ?? "";
        answer.textContent = said;
        $("chat-log").scrollTop = $("chat-log").scrollHeight;
      });
    } catch (error) {
      if (!abort.signal.aborted) this.say("Error", error.message);
    }
    if (this.abort === abort) {
      this.abort = null;
      $("chat-stop").disabled = true;
      $("chat-send").disabled = false;
    }
    if (said) this.messages.push({ role: "assistant", content: said });
  }
}
