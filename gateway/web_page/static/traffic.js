// Sliders that split a model's traffic among its groups. What is being moved is left alone until it is applied.
import { post } from "./api.js";
import { Keyed, announce, byId, make, setText, setWords } from "./dom.js";
import { percent } from "./format.js";

export class TrafficView {
  constructor() {
    this.place = byId("traffic");
    this.list = make("div");
    this.models = new Keyed(this.list, (model) => new ModelSplit(model.name));
  }

  clear() {
    this.place.replaceChildren(make("p", { class: "empty", text: "Operators split it." }));
  }

  update(mesh) {
    const models = new Map();
    for (const group of mesh.groups) models.set(group.model, [...(models.get(group.model) ?? []), group]);
    if (models.size === 0) {
      this.place.replaceChildren(make("p", { class: "empty", text: "No group serves a model yet." }));
      return;
    }
    if (this.list.parentNode !== this.place) this.place.replaceChildren(this.list);
    const items = [...models].map(([name, groups]) => ({ name, groups }));
    this.models.update(items, (model) => model.name);
  }
}

class ModelSplit {
  constructor(model) {
    this.model = model;
    this.dirty = false;
    this.groups = [];
    this.single = make("p", { class: "hint" });
    this.bar = make("div", { class: "bar split", "aria-hidden": "true" });
    const list = make("div");
    this.sliders = new Keyed(list, (group) => new Slider(group.name, () => this.moved()));
    this.apply = make("button", { type: "submit", class: "main steer", text: "Apply", disabled: true });
    this.undo = make("button", { type: "button", text: "Undo", disabled: true, on: { click: () => this.reset() } });
    this.words = make("p", { class: "problem", role: "alert", hidden: true });
    this.form = make(
      "form",
      { on: { submit: (event) => this.send(event) } },
      this.bar,
      list,
      make("p", { class: "buttons" }, this.apply, this.undo),
      this.words,
    );
    this.element = make("section", { "aria-label": `Traffic of ${model}` }, make("h4", { text: model }), this.single, this.form);
  }

  update({ groups }) {
    this.groups = groups;
    const isSplit = groups.length > 1;
    this.form.hidden = !isSplit;
    this.single.hidden = isSplit;
    if (!isSplit) {
      setText(this.single, `All of it goes to group ${groups[0].name}. A second group of this model could be given a share here.`);
      return;
    }
    this.sliders.update(groups, (group) => group.name);
    if (!this.dirty) this.reset();
  }

  reset() {
    const total = this.groups.reduce((sum, group) => sum + group.weight, 0);
    for (const group of this.groups) this.slider(group).value = total ? Math.round((group.weight / total) * 100) : 0;
    this.dirty = false;
    setWords(this.words, "");
    this.show();
  }

  moved() {
    this.dirty = true;
    this.show();
  }

  slider(group) {
    return this.sliders.views.get(group.name);
  }

  show() {
    const values = this.groups.map((group) => this.slider(group).value);
    const total = values.reduce((sum, value) => sum + value, 0);
    while (this.bar.children.length < values.length) this.bar.append(make("span"));
    while (this.bar.children.length > values.length) this.bar.lastChild.remove();
    this.groups.forEach((group, index) => {
      const part = total ? values[index] / total : 0;
      this.slider(group).show(part);
      this.bar.children[index].style.setProperty("width", `${part * 100}%`);
    });
    if (total === 0) setWords(this.words, "Some group must take the requests: move one slider up.");
    else if (this.words.textContent.startsWith("Some group")) setWords(this.words, "");
    this.apply.disabled = !this.dirty || total === 0;
    this.undo.disabled = !this.dirty;
  }

  async send(event) {
    event.preventDefault();
    const weights = Object.fromEntries(this.groups.map((group) => [group.name, this.slider(group).value]));
    this.apply.disabled = true;
    try {
      await post("/page/api/traffic", { model: this.model, weights });
      for (const group of this.groups) group.weight = weights[group.name];
      this.reset();
      announce(`Traffic of ${this.model} is split: ${this.groups.map((group) => `${group.name} ${this.slider(group).words}`).join(", ")}`);
    } catch (error) {
      setWords(this.words, error.message);
      this.apply.disabled = false;
    }
  }
}

class Slider {
  constructor(group, onMove) {
    const id = `weight-${group}`;
    this.input = make("input", { type: "range", id, min: "0", max: "100", step: "1", on: { input: onMove } });
    this.output = make("output", { for: id });
    this.element = make("p", { class: "slider" }, make("label", { for: id, text: group }), this.input, this.output);
  }

  get value() {
    return Number(this.input.value);
  }

  set value(value) {
    if (this.value !== value) this.input.value = String(value);
  }

  get words() {
    return this.output.textContent;
  }

  show(part) {
    setText(this.output, percent(part));
    this.input.setAttribute("aria-valuetext", percent(part));
  }

  update() {}
}
