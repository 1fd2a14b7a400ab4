// The page of a head: its numbers among all heads, their spread over the texts, its distances and tokens, and sampled texts.

import { drawHistogram, drawSpread, drawStrip, drawTokenBars } from "./charts.js";
import { getHead, formatHeadTitle, LETTERS, findRow, formatMeasureTitle, getValues } from "./data.js";
import { createSample } from "./text.js";
import { make, createSegmented } from "../panels/elements.js";
import { createSaveButtons } from "../panels/figure.js";
import { readLook } from "../map/look.js";
import { formatNumber, formatPercent, formatInteger, getOrdinalSuffix } from "../data/numbers.js";
import { showWhitespace } from "../data/tokens.js";
import { language, t } from "../words/words.js";

const shownTokens = 12;

/**
 * The numbers of a head by what they are about: names of measures under a heading; what is in none comes last.
 *
 * @param {Measure[]} measures
 * @returns {[heading: string, measures: Measure[]][]}
 */
function groupMeasures(measures) {
  /** @type {[heading: string, names: string[]][]} */
  const groups = [
    [t("Where it looks"), ["qk_distance", "qk_distance_variance", "first", "near", "previous", "current", "fixed", "fixed_distance", "self_attention_score", "prev_token_score"]],
    [t("What it looks for"), ["induction", "induction_text", "induction_score", "duplicate", "duplicate_text", "favourite"]],
    [t("How sharply"), ["entropy", "effective_keys", "breadth", "max_weight", "mean_max_activation", "max_activation"]],
  ];
  const known = new Set(groups.flatMap(([, names]) => names));
  groups.push([t("Other numbers"), measures.flatMap(({ name }) => (known.has(name) ? [] : [name]))]);
  return groups.map(([heading, names]) => [heading, measures.filter(({ name }) => names.includes(name))]);
}

/**
 * One column: a head of one corpus. `partners()` gives the answers of the heads beside it, so that axes are shared.
 *
 * @param {HeadContext} context
 * @param {number} corpusIndex
 * @param {CorpusHead} head
 * @param {() => HeadAnswer[]} partners
 */
export function createHeadColumn(context, corpusIndex, head, partners) {
  const { store, transport, root, announce } = context;
  const corpus = store.state.info.corpora[corpusIndex];
  const several = store.state.info.corpora.length > 1;
  const row = findRow(corpus, head);
  const columnTitle = `${several ? `${LETTERS[corpusIndex]}: ` : ""}${formatHeadTitle(head)}`;
  const element = make("div", { class: "head-column" });
  /** @type {{ element: HTMLElement, repaint: () => void, destroy: () => void }[]} */
  const samples = [];
  /** @type {{ plot: HTMLElement, render: () => void }[]} */
  const figures = [];
  const peakMeasure = /** @type {Measure} */ ({ ...corpus.measures.find(({ name }) => name === "max_activation"), label: t("Peak of a text") });
  /** @type {HeadAnswer | null} */
  let answer = null;
  let destroyed = false;
  const controller = new AbortController();

  // ---------------------------------------------------------------------------------------------------- the parts

  const headSelect = make("select", { class: "pick-head", "aria-label": several ? t("Head of {0}", corpus.title) : t("Head") }, ...corpus.rows.layer.map((_, each) => make("option", { value: String(each) }, formatHeadTitle(getHead(corpus, each)))));
  headSelect.value = String(row);
  headSelect.addEventListener("change", () => context.openHead(corpusIndex, getHead(corpus, Number(headSelect.value))));
  const kind = corpus.kinds.find(([name]) => name === corpus.rows.kind?.[row]);
  const kindLine = kind ? make("p", { class: "head-kind" }, make("b", {}, t("{0}. ", t(kind[0]))), t(kind[1])) : null;
  const numbers = make("div", { class: "head-numbers", role: "group", "aria-label": t("Numbers of this head over the corpus") });
  const plots = make("div", { class: "head-plots" });
  const textsElement = make("section", { class: "head-texts" });
  const loadingMessage = make("p", { class: "head-wait", role: "status" }, t("Reading …"));
  element.append(several ? make("div", { class: "head-of" }, make("b", { class: "letter" }, LETTERS[corpusIndex]), make("span", {}, corpus.title), headSelect) : make("div", { class: "head-of" }, headSelect, make("span", {}, t("{0} over {1} texts", corpus.model, formatInteger(corpus.texts)))), ...(kindLine ? [kindLine] : []), loadingMessage, textsElement, numbers, plots);

  /**
   * @param {() => string} title
   * @param {() => string} explain
   * @param {DrawFigure} draw
   * @param {number} height
   * @param {string} [wide]
   */
  function addFigure(title, explain, draw, height, wide = "") {
    const plot = make("div", { class: "plot" });
    plot.style.height = height ? `${height}px` : "";
    /** @type {SVGSVGElement | null} */
    let drawn = null;
    const get = () => drawn && { figure: drawn, look: readLook(root), title: `${columnTitle}: ${title().toLowerCase()}`, caption: `${corpus.title}, ${t("{0} over {1} texts", corpus.model, formatInteger(corpus.texts))}` };
    const [heading, explanation] = [make("h3", {}), make("p", { class: "plot-says" })];
    const part = make("figure", { class: `figure ${wide}` }, make("div", { class: "figure-head" }, heading, createSaveButtons(title().toLowerCase(), get, announce)), explanation, plot);
    const render = () => {
      heading.textContent = title();
      explanation.textContent = explain();
      if (!answer || plot.clientWidth < 60) return;
      drawn = draw(Math.floor(plot.clientWidth), height, readLook(root));
      plot.replaceChildren(drawn ?? make("p", { class: "plot-none" }, t("Not known for this head.")));
    };
    figures.push({ plot, render });
    resizeObserver.observe(plot);
    plots.append(part);
  }
  const resizeObserver = new ResizeObserver((changes) => {
    for (const { target } of changes) figures.find(({ plot }) => plot === target)?.render();
  });

  // The numbers of the head, each with a strip of all heads and a button that shows its distribution over the texts.
  function showNumbers() {
    const look = readLook(root);
    const createLine = (/** @type {Measure} */ measure) => {
      const values = getValues(corpus, measure.name);
      const value = values[row];
      const known = values.filter((each) => each !== null);
      const rank = value === null ? null : 1 + known.filter((each) => each > value).length;
      const words = rank === null ? t("not known") : t("{0}{1} of {2}", formatInteger(rank), language === "en" ? getOrdinalSuffix(rank) : "", formatInteger(known.length));
      const pressable = { type: "button", title: t("{0} Show its spread over the texts.", measure.description), "aria-pressed": String(store.state.measure === measure.name) };
      const button = make(measure.spread ? "button" : "div", { class: "number", ...(measure.spread ? pressable : { title: measure.description }) },
        make("span", { class: "number-name" }, formatMeasureTitle(measure)), make("span", { class: "number-value" }, formatNumber(value)), make("span", { class: "number-rank", title: t("from the highest on") }, words), drawStrip({ values, value, width: 150, look, label: `${words}, ${t("from the highest on")}` }));
      if (measure.spread) button.addEventListener("click", () => {
        store.set({ measure: measure.name });
        /** @type {HTMLElement | null} */ (numbers.querySelector('[aria-pressed="true"]'))?.focus();
      });
      return button;
    };
    const groups = groupMeasures(corpus.measures).filter(([, measures]) => measures.length);
    numbers.replaceChildren(...groups.map(([heading, measures]) => make("section", {}, make("h3", {}, heading), make("div", { class: "number-group" }, ...measures.map(createLine)))));
  }
  const getMeasure = () => /** @type {Measure} */ (corpus.measures.find(({ name }) => name === store.state.measure));
  const getAnswer = () => /** @type {HeadAnswer} */ (answer); // where it has come
  const getDistribution = (/** @type {HeadAnswer | null} */ each, /** @type {string} */ name) => (each?.distributions[name]?.texts ? each.distributions[name] : null);
  /**
   * The spread of a measure over the texts, on an axis that all columns share.
   *
   * @param {() => Measure} measure
   * @param {[low: number, high: number]} [fixed]
   * @returns {DrawFigure}
   */
  function createSpreadDrawer(measure, fixed) {
    return (width, height, look) => {
      const { name, label } = measure();
      const distribution = getDistribution(answer, name);
      if (!distribution) return null;
      const all = [answer, ...partners()].map((each) => getDistribution(each, name)).filter((each) => each !== null);
      /** @type {[low: number, high: number]} */
      let domain = fixed ?? [Math.min(...all.map(({ min }) => min)), Math.max(...all.map(({ max }) => max))];
      if (domain[0] === domain[1]) domain = [domain[0] - 0.5, domain[1] + 0.5];
      const [low, , median, , high] = distribution.box.map((value) => formatNumber(value));
      const words = t("{0} over {1} texts: median {2}, 90 % of the texts between {3} and {4}", label, formatInteger(distribution.texts), median, low, high);
      return drawSpread({ distribution, domain, width, height, look, label: words, title: formatMeasureTitle(measure()), markedValue: fixed ? null : getValues(corpus, name)[row] });
    };
  }
  /**
   * @param {TokenSide} side
   * @returns {DrawFigure}
   */
  const createBarsDrawer = (side) => (width, _, look) => {
    const shares = (getAnswer().tokens[side] ?? []).slice(0, shownTokens).map(([token, share]) => ({ token, share }));
    return shares.length ? drawTokenBars({ tokens: shares, width, look, label: shares.map(({ token, share }) => `${showWhitespace(token)} ${formatPercent(share)}`).join(", "), showText: showWhitespace }) : null;
  };

  function addFigures() {
    addFigure(() => t("{0}, text by text", getMeasure().label), () => t("{0} Bars: share of the texts; box: their middle half and median; whiskers: 5 % to 95 %; line: all texts as one.", getMeasure().description), createSpreadDrawer(getMeasure), 220);
    addFigure(() => t("Distance to the key"), () => t("How far back the attention goes, in bins that double."), (width, height, look) => drawHistogram({ ...getAnswer().distance, width, height, look, linear: false, title: t("Distance (tokens)"), label: t("Attention by distance") }), 220);
    addFigure(() => t("Peak of each text"), () => t("Largest weight in a text, outside of its first token. The texts above are sampled by it."), createSpreadDrawer(() => peakMeasure, [0, 1]), 220);
    addFigure(() => t("Tokens that look"), () => t("Queries by the attention that they give to their 8 favourites."), createBarsDrawer("query"), 0);
    addFigure(() => t("Favourite tokens"), () => t("Keys by the attention that they get as one of the 8 favourites."), createBarsDrawer("key"), 0);
    addFigure(() => t("Tokens that are looked at"), () => t("Keys by all the attention that they get, the first token of each text aside."), createBarsDrawer("key_mass"), 0);
  }

  // ---------------------------------------------------------------------------------------------------- the texts

  function showTexts() {
    for (const sample of samples.splice(0).reverse()) sample.destroy();
    const answer = getAnswer();
    const intervals = [...new Set(answer.samples.map(({ interval }) => interval))].sort((a, b) => b - a);
    if (!intervals.length) {
      textsElement.replaceChildren(make("h3", {}, t("Sampled texts")), make("p", { class: "plot-none" }, store.state.info.offline ? t("This file holds no texts of this head.") : t("No texts were kept.")));
      return;
    }
    const now = intervals.includes(store.state.interval) ? store.state.interval : intervals[0];
    const formatRange = (/** @type {number} */ interval) => {
      const bounds = answer.intervals?.[interval - 1];
      return bounds ? `${formatNumber(bounds[0], 3)}–${formatNumber(bounds[1], 3)}` : String(interval);
    };
    const options = intervals.map((interval, k) => ({ value: interval, text: k === 0 ? t("highest {0}", formatRange(interval)) : formatRange(interval), title: t("Texts whose largest weight is in interval {0} of {1}", interval, corpus.intervals) }));
    const pick = createSegmented(t("Interval of the largest weight"), options, (interval) => {
      store.set({ interval });
      /** @type {HTMLElement | null} */ (textsElement.querySelector('.segmented [aria-pressed="true"]'))?.focus();
    });
    pick.set(now);
    const list = make("div", { class: "samples" });
    textsElement.replaceChildren(
      make("div", { class: "figure-head" }, make("h3", {}, t("Sampled texts by their largest weight"))),
      make("p", { class: "plot-says" }, t("Point at a token, or move with the arrow keys."), " ", make("span", { class: "key-word" }, t("Blue: what it looks at.")), " ", make("span", { class: "query-word" }, t("Orange: what looks at it.")), " ", t("The 8 largest weights of each token were kept.")),
      pick.element,
      list,
    );
    answer.samples.forEach((sample, index) => {
      if (sample.interval !== now) return;
      const card = createSample(context, sample, {
        title: columnTitle,
        whyNot: corpus.open,
        fetchText: async () => (await transport.get("sample", { corpus: corpusIndex, row, index }, { signal: controller.signal })).json,
        openMap: async () => context.openMap(corpusIndex, row, sample),
      });
      samples.push(card);
      list.append(card.element);
    });
  }

  const draw = () => figures.forEach(({ render }) => render());
  showNumbers();
  transport.get("head", { corpus: corpusIndex, row }, { signal: controller.signal }).then(({ json }) => {
    if (destroyed) return;
    answer = json;
    loadingMessage.remove();
    addFigures();
    draw();
    showTexts();
    context.answered(corpusIndex, json);
  }).catch((error) => {
    if (!destroyed) loadingMessage.textContent = t("This head cannot be shown: {0}.", error.message);
  });
  const subscriptions = [
    store.on(["measure"], () => {
      showNumbers();
      draw();
    }),
    store.on(["dark"], () => {
      showNumbers();
      draw();
      samples.forEach((sample) => sample.repaint());
    }),
    store.on(["interval"], () => answer && showTexts()),
  ];
  return {
    element,
    draw,
    destroy() {
      destroyed = true;
      controller.abort();
      resizeObserver.disconnect();
      for (const unsubscribe of subscriptions) unsubscribe();
      samples.forEach((sample) => sample.destroy());
      element.remove();
    },
  };
}
