// One sampled text of a head: the keys of a token in one colour and its queries in another, as shades and lines.

import { make } from "../panels/elements.js";
import { createFlow } from "../panels/flow.js";
import { createSaveButtons, createSvg, createSvgRoot } from "../panels/figure.js";
import { readLook } from "../map/look.js";
import { formatPercent, formatInteger } from "../data/numbers.js";
import { showWhitespace } from "../data/tokens.js";
import { t } from "../words/words.js";

const maxLines = 24; // of each side, for the largest weights; shades show all weights
const maxListed = 4;

/**
 * The kept weights of a text, by query and by key: `getPairs(place)` gives {keys, queries} as [place, weight], largest first; places count from the first token that is shown.
 *
 * @param {Pick<SampleText, "counts" | "keys" | "weights" | "first">} text
 */
export function indexWeights({ counts, keys: positions, weights, first }) {
  const keys = positions.map((position) => position - first);
  /** @type {Map<number, WeightPair[]>} */
  const byKey = new Map();
  const starts = new Int32Array(counts.length + 1);
  for (let query = 0; query < counts.length; query++) {
    starts[query + 1] = starts[query] + counts[query];
    for (let i = starts[query]; i < starts[query + 1]; i++) {
      const pairs = byKey.get(keys[i]) ?? [];
      pairs.push([query, weights[i]]);
      byKey.set(keys[i], pairs);
    }
  }
  const sortDescending = (/** @type {WeightPair[]} */ pairs) => pairs.sort((a, b) => b[1] - a[1]);
  return {
    getPairs(/** @type {number} */ position) {
      const [from, to] = [starts[position], starts[position + 1]];
      return { keys: sortDescending(Array.from({ length: to - from }, (_, k) => [keys[from + k], weights[from + k]])), queries: sortDescending([...(byKey.get(position) ?? [])]) };
    },
  };
}

/**
 * A card for a text: {interval, text, length, largest, query, key}; `fetchText()` gives its tokens and weights.
 *
 * @param {CorpusContext} context
 * @param {SampleFacts} sample
 * @param {{ title: string, fetchText: () => Promise<SampleText>, openMap: () => Promise<void>, whyNot: string | null }} options
 */
export function createSample({ root, uid, announce }, sample, { title, fetchText, openMap, whyNot }) {
  const waiting = make("p", { class: "sample-wait" }, "…");
  const frame = make("div", { class: "sample-frame" }, waiting);
  const keysLine = make("p", { class: "sample-line looks" });
  const queriesLine = make("p", { class: "sample-line looked" });
  const refusal = make("p", { class: "sample-line bad", hidden: true });
  const map = make("button", { type: "button", class: "toggle sample-map", disabled: Boolean(whyNot), title: whyNot ?? t("Record this text and open every weight of this head on it") }, t("Open the full map"));
  const why = whyNot ? make("span", { class: "unseen", id: uid("why") }, whyNot) : null;
  if (why) map.setAttribute("aria-describedby", why.id);
  const name = sample.name.replace(/^.*[\\/](?=.)/, "");
  const facts = [t("{0} tokens", formatInteger(sample.length)), sample.start ? t(" from {0} on", formatInteger(sample.start)) : "", sample.cut ? t(", {0} of them here", formatInteger(sample.cut)) : "", t("; peak {0}", formatPercent(sample.largest))].join("");
  const element = make(
    "article",
    { class: "sample" },
    make("div", { class: "sample-head" }, make("div", { class: "sample-words" }, make("b", { title: sample.name }, name), make("span", {}, facts)), createSaveButtons(t("text"), getFigure, announce), map, why),
    refusal,
    frame,
    keysLine,
    queriesLine,
  );
  /** @type {SampleText | null} */
  let text = null;
  /** @type {ReturnType<typeof indexWeights> | null} */
  let weights = null;
  /** @type {Flow | null} */
  let flow = null;
  /** @type {SVGSVGElement | null} */
  let overlay = null;
  let pinned = sample.query;
  /** @type {number | null} */
  let hovered = null;
  /** @type {{ keys: Map<number, number>, queries: Map<number, number> }} */
  let shown = { keys: new Map(), queries: new Map() };
  let loading = false;
  let destroyed = false;

  map.addEventListener("click", async () => {
    map.disabled = true;
    refusal.hidden = true;
    map.textContent = t("Recording the text …");
    try {
      await openMap();
    } catch (error) {
      announce(`${error.message}.`);
      refusal.textContent = t("The map cannot be opened: {0}.", error.message);
      refusal.hidden = false;
    }
    map.disabled = false;
    map.textContent = t("Open the full map");
  });

  async function load() {
    if (loading) return;
    loading = true;
    try {
      text = await fetchText();
    } catch (error) {
      waiting.textContent = t("The text cannot be shown: {0}.", error.message);
      loading = false;
      return;
    }
    if (destroyed) return;
    weights = indexWeights(text);
    pinned = Math.min(text.tokens.length - 1, Math.max(0, sample.query - text.first));
    const { tokens: all } = text;
    /** @type {FlowTokens} */
    const tokens = { length: all.length, prefetch() {}, peek: (position) => all[position] ?? null, joined: () => null };
    flow = createFlow({ label: t("{0}: point at a token", name), uid, paint, onHover: hoverToken, onPick: pinToken, first: text.first });
    overlay = createSvg("svg", { class: "sample-lines", "aria-hidden": "true" });
    flow.element.append(overlay);
    frame.replaceChildren(flow.element);
    const box = /** @type {HTMLElement} */ (flow.element.querySelector(".flow"));
    box.addEventListener("scroll", drawLines, { passive: true });
    box.addEventListener("keydown", () => announce(`${keysLine.textContent} ${queriesLine.textContent}`));
    resizeObserver.observe(box);
    flow.start(tokens.length, tokens);
    update();
    flow.reveal(pinned);
  }
  const pinToken = (/** @type {number} */ position) => {
    pinned = position;
    hovered = null;
    update();
  };
  const hoverToken = (/** @type {number | null} */ position) => {
    hovered = position;
    update();
  };
  const getText = () => /** @type {SampleText} */ (text); // once it has come
  const getActive = () => hovered ?? pinned;

  /**
   * @param {number} position
   * @returns {TokenStyle}
   */
  function paint(position) {
    const [key, query] = [shown.keys.get(position) ?? 0, shown.queries.get(position) ?? 0];
    const classes = [...(position === getActive() ? ["own"] : []), ...(key ? ["is-key"] : []), ...(query ? ["is-query"] : [])];
    // The opacity grows with the root of the weight, so that small weights can be seen.
    const getShade = (/** @type {string} */ name, /** @type {number} */ weight) => `color-mix(in srgb, var(--${name}) ${Math.round(8 + 36 * Math.sqrt(weight))}%, transparent)`;
    const background = key && query ? `linear-gradient(${getShade("sea", key)} 50%, ${getShade("accent", query)} 50%)` : key ? getShade("sea", key) : query ? getShade("accent", query) : "";
    return { classes, background };
  }
  function update() {
    if (!flow || !weights) return;
    const pairs = weights.getPairs(getActive());
    shown = { keys: new Map(pairs.keys), queries: new Map(pairs.queries) };
    flow.repaint();
    showPairs(keysLine, t("looks at"), pairs.keys);
    showPairs(queriesLine, t("is looked at by"), pairs.queries);
    drawLines();
  }
  /**
   * @param {HTMLElement} line
   * @param {string} verb
   * @param {WeightPair[]} pairs
   */
  function showPairs(line, verb, pairs) {
    const { first, tokens, others } = getText();
    const createToken = (/** @type {number} */ position) => make("code", { class: "token" }, showWhitespace(tokens[position] ?? others[position + first]));
    line.replaceChildren(make("i", { class: "swatch", "aria-hidden": "true" }), createToken(getActive()), ` ${formatInteger(getActive() + first)} ${verb} `);
    if (!pairs.length) line.append(t("nothing that was kept"));
    pairs.slice(0, maxListed).forEach(([position, weight], at) => line.append(at ? ", " : "", createToken(position), ` ${formatInteger(position + first)} ${formatPercent(weight)}`));
    if (pairs.length > maxListed) line.append(t(" and {0} more", formatInteger(pairs.length - maxListed)));
  }
  // Lines from the active token to its keys and queries, where both ends are in view.
  function drawLines() {
    if (!flow || !overlay?.isConnected) return;
    const { element: flowElement } = flow;
    const box = flowElement.getBoundingClientRect();
    const getCentre = (/** @type {number} */ position) => {
      const rect = flowElement.querySelector(`.t[data-position="${position}"]`)?.getClientRects()[0];
      return rect && { x: rect.left - box.left + rect.width / 2, y: rect.top - box.top + rect.height / 2, top: rect.top - box.top };
    };
    const from = getCentre(getActive());
    const look = readLook(root);
    const paths = [];
    for (const { pairs, colour } of [{ pairs: shown.queries, colour: look.accent }, { pairs: shown.keys, colour: look.sea }]) {
      for (const [position, weight] of [...pairs].slice(0, maxLines)) {
        const to = from && position !== getActive() ? getCentre(position) : null;
        if (!from || !to) continue;
        // An arc over the text where both tokens are in one line, else a curve between the lines.
        const lift = Math.abs(from.y - to.y) < 4 ? 10 + Math.min(16, Math.abs(from.x - to.x) / 12) : 0;
        const d = lift ? `M${from.x} ${from.top}Q${(from.x + to.x) / 2} ${from.top - lift} ${to.x} ${to.top}` : `M${from.x} ${from.y}Q${to.x} ${(from.y + to.y) / 2} ${to.x} ${to.y}`;
        paths.push(createSvg("path", { d, fill: "none", stroke: colour, "stroke-width": 0.8 + 3 * weight, "stroke-opacity": 0.35 + 0.5 * weight, "stroke-linecap": "round" }));
      }
    }
    overlay.replaceChildren(...paths);
  }
  // The visible part of the text as a figure.
  /** @returns {FigureContent | null} */
  function getFigure() {
    if (!flow || !overlay) return null;
    const look = readLook(root);
    const box = flow.element.getBoundingClientRect();
    const figure = createSvgRoot(Math.ceil(box.width), Math.ceil(box.height), look, title);
    for (const span of /** @type {NodeListOf<HTMLElement>} */ (flow.element.querySelectorAll(".t"))) {
      const position = Number(span.dataset.position);
      const [key, query] = [shown.keys.get(position) ?? 0, shown.queries.get(position) ?? 0];
      const rect = span.getClientRects()[0];
      if (!rect || rect.bottom > box.bottom || rect.top < box.top) continue;
      const place = { x: rect.left - box.left, y: rect.top - box.top, width: rect.width, height: rect.height };
      for (const { weight, colour } of [{ weight: key, colour: look.sea }, { weight: query, colour: look.accent }]) if (weight) figure.append(createSvg("rect", { ...place, rx: 2, fill: colour, "fill-opacity": 0.08 + 0.36 * Math.sqrt(weight) }));
      if (position === getActive()) figure.append(createSvg("rect", { ...place, rx: 3, fill: "none", stroke: look.accent, "stroke-width": 2 }));
      figure.append(createSvg("text", { x: place.x, y: place.y + 0.72 * place.height, "font-family": look.mono, "font-size": 12.5, fill: look.ink, "xml:space": "preserve" }, showWhitespace(getText().tokens[position]).replace(/^·+/, (blanks) => " ".repeat(blanks.length))));
    }
    figure.append(...[...overlay.children].map((path) => path.cloneNode(true)));
    return { figure, look, title: `${title}, ${name}`, caption: `${keysLine.textContent}; ${queriesLine.textContent}` };
  }
  const resizeObserver = new ResizeObserver(drawLines);
  const visibilityObserver = new IntersectionObserver((changes) => changes.some(({ isIntersecting }) => isIntersecting) && load(), { rootMargin: "200px" });
  visibilityObserver.observe(element);
  return {
    element,
    repaint: update,
    destroy() {
      destroyed = true;
      visibilityObserver.disconnect();
      resizeObserver.disconnect();
      flow?.destroy();
      element.remove();
    },
  };
}
