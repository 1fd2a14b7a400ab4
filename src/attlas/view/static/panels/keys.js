// Keys that work everywhere on the page except in text fields.

import { stepHead, stepLayer } from "./shell.js";
import { getHeadName } from "../data/numbers.js";

/**
 * Listen to keys under `root`; returns the function that ends it.
 *
 * @param {HTMLElement} root
 * @param {PageContext} context
 */
export function createKeys(root, { store, map, announce }) {
  const announceHead = () => {
    const { info, entry, head } = store.state;
    announce(getHeadName(info, entry, head));
  };
  const applyPatch = (/** @type {Partial<State>} */ patch) => {
    store.set(patch);
    announceHead();
  };
  /** @type {Record<string, () => void>} */
  const actions = {
    "[": () => applyPatch(stepHead(store.state, -1)),
    "]": () => applyPatch(stepHead(store.state, 1)),
    "{": () => applyPatch(stepLayer(store.state, -1)),
    "}": () => applyPatch(stepLayer(store.state, 1)),
    "0": () => map.fit(),
    d: () => map.diagonal(),
    "+": () => map.zoomBy(1),
    "=": () => map.zoomBy(1),
    "-": () => map.zoomBy(-1),
    "/": () => store.set({ panel: "search" }),
    "?": () => store.set({ panel: store.state.panel === "help" ? "" : "help" }),
    w: () => store.set({ panel: store.state.panel === "why" ? "" : "why" }),
    o: () => store.set({ panel: store.state.panel === "outline" ? "" : "outline" }),
    m: () => store.set({ minimap: store.state.minimap === "on" ? "off" : "on" }),
    f: () => store.set({ flight: store.state.flight ? "" : "play" }),
    n: () => store.set({ step: 1 }),
    p: () => store.set({ step: -1 }),
    Escape: () => escape(),
  };
  function escape() {
    const { panel, aside, view, hover, pin, pointed, tour, story, flight } = store.state;
    if (panel) store.set({ panel: "" });
    else if (flight) store.set({ flight: "" });
    else if (tour !== null || story !== null) store.set({ tour: null, story: null });
    else if (view === "lines") store.set({ view: "map" });
    else if (aside === "grid") store.set({ aside: "both" });
    else if (map.crosshair()) map.crosshair(null);
    else if (pin) store.set({ pin: null });
    else if (pointed || hover) store.set({ pointed: null, hover: null, reading: null });
  }
  const handleKey = (/** @type {KeyboardEvent} */ event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey) return;
    const typing = /** @type {Element} */ (event.target).closest?.("input, textarea, select, [contenteditable]");
    if (typing && event.key !== "Escape") return;
    const action = actions[event.key];
    if (!action) return;
    event.preventDefault();
    action();
  };
  // A page listens to keys on the whole document; a notebook widget only inside itself.
  /** @type {Pick<HTMLElement, "addEventListener" | "removeEventListener">} */
  const keyTarget = root.classList.contains("attlas-page") ? document : root;
  keyTarget.addEventListener("keydown", handleKey);
  return () => keyTarget.removeEventListener("keydown", handleKey);
}
