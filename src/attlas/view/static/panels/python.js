// The Python code that draws the shown cells.

import { isRollout } from "../data/numbers.js";

const maxLabelled = 64; // largest number of rows or columns with token labels

/**
 * Lines of Python that draw the cells in view: {r0, r1, c0, c1} of the head that is shown.
 *
 * @param {State} state
 * @param {Region} region
 */
export function formatPython({ info, entry, head, batch, pool, colour }, { r0, r1, c0, c1 }) {
  const entryInfo = info.entries[entry];
  const isWhole = r0 === 0 && c0 === 0 && r1 === entryInfo.m && c1 === entryInfo.n;
  const isRecorded = entryInfo.name !== "matrix";
  // The name alone: a path of this machine is of no use to others, and says who its user is.
  const path = entryInfo.recording || info.folder || "run.atlas";
  const folder = JSON.stringify(path.split(/[\\/]/).pop());
  const key = `${JSON.stringify(entryInfo.name)}, ${entryInfo.call ?? 0}`;
  if (isRollout(entryInfo)) return formatRollout(folder, entryInfo.heads.slice(0, Number(head) + 1), batch, { r0, r1, c0, c1 });
  const lines = isRecorded ? ["import attlas", "", `atlas = attlas.load(${folder})`, `A = atlas[${key}]`] : ["# A is the matrix that the viewer shows"];
  const selection = isRecorded || entryInfo.heads.length > 1 || entryInfo.batch > 1 ? `A[${batch}, ${head}]` : "A";
  const options = [];
  if (!isWhole) options.push(`rows=(${r0}, ${r1})`, `columns=(${c0}, ${c1})`);
  const hasLabels = (entryInfo.texts[batch] ?? [null]).every((text) => text !== null);
  if (isRecorded && hasLabels && r1 - r0 <= maxLabelled && c1 - c0 <= maxLabelled) {
    const [row, column] = [entryInfo.first_query, entryInfo.first_key];
    lines.push(`queries, keys = atlas.texts_of(atlas.entry((${key})))`);
    options.push(`labels=(queries[${batch}][${row + r0}:${row + r1}], keys[${batch}][${column + c0}:${column + c1}])`);
  }
  options.push(`pool="${pool}"`);
  if (colour === "linear") options.push("log=False");
  lines.push(`figure = ${selection}.plot(${options.join(", ")})`, 'figure.savefig("head.pdf")  # or .svg, or .png with dpi=200');
  return `${lines.join("\n")}\n`;
}

/**
 * Lines of Python that compute some rows of the product of some layers, and draw the cells in view.
 *
 * @param {string} folder
 * @param {number[]} layers
 * @param {number} batch
 * @param {Region} region
 */
const formatRollout = (folder, layers, batch, { r0, r1, c0, c1 }) => `import attlas
from attlas import heads, pictures

atlas = attlas.load(${folder})
R = heads.rollout([atlas[layer] for layer in [${layers.join(", ")}]], rows=range(${r0}, ${r1}))  # shape (batch, rows, n)
figure = pictures.plot(R[${batch}][:, ${c0}:${c1}])
figure.savefig("rollout.pdf")  # or .svg, or .png with dpi=200
`;
