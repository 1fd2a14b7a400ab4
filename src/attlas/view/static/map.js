// The map: an attention matrix to pan and zoom.

/** Mount the map in `element`. */
export function createMap(element, { store }) {
  const canvas = document.createElement("canvas");
  element.append(canvas);
  const size = () => [element.clientWidth, element.clientHeight];
  const view = () => {
    const { row, column, zoom } = store.state;
    const scale = 2 ** (zoom ?? 0);
    const [width, height] = size();
    return { r0: row - height / 2 / scale, r1: row + height / 2 / scale, c0: column - width / 2 / scale, c1: column + width / 2 / scale, scale };
  };
  const entry = () => store.state.info.entries[store.state.entry];
  const map = {
    view,
    level: () => 0,
    refused: () => null,
    centre(i, j, { zoom } = {}) {
      store.set({ row: i + 0.5, column: j + 0.5, ...(zoom === undefined ? {} : { zoom }) });
    },
    fit() {
      const { m, n } = entry();
      const [width, height] = size();
      store.set({ row: m / 2, column: n / 2, zoom: Math.log2(Math.min(width / n, height / m)) });
    },
    diagonal() {},
    zoomBy() {},
    crosshair: () => null,
    cellAt: () => null,
    canvas: () => canvas,
    visibleRegion: () => view(),
    destroy() {
      canvas.remove();
    },
  };
  if (store.state.zoom === null) map.fit();
  return map;
}
