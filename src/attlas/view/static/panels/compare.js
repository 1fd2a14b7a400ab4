// A second head beside the first: which one, and how the two are shown.

import { make, createSegmented } from "./elements.js";
import { canCompare, canDivide } from "../data/comparable.js";
import { createColouredList } from "./coloured.js";
import { getHeadName, getLayerName } from "../data/numbers.js";
import { holdsHead } from "../data/held.js";
import { findCounterpart, listHeads, swapHeads } from "../data/state.js";
import { t } from "../words/words.js";

/** @returns {Option<Compare>[]} */
const listModes = () => [
  { value: "none", text: t("one"), title: t("The first head alone") },
  { value: "side", text: t("side by side"), title: t("Two maps that move together") },
  { value: "triangle", text: t("triangle"), title: t("The second head fills the empty triangle of a causal map") },
  { value: "ratio", text: t("log-ratio"), title: t("log₂ of the first weight over the second, cell by cell") },
  { value: "difference", text: t("difference"), title: t("The first weight less the second, cell by cell") },
  { value: "colours", text: t("colours"), title: t("Up to four heads in one map, a colour each") },
];

/** @param {Compare} compare */
const describeMode = (compare) => ({
  none: t("Shift + click a thumbnail (Shift + Enter on the keyboard) opens a second head too."),
  side: t("Two maps, one place and one zoom. The numbers in the text are of the first head."),
  triangle: t("Below the diagonal the first head, above it the second, mirrored into the pairs that a causal mask leaves empty."),
  ratio: t("log₂ of the first weight over the second: orange where the first head gives more, blue where the second does."),
  colours: t("A colour for each head: a cell has that of the head that gives it most, or a mixture, and the stronger the larger the weight. Ctrl + click a thumbnail adds a head or takes it away."),
  difference: t("The first weight less the second: orange where the first head gives more, blue where the second does."),
})[compare];

/**
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountCompare(element, { store, announce, uid }) {
  const box = make("div", { class: "compare-box", id: uid("compare"), role: "group", "aria-label": t("Compare two heads"), hidden: true });
  const openButton = make("button", { type: "button", class: "toggle", "aria-expanded": "false", "aria-controls": box.id }, t("Compare"));
  const headSelect = make("select", { "aria-label": t("Second head"), id: uid("second") });
  const swapButton = make("button", { type: "button", class: "icon", title: t("Swap the two heads"), "aria-label": t("Swap the two heads") }, "⇄");
  const modes = listModes();
  const modeButtons = createSegmented(t("How two heads are shown"), modes, (compare) => selectMode(compare));
  const coloured = createColouredList({ store, announce });
  const description = make("p", { class: "compare-says" });
  box.append(
    make("label", { class: "compare-label", htmlFor: headSelect.id }, t("Second head")),
    make("div", { class: "compare-line" }, headSelect, swapButton),
    modeButtons.element,
    coloured.element,
    description,
  );
  element.append(openButton, box);

  openButton.addEventListener("click", () => store.set({ panel: store.state.panel === "compare" ? "" : "compare" }));
  const closeOutside = (/** @type {PointerEvent} */ event) => {
    if (store.state.panel === "compare" && !element.contains(/** @type {Node} */ (event.target))) store.set({ panel: "" });
  };
  document.addEventListener("pointerdown", closeOutside);
  box.addEventListener("keydown", (event) => {
    if (event.key !== "Escape") return;
    event.stopPropagation();
    store.set({ panel: "" });
    openButton.focus();
  });

  /** @type {string | null} */
  let listedFor = null;
  function showHeads() {
    const { info, entry } = store.state;
    if (!info || listedFor === `${info.key}:${entry}`) return;
    listedFor = `${info.key}:${entry}`;
    const groups = info.entries.flatMap((layer, index) => {
      const heads = listHeads(layer).filter((head) => holdsHead(info, index, head));
      if (!heads.length || !canCompare(info, entry, index)) return [];
      const options = heads.map((head) => make("option", { value: `${index}:${head}` }, getHeadName(info, index, head)));
      return [make("optgroup", { label: getLayerName(info, index) }, ...options)];
    });
    headSelect.replaceChildren(make("option", { value: "" }, t("no second head")), ...groups);
  }
  /**
   * @param {string} value
   * @returns {HeadPlace}
   */
  const parse = (value) => {
    const [entry, head] = value.split(":");
    return { entry: Number(entry), head: head === "mean" ? "mean" : Number(head) };
  };
  /** @param {Compare} compare */
  function selectMode(compare) {
    const { second, info, entry, head } = store.state;
    if (compare !== "none" && second === null) {
      // No second head is chosen yet: take the next head of the layer.
      const heads = info.entries[entry].heads.length;
      const otherHeld = info.held?.find((each) => each.entry !== entry || each.head !== head);
      /** @type {HeadPlace} */
      const other = otherHeld ? otherHeld : heads > 1 ? { entry, head: head === "mean" ? 0 : (head + 1) % heads } : { entry, head: "mean" };
      store.set({ second: other, compare });
    } else store.set({ compare });
  }
  headSelect.addEventListener("change", () => {
    const second = headSelect.value ? parse(headSelect.value) : null;
    const { compare } = store.state;
    store.set({ second, compare: second === null ? "none" : compare === "none" ? "side" : compare });
  });
  swapButton.addEventListener("click", () => {
    store.set(swapHeads(store.state));
    announce(t("The two heads are swapped"));
  });

  function render() {
    const { info, entry, second, compare, panel } = store.state;
    if (!info) return;
    showHeads();
    const usable = second !== null && info.entries[second.entry] !== undefined && canCompare(info, entry, second.entry);
    if (second !== null && !usable) {
      store.set({ second: null, compare: "none" });
      announce(t("The second head has another shape and is closed"));
      return;
    }
    box.hidden = panel !== "compare";
    openButton.setAttribute("aria-expanded", String(!box.hidden));
    openButton.classList.toggle("on", compare !== "none");
    openButton.title = compare === "none" ? t("Show a second head") : t("Two heads are compared: {0}", modes.find(({ value }) => value === compare)?.text);
    description.textContent = describeMode(compare);
    coloured.show(store.state);
    headSelect.value = second === null ? "" : `${second.entry}:${second.head}`;
    swapButton.disabled = second === null;
    const layer = info.entries[entry];
    const causal = layer.causal && (second === null || info.entries[second.entry].causal);
    const divisible = canDivide(info, entry, second?.entry ?? entry);
    const reason = info.held ? t("This file holds one head only") : t("There is one head only");
    const isOnlyHead = info.held ? info.held.length < 2 : layer.heads.length < 2 && info.entries.length < 2;
    modeButtons.set(compare, {
      side: isOnlyHead && reason,
      triangle: isOnlyHead ? reason : !causal && t("Only a causal map has an empty triangle"),
      ratio: isOnlyHead ? reason : !divisible && t("Weights that may be negative are subtracted, and not divided"),
      colours: isOnlyHead ? reason : !divisible && t("Weights that may be negative have no colour of a head"),
      difference: isOnlyHead && reason,
    });
    if ((compare === "triangle" && !causal) || ((compare === "ratio" || compare === "colours") && !divisible)) store.set({ compare: compare === "ratio" ? "difference" : "side" });
  }
  // With a second recording, the second head follows the first.
  const unsubscribeHead = store.on(["entry", "head"], (state, changed) => {
    const { info, entry, head, second } = state;
    if (changed.includes("second") || !second || (info.entries[second.entry]?.recording ?? "") === (info.entries[entry].recording ?? "")) return;
    const other = findCounterpart(info, entry);
    if (other !== null) store.set({ second: { entry: other, head: head === "mean" ? head : Math.min(head, info.entries[other].heads.length - 1) } });
  });
  const unsubscribe = store.on(["info", "entry", "head", "second", "more", "compare", "panel"], render);
  render();
  return {
    destroy() {
      unsubscribe();
      unsubscribeHead();
      document.removeEventListener("pointerdown", closeOutside);
      element.replaceChildren();
    },
  };
}
