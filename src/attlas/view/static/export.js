// Drawn by the panels.

export function mountExport(element, context) {
  return { destroy() {} };
}
