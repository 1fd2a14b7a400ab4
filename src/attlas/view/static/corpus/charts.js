// The figures of a head: histograms, the spread of a number over the texts, and where the head stands among all.

import { createSvg, createSvgRoot } from "../panels/figure.js";
import { formatNumber, formatPercent, computeTicks, formatInteger } from "../data/numbers.js";
import { t } from "../words/words.js";

const margin = { left: 46, right: 20, top: 12, bottom: 40 };

/**
 * @param {number} width
 * @param {number} height
 * @param {Look} look
 * @param {string} label
 * @param {string} titleX
 */
function createFrame(width, height, look, label, titleX) {
  const figure = createSvgRoot(width, height, look, label);
  figure.append(createSvg("text", { x: (margin.left + width - margin.right) / 2, y: height - 6, "text-anchor": "middle", "font-size": 11.5, fill: look.ink }, titleX));
  return figure;
}
/**
 * @param {SVGSVGElement} figure
 * @param {number} maxShare
 * @param {number} width
 * @param {number} height
 * @param {Look} look
 * @param {number} most
 */
function drawShareAxis(figure, maxShare, width, height, look, most) {
  const toY = (/** @type {number} */ share) => height - margin.bottom - (share / maxShare) * (height - margin.top - margin.bottom);
  for (const share of computeTicks(0, maxShare, most)) {
    figure.append(createSvg("line", { x1: margin.left, x2: width - margin.right, y1: toY(share), y2: toY(share), stroke: look.line }), createSvg("text", { x: margin.left - 6, y: toY(share) + 4, "text-anchor": "end" }, share === 0 ? "0" : `${Number((100 * share).toPrecision(3))} %`));
  }
  return toY;
}

/**
 * Bars between the `edges` of bins, as shares of all; `linear`: an axis of numbers, else one step for each bin.
 *
 * @param {{ edges: number[], values: number[], width: number, height: number, look: Look, title: string, label: string, linear?: boolean, marks?: { value: number | null, text: string }[] }} options
 */
export function drawHistogram({ edges, values, width, height, look, title, label, linear = true, marks = [] }) {
  const total = values.reduce((sum, value) => sum + value, 0);
  const shares = values.map((value) => (total ? value / total : 0));
  const figure = createFrame(width, height, look, label, title);
  const toY = drawShareAxis(figure, Math.max(...shares, 1e-9) * 1.05, width, height, look, 4);
  const [left, right, floor] = [margin.left, width - margin.right, height - margin.bottom];
  const [low, high] = [edges[0], edges[edges.length - 1]];
  const toX = (/** @type {number} */ i) => left + (linear ? (edges[i] - low) / (high - low) : i / values.length) * (right - left);
  const toPixel = (/** @type {number} */ value) => left + ((value - low) / (high - low)) * (right - left);
  shares.forEach((share, i) => {
    if (!share) return;
    const bar = createSvg("rect", { x: toX(i) + 0.5, y: toY(share), width: Math.max(0.8, toX(i + 1) - toX(i) - 1), height: Math.max(0.8, floor - toY(share)), fill: look.track });
    bar.append(createSvg("title", {}, t("{0} to {1}: {2}", formatNumber(edges[i]), formatNumber(edges[i + 1]), formatPercent(share))));
    figure.append(bar);
  });
  figure.append(createSvg("line", { x1: left, x2: right, y1: floor, y2: floor, stroke: look.frame }));
  if (linear) for (const value of computeTicks(low, high, width / 90)) figure.append(createSvg("text", { x: toPixel(value), y: floor + 15, "text-anchor": "middle" }, formatTick(value)));
  else {
    const step = Math.ceil(values.length / Math.max(1, Math.floor((right - left) / 44)));
    edges.forEach((edge, i) => {
      if (i % step === 0) figure.append(createSvg("text", { x: toX(i), y: floor + 15, "text-anchor": "middle" }, formatInteger(edge)));
    });
  }
  for (const { value, text } of marks) {
    if (value === null || value < low || value > high) continue;
    figure.append(createSvg("line", { x1: toPixel(value), x2: toPixel(value), y1: margin.top, y2: floor, stroke: look.accent, "stroke-width": 1.5 }));
    const isRightHalf = toPixel(value) > (left + right) / 2;
    figure.append(createSvg("text", { x: toPixel(value) + (isRightHalf ? -5 : 5), y: margin.top + 9, "text-anchor": isRightHalf ? "end" : "start", fill: look.ink, stroke: look.card, "stroke-width": 3, "paint-order": "stroke" }, text));
  }
  return figure;
}
/** @param {number} value */
const formatTick = (value) => (Number.isInteger(value) ? formatInteger(value) : String(value)).replace("-", "−");

/**
 * Counts in `count` equal bins of a domain, from the counts of finer bins between `min` and `max`.
 *
 * @param {Bins} bins
 * @param {[low: number, high: number]} domain
 * @param {number} [count]
 */
export function rebin({ min, max, counts }, [low, high], count = 32) {
  const edges = Array.from({ length: count + 1 }, (_, i) => low + ((high - low) * i) / count);
  const cumulative = counts.reduce((sums, each) => [...sums, sums[sums.length - 1] + each], [0]);
  const total = cumulative[cumulative.length - 1];
  const countBelow = (/** @type {number} */ value) => {
    if (value >= max) return total;
    if (value <= min) return 0;
    const place = ((value - min) / (max - min)) * counts.length;
    const i = Math.floor(place);
    return cumulative[i] + (place - i) * counts[i];
  };
  // The last bin includes the upper end of the domain.
  const values = edges.slice(1).map((edge, i) => (i === count - 1 ? total : countBelow(edge)) - countBelow(edges[i]));
  return { edges, values: min === max && min >= high ? values.map((_, i) => (i === count - 1 ? total : 0)) : values };
}

/**
 * A histogram of a measure over the texts, above a box plot.
 *
 * @param {{ distribution: Distribution, domain: [low: number, high: number], width: number, height: number, look: Look, title: string, label: string, markedValue: number | null }} options
 */
export function drawSpread({ distribution, domain, width, height, look, title, label, markedValue }) {
  const figure = drawHistogram({ ...rebin(distribution, domain), width, height: height - 22, look, title: "", label, marks: markedValue === null ? [] : [{ value: markedValue, text: t("all {0}", formatNumber(markedValue)) }] });
  const all = createSvgRoot(width, height, look, label, ...figure.childNodes);
  const [left, right] = [margin.left, width - margin.right];
  const toX = (/** @type {number} */ value) => left + ((Math.min(domain[1], Math.max(domain[0], value)) - domain[0]) / (domain[1] - domain[0])) * (right - left);
  const [low, quarter, median, threequarters, high] = distribution.box.map(toX);
  const y = height - 32;
  all.append(
    createSvg("line", { x1: low, x2: high, y1: y, y2: y, stroke: look.track, "stroke-width": 1.5 }),
    createSvg("rect", { x: quarter, y: y - 5, width: Math.max(1.5, threequarters - quarter), height: 10, fill: look.card, stroke: look.track, "stroke-width": 1.5 }),
    createSvg("line", { x1: median, x2: median, y1: y - 7, y2: y + 7, stroke: look.ink, "stroke-width": 2.5 }),
    createSvg("text", { x: (left + right) / 2, y: height - 6, "text-anchor": "middle", "font-size": 11.5, fill: look.ink }, title),
  );
  return all;
}

/**
 * A line with a tick for every head of the corpus; the tick of this head is longer.
 *
 * @param {{ values: (number | null)[], value: number | null, width: number, look: Look, label: string }} options
 */
export function drawStrip({ values, value, width, look, label }) {
  const known = values.filter((value) => value !== null);
  const [low, high] = [Math.min(...known), Math.max(...known)];
  const toX = (/** @type {number} */ value) => 3 + (high > low ? (value - low) / (high - low) : 0.5) * (width - 6);
  const figure = createSvg("svg", { viewBox: `0 0 ${width} 16`, width: "100%", height: 16, preserveAspectRatio: "none", role: "img", "aria-label": label });
  const path = known.map((value) => `M${toX(value).toFixed(1)} 5v6`).join("");
  figure.append(createSvg("line", { x1: 0, x2: width, y1: 15, y2: 15, stroke: look.line }), createSvg("path", { d: path, stroke: look.faint, "stroke-width": 1, "stroke-opacity": known.length > 200 ? 0.25 : 0.6, "vector-effect": "non-scaling-stroke" }));
  if (value !== null) figure.append(createSvg("line", { x1: toX(value), x2: toX(value), y1: 1, y2: 15, stroke: look.accent, "stroke-width": 3, "vector-effect": "non-scaling-stroke" }));
  return figure;
}

/**
 * Bars of tokens by their share of weight; `showText(text)` makes whitespace visible.
 *
 * @param {{ tokens: { token: string, share: number }[], width: number, look: Look, label: string, showText: (text: string) => string }} options
 */
export function drawTokenBars({ tokens, width, look, label, showText }) {
  const lineHeight = 21;
  const maxShare = Math.max(...tokens.map(({ share }) => share), 1e-12);
  const figure = createSvgRoot(width, Math.max(lineHeight, lineHeight * tokens.length) + 2, look, label);
  const [start, end] = [Math.min(150, 0.42 * width), width - 52];
  const maxCharacters = Math.max(4, Math.floor((start - 12) / 6.7));
  tokens.forEach(({ token, share }, i) => {
    const y = lineHeight * i + 14;
    const shown = [...showText(token)];
    const text = shown.length > maxCharacters ? `${shown.slice(0, maxCharacters - 1).join("")}…` : shown.join("");
    figure.append(
      createSvg("text", { x: start - 8, y, "text-anchor": "end", "font-family": look.mono, "font-size": 11.5, fill: look.ink, "xml:space": "preserve" }, text),
      createSvg("rect", { x: start, y: y - 10, width: Math.max(1, (share / maxShare) * (end - start)), height: 13, rx: 1.5, fill: look.track }),
      createSvg("text", { x: start + (share / maxShare) * (end - start) + 5, y }, formatPercent(share)),
    );
  });
  return figure;
}
