// Which heads can be shown together.

import { areShares } from "./weighting.js";

/**
 * Two heads can be compared where their cells mean the same pairs of tokens.
 *
 * @param {Info} info
 * @param {number} first
 * @param {number} second
 */
export function canCompare(info, first, second) {
  const [a, b] = [info.entries[first], info.entries[second]];
  return haveSameCells(a, b) && b.readable !== false;
}

/**
 * @param {Entry} a
 * @param {Entry} b
 */
export function haveSameCells(a, b) {
  const fields = /** @type {const} */ (["m", "n", "first_query", "first_key"]);
  return fields.every((field) => a[field] === b[field]);
}

/**
 * Whether the quotients of the weights of two entries have a meaning: both are shares.
 *
 * @param {Info} info
 * @param {number} first
 * @param {number} second
 */
export function canDivide(info, first, second) {
  return [first, second].every((entry) => areShares({ info, entry }));
}
