// Thumbnails of heads: fetched when they become visible, few at a time, and repainted when colours change.

import { getContext } from "../map/canvas.js";
import { makeLut } from "../map/colour.js";
import { areShares, hasVariant, isSigned } from "../data/weighting.js";

const maxInFlight = 2; // the map's own requests go first
const pollDelays = [3_000, 6_000, 12_000, 30_000, 60_000]; // ms between two requests for a thumbnail that is not final

/** @param {{ store: Store, transport: Requests, onArrival: (canvas: HTMLCanvasElement, answer: { sampled: boolean, failed: string | null }) => void }} options */
export function createThumbs({ store, transport, onArrival }) {
  /** @type {Map<string, Thumbnail>} */
  const cache = new Map(); // key -> {codes, size, sampled, final, tries}
  /** @type {Map<HTMLCanvasElement, ThumbnailItem>} */
  const items = new Map(); // canvas -> {key, entry, head}
  /** @type {Set<HTMLCanvasElement>} */
  const queue = new Set();
  /** @type {Map<Element, AbortController>} */
  const inFlight = new Map(); // canvas -> AbortController
  /** @type {Map<Element, number>} */
  const timers = new Map();
  /** @type {Map<string, Uint32Array>} */
  const luts = new Map(); // by the kind of weights
  let size = 64;

  const getViewKey = () => {
    const { batch, variant } = store.state;
    return `${batch}:${variant}:${size}`;
  };
  const getKey = (/** @type {{ entry: number, head: HeadIndex }} */ { entry, head }) => `${entry}:${head}:${getViewKey()}`;

  // Of what has no such numbers the plain weights are shown.
  const getVariant = (/** @type {number} */ entry) => (hasVariant(store.state.info.entries[entry], store.state.variant) ? store.state.variant : "plain");

  const visibilityObserver = new IntersectionObserver(
    (changes) => {
      for (const { target, isIntersecting } of changes) {
        const item = items.get(/** @type {HTMLCanvasElement} */ (target));
        if (!item) continue;
        item.visible = isIntersecting;
        const canvas = /** @type {HTMLCanvasElement} */ (target);
        if (isIntersecting) requestThumbnail(canvas);
        else {
          queue.delete(canvas);
          inFlight.get(target)?.abort();
          clearTimeout(timers.get(target));
        }
      }
    },
    { rootMargin: "160px" },
  );

  const getItem = (/** @type {HTMLCanvasElement} */ canvas) => /** @type {ThumbnailItem} */ (items.get(canvas));
  /** @param {HTMLCanvasElement} canvas */
  function requestThumbnail(canvas) {
    const item = getItem(canvas);
    const thumbnail = cache.get(getKey(item));
    if (thumbnail) paint(canvas, thumbnail);
    if (!thumbnail || !thumbnail.final) schedule(canvas, thumbnail);
  }
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {Thumbnail | undefined} thumbnail
   */
  function schedule(canvas, thumbnail) {
    clearTimeout(timers.get(canvas));
    if (!thumbnail) {
      queue.add(canvas);
      startRequests();
      return;
    }
    const wait = pollDelays[Math.min(thumbnail.tries, pollDelays.length - 1)];
    timers.set(
      canvas,
      setTimeout(() => {
        queue.add(canvas);
        startRequests();
      }, wait),
    );
  }
  function startRequests() {
    for (const canvas of queue) {
      if (inFlight.size >= maxInFlight) return;
      queue.delete(canvas);
      if (!inFlight.has(canvas)) load(canvas);
    }
  }
  /** @param {HTMLCanvasElement} canvas */
  async function load(canvas) {
    const item = getItem(canvas);
    const key = getKey(item);
    const { batch } = store.state;
    const controller = new AbortController();
    inFlight.set(canvas, controller);
    try {
      const { entry, head } = item;
      const variant = getVariant(entry);
      const answer = await transport.get("thumbnail", { entry, head, batch, variant, pool: "suited", size }, { signal: controller.signal });
      const codes = new Uint16Array(answer.buffer);
      /** @type {Thumbnail} */
      const thumbnail = {
        codes,
        size: Math.round(Math.sqrt(codes.length)),
        sampled: Boolean(answer.sampled),
        final: answer.final || !answer.sampled,
        tries: (cache.get(key)?.tries ?? -1) + 1,
      };
      cache.set(key, thumbnail);
      item.failed = false;
      if (items.has(canvas) && getKey(item) === key) {
        paint(canvas, thumbnail);
        if (!thumbnail.final && item.visible) schedule(canvas, thumbnail);
      }
    } catch (error) {
      if (!error.aborted && !controller.signal.aborted) {
        item.failed = true;
        onArrival(canvas, { sampled: false, failed: error.message });
      }
    } finally {
      inFlight.delete(canvas);
      startRequests();
      if (items.has(canvas) && item.visible && !item.failed && getKey(item) !== key) requestThumbnail(canvas);
    }
  }
  /**
   * @param {HTMLCanvasElement} canvas
   * @param {Thumbnail} thumbnail
   */
  function paint(canvas, thumbnail) {
    const { entry } = getItem(canvas);
    const shown = { ...store.state, entry, variant: getVariant(entry) };
    const kind = `${areShares(shown)} ${isSigned(shown)} ${shown.variant}`;
    const lut = luts.get(kind) ?? makeLut(shown);
    luts.set(kind, lut);
    const { codes, size: side } = thumbnail;
    if (canvas.width !== side || canvas.height !== side) [canvas.width, canvas.height] = [side, side];
    const image = new ImageData(side, side);
    const pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < codes.length; i++) pixels[i] = lut[codes[i]];
    getContext(canvas).putImageData(image, 0, 0);
    onArrival(canvas, { sampled: thumbnail.sampled, failed: null });
  }
  const repaint = () => {
    luts.clear();
    for (const [canvas, item] of items) if (item.visible) requestThumbnail(canvas);
  };
  const subscriptions = [
    store.on(["colour", "low", "high", "palette", "dark"], repaint),
    store.on(["batch", "variant"], repaint),
    store.on(["progress"], ({ progress }) => {
      if (progress !== null) return;
      // A pass has ended: sampled thumbnails can be replaced.
      for (const [canvas, item] of items) if (item.visible && cache.get(getKey(item))?.final === false) queue.add(canvas);
      startRequests();
    }),
    store.on(["info"], () => {
      cache.clear();
      repaint();
    }),
  ];
  return {
    show(/** @type {HTMLCanvasElement} */ canvas, /** @type {number} */ entry, /** @type {HeadIndex} */ head) {
      items.set(canvas, { entry, head, visible: false, failed: false });
      visibilityObserver.observe(canvas);
    },
    resize(/** @type {number} */ pixels) {
      const next = pixels <= 64 ? 64 : pixels <= 128 ? 128 : 256;
      if (next === size) return;
      size = next;
      repaint();
    },
    clear() {
      visibilityObserver.disconnect();
      for (const controller of inFlight.values()) controller.abort();
      for (const timer of timers.values()) clearTimeout(timer);
      items.clear();
      queue.clear();
      timers.clear();
    },
    destroy() {
      for (const unsubscribe of subscriptions) unsubscribe();
      this.clear();
    },
  };
}
