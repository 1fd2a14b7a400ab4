// A long text as a flow of tokens of which only those near the window exist: 100,000 tokens scroll like a hundred.

import { make } from "./elements.js";
import { formatInteger } from "./numbers.js";
import { showWhitespace } from "./tokens.js";
import { t } from "./words.js";

const pieceLength = 128; // tokens that come and go together, about; the position of the first stands in the margin
const cutWindow = 96; // tokens within which a piece is cut at the end of a line, or at a blank
const typicalHeight = 240; // pixels of a piece that was not laid out yet

// `first`: what stands in the margin at the first token, where the text is a part of a longer one.
export function createFlow({ tokens, label, uid, paint, onHover, onPick, first = 0 }) {
  let length = 0;
  let texts = 0; // positions before this have a text
  let pieces = []; // {element, filled, from}: `from` once it is known where the piece begins
  let focusAt = 0;
  let marked = [];
  const help = make("span", { class: "unseen", id: uid("flow-help") }, t("Arrow keys move from token to token, Enter pins one."));
  const box = make("div", { class: "flow", role: "group", "aria-label": label, tabIndex: 0, "aria-describedby": help.id });
  const element = make("div", { class: "flow-frame" }, box, help);

  const visibilityObserver = new IntersectionObserver(
    (changes) => {
      // Heights come with the change: asking the element for them would lay the page out again and again.
      for (const { target, isIntersecting, boundingClientRect } of changes) {
        const index = Number(target.dataset.piece);
        if (isIntersecting) fill(index);
        else clearPiece(index, boundingClientRect.height);
      }
    },
    { root: box, rootMargin: "300px 0px" },
  );

  function start(count, textCount) {
    [length, texts] = [count, textCount];
    pieces = [];
    visibilityObserver.disconnect();
    const all = document.createDocumentFragment();
    for (let index = 0; index * pieceLength < length; index++) {
      const part = make("div", { class: "piece", "data-piece": index });
      part.style.minHeight = `${typicalHeight}px`;
      pieces.push({ element: part, filled: false, from: index === 0 ? 0 : undefined });
      all.append(part);
    }
    box.replaceChildren(all);
    for (const { element: part } of pieces) visibilityObserver.observe(part);
  }
  const breaksAfter = (position) => position >= texts || /\n$/.test(tokens.peek(position) ?? "");
  // Where a piece begins: behind the next end of a line, else before the next blank. Undefined while the texts around
  // are not here.
  function findStart(index) {
    const nominal = index * pieceLength;
    if (index >= pieces.length || nominal >= length) return length;
    const part = pieces[index];
    if (part.from !== undefined) return part.from;
    const last = Math.min(texts, length, nominal + cutWindow);
    if (nominal < texts) tokens.prefetch(nominal - 1, last);
    let blank;
    for (let position = nominal; position < last; position++) {
      const [before, text] = [tokens.peek(position - 1), tokens.peek(position)];
      if (before === null || text === null) return undefined;
      if (/\n$/.test(before) && tokens.joined(position)?.start !== position - 1) return (part.from = position);
      if (blank === undefined && /^\s/.test(text)) blank = position;
    }
    return (part.from = blank ?? nominal);
  }
  function fill(index) {
    const part = pieces[index];
    part.near = true;
    if (part.filled) return;
    const [from, to] = [findStart(index), findStart(index + 1)];
    if (from === undefined || to === undefined) return; // refresh() comes back when the texts are here
    if (from < texts) tokens.prefetch(from, Math.min(to, texts));
    if (from < texts && tokens.peek(from) === null) return;
    part.filled = true;
    const content = [make("span", { class: "piece-place", "aria-hidden": "true" }, formatInteger(first + from))];
    for (let position = from; position < to; position++) content.push(createToken(position));
    part.element.replaceChildren(...content);
    if (!breaksAfter(to - 1)) part.element.append(make("i", { class: "piece-end" }));
    part.element.style.minHeight = "";
    joinLines(index);
    joinLines(index + 1);
    for (const child of part.element.querySelectorAll(".t")) styleToken(child);
  }
  // A piece that begins within a line goes on where the one before it ends, so that the text has no other breaks.
  function joinLines(index) {
    const [before, part] = [pieces[index - 1], pieces[index]];
    if (!before?.filled || !part?.filled) return;
    const end = before.element.querySelector(".piece-end")?.getBoundingClientRect();
    const { left, bottom } = before.element.getBoundingClientRect();
    part.element.style.textIndent = end ? `${end.left - left}px` : "";
    part.element.style.marginTop = end ? `${end.top - bottom}px` : "";
  }
  function clearPiece(index, height) {
    const part = pieces[index];
    part.near = false;
    if (!part.filled || part.element.contains(document.activeElement)) return;
    // What leaves keeps its height, so that nothing else moves.
    part.element.style.minHeight = `${height}px`;
    part.element.replaceChildren();
    part.filled = false;
  }
  function createToken(position) {
    const span = make("span", { class: "t", "data-position": position });
    const text = position < texts ? tokens.peek(position) : null;
    const joined = position < texts ? tokens.joined(position) : null;
    span.title = formatInteger(first + position);
    if (text === null) {
      span.classList.add("number");
      span.append(String(position));
    } else if (joined) {
      // A character of several tokens: the whole of it before the first, then the bytes of each.
      span.classList.add("part");
      span.title = t("{0} · part {1} of {2} of {3}", formatInteger(position), position - joined.start + 1, joined.stop - joined.start, joined.text);
      if (position === joined.start) span.append(make("b", { class: "joined" }, joined.text));
      span.append(make("small", {}, text.replace(/^⟨(.*)⟩$/u, "$1")));
    } else appendText(span, text, position + 1 < texts ? tokens.peek(position + 1) : null);
    return span;
  }
  // Whitespace is text of its own: a faint sign where it stands, and the line break after its sign. Blanks have a sign
  // at the end of a line only, where nobody would see them.
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
  function styleToken(span) {
    const { classes, background } = paint(Number(span.dataset.position));
    const ownClasses = ["t", ...["number", "part"].filter((name) => span.classList.contains(name))];
    span.className = [...ownClasses, ...classes].join(" ");
    span.style.background = background;
  }
  // The piece that a token is in: the one of its place, or the one before, which reaches up to an end of a line.
  function findPiece(position) {
    const index = Math.min(pieces.length - 1, Math.floor(position / pieceLength));
    return index > 0 && position < (findStart(index) ?? 0) ? index - 1 : index;
  }
  const findToken = (position) => pieces[findPiece(position)]?.element.querySelector(`[data-position="${position}"]`) ?? null;

  const resizeObserver = new ResizeObserver(() => pieces.forEach((part, index) => joinLines(index)));
  resizeObserver.observe(box);

  const getPosition = (event) => {
    const span = event.target.closest?.(".t");
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

  // Brings a token into the window, and keeps it there while the pieces around it get their texts and heights, unless
  // somebody scrolls.
  let revealTimers = [];
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

  // Brings a token into the window; its piece is filled on the way.
  function reveal(position, block = "center") {
    const part = pieces[findPiece(position)];
    if (!part) return;
    focusAt = position;
    const span = findToken(position);
    const target = span ?? part.element;
    const [outer, inner] = [box.getBoundingClientRect(), target.getBoundingClientRect()];
    if (!outer.height) return;
    const isInnerBlank = inner.top >= outer.top + 8 && inner.bottom <= outer.bottom - 8;
    if (!(span && isInnerBlank)) {
      const gap = block === "center" || !span ? (outer.height - Math.min(inner.height, outer.height)) / 2 : inner.top < outer.top ? 24 : outer.height - inner.height - 24;
      box.scrollTop += inner.top - outer.top - gap;
    }
    if (!span) {
      part.near = true;
      part.wanted = { position, block };
      fill(findPiece(position));
      applyReveal(part);
    }
  }
  function applyReveal(part) {
    if (!part.filled || !part.wanted) return;
    const { position, block } = part.wanted;
    part.wanted = null;
    reveal(position, block);
  }
  return {
    element,
    start,
    reveal: revealLater,
    // Colours have changed.
    repaint() {
      for (const part of pieces) if (part.filled) for (const span of part.element.querySelectorAll(".t")) styleToken(span);
    },
    // Texts have come.
    refresh() {
      pieces.forEach((part, index) => {
        if (!part.near || part.filled) return;
        fill(index);
        applyReveal(part);
      });
    },
    // The tokens under the crosshair.
    mark(positions) {
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
