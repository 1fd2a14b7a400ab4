// What lies over the map: the crosshair, the pin, and the box that says what is under the pointer.

import { PENDING, decode } from "./colour.js";
import { TILE, showsTokens } from "./geometry.js";
import { make } from "./elements.js";
import { digits, float32Text, percent, superscript, whole } from "./numbers.js";
import { tileKey } from "./tiles.js";
import { tokenLabel } from "./axes.js";
import { isWeighted, numberName } from "./weighting.js";
import { language, t } from "./words.js";

const QUIET = 55; // ms of rest before exact numbers are asked for
const BANDS_FROM = 12; // pixels of a cell
const LOOK_AROUND = 140; // ms of rest before the largest cell of a block is sought
const WIDEST = 342; // CSS pixels from the pointer to the far edge of the box, as style.css has it
const TALLEST = 150;
const MOST_ROWS = 4096; // cells of a block's side up to which its largest cell is sought

/**
 * Draw crosshair and pin into the fields of all panes, in CSS pixels. `block`: the cells that one pixel stands for,
 * where it is not known which of them is the largest.
 */
export function drawCrosshair(ctx, panes, { scale, hover, block, pin, look, keyboard }) {
  for (const pane of panes) {
    const { field } = pane;
    ctx.save();
    ctx.beginPath();
    ctx.rect(pane.left, pane.top, Math.max(0, pane.right - pane.left), Math.max(0, pane.bottom - pane.top));
    ctx.clip();
    if (pin) {
      ctx.setLineDash([3, 3]);
      hairs(ctx, pane, pin, scale, look.pin, "transparent");
      ctx.setLineDash([]);
      ring(ctx, pane, pin, scale, look);
    }
    if (hover) {
      hairs(ctx, pane, hover, scale, keyboard ? look.accent : look.hair, look.shade);
      if (keyboard || scale >= 4) box(ctx, pane, hover, scale, look, keyboard);
    }
    ctx.restore();
    if (hover && field.w > 60) {
      badges(ctx, pane, hover, block, scale, look);
    }
  }
}

// Lines through the middle of a cell that leave the cell itself free; the edges of its row and column where cells are large.
function hairs(ctx, pane, { i, j }, scale, style, shade) {
  const line = (at) => Math.floor(at) + 0.5;
  ctx.beginPath();
  if (scale >= BANDS_FROM) {
    for (const y of [pane.Y(i), pane.Y(i + 1)]) {
      ctx.moveTo(pane.left, line(y));
      ctx.lineTo(pane.right, line(y));
    }
    for (const x of [pane.X(j), pane.X(j + 1)]) {
      ctx.moveTo(line(x), pane.top);
      ctx.lineTo(line(x), pane.bottom);
    }
  } else {
    const [x, y, free] = [pane.X(j + 0.5), pane.Y(i + 0.5), 8];
    ctx.moveTo(pane.left, line(y));
    ctx.lineTo(x - free, line(y));
    ctx.moveTo(x + free, line(y));
    ctx.lineTo(pane.right, line(y));
    ctx.moveTo(line(x), pane.top);
    ctx.lineTo(line(x), y - free);
    ctx.moveTo(line(x), y + free);
    ctx.lineTo(line(x), pane.bottom);
  }
  // Light within dark: to be seen on every colour of a map, and on paper.
  for (const [width, colour] of [[3, shade], [1, style]]) {
    ctx.lineWidth = width;
    ctx.strokeStyle = colour;
    ctx.stroke();
  }
}

function box(ctx, pane, { i, j }, scale, look, keyboard) {
  const side = Math.max(scale, 8);
  const [x, y] = [pane.X(j + 0.5) - side / 2, pane.Y(i + 0.5) - side / 2];
  ctx.lineWidth = 3;
  ctx.strokeStyle = look.card;
  ctx.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
  ctx.lineWidth = keyboard ? 2 : 1.25;
  ctx.strokeStyle = keyboard ? look.accent : look.ink;
  ctx.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
}

function ring(ctx, pane, { i, j }, scale, look) {
  const radius = Math.max(6, scale * 0.62);
  for (const [width, style] of [[4, look.card], [2, look.accent]]) {
    ctx.lineWidth = width;
    ctx.strokeStyle = style;
    ctx.beginPath();
    ctx.arc(pane.X(j + 0.5), pane.Y(i + 0.5), radius, 0, 2 * Math.PI);
    ctx.stroke();
  }
}

// The positions of the crosshair, on the axes.
function badges(ctx, pane, { i, j }, block, scale, look) {
  const x = pane.X(j + 0.5);
  const y = pane.Y(i + 0.5);
  ctx.font = `600 11px ${look.sans}`;
  ctx.textBaseline = "middle";
  const badge = (text, cx, cy, align) => {
    const width = ctx.measureText(text).width + 10;
    const start = { right: cx - width, left: cx, center: cx - width / 2 }[align];
    ctx.fillStyle = look.ink;
    ctx.beginPath();
    ctx.roundRect(start, cy - 8.5, width, 17, 4);
    ctx.fill();
    ctx.fillStyle = look.card;
    ctx.textAlign = "left";
    ctx.fillText(text, start + 5, cy + 0.5);
  };
  const { band, left, top } = pane.gutter;
  // Where tokens are written the badge stands on the number, not on the token.
  const tokens = showsTokens(scale);
  const away = { top: tokens ? top - 16 : 10, left: tokens ? left - 2 : 5 };
  if (x >= pane.left && x <= pane.right) badge(block ? stretch(block.c0, block.c1, pane.firstKey) : whole(j + pane.firstKey), x, pane.top - band - away.top, "center");
  if (y >= pane.top && y <= pane.bottom) badge(block ? stretch(block.r0, block.r1, pane.firstQuery) : whole(i + pane.firstQuery), pane.left - band - away.left, y, tokens ? "left" : "right");
}

// The positions of rows or columns from..to - 1.
const stretch = (from, to, first) => (to - from > 1 ? `${whole(first + from)}–${whole(first + to - 1)}` : whole(first + from));

/** The value that the map shows for a cell at a level, from the tiles that are here; null when not. */
export function blockValue(tiles, source, level, i, j, unit = 1) {
  const size = TILE * 2 ** level;
  const [y, x] = [Math.floor(i / size), Math.floor(j / size)];
  const tile = tiles.get(tileKey(source, level, y, x));
  if (!tile) return null;
  const row = Math.floor((i - y * size) / 2 ** level);
  const code = tile.codes[row * TILE + Math.floor((j - x * size) / 2 ** level)];
  return code === PENDING ? { pending: true } : { masked: code === 0, weight: unit * decode(code) };
}

/** What a cell is, in one sentence for those who listen. */
export function sentence(target, tokens, value) {
  const name = (position) => tokenLabel(tokens, position) ?? "";
  const query = t("query {0} {1}", whole(target.query), name(target.query));
  const key = t("key {0} {1}", whole(target.key), name(target.key));
  if (!target.allowed || value?.masked) return t("{0}, {1}: masked", query, key);
  return value && !value.pending ? t("{0}, {1}: weight {2}", query, key, digits(value.weight)) : `${query}, ${key}`;
}

// The weight that the box tells: that of the cell, or of the block that a pixel stands for; null where there is none.
function weightOf({ level }, { pool, block, exact, largest }) {
  if (level && pool === "max" && largest) return largest[2];
  if (!level && exact) return exact.allowed ? exact.weight : null;
  return block && !block.pending && !block.masked ? block.weight : null;
}

/**
 * The box beside the pointer. `show(target, place, how)` fills it; exact numbers follow when the pointer rests, and
 * `changed()` is called when they have come.
 */
export function createTip(stage, { cells, tiles, tokens, announce, changed, size, unitOfSource }) {
  const element = make("div", { class: "tip", hidden: true });
  stage.append(element);
  let timers = [];
  let stop = null;
  let shown = null;
  let told = null; // what is known of it
  let at = null; // its place

  function clear() {
    timers.forEach(clearTimeout);
    timers = [];
    stop?.abort();
    stop = null;
  }

  function hide() {
    clear();
    shown = told = null;
    element.hidden = true;
  }

  function put(place) {
    at = place;
    const { x, y } = place;
    // Placed by its nearer corner, so that its size need not be measured: that would lay out the whole page.
    const { width, height } = size();
    const across = x > width - WIDEST ? `calc(${Math.round(x - 16)}px - 100%)` : `${Math.round(x + 18)}px`;
    const down = y > height - TALLEST ? `calc(${Math.round(y - 14)}px - 100%)` : `${Math.round(y + 18)}px`;
    element.style.transform = width < 2 * WIDEST ? `translate(max(4px, min(${Math.round(x)}px - 50%, ${width - 4}px - 100%)), ${down})` : `translate(${across}, ${down})`;
  }

  function fill(target, found) {
    element.replaceChildren(...headline(target, found), places(target, tokens, found), ...more(target, found));
  }

  async function ask(job, target, found) {
    const mine = (stop ??= new AbortController());
    try {
      await job(mine.signal);
    } catch {
      return; // the next movement asks again; the queue says when the server is gone
    }
    if (mine.signal.aborted || shown !== target) return;
    fill(target, found);
    put(at);
    changed();
  }

  return {
    hide,
    /**
     * What the box tells: `cell`, that of the pane it names (null while the largest of a block is not known), `block`,
     * the cells that its pixel stands for, and the weight.
     */
    reading() {
      if (!shown) return { cell: null, block: null, weight: null };
      const { i, j, level, block } = shown;
      const weight = weightOf(shown, told);
      if (!level) return { cell: shown.shown(i, j), block: null, weight };
      if (told.largest) return { cell: shown.shown(told.largest[0], told.largest[1]), block: null, weight };
      const [first, last] = [shown.shown(block.r0, block.c0), shown.shown(block.r1 - 1, block.c1 - 1)];
      return { cell: null, block: { r0: first.i, r1: last.i + 1, c0: first.j, c1: last.j + 1 }, weight };
    },
    /** The largest cell [i, j, weight] of the block of a target, in the places of its head. */
    largest: (target) => cells.largest(target.source, target.block),
    /** The exact number of a track under the pointer: that of one row or column, or the largest of those of a pixel. */
    showTrack({ label, axis, first, from, to, best }, place) {
      clear();
      shown = told = null;
      element.hidden = false;
      const many = to - from > 1;
      const ends = [whole(first + from), whole(first + to - 1)];
      const words = !many ? label : axis === "key" ? t("{0}, largest of keys {1} to {2}", label, ends[0], ends[1]) : t("{0}, largest of queries {1} to {2}", label, ends[0], ends[1]);
      const value = best ? line("tip-weight", exactly(best.value)) : line("tip-mask", t("not known"));
      const list = make("dl");
      const position = first + (best ? best.index : from);
      list.append(make("dt", {}, t(axis)), make("dd", { class: "text" }, tokenLabel(tokens, position) ?? ""), make("dd", { class: "place" }, whole(position)));
      tokens.prefetch(position, position + 1);
      element.replaceChildren(line("tip-more tip-head", words), value, list);
      put(place);
    },
    show(target, place, { level, pool, spoken = false }) {
      const same = shown && shown.source.key === target.source.key && shown.level === target.level && shown.block.r0 === target.block.r0 && shown.block.c0 === target.block.c0;
      if (same) {
        put(place);
        return;
      }
      clear();
      shown = target;
      const found = { pool, block: blockValue(tiles, target.source, level, target.i, target.j, unitOfSource(target.source)), exact: cells.known(target.source, target.i, target.j), other: null, largest: null };
      if (target.other) {
        found.otherBlock = blockValue(tiles, target.other, level, target.i, target.j, unitOfSource(target.other));
        found.other = cells.known(target.other, target.i, target.j);
      }
      told = found;
      element.hidden = false;
      fill(target, found);
      put(place);
      if (spoken) announce(sentence(target, tokens, level === 0 ? found.block : found.exact));
      if (!target.allowed) return;
      const exact = async (signal) => {
        found.exact = await cells.exact(target.source, target.i, target.j, signal);
        if (target.other) found.other = await cells.exact(target.other, target.i, target.j, signal);
        if (spoken && !signal.aborted) announce(sentence(target, tokens, { weight: found.exact.weight, masked: !found.exact.allowed }));
      };
      if (!level || spoken) timers.push(setTimeout(() => ask(exact, target, found), QUIET));
      if (level > 0 && 2 ** level <= MOST_ROWS && !found.block?.masked && !found.block?.pending) {
        const largest = async (signal) => {
          found.largest = await cells.largest(target.source, target.block, signal);
        };
        timers.push(setTimeout(() => ask(largest, target, found), LOOK_AROUND));
      }
    },
    destroy() {
      hide();
      element.remove();
    },
  };
}

const line = (name, ...children) => make("div", { class: name }, ...children);
// The shortest decimal that is this float32, with its power of ten as people write it; three digits of a rounded one.
function exactly(weight, rounded = false) {
  if (rounded) return `≈ ${digits(weight)}`;
  const text = float32Text(weight);
  const short = weight > 0 && weight < 1e-4 ? Number(text).toExponential() : text;
  return short.replace(/e\+?(.*)/, (_, power) => ` × 10${superscript(Number(power))}`);
}
const weighed = ({ weight, rounded }, source) => [exactly(weight, rounded), isWeighted(source) ? make("small", {}, ` ${numberName(source)}`) : weight >= 1e-4 && weight < 1 ? make("small", {}, ` ${percent(weight)}`) : ""];

function headline(target, found) {
  const { pool, block, exact, other, otherBlock, largest } = found;
  if (!target.allowed || exact?.allowed === false || (block?.masked && !target.level)) {
    const why = target.empty ? t("empty row: this query may see no key") : t("masked: this query may not see this key");
    return [line("tip-mask", why)];
  }
  if (block?.masked) return [line("tip-mask", "masked")];
  if (target.level) {
    if (block?.pending) return [line("tip-mask", t("not computed yet"))];
    const side = whole(target.side);
    const words = pool === "max" ? t("largest of {0} × {1} cells", side, side) : t("mean of {0} × {1} cells", side, side);
    const value = pool === "max" && largest ? exactly(largest[2], largest[3]) : block ? `≈ ${digits(block.weight)}` : "…";
    const lines = [line("tip-weight", value, " ", make("small", {}, words))];
    if (target.other && otherBlock) {
      lines.push(line("tip-weight", `≈ ${digits(otherBlock.weight)} `, make("small", {}, t("second head"))));
      lines.push(...quotient(block?.weight, otherBlock.weight));
    }
    return lines;
  }
  const first = exact ? weighed(exact, target.source) : [block ? `≈ ${digits(block.weight)}` : "…"];
  const lines = [line("tip-weight", ...first, ...(target.name ? [make("small", {}, ` ${target.name}`)] : []))];
  if (target.other) {
    const second = other ? weighed(other, target.other) : [otherBlock ? `≈ ${digits(otherBlock.weight)}` : "…"];
    lines.push(line("tip-weight", ...second, make("small", {}, t(" second head"))));
    lines.push(...quotient(exact?.weight, other?.weight));
  }
  return lines;
}

const quotient = (first, second) => (first > 0 && second > 0 ? [line("tip-more", t("first ÷ second = {0}, first − second = {1}", digits(first / second), digits(first - second)))] : []);

function places(target, tokens, { largest }) {
  const list = make("dl");
  // The positions from..to - 1: their token where there is one alone.
  const add = (word, first, from, to) => {
    const label = to - from > 1 ? null : tokenLabel(tokens, first + from);
    list.append(make("dt", {}, t(word)), make("dd", { class: "text" }, label ?? ""), make("dd", { class: "place" }, stretch(from, to, first)));
  };
  const { firstQuery, firstKey, block } = target;
  const { r0, r1, c0, c1 } = largest ? { r0: largest[0], r1: largest[0] + 1, c0: largest[1], c1: largest[1] + 1 } : block;
  add("query", firstQuery, r0, r1);
  add("key", firstKey, c0, c1);
  return list;
}

function more(target, { exact, largest, pool }) {
  const lines = [];
  if (largest && pool === "mean") lines.push(t("the largest of them: {0}", exactly(largest[2], largest[3])));
  if (exact?.allowed && !target.level) {
    const parts = [];
    if (exact.share) parts.push(t("weight {0} × norm {1}", digits(exact.share), digits(exact.weight / exact.share)));
    if (exact.rank) parts.push(t("{0} of its row", ordinal(exact.rank)));
    if (exact.row_entropy !== null && exact.row_entropy !== undefined) parts.push(t("entropy {0}", digits(exact.row_entropy)));
    if (exact.column_mass !== null && exact.column_mass !== undefined) parts.push(t("column mass {0}", digits(exact.column_mass)));
    if (parts.length) lines.push(parts.join(" · "));
  }
  return lines.map((text) => line("tip-more", text));
}

function ordinal(rank) {
  if (rank === 1) return t("largest");
  if (language !== "en") return t("{0}th largest", whole(rank));
  const tail = rank % 100 > 10 && rank % 100 < 14 ? "th" : ["th", "st", "nd", "rd"][rank % 10] ?? "th";
  return `${whole(rank)}${tail} largest`;
}
