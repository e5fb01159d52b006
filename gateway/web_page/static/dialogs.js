// What is asked before something is changed. Dialogs are the browser's own: focus stays inside, Escape closes.
import { hasKey, post, setKey } from "./api.js";
import { announce, byId, make, setText, setWords } from "./dom.js";

export function prepareDialogs() {
  for (const button of document.querySelectorAll("[data-close]")) {
    button.addEventListener("click", () => button.closest("dialog").close());
  }
}

export class SwapDialog {
  constructor() {
    this.dialog = byId("swap-dialog");
    byId("swap-form").addEventListener("submit", (event) => this.send(event));
  }

  /** chips: what the mesh runs on, offered as back ends. */
  open(worker, chips) {
    this.worker = worker;
    setText(byId("swap-title"), `Swap the chip of ${worker}`);
    byId("backends").replaceChildren(...chips.map((chip) => make("option", { value: chip })));
    setWords(byId("swap-problem"), "");
    this.dialog.showModal();
    byId("swap-backend").focus();
  }

  async send(event) {
    event.preventDefault(); // It closes when the scheduler has taken the order.
    try {
      await post("/page/api/swap", this.order());
      this.dialog.close();
      announce(`The swap of ${this.worker} has begun`);
    } catch (error) {
      setWords(byId("swap-problem"), error.message);
    }
  }

  order() {
    const backend = byId("swap-backend").value.trim();
    const options = readOptions(byId("swap-options").value);
    if (byId("swap-emulate").checked) options.emulate = "true";
    return {
      worker: this.worker,
      backend,
      device: backend ? Number(byId("swap-device").value) : 0,
      options,
      model_path: byId("swap-model").value.trim(),
      never_pause: byId("swap-never-pause").checked,
    };
  }
}

/** Lines of KEY=VALUE. */
export function readOptions(text) {
  const options = {};
  for (const line of text.split("\n").map((each) => each.trim()).filter(Boolean)) {
    const at = line.indexOf("=");
    if (at < 1) throw new Error(`Options: ${line} has no form KEY=VALUE`);
    options[line.slice(0, at)] = line.slice(at + 1);
  }
  return options;
}

export class DrainDialog {
  constructor() {
    this.dialog = byId("drain-dialog");
    byId("drain-form").addEventListener("submit", (event) => this.send(event));
  }

  open(worker) {
    this.worker = worker;
    setText(byId("drain-title"), `Drain ${worker}`);
    setWords(byId("drain-problem"), "");
    this.dialog.showModal();
  }

  async send(event) {
    event.preventDefault();
    const { worker } = this;
    const drained = post("/page/api/drain", { worker, timeout_s: Number(byId("drain-timeout").value) });
    // A refusal comes at once; the answer, when it is drained, may take as long as its requests.
    const soon = await Promise.race([drained.then(() => "", (error) => error.message), later("", 700)]);
    if (soon) {
      setWords(byId("drain-problem"), soon);
      return;
    }
    this.dialog.close();
    announce(`${worker} drains`);
    drained.then(
      () => announce(`${worker} is drained`),
      (error) => announce(`${worker}: ${error.message}`),
    );
  }
}

const later = (value, ms) => new Promise((resolve) => setTimeout(resolve, ms, value));

export class KeyDialog {
  /** onKey: another key is there, or none any more. */
  constructor(onKey) {
    this.dialog = byId("key-dialog");
    this.onKey = onKey;
    byId("key-button").addEventListener("click", () => this.open());
    byId("key-form").addEventListener("submit", () => this.use(byId("key").value));
    byId("key-forget").addEventListener("click", () => {
      this.dialog.close();
      this.use("");
    });
  }

  open() {
    byId("key").value = "";
    byId("key-forget").hidden = !hasKey();
    this.dialog.showModal();
  }

  use(key) {
    setKey(key);
    byId("key").value = "";
    this.onKey();
  }
}
