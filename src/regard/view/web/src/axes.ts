// The edges of a map: words where they fit, positions where they do not.

import { RIGHT_TO_LEFT, label } from "./words";

export interface Axis {
  tokens: string[];
  named: boolean; // whether the tokens are words, or only positions
  start: number; // pixels from the edge of the plot to token 0
  step: number; // pixels a token
  size: number; // pixels of the plot along this axis
}

export interface Pen {
  font: string;
  ink: string;
  muted: string;
  accent: string;
}

export const FITS = 12; // pixels a token needs for its label
const NUMBER = 40; // pixels of a position, with some space
const TITLES = 70; // pixels beside the rows that the names of the axes need
const SLANT = -Math.PI / 3.4;

export function visibleRange(axis: Axis): [number, number] {
  const first = Math.max(0, Math.floor(-axis.start / axis.step));
  const last = Math.min(axis.tokens.length, Math.ceil((axis.size - axis.start) / axis.step));
  return [first, Math.max(first, last)];
}

interface Mark {
  at: number;
  text: string;
  strong: boolean;
}

/** What is written along an axis: every word, or round positions; always the chosen one, which has so
 * many pixels of room on either side. */
function marks(axis: Axis, chosen: number | null, room = 16): Mark[] {
  const [first, last] = visibleRange(axis);
  const out: Mark[] = [];
  if (axis.step >= FITS) {
    for (let at = first; at < last; at += 1) {
      out.push({ at, text: label(axis.tokens[at]!), strong: at === chosen });
    }
    return out;
  }
  const every = roundStep((last - first) / Math.max(2, Math.min(10, axis.size / 90)));
  for (let at = Math.ceil(first / every) * every; at < last; at += every) {
    const near = chosen !== null && Math.abs(chosen - at) * axis.step < room;
    if (!near) {
      out.push({ at, text: (axis.named ? at : Number(axis.tokens[at])).toLocaleString("en"), strong: false });
    }
  }
  if (chosen !== null && chosen >= first && chosen < last) {
    out.push({ at: chosen, text: label(axis.tokens[chosen]!, 16), strong: true });
  }
  return out;
}

/** 1, 2 or 5 times a power of ten: the one nearest to a number. */
function roundStep(near: number): number {
  const power = 10 ** Math.floor(Math.log10(Math.max(1, near)));
  const times = near / power;
  return power * (times >= Math.sqrt(50) ? 10 : times >= Math.sqrt(10) ? 5 : times >= Math.SQRT2 ? 2 : 1);
}

function write(draw: CanvasRenderingContext2D, text: string, x: number, y: number, most: number): void {
  draw.direction = RIGHT_TO_LEFT.test(text) ? "rtl" : "ltr";
  draw.fillText(text, x, y, most);
}

export function drawRows(draw: CanvasRenderingContext2D, axis: Axis, edge: number, chosen: number | null, pen: Pen): void {
  draw.textAlign = "right";
  draw.textBaseline = "middle";
  for (const mark of marks(axis, chosen)) {
    const y = axis.start + (mark.at + 0.5) * axis.step;
    if (y < 0 || y > axis.size) continue;
    draw.font = mark.strong ? `600 ${pen.font}` : pen.font;
    draw.fillStyle = mark.strong ? pen.accent : pen.muted;
    write(draw, mark.text, edge - 8, y, 140);
  }
}

export function drawColumns(draw: CanvasRenderingContext2D, axis: Axis, edge: number, chosen: number | null, pen: Pen): void {
  draw.textBaseline = "middle";
  const flat = axis.step < FITS;
  draw.font = `600 ${pen.font}`;
  const wide = flat && chosen !== null ? draw.measureText(label(axis.tokens[chosen]!, 16)).width : 0;
  for (const mark of marks(axis, chosen, Math.max(16, Math.min(120, wide) / 2 + NUMBER / 2))) {
    const x = axis.start + (mark.at + 0.5) * axis.step;
    if (x < 0 || x > axis.size) continue;
    draw.font = mark.strong ? `600 ${pen.font}` : pen.font;
    draw.fillStyle = mark.strong ? pen.accent : pen.muted;
    if (flat) {
      draw.textAlign = "center";
      write(draw, mark.text, x, edge - 11, 120);
      continue;
    }
    draw.save();
    draw.translate(x, edge - 7);
    draw.rotate(SLANT);
    draw.textAlign = "left";
    write(draw, mark.text, 0, 0, edge / Math.sin(-SLANT) - 12);
    draw.restore();
  }
}

/** What the two axes are, in the corner between them. */
export function drawTitles(draw: CanvasRenderingContext2D, x: number, y: number, pen: Pen): void {
  draw.font = `600 11px ${pen.font.slice(pen.font.indexOf(" ") + 1)}`;
  draw.fillStyle = pen.muted;
  draw.textAlign = "right";
  draw.textBaseline = "alphabetic";
  draw.direction = "ltr";
  draw.fillText("keys →", x - 8, y - 24);
  draw.fillText("queries ↓", x - 8, y - 10);
}

/** How long the labels of an axis are, in pixels along their own line. */
export function labelLength(draw: CanvasRenderingContext2D, tokens: string[], named: boolean, pen: Pen): number {
  draw.font = pen.font;
  if (!named) return 44;
  let most = 30;
  const every = Math.max(1, Math.floor(tokens.length / 400));
  for (let at = 0; at < tokens.length; at += every) {
    most = Math.max(most, draw.measureText(label(tokens[at]!)).width);
  }
  return Math.min(most, 132);
}

/** The pixels to the left of a map, for the labels of its rows and the names of its axes. */
export function rowMargin(draw: CanvasRenderingContext2D, tokens: string[], named: boolean, pen: Pen): number {
  return Math.max(TITLES, labelLength(draw, tokens, named, pen) + 16);
}

/** How far the label of the last column reaches beyond it, in pixels. */
export function overhang(draw: CanvasRenderingContext2D, tokens: string[], pen: Pen): number {
  draw.font = pen.font;
  return Math.min(draw.measureText(label(tokens.at(-1) ?? "")).width, 132) * Math.cos(SLANT);
}

export const slantedHeight = (length: number): number => length * Math.sin(-SLANT) + 16;
