// The pictures of a recording with the weights of one query on their patches.

import { getContext } from "../map/canvas.js";
import { formatInteger, formatNumber, formatPercent } from "../data/numbers.js";
import { areShares } from "../data/weighting.js";
import { make } from "./elements.js";
import { isEqual } from "../data/state.js";
import { t } from "../words/words.js";

const FADED = 0.62; // how far a picture is faded to white
const STRONGEST = 0.85; // opacity of the largest weight
const BARE = 48; // pixels of a patch where there is no picture
const LONGEST = 720; // pixels of the longer side of a canvas

/**
 * The colour of a weight over a picture: blue above 0, red below, stronger the larger it is.
 *
 * @param {number} weight
 * @param {number} largest
 */
export function getPatchColour(weight, largest) {
  const opacity = largest > 0 ? STRONGEST * Math.sqrt(Math.min(1, Math.abs(weight) / largest)) : 0;
  return weight < 0 ? `rgba(120, 38, 20, ${opacity})` : `rgba(13, 60, 110, ${opacity})`;
}

/**
 * The patches of a tile with their weights.
 *
 * @param {ImageTile} tile
 * @param {Float32Array} row
 * @param {number} firstKey
 * @returns {Patch[]}
 */
function listOwnPatches({ rows, columns, box: [top, left, bottom, right], keys }, row, firstKey) {
  const [height, width] = [(bottom - top) / rows, (right - left) / columns];
  return keys.map((position, at) => {
    const [r, c] = [Math.floor(at / columns), at % columns];
    const key = position < 0 ? -1 : position - firstKey;
    return { r, c, key, weight: key >= 0 && key < row.length ? row[key] : NaN, x: left + c * width, y: top + r * height, width, height };
  });
}

/**
 * The patches of a picture with their weights. A patch of a thumbnail gives its weight to the patches of the tiles that it
 * covers, in proportion to the area.
 *
 * @param {ImageTile[]} tiles
 * @param {Float32Array} row
 * @param {number} firstKey
 */
export function listPatches(tiles, row, firstKey) {
  const list = (/** @type {ImageTile[]} */ some) => some.flatMap((tile) => listOwnPatches(tile, row, firstKey));
  const whole = tiles.filter(({ thumbnail }) => !thumbnail);
  if (!whole.length) return list(tiles);
  const patches = list(whole);
  const overlap = (/** @type {number} */ a, /** @type {number} */ across, /** @type {number} */ b, /** @type {number} */ other) => Math.max(0, Math.min(a + across, b + other) - Math.max(a, b));
  for (const small of list(tiles.filter(({ thumbnail }) => thumbnail))) {
    const areas = patches.map(({ x, y, width, height }) => overlap(small.x, small.width, x, width) * overlap(small.y, small.height, y, height));
    const total = areas.reduce((sum, area) => sum + area, 0);
    if (total > 0) areas.forEach((area, at) => area > 0 && (patches[at].weight += (small.weight * area) / total));
  }
  return patches;
}

/**
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountImage(element, { store, transport }) {
  const { info } = store.state;
  /** @type {(HTMLImageElement | null)[]} */
  const pictures = (info.pictures ?? []).map((address) => (address ? make("img", { src: address, alt: "" }) : null));
  /** @type {AbortController | null} */
  let controller = null;
  const figures = make("div", { class: "image-figures" });
  const says = make("p", { class: "image-says" });
  element.append(make("h2", { class: "unseen" }, t("Picture")), figures, says);

  const getActiveCell = (/** @type {State} */ state) => state.pin ?? state.pointed;
  const listGrids = (/** @type {State} */ state) => (info.entries[state.entry].grids ?? []).map((number) => (info.grids ?? [])[number]).filter(({ sequence }) => sequence === state.batch);

  /**
   * Draw one picture, and return its figure.
   *
   * @param {ImageGrid} grid
   * @param {Float32Array | null} row
   * @param {State} state
   */
  function createFigure(grid, row, state) {
    const entry = info.entries[state.entry];
    const picture = pictures[grid.image] ?? null;
    const main = grid.tiles.find(({ thumbnail }) => !thumbnail) ?? grid.tiles[0];
    const columns = main.columns / (main.box[3] - main.box[1]);
    const rows = main.rows / (main.box[2] - main.box[0]);
    const [width, height] = picture?.naturalWidth ? [picture.naturalWidth, picture.naturalHeight] : [BARE * columns, BARE * rows];
    const scale = Math.min(LONGEST / Math.max(width, height), 4);
    const canvas = make("canvas", { width: Math.round(width * scale), height: Math.round(height * scale), role: "img", "aria-label": t("Weights on picture {0}", formatInteger(grid.image + 1)) });
    const ctx = getContext(canvas);
    ctx.fillStyle = "#fff";
    ctx.fillRect(0, 0, canvas.width, canvas.height);
    if (picture?.naturalWidth) {
      ctx.globalAlpha = row ? 1 - FADED : 1;
      ctx.drawImage(picture, 0, 0, canvas.width, canvas.height);
      ctx.globalAlpha = 1;
    }
    const patches = row ? listPatches(grid.tiles, row, entry.first_key) : [];
    const known = patches.filter(({ weight }) => !Number.isNaN(weight));
    const largest = known.reduce((most, { weight }) => Math.max(most, Math.abs(weight)), 0);
    for (const { weight, x, y, width: across, height: down } of known) {
      ctx.fillStyle = getPatchColour(weight, largest);
      // Edges on whole pixels, so that no seam shows between two patches.
      const [x0, y0, x1, y1] = [x * canvas.width, y * canvas.height, (x + across) * canvas.width, (y + down) * canvas.height].map(Math.round);
      ctx.fillRect(x0, y0, x1 - x0, y1 - y0);
    }
    const caption = make("figcaption", {});
    const describe = (/** @type {Patch | undefined} */ patch) => {
      if (!row) caption.textContent = t("Click a token: its weights are drawn on the picture.");
      else if (!patch) caption.textContent = describeWhole(known, state);
      else caption.textContent = t("row {0}, column {1}: {2}", formatInteger(patch.r), formatInteger(patch.c), formatNumber(patch.weight, 4));
    };
    describe(undefined);
    const find = (/** @type {MouseEvent} */ event) => {
      const box = canvas.getBoundingClientRect();
      const [x, y] = [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
      return known.findLast((patch) => x >= patch.x && x < patch.x + patch.width && y >= patch.y && y < patch.y + patch.height);
    };
    canvas.addEventListener("pointermove", (event) => describe(find(event)));
    canvas.addEventListener("pointerleave", () => describe(undefined));
    canvas.addEventListener("click", (event) => {
      const cell = getActiveCell(store.state);
      const patch = find(event);
      if (cell && patch) store.set({ pin: { i: cell.i, j: patch.key } });
    });
    return make("figure", {}, canvas, caption);
  }
  /**
   * @param {Patch[]} known
   * @param {State} state
   */
  function describeWhole(known, state) {
    const total = known.reduce((sum, { weight }) => sum + weight, 0);
    if (!known.length) return t("This file holds no weight of this query on the picture.");
    return areShares(state) ? t("{0} of the weight of the query lies on the picture.", formatPercent(total)) : t("Sum on the picture: {0}", formatNumber(total));
  }

  async function load() {
    controller?.abort();
    controller = new AbortController();
    const { signal } = controller;
    const { state } = store;
    const grids = listGrids(state);
    element.hidden = !grids.length;
    if (!grids.length) return;
    const cell = getActiveCell(state);
    const { entry, head, batch, variant } = state;
    const decoded = pictures.map((picture) => picture?.decode().catch(() => {}));
    try {
      const row = cell && new Float32Array((await transport.get("row", { entry, head, batch, variant, i: cell.i }, { signal })).buffer);
      await Promise.all(decoded);
      if (signal.aborted) return;
      figures.replaceChildren(...grids.map((grid) => createFigure(grid, row, state)));
      says.textContent = "";
    } catch (error) {
      if (signal.aborted) return;
      figures.replaceChildren(...grids.map((grid) => createFigure(grid, null, state)));
      says.textContent = `${error.message}.`;
    }
  }

  /** @type {State | null} */
  let before = null;
  const update = (/** @type {State} */ state) => {
    const place = (/** @type {State} */ { entry, head, batch, variant, pin, pointed }) => [entry, head, batch, variant, (pin ?? pointed)?.i ?? null];
    if (before && isEqual(place(before), place(state))) return;
    before = { ...state };
    load();
  };
  const off = store.on(["entry", "head", "batch", "variant", "pin", "pointed"], update);
  update(store.state);
  return {
    destroy() {
      off();
      controller?.abort();
    },
  };
}
