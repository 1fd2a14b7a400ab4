// A small picture of the whole matrix in a corner of the map while it is zoomed in, with what is in view as a rectangle.

import { getContext } from "./canvas.js";
import { clamp, getCausalOffset, placePane } from "./geometry.js";
import { createLayer, drawLayer } from "./layers.js";
import { getLegendHeight } from "./legend.js";
import { make } from "../panels/elements.js";
import { formatInteger } from "../data/numbers.js";
import { getPlace } from "../data/state.js";
import { t } from "../words/words.js";

const MOST_SIDE = 132; // CSS pixels of its longer side,
const LEAST_SIDE = 58; // below which there is none
const MOST_SHARE = 0.3; // of the shorter side of the map
const LEAST_THICKNESS = 20; // CSS pixels of its shorter side
const MARGIN = 11; // CSS pixels to the edges of the map
const FRAME = 8; // CSS pixels of its frame, both sides together
const NAME_ROOM = 30; // CSS pixels that the names of two heads take in their corners
const PIN_ROOM = 16; // CSS pixels about the pinned cell that stay free
const LEAST_VIEW = 5; // CSS pixels of the rectangle
const STEPS = 24; // arrow keys that lead across the matrix; with Shift a quarter of them

/**
 * Where the picture goes: the first corner of the pane in which it does not cover the pinned cell.
 *
 * @param {Pick<ScenePane, "left" | "top" | "right" | "bottom" | "X" | "Y" | "names" | "legend">} pane
 * @param {{ w: number, h: number }} side
 * @param {Cell | null} pin
 * @returns {Point}
 */
export function chooseCorner({ left, top, right, bottom, X, Y, names, legend }, { w, h }, pin) {
  const [x0, x1] = [left + MARGIN, right - MARGIN - w];
  const [y0, y1] = [top + MARGIN, bottom - MARGIN - h];
  const corners = [
    { x: x1, y: y0 + (names.upper ? NAME_ROOM : 0) + getLegendHeight({ legend }) },
    { x: x1, y: y1 },
    { x: x0, y: y1 - (names.lower ? NAME_ROOM : 0) },
    { x: x0, y: y0 },
  ];
  const isFree = (/** @type {Point} */ { x, y }) => {
    if (!pin) return true;
    const [u, v] = [X(pin.j + 0.5), Y(pin.i + 0.5)];
    return u < x - PIN_ROOM || u > x + w + PIN_ROOM || v < y - PIN_ROOM || v > y + h + PIN_ROOM;
  };
  return corners.find(isFree) ?? corners[0];
}

/**
 * The sides of the picture of an m x n matrix in a pane, in CSS pixels; null where it would be too small to be read.
 *
 * @param {{ w: number, h: number }} field
 * @param {{ m: number, n: number }} size
 */
export function computeSides({ w, h }, { m, n }) {
  const longer = Math.min(MOST_SIDE, Math.floor(MOST_SHARE * Math.min(w, h)));
  if (longer < LEAST_SIDE) return null;
  return { w: Math.max(LEAST_THICKNESS, Math.round(longer * Math.min(1, n / m))), h: Math.max(LEAST_THICKNESS, Math.round(longer * Math.min(1, m / n))) };
}

/**
 * Mount the picture over the map; `draw(scene, options)` is called after each drawing of it.
 *
 * @param {HTMLElement} stage
 * @param {{ store: Store, tiles: Tiles, stop: () => void, announce: Announce }} options
 */
export function createMinimap(stage, { store, tiles, stop, announce }) {
  const canvas = make("canvas", { tabIndex: 0, role: "application", "aria-roledescription": t("minimap") });
  const closeButton = make("button", { type: "button", class: "minimap-close", title: t("Hide the minimap  m"), "aria-label": t("Hide the minimap  m") }, "×");
  const frame = make("div", { class: "minimap", hidden: true }, canvas, closeButton);
  const openButton = make("button", { type: "button", class: "minimap-open", hidden: true, title: t("Show the minimap  m"), "aria-label": t("Show the minimap  m") }, "▣");
  stage.append(frame, openButton);
  /** @type {{ pane: ScenePane, w: number, h: number } | null} */
  let drawn = null;
  /** @type {Point | null} */
  let grip = null; // from the middle of the rectangle to the pointer that drags it, in cells

  const getView = (/** @type {ScenePane} */ { field, row, column, entry: { m, n } }) => ({
    r0: clamp(row(field.y), 0, m),
    r1: clamp(row(field.y + field.h), 0, m),
    c0: clamp(column(field.x), 0, n),
    c1: clamp(column(field.x + field.w), 0, n),
  });
  const hasAllInView = (/** @type {ScenePane} */ { region, entry: { m, n } }) => region.r0 === 0 && region.c0 === 0 && region.r1 === m && region.c1 === n;

  function describe() {
    if (!drawn) return;
    const { region, firstQuery, firstKey } = drawn.pane;
    canvas.setAttribute("aria-label", t("Minimap: queries {0} to {1}, keys {2} to {3} are in view. Arrow keys move the view.", formatInteger(firstQuery + region.r0), formatInteger(firstQuery + region.r1 - 1), formatInteger(firstKey + region.c0), formatInteger(firstKey + region.c1 - 1)));
  }

  /**
   * @param {number} rows
   * @param {number} columns
   */
  function moveBy(rows, columns) {
    if (!drawn) return;
    stop();
    const { m, n } = drawn.pane.entry;
    const { row, column } = getPlace(store.state);
    store.set({ row: clamp(row + rows, 0, m), column: clamp(column + columns, 0, n) });
  }

  // The cell of the matrix under a pointer, from the middle of what is in view.
  /** @param {PointerEvent} event */
  function getCells(event) {
    const { pane, w, h } = /** @type {NonNullable<typeof drawn>} */ (drawn);
    const box = canvas.getBoundingClientRect();
    const { r0, r1, c0, c1 } = getView(pane);
    return { x: ((event.clientX - box.left) / w) * pane.entry.n - (c0 + c1) / 2, y: ((event.clientY - box.top) / h) * pane.entry.m - (r0 + r1) / 2, isInside: isInView(event, box) };
  }
  /**
   * @param {PointerEvent} event
   * @param {DOMRect} box
   */
  function isInView(event, box) {
    const { x, y, w, h } = getRectangle();
    const [u, v] = [event.clientX - box.left, event.clientY - box.top];
    return u >= x && u <= x + w && v >= y && v <= y + h;
  }
  /** @returns {Box} */
  function getRectangle() {
    const { pane, w, h } = /** @type {NonNullable<typeof drawn>} */ (drawn);
    const { r0, r1, c0, c1 } = getView(pane);
    const { m, n } = pane.entry;
    const [width, height] = [Math.max(LEAST_VIEW, ((c1 - c0) / n) * w), Math.max(LEAST_VIEW, ((r1 - r0) / m) * h)];
    return { x: clamp(((c0 + c1) / 2 / n) * w - width / 2, 0, w - width), y: clamp(((r0 + r1) / 2 / m) * h - height / 2, 0, h - height), w: width, h: height };
  }

  /** @param {PointerEvent} event */
  function handlePointerDown(event) {
    if (event.button !== 0 || !drawn) return;
    canvas.setPointerCapture(event.pointerId);
    const { x, y, isInside } = getCells(event);
    grip = isInside ? { x, y } : { x: 0, y: 0 }; // a click beside the rectangle brings its middle there
    if (!isInside) moveBy(y, x);
  }
  /** @param {PointerEvent} event */
  function handlePointerMove(event) {
    if (!grip || !drawn) return;
    const { x, y } = getCells(event);
    moveBy(y - grip.y, x - grip.x);
  }
  function handlePointerUp() {
    grip = null;
    describe();
  }
  /** @param {KeyboardEvent} event */
  function handleKeyDown(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !drawn) return;
    const { m, n } = drawn.pane.entry;
    const [down, right] = [m, n].map((count) => Math.max(1, Math.round((event.shiftKey ? 4 : 1) * count / STEPS)));
    const step = /** @type {Record<string, [rows: number, columns: number]>} */ ({ ArrowLeft: [0, -right], ArrowRight: [0, right], ArrowUp: [-down, 0], ArrowDown: [down, 0], Home: [-m, -n], End: [m, n] })[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    moveBy(...step);
    requestAnimationFrame(() => {
      describe();
      announce(canvas.getAttribute("aria-label") ?? "");
    });
  }
  const toggle = (/** @type {State["minimap"]} */ minimap) => () => {
    const hadFocus = frame.contains(document.activeElement) || document.activeElement === openButton;
    store.set({ minimap });
    if (hadFocus) requestAnimationFrame(() => (minimap === "on" ? canvas : openButton).focus());
  };
  closeButton.addEventListener("click", toggle("off"));
  openButton.addEventListener("click", toggle("on"));
  canvas.addEventListener("pointerdown", handlePointerDown);
  canvas.addEventListener("pointermove", handlePointerMove);
  canvas.addEventListener("pointerup", handlePointerUp);
  canvas.addEventListener("pointercancel", handlePointerUp);
  canvas.addEventListener("keydown", handleKeyDown);
  canvas.addEventListener("focus", describe);

  /**
   * The whole matrix, as the pane shows it, from tiles that are here.
   *
   * @param {Scene} scene
   * @param {FrameOptions} options
   */
  function paint({ dpr }, { look, palette, budget }) {
    const { pane, w, h } = /** @type {NonNullable<typeof drawn>} */ (drawn);
    const { m, n } = pane.entry;
    const [across, down] = [Math.round(w * dpr), Math.round(h * dpr)];
    if (canvas.width !== across || canvas.height !== down) [canvas.width, canvas.height] = [across, down];
    Object.assign(canvas.style, { width: `${w}px`, height: `${h}px` });
    const ctx = getContext(canvas);
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    ctx.fillStyle = look.land;
    ctx.fillRect(0, 0, across, down);
    ctx.imageSmoothingEnabled = true;
    ctx.imageSmoothingQuality = "high";
    ctx.save();
    ctx.scale((w / n) / (h / m), 1); // a matrix whose shorter side is drawn thicker than it is
    const scale = h / m;
    const whole = { x: 0, y: 0, w: n * scale, h };
    const placed = placePane({ ...pane, ...whole, field: whole, cx: whole.w / 2, cy: h / 2 }, { row: m / 2, column: n / 2, scale, dpr, m, n });
    for (const { source, entry, other, transposed } of pane.layers) {
      const layer = createLayer(placed, source, entry, { scale, dpr, transposed, shift: transposed ? getCausalOffset(entry) : 0, other, finest: entry.levels - 1 });
      drawLayer(ctx, layer, { tiles, palette, budget, dpr, tone: look.pending });
    }
    ctx.restore();
    ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
    const { x, y, w: width, h: height } = getRectangle();
    ctx.fillStyle = look.accent;
    ctx.globalAlpha = 0.14;
    ctx.fillRect(x, y, width, height);
    ctx.globalAlpha = 1;
    for (const { thick, style } of [{ thick: 3.5, style: look.card }, { thick: 1.5, style: look.accent }]) {
      ctx.lineWidth = thick;
      ctx.strokeStyle = style;
      ctx.strokeRect(x + 1, y + 1, Math.max(1, width - 2), Math.max(1, height - 2));
    }
  }

  return {
    /**
     * Show what is in view of a scene, in the last of its panes.
     *
     * @param {Scene} scene
     * @param {FrameOptions} options
     */
    draw(scene, options) {
      const pane = scene.panes[scene.panes.length - 1];
      const sides = pane.readable && !hasAllInView(pane) ? computeSides(pane.field, pane.entry) : null;
      const isOn = options.state.minimap === "on";
      const hadFocus = frame.contains(document.activeElement);
      drawn = sides && { pane, ...sides };
      frame.hidden = !sides || !isOn;
      openButton.hidden = !sides || isOn;
      if (hadFocus && !sides) /** @type {HTMLElement | null} */ (stage.querySelector(".overlay"))?.focus();
      if (!sides) return;
      const shown = isOn ? { w: sides.w + FRAME, h: sides.h + FRAME } : { w: 24, h: 24 };
      const { x, y } = chooseCorner(pane, shown, options.state.pin);
      Object.assign((isOn ? frame : openButton).style, { left: `${Math.round(x)}px`, top: `${Math.round(y)}px` });
      if (isOn) paint(scene, options);
    },
    destroy() {
      frame.remove();
      openButton.remove();
    },
  };
}
