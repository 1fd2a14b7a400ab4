// All heads as thumbnails, sorted and filtered by what is known of them.

import { make, picker } from "./elements.js";
import { mountHeadmap, pairColumns } from "./headmap.js";
import { createHistogram } from "./histogram.js";
import { digits, headMark, headName, layerName, whole } from "./numbers.js";
import { holds } from "./state.js";
import { createThumbs } from "./thumbs.js";
import { t } from "./words.js";

const pauses = [1_000, 2_000, 4_000, 8_000, 15_000];
const orders = { "=": t("in layers"), "-": t("largest first"), "+": t("smallest first") };

// The sort in the URL: "" (in layers), else one of = - + and the name of a statistic: "-entropy".
export function readSort(text, columns) {
  const [order, name] = [text[0], text.slice(1)];
  const column = columns.find((given) => given.name === name) ?? columns[0] ?? null;
  return { order: order in orders && column?.name === name ? order : "=", column };
}

// The filter in the URL: "kind:induction;within:0.2,1.5", both parts optional.
export function readFilter(text) {
  const parts = text.split(";");
  const kind = parts.find((part) => part.startsWith("kind:"))?.slice(5) ?? "";
  const bounds = parts.find((part) => part.startsWith("within:"))?.slice(7).split(",").map(Number) ?? null;
  return { kind, within: bounds?.length === 2 && bounds.every(Number.isFinite) ? bounds : null };
}
export function writeFilter({ kind, within }) {
  const bounds = within?.map((value) => Number(value.toPrecision(6))).join(",");
  return [kind && `kind:${kind}`, bounds && `within:${bounds}`].filter(Boolean).join(";");
}

// The heads that pass a filter, in the order of a sort. Heads without the number come last, and pass no range.
export function arrange(rows, { order, column }, { kind, within }) {
  const value = (row) => (column ? row.values[column.name] ?? null : null);
  const kept = rows.filter((row) => {
    if (kind && !row.kinds.includes(kind)) return false;
    if (!within) return true;
    const number = value(row);
    // The ends were rounded for the URL: what they were taken from stays in.
    const slack = 1e-5 * Math.max(...within.map(Math.abs));
    return number !== null && number >= within[0] - slack && number <= within[1] + slack;
  });
  if (order === "=") return kept;
  const sign = order === "-" ? -1 : 1;
  return kept.sort((a, b) => {
    const [x, y] = [value(a), value(b)];
    if (x === null || y === null) return Number(x === null) - Number(y === null);
    return sign * (x - y);
  });
}

export function mountHeads(element, { store, transport, announce, uid }) {
  let known = { progress: 0, columns: [], rows: [] };
  let cells = new Map(); // "entry:head" -> {button, canvas, value, kind, row}
  let shownKeys = [];
  let timer = 0;
  let tries = 0;
  const stop = new AbortController();

  const count = make("span", { class: "heads-count", role: "status" });
  const statistic = picker(t("Statistic"), [], (name) => setSort({ name }));
  const order = picker(t("Order"), Object.entries(orders).map(([value, text]) => ({ value, text })), (value) => setSort({ order: value }));
  const kind = picker(t("Kind of head"), [{ value: "", text: t("all kinds") }], (value) => setFilter({ kind: value }));
  const batch = make("input", { type: "number", min: "0", value: "0", "aria-label": t("Batch"), class: "batch" });
  const batchBox = make("label", { class: "picker", hidden: true }, make("span", {}, t("Batch")), batch);
  const explain = make("p", { class: "heads-explain", id: uid("explain") });
  const histogram = createHistogram((within) => setFilter({ within }));
  const wide = make("button", { type: "button", class: "text-button wide", title: t("All heads over the whole window") }, t("enlarge"));
  wide.addEventListener("click", () => store.set({ aside: store.state.aside === "grid" ? "both" : "grid", panel: "" }));
  const clear = make("button", { type: "button", class: "text-button", hidden: true }, t("show all"));
  const grid = make("div", { class: "heads-grid", role: "group", "aria-label": t("Heads") });
  const foot = make("p", { class: "heads-foot", hidden: true });
  const headmapElement = make("section", { "aria-label": t("Map of the heads") });
  const controls = make("div", { class: "heads-controls" }, statistic.element, order.element, kind.element, batchBox);
  element.classList.add("heads");
  element.append(
    make("div", { class: "heads-head" }, make("h2", {}, t("Heads")), count, clear, wide),
    headmapElement,
    controls,
    explain,
    histogram.element,
    grid,
    foot,
  );
  statistic.select.setAttribute("aria-describedby", explain.id);

  const thumbs = createThumbs({
    store,
    transport,
    onArrival(canvas, { sampled, failed }) {
      const { button } = canvas.cell;
      canvas.cell.sampled = sampled;
      button.classList.toggle("sampled", sampled);
      button.classList.toggle("failed", Boolean(failed));
      button.classList.add("drawn");
      name(canvas.cell);
      tellSampled();
    },
  });

  const columns = () => [...known.columns, ...pairColumns(store.state)];
  const valuesOf = (cell) => ({ ...cell.row?.values, ...store.state.pairs?.[cell.key] });
  const chosen = () => readSort(store.state.sort, columns());
  function setSort({ order: next, name: column }) {
    const now = chosen();
    const patch = { sort: `${next ?? now.order}${column ?? now.column?.name ?? ""}` };
    // A range is of one statistic; another one begins with all of its own.
    if (column && column !== now.column?.name) patch.filter = writeFilter({ ...readFilter(store.state.filter), within: null });
    store.set(patch);
  }
  function setFilter(patch) {
    store.set({ filter: writeFilter({ ...readFilter(store.state.filter), ...patch }) });
  }
  clear.addEventListener("click", () => store.set({ filter: "" }));
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
      for (const head of [...entry.heads.keys(), "mean"]) {
        if (head === "mean" && entry.heads.length < 2) continue;
        cells.set(`${index}:${head}`, createCell(index, head, entry));
      }
    });
    batchBox.hidden = Math.max(...info.entries.map((entry) => entry.batch ?? 1)) < 2;
    render();
  }
  function createCell(entry, head, given) {
    const mark = make("span", { class: "thumb-mark" }, headMark(store.state.info, entry, head));
    const value = make("span", { class: "thumb-value" });
    const canvas = head === "mean" ? null : make("canvas", { width: 1, height: 1, "aria-hidden": "true" });
    const picture = canvas && make("span", { class: "thumb-picture" }, canvas);
    const kind = make("span", { class: "thumb-kind" });
    const words = make("span", { class: "thumb-words" }, mark, value, kind);
    const button = make("button", { type: "button", class: head === "mean" ? "mean" : "thumb", tabIndex: -1 }, picture, words);
    const cell = { entry, head, key: `${entry}:${head}`, button, canvas, value, kind, sampled: false, row: null };
    if (head === "mean") words.replaceChildren(t("mean of {0}", given.heads.length));
    if (canvas) canvas.cell = cell;
    if (given.readable === false) button.classList.add("unreadable", "drawn");
    if (!holds(store.state.info, entry, head)) {
      button.classList.add("absent");
      button.setAttribute("aria-disabled", "true");
    }
    button.addEventListener("click", (event) => pick(cell, event.shiftKey || event.ctrlKey || event.metaKey));
    button.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && event.shiftKey) {
        event.preventDefault();
        event.stopPropagation();
        pick(cell, true);
      } else if (event.key === "Enter" || event.key === " ") event.stopPropagation();
      else move(cell, event);
    });
    button.addEventListener("focus", () => rove(cell));
    return cell;
  }
  function name(cell) {
    const { info, entry, head, second } = store.state;
    if (!info) return;
    const { column } = chosen();
    const number = column ? valuesOf(cell)[column.name] ?? null : null;
    const parts = [headName(info, cell.entry, cell.head)];
    if (cell.row?.kinds.length) parts.push(cell.row.kinds.map((kind) => t(kind)).join(", "));
    if (number !== null) parts.push(`${t(column.label)} ${digits(number)}`);
    if (cell.sampled) parts.push(t("thumbnail of sampled queries"));
    if (info.entries[cell.entry].readable === false) parts.push(t("statistics only, no map"));
    if (!holds(info, cell.entry, cell.head)) parts.push(t("not in this file: open the recording with attlas view"));
    if (second && second.entry === cell.entry && second.head === cell.head) parts.push(t("second head"));
    cell.button.title = parts.join(" · ");
    cell.button.setAttribute("aria-label", parts.join(", "));
    cell.button.setAttribute("aria-pressed", String(entry === cell.entry && head === cell.head));
    cell.button.classList.toggle("second", Boolean(second && second.entry === cell.entry && second.head === cell.head));
    if (cell.head === "mean") return;
    cell.value.textContent = number === null ? "" : short(number);
    const [first] = cell.row?.kinds ?? [];
    cell.kind.textContent = t(known.kinds?.[first]?.short ?? first ?? "");
  }
  function pick(cell, linked) {
    const { info, entry, head, second, compare } = store.state;
    if (!holds(info, cell.entry, cell.head)) announce(t("{0} is not in this file", headName(info, cell.entry, cell.head)));
    else if (!linked) {
      store.set({ entry: cell.entry, head: cell.head, ...(store.state.aside === "grid" ? { aside: "both" } : {}) });
      announce(headName(info, cell.entry, cell.head));
    } else if (second && second.entry === cell.entry && second.head === cell.head) {
      store.set({ second: null, compare: "none" });
      announce(t("The second head is closed"));
    } else if (cell.entry !== entry || cell.head !== head) {
      store.set({ second: { entry: cell.entry, head: cell.head }, compare: compare === "none" ? "side" : compare });
      announce(t("Second head: {0}", headName(info, cell.entry, cell.head)));
    }
  }
  function rove(cell) {
    for (const other of cells.values()) other.button.tabIndex = other === cell ? 0 : -1;
  }
  function move(cell, event) {
    const at = shownKeys.indexOf(cell.key);
    const step = { ArrowLeft: -1, ArrowRight: 1, Home: -at, End: shownKeys.length - 1 - at }[event.key];
    const line = { ArrowUp: -1, ArrowDown: 1 }[event.key];
    if (step === undefined && line === undefined) return;
    const next = line ? nearest(at, line) : cells.get(shownKeys[at + step]);
    event.preventDefault();
    event.stopPropagation();
    next?.button.focus();
  }
  // The one above or below, whatever the breaks of the flow are.
  function nearest(at, sign) {
    const here = cells.get(shownKeys[at]).button.getBoundingClientRect();
    let best = null;
    for (let i = at + sign; i >= 0 && i < shownKeys.length; i += sign) {
      const cell = cells.get(shownKeys[i]);
      const box = cell.button.getBoundingClientRect();
      if (Math.abs(box.top - here.top) < 8) continue;
      if (best && Math.abs(box.top - best.top) > 8) break;
      const far = Math.abs(box.left + box.right - here.left - here.right);
      if (!best || far < best.far) best = { cell, far, top: box.top };
    }
    return best?.cell;
  }

  // ------------------------------------------------------------------------------------------------- what is shown

  function render() {
    const { state } = store;
    const { info } = state;
    if (!info) return;
    const { order: how, column } = chosen();
    const filter = readFilter(state.filter);
    const rows = [...cells.values()]
      .filter((cell) => cell.head !== "mean")
      .map((cell) => ({ cell, values: valuesOf(cell), kinds: cell.row?.kinds ?? [] }));
    const kept = arrange(rows, { order: how, column }, filter);
    lay(kept, how, filter);
    for (const cell of cells.values()) name(cell);
    statistic.fill(columns().map(({ name: value, label }) => ({ value, text: t(label) })));
    statistic.set(column?.name ?? "");
    statistic.select.disabled = !columns().length;
    order.set(how);
    order.select.disabled = !columns().length;
    explain.textContent = column ? explained(column) : "";
    explain.hidden = !column?.description;
    fillKinds(rows, filter.kind);
    const values = rows.filter((row) => !filter.kind || row.kinds.includes(filter.kind)).map((row) => row.values[column?.name] ?? NaN);
    histogram.set(t(column?.label ?? ""), values, filter.within);
    clear.hidden = state.filter === "";
    count.textContent = kept.length === rows.length ? whole(rows.length) : t("{0} of {1}", whole(kept.length), whole(rows.length));
    const most = (info.entries[state.entry]?.batch ?? 1) - 1;
    batch.max = String(most);
    batch.value = String(state.batch);
    store.set({ statistic: column?.name ?? null });
  }
  function fillKinds(rows, now) {
    const counts = new Map();
    for (const row of rows) for (const each of row.kinds) counts.set(each, (counts.get(each) ?? 0) + 1);
    const options = [...counts].sort((a, b) => b[1] - a[1]).map(([value, number]) => ({ value, text: `${t(value)} (${whole(number)})` }));
    if (now && !counts.has(now)) options.push({ value: now, text: `${t(now)} (0)` });
    kind.fill([{ value: "", text: t("all kinds") }, ...options]);
    kind.set(now);
    kind.element.hidden = !options.length;
  }
  let laid = "";
  function lay(kept, how, filter) {
    const { info } = store.state;
    const cellsKept = kept.map((row) => row.cell);
    const inLayers = how === "=";
    const signature = `${inLayers}|${cellsKept.map((cell) => cell.key).join()}|${writeFilter(filter) === ""}`;
    if (signature === laid) return;
    laid = signature;
    const focused = grid.contains(document.activeElement) ? document.activeElement : null;
    const parts = [];
    shownKeys = [];
    if (inLayers) {
      for (const [entry, members] of grouped(cellsKept)) {
        const mean = cells.get(`${entry}:mean`);
        const title = make("span", { class: "layer-name" }, layerName(info, entry));
        parts.push(make("div", { class: "layer" }, title, mean && mean.button), make("div", { class: "thumbs" }, ...members.map((cell) => cell.button)));
        if (mean) shownKeys.push(mean.key);
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
    rove(cells.get(shownKeys.includes(`${entry}:${head}`) ? `${entry}:${head}` : shownKeys[0]) ?? null);
    focused?.focus();
    fitColumns();
  }
  const grouped = (list) => {
    const groups = new Map();
    for (const cell of list) {
      if (!groups.has(cell.entry)) groups.set(cell.entry, []);
      groups.get(cell.entry).push(cell);
    }
    return groups;
  };
  // As many columns as leave the fewest gaps at the end of a layer, each wide enough for its words.
  function fitColumns() {
    const { info } = store.state;
    const width = grid.clientWidth;
    if (!info || !width) return;
    const heads = chosen().order === "=" ? Math.max(...info.entries.map((entry) => entry.heads.length)) : cells.size;
    const most = Math.max(1, Math.min(heads, Math.floor((width + 6) / 62)));
    let best = most;
    for (let columns = most; columns >= Math.max(1, Math.ceil(most * 0.6)); columns--) {
      if (Math.ceil(heads / columns) * columns < Math.ceil(heads / best) * best) best = columns;
    }
    grid.style.setProperty("--columns", String(best));
    thumbs.resize(Math.min(store.state.aside === "grid" ? 168 : 112, width / best) * Math.min(2, window.devicePixelRatio || 1));
  }
  function tellSampled() {
    const sampled = [...cells.values()].filter((cell) => cell.sampled).length;
    foot.hidden = sampled === 0;
    foot.textContent = sampled ? t("Dotted corner: a sample of queries, exact, until the whole head has been read.") : "";
  }

  // ------------------------------------------------------------------------------------------------------ the numbers

  async function refresh() {
    clearTimeout(timer);
    try {
      const { json } = await transport.get("heads", {}, { signal: stop.signal });
      if (stop.signal.aborted) return;
      const changed = JSON.stringify(json) !== JSON.stringify(known);
      known = json;
      for (const cell of cells.values()) cell.row = null;
      for (const row of json.rows) {
        const cell = cells.get(`${row.entry}:${row.head}`);
        if (cell) cell.row = row;
      }
      store.set({ heads: json });
      if (changed) {
        tries = 0;
        render();
      }
    } catch (error) {
      if (stop.signal.aborted) return;
    }
    if (known.progress < 1) timer = setTimeout(refresh, pauses[Math.min(tries++, pauses.length - 1)]);
  }

  const off = [
    store.on(["info"], () => {
      laid = "";
      build();
      refresh();
    }),
    store.on(["sort", "filter", "pairs"], render),
    store.on(["aside"], showWide),
    store.on(["entry", "head", "second", "batch"], () => {
      for (const cell of cells.values()) name(cell);
      batch.value = String(store.state.batch);
      const chosenCell = cells.get(`${store.state.entry}:${store.state.head}`);
      if (chosenCell && grid.contains(chosenCell.button)) {
        rove(chosenCell);
        if (element.clientHeight) chosenCell.button.scrollIntoView({ block: "nearest" });
      }
    }),
  ];
  function showWide() {
    const open = store.state.aside === "grid";
    wide.textContent = open ? t("back to the map") : t("enlarge");
    wide.setAttribute("aria-pressed", String(open));
  }
  showWide();
  const headmap = mountHeadmap(headmapElement, { store, transport, announce, uid });
  const resized = new ResizeObserver(fitColumns);
  resized.observe(grid);
  if (store.state.info) {
    build();
    refresh();
  }
  return {
    destroy() {
      for (const end of off) end();
      clearTimeout(timer);
      stop.abort();
      resized.disconnect();
      thumbs.destroy();
      headmap.destroy();
      element.replaceChildren();
    },
  };
}

function explained({ description, unit }) {
  const what = t(description).replace(/[.。]$/, "");
  return unit ? t("{0}, in {1}: the number under each map.", what, t(unit)) : t("{0}: the number under each map.", what);
}

// A number in four characters, under a thumbnail.
function short(value) {
  const size = Math.abs(value);
  if (size >= 1000) return `${(value / 1000).toPrecision(2)}k`;
  if (size >= 100) return value.toFixed(0);
  if (size >= 10) return value.toFixed(1);
  if (size >= 0.01 || value === 0) return value.toFixed(2);
  return size < 0.0005 ? "≈ 0" : value.toFixed(3);
}
