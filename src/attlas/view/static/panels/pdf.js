// A canvas as a PDF of one page, without a library.

import { getContext } from "../map/canvas.js";

const POINTS = 0.75; // of a CSS pixel

/**
 * The page has the size of the picture on the screen, of which each pixel is `ratio` pixels of the canvas.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {number} ratio
 */
export async function createPdf(canvas, ratio) {
  const { width, height } = canvas;
  const rgba = getContext(canvas).getImageData(0, 0, width, height).data;
  const rgb = new Uint8Array(3 * width * height);
  for (let to = 0; to < rgb.length; to++) rgb[to] = rgba[to + Math.floor(to / 3)]; // without the opacity
  const stream = new Blob([rgb]).stream().pipeThrough(new CompressionStream("deflate"));
  const packed = new Uint8Array(await new Response(stream).arrayBuffer());
  const [across, down] = [width, height].map((pixels) => ((POINTS * pixels) / ratio).toFixed(2));
  const place = `q ${across} 0 0 ${down} 0 0 cm /Map Do Q`;
  /** @type {(string | Uint8Array<ArrayBuffer>)[][]} */
  const objects = [
    ["<< /Type /Catalog /Pages 2 0 R >>"],
    ["<< /Type /Pages /Kids [3 0 R] /Count 1 >>"],
    [`<< /Type /Page /Parent 2 0 R /MediaBox [0 0 ${across} ${down}] /Contents 4 0 R /Resources << /XObject << /Map 5 0 R >> >> >>`],
    [`<< /Length ${place.length} >>\nstream\n${place}\nendstream`],
    [`<< /Type /XObject /Subtype /Image /Width ${width} /Height ${height} /ColorSpace /DeviceRGB /BitsPerComponent 8 /Filter /FlateDecode /Length ${packed.length} >>\nstream\n`, packed, "\nendstream"],
  ];
  /** @type {(string | Uint8Array<ArrayBuffer>)[]} */
  const parts = [];
  let size = 0;
  const add = (/** @type {string | Uint8Array<ArrayBuffer>} */ part) => {
    parts.push(part);
    size += part.length; // all texts are ASCII
  };
  add("%PDF-1.4\n");
  const starts = objects.map((object, at) => {
    const start = size;
    for (const part of [`${at + 1} 0 obj\n`, ...object, "\nendobj\n"]) add(part);
    return start;
  });
  const table = starts.map((start) => `${String(start).padStart(10, "0")} 00000 n \n`).join("");
  const count = objects.length + 1;
  add(`xref\n0 ${count}\n0000000000 65535 f \n${table}trailer\n<< /Size ${count} /Root 1 0 R >>\nstartxref\n${size}\n%%EOF\n`);
  return new Blob(parts, { type: "application/pdf" });
}
