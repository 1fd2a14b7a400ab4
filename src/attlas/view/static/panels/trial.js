// What if: the text is read again without some heads, with tokens hidden, or with other words. The dialog shows how
// likely each token was before and is now, what the model would write next, and which heads attend elsewhere.

import { createDialog, createSegmented, debounce, make } from "./elements.js";
import { createFlow } from "./flow.js";
import { formatInteger, formatNumber, formatPercent, getHeadMark, getHeadName, getLayerName, isRollout } from "../data/numbers.js";
import { showWhitespace } from "../data/tokens.js";
import { t } from "../words/words.js";

const POLL_INTERVAL = 300; // ms between two requests for the progress
const REQUEST_DELAY = 250; // ms without another change after which the text is read again
const MAX_TOKENS = 16_384; // of a text that is asked for at once
const LISTED = 12; // tokens and heads in the lists
const LEAST_SCALE = 0.5; // nats of a change that has the full colour, at least
/** @typedef {{ heads: string[], span: Span | null }} Off */

/**
 * What the link says is left out: heads, "2.4,3.1", and behind a semicolon tokens, ";12-15", the last one included.
 *
 * @param {string} text
 * @returns {Off}
 */
export function readOff(text) {
  const [heads, tokens] = text.split(";");
  const bounds = /^(\d+)-(\d+)$/.exec(tokens ?? "");
  return { heads: heads.split(",").filter((head) => /^\d+\.\d+$/.test(head)), span: bounds && { start: Number(bounds[1]), stop: Number(bounds[2]) + 1 } };
}

/** @param {Off} off */
export function writeOff({ heads, span }) {
  return heads.join(",") + (span ? `;${span.start}-${span.stop - 1}` : "");
}

/**
 * How much more likely each token of a text became, in nats; NaN where that is not known.
 *
 * @param {Trial} trial
 * @param {0 | 1} side
 */
export function computeChanges({ tokens, pairs, before, after }, side) {
  const changes = new Float64Array(tokens[side].length).fill(NaN);
  for (const pair of pairs) {
    const [p, q] = [before[pair[0]], after[pair[1]]];
    if (p !== null && q !== null) changes[pair[side]] = Math.log(Math.max(q, 1e-30) / Math.max(p, 1e-30));
  }
  return changes;
}

/**
 * Mount the dialog, and its button in the box of the model, where the page has one.
 *
 * @param {HTMLElement} element
 * @param {PageContext} context
 * @returns {Panel}
 */
export function mountTrial(element, { store, transport, map, announce, uid, root }) {
  const { info } = store.state;
  if (!info.reading) return { destroy() {} };
  const facts = info.reading;
  /** @type {"without" | "other"} */
  let kind = "without";
  /** @type {AbortController | null} */
  let controller = null;
  let timer = 0;
  /** @type {Trial | null} */
  let shown = null;
  let shownFor = ""; // the question that is answered
  let original = facts.text; // the text that is shown; of a recording it is fetched once it is needed
  /** @type {Float64Array[]} */
  let changes = [];
  let scale = LEAST_SCALE;

  const openButton = make("button", { type: "button", class: "toggle trial-open", title: t("Read the text again without this head, without some tokens, or with other words") }, t("What if …"));
  element.insertBefore(openButton, element.lastElementChild);
  const dialog = createDialog(root, t("What if …"), uid, () => {
    controller?.abort();
    if (store.state.panel === "trial") store.set({ panel: "" });
  });
  dialog.element.classList.add("trial");
  /** @type {Option<"without" | "other">[]} */
  const kinds = [
    { value: "without", text: t("without heads or tokens") },
    { value: "other", text: t("with other words") },
  ];
  const kindButtons = createSegmented(t("What is changed"), kinds, (value) => {
    kind = value;
    showKind();
    if (kind === "without") load();
  });
  const chips = make("div", { class: "trial-chips", role: "group", "aria-label": t("What is left out") });
  const headSelect = make("select", { "aria-label": t("Leave out another head") });
  const hideBox = make("input", { type: "checkbox" });
  const hideText = make("span");
  const hideLabel = make("label", { class: "trial-hide" }, hideBox, hideText);
  const withoutBox = make("div", { class: "trial-line" }, chips, headSelect, hideLabel);
  const textArea = make("textarea", { rows: 3, maxLength: facts.characters, spellcheck: false, value: facts.text, "aria-label": t("The other text") });
  const compareButton = make("button", { type: "button", class: "toggle", title: t("Compare the two texts  Ctrl+Enter") }, t("Compare"));
  const otherBox = make("div", { class: "trial-line" }, textArea, compareButton);
  const message = make("p", { class: "trial-says", role: "status" });
  const progressBar = make("progress", { max: 1, "aria-label": t("Progress of the model") });
  const stopButton = make("button", { type: "button", class: "toggle" }, t("Stop"));
  const busyBox = make("div", { class: "trial-busy", hidden: true }, progressBar, stopButton);
  const reading = make("p", { class: "trial-token" });
  const flows = [0, 1].map((side) => createFlow({ label: side ? t("The other text") : t("Text"), uid, paint: (position) => paint(position, side), onHover: (position) => showToken(position, side), onPick: (position) => showToken(position, side) }));
  const headings = [t("The text as it was"), t("The text as it is now")].map((text) => make("h3", {}, text));
  const flowBoxes = flows.map((flow, side) => make("section", {}, headings[side], flow.element));
  const lists = make("div", { class: "trial-lists" });
  const results = make("div", { class: "trial-results", hidden: true }, make("div", { class: "trial-texts" }, ...flowBoxes, reading), lists);
  dialog.body.append(kindButtons.element, withoutBox, otherBox, busyBox, message, results);

  openButton.addEventListener("click", () => {
    const { entry, head, off } = store.state;
    store.set({ panel: "trial", ...(off || head === "mean" ? {} : { off: `${entry}.${head}` }) });
  });
  const setOff = (/** @type {Partial<Off>} */ patch) => store.set({ off: writeOff({ ...readOff(store.state.off), ...patch }) });
  headSelect.addEventListener("change", () => {
    if (headSelect.value) setOff({ heads: [...new Set([...readOff(store.state.off).heads, headSelect.value])] });
  });
  hideBox.addEventListener("change", () => setOff({ span: hideBox.checked ? getPinnedSpan(store.state) : null }));
  stopButton.addEventListener("click", () => {
    controller?.abort();
    showMessage(t("Stopped."));
  });
  textArea.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) compareTexts();
  });
  compareButton.addEventListener("click", () => compareTexts());

  const showMessage = (/** @type {string} */ text) => {
    message.textContent = text;
    if (text) announce(text);
  };
  const nameHeads = (/** @type {string[]} */ heads) => heads.map((head) => getHeadMark(info, ...readPlace(head))).join(", ");
  const nameTokens = (/** @type {Span} */ { start, stop }) => (stop - start > 1 ? t("tokens {0} to {1}", formatInteger(start), formatInteger(stop - 1)) : t("token {0}", formatInteger(start)));

  function showKind() {
    kindButtons.set(kind);
    withoutBox.hidden = kind !== "without";
    otherBox.hidden = kind !== "other";
    results.hidden = true;
    [shown, shownFor] = [null, ""];
    showMessage(kind === "other" ? t("Change a word, and compare: the texts are aligned token by token.") : "");
    if (kind === "other" && !original) fillText();
  }
  async function fillText() {
    try {
      const { json } = await transport.get("tokens", { start: 0, stop: Math.min(info.text_length, MAX_TOKENS) });
      const tokens = [...json.tokens];
      for (const [start, stop, text] of json.joined) tokens.splice(start, stop - start, text, ...Array(stop - start - 1).fill(""));
      original = tokens.join("");
      if (!textArea.value) textArea.value = original;
    } catch (error) {
      showMessage(`${error.message}.`);
    }
  }
  function showChoice() {
    const { off, state } = { off: readOff(store.state.off), state: store.state };
    const createChip = (/** @type {string} */ text, /** @type {string} */ label, /** @type {() => void} */ remove) => {
      const chip = make("button", { type: "button", class: "toggle", title: label, "aria-label": label }, text, make("span", { "aria-hidden": "true" }, " ×"));
      chip.addEventListener("click", remove);
      return chip;
    };
    const headChips = off.heads.map((head) => createChip(getHeadMark(info, ...readPlace(head)), t("Put back {0}", getHeadName(info, ...readPlace(head))), () => setOff({ heads: off.heads.filter((other) => other !== head) })));
    chips.replaceChildren(...headChips, ...(off.span ? [createChip(nameTokens(off.span), t("Show {0} again", nameTokens(off.span)), () => setOff({ span: null }))] : []));
    if (!chips.childElementCount) chips.append(t("nothing yet"));
    const groups = info.entries.flatMap((entry, index) => (isRollout(entry) ? [] : [make("optgroup", { label: getLayerName(info, index) }, ...entry.heads.map((_, head) => make("option", { value: `${index}.${head}` }, getHeadName(info, index, head))))]));
    if (headSelect.childElementCount !== groups.length + 1) headSelect.replaceChildren(make("option", { value: "" }, t("leave out a head …")), ...groups);
    headSelect.value = "";
    const pinned = getPinnedSpan(state);
    hideLabel.hidden = !pinned && !off.span;
    hideBox.checked = off.span !== null;
    const span = off.span ?? pinned;
    if (span) hideText.textContent = off.heads.length ? t("hide {0} from these heads alone", nameTokens(span)) : t("hide {0} from all later tokens", nameTokens(span));
  }

  // ---------------------------------------------------------------------------------------------------- questions

  async function load() {
    const { heads, span } = readOff(store.state.off);
    if (kind !== "without") return;
    if (!heads.length && !span) {
      controller?.abort();
      results.hidden = true;
      [shown, shownFor] = [null, ""];
      showMessage(t("Leave out a head, or pin a cell of the map and hide its key."));
      return;
    }
    const says = !span ? t("Without the output of {0}.", nameHeads(heads)) : heads.length ? t("{0} do not see {1}.", nameHeads(heads), nameTokens(span)) : t("No later token sees {0}.", nameTokens(span));
    await ask("without", { heads: heads.join(",") || undefined, start: span?.start, stop: span?.stop }, says);
  }
  async function compareTexts() {
    if (textArea.value === original || !textArea.value.trim()) return showMessage(t("Change a word first."));
    try {
      await transport.send?.("second", { text: textArea.value });
    } catch (error) {
      return showMessage(`${error.message}.`);
    }
    return ask("other", {}, t("With the other words."));
  }
  /**
   * @param {"without" | "other"} name
   * @param {Record<string, string | number | undefined>} params
   * @param {string} says
   */
  async function ask(name, params, says) {
    const given = Object.fromEntries(Object.entries(params).filter(([, value]) => value !== undefined));
    const question = JSON.stringify([name, given, name === "other" ? textArea.value : ""]);
    if (question === shownFor) return;
    controller?.abort();
    controller = new AbortController();
    const { signal } = controller;
    busyBox.hidden = false;
    results.classList.add("loading");
    showMessage(t("{0} reads the text again …", facts.model));
    signal.addEventListener("abort", endWait);
    pollProgress(signal);
    try {
      const { json } = await transport.get(name, given, { signal });
      if (signal.aborted) return;
      shownFor = question;
      show(json, says);
    } catch (error) {
      if (signal.aborted) return;
      results.hidden = true;
      [shown, shownFor] = [null, ""];
      showMessage(`${error.message}.`);
    } finally {
      if (!signal.aborted) endWait();
    }
  }
  function endWait() {
    clearTimeout(timer);
    busyBox.hidden = true;
    results.classList.remove("loading");
  }
  /** @param {AbortSignal} signal */
  async function pollProgress(signal) {
    clearTimeout(timer);
    progressBar.removeAttribute("value");
    try {
      const { json } = await transport.get("reading", {}, { signal });
      if (json.trial !== null) progressBar.value = json.trial;
    } catch {
      return; // the question itself says what is wrong
    }
    if (!signal.aborted && !busyBox.hidden) timer = setTimeout(() => pollProgress(signal), POLL_INTERVAL);
  }

  // ------------------------------------------------------------------------------------------------------ answers

  /**
   * @param {Trial} trial
   * @param {string} says
   */
  function show(trial, says) {
    shown = trial;
    changes = [computeChanges(trial, 0), computeChanges(trial, 1)];
    const known = [...changes[1].keys()].filter((position) => !Number.isNaN(changes[1][position]));
    scale = known.reduce((most, position) => Math.max(most, Math.abs(changes[1][position])), LEAST_SCALE);
    const lessLikely = known.filter((position) => changes[1][position] < 0);
    const loss = (/** @type {(number | null)[]} */ probabilities) => {
      const numbers = /** @type {number[]} */ (probabilities.filter((p) => p !== null));
      return formatNumber(numbers.reduce((sum, p) => sum - Math.log(Math.max(p, 1e-30)), 0) / Math.max(numbers.length, 1));
    };
    showMessage([says, t("{0} of {1} tokens are less likely. Loss: {2} before, {3} now, in nats a token.", formatInteger(lessLikely.length), formatInteger(known.length), loss(trial.before), loss(trial.after))].join(t(" ")));
    results.hidden = false;
    const hasTwo = kind === "other";
    results.classList.toggle("two", hasTwo);
    flowBoxes[0].hidden = !hasTwo;
    headings[1].textContent = hasTwo ? t("The text as it is now") : t("How much less likely (red) or more likely (blue) each token is");
    for (const side of hasTwo ? [0, 1] : [1]) {
      const tokens = trial.tokens[side];
      flows[side].start(tokens.length, { length: tokens.length, prefetch: () => {}, peek: (position) => tokens[position] ?? null, joined: () => null });
      const alone = changes[side].findIndex((change, position) => position > 0 && Number.isNaN(change));
      if (alone > 0) flows[side].reveal(alone);
    }
    reading.textContent = t("Point at a token: how likely it was, and is.");
    const note = trial.every > 1 ? make("p", { class: "trial-note" }, t("Of every {0}th query of this long text.", trial.every)) : null;
    lists.replaceChildren(
      make("section", {}, make("h3", {}, t("Less likely")), createTokenList(trial, lessLikely.sort((a, b) => changes[1][a] - changes[1][b]).slice(0, LISTED))),
      make("section", {}, make("h3", {}, t("What comes next")), createFollowing(trial.next)),
      make("section", {}, make("h3", {}, t("Heads that attend elsewhere")), createHeadList(trial), note),
    );
  }
  const createToken = (/** @type {string | undefined} */ text) => make("code", { class: "token" }, text === undefined ? "–" : showWhitespace(text));
  const formatChance = (/** @type {number | null | undefined} */ p) => (p === null || p === undefined ? "–" : formatPercent(p));
  const formatBoth = (/** @type {number | null | undefined} */ p, /** @type {number | null | undefined} */ q) => `${formatChance(p)} → ${formatChance(q)}`;
  /**
   * @param {Trial} trial
   * @param {number[]} positions
   */
  function createTokenList(trial, positions) {
    const partners = new Map(trial.pairs.map(([first, second]) => [second, first]));
    if (!positions.length) return make("p", { class: "trial-note" }, t("No token became less likely."));
    const rows = positions.map((position) => {
      const bar = make("i", { class: "largest-bar below" });
      bar.style.width = `${(100 * Math.abs(changes[1][position])) / scale}%`;
      const before = trial.before[partners.get(position) ?? 0];
      const button = make("button", { type: "button" }, createToken(trial.tokens[1][position]), make("span", { class: "place" }, formatInteger(position)), make("span", { class: "share" }, formatBoth(before, trial.after[position])), bar);
      button.addEventListener("click", () => {
        flows[1].reveal(position);
        showToken(position, 1);
      });
      return make("li", {}, button);
    });
    return make("ol", { class: "largest" }, ...rows);
  }
  /** @param {Trial["next"]} next */
  function createFollowing(next) {
    const rows = next.map(({ likeliest, text }, side) => {
      const words = likeliest.flatMap(([token, p]) => [createToken(token), ` ${formatChance(p)}  `]);
      return make("div", {}, make("dt", {}, side ? t("now") : t("before")), make("dd", {}, make("code", { class: "trial-written" }, showWhitespace(text)), make("small", {}, ...words)));
    });
    return make("dl", { class: "trial-next" }, ...rows);
  }
  /** @param {Trial} trial */
  function createHeadList(trial) {
    const { heads, tokens } = trial;
    if (!heads.length) return make("p", { class: "trial-note" }, t("No head attends elsewhere."));
    const rows = heads.slice(0, LISTED).map(({ entry, head, moved, cells }) => {
      const bar = make("i", { class: "largest-bar" });
      bar.style.width = `${(100 * moved) / heads[0].moved}%`;
      const button = make("button", { type: "button", title: t("{0}: this share of its weights went to other keys", getHeadName(info, entry, head)) }, make("b", {}, getHeadMark(info, entry, head)), make("span"), make("span", { class: "share" }, formatPercent(moved)), bar);
      button.addEventListener("click", () => openHead(entry, head, cells[0]));
      const pairs = cells.map(([query, key, p, q]) => {
        const keyToken = key[1] === null ? tokens[0][key[0] ?? 0] : tokens[1][key[1]];
        return make("li", {}, createToken(tokens[1][query[1]]), " → ", createToken(keyToken), ` ${formatBoth(p, q)}`);
      });
      return make("li", {}, button, make("ul", { class: "trial-cells" }, ...pairs));
    });
    return make("ol", { class: "largest" }, ...rows);
  }
  /**
   * Open the map of a head at the pair that changed most.
   *
   * @param {number} entry
   * @param {number} head
   * @param {MovedHead["cells"][0] | undefined} cell
   */
  function openHead(entry, head, cell) {
    const { first_query: firstQuery, first_key: firstKey } = info.entries[entry];
    const key = cell?.[1][0] ?? null;
    const pin = cell && key !== null ? { i: cell[0][0] - firstQuery, j: key - firstKey } : null;
    store.set({ entry, head, panel: "", ...(pin ? { pin } : {}) });
    if (pin) map.centre(pin.i, pin.j);
  }
  /**
   * @param {number} position
   * @param {number} side
   * @returns {TokenStyle}
   */
  function paint(position, side) {
    const change = changes[side]?.[position] ?? NaN;
    const isAlone = Number.isNaN(change) && position > 0;
    const share = Number.isNaN(change) ? 0 : Math.min(1, Math.abs(change) / scale);
    const background = share >= 0.01 ? `color-mix(in srgb, var(${change < 0 ? "--below" : "--above"}) ${(100 * share).toFixed(1)}%, transparent)` : "";
    return { classes: isAlone ? ["found"] : [], background };
  }
  /**
   * @param {number | null} position
   * @param {number} side
   */
  function showToken(position, side) {
    if (!shown || position === null) return;
    const pair = shown.pairs.find((each) => each[side] === position);
    const [p, q] = pair ? [shown.before[pair[0]], shown.after[pair[1]]] : [null, null];
    reading.replaceChildren(createToken(shown.tokens[side][position]), ` ${formatInteger(position)}: `, pair ? formatBoth(p, q) : t("in one of the texts only"));
  }

  const loadSoon = debounce(load, REQUEST_DELAY);
  const update = () => {
    if (store.state.panel !== "trial") return dialog.close();
    showChoice();
    if (!dialog.element.open) {
      showKind();
      dialog.open();
      return load();
    }
    return loadSoon();
  };
  const unsubscribe = store.on(["panel", "off", "pin", "span"], update);
  update();
  return {
    destroy() {
      unsubscribe();
      loadSoon.cancel();
      controller?.abort();
      clearTimeout(timer);
      for (const flow of flows) flow.destroy();
      dialog.destroy();
      openButton.remove();
    },
  };
}

/**
 * The entry and the head of "2.4".
 *
 * @param {string} text
 * @returns {[entry: number, head: number]}
 */
function readPlace(text) {
  const [entry, head] = text.split(".").map(Number);
  return [entry, head];
}

/**
 * Positions of the keys that are pinned, or of the pinned key; null where none is.
 *
 * @param {State} state
 * @returns {Span | null}
 */
function getPinnedSpan({ info, entry, pin, span }) {
  if (!pin) return null;
  const key = info.entries[entry].first_key + pin.j;
  return span ?? { start: key, stop: key + 1 };
}
