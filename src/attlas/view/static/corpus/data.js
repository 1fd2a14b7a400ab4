// The heads of one or more corpora: their measures, their selection, and whether the corpora share their heads.

import { formatNumber, formatInteger } from "../data/numbers.js";
import { t } from "../words/words.js";

export const LETTERS = "ABCDEFGH";

/** The measures that a page offers: those of all its corpora, in the order of the first one, and the layer; for colours the kind too. */
export function listMeasures(info, forColour = false) {
  const others = info.corpora.slice(1).map((corpus) => new Set(corpus.measures.map((measure) => measure.name)));
  const shared = info.corpora[0].measures.filter((measure) => others.every((names) => names.has(measure.name)));
  const kind = forColour && info.corpora.every(({ rows }) => rows.kind) ? [{ name: "kind", label: t("Kind"), unit: "", description: t("The kind of head that its scores make it.") }] : [];
  return [...kind, ...shared, { name: "layer", label: t("Layer"), unit: "", description: t("Number of the layer, from the input to the output."), whole: true }];
}
export const findMeasure = (info, name) => listMeasures(info, true).find((measure) => measure.name === name) ?? null;

/** The numbers of one measure, one for each head of a corpus; null where it is not known. */
export const getValues = (corpus, name) => corpus.rows[name] ?? [];

/** Whether all corpora were read by models with the same heads, so that a head of one is a head of the others. */
export function haveSameHeads(info) {
  const names = info.corpora.map(({ rows }) => rows.layer.map((layer, row) => `${layer}.${rows.head[row]}`).join());
  return names.every((name) => name === names[0]);
}

export const formatHeadLabel = (corpus, row) => `${corpus.rows.layer[row]}·${corpus.rows.head[row]}`;
export const formatHeadTitle = ({ layer, head }) => t("Layer {0}, head {1}", layer, head);
export const getHead = (corpus, row) => ({ layer: corpus.rows.layer[row], head: corpus.rows.head[row] });

/** The row of a head, -1 where a corpus does not have it. */
export function findRow(corpus, head) {
  if (!head) return -1;
  const { rows } = corpus;
  return rows.layer.findIndex((layer, row) => layer === head.layer && rows.head[row] === head.head);
}

/** The name of a measure with its unit, where the name does not say it. */
export const formatMeasureTitle = ({ label, unit }) => (unit && !label.toLowerCase().endsWith(unit) ? `${label} (${unit})` : label);

/** A number of a measure with its unit. */
export function formatValue(measure, value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value === "string") return t(value);
  const text = measure.whole ? formatInteger(value) : formatNumber(value);
  return measure.unit ? `${text} ${measure.unit}` : text;
}

/** The smallest and the largest known number of a measure over all corpora; wider than a point. */
export function computeDomain(info, name) {
  let [low, high] = [Infinity, -Infinity];
  for (const corpus of info.corpora) {
    for (const value of getValues(corpus, name)) {
      if (value === null) continue;
      if (value < low) low = value;
      if (value > high) high = value;
    }
  }
  if (low > high) return [0, 1];
  return low === high ? [low - 0.5, high + 0.5] : [low, high];
}
/** Whether a logarithmic axis can show a measure. */
export const canLog = (info, name) => computeDomain(info, name)[0] > 0 && name !== "layer";

/** For each corpus the rows within the brush as a set; null where nothing is brushed. */
export function getSelection({ info, brush, x, y }) {
  if (!brush || !info.corpora[brush.corpus]) return info.corpora.map(() => null);
  const findRows = (corpus) => {
    const [xs, ys] = [getValues(corpus, x), getValues(corpus, y)];
    const rows = new Set();
    for (let row = 0; row < xs.length; row++) {
      if (xs[row] !== null && ys[row] !== null && xs[row] >= brush.x0 && xs[row] <= brush.x1 && ys[row] >= brush.y0 && ys[row] <= brush.y1) rows.add(row);
    }
    return rows;
  };
  const selected = findRows(info.corpora[brush.corpus]);
  const shared = haveSameHeads(info);
  return info.corpora.map((corpus, index) => (index === brush.corpus || shared ? selected : findRows(corpus)));
}

/** The field `open` after a head of one corpus is opened; where corpora share their heads, it opens in all of them. */
export function getOpenHeads({ info, open }, corpus, head) {
  const shared = haveSameHeads(info);
  return info.corpora.map((each, index) => {
    if (index === corpus || shared) return head;
    const previous = open?.[index];
    return previous ?? (findRow(each, head) >= 0 ? head : getHead(each, 0));
  });
}
