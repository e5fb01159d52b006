// Puts the page together: what comes over the live stream goes to the views, and what is wrong is said once, above.
import { hasKey } from "./api.js";
import { DrainDialog, KeyDialog, SwapDialog, prepareDialogs } from "./dialogs.js";
import { announce, byId, setText } from "./dom.js";
import { age } from "./format.js";
import { Live } from "./live.js";
import { MeshView } from "./mesh.js";
import { Playground } from "./playground.js";
import { Tiles, loadOf } from "./tiles.js";
import { TracesView } from "./traces.js";
import { TrafficView } from "./traffic.js";

const KEY_WORDS = {
  none: "This gateway shows the mesh, and lets it be steered, to those with an operator's key.",
  invalid_api_key: "The key that was entered is none of this gateway's.",
  operator_required: "The key that was entered is good for requests, and not an operator's: the playground works, the mesh stays hidden.",
};

const state = { link: "connecting", wantsKey: false, problem: "", mesh: null, meshStatus: "connecting", meshProblem: "", seenAt: 0, swaps: new Map() };

const tiles = new Tiles();
const swapDialog = new SwapDialog();
const drainDialog = new DrainDialog();
const meshView = new MeshView({
  onSwap: (worker) => swapDialog.open(worker, chipsOf(state.mesh)),
  onDrain: (worker) => drainDialog.open(worker),
});
const trafficView = new TrafficView();
const tracesView = new TracesView();
const playground = new Playground({ onTrace: (id) => tracesView.expect(id) });
const live = new Live({ onEvent: take, onLink: setLink });
const keyDialog = new KeyDialog(() => live.restart());

const EVENTS = {
  hello(event) {
    setText(byId("version"), event.version);
    byId("key-button").hidden = !event.needs_key;
    tracesView.setPlace(event.traces);
    tracesView.refresh();
    playground.setModels(event.models.map(({ name }) => name));
  },
  mesh(event) {
    state.meshStatus = event.status;
    state.meshProblem = event.problem;
    if (event.mesh) {
      state.mesh = event.mesh;
      state.seenAt = Date.now() - event.age_s * 1000;
      trafficView.update(event.mesh);
    }
    showMesh();
  },
  figures(event) {
    const isCurrent = state.mesh && state.meshStatus === "live";
    tiles.add(event.samples, isCurrent ? loadOf(state.mesh) : null);
    for (const sample of event.samples) meshView.addRates(sample.tokens_per_s_of_workers);
    if (isCurrent) state.seenAt = Date.now();
  },
  swaps(event) {
    for (const swap of event.swaps) {
      const before = state.swaps.get(swap.worker);
      if (before && !before.over && swap.over) announce(swap.error ? `The swap of ${swap.worker} failed: ${swap.error}` : `${swap.worker} is swapped`);
    }
    state.swaps = new Map(event.swaps.map((swap) => [swap.worker, swap]));
    showMesh();
  },
  traces() {
    tracesView.changed();
  },
};

function take(event) {
  EVENTS[event.kind]?.(event);
  showLink();
}

function setLink(link, error) {
  if (link === "lost" && state.link === "refused") return;
  if (link === "refused") {
    state.mesh = null;
    meshView.clear();
    trafficView.clear();
    playground.askForModels();
  }
  state.link = link;
  state.wantsKey = ["invalid_api_key", "operator_required"].includes(error?.code);
  state.problem = state.wantsKey ? KEY_WORDS[hasKey() ? error.code : "none"] : (error?.message ?? "");
  if (state.wantsKey || hasKey()) byId("key-button").hidden = false;
  showLink();
}

function showMesh() {
  if (state.mesh) meshView.update(state.mesh, state.swaps);
  showLink();
}

/** [state, word of the pill, sentence]; the age is added where the mesh is an old one. */
function describeLink() {
  if (state.link === "refused") return ["refused", state.wantsKey ? "Key needed" : "Refused", state.problem];
  if (state.link === "lost") return ["away", "Gateway away", "The gateway does not answer. This page tries again by itself."];
  if (state.link === "connecting" || state.meshStatus === "connecting") return ["connecting", "Connecting", ""];
  if (state.meshStatus === "away") {
    return ["away", "Scheduler away", `The scheduler does not answer: ${state.meshProblem}. This page tries again by itself, and streams that were accepted go on when it is back.`];
  }
  return ["live", "Live", ""];
}

let announced = "";

function showLink() {
  const [name, word, sentence] = describeLink();
  const isOld = name !== "live" && state.mesh !== null;
  byId("link").dataset.state = name;
  setText(byId("link-words"), isOld && name === "away" ? `${word}, ${age((Date.now() - state.seenAt) / 1000)}` : word);
  const old = isOld ? ` Below is the mesh as it was ${age((Date.now() - state.seenAt) / 1000)} ago.` : "";
  setText(byId("notice-words"), sentence && `${sentence}${old}`);
  byId("notice").hidden = !sentence;
  byId("notice").dataset.state = name;
  byId("notice-key").hidden = !(name === "refused" && state.wantsKey);
  byId("mesh").classList.toggle("closed", name === "refused");
  byId("mesh").classList.toggle("old", isOld);
  for (const button of document.querySelectorAll(".worker .steer")) button.disabled = name !== "live";
  if (announced !== name) {
    announced = name;
    announce(sentence || word);
  }
}

function chipsOf(mesh) {
  return [...new Set((mesh?.groups ?? []).flatMap((group) => group.replicas.map((replica) => replica.chip)).filter(Boolean))];
}

prepareDialogs();
setInterval(showLink, 1000);
byId("notice-key").addEventListener("click", () => keyDialog.open());
live.run();
