// The map: an attention matrix to pan and zoom. Draws only when something has changed.

import { createCamera } from "./camera.js";
import { createCells } from "./cells.js";
import { createTip, drawCrosshair } from "./crosshair.js";
import { make } from "./elements.js";
import { fitting } from "./geometry.js";
import { createGestures } from "./gestures.js";
import { thumbnailItem, wantedBy } from "./layers.js";
import { makePalette, readLook } from "./look.js";
import { TRACK_OF, createPainter } from "./painter.js";
import { createPointing } from "./pointing.js";
import { cellUnder, needsPass, regionOf, sceneOf } from "./scene.js";
import { ZOOM_MAX } from "./state.js";
import { createTiles } from "./tiles.js";
import { createTracks } from "./tracks.js";
import { unitOf } from "./weighting.js";
import { t } from "./words.js";

const PAINT_BUDGET = 7; // ms of a frame for painting tiles; the rest of the frame stays free
const REST = 260; // ms without a movement after which the view is said to rest
const CHURN = 90; // ms between two looks at what is wanted while zooming
const PATIENCE = 6000; // ms without a new tile after which a picture is made of what is here
const LABEL = 400; // ms after a movement until the canvas is described anew

const PLACE = ["row", "column", "zoom"];
const COLOURS = ["colour", "low", "high", "ratio", "difference", "palette", "dark", "compare"];
// Changes after which the canvas under the overlay is drawn anew.
const DRAWN = ["entry", "head", "batch", "pool", "variant", "second", ...PLACE, ...COLOURS];

const KEYS = t("Arrow keys move, Shift with arrows moves further, plus and minus zoom, 0 shows all, Enter pins the cell in the middle.");

// At least one tile is painted in each frame, then as many as there is time for; `short` says whether one had to wait.
function budgetOf(milliseconds) {
  const end = performance.now() + milliseconds;
  let painted = 0;
  let short = false;
  return {
    left() {
      const more = painted === 0 || performance.now() < end;
      painted += 1;
      short ||= !more;
      return more;
    },
    short: () => short,
  };
}

function createStage(element, uid) {
  const hint = make("p", { class: "unseen", id: uid("map-keys") }, KEYS);
  const base = make("canvas", { class: "base", "aria-hidden": "true" });
  const overlay = make("canvas", { class: "overlay", tabIndex: 0, role: "application", "aria-roledescription": t("attention map"), "aria-describedby": hint.id });
  const stage = make("div", { class: "stage" }, base, overlay, hint);
  element.append(stage);
  return { stage, base, overlay };
}

function createTools(element, map) {
  const button = (text, label, run) => {
    const one = make("button", { type: "button", title: label, "aria-label": label }, text);
    one.addEventListener("click", run);
    return one;
  };
  const closer = button("+", t("Zoom in  +"), () => map.zoomBy(1));
  const zoom = make("div", {}, button("−", t("Zoom out  −"), () => map.zoomBy(-1)), closer);
  const places = make("div", {}, button(t("Diagonal"), t("Go to the diagonal  d"), () => map.diagonal()), button(t("Fit"), t("Show the whole matrix  0"), () => map.fit()));
  element.append(places, zoom);
  return {
    show(now) {
      closer.disabled = now >= ZOOM_MAX - 0.001;
    },
  };
}

/** Mount the map in `element`; the returned object is the `map` of the page's context. */
export function createMap(element, { store, transport, tokens, announce, uid, tools: toolsElement }) {
  const { stage, base, overlay } = createStage(element, uid);
  const top = overlay.getContext("2d");
  const motion = window.matchMedia("(prefers-reduced-motion: reduce)");
  const { info } = store.state;
  const spans = Object.entries(info.spans ?? {})
    .map(([name, [start, stop]]) => ({ name, start, stop }))
    .sort((a, b) => a.start - b.start);
  const hasSpans = spans.length > 0;

  const size = { width: 1, height: 1, dpr: 1 };
  const timers = { rest: 0, label: 0, churn: 0 };
  let look = readLook(element);
  let palette = null;
  let drawn = null; // the scene that is on the canvas
  let dirty = true;
  let frameAsked = 0;
  let overlayEmpty = false;
  let wantedAt = 0;
  let lacking = { missing: 0, pending: false };
  let exported = null; // a denser scene whose tiles are wanted too
  let shape = "";
  let destroyed = false;

  const ask = () => {
    if (!frameAsked && !destroyed) frameAsked = requestAnimationFrame(frame);
  };
  const invalidate = () => {
    dirty = true;
    ask();
  };
  const current = () => info.entries[store.state.entry];
  const sceneNow = () => sceneOf(store.state, size.width, size.height, size.dpr, hasSpans);
  const scene = () => drawn ?? sceneNow();
  const fitted = (side = store.state.compare === "side") => fitting(size.width, size.height, current(), { side, hasSpans }, ZOOM_MAX);
  const paneAt = (x, y) => {
    const { panes } = scene();
    return panes.find((pane) => x >= pane.x && x < pane.x + pane.w && y >= pane.y && y < pane.y + pane.h) ?? panes[0];
  };

  const tiles = createTiles(transport, { changed: invalidate });
  const tracks = createTracks(transport, { changed: invalidate });
  const cells = createCells(transport, { changed: invalidate });
  const tip = createTip(stage, { cells, tiles, tokens, announce, changed: ask, size: () => size, unitOfSource: ({ variant }) => unitOf({ info: store.state.info, variant }) });
  const painter = createPainter(base, { tiles, tracks, cells, tokens, spans });
  const camera = createCamera({
    store,
    frame: paneAt,
    bounds: () => ({ m: current().m, n: current().n, least: Math.min(0, fitted().zoom - 0.4) }),
    moved: ask,
    reduced: () => motion.matches,
  });
  const pointing = createPointing({ store, scene, camera, tip, tracks, announce, changed: ask, waits: (on) => stage.classList.toggle("waiting", on) });

  // ---- frames

  function frame(now) {
    frameAsked = 0;
    if (destroyed || store.state.zoom === null) return;
    const moving = camera.step(now);
    if (dirty) drawBase();
    drawOverlay();
    if (moving) ask();
  }

  function drawBase() {
    dirty = false;
    drawn = sceneNow();
    const budget = budgetOf(PAINT_BUDGET);
    lacking = painter.draw(drawn, { look, palette, budget, state: store.state });
    if (budget.short()) invalidate(); // tiles wait for their colours
    wantTiles();
    tools.show(store.state.zoom);
    const busy = String(!settled());
    if (overlay.getAttribute("aria-busy") !== busy) overlay.setAttribute("aria-busy", busy);
  }

  function drawOverlay() {
    if (!drawn) return;
    pointing.update();
    const { hover, pin } = store.state;
    const empty = !hover && !pin;
    if (empty && overlayEmpty) return;
    overlayEmpty = empty;
    top.setTransform(1, 0, 0, 1, 0, 0);
    top.clearRect(0, 0, overlay.width, overlay.height);
    top.setTransform(size.dpr, 0, 0, size.dpr, 0, 0);
    drawCrosshair(top, drawn.panes, { scale: drawn.scale, hover, block: pointing.block(), pin, look, keyboard: pointing.keyboard() });
  }

  const settled = () => !dirty && !lacking.missing && !lacking.pending && !camera.moving();

  // ---- what is asked for

  function wantTiles() {
    const now = performance.now();
    if (camera.zooming() && now - wantedAt < CHURN) {
      clearTimeout(timers.churn); // levels that fly by are not asked for
      timers.churn = setTimeout(invalidate, CHURN);
      return;
    }
    wantedAt = now;
    const incomplete = lacking.missing > 0 || lacking.pending;
    const items = new Map();
    const add = (item) => {
      const known = items.get(item.key);
      if (!known || item.distance < known.distance) items.set(item.key, item);
    };
    const layersOf = ({ panes }) => panes.flatMap((pane) => (pane.readable ? pane.layers : []));
    if (exported) for (const layer of layersOf(exported)) wantedBy(layer, false).forEach(add);
    for (const layer of layersOf(drawn)) {
      wantedBy(layer, !incomplete && !camera.moving()).forEach(add);
      const small = thumbnailItem(layer);
      if (incomplete && needsPass(info, layer.level) && !tiles.has(small.key)) add(small);
    }
    tiles.want([...items.values()]);
  }

  // What the page looks at is computed first.
  function rest() {
    clearTimeout(timers.rest);
    timers.rest = setTimeout(() => {
      if (destroyed || !drawn || camera.moving()) return;
      for (const { source, readable } of drawn.panes) {
        const { entry, head, batch, variant } = source;
        if (!readable) continue;
        transport.get("focus", { entry, head, batch, variant, level: drawn.level, ...regionOf(drawn) }).catch(() => {}); // only a wish
      }
    }, REST);
  }

  // ---- size, theme, state

  function resize() {
    const [width, height] = [stage.clientWidth, stage.clientHeight];
    const dpr = window.devicePixelRatio || 1;
    if (!width || !height || (width === size.width && height === size.height && dpr === size.dpr)) return;
    const whole = store.state.zoom !== null && size.width > 1 && isFitted();
    Object.assign(size, { width, height, dpr });
    for (const canvas of [base, overlay]) {
      canvas.width = Math.round(width * dpr);
      canvas.height = Math.round(height * dpr);
    }
    overlayEmpty = false;
    if (store.state.zoom === null || whole) store.set(fitted());
    drawn = null;
    invalidate();
  }

  function isFitted(side) {
    const { row, column, zoom } = store.state;
    const fit = fitted(side);
    return Math.abs(fit.zoom - zoom) < 0.01 && Math.abs(fit.row - row) * 2 ** zoom < 2 && Math.abs(fit.column - column) * 2 ** zoom < 2;
  }

  // A window that moves to a denser screen keeps its size in CSS pixels.
  let density = null;
  function watchDensity() {
    density?.removeEventListener("change", watchDensity);
    density = window.matchMedia(`(resolution: ${window.devicePixelRatio || 1}dppx)`);
    density.addEventListener("change", watchDensity);
    resize();
  }

  function describe() {
    const { r0, r1, c0, c1 } = regionOf(sceneNow());
    const { first_query: query, first_key: key } = current();
    overlay.setAttribute("aria-label", t("Attention map, queries {0} to {1}, keys {2} to {3}", query + r0, query + r1 - 1, key + c0, key + c1 - 1));
  }

  function follow(state, changed) {
    if (changed.includes("dark")) look = readLook(element);
    if (changed.some((field) => COLOURS.includes(field))) palette = makePalette(state, look);
    const { m, n } = current();
    if (shape !== `${m} x ${n}`) {
      shape = `${m} x ${n}`;
      if (changed.includes("entry") && !changed.includes("zoom")) store.set(fitted()); // the old place means nothing there
    }
    // What was shown as a whole is still shown as a whole when there are two panes.
    if (changed.includes("compare") && !changed.includes("zoom") && isFitted(state.compare !== "side")) store.set(fitted());
    if (changed.some((field) => PLACE.includes(field))) camera.hold();
    tip.hide();
    invalidate();
    rest();
    clearTimeout(timers.label);
    timers.label = setTimeout(describe, LABEL);
  }

  const map = {
    view() {
      const { panes, scale } = scene();
      const { field, row, column } = panes[0];
      return { r0: row(field.y), r1: row(field.y + field.h), c0: column(field.x), c1: column(field.x + field.w), scale };
    },
    visibleRegion: () => regionOf(scene()),
    /** Bring cell (i, j) to the middle. */
    centre(i, j, { zoom } = {}) {
      camera.goTo(i + 0.5, j + 0.5, zoom);
    },
    fit() {
      const { row, column, zoom } = fitted();
      camera.goTo(row, column, zoom);
    },
    /** Keep the row, go to the key that stands for the same token; closer, when all is in view. */
    diagonal() {
      const { row, zoom } = store.state;
      const { m, n, first_query: query, first_key: key } = current();
      const at = Math.min(m - 0.5, Math.max(0.5, Math.floor(row) + 0.5));
      const column = Math.min(n - 0.5, Math.max(0.5, at + query - key));
      camera.goTo(at, column, isFitted() ? Math.min(ZOOM_MAX, zoom + 3) : zoom);
    },
    zoomBy(doublings) {
      const { x, y } = pointing.centre();
      camera.zoomBy(doublings, x, y);
    },
    /** The cell at a place in CSS pixels of the canvas: {i, j} or null. */
    cellAt(x, y) {
      const found = cellUnder(scene(), x, y);
      return found && { i: found.i, j: found.j };
    },
    /** The keyboard crosshair: its cell, or null; called with null it goes away. */
    crosshair(gone) {
      if (gone === null) pointing.setKeyboard(false);
      return pointing.cell();
    },
    level: () => sceneNow().level,
    /** Why the chosen comparison is not drawn, or null. */
    refused: () => sceneNow().refused,
    /** Whether everything in view has been drawn in its final form. */
    settled,
    /** Whether a pass over the matrix is still at work on what is in view. */
    unfinished() {
      const names = Object.values(TRACK_OF);
      return lacking.pending || scene().panes.some(({ source }) => names.some((name) => tracks.get(source, name).progress < 1));
    },
    /** What is shown, `dpr` pixels for a CSS pixel, on a canvas of its own: {canvas, width, height, level}. */
    async picture(dpr, signal) {
      const { width, height } = size;
      const canvas = make("canvas", { width: Math.round(width * dpr), height: Math.round(height * dpr) });
      const dense = sceneOf(store.state, width, height, dpr, hasSpans);
      const paint = createPainter(canvas, { tiles, tracks, cells, tokens, spans });
      const how = { look, palette, budget: { left: () => true }, state: store.state };
      try {
        for (let [left, since] = [Infinity, performance.now()]; ; ) {
          const { missing } = paint.draw(dense, how);
          if (missing < left) [left, since] = [missing, performance.now()];
          if (!missing || performance.now() - since > PATIENCE) return { canvas, width, height, level: dense.level };
          exported = dense;
          invalidate();
          await new Promise((done) => setTimeout(done, 100));
          signal.throwIfAborted();
        }
      } finally {
        exported = null;
        invalidate();
      }
    },
    focus: () => overlay.focus(),
    destroy() {
      destroyed = true;
      cancelAnimationFrame(frameAsked);
      Object.values(timers).forEach(clearTimeout);
      endings.forEach((end) => end());
      camera.stop();
      for (const part of [tip, tiles, tracks, cells]) part.destroy();
      stage.remove();
    },
  };

  const tools = createTools(toolsElement, map);
  const watch = new ResizeObserver(resize);
  const blur = () => pointing.setKeyboard(false);
  const endings = [
    store.on(DRAWN, follow),
    store.on(["hover", "pin"], ask),
    tokens.on(invalidate),
    createGestures(overlay, pointing),
    () => watch.disconnect(),
    () => density.removeEventListener("change", watchDensity),
    () => overlay.removeEventListener("blur", blur),
  ];
  overlay.addEventListener("blur", blur);
  watch.observe(stage);
  shape = `${current().m} x ${current().n}`;
  watchDensity();
  palette = makePalette(store.state, look);
  if (store.state.zoom !== null) camera.hold();
  describe();
  rest();
  invalidate();
  return map;
}
