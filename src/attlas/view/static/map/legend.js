// The heads that have a colour, at the upper right of their map.

import { truncate } from "./canvas.js";
import { getHues } from "./hues.js";

const LINE = 20; // CSS pixels of a line
const SWATCH = 11; // and of the side of a colour
const EDGE = 10; // to the edge of the map, and of the box to its text

/**
 * The height that the names take below the upper edge of their pane, in CSS pixels; 0 where there are none.
 *
 * @param {Pick<ScenePane, "legend">} pane
 */
export const getLegendHeight = ({ legend }) => (legend.length ? EDGE + LINE * legend.length + 8 : 0);

/**
 * Draw the names of the heads of a pane, each beside its colour, in CSS pixels.
 *
 * @param {Context} ctx
 * @param {Pick<ScenePane, "legend" | "left" | "right" | "top">} pane
 * @param {{ look: Look, state: Pick<State, "dark"> }} options
 */
export function drawLegend(ctx, { legend, left, right, top }, { look, state }) {
  if (!legend.length) return;
  const hues = getHues(state);
  const room = right - left - 4 * EDGE - SWATCH - 6;
  const names = legend.map((name) => truncate(ctx, name, room));
  const width = Math.max(...names.map((name) => ctx.measureText(name).width)) + SWATCH + 6 + 2 * EDGE;
  const [x, y] = [right - EDGE - width, top + EDGE];
  ctx.fillStyle = look.card;
  ctx.strokeStyle = look.line;
  ctx.beginPath();
  ctx.roundRect(x + 0.5, y + 0.5, width, LINE * names.length + 8, 5);
  ctx.fill();
  ctx.stroke();
  ctx.textAlign = "left";
  names.forEach((name, index) => {
    const middle = y + 4 + LINE * (index + 0.5);
    ctx.fillStyle = hues[index];
    ctx.fillRect(x + EDGE, middle - SWATCH / 2, SWATCH, SWATCH);
    ctx.fillStyle = look.ink;
    ctx.fillText(name, x + EDGE + SWATCH + 6, middle + 0.5);
  });
}
