// Small maps of many heads, all on one scale: asked for when they come into view, and drawn with a
// pixel for a pixel of the screen, each the mean weight of what it covers, so that nothing is left
// out between two pixels.

import { chanceOf, overChance } from "./chance";
import { ceiling, largest, paint, table, type Curve, type Table } from "./colour";
import { colours, current, words, type Context } from "./context";
import type { Legend } from "./controls";
import { h } from "./dom";
import { mapPlace } from "./manifest";
import { cellsOf } from "./source";
import { smallTile } from "./tiles";

export type Picture = HTMLCanvasElement | HTMLImageElement;
const MANY = 600; // maps, from which on each is an image: thousands of canvases stop a browser for minutes

interface Thumb {
  picture: Picture;
  values: Float32Array;
  chance: Float32Array | null; // of each cell, where that is what values are held against
  top: number; // the end of its own scale
  width: number;
}

export class Thumbs {
  private readonly jobs = new Map<Element, () => Promise<void>>();
  private readonly running = new Set<Promise<void>>();
  private readonly sheet = h("canvas"); // that images are drawn on
  private readonly many: boolean;
  private drawn: Thumb[] = [];
  private waiting = new Set<Thumb>();
  private max = 0; // the end of the scale of all maps
  private most = 0; // the largest weight, which may lie beyond it
  private frame = 0;
  private table: [string, Table] | null = null;
  private readonly seen: IntersectionObserver;
  private readonly sized: ResizeObserver;

  /** `own`: each map has a scale of its own. */
  constructor(private readonly context: Context, grid: HTMLElement, private readonly legend: Legend, private readonly curve: Curve, private readonly own: boolean) {
    this.many = current(context).record.places.reduce((sum, place) => sum + place.n_heads, 0) > MANY;
    this.seen = new IntersectionObserver((entries) => {
      for (const { target } of entries.filter((entry) => entry.isIntersecting)) this.start(target);
    }, { rootMargin: "200px" });
    this.sized = new ResizeObserver(() => this.repaint());
    this.sized.observe(grid);
  }

  /** What a map is drawn in. */
  picture(): Picture {
    return this.many ? h("img", { alt: "" }) : h("canvas", { "aria-hidden": "true" });
  }

  watch(card: HTMLElement, picture: Picture, place: number, head: number): void {
    this.jobs.set(card, () => this.load(card, picture, place, head));
    this.seen.observe(card);
  }

  private start(card: Element): void {
    this.seen.unobserve(card);
    const done = this.jobs.get(card)?.().finally(() => this.running.delete(done!));
    this.jobs.delete(card);
    if (done) this.running.add(done);
  }

  /** Draw also the maps that have not been in view. */
  async all(): Promise<void> {
    for (const card of [...this.jobs.keys()]) this.start(card);
    await Promise.all(this.running);
    while (this.frame) await new Promise(requestAnimationFrame);
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
      else this.legend.update(this.max, this.most > this.max);
      const sized = [...this.waiting].map((thumb): [Thumb, number, number] => [thumb, thumb.picture.clientWidth, thumb.picture.clientHeight]);
      this.waiting.clear();
      for (const each of sized) this.draw(...each);
    });
  }

  private async load(card: HTMLElement, picture: Picture, place: number, head: number): Promise<void> {
    const { manifest, source, state } = this.context;
    const here = mapPlace(manifest.records[state.record]!.places[place]!);
    const { lt, ls } = smallTile(here, manifest.small);
    try {
      const values = await source.get(`map/${state.record}/${place}/${head}/${lt}/${ls}/0/0`);
      const width = cellsOf(here.n_keys, ls);
      const chance = this.curve === "chance" ? chanceOf(here, { lt, ls, ti: 0, si: 0 }, values.length / width, width) : null;
      const shown = chance ? overChance(values, chance) : values;
      const top = ceiling(shown, lt + ls > 0);
      const thumb = { picture, values, chance, top, width };
      this.most = Math.max(this.most, largest(shown));
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

  private draw({ picture, values, chance, top, width }: Thumb, wide: number, tall: number): void {
    const canvas = picture instanceof HTMLCanvasElement ? picture : this.sheet;
    const side = (length: number) => Math.max(1, Math.round(length * (devicePixelRatio || 1)));
    canvas.width = side(wide);
    canvas.height = side(tall);
    const scaled = (numbers: Float32Array) => pool(pool(numbers, numbers.length / width, width, canvas.width, 1), canvas.width, numbers.length / width, canvas.height, canvas.width);
    const pixels = chance ? overChance(scaled(values), scaled(chance)) : scaled(values);
    const max = this.own ? top : this.max;
    canvas.getContext("2d", { willReadFrequently: this.many })!.putImageData(paint(pixels, canvas.width, max, this.curve, this.colours()), 0, 0);
    if (picture instanceof HTMLImageElement) picture.src = canvas.toDataURL("image/png");
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
