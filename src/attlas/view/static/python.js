// What is shown, as the Python that draws it.

const labelled = 64; // tokens of each side up to which a figure names them

/** Lines of Python that draw the cells in view: {r0, r1, c0, c1} of the head that is shown. */
export function pythonOf({ info, entry, head, batch, pool, colour }, { r0, r1, c0, c1 }) {
  const given = info.entries[entry];
  const whole = r0 === 0 && c0 === 0 && r1 === given.m && c1 === given.n;
  const recorded = given.name !== "matrix";
  const folder = JSON.stringify(given.recording || info.folder || "run.atlas");
  const lines = recorded ? ["import attlas", "", `atlas = attlas.load(${folder})`, `A = atlas[${JSON.stringify(given.name)}, ${given.call ?? 0}]`] : ["# A is the matrix that the viewer shows"];
  const one = recorded || given.heads.length > 1 || given.batch > 1 ? `A[${batch}, ${head}]` : "A";
  const options = [];
  if (!whole) options.push(`rows=(${r0}, ${r1})`, `columns=(${c0}, ${c1})`);
  if (recorded && info.texts && r1 - r0 <= labelled && c1 - c0 <= labelled) {
    const from = given.origin ?? 0; // the text of a second recording stands behind the first
    const [row, column] = [given.first_query - from, given.first_key - from];
    options.push(`labels=(atlas.tokens[${row + r0}:${row + r1}], atlas.tokens[${column + c0}:${column + c1}])`);
  }
  options.push(`pool="${pool}"`);
  if (colour === "linear") options.push("log=False");
  lines.push(`figure = ${one}.plot(${options.join(", ")})`, 'figure.savefig("head.pdf")  # or .svg, or .png with dpi=200');
  return `${lines.join("\n")}\n`;
}
