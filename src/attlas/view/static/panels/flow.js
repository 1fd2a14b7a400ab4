// A scrolling text of tokens. Only tokens near the visible part have elements, so that long texts stay fast.

import { make } from "./elements.js";
import { formatInteger } from "../data/numbers.js";
import { showWhitespace } from "../data/tokens.js";
import { t } from "../words/words.js";

const pieceLength = 128; // approximate number of tokens of a piece; the margin shows the position of its first token
const cutWindow = 96; // tokens among which a line end or a blank is sought to begin a piece
const typicalHeight = 240; // assumed pixels of a piece without a layout

// `first`: the position of the first token in the whole text.
/** @param {{ label: string, uid: MakeId, paint: (position: number) => TokenStyle, onHover: (position: number | null) => void, onPick: (position: number) => void, first?: number }} options */
export function createFlow({ label, uid, paint, onHover, onPick, first = 0 }) {
  let length = 0;
  /** @type {FlowTokens} */
  let tokens;
  let texts = 0; // number of tokens whose text is known
  /** @type {Piece[]} */
  let pieces = []; // {element, filled, from}: `from` once it is known where the piece begins
  let focusAt = 0;
  /** @type {number[]} */
  let marked = [];
  const help = make("span", { class: "unseen", id: uid("flow-help") }, t("Arrow keys move from token to token, Enter pins one."));
  const box = make("div", { class: "flow", role: "group", "aria-label": label, tabIndex: 0, "aria-describedby": help.id });
  const element = make("div", { class: "flow-frame" }, box, help);

  const visibilityObserver = new IntersectionObserver(
    (changes) => {
      // The heights are part of the change: reading them from the element would force layouts.
      for (const { target, isIntersecting, boundingClientRect } of changes) {
        const index = Number(/** @type {HTMLElement} */ (target).dataset.piece);
        if (isIntersecting) fill(index);
        else clearPiece(index, boundingClientRect.height);
      }
    },
    { root: box, rootMargin: "300px 0px" },
  );

  /**
   * `source`: the tokens at positions 0 to `source.length` - 1; later positions are shown as numbers.
   *
   * @param {number} count
   * @param {FlowTokens} source
   */
  function start(count, source) {
    [length, tokens, texts] = [count, source, source.length];
    [pieces, marked, focusAt] = [[], [], 0];
    cancelReveal();
    visibilityObserver.disconnect();
    const all = document.createDocumentFragment();
    for (let index = 0; index * pieceLength < length; index++) {
      const current = make("div", { class: "piece", "data-piece": index });
      current.style.minHeight = `${typicalHeight}px`;
      pieces.push({ element: current, filled: false, from: index === 0 ? 0 : undefined });
      all.append(current);
    }
    box.replaceChildren(all);
    for (const { element: current } of pieces) visibilityObserver.observe(current);
  }
  const breaksAfter = (/** @type {number} */ position) => position >= texts || /\n$/.test(tokens.peek(position) ?? "");
  /**
   * The first token of a piece: after the next line end, else before the next blank. Undefined while texts are not
   * loaded.
   *
   * @param {number} index
   * @returns {number | undefined}
   */
  function findStart(index) {
    const nominal = index * pieceLength;
    if (index >= pieces.length || nominal >= length) return length;
    const current = pieces[index];
    if (current.from !== undefined) return current.from;
    const last = Math.min(texts, length, nominal + cutWindow);
    if (nominal < texts) tokens.prefetch(nominal - 1, last);
    let blank;
    for (let position = nominal; position < last; position++) {
      const [before, text] = [tokens.peek(position - 1), tokens.peek(position)];
      if (before === null || text === null) return undefined;
      if (/\n$/.test(before) && tokens.joined(position)?.start !== position - 1) return (current.from = position);
      if (blank === undefined && /^\s/.test(text)) blank = position;
    }
    return (current.from = blank ?? nominal);
  }
  /** @param {number} index */
  function fill(index) {
    const current = pieces[index];
    current.near = true;
    if (current.filled) return;
    const [from, to] = [findStart(index), findStart(index + 1)];
    if (from === undefined || to === undefined) return; // refresh() tries again when the texts are loaded
    if (from < texts) tokens.prefetch(from, Math.min(to, texts));
    if (from < texts && tokens.peek(from) === null) return;
    current.filled = true;
    const content = [make("span", { class: "piece-place", "aria-hidden": "true" }, formatInteger(first + from))];
    for (let position = from; position < to; position++) content.push(createToken(position));
    current.element.replaceChildren(...content);
    if (!breaksAfter(to - 1)) current.element.append(make("i", { class: "piece-end" }));
    current.element.style.minHeight = "";
    joinLines(index);
    joinLines(index + 1);
    for (const span of listTokens(current)) styleToken(span);
  }
  // A piece that begins within a line continues the last line of the piece before it.
  /** @param {number} index */
  function joinLines(index) {
    const [before, current] = [pieces[index - 1], pieces[index]];
    if (!before?.filled || !current?.filled) return;
    const end = before.element.querySelector(".piece-end")?.getBoundingClientRect();
    const { left, bottom } = before.element.getBoundingClientRect();
    current.element.style.textIndent = end ? `${end.left - left}px` : "";
    current.element.style.marginTop = end ? `${end.top - bottom}px` : "";
  }
  /**
   * @param {number} index
   * @param {number} height
   */
  function clearPiece(index, height) {
    const current = pieces[index];
    current.near = false;
    if (!current.filled || current.element.contains(document.activeElement)) return;
    // An emptied piece keeps its height, so that nothing else moves.
    current.element.style.minHeight = `${height}px`;
    current.element.replaceChildren();
    current.filled = false;
  }
  /** @param {number} position */
  function createToken(position) {
    const span = make("span", { class: "t", "data-position": position });
    const text = position < texts ? tokens.peek(position) : null;
    const joined = position < texts ? tokens.joined(position) : null;
    span.title = formatInteger(first + position);
    if (text === null) {
      span.classList.add("number");
      span.append(String(position));
    } else if (joined) {
      // A character of several tokens: first the character, then the bytes of each token.
      span.classList.add("part");
      span.title = t("{0} · part {1} of {2} of {3}", formatInteger(position), position - joined.start + 1, joined.stop - joined.start, joined.text);
      if (position === joined.start) span.append(make("b", { class: "joined" }, joined.text));
      span.append(make("small", {}, text.replace(/^⟨(.*)⟩$/u, "$1")));
    } else appendText(span, text, position + 1 < texts ? tokens.peek(position + 1) : null);
    return span;
  }
  /**
   * Whitespace is shown by a pale symbol; a line break follows its symbol. Blanks have a symbol only at the end of a
   * line, where they would be invisible.
   *
   * @param {HTMLElement} span
   * @param {string} text
   * @param {string | null} next
   */
  function appendText(span, text, next) {
    if (text === "") {
      span.append(make("small", { class: "sign" }, "∅"));
      return;
    }
    let index = 0;
    for (const section of text.split(/(\r\n|\s|[\u0000-\u001f\u007f\u200b])/u)) {
      if (section === "") continue;
      index += section.length;
      const isInnerBlank = section === " " && !/^ *[\r\n]/.test(text.slice(index) + (next ?? ""));
      if (isInnerBlank || !/^(\r\n|\s|[\u0000-\u001f\u007f\u200b])$/u.test(section)) {
        span.append(section);
        continue;
      }
      span.append(make("small", { class: "sign" }, showWhitespace(section)));
      span.append(section.includes("\n") ? "\n" : make("wbr"));
    }
  }
  const listTokens = (/** @type {Piece} */ piece) => /** @type {NodeListOf<HTMLElement>} */ (piece.element.querySelectorAll(".t"));
  /** @param {HTMLElement} span */
  function styleToken(span) {
    const { classes, background } = paint(Number(span.dataset.position));
    const ownClasses = ["t", ...["number", "part"].filter((name) => span.classList.contains(name))];
    span.className = [...ownClasses, ...classes].join(" ");
    span.style.background = background;
  }
  // The index of the piece of a token: the nominal one or the one before.
  /** @param {number} position */
  function findPiece(position) {
    const index = Math.min(pieces.length - 1, Math.floor(position / pieceLength));
    return index > 0 && position < (findStart(index) ?? 0) ? index - 1 : index;
  }
  /**
   * @param {number} position
   * @returns {HTMLElement | null}
   */
  const findToken = (position) => pieces[findPiece(position)]?.element.querySelector(`[data-position="${position}"]`) ?? null;

  const resizeObserver = new ResizeObserver(() => pieces.forEach((current, index) => joinLines(index)));
  resizeObserver.observe(box);

  const getPosition = (/** @type {Event} */ event) => {
    const span = /** @type {HTMLElement | null | undefined} */ (/** @type {Element} */ (event.target).closest?.(".t"));
    return span ? Number(span.dataset.position) : null;
  };
  box.addEventListener("pointerover", (event) => {
    const position = getPosition(event);
    if (position !== null && event.pointerType !== "touch") onHover(position);
  });
  box.addEventListener("pointerleave", () => onHover(null));
  box.addEventListener("click", (event) => {
    const position = getPosition(event);
    if (position === null) return;
    focusAt = position;
    onPick(position);
  });
  box.addEventListener("keydown", (event) => {
    const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -10, ArrowDown: 10, Home: -length, End: length, PageUp: -200, PageDown: 200 }[event.key];
    if (step !== undefined && !event.ctrlKey && !event.metaKey && !event.altKey) {
      focusAt = Math.min(length - 1, Math.max(0, focusAt + step));
      reveal(focusAt, "nearest");
      onHover(focusAt);
    } else if (event.key === "Enter" || event.key === " ") onPick(focusAt);
    else return;
    event.preventDefault();
    event.stopPropagation();
  });

  // Scrolls to a token, and keeps it in view while the pieces around it are laid out, until the reader
  // scrolls.
  /** @type {number[]} */
  let revealTimers = [];
  /** @param {number} position */
  function revealLater(position) {
    cancelReveal();
    reveal(position);
    revealTimers = [60, 200, 500, 1000, 2000].map((wait) => setTimeout(() => reveal(position), wait));
  }
  function cancelReveal() {
    revealTimers.forEach(clearTimeout);
    revealTimers = [];
  }
  for (const name of ["wheel", "pointerdown", "keydown", "touchmove"]) box.addEventListener(name, cancelReveal, { passive: true });

  /**
   * Scrolls to a token and fills its piece.
   *
   * @param {number} position
   * @param {"center" | "nearest"} [block]
   */
  function reveal(position, block = "center") {
    const current = pieces[findPiece(position)];
    if (!current) return;
    focusAt = position;
    const span = findToken(position);
    const target = span ?? current.element;
    const [outer, inner] = [box.getBoundingClientRect(), target.getBoundingClientRect()];
    if (!outer.height) return;
    const isInnerBlank = inner.top >= outer.top + 8 && inner.bottom <= outer.bottom - 8;
    if (!(span && isInnerBlank)) {
      const gap = block === "center" || !span ? (outer.height - Math.min(inner.height, outer.height)) / 2 : inner.top < outer.top ? 24 : outer.height - inner.height - 24;
      box.scrollTop += inner.top - outer.top - gap;
    }
    if (!span) {
      current.near = true;
      current.wanted = { position, block };
      fill(findPiece(position));
      applyReveal(current);
    }
  }
  /** @param {Piece} current */
  function applyReveal(current) {
    if (!current.filled || !current.wanted) return;
    const { position, block } = current.wanted;
    current.wanted = null;
    reveal(position, block);
  }
  return {
    element,
    start,
    reveal: revealLater,
    // Colours have changed.
    repaint() {
      for (const current of pieces) if (current.filled) for (const span of listTokens(current)) styleToken(span);
    },
    // Texts have come.
    refresh() {
      pieces.forEach((current, index) => {
        if (!current.near || current.filled) return;
        fill(index);
        applyReveal(current);
      });
    },
    // The tokens under the crosshair.
    mark(/** @type {number[]} */ positions) {
      for (const position of new Set([...marked, ...positions])) {
        const span = findToken(position);
        if (span) styleToken(span);
      }
      marked = positions;
    },
    destroy() {
      cancelReveal();
      resizeObserver.disconnect();
      visibilityObserver.disconnect();
      element.remove();
    },
  };
}
