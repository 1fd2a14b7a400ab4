// One frame of the map on its canvas: hatching, heads, numbers, tracks, axes, frame and names.

import { drawAxes } from "./axes.js";
import { drawBorders, getShownStretches } from "./brackets.js";
import { getContext, truncate } from "./canvas.js";
import { drawGrid, drawNumbers } from "./cells.js";
import { drawLayer } from "./layers.js";
import { drawLegend } from "./legend.js";
import { createHatching } from "./look.js";
import { getGridSide } from "../data/held.js";
import { getTarget } from "./scene.js";
import { drawTrack } from "./tracks.js";
import { t } from "../words/words.js";

/**
 * The track at each side: weights that are no shares have no entropy.
 *
 * @param {Pick<Entry, "shares">} entry
 * @returns {Record<"top" | "left", TrackName>}
 */
export const getTrackNames = ({ shares }) => ({ top: "column_mass", left: shares === false ? "max_weight" : "entropy" });
const TRACK_SIDES = /** @type {const} */ (["top", "left"]);

/**
 * A painter on `canvas`. `draw(scene, options)` draws a scene and returns what was missing.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {{ tiles: Tiles, tracks: Tracks, cells: Cells, texts: Texts, outlines: Outlines }} options
 */
export function createPainter(canvas, { tiles, tracks, cells, texts, outlines }) {
  const ctx = getContext(canvas, { alpha: false });
  /** @type {FrameOptions} */
  let frameOptions; // {look, palette, budget, state} of the frame that is being drawn
  /** @type {Scene} */
  let scene;
  /** @type {{ all: HTMLCanvasElement, side: number, look: Look, dpr: number, width: number, height: number } | null} */
  let sheet = null;

  // Hatching as large as the canvas: copying it is much faster than filling with a pattern.
  function getHatchSheet() {
    const { look } = frameOptions;
    const { dpr } = scene;
    const { width, height } = canvas;
    if (!sheet || sheet.look !== look || sheet.dpr !== dpr || sheet.width !== width || sheet.height !== height) {
      const { canvas: pattern, side } = createHatching(look, dpr);
      const all = document.createElement("canvas");
      [all.width, all.height] = [width + side, height + side];
      const paint = getContext(all, { alpha: false });
      paint.fillStyle = paint.createPattern(pattern, "repeat") ?? look.land;
      paint.fillRect(0, 0, all.width, all.height);
      sheet = { all, side, look, dpr, width, height };
    }
    return sheet;
  }

  /**
   * The hatching belongs to the matrix: it moves with it.
   *
   * @param {ScenePane} pane
   * @param {number} x0
   * @param {number} y0
   * @param {number} x1
   * @param {number} y1
   */
  function drawHatching(pane, x0, y0, x1, y1) {
    const { all, side } = getHatchSheet();
    const getOffset = (/** @type {number} */ value, /** @type {number} */ origin) => (((value - origin) % side) + side) % side;
    ctx.drawImage(all, getOffset(x0, pane.px(0)), getOffset(y0, pane.py(0)), x1 - x0, y1 - y0, x0, y0, x1 - x0, y1 - y0);
  }

  /** @param {ScenePane} pane */
  function drawPane(pane) {
    const drawn = { missing: 0, pending: false };
    const { region } = pane;
    if (region.r1 > region.r0 && region.c1 > region.c0) {
      ctx.save();
      clipTo(pane);
      if (pane.readable) drawHeads(pane, drawn);
      ctx.restore();
    }
    drawMargins(pane);
    drawWords(pane);
    return drawn;
  }

  // Nothing is drawn beyond the matrix, in whole device pixels.
  /** @param {ScenePane} pane */
  function clipTo(pane) {
    const { dpr } = scene;
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    const [x0, y0] = [Math.max(Math.round(dpr * pane.field.x), pane.px(0)), Math.max(Math.round(dpr * pane.field.y), pane.py(0))];
    const [x1, y1] = [Math.round(dpr * pane.right), Math.round(dpr * pane.bottom)];
    ctx.beginPath();
    ctx.rect(x0, y0, x1 - x0, y1 - y0);
    ctx.clip();
    if (x1 > x0 && y1 > y0) drawHatching(pane, x0, y0, x1, y1);
  }

  /**
   * @param {ScenePane} pane
   * @param {Drawn} drawn
   */
  function drawHeads(pane, drawn) {
    const { dpr, scale } = scene;
    const { look, palette, budget, state } = frameOptions;
    for (const layer of pane.layers) {
      const result = drawLayer(ctx, layer, { tiles, palette, budget, dpr, tone: look.pending });
      drawn.missing += result.missing;
      drawn.pending ||= result.pending;
    }
    for (const layer of pane.patches) drawPatch(pane, layer, drawn);
    drawEmptyRows(pane);
    drawGrids(pane);
    if (pane.gutter.band) drawBorders(ctx, pane, getShownStretches(outlines, pane, scale), { scale, dpr, look, whole: scene.compare === "triangle" });
    ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
    const layers = pane.layers.slice(-1);
    drawNumbers(ctx, pane, cells, { scale, look, state, layers, targetAt: (i, j) => getTarget(scene, pane, i, j) });
  }

  /**
   * The rectangle of a patch in device pixels.
   *
   * @param {ScenePane} pane
   * @param {PatchLayer} layer
   * @returns {[x: number, y: number, width: number, height: number]}
   */
  const getPatchBox = ({ px, py }, { patch: { r0, r1, c0, c1 } }) => [px(c0), py(r0), px(c1) - px(c0), py(r1) - py(r0)];

  /**
   * The cells of a patch over the blocks of its head.
   *
   * @param {ScenePane} pane
   * @param {PatchLayer} layer
   * @param {Drawn} drawn
   */
  function drawPatch(pane, layer, drawn) {
    const { look, palette, budget } = frameOptions;
    const [x, y, width, height] = getPatchBox(pane, layer);
    ctx.save();
    ctx.beginPath();
    ctx.rect(x, y, width, height);
    ctx.clip();
    const [left, top] = [Math.max(0, x), Math.max(0, y)];
    drawHatching(pane, left, top, Math.min(canvas.width, x + width), Math.min(canvas.height, y + height));
    const result = drawLayer(ctx, layer, { tiles, palette, budget, dpr: scene.dpr, tone: look.pending });
    drawn.missing += result.missing;
    drawn.pending ||= result.pending;
    ctx.restore();
  }

  // Lines between blocks, and in the patches between cells; each patch has a frame.
  /** @param {ScenePane} pane */
  function drawGrids(pane) {
    const { dpr, scale } = scene;
    const { look } = frameOptions;
    ctx.save();
    ctx.beginPath();
    ctx.rect(0, 0, canvas.width, canvas.height);
    for (const layer of pane.patches) ctx.rect(...getPatchBox(pane, layer));
    ctx.clip("evenodd");
    drawGrid(ctx, pane, { scale, dpr, look, side: getGridSide(scene.info, pane) });
    ctx.restore();
    for (const layer of pane.patches) {
      drawGrid(ctx, { ...pane, region: layer.region }, { scale, dpr, look, side: 1 });
      const [x, y, width, height] = getPatchBox(pane, layer);
      ctx.strokeStyle = look.frame;
      ctx.lineWidth = Math.max(1, Math.round(dpr));
      ctx.strokeRect(x - ctx.lineWidth / 2, y - ctx.lineWidth / 2, width + ctx.lineWidth, height + ctx.lineWidth);
    }
  }

  /** @param {ScenePane} pane */
  function drawEmptyRows(pane) {
    const { region, px, py } = pane;
    ctx.fillStyle = frameOptions.look.empty;
    for (const [start, stop] of tracks.get(pane.source, getTrackNames(pane.entry).left).empty) {
      if (stop <= region.r0 || start >= region.r1) continue;
      const [from, to] = [py(start), py(stop)];
      if (to > from) ctx.fillRect(px(region.c0), from, px(region.c1) - px(region.c0), to - from);
    }
  }

  /** @param {ScenePane} pane */
  function drawMargins(pane) {
    const { dpr, scale } = scene;
    const { look } = frameOptions;
    if (pane.right <= pane.left || pane.bottom <= pane.top) return;
    ctx.save();
    ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
    ctx.beginPath();
    ctx.rect(pane.x, pane.y, pane.w, pane.h);
    ctx.clip();
    drawFrame(pane);
    const names = getTrackNames(pane.entry);
    for (const side of TRACK_SIDES) drawTrack(ctx, pane, side, names[side], tracks.get(pane.source, names[side]), { scale, look });
    drawAxes(ctx, pane, pane.entry, { scale, tokens: texts.of(pane.source), stretches: getShownStretches(outlines, pane, scale), look });
    ctx.restore();
  }

  // A line around the matrix, where its edges are in view.
  /** @param {ScenePane} pane */
  function drawFrame(pane) {
    const { dpr } = scene;
    ctx.save();
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    const lineWidth = Math.max(1, Math.round(dpr));
    const [x0, y0, x1, y1] = [pane.left, pane.top, pane.right, pane.bottom].map((value) => Math.round(dpr * value));
    ctx.fillStyle = frameOptions.look.frame;
    ctx.fillRect(x0 - lineWidth, y0 - lineWidth, x1 - x0 + 2 * lineWidth, lineWidth);
    ctx.fillRect(x0 - lineWidth, y0 - lineWidth, lineWidth, y1 - y0 + 2 * lineWidth);
    if (pane.bottom >= pane.Y(pane.entry.m) - 0.5) ctx.fillRect(x0 - lineWidth, y1, x1 - x0 + 2 * lineWidth, lineWidth);
    if (pane.right >= pane.X(pane.entry.n) - 0.5) ctx.fillRect(x1, y0 - lineWidth, lineWidth, y1 - y0 + 2 * lineWidth);
    ctx.restore();
  }

  // The names of two shown heads, or the reason why nothing is drawn.
  /** @param {ScenePane} pane */
  function drawWords(pane) {
    const { look } = frameOptions;
    const drawLabel = (/** @type {string} */ name, /** @type {number} */ x, /** @type {number} */ y, /** @type {"left" | "right" | "center"} */ align) => {
      const text = truncate(ctx, name, pane.right - pane.left - 36);
      const width = ctx.measureText(text).width + 16;
      const left = { right: x - width, left: x, center: x - width / 2 }[align];
      ctx.fillStyle = look.card;
      ctx.strokeStyle = look.line;
      ctx.beginPath();
      ctx.roundRect(left + 0.5, y + 0.5, width, 23, 5);
      ctx.fill();
      ctx.stroke();
      ctx.fillStyle = look.ink;
      ctx.textAlign = "left";
      ctx.fillText(text, left + 8.5, y + 12.5);
    };
    ctx.save();
    ctx.setTransform(scene.dpr, 0, 0, scene.dpr, 0, 0);
    ctx.lineWidth = 1;
    ctx.font = `12px ${look.sans}`;
    ctx.textBaseline = "middle";
    drawLegend(ctx, pane, { look, state: frameOptions.state });
    if (pane.names.upper) drawLabel(pane.names.upper, pane.right - 10, pane.top + 10, "right");
    if (pane.names.lower) drawLabel(pane.names.lower, pane.left + 10, pane.bottom - 34, "left");
    if (!pane.readable) drawLabel(t("Only statistics of this layer were kept: no cells to show"), (pane.left + pane.right) / 2, (pane.top + pane.bottom) / 2 - 12, "center");
    ctx.restore();
  }

  return {
    /**
     * Draw a scene; `options`: {look, palette, budget, state}. Returns {missing, pending}: tiles not loaded, not final.
     *
     * @param {Scene} newScene
     * @param {FrameOptions} options
     */
    draw(newScene, options) {
      [scene, frameOptions] = [newScene, options];
      tiles.begin();
      ctx.setTransform(1, 0, 0, 1, 0, 0);
      ctx.imageSmoothingEnabled = false;
      ctx.fillStyle = frameOptions.look.paper;
      ctx.fillRect(0, 0, canvas.width, canvas.height);
      const results = scene.panes.map(drawPane);
      return { missing: results.reduce((sum, result) => sum + result.missing, 0), pending: results.some((result) => result.pending) };
    },
  };
}
