// The map: an attention matrix to pan and zoom. Draws only when something has changed.

import { getContext } from "./canvas.js";
import { createCamera } from "./camera.js";
import { createCells } from "./cells.js";
import { createTip, drawCrosshair } from "./crosshair.js";
import { make } from "../panels/elements.js";
import { computeFit } from "./geometry.js";
import { createGestures } from "./gestures.js";
import { createMinimap } from "./minimap.js";
import { getZoomLimit } from "../data/held.js";
import { createThumbnailRequest, listWantedTiles } from "./layers.js";
import { makePalette, readLook } from "./look.js";
import { createPainter, getTrackNames } from "./painter.js";
import { createPointing } from "./pointing.js";
import { formatInteger } from "../data/numbers.js";
import { computeBox, computeWhole, describeGrain, needsPass, getRegion, createScene } from "./scene.js";
import { ZOOM_MAX, getPlace } from "../data/state.js";
import { createTiles } from "./tiles.js";
import { createTracks } from "./tracks.js";
import { t } from "../words/words.js";

const PAINT_BUDGET = 7; // ms of a frame for painting tiles; the rest of the frame stays free
const FOCUS_DELAY = 260; // ms without movement before the server is told what is in view
const ZOOM_REQUEST_DELAY = 90; // ms between two tile requests while zooming
const PICTURE_TIMEOUT = 6000; // ms without a new tile after which a picture is made of the loaded ones
const LABEL_DELAY = 400; // ms after a movement before the label of the canvas changes

/** @type {(keyof State)[]} */
const PLACE_FIELDS = ["row", "column", "zoom"];
/** @type {(keyof State)[]} */
const HELD_FIELDS = [...PLACE_FIELDS, "entry", "head", "second", "compare", "more"]; // whose change may need another zoom
/** @type {(keyof State)[]} */
const COLOUR_FIELDS = ["colour", "low", "high", "ratio", "difference", "palette", "dark", "compare", "variant"];
/** @type {(keyof State)[]} */
const BAND_FIELDS = ["outline", "entry", "batch", "second", "compare"]; // on which it depends whether the axes have brackets
// Fields whose change redraws the map.
/** @type {(keyof State)[]} */
const DRAW_FIELDS = ["entry", "head", "batch", "pool", "second", "more", "outline", "minimap", ...PLACE_FIELDS, ...COLOUR_FIELDS];

// At least one tile is painted in each frame, more while there is time; `short()`: whether one had to wait.
/** @param {number} milliseconds */
function createBudget(milliseconds) {
  const deadline = performance.now() + milliseconds;
  let painted = 0;
  let ranOut = false;
  return {
    left() {
      const more = painted === 0 || performance.now() < deadline;
      painted += 1;
      ranOut ||= !more;
      return more;
    },
    short: () => ranOut,
  };
}

/**
 * @param {HTMLElement} element
 * @param {MakeId} uid
 */
function createStage(element, uid) {
  const hint = make("p", { class: "unseen", id: uid("map-keys") }, t("Arrow keys move, Shift with arrows moves further, plus and minus zoom, 0 shows all, Enter pins the cell in the middle."));
  const base = make("canvas", { class: "base", "aria-hidden": "true" });
  const overlay = make("canvas", { class: "overlay", tabIndex: 0, role: "application", "aria-roledescription": t("attention map"), "aria-describedby": hint.id });
  const stage = make("div", { class: "stage" }, base, overlay, hint);
  element.append(stage);
  return { stage, base, overlay };
}

/**
 * @param {HTMLElement} element
 * @param {Pick<AttentionMap, "zoomBy" | "diagonal" | "fit">} map
 */
function createTools(element, map) {
  const createButton = (/** @type {string} */ text, /** @type {string} */ label, /** @type {() => void} */ run) => {
    const element = make("button", { type: "button", title: label, "aria-label": label }, text);
    element.addEventListener("click", run);
    return element;
  };
  const zoomInButton = createButton("+", t("Zoom in  +"), () => map.zoomBy(1));
  const zoom = make("div", { class: "moves" }, createButton("−", t("Zoom out  −"), () => map.zoomBy(-1)), zoomInButton);
  const placeButtons = make("div", { class: "moves places" }, createButton(t("Diagonal"), t("Go to the diagonal  d"), () => map.diagonal()), createButton(t("Fit"), t("Show the whole matrix  0"), () => map.fit()));
  element.append(placeButtons, zoom);
  return {
    show(/** @type {boolean} */ isClosest, /** @type {number} */ side) {
      zoomInButton.disabled = isClosest;
      zoomInButton.title = isClosest && side > 1 ? t("This file has blocks of {0} × {0} cells here, and no smaller ones", formatInteger(side)) : t("Zoom in  +");
    },
  };
}

/**
 * Mount the map in `element`; the returned object is the `map` of the page's context.
 *
 * @param {HTMLElement} element
 * @param {Pick<PageContext, "store" | "transport" | "texts" | "outlines" | "announce" | "uid" | "tools">} context
 */
export function createMap(element, { store, transport, texts, outlines, announce, uid, tools: toolsElement }) {
  const { stage, base, overlay } = createStage(element, uid);
  const overlayContext = getContext(overlay);
  const motion = window.matchMedia("(prefers-reduced-motion: reduce)");
  const { info } = store.state;

  const size = { width: 1, height: 1, dpr: 1 };
  const timers = { rest: 0, label: 0, churn: 0 };
  let look = readLook(element);
  let palette = makePalette(store.state, look);
  /** @type {Scene | null} */
  let drawnScene = null; // the scene that is on the canvas
  let needsDraw = true;
  let frameRequest = 0;
  let overlayEmpty = false;
  let lastRequestTime = 0;
  let incompleteTiles = { missing: 0, pending: false };
  /** @type {Scene | null} */
  let exportScene = null; // a denser scene whose tiles are wanted too
  let hasBand = false; // whether the axes have a band of brackets
  let matrixShape = "";
  let destroyed = false;
  /** @type {Set<() => void>} */
  const settledListeners = new Set();

  const requestDraw = () => {
    if (!frameRequest && !destroyed) frameRequest = requestAnimationFrame(drawFrame);
  };
  const invalidate = () => {
    needsDraw = true;
    requestDraw();
  };
  const getEntry = () => info.entries[store.state.entry];
  const computeScene = () => createScene(store.state, size.width, size.height, size.dpr, hasBand);
  const getScene = () => drawnScene ?? computeScene();
  const computeFitted = (/** @type {boolean} */ side = store.state.compare === "side") => map.whole(getEntry(), side);
  const paneAt = (/** @type {number} */ x, /** @type {number} */ y) => {
    const { panes } = getScene();
    return panes.find((pane) => x >= pane.x && x < pane.x + pane.w && y >= pane.y && y < pane.y + pane.h) ?? panes[0];
  };

  const tiles = createTiles(transport, { changed: invalidate });
  const tracks = createTracks(transport, { changed: invalidate });
  const cells = createCells(transport, { changed: invalidate });
  const tip = createTip(stage, { cells, tiles, texts, announce, changed: requestDraw, size: () => size, infoOf: () => store.state.info });
  const painter = createPainter(base, { tiles, tracks, cells, texts, outlines });
  const camera = createCamera({
    store,
    frame: paneAt,
    bounds: () => ({ m: getEntry().m, n: getEntry().n, least: Math.min(0, computeFitted().zoom - 0.4) }),
    getLimit: (row, column) => getZoomLimit(info, store.state, row, column),
    moved: requestDraw,
    reduced: () => motion.matches,
  });
  const minimap = createMinimap(stage, { store, tiles, stop: camera.stop, announce });
  const pointing = createPointing({ store, scene: getScene, outlines: () => (hasBand ? outlines : null), go: (queries, keys) => map.showPositions(queries, keys), camera, tip, tracks, announce, changed: requestDraw, waits: (on) => stage.classList.toggle("waiting", on) });

  // ---- frames

  /** @param {number} now */
  function drawFrame(now) {
    frameRequest = 0;
    if (destroyed || store.state.zoom === null) return;
    const moving = camera.step(now);
    if (needsDraw) drawBase();
    drawOverlay();
    if (moving) requestDraw();
  }

  function drawBase() {
    needsDraw = false;
    drawnScene = computeScene();
    const budget = createBudget(PAINT_BUDGET);
    const options = { look, palette, budget, state: store.state };
    incompleteTiles = painter.draw(drawnScene, options);
    minimap.draw(drawnScene, options);
    if (budget.short()) invalidate(); // tiles wait for their colours
    requestTiles();
    const grain = describeGrain(drawnScene);
    tools.show(getPlace(store.state).zoom >= camera.limit() - 0.001, grain.side);
    store.set({ grain });
    const busy = String(!isSettled());
    if (overlay.getAttribute("aria-busy") !== busy) overlay.setAttribute("aria-busy", busy);
    if (isSettled()) settledListeners.forEach((listener) => listener());
  }

  function drawOverlay() {
    if (!drawnScene) return;
    pointing.update();
    const { hover, pin } = store.state;
    const empty = !hover && !pin;
    if (empty && overlayEmpty) return;
    overlayEmpty = empty;
    overlayContext.setTransform(1, 0, 0, 1, 0, 0);
    overlayContext.clearRect(0, 0, overlay.width, overlay.height);
    overlayContext.setTransform(size.dpr, 0, 0, size.dpr, 0, 0);
    drawCrosshair(overlayContext, drawnScene.panes, { scale: drawnScene.scale, hover, block: pointing.block(), pin, look, keyboard: pointing.keyboard() });
  }

  const isSettled = () => !needsDraw && !incompleteTiles.missing && !incompleteTiles.pending && !camera.moving();

  // ---- what is asked for

  function requestTiles() {
    const now = performance.now();
    if (camera.zooming() && now - lastRequestTime < ZOOM_REQUEST_DELAY) {
      clearTimeout(timers.churn); // levels passed while zooming are not requested
      timers.churn = setTimeout(invalidate, ZOOM_REQUEST_DELAY);
      return;
    }
    lastRequestTime = now;
    const incomplete = incompleteTiles.missing > 0 || incompleteTiles.pending;
    /** @type {Map<string, TileRequest>} */
    const items = new Map();
    const add = (/** @type {TileRequest} */ item) => {
      const existing = items.get(item.key);
      if (!existing || item.distance < existing.distance) items.set(item.key, item);
    };
    const layersOf = (/** @type {Scene} */ { panes }) => panes.flatMap((pane) => (pane.readable ? [...pane.layers, ...pane.patches] : []));
    if (exportScene) for (const layer of layersOf(exportScene)) listWantedTiles(layer, false).forEach(add);
    for (const layer of layersOf(getScene())) {
      listWantedTiles(layer, !incomplete && !camera.moving()).forEach(add);
      const thumbnail = createThumbnailRequest(layer);
      if (incomplete && needsPass(info, layer.level) && !tiles.has(thumbnail.key)) add(thumbnail);
    }
    tiles.want([...items.values()]);
  }

  // Tell the server what is in view, so that it is computed first.
  function scheduleFocus() {
    clearTimeout(timers.rest);
    timers.rest = setTimeout(() => {
      if (destroyed || !drawnScene || camera.moving()) return;
      for (const { source, readable } of drawnScene.panes) {
        const { entry, head, batch, variant } = source;
        if (!readable) continue;
        transport.get("focus", { entry, head, batch, variant, level: drawnScene.level, ...getRegion(drawnScene) }).catch(() => {}); // not needed
      }
    }, FOCUS_DELAY);
  }

  // ---- size, theme, state

  /**
   * Give the canvases the pixels that the screen has there, so that none is resampled. Where a side of the stage is no
   * whole number of pixels, the browser says how it rounds; where it does not, the canvases are a little smaller.
   *
   * @param {ResizeObserverSize} [pixels]
   */
  function resize(pixels) {
    const dpr = window.devicePixelRatio || 1;
    const box = stage.getBoundingClientRect();
    const isKnown = pixels !== undefined && Math.abs(pixels.inlineSize - dpr * box.width) < 1 && Math.abs(pixels.blockSize - dpr * box.height) < 1;
    const [across, down] = isKnown ? [pixels.inlineSize, pixels.blockSize] : [box.width, box.height].map((side) => Math.floor(dpr * side + 0.01));
    const [width, height] = [across / dpr, down / dpr];
    if (!across || !down || (width === size.width && height === size.height && dpr === size.dpr)) return;
    const wasFitted = store.state.zoom !== null && size.width > 1 && isFitted();
    Object.assign(size, { width, height, dpr });
    for (const canvas of [base, overlay]) {
      canvas.width = across;
      canvas.height = down;
      Object.assign(canvas.style, isKnown ? { width: "", height: "", imageRendering: "" } : { width: `${width}px`, height: `${height}px`, imageRendering: "pixelated" });
    }
    overlayEmpty = false;
    if (store.state.zoom === null || wasFitted) store.set(computeFitted());
    drawnScene = null;
    invalidate();
  }

  /** @param {boolean} [side] */
  function isFitted(side) {
    const { row, column, zoom } = getPlace(store.state);
    const fit = computeFitted(side);
    return Math.abs(fit.zoom - zoom) < 0.01 && Math.abs(fit.row - row) * 2 ** zoom < 2 && Math.abs(fit.column - column) * 2 ** zoom < 2;
  }

  // A window that moves to a denser screen keeps its size in CSS pixels.
  /** @type {MediaQueryList | null} */
  let density = null;
  function watchDensity() {
    density?.removeEventListener("change", watchDensity);
    density = window.matchMedia(`(resolution: ${window.devicePixelRatio || 1}dppx)`);
    density.addEventListener("change", watchDensity);
    resize();
    watchSize();
  }

  // An observation that begins reports at once; Safari counts no pixels of the screen.
  function watchSize() {
    resizeObserver.disconnect();
    try {
      resizeObserver.observe(stage, { box: "device-pixel-content-box" });
    } catch {
      resizeObserver.observe(stage);
    }
  }

  // The band of brackets opens once the outline of a text that is shown has arrived; a map that is fitted stays so.
  function followOutline() {
    const { outline, compare, second, batch } = store.state;
    const places = [store.state, ...(compare === "side" && second ? [{ ...second, batch }] : [])];
    const isNeeded = outline === "on" && places.map(outlines.of).some(({ query, key }) => query.length + key.length > 0);
    if (isNeeded !== hasBand) {
      const wasFitted = store.state.zoom !== null && isFitted();
      hasBand = isNeeded;
      if (wasFitted) store.set(computeFitted());
    }
    invalidate();
  }

  function describe() {
    const { r0, r1, c0, c1 } = getRegion(computeScene());
    const { first_query: query, first_key: key } = getEntry();
    overlay.setAttribute("aria-label", t("Attention map, queries {0} to {1}, keys {2} to {3}", query + r0, query + r1 - 1, key + c0, key + c1 - 1));
  }

  /**
   * @param {State} state
   * @param {(keyof State)[]} changed
   */
  function update(state, changed) {
    if (changed.includes("dark")) look = readLook(element);
    if (changed.some((field) => COLOUR_FIELDS.includes(field))) palette = makePalette(state, look);
    if (changed.some((field) => BAND_FIELDS.includes(field))) followOutline();
    const { m, n } = getEntry();
    if (matrixShape !== `${m} x ${n}`) {
      matrixShape = `${m} x ${n}`;
      if (changed.includes("entry") && !changed.includes("zoom")) store.set(computeFitted()); // the old position has no meaning there
    }
    // A fitted map stays fitted when a pane is added or removed.
    if (changed.includes("compare") && !changed.includes("zoom") && isFitted(state.compare !== "side")) store.set(computeFitted());
    if (state.zoom !== null && changed.some((field) => HELD_FIELDS.includes(field))) camera.hold();
    tip.hide();
    invalidate();
    scheduleFocus();
    clearTimeout(timers.label);
    timers.label = setTimeout(describe, LABEL_DELAY);
  }

  const map = {
    view() {
      const { panes, scale } = getScene();
      const { field, row, column } = panes[0];
      return { r0: row(field.y), r1: row(field.y + field.h), c0: column(field.x), c1: column(field.x + field.w), scale };
    },
    visibleRegion: () => getRegion(getScene()),
    /**
     * The place from which a matrix is seen as a whole.
     *
     * @param {Entry} entry
     * @param {boolean} side whether two heads are shown beside each other
     */
    whole: (entry, side) => computeFit(size.width, size.height, entry, { side, hasBand }, ZOOM_MAX),
    /** The size of the map in CSS pixels, and what is drawn on it: the matrix, and the marks over it. */
    drawn: () => ({ ...size, layers: [base, overlay] }),
    /**
     * Bring cell (i, j) to the middle.
     *
     * @param {number} i
     * @param {number} j
     * @param {{ zoom?: number }} [options]
     */
    centre(i, j, { zoom } = {}) {
      camera.goTo(i + 0.5, j + 0.5, zoom);
    },
    /**
     * Bring the queries and keys at some positions of the text into view, null: any; returns whether the matrix has them.
     *
     * @param {Span | null} queries
     * @param {Span | null} keys
     */
    showPositions(queries, keys) {
      const { m, n, first_query: firstQuery, first_key: firstKey } = getEntry();
      const place = (/** @type {Span | null} */ span, /** @type {number} */ first, /** @type {number} */ count) => span && [Math.max(0, span.start - first), Math.min(count, span.stop - first)];
      const [rows, columns] = [place(queries, firstQuery, m), place(keys, firstKey, n)];
      const ranges = [rows, columns].filter((range) => range !== null);
      if (ranges.some(([start, stop]) => start >= stop)) return false;
      const { r0, r1, c0, c1, scale } = map.view();
      const pixels = Math.min((r1 - r0) * scale, (c1 - c0) * scale);
      const getMiddle = (/** @type {number[] | null} */ range, /** @type {number} */ otherwise) => (range ? (range[0] + range[1] - 1) / 2 : otherwise);
      map.centre(getMiddle(rows, (r0 + r1) / 2), getMiddle(columns, (c0 + c1) / 2), { zoom: Math.log2(pixels / Math.max(...ranges.map(([start, stop]) => stop - start))) });
      return true;
    },
    fit() {
      const { row, column, zoom } = computeFitted();
      camera.goTo(row, column, zoom);
    },
    /** Keep the row, go to the key that stands for the same token; closer, when all is in view. */
    diagonal() {
      const { row, zoom } = getPlace(store.state);
      const { m, n, first_query: query, first_key: key } = getEntry();
      const position = Math.min(m - 0.5, Math.max(0.5, Math.floor(row) + 0.5));
      const column = Math.min(n - 0.5, Math.max(0.5, position + query - key));
      camera.goTo(position, column, isFitted() ? Math.min(ZOOM_MAX, zoom + 3) : zoom);
    },
    zoomBy(/** @type {number} */ doublings) {
      const { x, y } = pointing.centre();
      camera.zoomBy(doublings, x, y);
    },
    /**
     * The keyboard crosshair: its cell, or null; called with null it goes away.
     *
     * @param {null} [value]
     */
    crosshair(value) {
      if (value === null) pointing.setKeyboard(false);
      return pointing.cell();
    },
    /** Whether the whole matrix is in view, as it is at first. */
    fitted: () => store.state.zoom === null || isFitted(),
    /** Why the chosen comparison is not drawn, or null. */
    refused: () => computeScene().refusal,
    /** Whether everything in view has been drawn in its final form. */
    settled: isSettled,
    /**
     * Call `listener()` after each drawing that left nothing in view unfinished; returns the function that ends it.
     *
     * @param {() => void} listener
     */
    onSettled(listener) {
      settledListeners.add(listener);
      return () => settledListeners.delete(listener);
    },
    /** Whether a pass over the matrix is still at work on what is in view. */
    unfinished() {
      return incompleteTiles.pending || getScene().panes.some(({ source, entry }) => Object.values(getTrackNames(entry)).some((name) => tracks.get(source, name).progress < 1));
    },
    /**
     * What is shown, `dpr` pixels for a CSS pixel, on a canvas of its own: {canvas, width, height, grain, box}.
     *
     * @param {number} dpr
     * @param {AbortSignal} signal
     * @returns {Promise<MapPicture>}
     */
    async picture(dpr, signal) {
      const { width, height } = size;
      const canvas = make("canvas", { width: Math.round(width * dpr), height: Math.round(height * dpr) });
      const dense = createScene(store.state, width, height, dpr, hasBand);
      const paint = createPainter(canvas, { tiles, tracks, cells, texts, outlines });
      const options = { look, palette, budget: { left: () => true }, state: store.state };
      try {
        for (let [left, since] = [Infinity, performance.now()]; ; ) {
          const { missing } = paint.draw(dense, options);
          if (missing < left) [left, since] = [missing, performance.now()];
          if (!missing || performance.now() - since > PICTURE_TIMEOUT) return { canvas, width, height, grain: describeGrain(dense), box: computeBox(dense), ...computeWhole(dense, store.state.pin) };
          exportScene = dense;
          invalidate();
          await new Promise((done) => setTimeout(done, 100));
          signal.throwIfAborted();
        }
      } finally {
        exportScene = null;
        invalidate();
      }
    },
    destroy() {
      destroyed = true;
      cancelAnimationFrame(frameRequest);
      Object.values(timers).forEach(clearTimeout);
      cleanups.forEach((cleanup) => cleanup());
      camera.stop();
      for (const part of [tip, tiles, tracks, cells, minimap]) part.destroy();
      stage.remove();
    },
  };

  const tools = createTools(toolsElement, map);
  const resizeObserver = new ResizeObserver(([{ devicePixelContentBoxSize: pixels }]) => resize(pixels?.[0]));
  const handleBlur = () => pointing.setKeyboard(false);
  /** @type {(() => void)[]} */
  const cleanups = [
    store.on(DRAW_FIELDS, update),
    store.on(["hover"], requestDraw),
    store.on(["pin"], invalidate), // the minimap leaves it free
    texts.on(invalidate),
    outlines.on(followOutline),
    createGestures(overlay, pointing),
    () => resizeObserver.disconnect(),
    () => density?.removeEventListener("change", watchDensity),
    () => overlay.removeEventListener("blur", handleBlur),
  ];
  overlay.addEventListener("blur", handleBlur);
  matrixShape = `${getEntry().m} x ${getEntry().n}`;
  followOutline();
  watchDensity();
  if (store.state.zoom !== null) camera.hold();
  describe();
  scheduleFocus();
  invalidate();
  return map;
}
