// Which cells and maps a page that works offline explains. A page that asks a server explains every cell.

/**
 * Whether the page can answer why a cell of a head is where it is; without a cell, why its whole map is.
 *
 * @param {Info} info
 * @param {HeadPlace} headPlace
 * @param {Cell | null} cell
 */
export function holdsReason(info, { entry, head }, cell) {
  if (!info.held) return true;
  const why = info.held.find((each) => each.entry === entry && each.head === head)?.why;
  return cell === null ? Boolean(why?.map) : Boolean(why?.cells.some(([i, j]) => i === cell.i && j === cell.j));
}

/**
 * The cells that an offline page explains, those of one head first.
 *
 * @param {Info} info
 * @param {HeadPlace} first
 * @returns {(HeadPlace & Cell)[]}
 */
export function listReasons(info, first) {
  const all = (info.held ?? []).flatMap(({ entry, head, why }) => (why?.cells ?? []).map(([i, j]) => ({ entry, head, i, j })));
  const isOwn = (/** @type {HeadPlace} */ { entry, head }) => entry === first.entry && head === first.head;
  return [...all.filter(isOwn), ...all.filter((each) => !isOwn(each))];
}
