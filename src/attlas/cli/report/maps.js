// Colours and canvases. A map is a square of bytes: 0 where nothing may attend, else 1 to 255 for the
// logarithm of a weight between data.floor and 1. $oklab is the viewer's module of that name.

const data = JSON.parse(document.getElementById("data").textContent);
const byId = (id) => document.getElementById(id);
const dark = matchMedia("(prefers-color-scheme: dark)");

function bytes(text) {
  const raw = atob(text);
  const out = new Uint8Array(raw.length);
  for (let i = 0; i < raw.length; i++) out[i] = raw.charCodeAt(i);
  return out;
}
const words32 = (text) => {
  const raw = new DataView(bytes(text).buffer);
  return Uint32Array.from({ length: raw.byteLength / 4 }, (_, i) => raw.getUint32(4 * i, true));
};
const words16 = (text) => {
  const raw = new DataView(bytes(text).buffer); // little-endian in the file, whatever this machine is
  return Uint16Array.from({ length: raw.byteLength / 2 }, (_, i) => raw.getUint16(2 * i, true));
};

// Depth of the sea: one hue family whose lightness falls all the way, so that it reads without colour vision too.
function palette(stops) {
  const points = stops.map($oklab.oklabOf);
  const table = new Uint8Array(256 * 3);
  for (let i = 0; i < 256; i++) {
    const at = ((points.length - 1) * Math.max(i - 1, 0)) / 254;
    const from = Math.min(Math.floor(at), points.length - 2);
    table.set($oklab.srgbOf(points[from].map((c, j) => c + (at - from) * (points[from + 1][j] - c))), 3 * i);
  }
  return table;
}
const palettes = { light: palette(data.palette), dark: palette([...data.palette].reverse()) };
const colours = () => palettes[dark.matches ? "dark" : "light"];

// Draw one map into a canvas of its own size; the page scales it.
function paint(canvas, map, side) {
  const table = colours();
  const land = dark.matches ? [29, 39, 48] : [231, 228, 220];
  const image = new ImageData(side, side);
  for (let i = 0; i < side * side; i++) {
    const v = map[i];
    image.data[4 * i] = v ? table[3 * v] : land[0];
    image.data[4 * i + 1] = v ? table[3 * v + 1] : land[1];
    image.data[4 * i + 2] = v ? table[3 * v + 2] : land[2];
    image.data[4 * i + 3] = 255;
  }
  canvas.width = canvas.height = side;
  canvas.getContext("2d").putImageData(image, 0, 0);
}

function paintScale(canvas) {
  const table = colours();
  const image = new ImageData(255, 1);
  for (let i = 0; i < 255; i++) image.data.set([table[3 * (i + 1)], table[3 * (i + 1) + 1], table[3 * (i + 1) + 2], 255], 4 * i);
  canvas.width = 255;
  canvas.height = 1;
  canvas.getContext("2d").putImageData(image, 0, 0);
}

const weightOf = (byte) => data.floor ** (1 - (byte - 1) / 254);
const percent = (w) => (w >= 0.0995 ? (100 * w).toFixed(0) : w >= 0.00995 ? (100 * w).toFixed(1) : (100 * w).toFixed(2)) + " %";

// What is drawn for each head, cut out of one run of bytes.
const sets = {
  text: { all: bytes(data.maps), side: data.side },
  close: { all: bytes(data.closeups), side: data.window[1] - data.window[0] },
  repeat: { all: bytes(data.repeats), side: data.repeatSide },
};
const mapOf = (view, head) => {
  const { all, side } = sets[view];
  return all.subarray(head * side * side, (head + 1) * side * side);
};
