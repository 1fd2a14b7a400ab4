// Drawn by the panels.

export function mountSearch(element, context) {
  return { destroy() {} };
}
