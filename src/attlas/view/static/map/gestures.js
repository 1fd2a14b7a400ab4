// Pointer, wheel, touch and keys on the canvas, turned into what the map can do.

const CLICK_DISTANCE = 4; // CSS pixels that the pointer may move during a click
const PAN_STEP = 40; // CSS pixels of one arrow key

/**
 * Doublings of one wheel event: lines and pages as pixels, pinches of a trackpad (ctrl) finer.
 *
 * @param {Pick<WheelEvent, "deltaY" | "deltaMode" | "ctrlKey">} event
 */
export function computeWheelZoom({ deltaY, deltaMode, ctrlKey }) {
  const pixels = deltaY * [1, 16, 240][deltaMode];
  const bounded = Math.max(-240, Math.min(240, pixels));
  return -bounded * (ctrlKey ? 0.014 : 0.0032);
}

/**
 * Listen on `canvas`. `target`: `{camera, point(x, y), leave(), click(x, y), double(x, y, out), key(name, event)}`;
 * places are in CSS pixels of the canvas.
 *
 * @param {HTMLCanvasElement} canvas
 * @param {GestureTarget} target
 */
export function createGestures(canvas, target) {
  const { camera } = target;
  /** @type {Map<number, Point>} */
  const pointers = new Map(); // pointers on the canvas: id -> {x, y}
  let dragLength = 0;
  /** @type {(Point & { time: number })[]} */
  let trail = []; // the last positions of a drag, for its speed at the end
  /** @type {(Point & { apart: number }) | null} */
  let pinch = null;

  const getPosition = (/** @type {MouseEvent} */ event) => {
    const box = canvas.getBoundingClientRect();
    return { x: event.clientX - box.left, y: event.clientY - box.top };
  };
  const measurePinch = () => {
    const [a, b] = [...pointers.values()];
    return { x: (a.x + b.x) / 2, y: (a.y + b.y) / 2, apart: Math.max(1, Math.hypot(a.x - b.x, a.y - b.y)) };
  };

  /** @param {PointerEvent} event */
  function handlePointerDown(event) {
    if (event.button !== 0 || pointers.size >= 2) return;
    camera.stop();
    canvas.setPointerCapture(event.pointerId);
    pointers.set(event.pointerId, getPosition(event));
    dragLength = pointers.size > 1 ? Infinity : 0;
    trail = [];
    pinch = pointers.size === 2 ? measurePinch() : null;
  }

  /** @param {PointerEvent} event */
  function handlePointerMove(event) {
    const place = getPosition(event);
    const before = pointers.get(event.pointerId);
    if (!before) {
      if (event.pointerType !== "touch") target.point(place.x, place.y);
      return;
    }
    pointers.set(event.pointerId, place);
    if (pinch) {
      const now = measurePinch();
      camera.panBy(now.x - pinch.x, now.y - pinch.y);
      camera.zoomBy(Math.log2(now.apart / pinch.apart), now.x, now.y, { now: true });
      pinch = now;
      return;
    }
    const [dx, dy] = [place.x - before.x, place.y - before.y];
    dragLength += Math.hypot(dx, dy);
    if (dragLength < CLICK_DISTANCE) {
      pointers.set(event.pointerId, before); // not yet a drag
      dragLength = Math.hypot(dx, dy);
      return;
    }
    canvas.parentElement?.classList.add("dragging");
    camera.panBy(dx, dy);
    trail.push({ ...place, time: event.timeStamp });
    trail = trail.filter((step) => event.timeStamp - step.time < 90);
    target.leave(); // no crosshair while dragging
  }

  /** @param {PointerEvent} event */
  function handlePointerUp(event) {
    if (!pointers.delete(event.pointerId)) return;
    canvas.parentElement?.classList.remove("dragging");
    if (pinch) {
      pinch = null;
      dragLength = Infinity; // the remaining finger does not click
      return;
    }
    const place = getPosition(event);
    if (event.pointerType !== "touch") target.point(place.x, place.y);
    const [first, last] = [trail[0], trail[trail.length - 1]];
    if (event.type === "pointerup" && dragLength < CLICK_DISTANCE) target.click(place.x, place.y);
    else if (event.type === "pointerup" && trail.length > 1 && event.timeStamp - last.time < 40) {
      const time = Math.max(1, last.time - first.time);
      camera.throwBy((last.x - first.x) / time, (last.y - first.y) / time);
    }
  }

  /** @param {WheelEvent} event */
  function handleWheel(event) {
    event.preventDefault();
    const { x, y } = getPosition(event);
    if (event.shiftKey && !event.ctrlKey) {
      camera.stop();
      camera.panBy(-(event.deltaX || event.deltaY), 0);
    } else camera.zoomBy(computeWheelZoom(event), x, y, { now: event.ctrlKey });
    target.point(x, y);
  }

  /** @param {MouseEvent} event */
  function handleDoubleClick(event) {
    const { x, y } = getPosition(event);
    target.double(x, y, event.shiftKey);
  }

  /** @param {KeyboardEvent} event */
  function handleKeyDown(event) {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    if (target.key(event.key, event.shiftKey)) event.preventDefault();
  }

  const handleLeave = (/** @type {PointerEvent} */ event) => {
    if (!pointers.size && event.pointerType !== "touch") target.leave();
  };
  const preventDefault = (/** @type {Event} */ event) => event.preventDefault(); // Safari's own pinch
  const listeners = /** @type {[name: string, run: (event: Event) => void][]} */ ([
    ["pointerdown", handlePointerDown],
    ["pointermove", handlePointerMove],
    ["pointerup", handlePointerUp],
    ["pointercancel", handlePointerUp],
    ["pointerleave", handleLeave],
    ["dblclick", handleDoubleClick],
    ["keydown", handleKeyDown],
    ["gesturestart", preventDefault],
    ["gesturechange", preventDefault],
  ]);
  for (const [name, run] of listeners) canvas.addEventListener(name, run);
  canvas.addEventListener("wheel", handleWheel, { passive: false });
  return () => {
    for (const [name, run] of listeners) canvas.removeEventListener(name, run);
    canvas.removeEventListener("wheel", handleWheel);
  };
}

/**
 * Cells that an arrow key moves: whole ones, about PAN_STEP pixels, a quarter of the field with Shift.
 *
 * @param {number} scale
 * @param {number} length
 * @param {boolean} shift
 */
export function computeArrowStep(scale, length, shift) {
  return Math.max(1, Math.round((shift ? length / 4 : Math.min(PAN_STEP, length / 4)) / scale));
}
