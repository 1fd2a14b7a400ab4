// Tiles of codes: fetched on demand, kept in a bounded cache, painted through a colour table.

import { getContext } from "./canvas.js";
import { TILE } from "./geometry.js";
import { MASKED, PENDING } from "./colour.js";
import { fillMixture } from "./hues.js";
import { RANK } from "../data/requests.js";

const CODES_BYTES = 2 * TILE * TILE;
const SURFACE_BYTES = 4 * TILE * TILE;
const FIRST_POLL = 350; // ms after which an unfinished tile is requested again
const LAST_POLL = 4000;
const RETRY_DELAY = 5000;

/** @type {{ image: ImageData, words: Uint32Array } | null} */
let scratch = null;

function createSurface() {
  const canvas = document.createElement("canvas");
  canvas.width = canvas.height = TILE;
  return canvas;
}

/**
 * @param {HTMLCanvasElement} surface
 * @param {(words: Uint32Array) => void} fill
 */
function paintSurface(surface, fill) {
  if (!scratch) {
    const image = new ImageData(TILE, TILE);
    scratch = { image, words: new Uint32Array(image.data.buffer) };
  }
  fill(scratch.words);
  getContext(surface).putImageData(scratch.image, 0, 0);
}

/**
 * Differences of two tiles through a table of colours; masked or missing in either: transparent.
 *
 * @param {Uint32Array} words
 * @param {Uint16Array} first
 * @param {Uint16Array} second
 * @param {Uint32Array} lut
 */
export function fillRatio(words, first, second, lut) {
  for (let k = 0; k < words.length; k++) {
    const a = first[k];
    const b = second[k];
    words[k] = a === MASKED || b === MASKED || a === PENDING || b === PENDING ? 0 : lut[32768 + ((a - b) >> 1)];
  }
}

/**
 * The difference of two tiles, in the colours of `table`, as makeDifference gives it.
 *
 * @param {Uint32Array} target
 * @param {Uint16Array} first
 * @param {Uint16Array} second
 * @param {DifferenceTable} differenceTable
 */
function fillDifference(target, first, second, { weights, others, factor: unit, words, limit }) {
  const factor = 127.5 / limit;
  for (let k = 0; k < target.length; k++) {
    const a = first[k];
    const b = second[k];
    if (a === MASKED || b === MASKED || a === PENDING || b === PENDING) target[k] = 0;
    else {
      const place = 127.5 + factor * (weights[a] - unit * others[b]);
      target[k] = words[place <= 0 ? 0 : place >= 255 ? 255 : Math.round(place)];
    }
  }
}

/**
 * The key under which a tile of a source is kept.
 *
 * @param {Pick<Source, "key">} source
 * @param {number} level
 * @param {number} y
 * @param {number} x
 */
export function getTileKey(source, level, y, x) {
  return `${source.key}/${level}/${y}/${x}`;
}

/**
 * The source of tiles: one head, or the mean of heads, of one entry with one pooling.
 *
 * @param {HeadPlace & { batch: number, variant: Variant, pool: Pool }} place
 * @returns {Source}
 */
export function createSource({ entry, head, batch, variant, pool }) {
  return { entry, head, batch, variant, pool, key: `${entry}/${head}/${batch}/${variant}/${pool}` };
}

/**
 * The cache of tiles. `changed()` is called when a frame would look different; `bytes` bounds codes and surfaces together.
 *
 * @param {Pick<Requests, "get">} transport
 * @param {{ bytes?: number, changed: () => void }} options
 */
export function createTiles(transport, { bytes = 192e6, changed }) {
  /** @type {Map<string, Tile>} */
  const cache = new Map(); // key -> tile, least recently used first
  /** @type {Map<string, { controller: AbortController, item: TileRequest }>} */
  const inFlight = new Map(); // key -> {controller, item}
  /** @type {Map<string, number>} */
  const failures = new Map(); // key -> time before which it is not requested again
  let usedBytes = 0;
  let timer = 0;
  let frame = 0;
  let destroyed = false;

  /** @param {Tile} tile */
  function updateBytes(tile) {
    const surfaces = (tile.surface ? 1 : 0) + (tile.ratio ? 1 : 0) + (tile.mixture ? 1 : 0);
    const size = CODES_BYTES + surfaces * SURFACE_BYTES;
    usedBytes += size - tile.bytes;
    tile.bytes = size;
  }

  function evict() {
    for (const [key, tile] of cache) {
      if (usedBytes <= bytes) return;
      if (tile.frame === frame) continue; // used in this frame
      cache.delete(key);
      usedBytes -= tile.bytes;
    }
  }

  /**
   * @param {string} key
   * @param {Uint16Array} codes
   * @param {number} progress
   */
  function storeTile(key, codes, progress) {
    const old = cache.get(key);
    const pending = progress < 1 && codes.includes(PENDING);
    const wait = old && progress < 1 ? Math.min(LAST_POLL, (old.progress === progress ? 1.7 : 1.2) * old.wait) : FIRST_POLL;
    const next = pending ? performance.now() + wait : Infinity;
    /** @type {Tile} */
    const tile = { codes, progress, pending, wait, next, surface: old?.surface ?? null, version: -1, ratio: null, mixture: null, bytes: 0, frame };
    if (old) usedBytes -= old.bytes;
    cache.delete(key);
    cache.set(key, tile);
    updateBytes(tile);
    evict();
  }

  /** @param {TileRequest} item */
  async function fetchTile(item) {
    const controller = new AbortController();
    const job = { controller, item };
    inFlight.set(item.key, job);
    try {
      const answer = await transport.get(item.name, item.params, { signal: controller.signal, distance: () => job.item.distance, rank: RANK.tile });
      if (destroyed) return;
      const codes = new Uint16Array(answer.buffer);
      if (codes.length !== TILE * TILE) throw new Error(`a tile of ${codes.length} cells`);
      failures.delete(item.key);
      storeTile(item.key, codes, answer.progress);
    } catch (error) {
      if (!error.aborted) failures.set(item.key, performance.now() + RETRY_DELAY);
    } finally {
      if (inFlight.get(item.key) === job) inFlight.delete(item.key);
      if (!destroyed) changed();
    }
  }

  // Time at which a tile is to be requested: 0: now, Infinity: never again.
  /** @param {string} key */
  function getDueTime(key) {
    const tile = cache.get(key);
    return Math.max(tile ? tile.next : 0, failures.get(key) ?? 0);
  }

  return {
    /** Begin a frame: tiles used from now on are not evicted. */
    begin() {
      frame += 1;
    },
    get(/** @type {string} */ key) {
      const tile = cache.get(key);
      if (!tile) return null;
      tile.frame = frame;
      cache.delete(key);
      cache.set(key, tile);
      return tile;
    },
    has: (/** @type {string} */ key) => cache.has(key),
    /**
     * Say what is wanted now: `[{key, name, params, distance}]`. Other requests are cancelled.
     *
     * @param {TileRequest[]} items
     */
    want(items) {
      const keys = new Set(items.map((item) => item.key));
      for (const [key, job] of inFlight) {
        if (keys.has(key)) continue;
        inFlight.delete(key);
        job.controller.abort();
      }
      const now = performance.now();
      let nextDue = Infinity;
      for (const item of [...items].sort((a, b) => a.distance - b.distance)) {
        const job = inFlight.get(item.key);
        if (job) job.item = item;
        else {
          const dueTime = getDueTime(item.key);
          if (dueTime <= now) fetchTile(item);
          else nextDue = Math.min(nextDue, dueTime);
        }
      }
      clearTimeout(timer);
      if (nextDue < Infinity) timer = setTimeout(changed, nextDue - now + 1);
    },
    /**
     * The picture of a tile in these colours; null when there is no time left to paint it in this frame.
     *
     * @param {Tile} tile
     * @param {number} entry
     * @param {Palette} palette
     * @param {Budget} budget
     */
    surface(tile, entry, palette, budget) {
      if (tile.surface && tile.version === palette.version) return tile.surface;
      if (!budget.left()) return tile.surface; // in older colours or codes
      tile.surface ??= createSurface();
      const { codes } = tile;
      const lut = palette.lut(entry);
      paintSurface(tile.surface, (words) => {
        for (let k = 0; k < words.length; k++) words[k] = lut[codes[k]];
      });
      tile.version = palette.version;
      updateBytes(tile);
      return tile.surface;
    },
    /**
     * The picture of how two tiles differ.
     *
     * @param {Tile} first
     * @param {Tile} second
     * @param {[first: number, second: number]} entries
     * @param {Palette} palette
     * @param {Budget} budget
     */
    ratio(first, second, entries, palette, budget) {
      const picture = first.ratio;
      if (picture && picture.second === second && picture.version === palette.version) return picture.surface;
      if (!budget.left()) return picture && picture.second === second ? picture.surface : null;
      const surface = picture?.surface ?? createSurface();
      paintSurface(surface, (words) => {
        if (palette.ratio) fillRatio(words, first.codes, second.codes, palette.ratio);
        else if (palette.difference) fillDifference(words, first.codes, second.codes, palette.difference(...entries));
      });
      first.ratio = { second, version: palette.version, surface };
      updateBytes(first);
      return surface;
    },
    /**
     * The picture of several tiles, a colour for each.
     *
     * @param {Tile[]} parts
     * @param {number[]} entries
     * @param {Palette} palette
     * @param {Budget} budget
     */
    mixture(parts, entries, palette, budget) {
      const [first] = parts;
      const picture = first.mixture;
      const isOfParts = picture?.parts.length === parts.length && picture.parts.every((part, index) => part === parts[index]);
      if (isOfParts && picture.version === palette.version) return picture.surface;
      if (!budget.left() || !palette.mixture) return isOfParts ? picture.surface : null;
      const surface = picture?.surface ?? createSurface();
      const table = palette.mixture(...entries);
      paintSurface(surface, (words) => fillMixture(words, parts.map(({ codes }) => codes), table));
      first.mixture = { parts, version: palette.version, surface };
      updateBytes(first);
      return surface;
    },
    busy: () => inFlight.size > 0,
    bytes: () => usedBytes,
    destroy() {
      destroyed = true;
      clearTimeout(timer);
      for (const job of inFlight.values()) job.controller.abort();
      inFlight.clear();
      cache.clear();
    },
  };
}
