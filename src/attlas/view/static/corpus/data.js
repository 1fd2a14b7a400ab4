// The heads of one or more corpora: their measures, their selection, and whether the corpora share their heads.

import { formatNumber, formatInteger } from "../data/numbers.js";
import { t } from "../words/words.js";

export const LETTERS = "ABCDEFGH";

/**
 * The measures that a page offers: those of all its corpora, in the order of the first one, and the layer; for colours the kind too.
 *
 * @param {CorporaInfo<Corpus>} info
 * @param {boolean} [forColour]
 * @returns {Measure[]}
 */
export function listMeasures(info, forColour = false) {
  const others = info.corpora.slice(1).map((corpus) => new Set(corpus.measures.map((measure) => measure.name)));
  const shared = info.corpora[0].measures.filter((measure) => others.every((names) => names.has(measure.name)));
  const kind = forColour && info.corpora.every(({ rows }) => rows.kind) ? [{ name: "kind", label: t("Kind"), unit: "", description: t("The kind of head that its scores make it.") }] : [];
  return [...kind, ...shared, { name: "layer", label: t("Layer"), unit: "", description: t("Number of the layer, from the input to the output."), whole: true }];
}
/**
 * @param {CorporaInfo<Corpus>} info
 * @param {string} name
 */
export const findMeasure = (info, name) => listMeasures(info, true).find((measure) => measure.name === name) ?? null;

/**
 * The measure of a name that the page offers, as those of the state are.
 *
 * @param {CorporaInfo<Corpus>} info
 * @param {string} name
 */
export const getMeasure = (info, name) => /** @type {Measure} */ (findMeasure(info, name));

/**
 * What is shown of a measure, or of the kinds: one number or name for each head of a corpus; null where it is not known.
 *
 * @param {Corpus} corpus
 * @param {string} name
 * @returns {(number | string | null)[]}
 */
export const getShownValues = (corpus, name) => corpus.rows[name] ?? [];

/**
 * The numbers of one measure, one for each head of a corpus; null where it is not known.
 *
 * @param {Corpus} corpus
 * @param {string} name
 */
export const getValues = (corpus, name) => /** @type {(number | null)[]} */ (getShownValues(corpus, name));

/**
 * Whether all corpora were read by models with the same heads, so that a head of one is a head of the others.
 *
 * @param {CorporaInfo<Corpus>} info
 */
export function haveSameHeads(info) {
  const names = info.corpora.map(({ rows }) => rows.layer.map((layer, row) => `${layer}.${rows.head[row]}`).join());
  return names.every((name) => name === names[0]);
}

/**
 * @param {Corpus} corpus
 * @param {number} row
 */
export const formatHeadLabel = (corpus, row) => `${corpus.rows.layer[row]}·${corpus.rows.head[row]}`;
/** @param {CorpusHead} corpusHead */
export const formatHeadTitle = ({ layer, head }) => t("Layer {0}, head {1}", layer, head);
/**
 * @param {Corpus} corpus
 * @param {number} row
 */
export const getHead = (corpus, row) => ({ layer: corpus.rows.layer[row], head: corpus.rows.head[row] });

/**
 * The row of a head, -1 where a corpus does not have it.
 *
 * @param {Corpus} corpus
 * @param {CorpusHead | null} head
 */
export function findRow(corpus, head) {
  if (!head) return -1;
  const { rows } = corpus;
  return rows.layer.findIndex((layer, row) => layer === head.layer && rows.head[row] === head.head);
}

/**
 * The name of a measure with its unit, where the name does not say it.
 *
 * @param {Pick<Measure, "label" | "unit">} measure
 */
export const formatMeasureTitle = ({ label, unit }) => (unit && !label.toLowerCase().endsWith(unit) ? `${label} (${unit})` : label);

/**
 * A number of a measure with its unit.
 *
 * @param {Partial<Measure>} measure
 * @param {number | string | null | undefined} value
 */
export function formatValue(measure, value) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (typeof value === "string") return t(value);
  const text = measure.whole ? formatInteger(value) : formatNumber(value);
  return measure.unit ? `${text} ${measure.unit}` : text;
}

/**
 * The smallest and the largest known number of a measure over all corpora; wider than a point.
 *
 * @param {CorporaInfo<Corpus>} info
 * @param {string} name
 * @returns {[low: number, high: number]}
 */
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
/**
 * Whether a logarithmic axis can show a measure.
 *
 * @param {CorporaInfo<Corpus>} info
 * @param {string} name
 */
export const canLog = (info, name) => computeDomain(info, name)[0] > 0 && name !== "layer";

/**
 * For each corpus the rows within the brush as a set; null where nothing is brushed.
 *
 * @param {Pick<CorpusState, "info" | "brush" | "x" | "y">} state
 * @returns {(Set<number> | null)[]}
 */
export function getSelection({ info, brush, x, y }) {
  if (!brush || !info.corpora[brush.corpus]) return info.corpora.map(() => null);
  const findRows = (/** @type {Corpus} */ corpus) => {
    const [xs, ys] = [getValues(corpus, x), getValues(corpus, y)];
    const rows = new Set();
    for (let row = 0; row < xs.length; row++) {
      const [at, up] = [xs[row], ys[row]];
      if (at !== null && up !== null && at >= brush.x0 && at <= brush.x1 && up >= brush.y0 && up <= brush.y1) rows.add(row);
    }
    return rows;
  };
  const selected = findRows(info.corpora[brush.corpus]);
  const shared = haveSameHeads(info);
  return info.corpora.map((corpus, index) => (index === brush.corpus || shared ? selected : findRows(corpus)));
}

/**
 * The field `open` after a head of one corpus is opened; where corpora share their heads, it opens in all of them.
 *
 * @param {Pick<CorpusState, "info" | "open">} state
 * @param {number} corpus
 * @param {CorpusHead} head
 * @returns {CorpusHead[]}
 */
export function getOpenHeads({ info, open }, corpus, head) {
  const shared = haveSameHeads(info);
  return info.corpora.map((each, index) => {
    if (index === corpus || shared) return head;
    const previous = open?.[index];
    return previous ?? (findRow(each, head) >= 0 ? head : getHead(each, 0));
  });
}
