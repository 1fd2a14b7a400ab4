// The tour that a recording itself has: a few heads, each at a cell that shows what it does.

import { holdsHead } from "../data/held.js";
import { formatInteger, formatPercent } from "../data/numbers.js";
import { writeView } from "../data/state.js";
import { showWhitespace } from "../data/tokens.js";
import { clamp } from "../map/geometry.js";
import { t } from "../words/words.js";

const ZOOM = Math.log2(21); // cells of 21 CSS pixels, so that the tokens can be read
const EDGE_CELLS = 12; // from an edge of the matrix to the middle of the map, at least

/**
 * The steps of the tour of a page; none where it has none, or does not hold all of their heads.
 *
 * @param {Transport} transport
 * @param {Info} info
 * @returns {Promise<StoryStep[]>}
 */
export async function fetchSteps(transport, info) {
  const { json } = await transport.get("story", {});
  return json.steps.every(({ entry, head }) => holdsHead(info, entry, head)) ? json.steps : [];
}

/**
 * A step as a stop of a tour: its name, its sentence, and its place with the settings of the page as they are.
 *
 * @param {StoryStep} step
 * @param {Readonly<State>} state
 * @returns {Bookmark}
 */
export function createStop(step, state) {
  const { entry, head, i, j } = step;
  const { m, n } = state.info.entries[entry];
  const getMiddle = (/** @type {number} */ place, /** @type {number} */ size) => clamp(place + 0.5, Math.min(EDGE_CELLS, size / 2), Math.max(size - EDGE_CELLS, size / 2));
  /** @type {Partial<View>} */
  const place = { entry, head, batch: 0, variant: "plain", pin: { i, j }, row: getMiddle(i, m), column: getMiddle(j, n), zoom: ZOOM };
  /** @type {Partial<View>} */
  const alone = { second: null, compare: "none", view: "map", span: null, by: "query", heat: "pair", off: "" };
  return { ...describeStep(step), at: writeView({ ...state, ...place, ...alone }) };
}

/**
 * The name and the sentence of a step.
 *
 * @param {StoryStep} step
 */
function describeStep({ kind, i, j, weight, tokens }) {
  const [query, key] = tokens.map(showWhitespace);
  const values = [query, key, formatPercent(weight).replace(" ", "\u00a0"), formatInteger(i - j)];
  const isBack = () => t("From “{0}” it looks at “{1}”, {3} tokens back, with {2} of its weight.", ...values);
  /** @type {Record<string, () => [name: string, says: string]>} */
  const words = {
    induction: () => [t("Repeats."), t("From “{0}” it looks at “{1}”, which followed an earlier “{0}”, with {2} of its weight.", ...values)],
    "duplicate token": () => [t("The same token again."), t("From “{0}” it looks at an earlier “{1}”, {3} tokens back, with {2} of its weight.", ...values)],
    "previous token": () => [t("The token before."), t("From “{0}” it looks at “{1}”, the token before, with {2} of its weight.", ...values)],
    "fixed distance": () => [t("A fixed way back."), isBack()],
    "current token": () => [t("The token itself."), t("At “{0}” it stays on the token itself, with {2} of its weight.", ...values)],
    "first-token sink": () => [t("The first token."), t("From “{0}” it looks at “{1}”, the first token of the text, with {2} of its weight.", ...values)],
    local: () => [t("The neighbourhood."), isBack()],
    "one token": () => [t("One token, again and again."), isBack()],
  };
  const [name, says] = words[kind]();
  return { name, says };
}
