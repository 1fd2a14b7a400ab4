// Hover, tooltip and pin: by the pointer, or by keys at the centre of the map.

import { getPlace } from "../data/state.js";
import { describeKind, findBracket, getStretchName } from "./brackets.js";
import { clamp } from "./geometry.js";
import { computeArrowStep } from "./gestures.js";
import { getTrackNames } from "./painter.js";
import { formatInteger } from "../data/numbers.js";
import { findCell, getTarget, findTrack, findTrackLabel } from "./scene.js";
import { describeTrack, explainTrack, findPeak } from "./tracks.js";
import { t } from "../words/words.js";

const DOUBLE_CLICK = 500; // ms in which two clicks may be a double click

/**
 * `scene()` returns what is drawn, `outlines()` what is bracketed along its axes; `go(queries, keys)` brings positions into
 * view; `changed()` requests a frame; `waits(on)` shows that a click waits. The result is also the target of the gestures.
 *
 * @param {{ store: Store, scene: () => Scene, outlines: () => Outlines | null, go: (queries: Span | null, keys: Span | null) => unknown, camera: Camera, tip: Tip, tracks: Tracks, announce: Announce, changed: () => void, waits: (on: boolean) => void }} options
 */
export function createPointing({ store, scene: getScene, outlines: getOutlines, go, camera, tip, tracks, announce, changed, waits }) {
  /** @type {Point | null} */
  let pointer = null; // where the pointer is, in CSS pixels
  let keyboard = false; // whether the crosshair is at the centre, moved by keys
  let ownsHover = false; // whether the hover was set here
  /** @type {Cell | null} */
  let pinBefore = null;
  let clickedAt = -Infinity;
  let clickCount = 0;

  function getCentreCell() {
    const [pane] = getScene().panes;
    if (!pane.readable) return null;
    const { row, column } = getPlace(store.state);
    return { pane, i: clamp(Math.floor(row), 0, pane.entry.m - 1), j: clamp(Math.floor(column), 0, pane.entry.n - 1) };
  }

  function clearHover() {
    tip.hide();
    if (ownsHover) store.set({ hover: null, reading: null });
    ownsHover = false;
  }

  /** @param {boolean} on */
  function setKeyboard(on) {
    if (keyboard === on) return;
    keyboard = on;
    if (!on) clearHover();
    changed();
  }

  /**
   * @param {TrackHit} trackHit
   * @param {Point} place
   */
  function showTrack({ pane, side, from, to }, place) {
    const name = getTrackNames(pane.entry)[side];
    const { values } = tracks.get(pane.source, name);
    const axis = side === "top" ? "key" : "query";
    const first = side === "top" ? pane.firstKey : pane.firstQuery;
    tip.showTrack({ source: pane.source, label: describeTrack(name).label, axis, first, from, to, best: values && findPeak(values, from, to) }, place);
  }

  /**
   * What stands beside the map under the pointer: a track, the label of one, or a bracket.
   *
   * @param {Point} place
   */
  function showMargin(place) {
    const { x, y } = place;
    const drawnScene = getScene();
    const track = findTrack(drawnScene, x, y);
    const label = track ? null : findTrackLabel(drawnScene, x, y);
    const bracket = track || label ? null : findBracket(drawnScene, getOutlines(), x, y);
    if (track) showTrack(track, place);
    else if (label) {
      const name = getTrackNames(label.pane.entry)[label.side];
      tip.showNote(describeTrack(name).label, explainTrack(name, tracks.get(label.pane.source, name).range), place);
    } else if (bracket) {
      const { kind, start, stop } = bracket.stretch;
      tip.showNote(getStretchName(bracket.stretch), t("{0}, tokens {1} to {2}; a click goes there", describeKind(kind), formatInteger(start), formatInteger(stop - 1)), place);
    } else tip.hide();
  }

  // Zoomed out a pixel is a block: its largest cell is fetched and pinned.
  /** @param {Hit | null} hit */
  async function pin(hit) {
    const click = ++clickCount;
    waits(false);
    if (!hit) return;
    const drawnScene = getScene();
    const target = getTarget(drawnScene, hit.pane, hit.i, hit.j);
    if (!target) return;
    let cell = { i: hit.i, j: hit.j };
    if (target.side > 1 && !target.name && target.allowed) {
      waits(true);
      try {
        const [i, j] = (await tip.largest(target)) ?? [cell.i, cell.j];
        cell = { i, j };
      } catch {
        // Not available: the cell under the pointer is pinned.
      }
      if (click !== clickCount) return; // another click, or a double click, has come
      waits(false);
      if (getScene().panes[0].source.key !== drawnScene.panes[0].source.key) return; // of another head
    }
    const before = store.state.pin;
    const unpin = before && before.i === cell.i && before.j === cell.j;
    store.set({ pin: unpin ? null : cell });
    announce(unpin ? t("Let go") : t("Pinned query {0}, key {1}", cell.i + hit.pane.firstQuery, cell.j + hit.pane.firstKey));
  }

  /**
   * Go to what a bracket names: of one text its rows and its columns.
   *
   * @param {BracketHit} hit
   */
  function showStretch({ pane, side, stretch }) {
    const isShared = pane.entry.kind !== "cross";
    go(isShared || side === "query" ? stretch : null, isShared || side === "key" ? stretch : null);
  }

  /**
   * @param {number} rows
   * @param {number} columns
   */
  function moveCrosshair(rows, columns) {
    setKeyboard(true);
    pointer = null;
    camera.stop();
    const { entry } = getScene().panes[0];
    const { row, column } = getPlace(store.state);
    store.set({ row: clamp(Math.floor(row + rows) + 0.5, 0.5, entry.m - 0.5), column: clamp(Math.floor(column + columns) + 0.5, 0.5, entry.n - 0.5) });
  }

  /**
   * The rows and columns by which each key moves.
   *
   * @param {boolean} shift
   * @returns {Record<string, [rows: number, columns: number]>}
   */
  function getSteps(shift) {
    const { scale, panes } = getScene();
    const { field, entry } = panes[0];
    const [down, right] = [computeArrowStep(scale, field.h, shift), computeArrowStep(scale, field.w, shift)];
    const page = Math.max(1, Math.round((0.9 * field.h) / scale));
    return {
      ArrowLeft: [0, -right],
      ArrowRight: [0, right],
      ArrowUp: [-down, 0],
      ArrowDown: [down, 0],
      PageUp: [-page, 0],
      PageDown: [page, 0],
      Home: [0, -entry.n],
      End: [0, entry.n],
    };
  }

  const pointing = {
    camera,
    /** Update hover and tooltip for the drawn scene. */
    update() {
      const place = keyboard ? null : pointer;
      if (!keyboard && !place) return;
      const drawnScene = getScene();
      const hit = place ? findCell(drawnScene, place.x, place.y) : getCentreCell();
      const target = hit && getTarget(drawnScene, hit.pane, hit.i, hit.j);
      ownsHover = true;
      if (!target) {
        store.set({ hover: null, reading: null });
        if (place) showMargin(place);
        else tip.hide();
        return;
      }
      const { empty } = tracks.get(target.source, getTrackNames(target.entry).left);
      target.empty = empty.some(([start, stop]) => target.i >= start && target.i < stop);
      const position = place ?? { x: hit.pane.X(hit.j + 0.5), y: hit.pane.Y(hit.i + 0.5) };
      tip.show(target, position, { pool: store.state.pool, spoken: keyboard });
      const { cell, weight } = tip.reading();
      store.set({ hover: cell ?? { i: hit.i, j: hit.j }, reading: weight });
      if (cell && target.allowed && !store.state.pin) store.set({ pointed: cell }); // the text shows its row
    },
    /** The block of the hovered pixel, until its largest cell is known. */
    block: () => (keyboard || pointer ? tip.reading().block : null),
    point(/** @type {number} */ x, /** @type {number} */ y) {
      pointer = { x, y };
      setKeyboard(false);
      changed();
    },
    leave() {
      pointer = null;
      if (keyboard) return;
      clearHover();
      changed();
    },
    click(/** @type {number} */ x, /** @type {number} */ y) {
      const now = performance.now();
      if (now - clickedAt > DOUBLE_CLICK) pinBefore = store.state.pin;
      clickedAt = now;
      pointing.point(x, y);
      const bracket = findBracket(getScene(), getOutlines(), x, y);
      if (bracket) showStretch(bracket);
      else pin(findCell(getScene(), x, y));
    },
    double(/** @type {number} */ x, /** @type {number} */ y, /** @type {boolean} */ out) {
      clickCount += 1;
      waits(false);
      store.set({ pin: pinBefore }); // the two clicks of a double click were not meant to pin
      camera.zoomBy(out ? -1 : 1, x, y);
    },
    key(/** @type {string} */ name, /** @type {boolean} */ shift) {
      const step = getSteps(shift)[name];
      if (step) moveCrosshair(...step);
      else if (name !== "Enter") return false;
      else if (keyboard) pin(getCentreCell());
      else setKeyboard(true);
      return true;
    },
    /** The fixed point of a zoom by keys: the pointer, else the centre. */
    centre() {
      const { cx, cy } = getScene().panes[0];
      return keyboard || !pointer ? { x: cx, y: cy } : pointer;
    },
    keyboard: () => keyboard,
    setKeyboard,
    cell() {
      const hit = keyboard ? getCentreCell() : null;
      return hit && { i: hit.i, j: hit.j };
    },
  };
  return pointing;
}
