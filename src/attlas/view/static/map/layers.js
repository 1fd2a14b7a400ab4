// One head drawn as tiles. Missing tiles are replaced by coarser or finer ones, so that nothing flickers.

import { TILE, isBeyondDiagonal, getCausalOffset, chooseLevel, clamp } from "./geometry.js";
import { getTileKey } from "./tiles.js";

const FINER_LEVELS = 2; // levels of finer tiles that may replace a missing one

/**
 * A layer: `source` drawn into `pane`. `transposed` mirrors it at the text's diagonal, as the second head of a causal
 * matrix is drawn into the empty triangle of the first. `other`: the source that it is divided by. `mixed`: all sources that
 * have a colour of their own, `source` first.
 *
 * @param {PlacedPane} pane
 * @param {Source} source
 * @param {Entry} entry
 * @param {{ scale: number, dpr: number, transposed?: boolean, shift?: number, other?: Source | null, mixed?: Source[], finest?: number }} options
 * @returns {Layer}
 */
export function createLayer(pane, source, entry, { scale, dpr, transposed = false, shift = 0, other = null, mixed = [], finest = 0 }) {
  const level = chooseLevel(scale * dpr, entry.levels, finest);
  const { region } = pane;
  if (!transposed) return { pane, source, entry, other, mixed, level, transposed, toX: pane.px, toY: pane.py, region };
  return {
    pane,
    source,
    entry,
    other,
    mixed,
    level,
    transposed,
    toX: (/** @type {number} */ c) => pane.py(c - shift),
    toY: (/** @type {number} */ r) => pane.px(r + shift),
    region: {
      r0: clamp(region.c0 - shift, 0, entry.m),
      r1: clamp(region.c1 - shift, 0, entry.m),
      c0: clamp(region.r0 + shift, 0, entry.n),
      c1: clamp(region.r1 + shift, 0, entry.n),
    },
  };
}

/**
 * The cells of a patch on a layer that shows blocks; null where none of them is in view.
 *
 * @param {Layer} layer
 * @param {Region} patch
 * @returns {PatchLayer | null}
 */
export function createPatchLayer({ pane, source, entry, other, mixed, transposed, toX, toY, region }, patch) {
  const part = {
    r0: Math.max(region.r0, patch.r0),
    r1: Math.min(region.r1, patch.r1),
    c0: Math.max(region.c0, patch.c0),
    c1: Math.min(region.c1, patch.c1),
  };
  if (part.r0 >= part.r1 || part.c0 >= part.c1) return null;
  return { pane, source, entry, other, mixed, level: 0, transposed, toX, toY, region: part, patch };
}

/**
 * The tiles of a level that overlap a region, without those that the causal mask hides.
 *
 * @param {Pick<Layer, "entry" | "region" | "level">} layer
 * @param {number} [margin]
 */
function* iterateTiles({ entry, region, level }, margin = 0) {
  const size = TILE * 2 ** level;
  if (region.r1 <= region.r0 || region.c1 <= region.c0) return;
  const getLastTile = (/** @type {number} */ count) => Math.ceil(count / size) - 1;
  const y1 = Math.min(getLastTile(entry.m), Math.ceil(region.r1 / size) - 1 + margin);
  const x1 = Math.min(getLastTile(entry.n), Math.ceil(region.c1 / size) - 1 + margin);
  for (let y = Math.max(0, Math.floor(region.r0 / size) - margin); y <= y1; y++) {
    for (let x = Math.max(0, Math.floor(region.c0 / size) - margin); x <= x1; x++) {
      if (!isBeyondDiagonal(entry, Math.min(entry.m, (y + 1) * size), x * size)) yield { y, x };
    }
  }
}

/**
 * @param {Source} source
 * @param {number} level
 * @param {number} y
 * @param {number} x
 * @param {number} distance
 * @returns {TileRequest}
 */
function createTileRequest(source, level, y, x, distance) {
  const { entry, head, batch, variant, pool } = source;
  return { key: getTileKey(source, level, y, x), name: "tile", params: { entry, head, batch, variant, pool, level, y, x }, distance };
}

/**
 * The tiles that a layer needs; with `settled`, also those around the view. The distance orders them.
 *
 * @param {Layer} layer
 * @param {boolean} settled
 */
export function listWantedTiles(layer, settled) {
  const { region, level, source, other, mixed, entry } = layer;
  const size = TILE * 2 ** level;
  const centre = { r: (region.r0 + region.r1) / 2, c: (region.c0 + region.c1) / 2 };
  /** @type {TileRequest[]} */
  const items = [];
  const addRequest = (/** @type {number} */ requestLevel, /** @type {number} */ y, /** @type {number} */ x, /** @type {number} */ distance) => {
    items.push(createTileRequest(source, requestLevel, y, x, distance));
    for (const each of other ? [other] : mixed.slice(1)) items.push(createTileRequest(each, requestLevel, y, x, distance));
  };
  const seen = new Set();
  for (const margin of settled && !layer.patch ? [0, 1] : [0]) {
    for (const { y, x } of iterateTiles(layer, margin)) {
      if (seen.has(`${y}/${x}`)) continue;
      seen.add(`${y}/${x}`);
      addRequest(level, y, x, 100 * margin + Math.hypot((y + 0.5) * size - centre.r, (x + 0.5) * size - centre.c) / size);
    }
  }
  // The whole matrix in one tile: it can replace any missing tile.
  if (level < entry.levels - 1) addRequest(entry.levels - 1, 0, 0, 90);
  return items;
}

/**
 * The request for the sampled picture of a source, shown before its tiles are computed.
 *
 * @param {Pick<Layer, "source" | "entry">} layer
 * @returns {TileRequest}
 */
export function createThumbnailRequest({ source, entry }) {
  const { head, batch, variant, pool } = source;
  const params = { entry: source.entry, head, batch, variant, pool, size: TILE };
  return { key: `${source.key}/thumbnail/${entry.m}`, name: "thumbnail", params, distance: -1 };
}

/**
 * The lower triangle of a causal matrix (the upper one of its mirror image), as far as it is in view.
 *
 * @param {Context} ctx
 * @param {Layer} layer
 * @param {number} shift
 */
function traceTriangle(ctx, { pane, entry, transposed }, shift) {
  const { X, Y, region } = pane;
  const edge = getCausalOffset(entry) + 1;
  const from = region.r0 - 1;
  const to = region.r1 + 1;
  ctx.moveTo(shift * X(from + edge), shift * Y(from));
  ctx.lineTo(shift * X(to + edge), shift * Y(to));
  if (transposed) {
    ctx.lineTo(shift * X(Math.max(region.c1, to + edge)), shift * Y(from));
  } else {
    ctx.lineTo(shift * X(Math.min(region.c0, from + edge)), shift * Y(to));
    ctx.lineTo(shift * X(Math.min(region.c0, from + edge)), shift * Y(from));
  }
  ctx.closePath();
}

/**
 * Draw a layer into the field of its pane, in device pixels. Returns whether something is missing or still pending.
 *
 * @param {Context} ctx
 * @param {Layer} layer
 * @param {{ tiles: Tiles, palette: Palette, budget: Budget, dpr: number, tone: string }} options
 */
export function drawLayer(ctx, layer, { tiles, palette, budget, dpr, tone }) {
  const { level, source, other, toX, toY } = layer;
  const size = TILE * 2 ** level;
  const complete = [];
  const gaps = [];
  for (const { y, x } of iterateTiles(layer)) {
    const picture = getPicture(layer, level, y, x, { tiles, palette, budget });
    if (picture && !picture.pending) complete.push({ y, x, surface: picture.surface });
    else gaps.push({ y, x, surface: picture?.surface ?? null });
  }
  const drawTile = (/** @type {HTMLCanvasElement} */ surface, /** @type {number} */ y, /** @type {number} */ x, /** @type {number} */ span, /** @type {{ x: number, y: number, size: number } | null} */ sub = null) => {
    const u0 = toX(x * span);
    const v0 = toY(y * span);
    const w = toX((x + 1) * span) - u0;
    const h = toY((y + 1) * span) - v0;
    if (w < 1 || h < 1) return;
    if (sub) ctx.drawImage(surface, sub.x, sub.y, sub.size, sub.size, u0, v0, w, h);
    else ctx.drawImage(surface, u0, v0, w, h);
  };
  if (gaps.length) {
    ctx.save();
    if (layer.entry.causal && !other) {
      ctx.beginPath();
      traceTriangle(ctx, layer, dpr);
      ctx.clip();
    }
    if (layer.transposed) ctx.setTransform(0, 1, 1, 0, 0, 0);
    for (const gap of gaps) drawPlaceholder(ctx, layer, gap, { tiles, palette, budget, tone, drawTile, size });
    ctx.restore();
  }
  ctx.save();
  if (layer.transposed) ctx.setTransform(0, 1, 1, 0, 0, 0);
  for (const { y, x, surface } of complete) drawTile(surface, y, x, size);
  ctx.restore();
  return { missing: gaps.filter((gap) => !gap.surface).length, pending: gaps.some((gap) => gap.surface), source, level };
}

/**
 * @param {Layer} layer
 * @param {number} level
 * @param {number} y
 * @param {number} x
 * @param {TilePaint} options
 */
function getPicture({ source, other, mixed }, level, y, x, { tiles, palette, budget }) {
  if (mixed.length) {
    const parts = mixed.map((each) => tiles.get(getTileKey(each, level, y, x))).filter((tile) => tile !== null);
    const surface = parts.length === mixed.length ? tiles.mixture(parts, mixed.map(({ entry }) => entry), palette, budget) : null;
    return surface && { surface, pending: parts.some(({ pending }) => pending) };
  }
  const first = tiles.get(getTileKey(source, level, y, x));
  if (!first) return null;
  if (!other) {
    const surface = tiles.surface(first, source.entry, palette, budget);
    return surface && { surface, pending: first.pending };
  }
  const second = tiles.get(getTileKey(other, level, y, x));
  if (!second) return null;
  const surface = tiles.ratio(first, second, [source.entry, other.entry], palette, budget);
  return surface && { surface, pending: first.pending || second.pending };
}

/**
 * Draws a replacement where a tile is missing or incomplete: the nearest coarser tile, else the sampled picture
 * under a pale overlay; then finer tiles where they are cached.
 *
 * @param {Context} ctx
 * @param {Layer} layer
 * @param {{ y: number, x: number, surface: HTMLCanvasElement | null }} gap
 * @param {TilePaint & { tone: string, drawTile: DrawTile, size: number }} options
 */
function drawPlaceholder(ctx, layer, { y, x, surface }, { tiles, palette, budget, tone, drawTile, size }) {
  const { level, entry, source, other, mixed, toX, toY } = layer;
  const options = { tiles, palette, budget };
  /** @type {{ surface: HTMLCanvasElement, pending: boolean, sub: { x: number, y: number, size: number } } | null} */
  let coarser = null;
  for (let levelsUp = 1; level + levelsUp < entry.levels && !coarser; levelsUp++) {
    const picture = getPicture(layer, level + levelsUp, y >> levelsUp, x >> levelsUp, options);
    const part = TILE / 2 ** levelsUp;
    if (picture && part >= 1) {
      coarser = { ...picture, sub: { x: (x & (2 ** levelsUp - 1)) * part, y: (y & (2 ** levelsUp - 1)) * part, size: part } };
    }
  }
  const isComplete = coarser && !coarser.pending;
  if (!isComplete && !other && !mixed.length) {
    const r1 = Math.min(entry.m, (y + 1) * size);
    const c1 = Math.min(entry.n, (x + 1) * size);
    /** @type {[x: number, y: number, width: number, height: number]} */
    const box = [toX(x * size), toY(y * size), toX(c1) - toX(x * size), toY(r1) - toY(y * size)];
    const thumbnail = tiles.get(createThumbnailRequest(layer).key);
    const sampled = thumbnail && tiles.surface(thumbnail, source.entry, palette, budget);
    if (sampled) {
      const across = TILE / entry.n;
      const levelsDown = TILE / entry.m;
      ctx.drawImage(sampled, x * size * across, y * size * levelsDown, (c1 - x * size) * across, (r1 - y * size) * levelsDown, ...box);
    }
    if (!surface && !coarser) {
      ctx.fillStyle = tone;
      ctx.globalAlpha = sampled ? 0.58 : 1;
      ctx.fillRect(...box);
      ctx.globalAlpha = 1;
    }
  }
  if (coarser && (!coarser.pending || !surface)) drawTile(coarser.surface, y, x, size, coarser.sub);
  if (surface) drawTile(surface, y, x, size);
  for (let levelsDown = Math.min(FINER_LEVELS, level); levelsDown >= 1; levelsDown--) {
    for (let dy = 0; dy < 2 ** levelsDown; dy++) {
      for (let dx = 0; dx < 2 ** levelsDown; dx++) {
        const [fineY, fineX] = [y * 2 ** levelsDown + dy, x * 2 ** levelsDown + dx];
        if (!tiles.has(getTileKey(source, level - levelsDown, fineY, fineX))) continue;
        const picture = getPicture(layer, level - levelsDown, fineY, fineX, options);
        if (picture && !picture.pending) drawTile(picture.surface, fineY, fineX, size / 2 ** levelsDown);
      }
    }
  }
}
