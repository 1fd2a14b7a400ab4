// All heads of a corpus as points: any measure on x, y, size and colour; a brush selects, a click opens.

import { canLog, domainOf, headAt, headLabel, headTitle, LETTERS, linked, measureOf, measuresOf, openedAt, say, selectionOf, titled, valuesOf } from "./corpus-data.js";
import { scaleOf, shareOf, tickText, tintsOf } from "./corpus-scales.js";
import { make } from "./elements.js";
import { saveButtons, svg, svgRoot } from "./figure.js";
import { readLook } from "./look.js";
import { digits, whole } from "./numbers.js";
import { t } from "./words.js";

const margins = { left: 60, right: 18, bottom: 46 };
const [smallest, largest] = [3, 13]; // radii, where a measure gives them
const named = 80; // heads up to which points carry their names, as far as these do not meet
const reach = 16; // pixels from the pointer to the point that it means

export function createScatter({ store, announce, root, uid }, at) {
  const corpus = store.state.info.corpora[at];
  const several = store.state.info.corpora.length > 1;
  const help = make("span", { class: "unseen", id: uid("scatter-help") }, t("Arrow keys move from point to point, with Shift they select; Enter opens the head, Escape clears the selection."));
  const plot = make("div", { class: "scatter-plot", role: "application", tabIndex: 0, "aria-label": t("All heads of {0}", corpus.title), "aria-describedby": help.id });
  const tip = make("div", { class: "tip", hidden: true });
  const element = make("figure", { class: "scatter" });
  const name = make("figcaption", { class: "scatter-name" }, several ? make("b", { class: "letter" }, LETTERS[at]) : null, make("span", { class: "scatter-title" }, several ? corpus.title : t("{0} heads of {1}", whole(corpus.rows.layer.length), corpus.model)));
  element.append(make("div", { class: "figure-head" }, name, saveButtons(t("scatter"), saved, announce)), plot, help);
  let drawn = null; // what the last drawing placed: {figure, points, sx, sy, overlay, circles, width, height}
  let anchor = null; // the point from which Shift and the arrows select
  let drag = null;
  let active = -1;

  function saved() {
    const { info, x, y } = store.state;
    return drawn && { figure: drawn.figure, look: readLook(root), title: `${several ? `${LETTERS[at]}: ` : ""}${corpus.title}`, caption: t("{0} heads of {1} over {2} texts: {3} against {4}", whole(corpus.rows.layer.length), corpus.model, whole(corpus.texts), measureOf(info, y).label, measureOf(info, x).label), file: `${x} ${y}` };
  }

  // ------------------------------------------------------------------------------------------------------ drawing

  function draw() {
    const { state } = store;
    const { info } = state;
    const [width, height] = [Math.floor(plot.clientWidth), Math.floor(plot.clientHeight)];
    if (width < 80 || height < 80) return;
    const look = readLook(root);
    const [mx, my] = [measureOf(info, state.x), measureOf(info, state.y)];
    const tints = tintsOf(info, corpus, state, look);
    const key = legend(state, tints, width, look);
    const margin = { ...margins, top: key.height };
    const sx = scaleOf(domainOf(info, state.x), state.xlog && canLog(info, state.x), margin.left, width - margin.right);
    const sy = scaleOf(domainOf(info, state.y), state.ylog && canLog(info, state.y), height - margin.bottom, margin.top);
    const axes = svg("g", {});
    for (const value of sx.ticks(Math.max(2, width / 90))) {
      const x = sx.at(value);
      axes.append(svg("line", { x1: x, x2: x, y1: margin.top, y2: height - margin.bottom, stroke: look.line }), svg("text", { x, y: height - margin.bottom + 16, "text-anchor": "middle" }, tickText(value)));
    }
    for (const value of sy.ticks(Math.max(2, height / 60))) {
      const y = sy.at(value);
      axes.append(svg("line", { x1: margin.left, x2: width - margin.right, y1: y, y2: y, stroke: look.line }), svg("text", { x: margin.left - 7, y: y + 4, "text-anchor": "end" }, tickText(value)));
    }
    const middle = (margin.top + height - margin.bottom) / 2;
    axes.append(
      svg("text", { x: (margin.left + width - margin.right) / 2, y: height - 10, "text-anchor": "middle", "font-size": 12, fill: look.ink }, `${titled(mx)} →`),
      svg("text", { transform: `translate(14 ${middle}) rotate(-90)`, "text-anchor": "middle", "font-size": 12, fill: look.ink }, `${titled(my)} →`),
    );
    const points = pointsOf(state, sx, sy, tints.fills);
    const circles = points.map(({ x, y, radius, fill }) => svg("circle", { cx: x, cy: y, r: radius, fill, stroke: look.card, "stroke-width": 1 }));
    const overlay = svg("g", { "data-transient": "" });
    const brushed = svg("g", {});
    const figure = svgRoot(width, height, look, t("{0} heads: {1} against {2}", whole(points.length), my.label, mx.label), key.group, axes, brushed, svg("g", {}, ...circles), points.length <= named ? namesOf(points, width, look) : null, overlay);
    drawn = { figure, points, sx, sy, overlay, brushed, circles, width, height, look, margin };
    plot.replaceChildren(figure, tip);
    shade();
    point();
  }
  function pointsOf(state, sx, sy, fills) {
    const { info } = state;
    const [xs, ys] = [valuesOf(corpus, state.x), valuesOf(corpus, state.y)];
    const sizes = state.size && valuesOf(corpus, state.size);
    const sizeDomain = state.size && domainOf(info, state.size);
    const found = [];
    for (let row = 0; row < xs.length; row++) {
      if (xs[row] === null || ys[row] === null) continue;
      const share = sizes ? Math.max(0, shareOf(sizes[row] ?? sizeDomain[0], sizeDomain)) : 0;
      const radius = sizes ? Math.sqrt(smallest ** 2 + share * (largest ** 2 - smallest ** 2)) : xs.length > 400 ? 4 : 7;
      found.push({ row, x: sx.at(xs[row]), y: sy.at(ys[row]), radius, fill: fills[row] });
    }
    // The small ones above the large ones, so that none is hidden.
    return found.sort((a, b) => b.radius - a.radius || a.row - b.row);
  }
  // Names beside points: to the right, else to the left, above or below, and none where another point or name is.
  function namesOf(points, width, look) {
    const taken = points.map(({ x, y, radius }) => ({ x: x - radius, y: y - radius, width: 2 * radius, height: 2 * radius }));
    const group = svg("g", { "font-size": 10.5 });
    for (const each of points) {
      const text = headLabel(corpus, each.row);
      const [wide, high, gap] = [6.2 * text.length, 11, each.radius + 3];
      const boxes = [
        { x: each.x + gap, y: each.y - high / 2 },
        { x: each.x - gap - wide, y: each.y - high / 2 },
        { x: each.x - wide / 2, y: each.y - gap - high },
        { x: each.x - wide / 2, y: each.y + gap },
      ].map((corner) => ({ ...corner, width: wide, height: high }));
      const meets = (a) => (b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;
      const box = boxes.find((candidate) => candidate.x > margins.left && candidate.x + wide < width && !taken.some(meets(candidate)));
      if (!box) continue;
      taken.push(box);
      group.append(svg("text", { x: box.x + wide / 2, y: box.y + 9, "text-anchor": "middle", fill: look.soft }, text));
    }
    return group;
  }
  // What colour and size mean, in lines above the plot: {group, height}.
  function legend(state, tints, width, look) {
    const { info } = state;
    const group = svg("g", {});
    const wide = (text) => 6.3 * (text.length + (text.match(/[\u3000-\uffef]/g)?.length ?? 0)); // Chinese is twice as wide
    let [x, y] = [margins.left, 16];
    const need = (room) => {
      if (x + room > width - margins.right && x > margins.left) [x, y] = [margins.left, y + 20];
    };
    const write = (text, fill) => {
      group.append(svg("text", { x, y: y + 4, fill }, text));
      x += wide(text) + 7;
    };
    if (tints.kinds) {
      for (const { name: kind, fill } of tints.kinds) {
        need(16 + wide(t(kind)));
        group.append(svg("circle", { cx: x + 5, cy: y, r: 5, fill }));
        x += 14;
        write(t(kind), look.ink);
        x += 8;
      }
    } else {
      const { label, whole: integral } = measureOf(info, state.colour);
      const [low, high] = tints.domain.map((value) => (integral ? whole(value) : digits(value)));
      const [steps, step] = [24, 3];
      need(wide(label + low + high) + steps * step + 30);
      write(label, look.ink);
      write(low);
      for (let k = 0; k < steps; k++) group.append(svg("rect", { x: x + k * step, y: y - 5, width: step + 0.5, height: 10, fill: tints.palette(k / (steps - 1)) }));
      x += steps * step + 6;
      write(high);
    }
    if (state.size) {
      const { label, whole: integral } = measureOf(info, state.size);
      const ends = domainOf(info, state.size).map((value) => (integral ? whole(value) : digits(value)));
      x += 14;
      need(wide(label + ends.join("")) + 4 * largest + 30);
      write(label, look.ink);
      ends.forEach((text, k) => {
        const radius = [smallest, largest][k];
        x += radius;
        group.append(svg("circle", { cx: x, cy: y, r: radius, fill: "none", stroke: look.soft }));
        x += radius + 5;
        write(text);
      });
    }
    return { group, height: y + 22 };
  }
  // The brush, and the points outside of it faint.
  function shade() {
    if (!drawn) return;
    const { state } = store;
    const chosen = selectionOf(state)[at];
    drawn.circles.forEach((circle, k) => circle.setAttribute("opacity", chosen && !chosen.has(drawn.points[k].row) ? "0.16" : "0.88"));
    const box = drag?.box ?? (state.brush?.corpus === at ? boxOf(state.brush) : null);
    drawn.brushed.replaceChildren(...(box ? [svg("rect", { x: box.x, y: box.y, width: box.width, height: box.height, fill: drawn.look.accent, "fill-opacity": 0.08, stroke: drawn.look.accent, "stroke-dasharray": "4 3" })] : []));
  }
  function boxOf(brush) {
    const positive = (value, log) => (log && value <= 0 ? Number.MIN_VALUE : value);
    const { state } = store;
    const [x0, x1] = [brush.x0, brush.x1].map((value) => drawn.sx.at(positive(value, state.xlog && canLog(state.info, state.x))));
    const [y0, y1] = [brush.y0, brush.y1].map((value) => drawn.sy.at(positive(value, state.ylog && canLog(state.info, state.y))));
    const inside = (value, low, high) => Math.min(high, Math.max(low, value));
    const [left, right] = [x0, x1].map((x) => inside(x, drawn.margin.left, drawn.width - drawn.margin.right));
    const [bottom, top] = [y0, y1].map((y) => inside(y, drawn.margin.top, drawn.height - drawn.margin.bottom));
    return { x: left, y: top, width: right - left, height: bottom - top };
  }
  // The point under the pointer, here or of the same head in another pane or in the table.
  function point() {
    if (!drawn) return;
    const { hover, info, x, y, size, colour } = store.state;
    const here = hover && (hover.corpus === at || (several && linked(info)));
    const k = here ? drawn.points.findIndex((each) => each.row === hover.row) : -1;
    tip.hidden = k < 0 || Boolean(drag?.box);
    drawn.overlay.replaceChildren();
    if (k < 0) return;
    const found = drawn.points[k];
    drawn.overlay.append(svg("circle", { cx: found.x, cy: found.y, r: found.radius, fill: found.fill, stroke: drawn.look.accent, "stroke-width": 2.5 }));
    const names = [...new Set([x, y, size, colour])].filter(Boolean);
    const lines = names.flatMap((each) => [make("dt", {}, measureOf(info, each).label), make("dd", {}, say(measureOf(info, each), valuesOf(corpus, each)[hover.row]))]);
    tip.replaceChildren(make("b", {}, headTitle(headAt(corpus, hover.row))), make("dl", { class: "tip-pairs" }, ...lines));
    const [wide, high] = [tip.offsetWidth, tip.offsetHeight];
    const left = found.x + 14 + wide > drawn.width ? found.x - 14 - wide : found.x + 14;
    const top = Math.min(drawn.height - high - 2, Math.max(2, found.y - high / 2));
    tip.style.transform = `translate(${Math.max(2, left)}px, ${top}px)`;
  }

  // ----------------------------------------------------------------------------------------------------- pointing

  const placeOf = (event) => {
    const box = plot.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  function nearest({ x, y }) {
    let [best, distance] = [-1, Infinity];
    drawn.points.forEach((each, k) => {
      const gap = Math.hypot(each.x - x, each.y - y) - each.radius;
      if (gap <= distance) [best, distance] = [k, gap];
    });
    return distance <= reach ? best : -1;
  }
  const hoverRow = (row) => store.set({ hover: row === null ? null : { corpus: at, row } });
  function setBrush(box) {
    const { sx, sy } = drawn;
    store.set({ brush: { corpus: at, x0: sx.value(box.x), x1: sx.value(box.x + box.width), y0: sy.value(box.y + box.height), y1: sy.value(box.y) } });
  }
  const open = (row) => store.set({ open: openedAt(store.state, at, headAt(corpus, row)), hover: null });

  plot.addEventListener("pointerdown", (event) => {
    if (event.button !== 0 || !drawn) return;
    const start = placeOf(event);
    const brush = store.state.brush?.corpus === at ? boxOf(store.state.brush) : null;
    const inside = brush && start.x > brush.x && start.x < brush.x + brush.width && start.y > brush.y && start.y < brush.y + brush.height;
    drag = { start, moved: false, hold: inside ? brush : null, box: null };
    plot.setPointerCapture(event.pointerId);
  });
  plot.addEventListener("pointermove", (event) => {
    if (!drawn) return;
    const now = placeOf(event);
    if (!drag) {
      const k = nearest(now);
      active = k;
      plot.classList.toggle("on-point", k >= 0);
      hoverRow(k < 0 ? null : drawn.points[k].row);
      return;
    }
    if (!drag.moved && Math.hypot(now.x - drag.start.x, now.y - drag.start.y) < 5) return;
    drag.moved = true;
    const inside = (value, low, high) => Math.min(high, Math.max(low, value));
    const [right, bottom] = [drawn.width - drawn.margin.right, drawn.height - drawn.margin.bottom];
    if (drag.hold) {
      const { hold, start } = drag;
      drag.box = { ...hold, x: inside(hold.x + now.x - start.x, drawn.margin.left, right - hold.width), y: inside(hold.y + now.y - start.y, drawn.margin.top, bottom - hold.height) };
    } else {
      const [x, y] = [inside(now.x, drawn.margin.left, right), inside(now.y, drawn.margin.top, bottom)];
      const [x0, y0] = [inside(drag.start.x, drawn.margin.left, right), inside(drag.start.y, drawn.margin.top, bottom)];
      drag.box = { x: Math.min(x, x0), y: Math.min(y, y0), width: Math.abs(x - x0), height: Math.abs(y - y0) };
    }
    hoverRow(null);
    setBrush(drag.box);
  });
  const release = (event) => {
    const done = drag;
    drag = null;
    if (!done || !drawn) return;
    if (done.moved) {
      const count = selectionOf(store.state)[at]?.size ?? 0;
      announce(t("{0} heads selected", count));
      shade();
      return;
    }
    if (event.type === "pointercancel") return;
    const k = nearest(done.start);
    if (k >= 0) open(drawn.points[k].row);
    else store.set({ brush: null });
  };
  plot.addEventListener("pointerup", release);
  plot.addEventListener("pointercancel", release);
  plot.addEventListener("pointerleave", () => !drag && hoverRow(null));

  // --------------------------------------------------------------------------------------------------------- keys

  // The nearest point in a direction: those that lie more along it than aside come first.
  function step(from, dx, dy) {
    let [best, least] = [-1, Infinity];
    drawn.points.forEach((each, k) => {
      const [along, aside] = [(each.x - from.x) * dx + (each.y - from.y) * dy, Math.abs((each.x - from.x) * dy + (each.y - from.y) * dx)];
      if (along <= 0.01) return;
      const cost = along + 2 * aside;
      if (cost < least) [best, least] = [k, cost];
    });
    return best;
  }
  plot.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !drawn?.points.length) return;
    const direction = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (direction) {
      const next = active < 0 ? 0 : step(drawn.points[active], ...direction);
      if (!event.shiftKey) anchor = null;
      else if (anchor === null) anchor = active < 0 ? next : active;
      if (next >= 0) active = next;
      const now = drawn.points[active];
      hoverRow(now.row);
      if (anchor !== null) {
        const first = drawn.points[anchor];
        setBrush({ x: Math.min(first.x, now.x) - 2, y: Math.min(first.y, now.y) - 2, width: Math.abs(first.x - now.x) + 4, height: Math.abs(first.y - now.y) + 4 });
      }
      const { info, x, y } = store.state;
      const chosen = anchor === null ? "" : `, ${t("{0} heads selected", selectionOf(store.state)[at].size)}`;
      announce(`${headTitle(headAt(corpus, now.row))}: ${[x, y].map((each) => `${measureOf(info, each).label} ${say(measureOf(info, each), valuesOf(corpus, each)[now.row])}`).join(", ")}${chosen}`);
    } else if (event.key === "Enter" && active >= 0) open(drawn.points[active].row);
    else if (event.key === "Escape" && (store.state.brush || store.state.hover)) store.set({ brush: null, hover: null });
    else return;
    event.preventDefault();
    event.stopPropagation();
  });
  plot.addEventListener("blur", () => hoverRow(null));

  const watch = new ResizeObserver(draw);
  watch.observe(plot);
  const off = [store.on(["x", "y", "size", "colour", "xlog", "ylog", "dark"], draw), store.on(["brush"], shade), store.on(["hover"], point)];
  return {
    element,
    destroy() {
      watch.disconnect();
      for (const end of off) end();
    },
  };
}

/** The four pickers of what the points show, and what the axes mean in plain words. */
export function createPickers({ store }) {
  const { info } = store.state;
  const optionsOf = (field) => measuresOf(info, field === "colour").map(({ name, label }) => make("option", { value: name }, label));
  const pick = (field, label, none) => {
    const select = make("select", { "aria-label": label }, ...(none ? [make("option", { value: "" }, none)] : []), ...optionsOf(field));
    select.addEventListener("change", () => store.set({ [field]: select.value, ...(field === "x" || field === "y" ? { brush: null } : {}) }));
    return { field, select, element: make("label", { class: "picker" }, make("span", {}, label), select) };
  };
  const picks = [pick("x", t("Across")), pick("y", t("Up")), pick("colour", t("Colour")), pick("size", t("Size"), t("the same for all"))];
  const logs = ["x", "y"].map((axis) => {
    const label = axis === "x" ? t("Logarithmic scale across") : t("Logarithmic scale upwards");
    const button = make("button", { type: "button", class: "toggle", title: label, "aria-label": label }, t("log"));
    button.addEventListener("click", () => store.set({ [`${axis}log`]: !store.state[`${axis}log`] }));
    return { axis, button };
  });
  const says = make("dl", { class: "scatter-says" });
  const parts = picks.map(({ element }, at) => make("div", { class: "pick" }, element, logs[at]?.button));
  const element = make("div", { class: "scatter-controls" }, make("div", { class: "picks" }, ...parts), says);
  const show = (state) => {
    for (const { field, select } of picks) select.value = state[field];
    for (const { axis, button } of logs) {
      button.disabled = !canLog(info, state[axis]);
      button.setAttribute("aria-pressed", String(state[`${axis}log`] && !button.disabled));
    }
    const lines = [["→", state.x], ["↑", state.y]].map(([sign, name]) => {
      const measure = measureOf(info, name);
      return make("div", {}, make("dt", {}, `${sign} ${measure.label}`), make("dd", {}, measure.description));
    });
    says.replaceChildren(...lines);
  };
  show(store.state);
  return { element, destroy: store.on(["x", "y", "size", "colour", "xlog", "ylog"], show) };
}
