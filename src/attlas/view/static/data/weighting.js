// The kinds of shown numbers: weights, or weights times the norms of their values. Weights are shares of their rows, from
// 0 to 1, or others, which may be negative: a difference of two matrices, linear attention.

import { formatNumber, formatPercent } from "./numbers.js";
import { t } from "../words/words.js";

/** The variants in which each weight is times the norm of its value, and how such a number is written. */
/** @type {Record<string, string>} */
export const WEIGHTED = { value: "‖A v‖", output: "‖A v W‖" };

/** @typedef {{ info?: { entries?: Partial<Entry>[], units?: Record<string, number> } | null, entry?: number }} Place */
/** @param {Place} place */
const getEntryInfo = ({ info, entry }) => info?.entries?.[entry ?? -1];
/**
 * Whether the weights of the entry of a state may be negative.
 *
 * @param {Place} place
 */
export const isSigned = (place) => getEntryInfo(place)?.signed === true;
/**
 * Whether they are shares of their rows, which can be told in percent and have an entropy.
 *
 * @param {Place} place
 */
export const areShares = (place) => getEntryInfo(place)?.shares !== false;

/** @param {{ variant: string }} state */
export const isWeighted = ({ variant }) => variant in WEIGHTED;

/**
 * Whether an entry has a kind of numbers: rows that are no softmax are not renormalised, and rollouts have no values.
 *
 * @param {Partial<Entry>} entry
 * @param {string} variant
 */
export const hasVariant = (entry, variant) => variant === "plain" || (variant === "nosink" ? entry.softmax !== false : variant in (entry.largest_norms ?? {}));

/**
 * The name of a number: "weight", "‖A v‖".
 *
 * @param {{ variant: string }} state
 */
export const getNumberName = ({ variant }) => WEIGHTED[variant] ?? (variant === "nosink" ? t("renormalised") : t("weight"));

/**
 * What colours are relative to: 1, the largest norm of all values, or the size of the largest weights that are no shares.
 *
 * @param {Place & { variant: string }} state
 */
export const getUnit = (state) => getEntryInfo(state)?.largest?.[state.variant] ?? state.info?.units?.[state.variant] ?? 1;

/**
 * A number that may be negative, with its sign.
 *
 * @param {number | null} number
 * @param {number} [precision]
 */
export const formatSigned = (number, precision = 3) => `${(number ?? 0) > 0 ? "+" : ""}${formatNumber(number, precision)}`;

/**
 * A share in percent; a weighted one as it is, and one that may be negative with its sign.
 *
 * @param {number} number
 * @param {Place & { variant: string }} state
 */
export const formatAmount = (number, state) => (isSigned(state) ? formatSigned(number) : isWeighted(state) || !areShares(state) ? formatNumber(number) : formatPercent(number));

/**
 * The words for a variant in a caption; "" for plain weights.
 *
 * @param {{ variant: string }} state
 */
export function describeVariant({ variant }) {
  return {
    nosink: t("first key excluded, rows renormalised"),
    value: t("each weight times the norm of its value"),
    output: t("each weight times the norm of its value behind the output projection"),
  }[variant] ?? "";
}
