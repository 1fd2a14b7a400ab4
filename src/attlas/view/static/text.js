// Drawn by the panels.

export function mountText(element, context) {
  return { destroy() {} };
}
