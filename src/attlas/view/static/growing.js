// A text that goes on: the page with more tokens takes the place of the one before, as the user has left that.

import { FIELD_NAMES, isEqual } from "./data/state.js";

const AT_END = 4; // CSS pixels from the end of a text up to which it is followed as it grows

/**
 * What the user has changed while the page with more tokens was built. A map that shows the whole matrix shows all of the
 * new one.
 *
 * @param {Readonly<State>} before
 * @param {Pick<PageContext, "store" | "map">} page
 * @returns {Partial<State>}
 */
export function listChanges(before, { store, map }) {
  const place = ["row", "column", "zoom"];
  const fields = FIELD_NAMES.filter((field) => field !== "text" && !(map.fitted() && place.includes(field)));
  return Object.fromEntries(fields.filter((field) => !isEqual(before[field], store.state[field])).map((field) => [field, store.state[field]]));
}

/**
 * The element of one page that stands for an element of another: that of the same name, else of the same kind and number.
 *
 * @param {HTMLElement} element
 * @param {HTMLElement} from
 * @param {HTMLElement} to
 * @returns {HTMLElement | null}
 */
function findCounterpart(element, from, to) {
  const name = element.dataset.keep;
  if (name) return to.querySelector(`[data-keep="${name}"]`);
  const selector = [element.localName, ...element.classList].map((part) => CSS.escape(part)).join(".");
  const index = [...from.querySelectorAll(selector)].indexOf(element);
  return /** @type {HTMLElement | null} */ (to.querySelectorAll(selector)[index] ?? null);
}

/**
 * Scroll what can be scrolled on one page to where it is on another one; what is at its end follows the end.
 *
 * @param {HTMLElement} from
 * @param {HTMLElement} to
 */
export function keepScrolls(from, to) {
  for (const element of /** @type {NodeListOf<HTMLElement>} */ (from.querySelectorAll(".slot-heads, .heads-scroll, .slot-text, .flow"))) {
    const counterpart = findCounterpart(element, from, to);
    if (!counterpart) continue;
    const isAtEnd = element.matches(".flow") && element.scrollTop + element.clientHeight >= element.scrollHeight - AT_END;
    counterpart.scrollTop = isAtEnd ? counterpart.scrollHeight : element.scrollTop;
  }
}

/**
 * Returns the function that focuses on one page what is focused on another one, with what is marked in a text; of another
 * text, only controls that have a name.
 *
 * @param {HTMLElement} from
 * @param {HTMLElement} to
 * @param {boolean} isContinued
 */
export function moveFocus(from, to, isContinued) {
  const focused = /** @type {HTMLElement | null} */ (document.activeElement);
  const isMoved = focused && from.contains(focused) && (isContinued || focused.dataset.keep);
  const counterpart = isMoved ? findCounterpart(focused, from, to) : null;
  const [first, last] = focused instanceof HTMLTextAreaElement ? [focused.selectionStart, focused.selectionEnd] : [0, 0];
  return () => {
    counterpart?.focus({ preventScroll: true });
    if (counterpart instanceof HTMLTextAreaElement) counterpart.setSelectionRange(first, last);
  };
}
