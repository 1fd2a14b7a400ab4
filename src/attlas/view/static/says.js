// Over the map: one sentence on what the shown head does, and a dialog with the numbers behind it.

import { createDialog, make } from "./elements.js";
import { formatNumber, getHeadName, formatPercent } from "./numbers.js";
import { t } from "./words.js";

const otherMeasures = ["effective_keys", "distance", "entropy", "induction_text", "duplicate_text"]; // besides those that define kinds

/** Mount the lines, and the button of the box among the tools of the map. */
export function mountSays(element, { store, uid, root, tools }) {
  const headlineElement = make("b");
  const sentenceElement = make("span");
  const openButton = make("button", { type: "button", title: t("The numbers of this head, and from which value on it is called so") }, t("Evidence"));
  openButton.addEventListener("click", () => store.set({ panel: "head" }));
  const buttonBox = make("div", { hidden: true }, openButton);
  element.append(headlineElement, sentenceElement);
  tools.prepend(buttonBox);
  const dialog = createDialog(root, t("What this head does"), uid, () => {
    if (store.state.panel === "head") store.set({ panel: "" });
  });
  dialog.element.classList.add("why");
  dialog.body.tabIndex = 0;

  const update = (state) => {
    const { kind, compared, headline, sentence } = describeHead(state);
    headlineElement.textContent = headline;
    sentenceElement.textContent = sentence;
    buttonBox.hidden = !kind || Boolean(compared);
  };
  const fillDialog = ({ info, heads, entry, head }) => {
    const row = findRow(heads, entry, head);
    if (!row) return;
    const kinds = Object.entries(heads.kinds).filter(([, kind]) => kind.measure in row.values);
    kinds.sort(([a, first], [b, other]) => row.kinds.includes(b) - row.kinds.includes(a) || row.values[other.measure] - row.values[first.measure]);
    const measures = otherMeasures.map((each) => heads.columns.find((column) => column.name === each)).filter((column) => column && row.values[column.name] !== null);
    dialog.body.replaceChildren(
      make("p", { class: "why-lead" }, make("b", {}, `${getHeadName(info, entry, head)}: ${row.kinds.map((each) => t(each)).join(", ") || t("not known")}. `), t(heads.kinds[row.kinds[0]]?.does ?? "")),
      make("dl", { class: "why-kinds" }, ...kinds.map(([name, kind]) => createKindLine(name, kind, row.values[kind.measure], row.kinds.includes(name)))),
      make("dl", { class: "why-more" }, ...measures.map((column) => make("div", { title: t(column.description) }, make("dt", {}, t(column.label)), make("dd", {}, `${formatNumber(row.values[column.name])} ${t(column.unit)}`)))),
      make("h3", {}, t("This recording")),
      make("dl", { class: "why-about" }, ...(info.about ?? []).map(([title, sentences]) => make("div", {}, make("dt", {}, t(title)), make("dd", {}, createLinks(sentences.map((sentence) => t(...sentence)).join(t(" "))))))),
    );
  };
  const updateDialog = (state) => {
    if (state.panel !== "head") return dialog.close();
    fillDialog(state);
    return dialog.open();
  };
  update(store.state);
  updateDialog(store.state);
  const subscriptions = [store.on(["heads", "entry", "head", "second", "compare"], update), store.on(["panel", "heads", "entry", "head"], updateDialog)];
  return {
    destroy() {
      for (const unsubscribe of subscriptions) unsubscribe();
      dialog.destroy();
      buttonBox.remove();
      element.replaceChildren();
    },
  };
}

/** The text over the map: a headline, and a sentence with its number. */
export function describeHead({ info, heads, entry, head, second, compare }) {
  const row = findRow(heads, entry, head);
  const kind = heads?.kinds?.[row?.kinds[0]];
  const compared = second && compare !== "none" && { side: t("beside"), triangle: t("below the diagonal, above it"), ratio: t("divided by"), difference: t("less") }[compare] + " " + getHeadName(info, second.entry, second.head);
  const headline = `${getHeadName(info, entry, head)}${kind && !compared ? ` ${t(kind.headline)}` : ""}`;
  const sentence = compared || (kind ? t(kind.evidence, formatPercent(row.values[kind.measure] ?? 0)) : "");
  return { kind, compared, headline, sentence };
}

const findRow = (heads, entry, head) => heads?.rows.find((each) => each.entry === entry && each.head === head);

// The row of a kind: its score, and the threshold from which a head is of this kind.
function createKindLine(name, kind, value, reached) {
  const bar = make("span", { class: "why-bar", "aria-hidden": "true" }, make("i"), make("em"));
  bar.firstChild.style.width = `${100 * Math.min(1, value)}%`;
  bar.lastChild.style.left = `${100 * kind.threshold}%`;
  const definition = t(kind.definition);
  const rule = t("{0}: at least {1} %.", `${definition[0].toUpperCase()}${definition.slice(1)}`, Math.round(100 * kind.threshold));
  return make("div", { class: reached ? "reached" : "" }, make("dt", {}, t(name)), make("dd", {}, bar, make("span", { class: "why-share" }, formatPercent(value)), make("small", {}, rule)));
}

// A text with its addresses as links.
function createLinks(text) {
  const parts = make("span");
  for (const word of text.split(/(https:\/\/\S+)/)) parts.append(word.startsWith("https://") ? make("a", { href: word, rel: "noreferrer" }, word) : word);
  return parts;
}
