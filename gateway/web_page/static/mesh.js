// Groups and their workers, each kept in place while its numbers change.
import { Keyed, byId, make, setFacts, setText, setWords } from "./dom.js";
import { age, count, percent, plural } from "./format.js";
import { Sparkline } from "./sparkline.js";

const STATES = { attaching: "attaching", ready: "ready", draining: "draining", lost: "lost", on_trial: "on trial", kept_out: "kept out" };

export class MeshView {
  /** onSwap, onDrain: given a worker's name. */
  constructor({ onSwap, onDrain }) {
    this.place = byId("groups");
    this.list = make("div");
    this.groups = new Keyed(this.list, () => new GroupView({ onSwap, onDrain }));
  }

  update(mesh, swaps) {
    if (mesh.groups.length === 0) {
      this.place.replaceChildren(
        make("p", { class: "empty", text: "No worker has registered yet. Start one with chipmesh worker, or a whole mesh with chipmesh up." }),
      );
    } else {
      if (this.list.parentNode !== this.place) this.place.replaceChildren(this.list);
      const totals = new Map();
      for (const group of mesh.groups) totals.set(group.model, (totals.get(group.model) ?? 0) + group.weight);
      const items = [...mesh.groups].sort(byName("name")).map((group) => ({ group, swaps, share: share(group.weight, totals.get(group.model)) }));
      this.groups.update(items, ({ group }) => group.name);
    }
    const { scheduler } = mesh;
    setFacts(byId("scheduler-facts"), [
      ["Up", age(scheduler.uptime_s)],
      ["Gateways", count(scheduler.gateways)],
      ["Without a replica", plural(scheduler.waiting, "request")],
      ["Process", `pid ${scheduler.pid}, release ${scheduler.version}`],
    ]);
  }

  /** Who may not see the mesh any more sees none. */
  clear() {
    this.place.replaceChildren(make("p", { class: "empty", text: "The mesh is shown to operators." }));
    byId("scheduler-facts").replaceChildren();
    delete byId("scheduler-facts").dataset.names;
  }

  /** rates: tokens per second by worker, of this gateway's clients; one sample. */
  addRates(rates) {
    for (const group of this.groups.views.values()) {
      for (const [name, worker] of group.workers.views) worker.addRate(rates[name] ?? 0);
    }
  }
}

/** worker-2 before worker-10. */
const byName = (field) => (a, b) => a[field].localeCompare(b[field], "en", { numeric: true });

const share = (weight, total) => (total > 0 ? weight / total : 0);

class GroupView {
  constructor({ onSwap, onDrain }) {
    this.name = make("h3");
    this.model = make("span", { class: "hint" });
    this.share = make("span", { class: "tag" });
    this.words = make("p", { class: "problem", hidden: true });
    this.shadow = make("p", { class: "hint", hidden: true });
    this.empty = make("p", { class: "empty", text: "No worker of this group is here." });
    const list = make("ul", { class: "workers" });
    this.workers = new Keyed(list, (replica) => new WorkerView(replica.replica.worker, { onSwap, onDrain }));
    const head = make("header", {}, this.name, this.model, this.share);
    this.element = make("section", { class: "card group" }, head, this.words, this.shadow, this.empty, list);
  }

  update({ group, swaps, share: part }) {
    setText(this.name, group.name);
    setText(this.model, group.model);
    setText(this.share, `${percent(part)} of traffic`);
    setWords(this.words, group.rolled_back ? `Its guard took its traffic away: ${group.rolled_back}` : "");
    setWords(this.shadow, shadowWords(group.shadow));
    this.empty.hidden = group.replicas.length > 0;
    const items = [...group.replicas].sort(byName("worker")).map((replica) => ({ replica, swap: swaps.get(replica.worker) }));
    this.workers.update(items, ({ replica }) => replica.worker);
  }
}

function shadowWords(shadow) {
  if (!shadow) return "";
  const found = shadow.compared ? `${count(shadow.identical)} of ${count(shadow.compared)} answers alike` : "none compared yet";
  return `${percent(shadow.share)} is mirrored to ${shadow.shadow_group}: ${found}`;
}

class WorkerView {
  constructor(worker, { onSwap, onDrain }) {
    this.chip = make("span", { class: "chip" });
    this.emulated = make("span", { class: "tag", text: "emulated" });
    this.state = make("span", { class: "state" });
    this.load = new Gauge("Load", 1);
    this.pages = new Gauge("KV", 2);
    this.rate = make("span", { class: "note" });
    this.line = new Sparkline(60);
    this.swap = make("button", { type: "button", class: "steer", text: "Swap", "aria-label": `Swap the chip of ${worker}`, on: { click: () => onSwap(worker) } });
    this.drain = make("button", { type: "button", class: "steer", text: "Drain", "aria-label": `Drain ${worker}`, on: { click: () => onDrain(worker) } });
    this.words = make("p", { class: "problem", hidden: true });
    this.progress = new SwapProgress(worker);
    this.facts = make("dl", { class: "facts row" });
    this.element = make(
      "li",
      { class: "worker" },
      make("div", { class: "who" }, make("h4", { text: worker }), this.chip, this.emulated, this.state),
      make("div", { class: "gauges" }, this.load.element, this.pages.element),
      make("div", { class: "rate" }, this.line.element, this.rate),
      make("div", { class: "acts" }, this.swap, this.drain),
      this.words,
      this.progress.element,
      make("details", {}, make("summary", { text: "More", "aria-label": `More about ${worker}` }), this.facts),
    );
  }

  addRate(tokensPerSecond) {
    this.line.push(tokensPerSecond);
    setText(this.rate, `${count(tokensPerSecond)} tok/s`);
  }

  update({ replica, swap }) {
    setText(this.chip, replica.chip || "no chip");
    this.emulated.hidden = !replica.emulated;
    setText(this.state, STATES[replica.state] ?? replica.state);
    this.element.dataset.state = replica.state;
    const slots = replica.max_running_requests;
    const waiting = replica.waiting ? `, ${count(replica.waiting)} wait` : "";
    this.load.show([share(replica.running, slots)], slots ? `${count(replica.running)} of ${count(slots)}${waiting}` : "not attached");
    const { held, cached, total } = replica.pages;
    const pages = total ? `${percent(held / total)} used, ${percent(cached / total)} cached` : "no pages";
    this.pages.show([share(held, total), share(cached, total)], pages);
    setWords(this.words, replica.message);
    this.progress.update(swap);
    setFacts(this.facts, factsOf(replica));
  }
}

function factsOf(replica) {
  return [
    ["Executor", `pid ${replica.executor_pid}`],
    ["Supervisor", `pid ${replica.supervisor_pid}`],
    ["Epoch", count(replica.epoch)],
    ["Last step", count(replica.step_seq)],
    ["Page", plural(replica.page_size_tokens, "token")],
    ["Pages", count(replica.pages.total)],
    ["Chunk", plural(replica.chunk_tokens, "token")],
    ["Retracted", count(replica.retracted_count)],
    ["Numerics", replica.numeric_class],
  ];
}

class Gauge {
  constructor(name, parts) {
    this.fills = Array.from({ length: parts }, () => make("span"));
    this.words = make("span", { class: "words" });
    const bar = make("span", { class: "bar", "aria-hidden": "true" }, ...this.fills);
    this.element = make("p", { class: "gauge" }, make("span", { class: "name", text: name }), bar, this.words);
  }

  show(shares, words) {
    shares.forEach((part, index) => this.fills[index].style.setProperty("width", `${(part * 100).toFixed(1)}%`));
    setText(this.words, words);
  }
}

class SwapProgress {
  constructor(worker) {
    this.bar = make("progress", { max: "1", "aria-label": `Swap of ${worker}` });
    this.words = make("span");
    this.element = make("p", { class: "swap", hidden: true }, this.bar, this.words);
  }

  update(swap) {
    this.element.hidden = !swap;
    if (!swap) return;
    this.element.classList.toggle("problem", swap.error !== "");
    this.bar.hidden = swap.over;
    this.bar.value = swap.fraction;
    const to = swap.backend || "the same chip";
    if (swap.error) setText(this.words, `The swap to ${to} failed: ${swap.error}`);
    else if (swap.over) setText(this.words, `Swapped to ${to} in ${swap.seconds.toFixed(1)} s`);
    else setText(this.words, `Swapping to ${to}: ${swap.stage}${swap.fraction ? ` ${percent(swap.fraction)}` : ""}`);
  }
}
