// Drawn by the panels.

export function mountColourbar(element, context) {
  return { destroy() {} };
}
