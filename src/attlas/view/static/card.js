// A picture to share: what the head does in large letters, beside the map as it is shown.

const [WIDTH, HEIGHT, EDGE] = [1200, 630, 56];
const TEXT = 470; // pixels of the column of words

/** Draw the card: `shown` is what `map.picture` gives, `words` a headline and a sentence. */
export function drawCard({ canvas: source, width, height }, { headline, sentence }, title, style) {
  const canvas = document.createElement("canvas");
  [canvas.width, canvas.height] = [WIDTH, HEIGHT];
  const pen = canvas.getContext("2d");
  pen.fillStyle = style.card;
  pen.fillRect(0, 0, WIDTH, HEIGHT);
  let y = EDGE + 22;
  pen.fillStyle = style.soft;
  pen.font = `22px ${style.sans}`;
  pen.fillText(title, EDGE, y, TEXT);
  y = column(pen, headline, `600 46px ${style.sans}`, style.ink, y + 76, 56);
  column(pen, sentence, `25px ${style.sans}`, style.soft, y + 18, 36);
  pen.fillStyle = style.ink;
  pen.font = `600 24px ${style.sans}`;
  pen.fillText("attlas", EDGE, HEIGHT - EDGE);
  const room = { x: EDGE + TEXT + 40, y: 36, w: WIDTH - EDGE - TEXT - 40 - 36, h: HEIGHT - 72 };
  const scale = Math.min(room.w / width, room.h / height);
  pen.imageSmoothingQuality = "high";
  pen.drawImage(source, room.x + (room.w - scale * width) / 2, room.y + (room.h - scale * height) / 2, scale * width, scale * height);
  return canvas;
}

// A word, or one Chinese character, with the blanks and the Chinese punctuation behind it: no line begins with those.
const PARTS = /(?:[\u3400-\u9fff]|[^\s\u3000-\u9fff\uff00-\uffef]+)[\u3000-\u303f\uff00-\uffef]*\s*/gu;

// Words in lines of the column; returns where the next line would stand.
function column(pen, text, font, colour, top, line) {
  pen.font = font;
  pen.fillStyle = colour;
  let [line_, y] = ["", top];
  for (const part of text.match(PARTS) ?? []) {
    if (line_ && pen.measureText(line_ + part.trimEnd()).width > TEXT) {
      pen.fillText(line_, EDGE, y);
      [line_, y] = ["", y + line];
    }
    line_ += part;
  }
  pen.fillText(line_, EDGE, y, TEXT);
  return y + line;
}
