// Small maps of many heads, all on one scale: asked for when they come into view, and drawn with a
// pixel for a pixel of the screen, each the mean weight of what it covers, so that nothing is left
// out between two pixels.

import { chanceOf, overChance } from "./chance";
import { ceiling, largest, paint, table, type Curve, type Table } from "./colour";
import { colours, words, type Context } from "./context";
import type { Legend } from "./controls";
import { mapPlace } from "./manifest";
import { cellsOf } from "./source";
import { smallTile } from "./tiles";

interface Thumb {
  canvas: HTMLCanvasElement;
  values: Float32Array;
  chance: Float32Array | null; // of each cell, where that is what values are held against
  top: number; // the end of its own scale
  width: number;
}

export class Thumbs {
  private readonly jobs = new Map<Element, () => Promise<void>>();
  private drawn: Thumb[] = [];
  private waiting = new Set<Thumb>();
  private max = 0; // the end of the scale of all maps
  private beyond = false; // whether cells lie beyond it
  private frame = 0;
  private table: [string, Table] | null = null;
  private readonly seen: IntersectionObserver;
  private readonly sized: ResizeObserver;

  /** `own`: each map has a scale of its own. */
  constructor(private readonly context: Context, grid: HTMLElement, private readonly legend: Legend, private readonly curve: Curve, private readonly own: boolean) {
    this.seen = new IntersectionObserver((entries) => {
      for (const { target } of entries.filter((entry) => entry.isIntersecting)) {
        this.seen.unobserve(target);
        void this.jobs.get(target)?.();
        this.jobs.delete(target);
      }
    }, { rootMargin: "200px" });
    this.sized = new ResizeObserver(() => this.repaint());
    this.sized.observe(grid);
  }

  watch(card: HTMLElement, canvas: HTMLCanvasElement, place: number, head: number): void {
    this.jobs.set(card, () => this.load(card, canvas, place, head));
    this.seen.observe(card);
  }

  forget(): void {
    this.seen.disconnect();
    this.jobs.clear();
    this.drawn = [];
    this.waiting.clear();
  }

  close(): void {
    this.forget();
    this.sized.disconnect();
    cancelAnimationFrame(this.frame);
  }

  repaint(): void {
    this.waiting = new Set(this.drawn);
    this.schedule();
  }

  /** Draw what waits for it in the next frame: all sizes are read first, so that the page is laid
   * out once and not once a map. */
  private schedule(): void {
    this.frame ||= requestAnimationFrame(() => {
      this.frame = 0;
      if (this.own) this.legend.updateOwn();
      else this.legend.update(this.max, this.beyond);
      const sized = [...this.waiting].map((thumb): [Thumb, number, number] => [thumb, thumb.canvas.clientWidth, thumb.canvas.clientHeight]);
      this.waiting.clear();
      for (const each of sized) this.draw(...each);
    });
  }

  private async load(card: HTMLElement, canvas: HTMLCanvasElement, place: number, head: number): Promise<void> {
    const { manifest, source, state } = this.context;
    const here = mapPlace(manifest.records[state.record]!.places[place]!);
    const { lt, ls } = smallTile(here, manifest.small);
    try {
      const values = await source.get(`map/${state.record}/${place}/${head}/${lt}/${ls}/0/0`);
      const width = cellsOf(here.n_keys, ls);
      const chance = this.curve === "chance" ? chanceOf(here, { lt, ls, ti: 0, si: 0 }, values.length / width, width) : null;
      const shown = chance ? overChance(values, chance) : values;
      const top = ceiling(shown, lt + ls > 0);
      const thumb = { canvas, values, chance, top, width };
      this.beyond ||= largest(shown) > Math.max(top, this.max);
      this.drawn.push(thumb);
      if (top > this.max) {
        this.max = top;
        this.repaint();
      } else {
        this.waiting.add(thumb);
        this.schedule();
      }
      card.dataset.cells = `${values.length / thumb.width} × ${thumb.width}`;
      card.dataset.ready = "yes";
    } catch (problem) {
      card.dataset.ready = "failed";
      card.title = words(problem);
      card.classList.add("missing");
    }
  }

  /** The colours as pixels, made once for all maps. */
  private colours(): Table {
    const key = `${this.context.state.palette}|${this.context.dark()}`;
    if (this.table?.[0] !== key) this.table = [key, table(colours(this.context))];
    return this.table[1];
  }

  private draw({ canvas, values, chance, top, width }: Thumb, wide: number, tall: number): void {
    const side = (length: number) => Math.max(1, Math.round(length * (devicePixelRatio || 1)));
    canvas.width = side(wide);
    canvas.height = side(tall);
    const scaled = (numbers: Float32Array) => pool(pool(numbers, numbers.length / width, width, canvas.width, 1), canvas.width, numbers.length / width, canvas.height, canvas.width);
    const pixels = chance ? overChance(scaled(values), scaled(chance)) : scaled(values);
    const max = this.own ? top : this.max;
    canvas.getContext("2d")!.putImageData(paint(pixels, canvas.width, max, this.curve, this.colours()), 0, 0);
  }
}

/** Means along one axis of a picture, of as many equal parts as asked; neighbours on the axis lie
 * `step` numbers apart, and there are `lines` of it. */
function pool(values: Float32Array, lines: number, length: number, parts: number, step: number): Float32Array {
  const out = new Float32Array(lines * parts);
  const line = (number: number, size: number) => (step === 1 ? number * size : number);
  for (let part = 0; part < parts; part += 1) {
    const [from, to] = [(part * length) / parts, ((part + 1) * length) / parts];
    for (let number = 0; number < lines; number += 1) {
      let sum = 0;
      for (let at = Math.floor(from); at < Math.min(length, Math.ceil(to)); at += 1) {
        const covered = Math.min(at + 1, to) - Math.max(at, from);
        if (covered > 0) sum += values[line(number, length) + at * step]! * covered;
      }
      out[line(number, parts) + part * step] = sum / (to - from);
    }
  }
  return out;
}
