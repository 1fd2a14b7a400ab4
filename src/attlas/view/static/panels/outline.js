// The outline of the text: a list of its documents, functions and paragraphs that leads to each, and a switch for the axes.

import { listStretches } from "../data/outlines.js";
import { formatInteger } from "../data/numbers.js";
import { describeKind, getStretchName } from "../map/brackets.js";
import { createDialog, make } from "./elements.js";
import { t } from "../words/words.js";

const MOST_ROWS = 300; // rows of the list; the field finds the others

/**
 * Mount the button among the tools of the map, and its dialog.
 *
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountOutline(element, { store, map, outlines, announce, uid, root }) {
  const openButton = make("button", { type: "button", title: t("Outline: functions, paragraphs, documents, and the way to each  o"), "aria-label": t("Outline") }, "≡");
  const buttonBox = make("div", { class: "moves", hidden: true }, openButton);
  openButton.addEventListener("click", () => store.set({ panel: "outline" }));
  element.querySelector("div")?.after(buttonBox);
  const dialog = createDialog(root, t("Outline of the text"), uid, () => {
    if (store.state.panel === "outline") store.set({ panel: "" });
  });
  dialog.element.classList.add("outline");
  const onAxes = make("input", { type: "checkbox" });
  onAxes.addEventListener("change", () => store.set({ outline: onAxes.checked ? "on" : "off" }));
  const finder = make("input", { class: "outline-find", type: "search", placeholder: t("Find by name"), "aria-label": t("Find by name"), autocomplete: "off", spellcheck: false });
  const list = make("ul", { class: "outline-list" });
  const message = make("p", { class: "outline-says", role: "status" });
  dialog.body.append(make("div", { class: "outline-head" }, finder, make("label", { class: "sink" }, onAxes, make("span", {}, t("brackets on the axes")))), list, message);

  /** @returns {{ side: Side | null, stretch: Stretch }[]} */
  function listRows() {
    const { query, key } = outlines.of(store.state);
    if (query === key) return listStretches(key).map((stretch) => ({ side: null, stretch }));
    const sides = /** @type {const} */ (["query", "key"]);
    return sides.flatMap((side) => listStretches({ query, key }[side]).map((stretch) => ({ side, stretch })));
  }
  /**
   * @param {Side | null} side
   * @param {Stretch} stretch
   */
  function goTo(side, stretch) {
    const { info, entry } = store.state;
    store.set({ panel: "" });
    if (!map.showPositions(side === "key" ? null : stretch, side === "query" ? null : stretch)) {
      announce(t("Layer {0} has none of it", info.entries[entry].layer));
      return;
    }
    announce(t("{0} {1}, tokens {2} to {3}", describeKind(stretch.kind), getStretchName(stretch), formatInteger(stretch.start), formatInteger(stretch.stop - 1)));
  }
  /**
   * @param {Side | null} side
   * @param {Stretch} stretch
   */
  function createRow(side, stretch) {
    const kind = side === null ? describeKind(stretch.kind) : t("{0}, {1}", t(side), describeKind(stretch.kind));
    const button = make("button", { type: "button", tabIndex: -1 }, make("span", { class: "outline-name" }, getStretchName(stretch)), make("span", { class: "outline-kind" }, kind), make("span", { class: "outline-place" }, `${formatInteger(stretch.start)}–${formatInteger(stretch.stop - 1)}`));
    button.style.setProperty("--depth", String(stretch.depth));
    button.addEventListener("click", () => goTo(side, stretch));
    return make("li", {}, button);
  }
  function showRows() {
    onAxes.checked = store.state.outline === "on";
    const wanted = finder.value.trim().toLowerCase();
    const rows = listRows();
    // Sentences stand in the list once they are searched for; where there is nothing else, at once.
    const hasOthers = rows.some(({ stretch }) => stretch.kind !== "sentence");
    const found = rows.filter(({ stretch }) => (wanted ? getStretchName(stretch).toLowerCase().includes(wanted) : !hasOthers || stretch.kind !== "sentence"));
    list.replaceChildren(...found.slice(0, MOST_ROWS).map(({ side, stretch }) => createRow(side, stretch)));
    setStop(0);
    message.textContent = !found.length ? t("No part has this name.") : found.length > MOST_ROWS ? t("The first {0} of {1}: a name finds the others.", formatInteger(MOST_ROWS), formatInteger(found.length)) : "";
  }
  const listButtons = () => /** @type {HTMLButtonElement[]} */ ([...list.querySelectorAll("button")]);
  const setStop = (/** @type {number} */ stop) => listButtons().forEach((button, index) => (button.tabIndex = index === stop ? 0 : -1));
  list.addEventListener("keydown", (event) => {
    const buttons = listButtons();
    const index = buttons.indexOf(/** @type {HTMLButtonElement} */ (event.target));
    const next = { ArrowUp: index - 1, ArrowDown: index + 1, Home: 0, End: buttons.length - 1 }[event.key];
    if (next === undefined || !buttons[next]) return;
    event.preventDefault();
    setStop(next);
    buttons[next].focus();
  });
  finder.addEventListener("input", showRows);
  finder.addEventListener("keydown", (event) => {
    if (event.key !== "Enter" && event.key !== "ArrowDown") return;
    event.preventDefault();
    const [first] = listButtons();
    if (event.key === "Enter") first?.click();
    else first?.focus();
  });

  function update() {
    const { panel } = store.state;
    buttonBox.hidden = !listRows().length;
    if (panel !== "outline" || buttonBox.hidden) return dialog.close();
    if (dialog.element.open) return showRows();
    finder.value = "";
    showRows();
    dialog.open();
    finder.focus();
    return undefined;
  }
  const subscriptions = [store.on(["panel", "entry", "batch", "outline"], update), outlines.on(update)];
  update();
  return {
    destroy() {
      for (const unsubscribe of subscriptions) unsubscribe();
      dialog.destroy();
      buttonBox.remove();
    },
  };
}
