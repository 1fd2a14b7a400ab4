// Reads tensors of safetensors files.

import { t } from "../words/words.js";

const LONGEST_HEADER = 100e6; // bytes

/**
 * The tensors of a file by their names, without their numbers.
 *
 * @param {ArrayBuffer} file
 * @returns {Record<string, StoredTensor>}
 */
export function readTensors(file) {
  const length = file.byteLength < 8 ? Infinity : Number(new DataView(file).getBigUint64(0, true));
  if (length > Math.min(LONGEST_HEADER, file.byteLength - 8)) throw new Error(t("A file of tensors is cut off or damaged"));
  /** @type {Record<string, { dtype: string, shape: number[], data_offsets: [number, number] }>} */
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(file, 8, length)));
  const described = Object.entries(header).filter(([name]) => name !== "__metadata__");
  return Object.fromEntries(
    described.map(([name, { dtype, shape, data_offsets: [start, stop] }]) => {
      if (!(start >= 0 && start <= stop && 8 + length + stop <= file.byteLength)) throw new Error(t("A file of tensors is cut off or damaged"));
      return [name, { dtype, shape, bytes: file.slice(8 + length + start, 8 + length + stop) }];
    }),
  );
}

/**
 * The numbers of a tensor; those of 16 bits as float32.
 *
 * @param {StoredTensor} tensor
 * @returns {Float32Array | Float64Array}
 */
export function readNumbers({ dtype, shape, bytes }) {
  const numbers = decodeNumbers(dtype, bytes);
  if (numbers.length !== shape.reduce((product, size) => product * size, 1)) throw new Error(t("A file of tensors is cut off or damaged"));
  return numbers;
}

/**
 * @param {string} dtype
 * @param {ArrayBuffer} bytes
 */
function decodeNumbers(dtype, bytes) {
  if (dtype === "F32") return new Float32Array(bytes);
  if (dtype === "F64") return new Float64Array(bytes);
  if (dtype === "BF16") {
    const words = new Uint32Array(new Uint16Array(bytes)); // the upper half of a float32
    return new Float32Array(words.map((word) => word << 16).buffer);
  }
  if (dtype === "F16") return Float32Array.from(new Uint16Array(bytes), decodeHalf);
  throw new Error(t("Numbers of type {0} are not read here", dtype));
}

/** @param {number} half */
function decodeHalf(half) {
  const [sign, exponent, fraction] = [half >> 15 ? -1 : 1, (half >> 10) & 31, half & 1023];
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return sign * (exponent ? 2 ** (exponent - 15) * (1 + fraction / 1024) : 2 ** -14 * (fraction / 1024));
}
