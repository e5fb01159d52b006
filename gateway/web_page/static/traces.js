// Recent traces, and one of them as a waterfall: who did what when.
import { get } from "./api.js";
import { Keyed, announce, byId, make, setText } from "./dom.js";
import { age, duration, plural } from "./format.js";

const REFRESH_MS = 1500;
const MOST_LISTED = 50;
const STILL_GROWING_S = 20;

export class TracesView {
  constructor() {
    this.place = byId("waterfall");
    this.selected = "";
    this.drawn = "";
    this.timer = 0;
    this.list = new Keyed(byId("trace-list"), (trace) => new TraceLine(trace, (id) => this.select(id)));
  }

  /** where: "here", "elsewhere" or "off". */
  setPlace({ where, endpoint }) {
    this.isHere = where === "here";
    byId("trace-list").hidden = !this.isHere;
    this.place.hidden = !this.isHere;
    const words = {
      here: "A sample of requests, through every process that had a part in them. Newest first.",
      elsewhere: `This gateway sends its traces to ${endpoint}: look at them there.`,
      off: "Traces are off. Set page.traces_listen of this gateway, and tracing of every service to that address; chipmesh up does so by itself.",
    };
    setText(byId("traces-where"), words[where]);
  }

  /** Spans came; the list is read again soon, and not for each of them. */
  changed() {
    if (!this.isHere || this.timer) return;
    this.timer = setTimeout(() => this.refresh(), REFRESH_MS);
  }

  async refresh() {
    clearTimeout(this.timer);
    this.timer = 0;
    if (!this.isHere) return;
    try {
      const { traces } = await get("/page/api/traces");
      this.show(traces.slice(0, MOST_LISTED));
      const selected = traces.find((trace) => trace.trace_id === this.selected);
      if (selected && Date.now() / 1000 - selected.begin_unix_s < STILL_GROWING_S) await this.draw();
    } catch {
      return; // The live stream says what is wrong with the gateway.
    }
  }

  show(traces) {
    const list = byId("trace-list");
    if (traces.length === 0) {
      list.replaceChildren(make("li", { class: "empty", text: "No trace yet. Ask something in the playground." }));
      return;
    }
    list.querySelector(".empty")?.remove();
    this.list.update(traces, (trace) => trace.trace_id);
    this.mark();
  }

  mark() {
    for (const [id, line] of this.list.views) line.setCurrent(id === this.selected);
  }

  async select(id) {
    this.selected = id;
    this.mark();
    await this.draw();
    this.place.scrollIntoView({ block: "nearest" });
  }

  /** One that may not have come yet: its spans are sent a second or so after they end. */
  async expect(id) {
    byId("traces").scrollIntoView();
    this.place.focus({ preventScroll: true });
    this.selected = id;
    this.drawn = "";
    this.place.replaceChildren(make("p", { class: "empty", text: "Its spans are on their way." }));
    for (let tries = 0; tries < 8 && this.selected === id; tries += 1) {
      if (await this.draw()) break;
      await new Promise((resolve) => setTimeout(resolve, 700));
    }
    await this.refresh();
    if (this.selected === id && !this.drawn) {
      this.place.replaceChildren(make("p", { class: "empty", text: "This request is not in the sample: only some a second are traced." }));
    }
  }

  async draw() {
    const id = this.selected;
    let trace;
    try {
      trace = await get(`/page/api/traces/${id}`);
    } catch {
      return false;
    }
    const state = `${id} ${trace.span_count}`;
    if (id !== this.selected || state === this.drawn) return true;
    this.drawn = state;
    const open = new Set([...this.place.querySelectorAll("details[open]")].map((row) => row.dataset.span));
    const focused = document.activeElement.closest("#waterfall details")?.dataset.span;
    this.place.replaceChildren(...waterfall(trace));
    for (const row of this.place.querySelectorAll("details")) {
      row.open = open.has(row.dataset.span);
      if (row.dataset.span === focused) row.firstChild.focus({ preventScroll: true });
    }
    announce(`Trace ${trace.name}: ${plural(trace.span_count, "span")}, ${duration(trace.duration_s)}`);
    return true;
  }
}

class TraceLine {
  constructor(trace, onSelect) {
    this.name = make("span", { class: "name" });
    this.note = make("span", { class: "note" });
    this.time = make("span", { class: "time" });
    this.button = make("button", { type: "button", on: { click: () => onSelect(trace.trace_id) } }, this.name, this.time, this.note);
    this.element = make("li", {}, this.button);
  }

  update(trace) {
    setText(this.name, trace.is_under_way ? "Under way" : trace.name || "unnamed");
    setText(this.time, duration(trace.duration_s));
    const ago = age(Math.max(0, Date.now() / 1000 - trace.begin_unix_s));
    setText(this.note, `${ago} ago, ${plural(trace.span_count, "span")}${trace.is_under_way ? " so far" : ""}${trace.error ? `, ${trace.error}` : ""}`);
    this.button.classList.toggle("failed", trace.error !== "");
  }

  setCurrent(isCurrent) {
    if (isCurrent) this.button.setAttribute("aria-current", "true");
    else this.button.removeAttribute("aria-current");
  }
}

function waterfall(trace) {
  const whole = Math.max(trace.duration_s, 1e-9);
  const services = [...new Set(trace.spans.map((span) => span.service))];
  const rows = ordered(trace.spans).map(({ span, depth }) => row(span, depth, whole, services.indexOf(span.service) % 6));
  const words = `${plural(trace.span_count, "span")} in ${duration(trace.duration_s)}, by ${services.join(", ")}`;
  const head = [make("h3", { text: trace.name }), make("p", { class: "hint", text: words })];
  if (trace.left_out) head.push(make("p", { class: "hint", text: `${plural(trace.left_out, "span")} more are not kept` }));
  return [...head, make("p", { class: "hint id", text: `Trace ${trace.trace_id}` }), make("div", { class: "rows" }, ...rows)];
}

/** Depth first; children in the order of their begin. A span whose parent is not here is a root. */
function ordered(spans) {
  const ids = new Set(spans.map((span) => span.span_id));
  const children = new Map();
  for (const span of spans) {
    const parent = ids.has(span.parent_id) && span.parent_id !== span.span_id ? span.parent_id : "";
    children.set(parent, [...(children.get(parent) ?? []), span]);
  }
  const rows = [];
  const visit = (id, depth) => {
    for (const span of children.get(id) ?? []) {
      rows.push({ span, depth });
      visit(span.span_id, depth + 1);
    }
  };
  visit("", 0);
  return rows;
}

function row(span, depth, whole, colour) {
  const bar = make("span", { class: "span-bar" });
  bar.style.setProperty("left", `${(span.begin_s / whole) * 100}%`);
  bar.style.setProperty("width", `${(span.duration_s / whole) * 100}%`);
  const ticks = span.events.map((event) => {
    const tick = make("span", { class: "tick" });
    tick.style.setProperty("left", `${((span.begin_s + event.at_s) / whole) * 100}%`);
    return tick;
  });
  const name = make("span", { class: "span-name", text: span.name });
  name.style.setProperty("--depth", String(Math.min(depth, 8)));
  const summary = make(
    "summary",
    {},
    name,
    make("span", { class: "span-service", text: span.service.replace(/^chipmesh-/, "") }),
    make("span", { class: "track", "aria-hidden": "true" }, bar, ...ticks),
    make("span", { class: "span-time", text: duration(span.duration_s) }),
  );
  const facts = [...Object.entries(span.attributes), ...span.events.map((event) => [`${event.name} at ${duration(span.begin_s + event.at_s)}`, attributesOf(event)])];
  const list = make("dl", { class: "facts" }, ...facts.map(([key, value]) => make("div", {}, make("dt", { text: key }), make("dd", { text: String(value) }))));
  const body = facts.length ? list : make("p", { class: "empty", text: "Nothing more is known of it." });
  const error = span.error ? [make("p", { class: "problem", text: span.error })] : [];
  return make("details", { "data-span": span.span_id, class: `span colour-${colour}${span.error ? " failed" : ""}` }, summary, ...error, body);
}

const attributesOf = (event) => Object.entries(event.attributes).map(([key, value]) => `${key} ${value}`).join(", ");
