// Over the map: one sentence on what the shown head does, and a dialog with the numbers behind it.

import { listColoured } from "../data/coloured.js";
import { createDialog, make } from "./elements.js";
import { formatNumber, getHeadMark, getHeadName, getMarkedHeadName, formatPercent, isRollout } from "../data/numbers.js";
import { isSigned } from "../data/weighting.js";
import { t } from "../words/words.js";

const kindsOnBlock = ["induction", "duplicate"]; // measures whose sentences say that they are about random tokens
const otherMeasures = ["effective_keys", "distance", "entropy", "induction_text", "duplicate_text"]; // besides those that define kinds

/**
 * Mount the lines, and the button of the box among the tools of the map.
 *
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountSays(element, { store, uid, root, tools }) {
  const headlineElement = make("b");
  const sentenceElement = make("span", { class: "says-sentence" });
  const textElement = make("span", { class: "says-text" });
  const openButton = make("button", { type: "button", title: t("The numbers of this head, and from which value on it is called so") }, t("Evidence"));
  openButton.addEventListener("click", () => store.set({ panel: "head" }));
  const buttonBox = make("div", { hidden: true }, openButton);
  element.append(headlineElement, sentenceElement, textElement);
  tools.prepend(buttonBox);
  const dialog = createDialog(root, t("What this head does"), uid, () => {
    if (store.state.panel === "head") store.set({ panel: "" });
  });
  dialog.element.classList.add("why");
  dialog.body.tabIndex = 0;

  const update = (/** @type {State} */ state) => {
    const { kind, compared, headline, sentence, onText } = describeHead(state);
    headlineElement.textContent = headline;
    sentenceElement.textContent = sentence;
    element.classList.toggle("of-two", Boolean(compared)); // two names may take two lines
    element.classList.toggle("has-text", Boolean(state.heads?.rows.some((row) => row.on_text))); // for all heads, so that nothing moves between them
    textElement.textContent = textElement.title = onText.replaceAll(" %", "\u00a0%"); // no line begins with %
    buttonBox.hidden = !kind || Boolean(compared);
  };
  const fillDialog = (/** @type {State} */ { info, heads, entry, head }) => {
    const row = findRow(heads, entry, head);
    if (!heads || !row) return;
    const own = row.measures ?? row.values; // what the head is, measured elsewhere or on this text
    const kinds = Object.entries(heads.kinds).filter(([, kind]) => kind.measure in own);
    const getScore = (/** @type {Kind} */ kind) => own[kind.measure] ?? 0;
    kinds.sort(([a, first], [b, other]) => Number(row.kinds.includes(b)) - Number(row.kinds.includes(a)) || getScore(other) - getScore(first));
    const names = [...(row.measures ? kinds.map(([, kind]) => kind.measure) : []), ...otherMeasures];
    const measures = names.flatMap((each) => heads.columns.filter((column) => column.name === each && row.values[each] !== null));
    dialog.body.replaceChildren(
      make("p", { class: "why-lead" }, make("b", {}, `${getHeadName(info, entry, head)}: ${row.kinds.map((each) => t(each)).join(", ") || t("not known")}. `), t(heads.kinds[row.kinds[0]]?.does ?? "")),
      ...(row.measures ? [make("h3", {}, describeSource(/** @type {MeasuredOn} */ (heads.on)))] : []),
      make("dl", { class: "why-kinds" }, ...kinds.map(([name, kind]) => createKindLine(name, kind, getScore(kind), row.kinds.includes(name)))),
      ...(row.measures && measures.length ? [make("h3", {}, t("On this text"))] : []),
      make("dl", { class: "why-more" }, ...measures.map((column) => make("div", { title: t(column.description) }, make("dt", {}, t(column.label)), make("dd", {}, `${formatNumber(row.values[column.name])} ${t(column.unit)}`)))),
      make("h3", {}, t("This recording")),
      make("dl", { class: "why-about" }, ...(info.about ?? []).map(([title, sentences]) => make("div", {}, make("dt", {}, t(title)), make("dd", {}, createLinks(sentences.map((sentence) => t(...sentence)).join(t(" "))))))),
    );
  };
  const updateDialog = (/** @type {State} */ state) => {
    if (state.panel !== "head") return dialog.close();
    fillDialog(state);
    return dialog.open();
  };
  update(store.state);
  updateDialog(store.state);
  const subscriptions = [store.on(["heads", "entry", "head", "second", "compare", "more"], update), store.on(["panel", "heads", "entry", "head"], updateDialog)];
  return {
    destroy() {
      for (const unsubscribe of subscriptions) unsubscribe();
      dialog.destroy();
      buttonBox.remove();
      element.replaceChildren();
    },
  };
}

/**
 * The text over the map: a headline on what the head is, a sentence with its number, and what it does on the text that is shown.
 *
 * @param {Pick<State, "info" | "heads" | "entry" | "head" | "second" | "compare" | "more">} state
 */
export function describeHead(state) {
  const { info, heads, entry, head, second, compare } = state;
  const row = findRow(heads, entry, head);
  const kind = heads?.kinds?.[row?.kinds[0] ?? ""];
  const named = second && { side: t("beside"), triangle: t("below the diagonal, above it"), ratio: t("divided by"), difference: t("less"), colours: t("in one map with"), none: "" }[compare] + " " + getMarkedHeadName(info, second.entry, second.head);
  const compared = compare !== "none" && named;
  if (second && compare === "colours") return { kind, compared, headline: getHeadName(info, entry, head), sentence: t("Colours of {0} heads in one map. Text, curves at the edges and lists are of this one.", listColoured(state).length), onText: "" };
  const headline = `${compared ? getMarkedHeadName(info, entry, head) : getHeadName(info, entry, head)}${compared ? ` ${compared}` : kind ? ` ${t(kind.headline)}` : ""}`;
  if (second && compared) return { kind, compared, headline, sentence: describeBoth(info, heads, [{ entry, head }, second]), onText: "" };
  if (isRollout(info.entries[entry])) return { kind, compared, headline, sentence: t("How much of each token all layers up to here bring to each: the product of half the mean of the heads and half the token itself."), onText: "" };
  if (!kind || !row) return { kind, compared, headline, sentence: isSigned({ info, entry }) ? t("Weights may be negative: blue is above 0, red below.") : describeProgress(heads), onText: "" };
  const sentence = t(kind.evidence, formatPercent(row.share ?? 0));
  const said = row.on_text;
  const onText = said ? t("On this text: {0}", t(heads.kinds[said.kind].on_text, formatPercent(said.share), formatPercent(said.chance ?? 0))) : "";
  return { kind, compared, headline, sentence: row.measures && !kindsOnBlock.includes(kind.measure) ? withSource(/** @type {MeasuredOn} */ (heads.on), kind, sentence) : sentence, onText };
}

/**
 * What each of two heads does, as far as it is known: "2·4 remembers what came next; 3·2 attends to the token before".
 *
 * @param {Info} info
 * @param {HeadTable | null} heads
 * @param {HeadPlace[]} places
 */
function describeBoth(info, heads, places) {
  const known = places.flatMap(({ entry, head }) => {
    const kind = heads?.kinds?.[findRow(heads, entry, head)?.kinds[0] ?? ""];
    return kind ? [`${getHeadMark(info, entry, head)} ${t(kind.headline)}`] : [];
  });
  return known.length === 2 ? t("{0}; {1}", known[0], known[1]) : known[0] ?? describeProgress(heads);
}

/**
 * How far the statistics of all heads are, which are computed in the background; "" when they are there.
 *
 * @param {Pick<HeadTable, "progress"> | null} heads
 */
export function describeProgress(heads) {
  return heads && heads.progress < 1 ? t("Measuring the heads: {0} %.", Math.floor(100 * heads.progress)) : "";
}

// Where it was measured what the heads are, as a title.
/** @param {MeasuredOn} source */
function describeSource({ what, name }) {
  return { text: t("In {0}", name), corpus: t("Over the texts of {0}", name), random: t("On random tokens that occur twice") }[what];
}

/**
 * The sentence of a head with the text that its number is about; that of a mixed head has no number.
 *
 * @param {MeasuredOn} source
 * @param {Kind} kind
 * @param {string} sentence
 */
function withSource({ what, name }, { measure }, sentence) {
  if (!measure) return sentence;
  return { text: t("In {0}: {1}", name, sentence), corpus: t("Over the texts of {0}: {1}", name, sentence), random: t("On random tokens: {0}", sentence) }[what];
}

/**
 * @param {HeadTable | null} heads
 * @param {number} entry
 * @param {HeadIndex} head
 */
const findRow = (heads, entry, head) => heads?.rows.find((each) => each.entry === entry && each.head === head);

/**
 * The row of a kind: its score, and the threshold from which a head is of this kind.
 *
 * @param {string} name
 * @param {Kind} kind
 * @param {number} value
 * @param {boolean} reached
 */
function createKindLine(name, kind, value, reached) {
  const [score, threshold] = [make("i"), make("em")];
  const bar = make("span", { class: "why-bar", "aria-hidden": "true" }, score, threshold);
  score.style.width = `${100 * Math.min(1, value)}%`;
  threshold.style.left = `${100 * kind.threshold}%`;
  const definition = t(kind.definition);
  const rule = t("{0}: at least {1} %.", `${definition[0].toUpperCase()}${definition.slice(1)}`, Math.round(100 * kind.threshold));
  return make("div", { class: reached ? "reached" : "" }, make("dt", {}, t(name)), make("dd", {}, bar, make("span", { class: "why-share" }, formatPercent(value)), make("small", {}, rule)));
}

// A text with its addresses as links.
/** @param {string} text */
function createLinks(text) {
  const parts = make("span");
  for (const word of text.split(/(https:\/\/\S+)/)) parts.append(word.startsWith("https://") ? make("a", { href: word, rel: "noreferrer" }, word) : word);
  return parts;
}
