// Drawn by the panels.

export function mountHeads(element, context) {
  return { destroy() {} };
}
