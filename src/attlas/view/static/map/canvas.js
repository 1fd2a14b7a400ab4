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
