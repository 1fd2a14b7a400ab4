// All heads of a corpus as points: any measure on x, y, size and colour; a brush selects, a click opens.

import { clamp } from "../map/geometry.js";
import { canLog, computeDomain, getHead, formatHeadLabel, formatHeadTitle, LETTERS, haveSameHeads, getMeasure, listMeasures, getOpenHeads, formatValue, getSelection, formatMeasureTitle, getValues, getShownValues } from "./data.js";
import { createScale, normalise, formatTick, getTints } from "./scales.js";
import { make } from "../panels/elements.js";
import { createSaveButtons, createSvg, createSvgRoot } from "../panels/figure.js";
import { readLook } from "../map/look.js";
import { formatNumber, formatInteger } from "../data/numbers.js";
import { t } from "../words/words.js";

const margins = { left: 60, right: 18, bottom: 46 };
const [minRadius, maxRadius] = [3, 13]; // radii, where a measure gives them
const maxNamed = 80; // with more heads, points have no names
const hoverRadius = 16; // pixels within which the pointer hovers a point

/**
 * @param {CorpusContext} context
 * @param {number} index
 */
export function createScatter({ store, announce, root, uid }, index) {
  const corpus = store.state.info.corpora[index];
  const several = store.state.info.corpora.length > 1;
  const helpElement = make("span", { class: "unseen", id: uid("scatter-help") }, t("Arrow keys move from point to point, with Shift they select; Enter opens the head, Escape clears the selection."));
  const plot = make("div", { class: "scatter-plot", role: "application", tabIndex: 0, "aria-label": t("All heads of {0}", corpus.title), "aria-describedby": helpElement.id });
  const tooltip = make("div", { class: "tip", hidden: true });
  const element = make("figure", { class: "scatter" });
  const name = make("figcaption", { class: "scatter-name" }, several ? make("b", { class: "letter" }, LETTERS[index]) : null, make("span", { class: "scatter-title" }, several ? corpus.title : t("{0} heads of {1}", formatInteger(corpus.rows.layer.length), corpus.model)));
  element.append(make("div", { class: "figure-head" }, name, createSaveButtons(t("scatter"), getFigure, announce)), plot, helpElement);
  /** @type {ScatterScene | null} */
  let scene = null; // the last drawing: {figure, points, xScale, yScale, overlay, circles, width, height, ...}
  /** @type {number | null} */
  let anchor = null; // the point from which Shift and the arrows select
  /** @type {{ start: Point, moved: boolean, hold: Rectangle | null, box: Rectangle | null } | null} */
  let drag = null;
  let active = -1;

  const getScene = () => /** @type {ScatterScene} */ (scene); // once it has been drawn
  function getFigure() {
    const { info, x, y } = store.state;
    return scene && { figure: scene.figure, look: readLook(root), title: `${several ? `${LETTERS[index]}: ` : ""}${corpus.title}`, caption: t("{0} heads of {1} over {2} texts: {3} against {4}", formatInteger(corpus.rows.layer.length), corpus.model, formatInteger(corpus.texts), getMeasure(info, y).label, getMeasure(info, x).label), file: `${x} ${y}` };
  }

  // ------------------------------------------------------------------------------------------------------ drawing

  function draw() {
    const { state } = store;
    const { info } = state;
    const [width, height] = [Math.floor(plot.clientWidth), Math.floor(plot.clientHeight)];
    if (width < 80 || height < 80) return;
    const look = readLook(root);
    const [xMeasure, yMeasure] = [getMeasure(info, state.x), getMeasure(info, state.y)];
    const tints = getTints(info, corpus, state, look);
    const key = createLegend(state, tints, width, look);
    const margin = { ...margins, top: key.height };
    const xScale = createScale(computeDomain(info, state.x), state.xlog && canLog(info, state.x), margin.left, width - margin.right);
    const yScale = createScale(computeDomain(info, state.y), state.ylog && canLog(info, state.y), height - margin.bottom, margin.top);
    const axes = createSvg("g", {});
    for (const value of xScale.ticks(Math.max(2, width / 90))) {
      const x = xScale.at(value);
      axes.append(createSvg("line", { x1: x, x2: x, y1: margin.top, y2: height - margin.bottom, stroke: look.line }), createSvg("text", { x, y: height - margin.bottom + 16, "text-anchor": "middle" }, formatTick(value)));
    }
    for (const value of yScale.ticks(Math.max(2, height / 60))) {
      const y = yScale.at(value);
      axes.append(createSvg("line", { x1: margin.left, x2: width - margin.right, y1: y, y2: y, stroke: look.line }), createSvg("text", { x: margin.left - 7, y: y + 4, "text-anchor": "end" }, formatTick(value)));
    }
    const middle = (margin.top + height - margin.bottom) / 2;
    axes.append(
      createSvg("text", { x: (margin.left + width - margin.right) / 2, y: height - 10, "text-anchor": "middle", "font-size": 12, fill: look.ink }, `${formatMeasureTitle(xMeasure)} →`),
      createSvg("text", { transform: `translate(14 ${middle}) rotate(-90)`, "text-anchor": "middle", "font-size": 12, fill: look.ink }, `${formatMeasureTitle(yMeasure)} →`),
    );
    const points = placePoints(state, xScale, yScale, tints.fills);
    const circles = points.map(({ x, y, radius, fill }) => createSvg("circle", { cx: x, cy: y, r: radius, fill, stroke: look.card, "stroke-width": 1 }));
    const overlay = createSvg("g", { "data-transient": "" });
    const brushed = createSvg("g", {});
    const figure = createSvgRoot(width, height, look, t("{0} heads: {1} against {2}", formatInteger(points.length), yMeasure.label, xMeasure.label), key.group, axes, brushed, createSvg("g", {}, ...circles), points.length <= maxNamed ? placeNames(points, width, look) : null, overlay);
    scene = { figure, points, xScale, yScale, overlay, brushed, circles, width, height, look, margin };
    plot.replaceChildren(figure, tooltip);
    showBrush();
    showHovered();
  }
  /**
   * @param {CorpusState} state
   * @param {AxisScale} xScale
   * @param {AxisScale} yScale
   * @param {string[]} fills
   */
  function placePoints(state, xScale, yScale, fills) {
    const { info } = state;
    const [xs, ys] = [getValues(corpus, state.x), getValues(corpus, state.y)];
    const sizes = state.size ? getValues(corpus, state.size) : null;
    const sizeDomain = state.size ? computeDomain(info, state.size) : null;
    /** @type {ScatterPoint[]} */
    const points = [];
    for (let row = 0; row < xs.length; row++) {
      const [across, up] = [xs[row], ys[row]];
      if (across === null || up === null) continue;
      const share = sizes && sizeDomain ? Math.max(0, normalise(sizes[row] ?? sizeDomain[0], sizeDomain)) : 0;
      const radius = sizes ? Math.sqrt(minRadius ** 2 + share * (maxRadius ** 2 - minRadius ** 2)) : xs.length > 400 ? 4 : 7;
      points.push({ row, x: xScale.at(across), y: yScale.at(up), radius, fill: fills[row] });
    }
    // Small points are drawn over large ones, so that none is hidden.
    return points.sort((a, b) => b.radius - a.radius || a.row - b.row);
  }
  /**
   * Names at the right of points, else at the left, above or below; no name where it would overlap something.
   *
   * @param {ScatterPoint[]} points
   * @param {number} width
   * @param {Look} look
   */
  function placeNames(points, width, look) {
    const occupied = points.map(({ x, y, radius }) => ({ x: x - radius, y: y - radius, width: 2 * radius, height: 2 * radius }));
    const group = createSvg("g", { "font-size": 10.5 });
    for (const each of points) {
      const text = formatHeadLabel(corpus, each.row);
      const [textWidth, textHeight, gap] = [6.2 * text.length, 11, each.radius + 3];
      const boxes = [
        { x: each.x + gap, y: each.y - textHeight / 2 },
        { x: each.x - gap - textWidth, y: each.y - textHeight / 2 },
        { x: each.x - textWidth / 2, y: each.y - gap - textHeight },
        { x: each.x - textWidth / 2, y: each.y + gap },
      ].map((corner) => ({ ...corner, width: textWidth, height: textHeight }));
      const overlaps = (/** @type {Rectangle} */ a) => (/** @type {Rectangle} */ b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
      const box = boxes.find((candidate) => candidate.x > margins.left && candidate.x + textWidth < width && !occupied.some(overlaps(candidate)));
      if (!box) continue;
      occupied.push(box);
      group.append(createSvg("text", { x: box.x + textWidth / 2, y: box.y + 9, "text-anchor": "middle", fill: look.soft }, text));
    }
    return group;
  }
  /**
   * The legend of colour and size above the plot: {group, height}.
   *
   * @param {CorpusState} state
   * @param {Tints} tints
   * @param {number} width
   * @param {Look} look
   */
  function createLegend(state, tints, width, look) {
    const { info } = state;
    const group = createSvg("g", {});
    const measureText = (/** @type {string} */ text) => 6.3 * (text.length + (text.match(/[\u3000-\uffef]/g)?.length ?? 0)); // Chinese is twice as wide
    let [x, y] = [margins.left, 16];
    const wrap = (/** @type {number} */ needed) => {
      if (x + needed > width - margins.right && x > margins.left) [x, y] = [margins.left, y + 20];
    };
    const addText = (/** @type {string} */ text, /** @type {string | undefined} */ fill = undefined) => {
      group.append(createSvg("text", { x, y: y + 4, fill }, text));
      x += measureText(text) + 7;
    };
    if (tints.kinds) {
      for (const { name: kind, fill } of tints.kinds) {
        wrap(16 + measureText(t(kind)));
        group.append(createSvg("circle", { cx: x + 5, cy: y, r: 5, fill }));
        x += 14;
        addText(t(kind), look.ink);
        x += 8;
      }
    } else {
      const { label, whole: integral } = getMeasure(info, state.colour);
      const [low, high] = tints.domain.map((value) => (integral ? formatInteger(value) : formatNumber(value)));
      const [steps, step] = [24, 3];
      wrap(measureText(label + low + high) + steps * step + 30);
      addText(label, look.ink);
      addText(low);
      for (let k = 0; k < steps; k++) group.append(createSvg("rect", { x: x + k * step, y: y - 5, width: step + 0.5, height: 10, fill: tints.palette(k / (steps - 1)) }));
      x += steps * step + 6;
      addText(high);
    }
    if (state.size) {
      const { label, whole: integral } = getMeasure(info, state.size);
      const ends = computeDomain(info, state.size).map((value) => (integral ? formatInteger(value) : formatNumber(value)));
      x += 14;
      const row = y;
      wrap(measureText(label + ends.join("")) + 4 * maxRadius + 30);
      if (y > row) y += maxRadius - 6; // a large circle touches no word above it
      addText(label, look.ink);
      ends.forEach((text, k) => {
        const radius = [minRadius, maxRadius][k];
        x += radius;
        group.append(createSvg("circle", { cx: x, cy: y, r: radius, fill: "none", stroke: look.soft }));
        x += radius + 5;
        addText(text);
      });
    }
    return { group, height: y + 22 };
  }
  // Draw the brush, and make the points outside of it pale.
  function showBrush() {
    if (!scene) return;
    const { state } = store;
    const selection = getSelection(state)[index];
    const { circles, points } = scene;
    circles.forEach((circle, k) => circle.setAttribute("opacity", selection && !selection.has(points[k].row) ? "0.16" : "0.88"));
    const box = drag?.box ?? (state.brush?.corpus === index ? getBrushBox(state.brush) : null);
    scene.brushed.replaceChildren(...(box ? [createSvg("rect", { x: box.x, y: box.y, width: box.width, height: box.height, fill: scene.look.accent, "fill-opacity": 0.08, stroke: scene.look.accent, "stroke-dasharray": "4 3" })] : []));
  }
  /** @param {Brush} brush */
  function getBrushBox(brush) {
    const replaceNonPositive = (/** @type {number} */ value, /** @type {boolean} */ log) => (log && value <= 0 ? Number.MIN_VALUE : value);
    const { state } = store;
    const { xScale, yScale, margin, width, height } = getScene();
    const [x0, x1] = [brush.x0, brush.x1].map((value) => xScale.at(replaceNonPositive(value, state.xlog && canLog(state.info, state.x))));
    const [y0, y1] = [brush.y0, brush.y1].map((value) => yScale.at(replaceNonPositive(value, state.ylog && canLog(state.info, state.y))));
    const [left, right] = [x0, x1].map((x) => clamp(x, margin.left, width - margin.right));
    const [bottom, top] = [y0, y1].map((y) => clamp(y, margin.top, height - margin.bottom));
    return { x: left, y: top, width: right - left, height: bottom - top };
  }
  // Highlight the hovered head; it may be hovered in another scatter or in the table.
  function showHovered() {
    if (!scene) return;
    const { hover, info, x, y, size, colour } = store.state;
    const isHovered = hover && (hover.corpus === index || (several && haveSameHeads(info)));
    const k = isHovered ? scene.points.findIndex((each) => each.row === hover.row) : -1;
    tooltip.hidden = k < 0 || Boolean(drag?.box);
    scene.overlay.replaceChildren();
    if (k < 0) return;
    const hovered = scene.points[k];
    scene.overlay.append(createSvg("circle", { cx: hovered.x, cy: hovered.y, r: hovered.radius, fill: hovered.fill, stroke: scene.look.accent, "stroke-width": 2.5 }));
    const names = [...new Set([x, y, size, colour])].filter(Boolean);
    const { row } = hovered;
    const lines = names.flatMap((each) => [make("dt", {}, getMeasure(info, each).label), make("dd", {}, formatValue(getMeasure(info, each), getShownValues(corpus, each)[row]))]);
    tooltip.replaceChildren(make("b", {}, formatHeadTitle(getHead(corpus, row))), make("dl", { class: "tip-pairs" }, ...lines));
    const [tipWidth, tipHeight] = [tooltip.offsetWidth, tooltip.offsetHeight];
    const left = hovered.x + 14 + tipWidth > scene.width ? hovered.x - 14 - tipWidth : hovered.x + 14;
    const top = Math.min(scene.height - tipHeight - 2, Math.max(2, hovered.y - tipHeight / 2));
    tooltip.style.transform = `translate(${Math.max(2, left)}px, ${top}px)`;
  }

  // ----------------------------------------------------------------------------------------------------- pointing

  const getPosition = (/** @type {MouseEvent} */ event) => {
    const box = plot.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  /** @param {Point} point */
  function findNearest({ x, y }) {
    let [best, distance] = [-1, Infinity];
    getScene().points.forEach((each, i) => {
      const gap = Math.hypot(each.x - x, each.y - y) - each.radius;
      if (gap <= distance) [best, distance] = [i, gap];
    });
    return distance <= hoverRadius ? best : -1;
  }
  const hoverRow = (/** @type {number | null} */ row) => store.set({ hover: row === null ? null : { corpus: index, row } });
  /** @param {Rectangle} box */
  function setBrush(box) {
    const { xScale, yScale } = getScene();
    store.set({ brush: { corpus: index, x0: xScale.value(box.x), x1: xScale.value(box.x + box.width), y0: yScale.value(box.y + box.height), y1: yScale.value(box.y) } });
  }
  const openHead = (/** @type {number} */ row) => store.set({ open: getOpenHeads(store.state, index, getHead(corpus, row)), hover: null });

  plot.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !scene) return;
    const start = getPosition(event);
    const brush = store.state.brush?.corpus === index ? getBrushBox(store.state.brush) : null;
    const isInside = brush && start.x > brush.x && start.x < brush.x + brush.width && start.y > brush.y && start.y < brush.y + brush.height;
    drag = { start, moved: false, hold: isInside ? brush : null, box: null };
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    if (!scene) return;
    const now = getPosition(event);
    if (!drag) {
      const k = findNearest(now);
      active = k;
      plot.classList.toggle("on-point", k >= 0);
      hoverRow(k < 0 ? null : scene.points[k].row);
      return;
    }
    if (!drag.moved && Math.hypot(now.x - drag.start.x, now.y - drag.start.y) < 5) return;
    drag.moved = true;
    const [right, bottom] = [scene.width - scene.margin.right, scene.height - scene.margin.bottom];
    if (drag.hold) {
      const { hold, start } = drag;
      drag.box = { ...hold, x: clamp(hold.x + now.x - start.x, scene.margin.left, right - hold.width), y: clamp(hold.y + now.y - start.y, scene.margin.top, bottom - hold.height) };
    } else {
      const [x, y] = [clamp(now.x, scene.margin.left, right), clamp(now.y, scene.margin.top, bottom)];
      const [x0, y0] = [clamp(drag.start.x, scene.margin.left, right), clamp(drag.start.y, scene.margin.top, bottom)];
      drag.box = { x: Math.min(x, x0), y: Math.min(y, y0), width: Math.abs(x - x0), height: Math.abs(y - y0) };
    }
    hoverRow(null);
    setBrush(drag.box);
  });
  const endDrag = (/** @type {PointerEvent} */ event) => {
    const finished = drag;
    drag = null;
    if (!finished || !scene) return;
    if (finished.moved) {
      const count = getSelection(store.state)[index]?.size ?? 0;
      announce(t("{0} heads selected", count));
      showBrush();
      return;
    }
    if (event.type === "pointercancel") return;
    const k = findNearest(finished.start);
    if (k >= 0) openHead(scene.points[k].row);
    else store.set({ brush: null });
  };
  plot.addEventListener("pointerup", endDrag);
  plot.addEventListener("pointercancel", endDrag);
  plot.addEventListener("pointerleave", () => !drag && hoverRow(null));

  // --------------------------------------------------------------------------------------------------------- keys

  /**
   * The nearest point in a direction; a distance across the direction counts twice.
   *
   * @param {Point} from
   * @param {number} dx
   * @param {number} dy
   */
  function findNext(from, dx, dy) {
    let [best, least] = [-1, Infinity];
    getScene().points.forEach((each, k) => {
      const [along, aside] = [(each.x - from.x) * dx + (each.y - from.y) * dy, Math.abs((each.x - from.x) * dy + (each.y - from.y) * dx)];
      if (along <= 0.01) return;
      const cost = along + 2 * aside;
      if (cost < least) [best, least] = [k, cost];
    });
    return best;
  }
  plot.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !scene?.points.length) return;
    /** @type {Record<string, [dx: number, dy: number]>} */
    const directions = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] };
    const direction = directions[event.key];
    if (direction) {
      const next = active < 0 ? 0 : findNext(scene.points[active], ...direction);
      if (!event.shiftKey) anchor = null;
      else if (anchor === null) anchor = active < 0 ? next : active;
      if (next >= 0) active = next;
      const now = scene.points[active];
      hoverRow(now.row);
      if (anchor !== null) {
        const first = scene.points[anchor];
        setBrush({ x: Math.min(first.x, now.x) - 2, y: Math.min(first.y, now.y) - 2, width: Math.abs(first.x - now.x) + 4, height: Math.abs(first.y - now.y) + 4 });
      }
      const { info, x, y } = store.state;
      const selection = anchor === null ? "" : `, ${t("{0} heads selected", getSelection(store.state)[index]?.size)}`;
      announce(`${formatHeadTitle(getHead(corpus, now.row))}: ${[x, y].map((each) => `${getMeasure(info, each).label} ${formatValue(getMeasure(info, each), getValues(corpus, each)[now.row])}`).join(", ")}${selection}`);
    } else if (event.key === "Enter" && active >= 0) openHead(scene.points[active].row);
    else if (event.key === "Escape" && (store.state.brush || store.state.hover)) store.set({ brush: null, hover: null });
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  plot.addEventListener("blur", () => hoverRow(null));

  const resizeObserver = new ResizeObserver(draw);
  resizeObserver.observe(plot);
  const subscriptions = [store.on(["x", "y", "size", "colour", "xlog", "ylog", "dark"], draw), store.on(["brush"], showBrush), store.on(["hover"], showHovered)];
  return {
    element,
    destroy() {
      resizeObserver.disconnect();
      for (const unsubscribe of subscriptions) unsubscribe();
    },
  };
}

/**
 * The four pickers of what the points show, and what the axes mean in plain words.
 *
 * @param {Pick<CorpusContext, "store">} context
 */
export function createPickers({ store }) {
  const { info } = store.state;
  const createOptions = (/** @type {"x" | "y" | "colour" | "size"} */ field) => listMeasures(info, field === "colour").map(({ name, label }) => make("option", { value: name }, label));
  const pick = (/** @type {"x" | "y" | "colour" | "size"} */ field, /** @type {string} */ label, none = "") => {
    const select = make("select", { "aria-label": label }, ...(none ? [make("option", { value: "" }, none)] : []), ...createOptions(field));
    select.addEventListener("change", () => store.set({ [field]: select.value, ...(field === "x" || field === "y" ? { brush: null } : {}) }));
    return { field, select, element: make("label", { class: "picker" }, make("span", {}, label), select) };
  };
  const picks = [pick("x", t("Across")), pick("y", t("Up")), pick("colour", t("Colour")), pick("size", t("Size"), t("the same for all"))];
  const logs = /** @type {const} */ (["x", "y"]).map((axis) => {
    const label = axis === "x" ? t("Logarithmic scale across") : t("Logarithmic scale upwards");
    const button = make("button", { type: "button", class: "toggle", title: label, "aria-label": label }, t("log"));
    button.addEventListener("click", () => store.set({ [`${axis}log`]: !store.state[`${axis}log`] }));
    return { axis, button };
  });
  const axisDescriptions = make("dl", { class: "scatter-says" });
  const parts = picks.map(({ element }, at) => make("div", { class: "pick" }, element, logs[at]?.button));
  const element = make("div", { class: "scatter-controls" }, make("div", { class: "picks" }, ...parts), axisDescriptions);
  const show = (/** @type {CorpusState} */ state) => {
    for (const { field, select } of picks) select.value = state[field];
    for (const { axis, button } of logs) {
      button.disabled = !canLog(info, state[axis]);
      button.setAttribute("aria-pressed", String(state[`${axis}log`] && !button.disabled));
    }
    const lines = [["→", state.x], ["↑", state.y]].map(([sign, name]) => {
      const measure = getMeasure(info, name);
      return make("div", {}, make("dt", {}, `${sign} ${measure.label}`), make("dd", {}, measure.description));
    });
    axisDescriptions.replaceChildren(...lines);
  };
  show(store.state);
  return { element, destroy: store.on(["x", "y", "size", "colour", "xlog", "ylog"], show) };
}
