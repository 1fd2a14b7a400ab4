// A picture to share: a headline on what the head does, beside the map.

import { getContext } from "../map/canvas.js";

const [WIDTH, HEIGHT, EDGE] = [1200, 630, 56];
const TEXT = 470; // width of the text column in pixels

/**
 * Draw the card: the picture that `map.picture` returns, beside a headline and a sentence.
 *
 * @param {MapPicture} picture
 * @param {{ headline: string, sentence: string, onText: string }} description
 * @param {string} title
 * @param {PictureStyle} style
 * @param {string} address
 */
export function drawCard({ canvas: source, width, whole: box, ring }, { headline, sentence, onText }, title, style, address) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [WIDTH, HEIGHT];
  const ctx = getContext(canvas);
  ctx.fillStyle = style.card;
  ctx.fillRect(0, 0, WIDTH, HEIGHT);
  let y = EDGE + 22;
  ctx.fillStyle = style.soft;
  ctx.font = `22px ${style.sans}`;
  ctx.fillText(title, EDGE, y, TEXT);
  y = drawParagraph(ctx, headline, `600 46px ${style.sans}`, style.ink, { x: EDGE, y: y + 76, width: TEXT, line: 56 });
  y = drawParagraph(ctx, sentence, `25px ${style.sans}`, style.soft, { x: EDGE, y: y + 18, width: TEXT, line: 36 });
  if (onText) drawParagraph(ctx, onText, `25px ${style.sans}`, style.soft, { x: EDGE, y: y + 12, width: TEXT, line: 36 });
  ctx.fillStyle = style.ink;
  ctx.font = `600 24px ${style.sans}`;
  ctx.fillText("attlas", EDGE, HEIGHT - EDGE);
  if (address) {
    const start = EDGE + ctx.measureText("attlas ").width + 8;
    ctx.font = `20px ${style.sans}`;
    ctx.fillStyle = style.soft;
    ctx.fillText(address.replace("https://", ""), start, HEIGHT - EDGE, TEXT - (start - EDGE));
  }
  const area = { x: EDGE + TEXT + 40, y: 36, w: WIDTH - EDGE - TEXT - 40 - 36, h: HEIGHT - 72 };
  const scale = Math.min(area.w / box.w, area.h / box.h);
  const [ratio, across, down] = [source.width / width, scale * box.w, scale * box.h];
  ctx.imageSmoothingQuality = "high";
  ctx.drawImage(source, ratio * box.x, ratio * box.y, ratio * box.w, ratio * box.h, area.x + (area.w - across) / 2, area.y + (area.h - down) / 2, across, down);
  if (ring) {
    ctx.strokeStyle = style.accent;
    ctx.lineWidth = 3;
    const [left, top] = [area.x + (area.w - across) / 2 + scale * (ring.x - box.x), area.y + (area.h - down) / 2 + scale * (ring.y - box.y)];
    ctx.strokeRect(left - 1.5, top - 1.5, scale * ring.w + 3, scale * ring.h + 3);
  }
  return canvas;
}

// A word or one Chinese character, with the blanks and Chinese punctuation after it: a line must not begin with those.
const WORDS = /(?:[\u3400-\u9fff]|[^\s\u3000-\u9fff\uff00-\uffef]+)[\u3000-\u303f\uff00-\uffef]*\s*/gu;

/**
 * Draw a wrapped text from a place on, `width` pixels wide, its lines `line` pixels apart; returns the y of the next line.
 *
 * @param {Context} ctx
 * @param {string} text
 * @param {string} font
 * @param {string} colour
 * @param {{ x: number, y: number, width: number, line: number }} box
 */
export function drawParagraph(ctx, text, font, colour, { x, y: first, width, line }) {
  ctx.font = font;
  ctx.fillStyle = colour;
  let [words, y] = ["", first];
  for (const word of text.match(WORDS) ?? []) {
    if (words && ctx.measureText(words + word.trimEnd()).width > width) {
      ctx.fillText(words, x, y);
      [words, y] = ["", y + line];
    }
    words += word;
  }
  ctx.fillText(words, x, y, width);
  return y + line;
}
