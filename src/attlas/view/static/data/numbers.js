// Formats of numbers.

import { t } from "../words/words.js";

/** @type {Record<string, string>} */
const SUPERSCRIPTS = { "-": "⁻", 0: "⁰", 1: "¹", 2: "²", 3: "³", 4: "⁴", 5: "⁵", 6: "⁶", 7: "⁷", 8: "⁸", 9: "⁹" };

// 60321 -> "60,321"
const integerFormat = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

/** @param {number} number */
export function formatInteger(number) {
  return integerFormat.format(Math.round(number));
}

// 1 -> "st", 11 -> "th"
/** @param {number} rank */
export function getOrdinalSuffix(rank) {
  return rank % 100 > 10 && rank % 100 < 14 ? "th" : (["th", "st", "nd", "rd"][rank % 10] ?? "th");
}

// -7 -> "⁻⁷"
/** @param {number} number */
export function formatSuperscript(number) {
  return [...String(number)].map((digit) => SUPERSCRIPTS[digit] ?? digit).join("");
}

/**
 * A weight or another positive number with three digits: 0.0312, 3.12 × 10⁻⁷.
 *
 * @param {number | null | undefined} value
 * @param {number} [precision]
 */
export function formatNumber(value, precision = 3) {
  if (value === null || value === undefined || Number.isNaN(value)) return "–";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 1e6) return value.toExponential(precision - 1).replace(/e\+?(-?\d+)/, (_, power) => ` × 10${formatSuperscript(power)}`);
  if (size < 1e-4) {
    const [mantissa, power] = value.toExponential(precision - 1).split("e");
    return `${mantissa.replace("-", "−")} × 10${formatSuperscript(Number(power))}`;
  }
  const places = Math.max(0, precision - 1 - Math.floor(Math.log10(size)));
  const shown = size >= 1000 ? value.toLocaleString("en", { maximumFractionDigits: places }) : value.toFixed(places);
  return shown.replace("-", "−");
}

// A share in percent: 42.1 %, 3.1 %, 0.02 %.
/** @param {number} weight */
export function formatPercent(weight) {
  if (weight === 0) return "0 %";
  if (weight >= 0.0995) return `${(100 * weight).toFixed(1)} %`;
  return weight >= 1e-5 ? `${(100 * weight).toPrecision(2)} %` : "< 0.001 %";
}

// Bytes: 31.2 MB.
/** @param {number} count */
export function formatBytes(count) {
  if (count < 1000) return `${count} bytes`;
  const units = ["kB", "MB", "GB"];
  let [size, unit] = [count / 1000, 0];
  while (size >= 1000 && unit < 2) [size, unit] = [size / 1000, unit + 1];
  return `${size.toFixed(size < 10 ? 1 : 0)} ${units[unit]}`;
}

// The shortest decimal that reads back as the same float32, as NumPy prints it.
/** @param {number} value */
export function formatFloat32(value) {
  for (let precision = 6; precision < 9; precision++) {
    const text = value.toPrecision(precision);
    if (Math.fround(Number(text)) === value) return String(Number(text));
  }
  return String(Number(value.toPrecision(9)));
}

/**
 * Round steps of an axis between two numbers: 1, 2 or 5 times a power of ten.
 *
 * @param {number} low
 * @param {number} high
 * @param {number} maxTicks
 */
export function computeTicks(low, high, maxTicks) {
  const width = high - low;
  if (!(width > 0)) return [low];
  const minStep = width / Math.max(1, maxTicks);
  const power = 10 ** Math.floor(Math.log10(minStep));
  const step = power * ([1, 2, 5].find((factor) => factor * power >= minStep * 0.999) ?? 10);
  const values = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) values.push(Number((k * step).toPrecision(12)));
  return values;
}

/**
 * Whether an entry is the products of the first layers, in the place of heads.
 *
 * @param {{ kind?: string }} entry
 */
export const isRollout = ({ kind }) => kind === "rollout";

/**
 * The name of a layer: "Layer 3 (cross)".
 *
 * @param {Info} info
 * @param {number} entry
 */
export function getLayerName(info, entry) {
  const { recording } = info.entries[entry];
  return recording ? `${recording}: ${getOwnLayerName(info, entry)}` : getOwnLayerName(info, entry);
}

/**
 * The name of a layer in its recording.
 *
 * @param {Info} info
 * @param {number} entry
 */
function getOwnLayerName(info, entry) {
  const entryInfo = info.entries[entry];
  if (isRollout(entryInfo)) return t("Rollout");
  const several = info.entries.some((other) => other !== entryInfo && other.recording === entryInfo.recording && other.layer === entryInfo.layer && other.kind === entryInfo.kind);
  const kind = entryInfo.kind && entryInfo.kind !== "self" ? ` (${entryInfo.kind})` : "";
  const pass = several && entryInfo.call !== undefined && entryInfo.call !== null ? t(", pass {0}", entryInfo.call) : "";
  return t("Layer {0}{1}{2}", entryInfo.layer, kind, pass);
}

/**
 * The name of a head: "Layer 3, head 5", "Layer 3 (cross), mean of 12 heads", "Rollout up to layer 3".
 *
 * @param {Info} info
 * @param {number} entry
 * @param {HeadIndex} head
 */
export function getHeadName(info, entry, head) {
  return info.entries[entry] ? nameHead(info.entries[entry], getLayerName(info, entry), head) : "";
}

/**
 * The name of a head where there is room for one line: a second recording is "②", as in the map of heads.
 *
 * @param {Info} info
 * @param {number} entry
 * @param {HeadIndex} head
 */
export function getMarkedHeadName(info, entry, head) {
  const entryInfo = info.entries[entry];
  if (!entryInfo) return "";
  return `${entryInfo.recording ? "② " : ""}${nameHead(entryInfo, getOwnLayerName(info, entry), head)}`;
}

/**
 * @param {Entry} entryInfo
 * @param {string} layer
 * @param {HeadIndex} head
 */
function nameHead(entryInfo, layer, head) {
  if (isRollout(entryInfo)) return t("{0} up to layer {1}", layer, entryInfo.heads[Number(head)] ?? head);
  return head === "mean" ? t("{0}, mean of {1} heads", layer, entryInfo.heads.length) : t("{0}, head {1}", layer, entryInfo.heads[head] ?? head);
}

/**
 * The short name that stands under a thumbnail: "3·5"; "R·3" of a rollout.
 *
 * @param {Info} info
 * @param {number} entry
 * @param {HeadIndex} head
 */
export function getHeadMark(info, entry, head) {
  const entryInfo = info.entries[entry];
  return `${entryInfo.recording ? "② " : ""}${isRollout(entryInfo) ? "R" : entryInfo.layer}·${head === "mean" ? "mean" : entryInfo.heads[head] ?? head}`;
}
