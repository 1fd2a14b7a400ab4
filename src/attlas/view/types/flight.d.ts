// A flight over the map, from the whole matrix to its stops.

/** Where a flight stays: the view, its place on the map (null: the whole matrix), and what is said there. */
interface FlightStop {
  fields: Partial<View>;
  place: Place | null;
  title: string;
  says: string;
}
/** A stop as the flight passes it; `seconds`: how long it stays. */
interface FlightStation extends FlightStop {
  place: Place;
  seconds: number;
}
/** A part of a flight in which the map stands still (`path` is null) or moves to the station `to`. */
interface FlightLeg {
  start: number;
  end: number;
  from: FlightStation;
  to: FlightStation;
  path: FlightPath | null;
}
/** A smooth path between two places: its length, and the place at a share of it. */
interface FlightPath {
  length: number;
  at(share: number): Place;
}
/** What a flight shows at a time: `view` is whose fields hold, `said` whose words are shown, at `opacity` from 0 to 1. */
interface FlightMoment {
  view: FlightStation;
  said: FlightStation;
  opacity: number;
  place: Place;
}
interface FlightPlan {
  seconds: number;
  at(time: number, still?: boolean): FlightMoment;
}
/** What a flight is doing: nothing, playing, being recorded. */
type FlightMode = "" | "play" | "record";
