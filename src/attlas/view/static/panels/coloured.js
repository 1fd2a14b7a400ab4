// Which heads have a colour in one map: a line for each, and a list to add one.

import { MOST_COLOURED, isSameHead, listColoured, toggleColoured } from "../data/coloured.js";
import { holdsHead } from "../data/held.js";
import { getHeadName, getLayerName } from "../data/numbers.js";
import { listHeads } from "../data/state.js";
import { canDivide, haveSameCells } from "../data/comparable.js";
import { make } from "./elements.js";
import { t } from "../words/words.js";

/**
 * Whether a head can have a colour beside those that are shown.
 *
 * @param {Pick<State, "info" | "entry">} state
 * @param {HeadPlace} place
 */
export function canBeColoured({ info, entry: first }, { entry, head }) {
  const [a, b] = [info.entries[first], info.entries[entry]];
  return haveSameCells(a, b) && b.readable !== false && canDivide(info, first, entry) && holdsHead(info, entry, head);
}

/**
 * The list of the heads that have a colour, for the box of comparisons.
 *
 * @param {Pick<PageContext, "store" | "announce">} context
 */
export function createColouredList({ store, announce }) {
  const list = make("ul", { class: "hue-list", "aria-label": t("Heads with a colour") });
  const select = make("select", { "aria-label": t("Add a head") });
  const element = make("div", { class: "hue-box", hidden: true }, list, select);
  let listedFor = "";

  /** @param {HeadPlace} place */
  function toggle(place) {
    const { state } = store;
    const patch = toggleColoured(state, place);
    if (!patch) return announce(t("All {0} colours are taken", MOST_COLOURED));
    store.set(patch);
    return announce(t("Heads with a colour: {0}", listColoured(store.state).length));
  }
  select.addEventListener("change", () => {
    const [entry, head] = select.value.split(":");
    toggle({ entry: Number(entry), head: head === "mean" ? head : Number(head) });
  });

  /**
   * @param {State} state
   * @param {HeadPlace[]} shown
   */
  function fillSelect(state, shown) {
    const { info } = state;
    const key = `${info.key}:${state.entry}:${shown.map(({ entry, head }) => `${entry}.${head}`).join()}`;
    if (key === listedFor) return;
    listedFor = key;
    const groups = info.entries.flatMap((entry, index) => {
      const heads = listHeads(entry).filter((head) => canBeColoured(state, { entry: index, head }) && !shown.some((each) => isSameHead(each, { entry: index, head })));
      return heads.length ? [make("optgroup", { label: getLayerName(info, index) }, ...heads.map((head) => make("option", { value: `${index}:${head}` }, getHeadName(info, index, head))))] : [];
    });
    select.replaceChildren(make("option", { value: "" }, t("add a head …")), ...groups);
    select.value = "";
    select.disabled = shown.length >= MOST_COLOURED || !groups.length;
  }

  return {
    element,
    toggle,
    /** @param {State} state */
    show(state) {
      element.hidden = state.compare !== "colours";
      if (element.hidden) return;
      const shown = listColoured(state);
      list.replaceChildren(
        ...shown.map((place, index) => {
          const name = getHeadName(state.info, place.entry, place.head);
          const removeButton = make("button", { type: "button", class: "icon", title: t("Take {0} away", name), "aria-label": t("Take {0} away", name) }, "×");
          removeButton.addEventListener("click", () => toggle(place));
          return make("li", {}, make("i", { class: "hue", "data-hue": String(index) }), make("span", {}, name), removeButton);
        }),
      );
      fillSelect(state, shown);
    },
  };
}
