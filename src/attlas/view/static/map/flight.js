// The path of a flight: where the map is at each time between stops. Pure functions.

import { clamp } from "./geometry.js";

const SECONDS = 15; // of a flight of three stops and less,
const SECONDS_OF_STOP = 5; // and of each stop of a longer one
const [FIRST_STAY, STAY, LAST_STAY, PASSING] = [2, 2, 3.5, 0.8]; // seconds; passing: over the whole matrix of the next head
const FADE = 0.35; // seconds in which words come or go
const RHO = Math.SQRT2; // how far a path zooms out to move; J. J. van Wijk and W. A. A. Nuij, Smooth and efficient zooming and panning, 2003

/**
 * The path of van Wijk and Nuij between two places: of all zooms and pans it is the one that looks slowest at the same speed.
 *
 * @param {Place} from
 * @param {Place} to
 * @param {number} size CSS pixels of a side of the map
 * @returns {FlightPath}
 */
export function createPath(from, to, size) {
  const [first, last] = [size / 2 ** from.zoom, size / 2 ** to.zoom]; // cells in view
  const [down, across] = [to.row - from.row, to.column - from.column];
  const way = Math.hypot(down, across);
  const placeAt = (/** @type {number} */ gone, /** @type {number} */ cells) => ({ row: from.row + gone * down, column: from.column + gone * across, zoom: Math.log2(size / cells) });
  if (way < 1e-6 * first) {
    const length = Math.abs(Math.log(last / first)) / RHO;
    return { length, at: (share) => placeAt(share, first * (last / first) ** share) };
  }
  const squares = last ** 2 - first ** 2;
  const start = -Math.asinh((squares + RHO ** 4 * way ** 2) / (2 * first * RHO ** 2 * way));
  const end = -Math.asinh((squares - RHO ** 4 * way ** 2) / (2 * last * RHO ** 2 * way));
  const length = (end - start) / RHO;
  return {
    length,
    at(share) {
      if (share >= 1) return { ...to };
      const angle = start + share * (end - start);
      const gone = (first / (RHO ** 2 * way)) * (Math.cosh(start) * Math.tanh(angle) - Math.sinh(start));
      return placeAt(clamp(gone, 0, 1), (first * Math.cosh(start)) / Math.cosh(angle));
    },
  };
}

/**
 * The flight along some stops. To a stop of another head it goes over the whole matrix, which is where the head changes.
 *
 * @param {FlightStop[]} stops
 * @param {(fields: Partial<View>) => Place} getWhole the place from which the matrix of a view is seen as a whole
 * @param {number} size CSS pixels of a side of the map
 * @returns {FlightPlan}
 */
export function planFlight(stops, getWhole, size) {
  const stations = listStations(stops, getWhole);
  const paths = stations.slice(1).map((station, at) => (isSameHead(stations[at], station) ? createPath(stations[at].place, station.place, size) : null));
  const stays = stations.reduce((sum, { seconds }) => sum + seconds, 0);
  const total = Math.max(SECONDS, SECONDS_OF_STOP * stops.length, stays);
  const lengths = paths.map((path) => (path ? Math.max(path.length, 0.2) : 0));
  const length = lengths.reduce((sum, each) => sum + each, 0);
  /** @type {FlightLeg[]} */
  const legs = [];
  let time = 0;
  const add = (/** @type {FlightStation} */ from, /** @type {FlightStation} */ to, /** @type {FlightPath | null} */ path, /** @type {number} */ seconds) => {
    if (seconds > 0) legs.push({ start: time, end: time + seconds, from, to, path });
    time += Math.max(0, seconds);
  };
  stations.forEach((station, at) => {
    const path = paths[at - 1];
    if (path) add(stations[at - 1], station, path, ((total - stays) * lengths[at - 1]) / length);
    add(station, station, null, station.seconds);
  });
  return { seconds: time, at: (moment, still = false) => describeMoment(legs, clamp(moment, 0, time), still) };
}

/**
 * @param {FlightStop[]} stops
 * @param {(fields: Partial<View>) => Place} getWhole
 * @returns {FlightStation[]}
 */
function listStations(stops, getWhole) {
  /** @type {FlightStation[]} */
  const stations = [];
  stops.forEach((stop, at) => {
    const previous = stops[at - 1];
    const seconds = at === stops.length - 1 ? LAST_STAY : at ? STAY : FIRST_STAY;
    if (previous && !isSameHead(previous, stop)) {
      if (previous.place) stations.push({ ...previous, place: getWhole(previous.fields), seconds: 0 });
      if (stop.place) stations.push({ ...stop, place: getWhole(stop.fields), seconds: PASSING });
    }
    stations.push({ ...stop, place: stop.place ?? getWhole(stop.fields), seconds });
  });
  return stations;
}

/**
 * Whether two stops show one map, so that the flight can move from one to the other.
 *
 * @param {Pick<FlightStop, "fields">} first
 * @param {Pick<FlightStop, "fields">} other
 */
function isSameHead(first, other) {
  /** @type {(keyof View)[]} */
  const fields = ["entry", "head", "batch", "second", "compare", "variant"];
  return fields.every((field) => JSON.stringify(first.fields[field] ?? null) === JSON.stringify(other.fields[field] ?? null));
}

/**
 * @param {FlightLeg[]} legs
 * @param {number} time
 * @param {boolean} still whether the map jumps from stop to stop
 * @returns {FlightMoment}
 */
function describeMoment(legs, time, still) {
  const index = Math.max(0, legs.findLastIndex(({ start }) => start <= time));
  const { start, end, from, to, path } = legs[index];
  const share = Math.min(1, (time - start) / (end - start));
  const eased = share * share * share * (share * (6 * share - 15) + 10);
  const said = share < 0.5 ? from : to;
  // Words change in the middle of a move, and where the head does.
  const changes = path && hasOtherWords(from, to) ? [(start + end) / 2] : [];
  if (index > 0 && hasOtherWords(legs[index - 1].to, from)) changes.push(start);
  if (index < legs.length - 1 && hasOtherWords(to, legs[index + 1].from)) changes.push(end);
  const opacity = Math.min(1, ...changes.map((change) => Math.abs(time - change) / FADE));
  return { view: path && share > 0 ? to : from, said, opacity, place: still || !path ? said.place : path.at(eased) };
}

/**
 * @param {FlightStation} first
 * @param {FlightStation} other
 */
const hasOtherWords = (first, other) => first.title !== other.title || first.says !== other.says;
