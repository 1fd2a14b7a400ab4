// The map: an attention matrix to pan and zoom. Draws only when something has changed.

import { drawAxes } from "./axes.js";
import { createCamera } from "./camera.js";
import { createCells, drawGrid, drawNumbers } from "./cells.js";
import { createTip, drawCrosshair } from "./crosshair.js";
import { make } from "./elements.js";
import { fitting } from "./geometry.js";
import { arrowStep, createGestures } from "./gestures.js";
import { drawLayer, thumbnailItem, wantedBy } from "./layers.js";
import { hatching, makePalette, readLook } from "./look.js";
import { cellUnder, needsPass, regionOf, sceneOf, targetOf, trackUnder } from "./scene.js";
import { ZOOM_MAX } from "./state.js";
import { createTiles } from "./tiles.js";
import { TRACKS, createTracks, drawTrack, peak } from "./tracks.js";

const PAINT_BUDGET = 7; // ms of a frame for painting tiles; the rest of the frame stays free
const REST = 260; // ms without a movement after which the view is said to rest
const DOUBLE = 500; // ms in which two clicks may be a double click
const CHURN = 90; // ms between two looks at what is wanted while zooming

// Changes after which the canvas under the overlay is drawn anew.
const DRAWN = ["entry", "head", "batch", "pool", "variant", "second", "compare", "row", "column", "zoom", "colour", "low", "high", "ratio", "palette", "dark"];
const TRACK_OF = { top: "column_mass", left: "entropy" };
const COLOURS = ["colour", "low", "high", "ratio", "palette", "dark", "compare"];

function budgetOf(milliseconds) {
  const end = performance.now() + milliseconds;
  let spent = 0;
  return { left: () => spent++ === 0 || performance.now() < end, exhausted: () => performance.now() >= end };
}

/** Mount the map in `element`; the returned object is the `map` of the page's context. */
export function createMap(element, { store, transport, tokens, announce, uid }) {
  const base = make("canvas", { class: "base", "aria-hidden": "true" });
  const hint = make("p", { class: "unseen", id: uid("map-keys") });
  hint.textContent = "Arrow keys move, Shift with arrows moves further, plus and minus zoom, 0 shows all, Enter pins the cell in the middle.";
  const overlay = make("canvas", { class: "overlay", tabIndex: 0, role: "application", "aria-roledescription": "attention map", "aria-describedby": hint.id });
  const stage = make("div", { class: "stage" }, base, overlay, hint);
  const tools = mapTools();
  stage.append(tools.element);
  element.append(stage);
  const ctx = base.getContext("2d", { alpha: false });
  const top = overlay.getContext("2d");
  const motion = window.matchMedia("(prefers-reduced-motion: reduce)");
  const { info } = store.state;
  const spans = Object.entries(info.spans ?? {})
    .map(([name, [start, stop]]) => ({ name, start, stop }))
    .sort((a, b) => a.start - b.start);

  const size = { width: 1, height: 1, dpr: 1 };
  let look = readLook(element);
  let hatch = hatching(look, 1);
  let palette = null;
  let scene = null;
  let dirty = true;
  let frameAsked = 0;
  let pointer = null; // where the pointer is, in CSS pixels
  let keyboard = false; // whether the crosshair stands in the middle, for keys
  let ownHover = false;
  let pinBefore = null;
  let clickedAt = -Infinity;
  let wantedAt = 0;
  let restTimer = 0;
  let missing = { missing: 0, pending: false };
  let overlayEmpty = false;
  let destroyed = false;

  const invalidate = () => {
    dirty = true;
    ask();
  };
  const ask = () => {
    if (!frameAsked && !destroyed) frameAsked = requestAnimationFrame(frame);
  };

  const tiles = createTiles(transport, { changed: invalidate });
  const tracks = createTracks(transport, { changed: invalidate });
  const cells = createCells(transport, { changed: invalidate });
  const tip = createTip(stage, { cells, tiles, tokens, announce, size: () => size });
  const current = () => info.entries[store.state.entry];
  const fitted = () => fitting(size.width, size.height, current(), { side: store.state.compare === "side", hasSpans: spans.length > 0 }, ZOOM_MAX);
  const camera = createCamera({
    store,
    frame: (x, y) => paneAt(x, y),
    bounds: () => ({ m: current().m, n: current().n, least: Math.min(0, fitted().zoom - 0.4) }),
    moved: ask,
    reduced: () => motion.matches,
  });

  function paneAt(x, y) {
    const { panes } = scene ?? newScene();
    return panes.find((pane) => x >= pane.x && x < pane.x + pane.w && y >= pane.y && y < pane.y + pane.h) ?? panes[0];
  }

  function newScene() {
    return sceneOf(store.state, size.width, size.height, size.dpr, spans.length > 0);
  }

  // ---- drawing

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
    scene = newScene();
    const budget = budgetOf(PAINT_BUDGET);
    tiles.begin();
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    ctx.imageSmoothingEnabled = false;
    ctx.fillStyle = look.paper;
    ctx.fillRect(0, 0, base.width, base.height);
    const results = scene.panes.map((pane) => drawPane(pane, budget));
    missing = { missing: results.reduce((sum, one) => sum + one.missing, 0), pending: results.some((one) => one.pending) };
    if (budget.exhausted()) invalidate(); // tiles that wait for their colours
    wantTiles();
    tools.show(store.state.zoom);
    const busy = String(Boolean(dirty || missing.missing || missing.pending || camera.moving()));
    if (overlay.getAttribute("aria-busy") !== busy) overlay.setAttribute("aria-busy", busy);
  }

  function drawPane(pane, budget) {
    const { dpr, scale } = scene;
    const drawn = { missing: 0, pending: false };
    const { region } = pane;
    ctx.save();
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    if (region.r1 > region.r0 && region.c1 > region.c0) {
      const [x0, y0] = [Math.max(Math.round(dpr * pane.field.x), pane.px(0)), Math.max(Math.round(dpr * pane.field.y), pane.py(0))];
      const [x1, y1] = [Math.round(dpr * pane.right), Math.round(dpr * pane.bottom)];
      ctx.beginPath();
      ctx.rect(x0, y0, x1 - x0, y1 - y0);
      ctx.clip();
      ctx.fillStyle = hatchAt(pane);
      ctx.fillRect(x0, y0, x1 - x0, y1 - y0);
      for (const layer of pane.readable ? pane.layers : []) {
        const result = drawLayer(ctx, layer, { tiles, palette, budget, dpr, tone: look.pending });
        drawn.missing += result.missing;
        drawn.pending ||= result.pending;
      }
      if (pane.readable) drawEmptyRows(pane);
      drawGrid(ctx, pane, { scale, dpr, look });
      ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
      if (pane.readable) drawNumbers(ctx, pane, cells, { scale, look, state: store.state, layers: [pane.layers.at(-1)], targetAt: (i, j) => targetOf(scene, pane, i, j) });
    }
    ctx.restore();
    drawMargins(pane);
    drawWords(pane);
    return drawn;
  }

  // The hatching belongs to the matrix: it moves with it.
  function hatchAt(pane) {
    const pattern = ctx.createPattern(hatch.canvas, "repeat");
    const [x, y] = [pane.px(0) % hatch.side, pane.py(0) % hatch.side];
    pattern.setTransform(new DOMMatrix().translate(x, y));
    return pattern;
  }

  function drawEmptyRows(pane) {
    const { empty } = tracks.get(pane.source, "entropy");
    ctx.fillStyle = look.empty;
    for (const [start, stop] of empty) {
      if (stop <= pane.region.r0 || start >= pane.region.r1) continue;
      const [from, to] = [pane.py(start), pane.py(stop)];
      if (to > from) ctx.fillRect(pane.px(pane.region.c0), from, pane.px(pane.region.c1) - pane.px(pane.region.c0), to - from);
    }
  }

  function drawMargins(pane) {
    const { dpr, scale } = scene;
    ctx.save();
    ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
    ctx.beginPath();
    ctx.rect(pane.x, pane.y, pane.w, pane.h);
    ctx.clip();
    if (pane.right > pane.left && pane.bottom > pane.top) {
      drawFrame(pane);
      for (const [side, name] of Object.entries(TRACK_OF)) drawTrack(ctx, pane, side, name, tracks.get(pane.source, name), { scale, look });
      drawAxes(ctx, pane, pane.entry, { scale, tokens, spans, look });
    }
    ctx.restore();
  }

  // Which head is where, when there are two; and why nothing is drawn, when nothing can be.
  function drawWords(pane) {
    const { dpr } = scene;
    const chip = (text, x, y, align) => {
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
    ctx.setTransform(dpr, 0, 0, dpr, 0, 0);
    ctx.lineWidth = 1;
    ctx.font = `12px ${look.sans}`;
    ctx.textBaseline = "middle";
    if (pane.names.upper) chip(pane.names.upper, pane.right - 10, pane.top + 10, "right");
    if (pane.names.lower) chip(pane.names.lower, pane.left + 10, pane.bottom - 34, "left");
    if (!pane.readable) chip("Only statistics of this layer were kept: no cells to show", (pane.left + pane.right) / 2, (pane.top + pane.bottom) / 2 - 12, "center");
    ctx.restore();
  }

  // A line around the matrix, where its edges are in view.
  function drawFrame(pane) {
    const { dpr } = scene;
    ctx.save();
    ctx.setTransform(1, 0, 0, 1, 0, 0);
    const wide = Math.max(1, Math.round(dpr));
    const [x0, y0, x1, y1] = [pane.left, pane.top, pane.right, pane.bottom].map((value) => Math.round(dpr * value));
    ctx.fillStyle = look.frame;
    ctx.fillRect(x0 - wide, y0 - wide, x1 - x0 + 2 * wide, wide);
    ctx.fillRect(x0 - wide, y0 - wide, wide, y1 - y0 + 2 * wide);
    if (pane.bottom >= pane.Y(pane.entry.m) - 0.5) ctx.fillRect(x0 - wide, y1, x1 - x0 + 2 * wide, wide);
    if (pane.right >= pane.X(pane.entry.n) - 0.5) ctx.fillRect(x1, y0 - wide, wide, y1 - y0 + 2 * wide);
    ctx.restore();
  }

  function drawOverlay() {
    const { dpr } = size;
    if (!scene) return;
    point();
    const empty = !store.state.hover && !store.state.pin;
    if (empty && overlayEmpty) return;
    overlayEmpty = empty;
    top.setTransform(1, 0, 0, 1, 0, 0);
    top.clearRect(0, 0, overlay.width, overlay.height);
    top.setTransform(dpr, 0, 0, dpr, 0, 0);
    const { hover, pin } = store.state;
    drawCrosshair(top, scene.panes, { scale: scene.scale, hover, pin, look, keyboard });
  }

  // ---- what is under the pointer, or in the middle for keys

  function point() {
    const middle = () => ({ x: scene.panes[0].cx, y: scene.panes[0].cy });
    const place = keyboard ? middle() : pointer;
    if (!place) return;
    const found = keyboard ? middleCell() : cellUnder(scene, place.x, place.y);
    const target = found && targetOf(scene, found.pane, found.i, found.j);
    ownHover = true;
    if (!target) {
      store.set({ hover: null });
      const track = keyboard ? null : trackUnder(scene, place.x, place.y);
      if (track) pointTrack(track, place);
      else tip.hide();
      return;
    }
    store.set({ hover: { i: found.i, j: found.j } });
    const track = tracks.get(target.source, "entropy");
    target.empty = track.empty.some(([start, stop]) => target.i >= start && target.i < stop);
    const at = keyboard ? { x: found.pane.X(found.j + 0.5), y: found.pane.Y(found.i + 0.5) } : place;
    tip.show(target, at, { level: scene.level, pool: store.state.pool, spoken: keyboard });
  }

  function pointTrack({ pane, side, from, to }, place) {
    const name = TRACK_OF[side];
    const { values } = tracks.get(pane.source, name);
    const axis = side === "top" ? "key" : "query";
    const first = side === "top" ? pane.firstKey : pane.firstQuery;
    tip.showTrack({ label: TRACKS[name].label, axis, first, from, to, best: values && peak(values, from, to) }, place);
  }

  function middleCell() {
    const [pane] = scene.panes;
    if (!pane.readable) return null;
    const clamp = (value, count) => Math.min(count - 1, Math.max(0, Math.floor(value)));
    return { pane, i: clamp(store.state.row, pane.entry.m), j: clamp(store.state.column, pane.entry.n) };
  }

  function setKeyboard(on) {
    if (keyboard === on) return;
    keyboard = on;
    if (!on) {
      tip.hide();
      if (ownHover) store.set({ hover: null });
    }
    ask();
  }

  // Zoomed out a pixel is a block: what is pinned is its largest cell, where that is known.
  function pinnedBy(found) {
    const target = tip.target;
    const { i, j } = found;
    if (!target || !target.best || !scene.level || target.name) return { i, j };
    const { r0, r1, c0, c1 } = target.block;
    return i >= r0 && i < r1 && j >= c0 && j < c1 ? { i: target.best[0], j: target.best[1] } : { i, j };
  }

  function pinAt(found) {
    if (!found) return;
    const cell = pinnedBy(found);
    const { pin } = store.state;
    const letGo = pin && pin.i === cell.i && pin.j === cell.j;
    store.set({ pin: letGo ? null : cell });
    announce(letGo ? "Let go" : `Pinned query ${cell.i + found.pane.firstQuery}, key ${cell.j + found.pane.firstKey}`);
  }

  const act = {
    camera,
    point(x, y) {
      pointer = { x, y };
      if (keyboard) setKeyboard(false);
      ask();
    },
    leave() {
      pointer = null;
      if (keyboard) return;
      tip.hide();
      if (ownHover) store.set({ hover: null });
      ask();
    },
    click(x, y) {
      const now = performance.now();
      if (now - clickedAt > DOUBLE) pinBefore = store.state.pin;
      clickedAt = now;
      act.point(x, y);
      pinAt(cellUnder(scene, x, y));
    },
    double(x, y, out) {
      store.set({ pin: pinBefore }); // the two clicks of a double click were not meant to pin
      camera.zoomBy(out ? -1 : 1, x, y);
    },
    key(name, shift) {
      const { scale, panes } = scene ?? newScene();
      const { field } = panes[0];
      const { row, column } = store.state;
      const [down, right] = [arrowStep(scale, field.h, shift), arrowStep(scale, field.w, shift)];
      const middle = (value) => Math.floor(value) + 0.5;
      const move = (dr, dc) => {
        setKeyboard(true);
        pointer = null;
        camera.stop();
        const { m, n } = current();
        const clamp = (value, count) => Math.min(count - 0.5, Math.max(0.5, middle(value)));
        store.set({ row: clamp(row + dr, m), column: clamp(column + dc, n) });
      };
      const page = Math.max(1, Math.round((0.9 * field.h) / scale));
      const moves = {
        ArrowLeft: [0, -right], ArrowRight: [0, right], ArrowUp: [-down, 0], ArrowDown: [down, 0],
        PageUp: [-page, 0], PageDown: [page, 0], Home: [0, -column], End: [0, current().n],
      };
      if (moves[name]) {
        move(...moves[name]);
        return true;
      }
      if (name !== "Enter") return false;
      if (!keyboard) setKeyboard(true);
      else pinAt(middleCell());
      return true;
    },
  };

  // ---- what is asked for

  function wantTiles() {
    const now = performance.now();
    if (camera.zooming() && now - wantedAt < CHURN) {
      setTimeout(ask, CHURN); // levels that fly by are not asked for
      dirty = true;
      return;
    }
    wantedAt = now;
    const settled = !missing.missing && !missing.pending && !camera.moving();
    const items = new Map();
    const add = (item) => {
      const known = items.get(item.key);
      if (!known || item.distance < known.distance) items.set(item.key, item);
    };
    for (const pane of scene.panes) {
      for (const layer of pane.readable ? pane.layers : []) {
        wantedBy(layer, settled).forEach(add);
        const sampled = (missing.missing || missing.pending) && needsPass(info, layer.level) && !tiles.has(thumbnailItem(layer).key);
        if (sampled) add(thumbnailItem(layer));
      }
    }
    tiles.want([...items.values()]);
  }

  function rest() {
    clearTimeout(restTimer);
    restTimer = setTimeout(() => {
      if (destroyed || !scene || camera.moving()) return;
      for (const pane of scene.panes) {
        const { entry, head, batch, variant } = pane.source;
        transport.get("focus", { entry, head, batch, variant, level: scene.level, ...regionOf(scene) }).catch(() => {}); // only a wish
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
    hatch = hatching(look, dpr);
    if (store.state.zoom === null || whole) store.set(fitted());
    scene = null;
    invalidate();
  }

  function isFitted() {
    const { row, column, zoom } = store.state;
    const fit = fitted();
    return Math.abs(fit.zoom - zoom) < 0.01 && Math.abs(fit.row - row) * 2 ** zoom < 2 && Math.abs(fit.column - column) * 2 ** zoom < 2;
  }

  function recolour() {
    palette = makePalette(store.state, look);
    invalidate();
  }

  function describe() {
    const { r0, r1, c0, c1 } = regionOf(scene ?? newScene());
    const { first_query: query, first_key: key } = current();
    overlay.setAttribute("aria-label", `Attention map, queries ${query + r0} to ${query + r1 - 1}, keys ${key + c0} to ${key + c1 - 1}`);
  }

  const endings = [
    store.on(DRAWN, (state, changed) => {
      if (changed.includes("dark")) {
        look = readLook(element);
        hatch = hatching(look, size.dpr);
      }
      if (changed.some((field) => COLOURS.includes(field))) palette = makePalette(state, look);
      if (changed.includes("compare")) stayFitted(changed);
      tip.hide();
      invalidate();
      rest();
    }),
    store.on(["hover", "pin"], ask),
    store.on("entry", enter),
    tokens.on(invalidate),
    createGestures(overlay, act),
  ];
  const watch = new ResizeObserver(resize);
  watch.observe(stage);
  // A window that moves to a denser screen keeps its size in CSS pixels.
  let density = null;
  function watchDensity() {
    density?.removeEventListener("change", watchDensity);
    density = window.matchMedia(`(resolution: ${window.devicePixelRatio || 1}dppx)`);
    density.addEventListener("change", watchDensity);
    resize();
  }
  const blur = () => setKeyboard(false);
  overlay.addEventListener("blur", blur);

  let sizeBefore = `${current().m} x ${current().n}`;
  function enter() {
    const now = `${current().m} x ${current().n}`;
    if (now !== sizeBefore) store.set(fitted()); // another shape: the old place means nothing there
    sizeBefore = now;
  }

  // One pane or two: what was shown as a whole is still shown as a whole.
  function stayFitted() {
    const { compare } = store.state;
    const side = compare === "side";
    const options = { side: !side, hasSpans: spans.length > 0 };
    const before = fitting(size.width, size.height, current(), options, ZOOM_MAX);
    if (Math.abs(before.zoom - store.state.zoom) < 0.01) store.set(fitted());
  }

  function mapTools() {
    const button = (text, label, run) => {
      const one = make("button", { type: "button", title: label, "aria-label": label }, text);
      one.addEventListener("click", run);
      return one;
    };
    const out = button("−", "Zoom out  −", () => map.zoomBy(-1));
    const closer = button("+", "Zoom in  +", () => map.zoomBy(1));
    const all = button("Fit", "Show the whole matrix  0", () => map.fit());
    const diagonal = button("Diagonal", "Go to the diagonal  d", () => map.diagonal());
    const box = make("div", { class: "map-tools", role: "group", "aria-label": "Zoom" }, make("div", {}, diagonal, all), make("div", {}, out, closer));
    return {
      element: box,
      show(zoom) {
        closer.disabled = zoom >= ZOOM_MAX - 0.001;
      },
    };
  }

  const map = {
    view() {
      const { panes, scale } = scene ?? newScene();
      const { field, row, column } = panes[0];
      return { r0: row(field.y), r1: row(field.y + field.h), c0: column(field.x), c1: column(field.x + field.w), scale };
    },
    visibleRegion: () => regionOf(scene ?? newScene()),
    /** Bring cell (i, j) to the middle. */
    centre(i, j, { zoom } = {}) {
      camera.goTo(i + 0.5, j + 0.5, zoom);
    },
    fit() {
      camera.goTo(fitted().row, fitted().column, fitted().zoom);
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
      const { cx, cy } = (scene ?? newScene()).panes[0];
      camera.zoomBy(doublings, keyboard || !pointer ? cx : pointer.x, keyboard || !pointer ? cy : pointer.y);
    },
    /** The cell at a place in CSS pixels of the canvas: {i, j} or null. */
    cellAt(x, y) {
      const found = cellUnder(scene ?? newScene(), x, y);
      return found && { i: found.i, j: found.j };
    },
    /** The keyboard crosshair: its cell, or null; called with null it goes away. */
    crosshair(gone) {
      if (gone === null) setKeyboard(false);
      const cell = keyboard ? middleCell() : null;
      return cell && { i: cell.i, j: cell.j };
    },
    level: () => (scene ?? newScene()).level,
    refused: () => (scene ?? newScene()).refused,
    /** Whether everything in view has been drawn in its final form. */
    settled: () => !dirty && !missing.missing && !missing.pending && !camera.moving(),
    /** Whether a pass over the matrix is still at work on what is in view. */
    unfinished() {
      const { panes } = scene ?? newScene();
      return missing.pending || panes.some(({ source }) => Object.values(TRACK_OF).some((name) => tracks.get(source, name).progress < 1));
    },
    canvas: () => base,
    focus: () => overlay.focus(),
    destroy() {
      destroyed = true;
      cancelAnimationFrame(frameAsked);
      clearTimeout(restTimer);
      endings.forEach((end) => end());
      watch.disconnect();
      overlay.removeEventListener("blur", blur);
      density.removeEventListener("change", watchDensity);
      camera.stop();
      for (const part of [tip, tiles, tracks, cells]) part.destroy();
      stage.remove();
    },
  };
  watchDensity();
  recolour();
  describe();
  endings.push(store.on(["row", "column", "zoom", "entry"], debouncedLabel()));
  rest();
  return map;

  function debouncedLabel() {
    let timer = 0;
    return () => {
      clearTimeout(timer);
      timer = setTimeout(() => !destroyed && describe(), 400);
    };
  }
}
