// Keys that work everywhere on the page, save where somebody types.

import { headStep, layerStep } from "./shell.js";
import { headName } from "./numbers.js";

/** Listen to keys under `root`; returns the function that ends it. */
export function createKeys(root, { store, map, announce }) {
  const say = () => {
    const { info, entry, head } = store.state;
    announce(headName(info, entry, head));
  };
  const change = (patch) => {
    store.set(patch);
    say();
  };
  const actions = {
    "[": () => change(headStep(store.state, -1)),
    "]": () => change(headStep(store.state, 1)),
    "{": () => change(layerStep(store.state, -1)),
    "}": () => change(layerStep(store.state, 1)),
    "0": () => map.fit(),
    d: () => map.diagonal(),
    "+": () => map.zoomBy(1),
    "=": () => map.zoomBy(1),
    "-": () => map.zoomBy(-1),
    "/": () => store.set({ panel: "search" }),
    "?": () => store.set({ panel: store.state.panel === "help" ? "" : "help" }),
    n: () => store.set({ step: 1 }),
    p: () => store.set({ step: -1 }),
    Escape: () => escape(),
  };
  function escape() {
    const { panel, aside, view, hover, pin, pointed, tour } = store.state;
    if (panel) store.set({ panel: "" });
    else if (tour !== null) store.set({ tour: null });
    else if (view === "lines") store.set({ view: "map" });
    else if (aside === "grid") store.set({ aside: "both" });
    else if (map.crosshair()) map.crosshair(null);
    else if (pin) store.set({ pin: null });
    else if (pointed || hover) store.set({ pointed: null, hover: null, reading: null });
  }
  const pressed = (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = event.target.closest?.("input, textarea, select, [contenteditable]");
    if (typing && event.key !== "Escape") return;
    const act = actions[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  };
  // A page of its own hears keys wherever the focus is; a guest only inside itself.
  const ear = root.classList.contains("attlas-page") ? document : root;
  ear.addEventListener("keydown", pressed);
  return () => ear.removeEventListener("keydown", pressed);
}
