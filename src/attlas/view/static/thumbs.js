// Thumbnails of heads: fetched when they come into view, a few at a time, and painted again when colours change.

import { makeLut } from "./colour.js";

const together = 2; // the map's own requests go first
const pause = [3_000, 6_000, 12_000, 30_000, 60_000]; // between looks at one that is not final yet

export function createThumbs({ store, transport, onArrival }) {
  const known = new Map(); // key -> {codes, size, sampled, final, tries}
  const shown = new Map(); // canvas -> {key, entry, head}
  const waiting = new Set();
  const flying = new Map(); // canvas -> AbortController
  const timers = new Map();
  let lut = null;
  let size = 64;

  const look = () => {
    const { batch, variant, pool } = store.state;
    return `${batch}:${variant}:${pool}:${size}`;
  };
  const keyOf = ({ entry, head }) => `${entry}:${head}:${look()}`;

  const watch = new IntersectionObserver(
    (changes) => {
      for (const { target, isIntersecting } of changes) {
        const item = shown.get(target);
        if (!item) continue;
        item.visible = isIntersecting;
        if (isIntersecting) want(target);
        else {
          waiting.delete(target);
          flying.get(target)?.abort();
          clearTimeout(timers.get(target));
        }
      }
    },
    { rootMargin: "160px" },
  );

  function want(canvas) {
    const item = shown.get(canvas);
    const found = known.get(keyOf(item));
    if (found) paint(canvas, found);
    if (!found || !found.final) schedule(canvas, found);
  }
  function schedule(canvas, found) {
    clearTimeout(timers.get(canvas));
    if (!found) {
      waiting.add(canvas);
      pump();
      return;
    }
    const wait = pause[Math.min(found.tries, pause.length - 1)];
    timers.set(
      canvas,
      setTimeout(() => {
        waiting.add(canvas);
        pump();
      }, wait),
    );
  }
  function pump() {
    for (const canvas of waiting) {
      if (flying.size >= together) return;
      waiting.delete(canvas);
      if (!flying.has(canvas)) load(canvas);
    }
  }
  async function load(canvas) {
    const item = shown.get(canvas);
    const key = keyOf(item);
    const { batch, variant, pool } = store.state;
    const stop = new AbortController();
    flying.set(canvas, stop);
    try {
      const { entry, head } = item;
      const answer = await transport.get("thumbnail", { entry, head, batch, variant, pool, size }, { signal: stop.signal });
      const found = {
        codes: new Uint16Array(answer.buffer),
        sampled: Boolean(answer.sampled),
        final: answer.final || !answer.sampled,
        tries: (known.get(key)?.tries ?? -1) + 1,
      };
      found.size = Math.round(Math.sqrt(found.codes.length));
      known.set(key, found);
      item.failed = false;
      if (shown.has(canvas) && keyOf(item) === key) {
        paint(canvas, found);
        if (!found.final && item.visible) schedule(canvas, found);
      }
    } catch (error) {
      if (!error.aborted && !stop.signal.aborted) {
        item.failed = true;
        onArrival(canvas, { sampled: false, failed: error.message });
      }
    } finally {
      flying.delete(canvas);
      pump();
      if (shown.has(canvas) && item.visible && !item.failed && keyOf(item) !== key) want(canvas);
    }
  }
  function paint(canvas, found) {
    lut ??= makeLut(store.state);
    const { codes, size: side } = found;
    if (canvas.width !== side || canvas.height !== side) [canvas.width, canvas.height] = [side, side];
    const image = new ImageData(side, side);
    const pixels = new Uint32Array(image.data.buffer);
    for (let i = 0; i < codes.length; i++) pixels[i] = lut[codes[i]];
    canvas.getContext("2d").putImageData(image, 0, 0);
    onArrival(canvas, { sampled: found.sampled, failed: null });
  }
  const repaint = () => {
    lut = null;
    for (const [canvas, item] of shown) if (item.visible) want(canvas);
  };
  const off = [
    store.on(["colour", "low", "high", "palette", "dark"], repaint),
    store.on(["batch", "variant", "pool"], repaint),
    store.on(["progress"], ({ progress }) => {
      if (progress !== null) return;
      // A head has been read: samples of it can be replaced now.
      for (const [canvas, item] of shown) if (item.visible && known.get(keyOf(item))?.final === false) waiting.add(canvas);
      pump();
    }),
    store.on(["info"], () => {
      known.clear();
      repaint();
    }),
  ];
  return {
    show(canvas, entry, head) {
      shown.set(canvas, { entry, head, visible: false, failed: false });
      watch.observe(canvas);
    },
    resize(pixels) {
      const next = pixels <= 64 ? 64 : pixels <= 128 ? 128 : 256;
      if (next === size) return;
      size = next;
      repaint();
    },
    clear() {
      watch.disconnect();
      for (const stop of flying.values()) stop.abort();
      for (const timer of timers.values()) clearTimeout(timer);
      shown.clear();
      waiting.clear();
      timers.clear();
    },
    destroy() {
      for (const end of off) end();
      this.clear();
    },
  };
}
