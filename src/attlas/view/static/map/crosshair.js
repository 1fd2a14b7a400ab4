// The overlay of the map: the crosshair, the pin, and the tooltip.

import { PENDING, decode } from "./colour.js";
import { TILE, showsTokens } from "./geometry.js";
import { make } from "../panels/elements.js";
import { formatNumber, formatFloat32, formatPercent, formatSuperscript, formatInteger, getHeadMark, getOrdinalSuffix } from "../data/numbers.js";
import { getTileKey } from "./tiles.js";
import { formatTokenLabel } from "./axes.js";
import { areShares, getNumberName, getUnit, isSigned, isWeighted } from "../data/weighting.js";
import { language, t } from "../words/words.js";

const EXACT_DELAY = 55; // ms without movement before exact numbers are requested
const MIN_BAND_SCALE = 12; // pixels of a cell
const LARGEST_DELAY = 140; // ms without movement before the largest cell of a block is requested
const MAX_WIDTH = 342; // CSS pixels from the pointer to the far edge of the tooltip, as in style.css
const MAX_HEIGHT = 150;
const MOST_ROWS = 4096; // side of the largest block whose largest cell is requested

/**
 * Draw crosshair and pin into the fields of all panes, in CSS pixels. `block`: the cells that one pixel stands for,
 * where it is not known which of them is the largest.
 *
 * @param {Context} ctx
 * @param {ScenePane[]} panes
 * @param {{ scale: number, hover: Cell | null, block: Region | null, pin: Cell | null, look: Look, keyboard: boolean }} options
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
      drawLines(ctx, pane, pin, scale, look.pin, "transparent");
      ctx.setLineDash([]);
      drawRing(ctx, pane, pin, scale, look);
    }
    if (hover) {
      drawLines(ctx, pane, hover, scale, keyboard ? look.accent : look.hair, look.shade);
      if (keyboard || scale >= 4) drawBox(ctx, pane, hover, scale, look, keyboard);
    }
    ctx.restore();
    if (hover && field.w > 60) {
      drawBadges(ctx, pane, hover, block, scale, look);
    }
  }
}

/**
 * Lines through the middle of a cell that leave the cell itself free; the edges of its row and column where cells are large.
 *
 * @param {Context} ctx
 * @param {PlacedPane} pane
 * @param {Cell} cell
 * @param {number} scale
 * @param {string} style
 * @param {string} shade
 */
function drawLines(ctx, pane, { i, j }, scale, style, shade) {
  const toPixel = (/** @type {number} */ at) => Math.floor(at) + 0.5;
  ctx.beginPath();
  if (scale >= MIN_BAND_SCALE) {
    for (const y of [pane.Y(i), pane.Y(i + 1)]) {
      ctx.moveTo(pane.left, toPixel(y));
      ctx.lineTo(pane.right, toPixel(y));
    }
    for (const x of [pane.X(j), pane.X(j + 1)]) {
      ctx.moveTo(toPixel(x), pane.top);
      ctx.lineTo(toPixel(x), pane.bottom);
    }
  } else {
    const [x, y, gap] = [pane.X(j + 0.5), pane.Y(i + 0.5), 8];
    ctx.moveTo(pane.left, toPixel(y));
    ctx.lineTo(x - gap, toPixel(y));
    ctx.moveTo(x + gap, toPixel(y));
    ctx.lineTo(pane.right, toPixel(y));
    ctx.moveTo(toPixel(x), pane.top);
    ctx.lineTo(toPixel(x), y - gap);
    ctx.moveTo(toPixel(x), y + gap);
    ctx.lineTo(toPixel(x), pane.bottom);
  }
  // A light line within a dark one can be seen on every colour.
  for (const { width, colour } of [{ width: 3, colour: shade }, { width: 1, colour: style }]) {
    ctx.lineWidth = width;
    ctx.strokeStyle = colour;
    ctx.stroke();
  }
}

/**
 * @param {Context} ctx
 * @param {PlacedPane} pane
 * @param {Cell} cell
 * @param {number} scale
 * @param {Look} look
 * @param {boolean} keyboard
 */
function drawBox(ctx, pane, { i, j }, scale, look, keyboard) {
  const side = Math.max(scale, 8);
  const [x, y] = [pane.X(j + 0.5) - side / 2, pane.Y(i + 0.5) - side / 2];
  ctx.lineWidth = 3;
  ctx.strokeStyle = look.card;
  ctx.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
  ctx.lineWidth = keyboard ? 2 : 1.25;
  ctx.strokeStyle = keyboard ? look.accent : look.ink;
  ctx.strokeRect(x - 0.5, y - 0.5, side + 1, side + 1);
}

/**
 * @param {Context} ctx
 * @param {PlacedPane} pane
 * @param {Cell} cell
 * @param {number} scale
 * @param {Look} look
 */
function drawRing(ctx, pane, { i, j }, scale, look) {
  const radius = Math.max(6, scale * 0.62);
  for (const { width, style } of [{ width: 4, style: look.card }, { width: 2, style: look.accent }]) {
    ctx.lineWidth = width;
    ctx.strokeStyle = style;
    ctx.beginPath();
    ctx.arc(pane.X(j + 0.5), pane.Y(i + 0.5), radius, 0, 2 * Math.PI);
    ctx.stroke();
  }
}

/**
 * The positions of the crosshair, on the axes.
 *
 * @param {Context} ctx
 * @param {ScenePane} pane
 * @param {Cell} cell
 * @param {Region | null} block
 * @param {number} scale
 * @param {Look} look
 */
function drawBadges(ctx, pane, { i, j }, block, scale, look) {
  const x = pane.X(j + 0.5);
  const y = pane.Y(i + 0.5);
  ctx.font = `600 11px ${look.sans}`;
  ctx.textBaseline = "middle";
  const drawBadge = (/** @type {string} */ text, /** @type {number} */ cx, /** @type {number} */ cy, /** @type {"left" | "right" | "center"} */ align) => {
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
  // Where tokens are shown, the badge covers the number and not the token.
  const tokens = showsTokens(scale);
  const away = { top: tokens ? top - 16 : 10, left: tokens ? left - 2 : 5 };
  if (x >= pane.left && x <= pane.right) drawBadge(block ? formatPositions(block.c0, block.c1, pane.firstKey) : formatInteger(j + pane.firstKey), x, pane.top - band - away.top, "center");
  if (y >= pane.top && y <= pane.bottom) drawBadge(block ? formatPositions(block.r0, block.r1, pane.firstQuery) : formatInteger(i + pane.firstQuery), pane.left - band - away.left, y, tokens ? "left" : "right");
}

/**
 * The positions of the rows or columns from `from` to `to` - 1.
 *
 * @param {number} from
 * @param {number} to
 * @param {number} first
 */
const formatPositions = (from, to, first) => (to - from > 1 ? `${formatInteger(first + from)}–${formatInteger(first + to - 1)}` : formatInteger(first + from));

/**
 * The value that the map shows for a cell at a level; null where its tile is not loaded.
 *
 * @param {Tiles} tiles
 * @param {Source} source
 * @param {number} level
 * @param {number} i
 * @param {number} j
 * @param {Info} info
 * @returns {BlockValue | null}
 */
function getBlockValue(tiles, source, level, i, j, info) {
  const size = TILE * 2 ** level;
  const [y, x] = [Math.floor(i / size), Math.floor(j / size)];
  const tile = tiles.get(getTileKey(source, level, y, x));
  if (!tile) return null;
  const row = Math.floor((i - y * size) / 2 ** level);
  const code = tile.codes[row * TILE + Math.floor((j - x * size) / 2 ** level)];
  return code === PENDING ? { pending: true, weight: NaN } : { masked: code === 0, weight: getUnit({ info, ...source }) * decode(code, areShares({ info, ...source })) };
}

/**
 * One sentence about a cell, for screen readers.
 *
 * @param {Target} target
 * @param {SideTokens} tokens
 * @param {{ masked?: boolean, pending?: boolean, weight: number | null } | null} value
 */
function describeCell(target, tokens, value) {
  const query = t("query {0} {1}", formatInteger(target.query), formatTokenLabel(tokens.query, target.query) ?? "");
  const key = t("key {0} {1}", formatInteger(target.key), formatTokenLabel(tokens.key, target.key) ?? "");
  if (!target.allowed || value?.masked) return t("{0}, {1}: masked", query, key);
  return value && !value.pending ? t("{0}, {1}: weight {2}", query, key, formatNumber(value.weight)) : `${query}, ${key}`;
}

/**
 * The weight in the tooltip: of the cell, or of the block of a pixel; null where there is none.
 *
 * @param {Pick<Target, "side">} target
 * @param {TipDetails} tipDetails
 */
function getWeight({ side }, { pool, block, exact, largest }) {
  if (side > 1 && pool === "max" && largest) return largest[2];
  if (side === 1 && exact) return exact.allowed ? exact.weight : null;
  return block && !block.pending && !block.masked ? block.weight : null;
}

/**
 * The tooltip. `show(target, place, options)` fills it; exact numbers are fetched when the pointer rests, and
 * `changed()` is called when they have arrived.
 *
 * @param {HTMLElement} stage
 * @param {{ cells: Cells, tiles: Tiles, texts: Texts, announce: Announce, changed: () => void, size: () => { width: number, height: number }, infoOf: () => Info }} options
 */
export function createTip(stage, { cells, tiles, texts, announce, changed, size, infoOf }) {
  const element = make("div", { class: "tip", hidden: true });
  stage.append(element);
  /** @type {number[]} */
  let timers = [];
  /** @type {AbortController | null} */
  let controller = null;
  /** @type {Target | null} */
  let shownTarget = null;
  /** @type {TipDetails | null} */
  let shownDetails = null; // the numbers of the shown target
  /** @type {Point | null} */
  let position = null; // of the tooltip

  function clear() {
    timers.forEach(clearTimeout);
    timers = [];
    controller?.abort();
    controller = null;
  }

  function hide() {
    clear();
    shownTarget = shownDetails = null;
    element.hidden = true;
  }

  /** @param {Point} place */
  function moveTo(place) {
    position = place;
    const { x, y } = place;
    // Placed by its nearer corner: measuring its size would force a layout of the page.
    const { width, height } = size();
    const across = x > width - MAX_WIDTH ? `calc(${Math.round(x - 16)}px - 100%)` : `${Math.round(x + 18)}px`;
    const down = y > height - MAX_HEIGHT ? `calc(${Math.round(y - 14)}px - 100%)` : `${Math.round(y + 18)}px`;
    element.style.transform = width < 2 * MAX_WIDTH ? `translate(max(4px, min(${Math.round(x)}px - 50%, ${width - 4}px - 100%)), ${down})` : `translate(${across}, ${down})`;
  }

  /**
   * @param {Target} target
   * @param {TipDetails} details
   */
  function fill(target, details) {
    element.replaceChildren(...createHeadline(target, details, infoOf()), createPlaces(target, texts.of(target.source), details), ...createNotes(target, details));
  }

  /**
   * @param {(signal: AbortSignal) => Promise<void>} load
   * @param {Target} target
   * @param {TipDetails} details
   */
  async function fetchDetails(load, target, details) {
    const request = (controller ??= new AbortController());
    try {
      await load(request.signal);
    } catch {
      return; // requested again at the next movement; the queue reports a lost server
    }
    if (request.signal.aborted || shownTarget !== target || !position) return;
    fill(target, details);
    moveTo(position);
    changed();
  }

  return {
    hide,
    /**
     * What the tooltip shows: `cell`, that of the pane it names (null while the largest of a block is not known), `block`,
     * the cells that its pixel stands for, and the weight.
     */
    reading() {
      if (!shownTarget || !shownDetails) return { cell: null, block: null, weight: null };
      const { i, j, side, block } = shownTarget;
      const weight = getWeight(shownTarget, shownDetails);
      if (side === 1) return { cell: shownTarget.toPaneCell(i, j), block: null, weight };
      if (shownDetails.largest) return { cell: shownTarget.toPaneCell(shownDetails.largest[0], shownDetails.largest[1]), block: null, weight };
      const [first, last] = [shownTarget.toPaneCell(block.r0, block.c0), shownTarget.toPaneCell(block.r1 - 1, block.c1 - 1)];
      return { cell: null, block: { r0: first.i, r1: last.i + 1, c0: first.j, c1: last.j + 1 }, weight };
    },
    /** The largest cell [i, j, weight] of the block of a target, in rows and columns of its head. */
    largest: (/** @type {Target} */ target) => cells.largest(target.source, target.block),
    /**
     * The exact number of a track under the pointer: that of one row or column, or the largest of those of a pixel.
     *
     * @param {{ source: Source, label: string, axis: Side, first: number, from: number, to: number, best: { index: number, value: number } | null }} options
     * @param {Point} place
     */
    showTrack({ source, label, axis, first, from, to, best }, place) {
      clear();
      shownTarget = shownDetails = null;
      element.hidden = false;
      const isRange = to - from > 1;
      const ends = [formatInteger(first + from), formatInteger(first + to - 1)];
      const words = !isRange ? label : axis === "key" ? t("{0}, largest of keys {1} to {2}", label, ends[0], ends[1]) : t("{0}, largest of queries {1} to {2}", label, ends[0], ends[1]);
      const value = best ? createLine("tip-weight", formatExact(best.value)) : createLine("tip-mask", t("not known"));
      const pairs = make("dl");
      const position = first + (best ? best.index : from);
      const tokens = texts.of(source)[axis];
      pairs.append(make("dt", {}, t(axis)), make("dd", { class: "text" }, formatTokenLabel(tokens, position) ?? ""), make("dd", { class: "place" }, formatInteger(position)));
      tokens.prefetch(position, position + 1);
      element.replaceChildren(createLine("tip-more tip-head", words), value, pairs);
      moveTo(place);
    },
    /**
     * A title and a sentence about what stands beside the map.
     *
     * @param {string} title
     * @param {string} text
     * @param {Point} place
     */
    showNote(title, text, place) {
      clear();
      shownTarget = shownDetails = null;
      element.hidden = false;
      element.replaceChildren(createLine("tip-title", title), createLine("tip-more", text));
      moveTo(place);
    },
    show(/** @type {Target} */ target, /** @type {Point} */ place, /** @type {{ pool: Pool, spoken?: boolean }} */ { pool, spoken = false }) {
      const unchanged = shownTarget && shownTarget.source.key === target.source.key && shownTarget.level === target.level && shownTarget.block.r0 === target.block.r0 && shownTarget.block.c0 === target.block.c0;
      if (unchanged) {
        moveTo(place);
        return;
      }
      clear();
      shownTarget = target;
      const { level, side } = target;
      /** @type {TipDetails} */
      const details = { pool, block: getBlockValue(tiles, target.source, level, target.i, target.j, infoOf()), exact: cells.known(target.source, target.i, target.j), other: null, largest: null, mixed: [] };
      if (target.other) {
        details.otherBlock = getBlockValue(tiles, target.other, level, target.i, target.j, infoOf());
        details.other = cells.known(target.other, target.i, target.j);
      }
      details.mixed = target.mixed.map((source) => ({ block: getBlockValue(tiles, source, level, target.i, target.j, infoOf()), exact: cells.known(source, target.i, target.j) }));
      shownDetails = details;
      element.hidden = false;
      fill(target, details);
      moveTo(place);
      if (spoken) announce(describeCell(target, texts.of(target.source), side === 1 ? details.block : details.exact));
      if (!target.allowed) return;
      const loadExact = async (/** @type {AbortSignal} */ signal) => {
        const exact = await cells.exact(target.source, target.i, target.j, signal);
        details.exact = exact;
        if (target.other) details.other = await cells.exact(target.other, target.i, target.j, signal);
        for (const [index, source] of target.mixed.entries()) details.mixed[index].exact = await cells.exact(source, target.i, target.j, signal);
        if (spoken && !signal.aborted) announce(describeCell(target, texts.of(target.source), { weight: exact.weight, masked: !exact.allowed }));
      };
      if (side === 1 || spoken) timers.push(setTimeout(() => fetchDetails(loadExact, target, details), EXACT_DELAY));
      if (side > 1 && side <= MOST_ROWS && !details.block?.masked && !details.block?.pending) {
        const loadLargest = async (/** @type {AbortSignal} */ signal) => {
          details.largest = await cells.largest(target.source, target.block, signal);
        };
        timers.push(setTimeout(() => fetchDetails(loadLargest, target, details), LARGEST_DELAY));
      }
    },
    destroy() {
      hide();
      element.remove();
    },
  };
}

/**
 * @param {string} name
 * @param {...Child} children
 */
const createLine = (name, ...children) => make("div", { class: name }, ...children);
/**
 * The shortest decimal that reads back as this float32; a rounded weight has three digits.
 *
 * @param {number} weight
 * @param {boolean} [rounded]
 */
function formatExact(weight, rounded = false) {
  if (rounded) return `≈ ${formatNumber(weight)}`;
  const text = formatFloat32(weight);
  const short = weight !== 0 && Math.abs(weight) < 1e-4 ? Number(text).toExponential() : text;
  return short.replace(/e\+?(.*)/, (_, power) => ` × 10${formatSuperscript(Number(power))}`).replace(/^-/, "−");
}
/**
 * The largest weight of a block in three digits: single cells show all of them.
 *
 * @param {LargestCell} largest
 */
const formatLargest = ([, , weight, rounded]) => `${rounded ? "≈ " : ""}${formatNumber(weight)}`;
/**
 * @param {CellDetails} cell
 * @param {Source} source
 * @param {Info} info
 */
function formatWeight({ weight, rounded }, source, info) {
  if (weight === null) return [`${rounded ? "≈ " : ""}${formatNumber(weight)}`];
  const shares = areShares({ info, ...source });
  const more = isWeighted(source) ? ` ${getNumberName(source)}` : shares && weight >= 1e-4 && weight < 1 ? ` ${formatPercent(weight)}` : "";
  const sign = isSigned({ info, ...source }) && weight > 0 ? "+" : "";
  return [`${sign}${formatExact(weight, rounded)}`, more ? make("small", {}, more) : ""];
}

/**
 * @param {Target} target
 * @param {TipDetails} details
 * @param {Info} info
 */
function createHeadline(target, details, info) {
  const { pool, block, exact, other, otherBlock, largest } = details;
  if (target.mixed.length && target.allowed && exact?.allowed !== false) return createMixedLines(target, details, info);
  if (!target.allowed || exact?.allowed === false || (block?.masked && target.side === 1)) {
    const why = target.empty ? t("empty row: this query may see no key") : t("masked: this query may not see this key");
    return [createLine("tip-mask", why)];
  }
  if (block?.masked) return [createLine("tip-mask", "masked")];
  if (target.side > 1) {
    if (block?.pending) return [createLine("tip-mask", t("not computed yet"))];
    const side = formatInteger(target.side);
    const signed = isSigned({ info, ...target.source });
    const words = pool === "max" ? (signed ? t("largest by size of {0} × {1} cells", side, side) : t("largest of {0} × {1} cells", side, side)) : t("mean of {0} × {1} cells", side, side);
    const value = pool === "max" && largest ? formatLargest(largest) : block ? `≈ ${formatNumber(block.weight)}` : "…";
    const lines = [createLine("tip-weight", value, " ", make("small", {}, words))];
    if (target.other && otherBlock) {
      lines.push(createLine("tip-weight", `≈ ${formatNumber(otherBlock.weight)} `, make("small", {}, t("second head"))));
      lines.push(...createQuotient(block?.weight, otherBlock.weight));
    }
    return lines;
  }
  const first = exact ? formatWeight(exact, target.source, info) : [block ? `≈ ${formatNumber(block.weight)}` : "…"];
  const lines = [createLine("tip-weight", ...first, ...(target.name ? [make("small", {}, ` ${target.name}`)] : []))];
  if (target.other) {
    const second = other ? formatWeight(other, target.other, info) : [otherBlock ? `≈ ${formatNumber(otherBlock.weight)}` : "…"];
    lines.push(createLine("tip-weight", ...second, make("small", {}, t(" second head"))));
    lines.push(...createQuotient(exact?.weight, other?.weight));
  }
  return lines;
}

/**
 * A line for each head that has a colour: what it gives to the cell, or to the block of the pixel.
 *
 * @param {Target} target
 * @param {TipDetails} details
 * @param {Info} info
 */
function createMixedLines({ side, mixed: sources }, { mixed, pool }, info) {
  const lines = mixed.map(({ block, exact }, index) => {
    const known = side === 1 ? exact : null;
    const value = known ? formatWeight(known, sources[index], info) : [!block ? "…" : block.pending ? t("not computed yet") : block.masked ? t("masked") : `≈ ${formatNumber(block.weight)}`];
    const swatch = make("i", { class: "hue", "data-hue": String(index) });
    return createLine("tip-weight tip-hue", swatch, ...value, make("small", {}, ` ${getHeadMark(info, sources[index].entry, sources[index].head)}`));
  });
  const cells = formatInteger(side);
  return side === 1 ? lines : [...lines, createLine("tip-more", pool === "max" ? t("largest of {0} × {1} cells", cells, cells) : t("mean of {0} × {1} cells", cells, cells))];
}

/**
 * @param {number | null | undefined} first
 * @param {number | null | undefined} second
 */
function createQuotient(first, second) {
  if (!first || !second) return [];
  if (first < 0 || second < 0) return [createLine("tip-more", t("first − second = {0}", formatNumber(first - second)))];
  return [createLine("tip-more", t("first ÷ second = {0}, first − second = {1}", formatNumber(first / second), formatNumber(first - second)))];
}

/**
 * @param {Target} target
 * @param {SideTokens} tokens
 * @param {TipDetails} tipDetails
 */
function createPlaces(target, tokens, { largest }) {
  const pairs = make("dl");
  // Add the positions from `from` to `to` - 1; a single position with its token.
  const add = (/** @type {Side} */ word, /** @type {number} */ first, /** @type {number} */ from, /** @type {number} */ to) => {
    const label = to - from > 1 ? null : formatTokenLabel(tokens[word], first + from);
    pairs.append(make("dt", {}, t(word)), make("dd", { class: "text" }, label ?? ""), make("dd", { class: "place" }, formatPositions(from, to, first)));
  };
  const { firstQuery, firstKey, block } = target;
  const { r0, r1, c0, c1 } = largest ? { r0: largest[0], r1: largest[0] + 1, c0: largest[1], c1: largest[1] + 1 } : block;
  add("query", firstQuery, r0, r1);
  add("key", firstKey, c0, c1);
  return pairs;
}

/**
 * @param {Target} target
 * @param {TipDetails} tipDetails
 */
function createNotes(target, { exact, largest, pool }) {
  const lines = [];
  if (largest && pool === "mean") lines.push(t("the largest of them: {0}", formatLargest(largest)));
  if (exact?.allowed && target.side === 1) {
    const parts = [];
    if (exact.share) parts.push(t("weight {0} × norm {1}", formatNumber(exact.share), formatNumber(exact.weight === null ? null : exact.weight / exact.share)));
    if (exact.rank) parts.push(t("{0} of its row", formatOrdinal(exact.rank)));
    if (exact.row_entropy !== null && exact.row_entropy !== undefined) parts.push(t("entropy {0}", formatNumber(exact.row_entropy)));
    if (exact.row_mass !== null && exact.row_mass !== undefined) parts.push(t("row sum {0}", formatNumber(exact.row_mass)));
    if (exact.column_mass !== null && exact.column_mass !== undefined) parts.push(t("column mass {0}", formatNumber(exact.column_mass)));
    if (parts.length) lines.push(parts.join(" · "));
  }
  return lines.map((text) => createLine("tip-more", text));
}

/** @param {number} rank */
function formatOrdinal(rank) {
  if (rank === 1) return t("largest");
  if (language !== "en") return t("{0}th largest", formatInteger(rank));
  return `${formatInteger(rank)}${getOrdinalSuffix(rank)} largest`;
}
