// The kinds of shown numbers: weights, or weights times the norms of their values.

import { formatNumber, formatPercent } from "./numbers.js";
import { t } from "../words/words.js";

/** The variants in which each weight is times the norm of its value, and how such a number is written. */
/** @type {Record<string, string>} */
export const WEIGHTED = { value: "‖A v‖", output: "‖A v W‖" };

/** @param {{ variant: string }} state */
export const isWeighted = ({ variant }) => variant in WEIGHTED;

/**
 * The name of a number: "weight", "‖A v‖".
 *
 * @param {{ variant: string }} state
 */
export const getNumberName = ({ variant }) => WEIGHTED[variant] ?? (variant === "nosink" ? t("renormalised") : t("weight"));

/**
 * What the largest code stands for: 1, or the largest norm of all values.
 *
 * @param {{ info?: Pick<Info, "units"> | null, variant: string }} state
 */
export const getUnit = ({ info, variant }) => info?.units?.[variant] ?? 1;

/**
 * A weight in percent; a weighted one as it is.
 *
 * @param {number} number
 * @param {{ variant: string }} state
 */
export const formatAmount = (number, state) => (isWeighted(state) ? formatNumber(number) : formatPercent(number));

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
