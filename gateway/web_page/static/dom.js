// Elements, made and kept. Whatever comes from the mesh or a model is set as text, never as HTML.

/** An element. fields: "text", "class", "on" (listeners by event), all else an attribute; false leaves one out. */
export function make(tag, fields = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(fields)) {
    if (name === "text") element.textContent = value;
    else if (name === "class") element.className = value;
    else if (name === "on") {
      for (const [event, act] of Object.entries(value)) element.addEventListener(event, act);
    } else if (value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children);
  return element;
}

export const byId = (id) => document.getElementById(id);

/** Sets text only where it differs: a screen reader and a selection are left alone. */
export function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

/** Shows an element with these words, or hides it where there are none. */
export function setWords(element, words) {
  setText(element, words);
  element.hidden = !words;
}

/** Says something once to those who do not see. */
export function announce(words) {
  setText(byId("announcer"), words);
}

/** Pairs of a definition list, kept in place while their values change. */
export function setFacts(list, pairs) {
  const names = pairs.map(([name]) => name).join("\n");
  if (list.dataset.names !== names) {
    list.dataset.names = names;
    list.replaceChildren(...pairs.map(([name]) => make("div", {}, make("dt", { text: name }), make("dd"))));
  }
  pairs.forEach(([, value], index) => setText(list.children[index].lastChild, value));
}

/** Children of `parent`, one view for each item. Views stay while their item does, so focus stays, too. */
export class Keyed {
  constructor(parent, makeView) {
    this.parent = parent;
    this.makeView = makeView;
    this.views = new Map();
  }

  update(items, keyOf) {
    const keys = items.map(keyOf);
    for (const [key, view] of this.views) {
      if (!keys.includes(key)) {
        view.element.remove();
        this.views.delete(key);
      }
    }
    items.forEach((item, index) => {
      let view = this.views.get(keys[index]);
      if (!view) {
        view = this.makeView(item);
        this.views.set(keys[index], view);
      }
      const place = this.parent.children[index];
      if (place !== view.element) this.parent.insertBefore(view.element, place ?? null);
      view.update(item);
    });
  }
}
