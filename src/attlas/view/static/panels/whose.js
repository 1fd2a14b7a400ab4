// Where several heads are shown: of which of them the text and its numbers are.

import { swapHeads } from "../data/state.js";
import { getHeadName, getMarkedHeadName } from "../data/numbers.js";
import { make } from "./elements.js";
import { t } from "../words/words.js";

/**
 * The name of the first head, with its colour where heads have one, or a button that shows the text of the second one;
 * nothing where one head is shown.
 *
 * @param {Store} store
 */
export function createWhose(store) {
  const name = make("span");
  const hue = make("i", { class: "hue", "data-hue": "0" });
  const other = make("button", { type: "button", class: "text-button", title: t("The two heads change places, with their texts and numbers") });
  other.addEventListener("click", () => store.set(swapHeads(store.state)));
  const element = make("p", { class: "whose", hidden: true }, hue, name, other);
  const show = (/** @type {State} */ { info, entry, head, second, compare }) => {
    element.hidden = compare === "none" || second === null;
    hue.hidden = compare !== "colours";
    name.textContent = t("of {0}", getHeadName(info, entry, head));
    other.hidden = compare === "colours";
    if (second) other.textContent = t("show {0}", getMarkedHeadName(info, second.entry, second.head));
  };
  show(store.state);
  const unsubscribe = store.on(["info", "entry", "head", "second", "compare"], show);
  return { element, destroy: unsubscribe };
}
