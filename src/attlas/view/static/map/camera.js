// The centre and zoom of the map: panning, zooming about a point, and their animations.

import { clamp } from "./geometry.js";
import { ZOOM_MIN, getPlace } from "../data/state.js";

const EASE = 45; // ms in which a zoom covers two thirds of the remaining way
const GLIDE = 260; // ms in which a released map loses two thirds of its speed
const MIN_SPEED = 0.02; // CSS pixels per ms; a slower map stops

/**
 * `frame(x, y)` returns the pane at a point, `bounds()` returns `{m, n, least}` (least: smallest zoom),
 * `getLimit(row, column)` the largest zoom at a cell, `moved()` asks for a frame.
 *
 * @param {{ store: Store, frame: (x: number, y: number) => Pane, bounds: () => { m: number, n: number, least: number }, getLimit: (row: number, column: number) => number, moved: () => void, reduced: () => boolean }} options
 */
export function createCamera({ store, frame, bounds, getLimit, moved, reduced }) {
  /** @type {{ target: number, x: number, y: number } | null} */
  let zooming = null; // {target, x, y}: the target zoom, and the point that stays fixed
  /** @type {{ vx: number, vy: number } | null} */
  let glide = null; // {vx, vy}
  /** @type {{ from: Place, to: Place, start: number } | null} */
  let flight = null; // {from, to, start}
  let lastTime = 0;

  /**
   * @param {number} row
   * @param {number} column
   * @param {number} zoom
   */
  function moveTo(row, column, zoom) {
    const { m, n } = bounds();
    store.set({ row: clamp(row, 0, m), column: clamp(column, 0, n), zoom });
  }

  const clampZoom = (/** @type {number} */ zoom, /** @type {number} */ row, /** @type {number} */ column) => clamp(zoom, bounds().least, getLimit(row, column));

  /**
   * @param {number} zoom
   * @param {number} x
   * @param {number} y
   */
  function zoomTo(zoom, x, y) {
    const { row, column, zoom: before } = getPlace(store.state);
    const { cx, cy } = frame(x, y);
    // The cell under (x, y) stays under it.
    const shift = 1 / 2 ** before - 1 / 2 ** zoom;
    moveTo(row + (y - cy) * shift, column + (x - cx) * shift, zoom);
  }

  function stop() {
    zooming = glide = flight = null;
  }

  function start() {
    lastTime = performance.now();
    moved();
  }

  return {
    stop,
    panBy(/** @type {number} */ dx, /** @type {number} */ dy) {
      const { row, column, zoom } = getPlace(store.state);
      moveTo(row - dy / 2 ** zoom, column - dx / 2 ** zoom, zoom);
    },
    /**
     * Zoom by a number of doublings about a point; `now`: without an animation.
     *
     * @param {number} doublings
     * @param {number} x
     * @param {number} y
     * @param {{ now?: boolean }} [options]
     */
    zoomBy(doublings, x, y, { now = false } = {}) {
      glide = flight = null;
      const { row, column, zoom } = getPlace(store.state);
      const { cx, cy } = frame(x, y);
      // A map that was moved to blocks may be closer than they are drawn; zooming in leaves it there.
      const next = (zooming?.target ?? zoom) + doublings;
      const target = doublings > 0 ? Math.max(zoom, clampZoom(next, row + (y - cy) / 2 ** zoom, column + (x - cx) / 2 ** zoom)) : clampZoom(next, row, column);
      if (now || reduced()) {
        zooming = null;
        zoomTo(target, x, y);
        return;
      }
      zooming = { target, x, y };
      start();
    },
    throwBy(/** @type {number} */ vx, /** @type {number} */ vy) {
      if (reduced() || Math.hypot(vx, vy) < 0.15) return;
      glide = { vx, vy };
      start();
    },
    /**
     * Go to a cell and zoom; animated where it is near.
     *
     * @param {number} row
     * @param {number} column
     * @param {number} [zoom]
     */
    goTo(row, column, zoom) {
      stop();
      const from = getPlace(store.state);
      const to = { row, column, zoom: zoom === undefined ? from.zoom : clampZoom(zoom, row, column) };
      const distance = Math.max(Math.abs(to.row - from.row), Math.abs(to.column - from.column)) * 2 ** Math.min(from.zoom, to.zoom);
      if (reduced() || from.zoom === null || distance > 4000) {
        moveTo(to.row, to.column, to.zoom);
        return;
      }
      flight = { from, to, start: performance.now() };
      start();
    },
    /** Move the centre and zoom, as from a link, into their bounds. */
    hold() {
      const { row, column, zoom } = getPlace(store.state);
      moveTo(row, column, Math.min(getLimit(row, column), Math.max(Math.min(ZOOM_MIN, bounds().least), zoom)));
    },
    /** The largest zoom at the centre. */
    limit() {
      const { row, column } = getPlace(store.state);
      return getLimit(row, column);
    },
    moving: () => Boolean(zooming || glide || flight),
    zooming: () => Boolean(zooming || flight),
    /**
     * Advance the animations; called at the start of a frame. Returns whether one still runs.
     *
     * @param {number} now
     */
    step(now) {
      const elapsed = Math.min(50, Math.max(1, now - lastTime));
      lastTime = now;
      if (zooming) {
        const { zoom } = getPlace(store.state);
        const remaining = zooming.target - zoom;
        const done = Math.abs(remaining) < 0.004;
        zoomTo(done ? zooming.target : zoom + remaining * (1 - Math.exp(-elapsed / EASE)), zooming.x, zooming.y);
        if (done) zooming = null;
      }
      if (flight) {
        const { from, to } = flight;
        const progress = Math.min(1, (now - flight.start) / 220);
        const eased = progress * progress * (3 - 2 * progress);
        const interpolate = (/** @type {keyof Place} */ field) => from[field] + eased * (to[field] - from[field]);
        moveTo(interpolate("row"), interpolate("column"), interpolate("zoom"));
        if (progress >= 1) flight = null;
      }
      if (glide) {
        this.panBy(glide.vx * elapsed, glide.vy * elapsed);
        const loss = Math.exp(-elapsed / GLIDE);
        glide = { vx: glide.vx * loss, vy: glide.vy * loss };
        if (Math.hypot(glide.vx, glide.vy) < MIN_SPEED) glide = null;
      }
      return Boolean(zooming || glide || flight);
    },
  };
}
