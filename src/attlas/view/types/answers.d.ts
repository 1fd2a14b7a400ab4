// What the page asks, and what it is answered: by a server, by the kernel of a notebook, or from an offline file.

/** One matrix of heads: a layer of a recording. */
interface Entry {
  id: number;
  layer: number;
  kind: string;
  call: number | null;
  name: string;
  heads: number[];
  m: number;
  n: number;
  first_query: number;
  first_key: number;
  texts: [query: number | null, key: number | null][];
  spans: Side[];
  recording: string;
  batch: number;
  levels: number;
  causal: boolean;
  /** Whether its weights are a softmax; shares of their rows, from 0 to 1; may be negative. */
  softmax: boolean;
  shares: boolean;
  signed: boolean;
  /** Of weights that are no shares: a size typical of the largest, by variants. */
  largest: Record<string, number>;
  sink: boolean;
  readable: boolean;
  /** Whether logits can be explained by the parts of queries and keys. */
  parts?: boolean;
  largest_norms: Record<string, number>;
  /** Numbers of the grids of pictures among its keys. */
  grids?: number[];
}
/** A grid of patches on a picture: its box (top, left, bottom, right) as shares of the picture, and its keys, row by row. */
interface ImageTile {
  rows: number;
  columns: number;
  box: [top: number, left: number, bottom: number, right: number];
  thumbnail: boolean;
  /** The position of each patch; -1 for one that is no key. */
  keys: number[];
}
interface ImageGrid {
  image: number;
  sequence: number;
  tiles: ImageTile[];
}
/** A patch of a picture with its weight, which is NaN where it is not known. */
interface Patch {
  r: number;
  c: number;
  key: number;
  weight: number;
  x: number;
  y: number;
  width: number;
  height: number;
}
interface Bookmark {
  name: string;
  at: string;
  says: string;
}
/** Some rows and columns of a matrix. */
interface Region {
  r0: number;
  r1: number;
  c0: number;
  c1: number;
}
/** What an offline page holds of a head; `finest`: level of its finest tiles, `block`: cells of their blocks. */
interface HeldHead extends HeadPlace {
  finest: number;
  block: number | null;
  exact: boolean;
  kept: number;
  patches: Region[];
  /** Where the recording has parts: the cells that are explained, and whether the whole map is. */
  why?: { cells: [i: number, j: number][]; map: boolean };
}
/** The text that the model of a page has read, and how many characters it may have. */
interface ReadingFacts {
  model: string;
  text: string;
  tokens: number;
  characters: number;
  more: number;
  /** The number of the text that is shown, and that of the one that was read last. */
  number: number;
  last: number;
  parts: TypedPartsFacts | null;
  texts: { number: number; name: string }[];
}
/** What parts of typed texts take, and of one text: how much, or why it has none. */
interface TypedPartsFacts {
  per_token: number;
  most: number;
  bytes: number;
  reason: [text: string, ...values: TextValue[]] | null;
}
/** What there is to see. */
interface Info {
  key: string;
  title: string;
  /** The title of the first recording alone, where a second one is compared with it. */
  first_title: string;
  model: string;
  text_length: number;
  texts: number[];
  about: [title: string, sentences: [text: string, ...values: TextValue[]][]][];
  spans: Record<string, [start: number, stop: number]>;
  entries: Entry[];
  units: Record<string, number>;
  /** Addresses that hold the pictures of the recording; null for one that it does not have. */
  pictures?: (string | null)[];
  grids?: ImageGrid[];
  /** Why the layers cannot be multiplied: a sentence and its values; null where they can, or where there is one layer. */
  no_rollout?: [text: string, ...values: TextValue[]] | null;
  folder: string | null;
  /** The address of the project, where the installed package knows one. */
  project: string | null;
  bookmarks: Bookmark[];
  keeps: boolean;
  on_demand_level: number;
  tracks: TrackName[];
  /** Where the page reads texts of the user. */
  reading?: ReadingFacts;
  /** Of an offline page: what it holds, and the only batch, variant and pooling. */
  held?: HeldHead[];
  only?: { batch: number; variant: Variant; pool: Pool };
}

/** A statistic of each head. */
interface Column {
  name: string;
  label: string;
  unit: string;
  description: string;
}
interface HeadRow {
  entry: number;
  head: number;
  kinds: string[];
  share: number | null;
  measures: Record<string, number> | null;
  on_text: { kind: string; share: number; chance: number | null } | null;
  values: Record<string, number | null>;
}
/** A kind of head: what it does, and the measure and its least value that make a head one of it. */
interface Kind {
  short: string;
  does: string;
  measure: string;
  threshold: number;
  definition: string;
  headline: string;
  evidence: string;
  on_text: string;
}
/** Where it was measured what the heads are. */
interface MeasuredOn {
  what: "text" | "corpus" | "random";
  name: string;
}
interface HeadTable {
  progress: number;
  columns: Column[];
  rows: HeadRow[];
  kinds: Record<string, Kind>;
  on: MeasuredOn | null;
  telling: { entry: number; head: number; pin: Cell | null } | null;
}

/** A step of the tour: a head, its kind, and a cell that shows what it does, with its weight and both tokens. */
interface StoryStep {
  kind: string;
  entry: number;
  head: number;
  i: number;
  j: number;
  weight: number;
  tokens: [query: string, key: string];
}

/** The numbers of one cell; null where they are not known. */
interface CellDetails {
  weight: number | null;
  /** Of a weighted number: the attention weight. */
  share?: number | null;
  logit: number | null;
  lse: number | null;
  allowed: boolean;
  rank: number | null;
  row_entropy: number | null;
  /** The sum of the weights of the row, where they are no shares. */
  row_mass?: number | null;
  column_mass: number | null;
  /** Of an offline page: whether the weight is rounded, and what it is below where it is not known. */
  rounded?: boolean;
  below?: number;
}
/** A part of queries or keys, and what it adds to a logit; `role` is what its head is called in the recording. */
interface WhyPart {
  name: string;
  kind: string;
  layer: number | null;
  head: number | null;
  role: string;
  logit: number;
}
/** The part that adds most to a key, the tokens that its head took it from, and that head on the page. */
interface WhyWriter extends WhyPart {
  sources: { at: number; logit: number }[];
  others?: number;
  row: number | null;
  without: { logit: number; weight: number } | null;
  place?: HeadPlace;
}
/** Why a weight is where it is: its logit as a sum over parts. */
interface Why {
  layer: number;
  head: number;
  cell: [i: number, j: number];
  logit: number;
  weight: number;
  total: number;
  remainder: number;
  relative: boolean;
  above: number;
  mean: number;
  keys: WhyPart[];
  queries: WhyPart[];
  pairs: { query: WhyPart; key: WhyPart; logit: number }[];
  writer: WhyWriter | null;
  notes: string[];
}
/** What pairs of parts add where a head looks, above the mean of the keys. */
interface WhyMap {
  layer: number;
  head: number;
  queries: WhyPart[];
  keys: WhyPart[];
  /** How many parts of queries and of keys are the last row and the last column. */
  others: [queries: number, keys: number];
  table: number[][];
  total: number;
  notes: string[];
}
/** The tokens around a cell and the token that its writer read, by their positions. */
interface WhyWords {
  words: Map<number, string>;
  /** Tokens of the text; 0 where queries and keys are of two texts. */
  length: number;
  i: number;
  j: number;
  source: number | null;
}
/** A cell and its weight. */
type WeightedCell = [i: number, j: number, weight: number];
/** Tokens that are one character together: `[start, stop, character]`. */
type JoinedTokens = [start: number, stop: number, text: string];
interface Job extends HeadPlace {
  batch: number;
  variant: Variant;
  done: number;
  total: number;
  seconds_left: number | null;
}
/** What the model is doing with the text of the user. */
interface ReadingStatus {
  doing: "" | "loading" | "measuring" | "reading" | "writing";
  done: number;
  total: number;
  error: string;
  key: string;
  text: string;
  tokens: number;
  number: number;
  last: number;
  parts: TypedPartsFacts | null;
  /** How far the comparison is that was asked for, from 0 to 1; null while there is none. */
  trial: number | null;
}
/** What a text is like without some heads, or with other words: before and after the change. */
interface Trial {
  tokens: [before: string[], after: string[]];
  /** Positions that stand for each other in both texts. */
  pairs: [before: number, after: number][];
  /** The probability of each token given those before it; null for the first. */
  before: (number | null)[];
  after: (number | null)[];
  next: [before: Following, after: Following];
  /** Every so many-th query was compared. */
  every: number;
  heads: MovedHead[];
}
/** What may come after a text: the likeliest tokens, and the likeliest continuation. */
interface Following {
  likeliest: [token: string, probability: number | null][];
  text: string;
}
/** A head with the share of its weights that moved; keys that one text lacks are null. */
interface MovedHead {
  entry: number;
  head: number;
  moved: number;
  cells: [query: [before: number, after: number], key: [before: number | null, after: number | null], before: number, after: number][];
}
type TrackName = "column_mass" | "column_max" | "entropy" | "effective_keys" | "max_weight";

/** Every answer says how far its computation is, whether it is final, and whether it is a sample. */
interface AnswerFacts {
  progress: number;
  final: boolean;
  sampled: boolean;
}
interface JsonAnswer<T> extends AnswerFacts {
  json: T;
}
/** Numbers: codes of 16 bits, or float32 weights. */
interface BinaryAnswer extends AnswerFacts {
  buffer: ArrayBuffer;
  /** Of an offline page: whether weights are rounded, and their sum where some are missing. */
  rounded?: boolean;
  total?: number | null;
}
/** The questions about a recording, each with its answer. */
interface Questions {
  info: JsonAnswer<Info>;
  heads: JsonAnswer<HeadTable>;
  story: JsonAnswer<{ steps: StoryStep[] }>;
  status: JsonAnswer<{ jobs: Job[]; bytes: number; packing?: number }>;
  focus: JsonAnswer<object>;
  pooling: JsonAnswer<{ pool: Pool }>;
  tokens: JsonAnswer<{ start: number; tokens: string[]; joined: JoinedTokens[] }>;
  outline: JsonAnswer<{ query: StretchRow[]; key: StretchRow[] | null }>;
  search: JsonAnswer<{ matches: [start: number, stop: number][]; total: number }>;
  tile: BinaryAnswer;
  thumbnail: BinaryAnswer;
  track: BinaryAnswer;
  row: BinaryAnswer;
  column: BinaryAnswer;
  region: BinaryAnswer;
  pair: JsonAnswer<{ weights: (number | null)[]; agreement: (number | null)[] | null }>;
  cell: JsonAnswer<CellDetails>;
  why: JsonAnswer<Why>;
  why_map: JsonAnswer<WhyMap>;
  top: JsonAnswer<{ cells: WeightedCell[]; rounded?: boolean }>;
  offline: JsonAnswer<{ page?: string; data: PackedData }>;
  reading: JsonAnswer<ReadingStatus>;
  without: JsonAnswer<Trial>;
  other: JsonAnswer<Trial>;
}
/** What the page sends to be kept or done, each with its answer. */
interface Sendings {
  bookmarks: { json: { bookmarks: Bookmark[] } };
  read: { json: object };
  second: { json: object };
}
/** Parameters of a question. */
type Params = Record<string, string | number | undefined | null>;
interface GetOptions {
  signal?: AbortSignal;
}
/** Where answers come from. */
interface Transport<Q = Questions> {
  get<N extends keyof Q & string>(name: N, params?: Params, options?: GetOptions): Promise<Q[N]>;
  /** Missing where nothing can be kept. */
  send?: <N extends keyof Sendings>(name: N, content: unknown) => Promise<Sendings[N]>;
}
/** Options of a request that waits in the queue. */
interface QueueOptions extends GetOptions {
  distance?: () => number;
  rank?: number;
}
/** The queue before a transport; see `createRequests`. */
interface Requests extends Transport {
  get<N extends keyof Questions>(name: N, params?: Params, options?: QueueOptions): Promise<Questions[N]>;
  trouble(listener: (text: string | null, isGone: boolean) => void): () => void;
  counts(): { waiting: number; flying: number };
  destroy(): void;
}
/** A request in the queue. */
interface QueuedRequest {
  name: keyof Questions;
  params: Params;
  signal?: AbortSignal;
  distance?: () => number;
  rank: number;
  tries: number;
  timer: number;
  currentDistance: number;
  controller: AbortController;
  resolve(answer: Questions[keyof Questions]): void;
  reject(error: unknown): void;
  cancel(): void;
}

/** Numbers of an offline page: base64 of deflated bytes, those of each place of a number together. */
interface PackedPart {
  text: string;
  width: number;
}
/** What an offline page holds. */
interface PackedData {
  format?: number;
  info: Info;
  state: View;
  packed: HeldHead[];
  heads: HeadTable;
  story: StoryStep[];
  texts: Record<string, { tokens: string[]; joined: JoinedTokens[] }>;
  /** The outlines of the texts, and which of them each entry has; pages of before have none. */
  outlines?: { query: StretchRow[]; key: StretchRow[] | null }[];
  outline_of?: number[];
  /** Packed numbers, and the details of cells. */
  parts: Record<string, PackedPart | CellDetails>;
  /** Computes a part that is not there; null for one that does not exist. */
  compute?: (part: string) => Promise<ArrayBuffer | null>;
}

/** The model of a notebook widget (the protocol of anywidget). */
interface WidgetModel {
  get(name: "height"): number;
  get(name: "still_class"): string;
  get(name: "initial"): Partial<State>;
  on(event: "msg:custom", listener: (message: WidgetMessage, buffers: (ArrayBuffer | ArrayBufferView)[]) => void): void;
  on(event: string, listener: () => void): void;
  off(event: "msg:custom", listener: (message: WidgetMessage, buffers: (ArrayBuffer | ArrayBufferView)[]) => void): void;
  off(event: string, listener: () => void): void;
  send(message: { type: "get"; id: string; name: string; params: Record<string, string> } | { type: "cancel"; id: string }): void;
}
/** An answer of the kernel; its body is the first buffer. */
interface WidgetMessage extends AnswerFacts {
  type: string;
  id: string;
  status: number;
  kind: "json" | "binary";
  error?: string;
}
/** A head of an offline page with its name among the parts. */
interface PackedHead extends HeldHead {
  name: string;
  entryInfo: Entry;
}
/** Weights of an offline page; `partial`: some of the row are not known. */
interface PackedWeights {
  weights: Float32Array<ArrayBuffer>;
  rounded: boolean;
  partial?: boolean;
  total?: number | null;
}
