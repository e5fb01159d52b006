// One question to the model, streamed as any client of OpenAI's interface would get it.
import { CallError, get, stream } from "./api.js";
import { announce, byId, make, setFacts, setText } from "./dom.js";
import { count, duration } from "./format.js";

export class Playground {
  /** onTrace: given the id of the answer's trace. */
  constructor({ onTrace }) {
    this.onTrace = onTrace;
    this.running = null;
    this.traceId = "";
    byId("play").addEventListener("submit", (event) => {
      event.preventDefault();
      this.ask();
    });
    byId("play").addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("play").requestSubmit();
    });
    byId("halt").addEventListener("click", () => this.running?.abort());
    byId("answer-trace").addEventListener("click", () => this.onTrace(this.traceId));
  }

  /** names: of the models that this gateway serves. */
  setModels(names) {
    const select = byId("model");
    const chosen = select.value;
    select.replaceChildren(...names.map((name) => make("option", { value: name, text: name })));
    if (names.includes(chosen)) select.value = chosen;
  }

  /** For those who may use the models and not see the mesh. */
  async askForModels() {
    try {
      this.setModels((await get("/v1/models")).data.map(({ id }) => id));
    } catch (error) {
      const select = byId("model");
      if (select.options.length === 0) select.replaceChildren(make("option", { value: "", text: error.isRefusal ? "a key is needed" : "not known yet" }));
    }
  }

  async ask() {
    if (this.running) return;
    const answer = new Answer();
    this.running = new AbortController();
    this.setRunning(true);
    announce("Generating");
    try {
      await stream("/v1/chat/completions", {
        body: request(),
        signal: this.running.signal,
        onOpen: (response) => {
          this.traceId = (response.headers.get("traceparent") ?? "").split("-")[1] ?? "";
        },
        onEvent: (event) => answer.take(event),
      });
      answer.end("");
    } catch (error) {
      answer.end(error.name === "AbortError" ? "stopped by you" : "", error.name === "AbortError" ? "" : error.message);
    } finally {
      this.running = null;
      this.setRunning(false);
      byId("answer-trace").hidden = !this.traceId;
    }
  }

  setRunning(isRunning) {
    byId("send").disabled = isRunning;
    byId("halt").disabled = !isRunning;
    if (isRunning) {
      this.traceId = "";
      byId("answer-trace").hidden = true;
    }
  }
}

function request() {
  const system = byId("system").value.trim();
  const user = { role: "user", content: byId("prompt").value };
  const body = {
    model: byId("model").value,
    messages: system ? [{ role: "system", content: system }, user] : [user],
    stream: true,
    stream_options: { include_usage: true },
  };
  for (const [id, name] of [["max-tokens", "max_tokens"], ["temperature", "temperature"], ["seed", "seed"]]) {
    const { value } = byId(id);
    if (value !== "") body[name] = Number(value);
  }
  const stops = byId("stop").value.split("\n").filter(Boolean);
  if (stops.length) body.stop = stops;
  return body;
}

/** What came of one question, measured here: from sending to the first text, and from that to the last. */
class Answer {
  constructor() {
    this.begun = performance.now();
    this.first = null;
    this.last = null;
    this.usage = null;
    this.reason = "";
    this.place = byId("answer");
    this.text = document.createTextNode("");
    this.thoughts = make("p", { class: "thoughts", hidden: true });
    this.place.replaceChildren(this.thoughts, this.text, make("span", { class: "caret", "aria-hidden": "true" }));
    setFacts(byId("answer-facts"), []);
  }

  take(event) {
    if (event === "[DONE]") return;
    if (event.error) throw new CallError(event.error.message);
    if (event.usage) this.usage = event.usage;
    const choice = event.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: thought } = choice.delta;
    if (content || thought) {
      this.last = performance.now();
      this.first ??= this.last;
      this.text.appendData(content ?? "");
      if (thought) {
        this.thoughts.hidden = false;
        this.thoughts.append(thought);
      }
      this.place.scrollTop = this.place.scrollHeight;
    }
    if (choice.finish_reason) this.reason = choice.finish_reason;
    this.show();
  }

  end(reason, problem = "") {
    this.place.querySelector(".caret")?.remove();
    if (reason) this.reason = reason;
    if (problem) this.place.append(make("p", { class: "problem", text: problem }));
    else if (!this.text.length && this.thoughts.hidden) this.place.append(make("p", { class: "empty", text: "The answer has no text." }));
    this.show();
    announce(problem || `The answer is complete: ${this.facts().map(([name, value]) => `${name} ${value}`).join(", ")}`);
  }

  show() {
    setFacts(byId("answer-facts"), this.facts());
  }

  facts() {
    const facts = [];
    if (this.first !== null) facts.push(["First token", duration((this.first - this.begun) / 1000)]);
    if (this.usage) {
      const made = this.usage.completion_tokens;
      const seconds = (this.last - this.first) / 1000;
      if (made > 1 && seconds > 0) facts.push(["Speed", `${count((made - 1) / seconds)} tokens/s`]);
      facts.push(["Answer", `${count(made)} tokens`]);
      const cached = this.usage.prompt_tokens_details?.cached_tokens ?? 0;
      facts.push(["Prompt", `${count(this.usage.prompt_tokens)} tokens, ${count(cached)} cached`]);
    }
    if (this.reason) facts.push(["Ended by", this.reason]);
    return facts;
  }
}
