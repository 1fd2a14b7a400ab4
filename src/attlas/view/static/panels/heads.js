// All heads as thumbnails, sorted and filtered by what is known of them.

import { MOST_COLOURED, isSameHead, listColoured, toggleColoured } from "../data/coloured.js";
import { listHeads } from "../data/state.js";
import { canBeColoured } from "./coloured.js";
import { make, createPicker } from "./elements.js";
import { mountHeadmap, createPairColumns } from "./headmap.js";
import { createHistogram } from "./histogram.js";
import { formatNumber, getHeadMark, getHeadName, getLayerName, formatInteger, isRollout } from "../data/numbers.js";
import { holdsHead } from "../data/held.js";
import { createThumbs } from "./thumbs.js";
import { describeProgress } from "./says.js";
import { t } from "../words/words.js";

const pollDelays = [1_000, 2_000, 4_000, 8_000, 15_000];
const listOrders = () => [{ value: "=", text: t("in layers") }, { value: "-", text: t("largest first") }, { value: "+", text: t("smallest first") }];

/**
 * The sort in the URL: "" (in layers), else one of = - + and the name of a statistic: "-entropy".
 *
 * @param {string} text
 * @param {Column[]} columns
 * @returns {HeadSort}
 */
function readSort(text, columns) {
  const [order, name] = [text[0], text.slice(1)];
  const column = columns.find((each) => each.name === name) ?? columns[0] ?? null;
  return { order: ["=", "-", "+"].includes(order) && column?.name === name ? order : "=", column };
}

/**
 * The filter in the URL: "kind:induction;within:0.2,1.5", both parts optional.
 *
 * @param {string} text
 * @returns {HeadFilter}
 */
function readFilter(text) {
  const parts = text.split(";");
  const kind = parts.find((part) => part.startsWith("kind:"))?.slice(5) ?? "";
  const bounds = parts.find((part) => part.startsWith("within:"))?.slice(7).split(",").map(Number) ?? null;
  return { kind, within: bounds?.length === 2 && bounds.every(Number.isFinite) ? [bounds[0], bounds[1]] : null };
}
/** @param {HeadFilter} headFilter */
function writeFilter({ kind, within }) {
  const bounds = within?.map((value) => Number(value.toPrecision(6))).join(",");
  return [kind && `kind:${kind}`, bounds && `within:${bounds}`].filter(Boolean).join(";");
}

/**
 * The heads that pass a filter, in the order of a sort. Heads without the number come last, and pass no range.
 *
 * @param {ShownHead[]} rows
 * @param {HeadSort} headSort
 * @param {HeadFilter} headFilter
 */
function arrange(rows, { order, column }, { kind, within }) {
  const getValue = (/** @type {ShownHead} */ row) => (column ? row.values[column.name] ?? null : null);
  const visible = rows.filter((row) => {
    if (kind && !row.kinds.includes(kind)) return false;
    if (!within) return true;
    const number = getValue(row);
    // The bounds were rounded for the URL; the values that they come from must pass.
    const slack = 1e-5 * Math.max(...within.map(Math.abs));
    return number !== null && number >= within[0] - slack && number <= within[1] + slack;
  });
  if (order === "=") return visible;
  const sign = order === "-" ? -1 : 1;
  return visible.sort((a, b) => {
    const [x, y] = [getValue(a), getValue(b)];
    if (x === null || y === null) return Number(x === null) - Number(y === null);
    return sign * (x - y);
  });
}

const THUMB_STEP = 62; // CSS pixels of a thumbnail with its words, and the gap
const LEAST_THUMB = 12; // CSS pixels of a thumbnail without words

/**
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountHeads(element, { store, transport, announce, uid }) {
  /** @type {HeadTable} */
  let summary = store.state.heads ?? { progress: 0, columns: [], rows: [], kinds: {}, on: null, telling: null }; // of the text before, where it was continued
  let isOutdated = store.state.heads !== null;
  /** @type {Map<string, HeadCell>} */
  let cells = new Map(); // "entry:head" -> {button, canvas, value, kind, row}
  /** @type {string[]} */
  let shownKeys = [];
  let timer = 0;
  let pollCount = 0;
  const controller = new AbortController();

  const count = make("span", { class: "heads-count", role: "status" });
  const statistic = createPicker(t("Statistic"), [], (name) => setSort({ name }));
  const order = createPicker(t("Order"), listOrders(), (value) => setSort({ order: value }));
  const kind = createPicker(t("Kind of head"), [/** @type {Option<string>} */ ({ value: "", text: t("all kinds") })], (value) => setFilter({ kind: value }));
  const batch = make("input", { type: "number", min: "0", value: "0", "aria-label": t("Batch"), class: "batch" });
  const batchBox = make("label", { class: "picker", hidden: true }, make("span", {}, t("Batch")), batch);
  const explain = make("p", { class: "heads-explain", id: uid("explain") });
  const histogram = createHistogram((within) => setFilter({ within }));
  const enlargeButton = make("button", { type: "button", class: "text-button wide", title: t("All heads over the whole window") }, t("enlarge"));
  enlargeButton.addEventListener("click", () => store.set({ aside: store.state.aside === "grid" ? "both" : "grid", panel: "" }));
  const clearButton = make("button", { type: "button", class: "text-button", hidden: true }, t("show all"));
  const grid = make("div", { class: "heads-grid", role: "group", "aria-label": t("Heads") });
  const foot = make("p", { class: "heads-foot", hidden: true });
  const noRollout = make("p", { class: "heads-note", hidden: true });
  const headmapElement = make("section", { "aria-label": t("Map of the heads") });
  const controls = make("div", { class: "heads-controls" }, statistic.element, order.element, kind.element, batchBox);
  element.classList.add("heads");
  const scroller = make("div", { class: "heads-scroll" }, controls, explain, histogram.element, grid, noRollout);
  element.append(make("div", { class: "heads-head" }, make("h2", {}, t("Heads")), count, clearButton, enlargeButton), headmapElement, scroller, foot);
  statistic.select.setAttribute("aria-describedby", explain.id);

  const thumbs = createThumbs({
    store,
    transport,
    onArrival(canvas, { sampled, failed }) {
      const { cell } = /** @type {HTMLCanvasElement & { cell: HeadCell }} */ (canvas);
      const { button } = cell;
      cell.sampled = sampled;
      button.classList.toggle("sampled", sampled);
      button.classList.toggle("failed", Boolean(failed));
      button.classList.add("drawn");
      updateLabel(cell);
      updateFootnote();
    },
  });

  const getColumns = () => [...summary.columns, ...createPairColumns(store.state)];
  const getCellValues = (/** @type {HeadCell} */ cell) => /** @type {Record<string, number | null>} */ ({ ...cell.row?.values, ...store.state.pairs?.[cell.key] });
  const getSort = () => readSort(store.state.sort, getColumns());
  /** @param {{ order?: string, name?: string }} options */
  function setSort({ order: next, name: column }) {
    const now = getSort();
    /** @type {Partial<State>} */
    const patch = { sort: `${next ?? now.order}${column ?? now.column?.name ?? ""}` };
    // The range belongs to one statistic and is dropped with it.
    if (column && column !== now.column?.name) patch.filter = writeFilter({ ...readFilter(store.state.filter), within: null });
    store.set(patch);
  }
  /** @param {Partial<HeadFilter>} patch */
  function setFilter(patch) {
    store.set({ filter: writeFilter({ ...readFilter(store.state.filter), ...patch }) });
  }
  clearButton.addEventListener("click", () => store.set({ filter: "" }));
  batch.addEventListener("change", () => {
    const most = Number(batch.max);
    store.set({ batch: Math.min(most, Math.max(0, Math.round(Number(batch.value)) || 0)) });
  });

  // ------------------------------------------------------------------------------------------------- the thumbnails

  function build() {
    const { info } = store.state;
    thumbs.clear();
    cells = new Map();
    if (!info) return;
    info.entries.forEach((entry, index) => {
      for (const head of listHeads(entry)) {
        if (head === "mean" && entry.heads.length < 2) continue;
        cells.set(`${index}:${head}`, createCell(index, head, entry));
      }
    });
    noRollout.hidden = !info.no_rollout;
    if (info.no_rollout) noRollout.textContent = t("There is no rollout. {0}", t(...info.no_rollout));
    batchBox.hidden = Math.max(...info.entries.map((entry) => entry.batch ?? 1)) < 2;
    setRows();
    render();
  }
  /**
   * @param {number} entry
   * @param {HeadIndex} head
   * @param {Entry} layer
   * @returns {HeadCell}
   */
  function createCell(entry, head, layer) {
    const markElement = make("span", { class: "thumb-mark" }, getHeadMark(store.state.info, entry, head));
    const value = make("span", { class: "thumb-value" });
    const canvas = head === "mean" ? null : make("canvas", { width: 1, height: 1, "aria-hidden": "true" });
    const picture = canvas && make("span", { class: "thumb-picture" }, canvas);
    const kind = make("span", { class: "thumb-kind" });
    const wordsElement = make("span", { class: "thumb-words" }, markElement, value, kind);
    const button = make("button", { type: "button", class: head === "mean" ? "mean" : "thumb", tabIndex: -1, "data-head": `${entry}:${head}` }, picture, wordsElement);
    const cell = { entry, head, key: `${entry}:${head}`, button, canvas, value, kind, sampled: false, row: null };
    if (head === "mean") wordsElement.replaceChildren(t("mean of {0}", layer.heads.length));
    if (canvas) Object.assign(canvas, { cell });
    if (isRollout(layer)) button.classList.add("rollout");
    if (layer.readable === false) button.classList.add("unreadable", "drawn");
    if (!holdsHead(store.state.info, entry, head)) {
      button.classList.add("absent");
      button.setAttribute("aria-disabled", "true");
    }
    button.addEventListener("click", (event) => (event.ctrlKey || event.metaKey ? colourHead(cell) : selectHead(cell, event.shiftKey)));
    button.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
        event.preventDefault();
        event.stopPropagation();
        colourHead(cell);
      } else if (event.key === "Enter" && event.shiftKey) {
        event.preventDefault();
        event.stopPropagation();
        selectHead(cell, true);
      } else if (event.key === "Enter" || event.key === " ") event.stopPropagation();
      else moveFocus(cell, event);
    });
    button.addEventListener("focus", () => setTabStop(cell));
    return cell;
  }
  /** @param {HeadCell} cell */
  function updateLabel(cell) {
    const { info, entry, head, second } = store.state;
    if (!info) return;
    const { column } = getSort();
    const number = column ? getCellValues(cell)[column.name] ?? null : null;
    const parts = [getHeadName(info, cell.entry, cell.head)];
    if (cell.row?.kinds.length) parts.push(cell.row.kinds.map((kind) => t(kind)).join(", "));
    if (column && number !== null) parts.push(`${t(column.label)} ${formatNumber(number)}`);
    if (cell.sampled) parts.push(t("thumbnail of sampled queries"));
    if (info.entries[cell.entry].readable === false) parts.push(t("statistics only, no map"));
    if (!holdsHead(info, cell.entry, cell.head)) parts.push(t("not in this file: open the recording with attlas view"));
    const hue = store.state.compare === "colours" ? listColoured(store.state).findIndex((each) => isSameHead(each, cell)) : -1;
    if (hue >= 0) {
      parts.push(t("with a colour in the map"));
      cell.button.dataset.hue = String(hue);
    } else {
      delete cell.button.dataset.hue;
      if (second && isSameHead(second, cell)) parts.push(t("second head"));
    }
    cell.button.title = parts.join(" · ");
    cell.button.setAttribute("aria-label", parts.join(", "));
    cell.button.setAttribute("aria-pressed", String(entry === cell.entry && head === cell.head));
    cell.button.classList.toggle("second", Boolean(second && second.entry === cell.entry && second.head === cell.head));
    if (cell.head === "mean") return;
    cell.value.textContent = number === null ? "" : formatShort(number);
    const layer = info.entries[cell.entry];
    if (isRollout(layer)) cell.kind.textContent = t("layers {0}", cell.head === 0 ? layer.heads[0] : `${layer.heads[0]}–${layer.heads[cell.head]}`);
    if (isRollout(layer)) return;
    const [first] = cell.row?.kinds ?? [];
    cell.kind.textContent = t(summary.kinds?.[first]?.short ?? first ?? "");
  }
  /**
   * @param {HeadCell} cell
   * @param {boolean} linked
   */
  function selectHead(cell, linked) {
    const { info, entry, head, second, compare } = store.state;
    if (!holdsHead(info, cell.entry, cell.head)) announce(t("{0} is not in this file", getHeadName(info, cell.entry, cell.head)));
    else if (!linked) {
      store.set({ entry: cell.entry, head: cell.head, ...(store.state.aside === "grid" ? { aside: "both" } : {}) });
      announce(getHeadName(info, cell.entry, cell.head));
    } else if (second && second.entry === cell.entry && second.head === cell.head) {
      store.set({ second: null, compare: "none" });
      announce(t("The second head is closed"));
    } else if (cell.entry !== entry || cell.head !== head) {
      store.set({ second: { entry: cell.entry, head: cell.head }, compare: compare === "none" ? "side" : compare });
      announce(t("Second head: {0}", getHeadName(info, cell.entry, cell.head)));
    }
  }
  // Show a head in a colour too, beside the one that is shown, or no longer.
  /** @param {HeadCell} cell */
  function colourHead(cell) {
    const { state } = store;
    const name = getHeadName(state.info, cell.entry, cell.head);
    if (!canBeColoured(state, cell)) return announce(t("{0} cannot have a colour in this map", name));
    const patch = toggleColoured(state, cell);
    if (!patch) return announce(t("All {0} colours are taken", MOST_COLOURED));
    store.set({ entry: state.entry, head: state.head, ...patch });
    return announce(t("Heads with a colour: {0}", listColoured(store.state).length));
  }
  /** @param {HeadCell | null} cell */
  function setTabStop(cell) {
    for (const other of cells.values()) other.button.tabIndex = other === cell ? 0 : -1;
  }
  /**
   * @param {HeadCell} cell
   * @param {KeyboardEvent} event
   */
  function moveFocus(cell, event) {
    const index = shownKeys.indexOf(cell.key);
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -index, End: shownKeys.length - 1 - index }[event.key];
    const line = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (step === undefined && line === undefined) return;
    const next = line ? findNearest(index, line) : cells.get(shownKeys[index + (step ?? 0)]);
    event.preventDefault();
    event.stopPropagation();
    next?.button.focus();
  }
  /**
   * The nearest cell in the row above or below.
   *
   * @param {number} index
   * @param {number} sign
   */
  function findNearest(index, sign) {
    const getShownCell = (/** @type {number} */ at) => /** @type {HeadCell} */ (cells.get(shownKeys[at]));
    const here = getShownCell(index).button.getBoundingClientRect();
    /** @type {{ cell: HeadCell, horizontalDistance: number, top: number } | null} */
    let best = null;
    for (let i = index + sign; i >= 0 && i < shownKeys.length; i += sign) {
      const cell = getShownCell(i);
      const box = cell.button.getBoundingClientRect();
      if (Math.abs(box.top - here.top) < 8) continue;
      if (best && Math.abs(box.top - best.top) > 8) break;
      const horizontalDistance = Math.abs(box.left + box.right - here.left - here.right);
      if (!best || horizontalDistance < best.horizontalDistance) best = { cell, horizontalDistance, top: box.top };
    }
    return best?.cell;
  }

  // ------------------------------------------------------------------------------------------------- what is shown

  function render() {
    const { state } = store;
    const { info } = state;
    if (!info) return;
    const { order: sortOrder, column } = getSort();
    const filter = readFilter(state.filter);
    const rows = [...cells.values()]
      .filter((cell) => cell.head !== "mean")
      .map((cell) => ({ cell, values: getCellValues(cell), kinds: cell.row?.kinds ?? [] }));
    const isFree = sortOrder === "=" && writeFilter(filter) === ""; // rollouts are no heads: they are not sorted among them
    const visible = arrange(isFree ? rows : rows.filter(({ cell }) => !isRollout(info.entries[cell.entry])), { order: sortOrder, column }, filter);
    layOut(visible, sortOrder, filter);
    for (const cell of cells.values()) updateLabel(cell);
    statistic.fill(getColumns().map(({ name: value, label }) => ({ value, text: t(label) })));
    statistic.set(column?.name ?? "");
    order.set(sortOrder);
    const words = column ? describeColumn(column) : describeProgress(summary);
    explain.textContent = isOutdated ? t("Of the text before, until this one is measured. {0}", words) : words;
    explain.hidden = !words;
    for (const part of [statistic, order]) part.element.hidden = !getColumns().length;
    fillKinds(rows, filter.kind);
    const values = rows.filter(({ cell }) => !isRollout(info.entries[cell.entry])).filter((row) => !filter.kind || row.kinds.includes(filter.kind)).map((row) => row.values[column?.name ?? ""] ?? NaN);
    histogram.set(t(column?.label ?? ""), values, filter.within);
    clearButton.hidden = state.filter === "";
    const [shown, all] = [visible, rows].map((list) => list.filter(({ cell }) => !isRollout(info.entries[cell.entry])).length);
    count.textContent = shown === all ? formatInteger(all) : t("{0} of {1}", formatInteger(shown), formatInteger(all));
    const maxBatch = (info.entries[state.entry]?.batch ?? 1) - 1;
    batch.max = String(maxBatch);
    batch.value = String(state.batch);
    store.set({ statistic: column?.name ?? null });
  }
  /**
   * @param {ShownHead[]} rows
   * @param {string} now
   */
  function fillKinds(rows, now) {
    /** @type {Map<string, number>} */
    const counts = new Map();
    for (const row of rows) for (const each of row.kinds) counts.set(each, (counts.get(each) ?? 0) + 1);
    const options = [...counts].sort((a, b) => b[1] - a[1]).map(([value, number]) => ({ value, text: `${t(value)} (${formatInteger(number)})` }));
    if (now && !counts.has(now)) options.push({ value: now, text: `${t(now)} (0)` });
    kind.fill([{ value: "", text: t("all kinds") }, ...options]);
    kind.set(now);
    kind.element.hidden = !options.length;
  }
  const countHeads = () => Math.max(1, ...(store.state.info?.entries ?? []).map((entry) => entry.heads.length));
  // Whether the enlarged heads stand one layer a row, without words: where they would break a layer into several rows.
  const isCompact = () => store.state.aside === "grid" && getSort().order === "=" && countHeads() * THUMB_STEP > grid.clientWidth;
  let layoutKey = "";
  /**
   * @param {ShownHead[]} visible
   * @param {string} sortOrder
   * @param {HeadFilter} filter
   */
  function layOut(visible, sortOrder, filter) {
    const { info } = store.state;
    const cellsKept = visible.map((row) => row.cell);
    const inLayers = sortOrder === "=";
    const compact = isCompact();
    grid.classList.toggle("compact", compact);
    const signature = `${inLayers}|${compact}|${cellsKept.map((cell) => cell.key).join()}|${writeFilter(filter) === ""}`;
    if (signature === layoutKey) return;
    layoutKey = signature;
    const active = /** @type {HTMLElement | null} */ (document.activeElement);
    const focused = grid.contains(active) ? active : null;
    const parts = [];
    shownKeys = [];
    if (compact) parts.push(make("span", { class: "layer-name" }, t("head")), make("div", { class: "thumbs column-numbers", "aria-hidden": "true" }, ...Array.from({ length: countHeads() }, (_, number) => make("span", {}, String(number)))));
    if (inLayers) {
      for (const [entry, members] of groupByEntry(cellsKept)) {
        const mean = cells.get(`${entry}:mean`);
        const title = make("span", { class: "layer-name" }, getLayerName(info, entry));
        parts.push(make("div", { class: "layer" }, title, compact ? null : mean && mean.button), make("div", { class: "thumbs" }, ...members.map((cell) => cell.button)));
        if (mean && !compact) shownKeys.push(mean.key);
        shownKeys.push(...members.map((cell) => cell.key));
      }
    } else {
      parts.push(make("div", { class: "thumbs" }, ...cellsKept.map((cell) => cell.button)));
      shownKeys = cellsKept.map((cell) => cell.key);
    }
    if (!cellsKept.length) parts.push(make("p", { class: "heads-empty" }, t("No head is within the range.")));
    grid.replaceChildren(...parts);
    thumbs.clear();
    for (const cell of cellsKept) if (cell.canvas && info.entries[cell.entry].readable !== false) thumbs.show(cell.canvas, cell.entry, cell.head);
    const { entry, head } = store.state;
    setTabStop(cells.get(shownKeys.includes(`${entry}:${head}`) ? `${entry}:${head}` : shownKeys[0]) ?? null);
    focused?.focus();
    fitColumns();
  }
  const groupByEntry = (/** @type {HeadCell[]} */ list) => {
    /** @type {Map<number, HeadCell[]>} */
    const groups = new Map();
    for (const cell of list) groups.set(cell.entry, [...(groups.get(cell.entry) ?? []), cell]);
    return groups;
  };
  // The number of columns with the fewest gaps at the end of a layer.
  function fitColumns() {
    const { info } = store.state;
    const width = grid.clientWidth;
    if (!info || !width) return undefined;
    if (isCompact() !== grid.classList.contains("compact")) return render();
    if (isCompact()) return fitCompact();
    const heads = getSort().order === "=" ? Math.max(...info.entries.map((entry) => entry.heads.length)) : cells.size;
    const maxColumns = Math.max(1, Math.min(heads, Math.floor((width + 6) / THUMB_STEP)));
    let best = maxColumns;
    for (let columns = maxColumns; columns >= Math.max(1, Math.ceil(maxColumns * 0.6)); columns--) {
      if (Math.ceil(heads / columns) * columns < Math.ceil(heads / best) * best) best = columns;
    }
    grid.style.setProperty("--columns", String(best));
    thumbs.resize(Math.min(store.state.aside === "grid" ? 168 : 112, width / best) * Math.min(2, window.devicePixelRatio || 1));
    return undefined;
  }
  // The list scrolls alone: the map of the heads above it stays where it is.
  /** @param {HTMLElement} button */
  function scrollTo(button) {
    const list = store.state.aside === "grid" ? grid : scroller;
    const [box, frame] = [button, list].map((part) => part.getBoundingClientRect());
    if (box.top < frame.top) list.scrollTop -= frame.top - box.top + 8;
    else if (box.bottom > frame.bottom) list.scrollTop += box.bottom - frame.bottom + 8;
  }
  // The side of the pictures of all layers and heads, so that they fill the window and none is out of it.
  function fitCompact() {
    const layers = grid.querySelectorAll(".layer").length + 1;
    const names = Math.max(...[...grid.querySelectorAll(".layer-name")].map((name) => name.scrollWidth));
    const [across, down] = [(grid.clientWidth - names - 52) / countHeads(), (element.clientHeight - 30) / layers];
    const side = Math.max(LEAST_THUMB, Math.floor(Math.min(across, down)) - 2);
    grid.style.setProperty("--columns", String(countHeads()));
    grid.style.setProperty("--side", `${side}px`);
    thumbs.resize(side * Math.min(2, window.devicePixelRatio || 1));
    return undefined;
  }
  function updateFootnote() {
    const sampled = [...cells.values()].filter((cell) => cell.sampled).length;
    foot.hidden = sampled === 0;
    foot.textContent = sampled ? t("Dotted corner: a sample of queries, exact, until the whole head has been read.") : "";
  }

  // ------------------------------------------------------------------------------------------------------ the numbers

  function setRows() {
    for (const cell of cells.values()) cell.row = null;
    for (const row of summary.rows) {
      const cell = cells.get(`${row.entry}:${row.head}`);
      if (cell) cell.row = row;
    }
  }
  async function refresh() {
    clearTimeout(timer);
    try {
      const { json } = await transport.get("heads", {}, { signal: controller.signal });
      if (controller.signal.aborted) return;
      isOutdated &&= json.progress < 1;
      const next = isOutdated ? withNumbers(json, summary) : json;
      const changed = JSON.stringify(next) !== JSON.stringify(summary);
      summary = next;
      setRows();
      store.set({ heads: next });
      if (changed) {
        pollCount = 0;
        render();
      }
    } catch (error) {
      if (controller.signal.aborted) return;
    }
    if (summary.progress < 1) timer = setTimeout(refresh, pollDelays[Math.min(pollCount++, pollDelays.length - 1)]);
  }

  const subscriptions = [
    store.on(["info"], () => {
      layoutKey = "";
      build();
      refresh();
    }),
    store.on(["sort", "filter", "pairs"], render),
    store.on(["aside"], () => {
      showWide();
      fitColumns();
    }),
    store.on(["entry", "head", "second", "more", "compare", "batch"], () => {
      for (const cell of cells.values()) updateLabel(cell);
      batch.value = String(store.state.batch);
      const chosenCell = cells.get(`${store.state.entry}:${store.state.head}`);
      if (chosenCell && grid.contains(chosenCell.button)) {
        setTabStop(chosenCell);
        scrollTo(chosenCell.button);
      }
    }),
  ];
  function showWide() {
    const open = store.state.aside === "grid";
    enlargeButton.textContent = open ? t("back to the map") : t("enlarge");
    enlargeButton.setAttribute("aria-pressed", String(open));
  }
  showWide();
  const headmap = mountHeadmap(headmapElement, { store, transport, announce, uid });
  const resizeObserver = new ResizeObserver(fitColumns);
  resizeObserver.observe(grid);
  if (store.state.info) {
    build();
    refresh();
  }
  return {
    destroy() {
      for (const unsubscribe of subscriptions) unsubscribe();
      clearTimeout(timer);
      controller.abort();
      resizeObserver.disconnect();
      thumbs.destroy();
      headmap.destroy();
      element.replaceChildren();
    },
  };
}

/**
 * A table of heads with the numbers of an earlier one.
 *
 * @param {HeadTable} table
 * @param {HeadTable} earlier
 */
function withNumbers(table, { columns, rows }) {
  const numbers = new Map(rows.map((row) => [`${row.entry}:${row.head}`, row.values]));
  return { ...table, columns, rows: table.rows.map((row) => ({ ...row, values: numbers.get(`${row.entry}:${row.head}`) ?? {} })) };
}

/** @param {Column} column */
function describeColumn({ description, unit }) {
  const what = t(description).replace(/[.。]$/, "");
  return unit ? t("{0}, in {1}: the number under each map.", what, t(unit)) : t("{0}: the number under each map.", what);
}

// A number in four characters, under a thumbnail.
/** @param {number} value */
function formatShort(value) {
  const size = Math.abs(value);
  if (size >= 1000) return `${(value / 1000).toPrecision(2)}k`;
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  if (size >= 0.01 || value === 0) return value.toFixed(2);
  if (size < 1e-99) return "≈ 0";
  return size < 0.0005 ? value.toExponential(0).replace("-", "−") : value.toFixed(3);
}
