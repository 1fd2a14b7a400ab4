// Drawn by the panels.

export function mountHelp(element, context) {
  return { destroy() {} };
}
