// Colours for weights. Every scale runs evenly from little light to much (or back), so that it reads
// the same to colour-blind eyes and in grey; the one for differences runs from orange to blue.

export type PaletteName = "regard" | "viridis" | "cividis";
export type Curve = "linear" | "root" | "log" | "chance";
export const PALETTES: readonly PaletteName[] = ["regard", "viridis", "cividis"];
export const CURVES: readonly Curve[] = ["root", "linear", "log", "chance"];
export const FAINT = 0.1; // times chance, from which on there is colour

const LIGHT = ["#fdfcfa", "#d5e5e0", "#93c4bf", "#4f9aa6", "#2a6b8b", "#1c3f66", "#111c38"];
const DARK = ["#12171d", "#173242", "#1c5868", "#2f8583", "#6bb291", "#b9d9a2", "#fbf6cf"];
const DIFFERENT_LIGHT = ["#8a3b00", "#d9782d", "#f2c79b", "#fdfcfa", "#a9cbe6", "#3c84bd", "#0c3d70"];
const DIFFERENT_DARK = ["#ffb877", "#d9782d", "#6b3f1e", "#12171d", "#1c4669", "#3c8fd0", "#a8d6ff"];
// Every eleventh colour of matplotlib's; what lies between is off by a few steps of 255 at most.
const VIRIDIS = hexes("440154471164482071472e7c443b843f48893a548c34608d2f6c8e2a768e26818e228b8d1f958b1fa08824aa832fb47c42be7158c76570cf578bd646a8db34c5e021e2e418fde725");
const CIVIDIS = hexes("00224e002a610031711c396f2d416d3a486c45506c50576c5b606e6568706e6f73777777817f788c8878969077a19975ada272b9ab6dc4b468d0be62dcc859e8d24ff5dc41fee838");

export type Ramp = (at: number) => string;

export function ramp(name: PaletteName, dark: boolean): Ramp {
  return blend(name === "viridis" ? VIRIDIS : name === "cividis" ? CIVIDIS : dark ? DARK : LIGHT);
}

export function differenceRamp(dark: boolean): Ramp {
  // The middle is the page's own colour: no difference, no ink.
  return blend(dark ? DIFFERENT_DARK : DIFFERENT_LIGHT);
}

function hexes(joined: string): string[] {
  return joined.match(/.{6}/g)!.map((hex) => `#${hex}`);
}

/** Linear between colours that lie at equal distances. */
function blend(stops: string[]): Ramp {
  const ends = stops.map(channels);
  return (at) => {
    const along = Math.min(1, Math.max(0, at)) * (ends.length - 1);
    const first = Math.min(ends.length - 2, Math.floor(along));
    const [from, to] = [ends[first]!, ends[first + 1]!];
    return `rgb(${from.map((value, of) => Math.round(value + (to[of]! - value) * (along - first))).join(", ")})`;
  };
}

function channels(colour: string): [number, number, number] {
  if (colour.startsWith("#")) {
    const n = parseInt(colour.slice(1), 16);
    return [(n >> 16) & 255, (n >> 8) & 255, n & 255];
  }
  const [r = 0, g = 0, b = 0] = (colour.match(/[\d.]+/g) ?? []).map(Number);
  return [r, g, b];
}

/** 256 colours as the pixels of an image; what is not a number has a colour of its own. */
export interface Table {
  pixels: Uint32Array;
  missing: number;
}

export const MISSING = "#d0489b";

function pixel([r, g, b]: [number, number, number]): number {
  return ((255 << 24) | (Math.round(b) << 16) | (Math.round(g) << 8) | Math.round(r)) >>> 0;
}

export function table(colours: Ramp): Table {
  const pixels = Uint32Array.from({ length: 256 }, (_, at) => pixel(channels(colours(at / 255))));
  return { pixels, missing: pixel(channels(MISSING)) };
}

/** Where a value lies on the scale, 0 to 1; `log` shows four powers of ten below the largest, and
 * `chance`, whose values are times chance, runs by powers too, from a tenth of it. */
export function onScale(value: number, max: number, curve: Curve): number {
  if (!(value > 0) || !(max > 0)) return 0;
  const share = Math.min(1, value / max);
  if (curve === "linear") return share;
  if (curve === "root") return Math.sqrt(share);
  if (curve === "chance") return max > FAINT ? Math.max(0, Math.log(Math.min(value, max) / FAINT) / Math.log(max / FAINT)) : 0;
  return Math.max(0, 1 + Math.log10(share) / 4);
}

const INKS = ["#15202b", "#ffffff", "#000000"];
const READABLE = 4.5; // of the contrast that WCAG 2 defines

function luminance(colour: string): number {
  const [r, g, b] = channels(colour).map((value) => (value <= 10 ? value / 3294.6 : ((value / 255 + 0.055) / 1.055) ** 2.4)) as [number, number, number];
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** Ink that can be read on a colour: the first with enough contrast. */
export function inkOn(colour: string): string {
  const ground = luminance(colour);
  const contrast = (ink: string) => (Math.max(luminance(ink), ground) + 0.05) / (Math.min(luminance(ink), ground) + 0.05);
  return INKS.find((ink) => contrast(ink) >= READABLE) ?? "#ffffff";
}

export function paint(values: Float32Array, width: number, max: number, curve: Curve, colours: Table): ImageData {
  const image = new ImageData(width, values.length / width);
  const out = new Uint32Array(image.data.buffer);
  for (let at = 0; at < values.length; at += 1) {
    const value = values[at]!;
    out[at] = Number.isFinite(value)
      ? colours.pixels[Math.round(onScale(value, max, curve) * 255)]!
      : colours.missing;
  }
  return image;
}

/** Differences: the middle of the scale is no difference. */
export function paintDifference(values: Float32Array, width: number, max: number, curve: Curve, colours: Table): ImageData {
  const image = new ImageData(width, values.length / width);
  const out = new Uint32Array(image.data.buffer);
  for (let at = 0; at < values.length; at += 1) {
    const value = values[at]!;
    const size = onScale(Math.abs(value), max, curve) / 2;
    out[at] = Number.isFinite(value)
      ? colours.pixels[Math.round((0.5 + (value < 0 ? -size : size)) * 255)]!
      : colours.missing;
  }
  return image;
}

export function largest(values: Float32Array): number {
  let max = 0;
  for (const value of values) {
    const size = Math.abs(value);
    if (size > max && size < Infinity) max = size;
  }
  return max;
}

const MANY = 16_384; // cells, from which on a few may lie beyond the scale

/** The end of a colour scale: the largest weight, or in a map of very many almost the largest.
 *
 * The first queries of a long causal text have few keys, so their cells are far above all others;
 * with them as the measure, the rest would be pale. */
export function ceiling(values: Float32Array, means: boolean): number {
  if (!means && values.length < MANY) return largest(values);
  const seen = values.map(Math.abs).filter((value) => value > 0 && value < Infinity).sort();
  return seen.length > 200 ? seen[Math.floor(seen.length * 0.995)]! : largest(values);
}
