// Panes, gutters, levels, and the conversion between cells and pixels. Pure functions.

export const TILE = 256;

/**
 * The value between `low` and `high` that is nearest to `value`.
 *
 * @param {number} value
 * @param {number} low
 * @param {number} high
 */
export const clamp = (value, low, high) => Math.min(high, Math.max(low, value));

// CSS pixels. Beside the map, from the inside out: the band of brackets, ticks or tokens, the track.
const SIZES = {
  wide: { track: 42, band: 14, left: 50, top: 32, tokensLeft: 104, tokensTop: 98, edge: 14 },
  narrow: { track: 24, band: 12, left: 40, top: 28, tokensLeft: 68, tokensTop: 64, edge: 8 },
};
const TOKENS_FROM = 11; // pixels of a cell at which its token can be read
const NARROW = 560;

/**
 * The level whose blocks are at least one device pixel wide, and less than two; none finer than `finest`.
 *
 * @param {number} pixels
 * @param {number} levels
 * @param {number} [finest]
 */
export function chooseLevel(pixels, levels, finest = 0) {
  const level = Math.ceil(-Math.log2(pixels) - 1e-6);
  return Math.min(levels - 1, Math.max(finest, level));
}

/**
 * How far the gutters have opened for tokens: 0 zoomed out, 1 from TOKENS_FROM pixels a cell on.
 *
 * @param {number} scale
 */
export function getGutterOpening(scale) {
  const progress = Math.min(1, Math.max(0, (scale / TOKENS_FROM - 0.75) * 4));
  return progress * progress * (3 - 2 * progress);
}

/**
 * Whether tokens are written at this scale.
 *
 * @param {number} scale
 */
export function showsTokens(scale) {
  return scale >= TOKENS_FROM;
}

/**
 * @param {number} width
 * @param {number} scale
 * @param {boolean} hasBand
 * @returns {Gutter}
 */
function computeGutters(width, scale, hasBand) {
  const size = SIZES[width < NARROW ? "narrow" : "wide"];
  const band = hasBand ? size.band : 0;
  const fraction = getGutterOpening(scale);
  const closedTop = size.top - band; // the corner has two lines of text, with or without a band
  return {
    track: size.track,
    band,
    left: Math.round(size.left + fraction * (size.tokensLeft - size.left)),
    top: Math.round(closedTop + fraction * (size.tokensTop - closedTop)),
    edge: size.edge,
    closedLeft: size.track + size.left + band,
    closedTop: size.track + size.top,
  };
}

/**
 * The panes of a stage: one, or two beside each other (above each other where it is tall).
 *
 * @param {number} width
 * @param {number} height
 * @param {number} scale
 * @param {{ side?: boolean, hasBand?: boolean }} [options]
 * @returns {Pane[]}
 */
export function computePanes(width, height, scale, { side = false, hasBand = false } = {}) {
  /** @type {Box[]} */
  const boxes = [];
  if (!side) boxes.push({ x: 0, y: 0, w: width, h: height });
  else if (width > 1.1 * height) {
    const half = Math.floor(width / 2);
    boxes.push({ x: 0, y: 0, w: half, h: height }, { x: half, y: 0, w: width - half, h: height });
  } else {
    const half = Math.floor(height / 2);
    boxes.push({ x: 0, y: 0, w: width, h: half }, { x: 0, y: half, w: width, h: height - half });
  }
  return boxes.map((box) => {
    const gutter = computeGutters(box.w, scale, hasBand);
    const left = gutter.track + gutter.left + gutter.band;
    const top = gutter.track + gutter.top + gutter.band;
    const field = { x: box.x + left, y: box.y + top, w: Math.max(1, box.w - left), h: Math.max(1, box.h - top) };
    // The centre is computed with closed gutters, so that it does not move when they open.
    const cx = box.x + gutter.closedLeft + Math.max(1, box.w - gutter.closedLeft - gutter.edge) / 2;
    const cy = box.y + gutter.closedTop + Math.max(1, box.h - gutter.closedTop - gutter.edge) / 2;
    return { ...box, gutter, field, cx, cy };
  });
}

/**
 * A pane with its conversions from cells to pixels: X, Y in CSS pixels, px, py rounded to whole device pixels.
 *
 * @param {Pane} pane
 * @param {Pick<Place, "row" | "column"> & { scale: number, dpr: number, m: number, n: number }} options
 * @returns {PlacedPane}
 */
export function placePane(pane, { row, column, scale, dpr, m, n }) {
  const ox = pane.cx - column * scale;
  const oy = pane.cy - row * scale;
  const X = (/** @type {number} */ j) => ox + j * scale;
  const Y = (/** @type {number} */ i) => oy + i * scale;
  const { field } = pane;
  const region = {
    r0: Math.max(0, Math.floor((field.y - oy) / scale)),
    r1: Math.min(m, Math.ceil((field.y + field.h - oy) / scale)),
    c0: Math.max(0, Math.floor((field.x - ox) / scale)),
    c1: Math.min(n, Math.ceil((field.x + field.w - ox) / scale)),
  };
  return {
    ...pane,
    X,
    Y,
    px: (/** @type {number} */ j) => Math.round(dpr * X(j)),
    py: (/** @type {number} */ i) => Math.round(dpr * Y(i)),
    row: (/** @type {number} */ y) => (y - oy) / scale,
    column: (/** @type {number} */ x) => (x - ox) / scale,
    region,
    // The axes stay at the edge of the matrix while it is in view.
    left: Math.min(Math.max(X(0), field.x), field.x + field.w),
    top: Math.min(Math.max(Y(0), field.y), field.y + field.h),
    right: Math.min(X(n), field.x + field.w),
    bottom: Math.min(Y(m), field.y + field.h),
  };
}

/**
 * Centre and zoom that show the whole matrix.
 *
 * @param {number} width
 * @param {number} height
 * @param {{ m: number, n: number }} size
 * @param {{ side?: boolean, hasBand?: boolean }} options
 * @param {number} maximum
 * @returns {Place}
 */
export function computeFit(width, height, { m, n }, options, maximum) {
  const closed = computePanes(width, height, 0, options)[0];
  const edge = closed.gutter.edge;
  const computeScale = (/** @type {Pane} */ { field }) => Math.min(Math.max(1, field.w - edge) / n, Math.max(1, field.h - edge) / m, 2 ** maximum);
  let scale = computeScale(closed);
  let open = closed;
  if (getGutterOpening(scale) > 0) {
    // Small matrices are shown with their tokens, which need space.
    open = computePanes(width, height, scale, options)[0];
    scale = computeScale(open);
  }
  const shiftX = open.field.x + (open.field.w - edge) / 2 - open.cx;
  const shiftY = open.field.y + (open.field.h - edge) / 2 - open.cy;
  return { row: m / 2 - shiftY / scale, column: n / 2 - shiftX / scale, zoom: Math.log2(scale) };
}

/**
 * Where the allowed part of a causal matrix ends: key j is seen by query i when j <= i + offset.
 *
 * @param {Pick<Entry, "first_query" | "first_key">} entry
 */
export function getCausalOffset(entry) {
  return entry.first_query - entry.first_key;
}

/**
 * Whether the causal mask hides all cells of a block: rows before `r1`, columns from `c0` on.
 *
 * @param {Pick<Entry, "causal" | "first_query" | "first_key">} entry
 * @param {number} r1
 * @param {number} c0
 */
export function isBeyondDiagonal(entry, r1, c0) {
  return entry.causal && c0 > r1 - 1 + getCausalOffset(entry);
}
