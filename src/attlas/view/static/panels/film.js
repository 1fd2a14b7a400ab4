// A film of the map: its frames with words below them, recorded by the browser.

import { getContext } from "../map/canvas.js";
import { drawParagraph } from "./card.js";

const MAX_WIDTH = 1280; // pixels
const BAND = 84; // pixels of a film 1280 pixels wide for the words below the map
const FRAMES = 30; // a second
const BITS = 8e6; // a second; single cells are fine grain
const TYPES = [["video/webm;codecs=vp9", "WebM"], ["video/webm;codecs=vp8", "WebM"], ["video/webm", "WebM"], ["video/mp4", "MP4"]]; // Safari has the last

/** The type of a film that this browser can record, and its name, "WebM"; null where it can record none. */
export function chooseFilmType() {
  if (typeof MediaRecorder === "undefined" || !HTMLCanvasElement.prototype.captureStream) return null;
  const [type, name] = TYPES.find(([each]) => MediaRecorder.isTypeSupported(each)) ?? [];
  return type && name ? { type, name } : null;
}

/**
 * The size of a film of a map, in even numbers of pixels, as encoders want them.
 *
 * @param {{ width: number, height: number }} map in pixels of its canvas
 */
export function computeFilmSize({ width, height }) {
  const even = (/** @type {number} */ number) => 2 * Math.max(1, Math.round(number / 2));
  const scale = Math.min(1, MAX_WIDTH / width);
  const [across, down, band] = [even(scale * width), even(scale * height), even((BAND * Math.max(640, scale * width)) / MAX_WIDTH)];
  return { width: across, height: down + band, map: down, band };
}

/**
 * Draw a frame: the canvases of the map on one another, and the words below.
 *
 * @param {Context} ctx
 * @param {ReturnType<typeof computeFilmSize>} size
 * @param {CanvasImageSource[]} layers
 * @param {{ title: string, says: string, opacity: number }} words
 * @param {PictureStyle} style
 * @param {string} address
 */
export function drawFilmFrame(ctx, { width, height, map, band }, layers, { title, says, opacity }, style, address) {
  ctx.globalAlpha = 1;
  ctx.fillStyle = style.land;
  ctx.fillRect(0, 0, width, map);
  for (const layer of layers) ctx.drawImage(layer, 0, 0, width, map);
  ctx.fillStyle = style.card;
  ctx.fillRect(0, map, width, height - map);
  ctx.fillStyle = style.line;
  ctx.fillRect(0, map, width, 1);
  const [unit, edge] = [band / BAND, Math.round((20 * band) / BAND)];
  ctx.textAlign = "right";
  ctx.fillStyle = style.soft;
  ctx.font = `600 ${15 * unit}px ${style.sans}`;
  ctx.fillText("attlas", width - edge, map + 30 * unit);
  ctx.font = `${13 * unit}px ${style.sans}`;
  if (address) ctx.fillText(address.replace("https://", ""), width - edge, map + 56 * unit, width / 3);
  ctx.textAlign = "left";
  ctx.globalAlpha = opacity;
  const room = width - 3 * edge - (address ? width / 4 : 70 * unit);
  ctx.fillStyle = style.ink;
  ctx.font = `600 ${21 * unit}px ${style.sans}`;
  ctx.fillText(title, edge, map + 31 * unit, room);
  drawParagraph(ctx, says, `${15 * unit}px ${style.sans}`, style.soft, { x: edge, y: map + 54 * unit, width: room, line: 19 * unit });
  ctx.globalAlpha = 1;
}

/**
 * Record what is drawn on a canvas until `stop` is called, which returns the film.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {string} type
 */
export function startFilm(canvas, type) {
  const stream = canvas.captureStream(FRAMES);
  const recorder = new MediaRecorder(stream, { mimeType: type, videoBitsPerSecond: BITS });
  /** @type {Blob[]} */
  const parts = [];
  recorder.addEventListener("dataavailable", ({ data }) => parts.push(data));
  const ended = new Promise((resolve, reject) => {
    recorder.addEventListener("stop", resolve);
    recorder.addEventListener("error", (event) => reject(/** @type {ErrorEvent} */ (event).error ?? new Error("MediaRecorder")));
  });
  ended.catch(() => {}); // told by `stop`
  // A hidden page draws no frames: the film waits for it.
  const followVisibility = () => {
    if (recorder.state !== "inactive") recorder[document.hidden ? "pause" : "resume"]();
  };
  document.addEventListener("visibilitychange", followVisibility);
  recorder.start();
  const end = () => {
    document.removeEventListener("visibilitychange", followVisibility);
    if (recorder.state !== "inactive") recorder.stop();
    for (const track of stream.getTracks()) track.stop();
  };
  return {
    cancel: end,
    async stop() {
      end();
      await ended;
      return new Blob(parts, { type });
    },
  };
}
