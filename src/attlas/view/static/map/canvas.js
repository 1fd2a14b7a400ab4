// What is drawn on.

/**
 * The context of a canvas; every browser has it.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {CanvasRenderingContext2DSettings} [options]
 */
export function getContext(canvas, options) {
  return /** @type {Context} */ (canvas.getContext("2d", options));
}

const truncatedTexts = new Map(); // font, width and text -> the text cut to that width

/**
 * The text, cut with an ellipsis where it is wider than `maxWidth` pixels.
 *
 * @param {Context} ctx
 * @param {string} text
 * @param {number} maxWidth
 */
export function truncate(ctx, text, maxWidth) {
  const key = `${ctx.font}|${maxWidth}|${text}`;
  const cached = truncatedTexts.get(key);
  if (cached !== undefined) return cached;
  let truncated = text;
  if (ctx.measureText(text).width > maxWidth) {
    const characters = [...text];
    let [low, high] = [0, characters.length];
    while (low < high) {
      const middle = (low + high + 1) >> 1;
      if (ctx.measureText(`${characters.slice(0, middle).join("")}…`).width <= maxWidth) low = middle;
      else high = middle - 1;
    }
    truncated = `${characters.slice(0, low).join("")}…`;
  }
  if (truncatedTexts.size > 8000) truncatedTexts.clear();
  truncatedTexts.set(key, truncated);
  return truncated;
}
