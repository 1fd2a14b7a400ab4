// Tracks: exact statistics of rows and columns beside the map, at the same zoom.

import { formatNumber } from "../data/numbers.js";
import { t } from "../words/words.js";

const FIRST_POLL_MS = 800;
const LAST_POLL_MS = 6000;
const MIN_LOG_RATIO = 12; // largest over median from which a track is drawn on a log scale

// Whether the scale of a track may be logarithmic.
const LOGARITHMIC = { column_mass: true, column_max: true, entropy: false, effective_keys: true, max_weight: true };

/**
 * The words beside a track: which numbers it shows, and in short.
 *
 * @param {TrackName} name
 */
export function describeTrack(name) {
  return {
    column_mass: { label: t("column mass"), short: t("mass") },
    column_max: { label: t("largest weight"), short: t("largest") },
    entropy: { label: t("entropy"), short: t("entropy") },
    effective_keys: { label: t("effective keys"), short: t("keys") },
    max_weight: { label: t("largest weight"), short: t("largest") },
  }[name];
}

/**
 * What a track shows, in sentences, with the end of its scale.
 *
 * @param {TrackName} name
 * @param {TrackRange | null} range
 */
export function explainTrack(name, range) {
  const what = {
    column_mass: t("The sum of each column: how much attention a key gets from all queries."),
    column_max: t("The largest weight of each column."),
    entropy: t("The entropy of each row in nats: 0 where one key has all the weight, log of the number of keys where all have the same."),
    effective_keys: t("How many keys a row looks at: 1 over the sum of its squared weights."),
    max_weight: t("The largest weight of each row."),
  }[name];
  if (!range) return what;
  const scale = range.signed ? t("The scale reaches to ± {0}", formatNumber(range.high, 2)) : t("The scale ends at {0}", formatNumber(range.high, 2));
  return `${what} ${range.log ? t("{0}, the largest of all, and is logarithmic.", scale) : t("{0}, the largest of all.", scale)}`;
}

/**
 * Largest by size and mean of a range of numbers without NaN; NaN where all are NaN.
 *
 * @param {Float32Array} values
 * @param {number} from
 * @param {number} to
 */
export function summarise(values, from, to) {
  let largest = 0;
  let sum = 0;
  let count = 0;
  for (let k = from; k < to; k++) {
    const value = values[k];
    if (value !== value) continue;
    if (Math.abs(value) > Math.abs(largest)) largest = value;
    sum += value;
    count += 1;
  }
  return count ? { largest, mean: sum / count } : { largest: NaN, mean: NaN };
}

/**
 * The number of largest size of a range: {index, value}; null where all are NaN.
 *
 * @param {Float32Array} values
 * @param {number} from
 * @param {number} to
 * @returns {{ index: number, value: number } | null}
 */
export function findPeak(values, from, to) {
  /** @type {{ index: number, value: number } | null} */
  let best = null;
  for (let k = from; k < to; k++) {
    const value = values[k];
    if (value === value && (best === null || Math.abs(value) > Math.abs(best.value))) best = { index: k, value };
  }
  return best;
}

/**
 * Runs `[start, stop)` of NaN in a finished row track: the rows that may see nothing.
 *
 * @param {Float32Array} values
 */
export function findEmptyRuns(values) {
  /** @type {[start: number, stop: number][]} */
  const runs = [];
  for (let k = 0; k < values.length; k++) {
    if (values[k] === values[k]) continue;
    const start = k;
    while (k < values.length && values[k] !== values[k]) k++;
    runs.push([start, k]);
  }
  return runs;
}

/**
 * The scale of a track: linear from zero, or logarithmic where a few values stand far over the rest and none is negative.
 *
 * @param {Float32Array} values
 * @param {{ log: boolean }} options
 * @returns {TrackRange}
 */
export function computeTrackRange(values, { log }) {
  let largest = 0;
  let signed = false;
  const step = Math.max(1, Math.floor(values.length / 2048));
  /** @type {number[]} */
  const sample = [];
  for (let k = 0; k < values.length; k++) {
    const value = values[k];
    signed ||= value < 0;
    if (Math.abs(value) > largest && Math.abs(value) < Infinity) largest = Math.abs(value);
    if (k % step === 0 && value > 0) sample.push(value);
  }
  const high = largest || 1;
  sample.sort((a, b) => a - b);
  const getQuantile = (/** @type {number} */ fraction) => sample[Math.min(sample.length - 1, Math.floor(fraction * sample.length))] ?? high;
  if (signed) return { low: 0, high, log: false, signed };
  if (!log || high < MIN_LOG_RATIO * getQuantile(0.5)) return { low: 0, high, log: false };
  return { low: Math.max(getQuantile(0.02) / 2, high / 1e6), high, log: true };
}

/**
 * Tracks of the entries that are looked at, fetched whole and kept; while they are being computed they are asked for again.
 *
 * @param {Pick<Requests, "get">} transport
 * @param {{ changed: () => void, maxTracks?: number }} options
 */
export function createTracks(transport, { changed, maxTracks = 24 }) {
  /** @type {Map<string, Track>} */
  const tracks = new Map();
  let destroyed = false;

  /**
   * @param {Track} track
   * @param {{ name: TrackName } & Params} params
   */
  async function fetchTrack(track, params) {
    track.loading = true;
    try {
      const { buffer, progress } = await transport.get("track", params);
      const values = new Float32Array(buffer);
      track.wait = Math.min(LAST_POLL_MS, track.progress === progress ? 1.6 * track.wait : track.wait);
      Object.assign(track, { values, progress, range: computeTrackRange(values, { log: LOGARITHMIC[params.name] }) });
      if ((params.name === "entropy" || params.name === "max_weight") && progress >= 1) track.empty = findEmptyRuns(values);
    } catch {
      track.wait = LAST_POLL_MS;
      track.failed += 1;
    }
    track.loading = false;
    track.next = track.progress >= 1 || track.failed > 5 ? Infinity : performance.now() + track.wait;
    if (destroyed) return;
    changed();
    if (track.next < Infinity) track.timer = setTimeout(changed, track.wait + 1);
  }

  return {
    /**
     * The track as it is now; asked for when it is not there, or not finished.
     *
     * @param {Pick<Source, "entry" | "head" | "batch" | "variant">} source
     * @param {TrackName} name
     */
    get(source, name) {
      const { entry, head, batch, variant } = source;
      const key = `${entry}/${head}/${batch}/${variant}/${name}`;
      let track = tracks.get(key);
      if (!track) {
        track = { values: null, progress: 0, range: null, empty: [], wait: FIRST_POLL_MS, next: 0, failed: 0, loading: false };
        tracks.set(key, track);
        for (const old of tracks.keys()) {
          if (tracks.size <= maxTracks) break;
          clearTimeout(tracks.get(old)?.timer);
          tracks.delete(old);
        }
      } else {
        tracks.delete(key);
        tracks.set(key, track);
      }
      if (!track.loading && performance.now() >= track.next) fetchTrack(track, { entry, head, batch, variant, name });
      return track;
    },
    destroy() {
      destroyed = true;
      for (const track of tracks.values()) clearTimeout(track.timer);
    },
  };
}

/**
 * Draw the track of a side ("top" or "left") of a pane, in CSS pixels.
 *
 * @param {Context} ctx
 * @param {PlacedPane} pane
 * @param {"top" | "left"} side
 * @param {TrackName} name
 * @param {Track} track
 * @param {{ scale: number, look: Look }} options
 */
export function drawTrack(ctx, pane, side, name, track, { scale, look }) {
  const words = describeTrack(name);
  const top = side === "top";
  const { gutter } = pane;
  const maxHeight = gutter.track - 8;
  const base = top ? pane.top - gutter.band - gutter.top : pane.left - gutter.band - gutter.left;
  const [low, high] = top ? [pane.left, pane.right] : [pane.top, pane.bottom];
  drawLabel(ctx, pane, top, base, words, track, look);
  ctx.fillStyle = look.line;
  if (top) ctx.fillRect(low, Math.round(base), high - low, 1);
  else ctx.fillRect(Math.round(base) - 1, low, 1, high - low);
  if (!track.values || !track.range) return;
  const height = createHeightScale(track.range, maxHeight);
  const drawBar = (/** @type {string} */ style, /** @type {number} */ from, /** @type {number} */ to, /** @type {number} */ barHeight) => {
    if (!(barHeight > 0)) return;
    ctx.fillStyle = style;
    if (top) ctx.fillRect(from, base - barHeight, to - from, barHeight);
    else ctx.fillRect(base - barHeight, from, barHeight, to - from);
  };
  const [strong, pale] = [(/** @type {number} */ value) => (value < 0 ? look.trackBelow : look.track), (/** @type {number} */ value) => (value < 0 ? look.trackBelowLight : look.trackLight)];
  const toCell = top ? pane.column : pane.row;
  const toPixel = top ? pane.X : pane.Y;
  const count = track.values.length;
  const isComputing = track.progress < 1;
  if (scale >= 1) {
    const gap = scale >= 6 ? 1 : 0;
    const last = Math.min(count, Math.ceil(toCell(high)));
    for (let k = Math.max(0, Math.floor(toCell(low))); k < last; k++) {
      const value = track.values[k];
      const [from, to] = [Math.max(low, Math.round(toPixel(k))), Math.min(high, Math.round(toPixel(k + 1)) - gap)];
      if (value === value) drawBar(strong(value), from, to, height(value));
      else if (isComputing) drawBar(look.pending, from, to, maxHeight);
    }
    return;
  }
  for (let pixel = Math.floor(low); pixel < high; pixel++) {
    const from = Math.max(0, Math.floor(toCell(pixel)));
    const { largest, mean } = summarise(track.values, from, Math.min(count, Math.max(from + 1, Math.floor(toCell(pixel + 1)))));
    if (largest === largest) {
      drawBar(pale(largest), pixel, pixel + 1, height(largest));
      drawBar(strong(mean), pixel, pixel + 1, height(mean));
    } else if (isComputing) drawBar(look.pending, pixel, pixel + 1, maxHeight);
  }
}

/**
 * @param {TrackRange} range
 * @param {number} maxHeight
 * @returns {(value: number) => number}
 */
function createHeightScale({ low, high, log }, maxHeight) {
  if (!log) return (value) => (maxHeight * Math.min(Math.abs(value), high)) / high;
  const span = Math.log(high / low) || 1;
  // Every positive value has at least one pixel.
  return (value) => (value >= low ? 1 + (maxHeight - 1) * Math.min(1, Math.log(value / low) / span) : value > 0 ? 1 : 0);
}

/**
 * @param {Context} ctx
 * @param {PlacedPane} pane
 * @param {boolean} top
 * @param {number} base
 * @param {{ label: string, short: string }} words
 * @param {Track} track
 * @param {Look} look
 */
function drawLabel(ctx, pane, top, base, words, track, look) {
  const { gutter } = pane;
  const narrow = gutter.track < 30;
  ctx.font = `${narrow ? 9 : 10}px ${look.sans}`;
  ctx.textBaseline = "middle";
  ctx.fillStyle = look.faint;
  const { range } = track;
  if (top) {
    ctx.textAlign = "right";
    const x = pane.left - gutter.band - 7;
    ctx.fillText(narrow ? words.short : words.label, x, base - gutter.track / 2 - (narrow || !range ? 0 : 6));
    if (range && !narrow) ctx.fillText(`${range.log ? t("log, ") : ""}${range.signed ? "±" : "≤"} ${formatNumber(range.high, 2)}`, x, base - gutter.track / 2 + 7);
  } else if (!narrow) {
    ctx.textAlign = "right";
    ctx.fillText(`${range?.signed ? words.short : words.label}${range ? ` ${range.signed ? "±" : "≤"} ${formatNumber(range.high, 2)}` : ""}`, pane.left - gutter.band - 7, pane.top - 22);
  }
}
