// Four figures with two minutes of their past.
import { byId, make, setText } from "./dom.js";
import { count, duration, percent, plural } from "./format.js";
import { Sparkline } from "./sparkline.js";

class Tile {
  constructor(name) {
    this.value = make("strong", { text: "–" });
    this.unit = make("span", { class: "unit" });
    this.note = make("span", { class: "note" });
    this.line = new Sparkline();
    const figures = make("p", {}, this.value, " ", this.unit);
    this.element = make("li", { class: "tile" }, make("h3", { text: name }), figures, this.note, this.line.element);
  }

  show(value, unit, note) {
    setText(this.value, value);
    setText(this.unit, unit);
    setText(this.note, note);
  }
}

export class Tiles {
  constructor() {
    this.output = new Tile("Output");
    this.first = new Tile("First token");
    this.requests = new Tile("Requests");
    this.cache = new Tile("KV cache");
    const all = [this.output, this.first, this.requests, this.cache];
    byId("tiles").replaceChildren(...all.map((tile) => tile.element));
  }

  /** samples: of the gateway, a second each. load: of the mesh now, or null. */
  add(samples, load) {
    const last = samples.at(-1);
    if (!last) return;
    this.output.line.push(...samples.map((sample) => sample.tokens_per_s));
    this.output.show(count(last.tokens_per_s), "tokens/s", `${count(last.requests_per_s)} requests/s, by this gateway`);
    this.first.line.push(...samples.map((sample) => sample.ttft_p50_s));
    if (last.ttft_p50_s === null) this.first.show("–", "", "no request began lately");
    else this.first.show(duration(last.ttft_p50_s), "median", `90 % within ${duration(last.ttft_p90_s)}, last 15 s`);
    if (load) this.addLoad(load);
  }

  addLoad({ running, waiting, held, cached, total }) {
    this.requests.line.push(running + waiting);
    this.requests.show(count(running), "running", `${count(waiting)} waiting`);
    this.cache.line.push(total ? held / total : 0);
    if (total) this.cache.show(percent(held / total), "in use", `${percent(cached / total)} holds prefixes of ${plural(total, "page")}`);
    else this.cache.show("–", "", "no replica is attached");
  }
}

/** Sums over all replicas; requests that have no replica yet wait, too. */
export function loadOf(mesh) {
  const load = { running: 0, waiting: mesh.scheduler.waiting, held: 0, cached: 0, total: 0 };
  for (const group of mesh.groups) {
    for (const replica of group.replicas) {
      load.running += replica.running;
      load.waiting += replica.waiting;
      load.held += replica.pages.held;
      load.cached += replica.pages.cached;
      load.total += replica.pages.total;
    }
  }
  return load;
}
