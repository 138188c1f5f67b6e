// One map that can be zoomed from all tokens at once down to single weights.
//
// The canvas shows tiles of the level whose cells are at least one device pixel, so that each pixel
// is the exact mean of its cell. Wheel, pinch and drag are d3-zoom's; the arrow keys move a cell
// cursor, + and − zoom around it. What stands under pointer or cursor is told in full to `onCell`.

import { select } from "d3-selection";
import { zoom, zoomIdentity, type ZoomBehavior, type ZoomTransform } from "d3-zoom";
import { drawColumns, drawRows, drawTitles, labelLength, overhang, rowMargin, slantedHeight, type Axis, type Pen } from "./axes";
import { inkOn, paint, paintDifference, table, onScale, type Curve, type Ramp, type Table } from "./colour";
import { visibleTo } from "./chance";
import { h, hundredths } from "./dom";
import type { Place } from "./manifest";
import { TILE } from "./source";
import { SvgPen } from "./svgpen";
import { Tiles, smallTile, type FetchTile, type Tile, type TileAt } from "./tiles";

export interface Cell {
  t: number;
  s: number;
  rows: number; // how many queries and keys the cell under the pointer covers
  columns: number;
  value: number | undefined; // the mean of the cell; undefined while it is on its way
}
export interface MapOptions {
  place: Place;
  rows: string[];
  columns: string[];
  fetch: FetchTile;
  label: string;
  small: number; // cells on a side of the map that stands in for tiles on their way
  ramp: () => Ramp;
  curve: Curve;
  difference?: boolean;
  at?: [number, number, number] | null;
  onMove?: (at: [number, number, number]) => void;
  onCell?: (cell: Cell | null, kept: boolean) => void;
  /** Called when tiles have come, and when the scale has changed. */
  onLoad?: (map: Heatmap) => void;
  /** The maps, this one among them, that have one scale together. */
  peers?: () => Heatmap[];
}

const CELL_MOST = 72; // pixels a token at the closest zoom
const HATCH = 7; // pixels between the lines over cells that are hidden
const NUMBERS = 46; // pixels a cell needs to show its weight
const quiet = () => matchMedia("(prefers-reduced-motion: reduce)").matches;

export class Heatmap {
  readonly element: HTMLElement;
  readonly canvas: HTMLCanvasElement;
  readonly tiles: Tiles;
  cursor: { t: number; s: number } | null = null;
  private draw: CanvasRenderingContext2D;
  private readonly zoomer: ZoomBehavior<HTMLCanvasElement, unknown>;
  private transform: ZoomTransform = zoomIdentity;
  private base = { x: 1, y: 1 };
  private margin = { left: 60, top: 60 };
  private plot = { width: 1, height: 1 };
  private hover: { t: number; s: number } | null = null;
  private colours: Table | null = null;
  private style = 0; // counts changes of colour, so that painted tiles know when they are stale
  private frame = 0;
  private readonly watcher: ResizeObserver;
  private quietly = false;
  private most = 1; // the closest zoom
  private told = ""; // the scale that onLoad was last called for

  constructor(readonly options: MapOptions) {
    this.canvas = h("canvas", {
      tabindex: 0,
      role: "application",
      "aria-roledescription": "attention map",
      "aria-label": options.label,
    });
    this.element = h("div", { class: "map" }, this.canvas);
    this.draw = this.canvas.getContext("2d")!;
    this.tiles = new Tiles(options.place, options.fetch, () => {
      this.redraw();
      options.onLoad?.(this);
    }, options.curve === "chance" && !options.difference);
    this.zoomer = zoom<HTMLCanvasElement, unknown>()
      // With all of the map in view one finger has nothing to move: it scrolls the page.
      .filter((event: MouseEvent & TouchEvent) => !event.button && (this.transform.k > 1 || event.touches?.length !== 1))
      .on("zoom", (event) => this.moved(event.transform, event.sourceEvent !== null));
    select(this.canvas).call(this.zoomer).on("dblclick.zoom", null);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.point(null));
    this.canvas.addEventListener("click", (event) => this.pick(event));
    this.canvas.addEventListener("dblclick", () => this.fit());
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    this.canvas.addEventListener("focus", () => this.redraw());
    this.canvas.addEventListener("blur", () => this.redraw());
    this.watcher = new ResizeObserver(() => this.resize());
    this.watcher.observe(this.element);
  }

  /** Differences have no chance to be compared with. */
  private get curve(): Curve {
    return this.options.difference && this.options.curve === "chance" ? "root" : this.options.curve;
  }

  close(): void {
    this.watcher.disconnect();
    cancelAnimationFrame(this.frame);
    this.tiles.close();
  }

  /** Colours changed: theme, palette or curve. */
  restyle(): void {
    this.colours = null;
    this.style += 1;
    this.redraw();
  }

  get at(): [number, number, number] {
    const { x, y, k } = this.transform;
    return [
      (this.plot.height / 2 - y) / (k * this.base.y),
      (this.plot.width / 2 - x) / (k * this.base.x),
      k,
    ];
  }

  setAt([t, s, k]: [number, number, number]): void {
    const scale = Math.min(this.most, Math.max(1, k));
    const centre = zoomIdentity
      .translate(this.plot.width / 2 - scale * this.base.x * s, this.plot.height / 2 - scale * this.base.y * t)
      .scale(scale);
    this.quietly = true;
    select(this.canvas).call(this.zoomer.transform, this.hold(centre));
    this.quietly = false;
  }

  fit(): void {
    this.glide((target) => this.zoomer.transform(target, this.hold(zoomIdentity)));
  }

  zoomBy(factor: number): void {
    const cell = this.cursor;
    const around: [number, number] | undefined = cell
      ? [this.columnAxis().start + (cell.s + 0.5) * this.step.x, this.rowAxis().start + (cell.t + 0.5) * this.step.y]
      : undefined;
    this.glide((target) => this.zoomer.scaleBy(target, factor, around));
  }

  private glide(change: (target: any) => void): void {
    const target: any = select(this.canvas);
    change(quiet() ? target : target.transition().duration(180));
  }

  private get step(): { x: number; y: number } {
    return { x: this.base.x * this.transform.k, y: this.base.y * this.transform.k };
  }

  private rowAxis(): Axis {
    const { place, rows } = this.options;
    return { tokens: rows, named: place.queries !== "positions", start: this.transform.y, step: this.step.y, size: this.plot.height };
  }

  private columnAxis(): Axis {
    const { place, columns } = this.options;
    return { tokens: columns, named: place.keys !== "positions", start: this.transform.x, step: this.step.x, size: this.plot.width };
  }

  get levels(): { lt: number; ls: number } {
    const level = (step: number) => Math.max(0, Math.ceil(-Math.log2(step * (devicePixelRatio || 1)) - 1e-9));
    return { lt: level(this.step.y), ls: level(this.step.x) };
  }

  get pen(): Pen {
    const style = getComputedStyle(this.element);
    const read = (name: string) => style.getPropertyValue(name).trim();
    return { font: `12px ${style.fontFamily}`, ink: read("--ink"), muted: read("--muted"), accent: read("--accent") };
  }

  private resize(): void {
    const { place, rows, columns } = this.options;
    const [width, height] = [this.element.clientWidth, this.element.clientHeight];
    if (width < 40 || height < 40) return;
    const before = this.plot.width > 1 ? this.at : (this.options.at ?? null);
    const scale = devicePixelRatio || 1;
    this.canvas.width = Math.round(width * scale);
    this.canvas.height = Math.round(height * scale);
    const pen = this.pen;
    this.margin = {
      left: Math.min(width / 3, rowMargin(this.draw, rows, place.queries !== "positions", pen)),
      top: Math.min(height / 3, slantedHeight(labelLength(this.draw, columns, place.keys !== "positions", pen))),
    };
    const right = Math.max(30, Math.min(width / 6, overhang(this.draw, columns, pen)));
    this.plot = { width: width - this.margin.left - right, height: height - this.margin.top - 10 };
    const [x, y] = [this.plot.width / place.n_keys, this.plot.height / place.n_queries];
    const square = Math.min(x, y);
    // Cells are square unless the map is so long and thin that it would be a thread.
    const thin = Math.max(x, y) / square > 6;
    this.base = thin ? { x: Math.min(x, CELL_MOST), y: Math.min(y, CELL_MOST) } : { x: Math.min(square, CELL_MOST), y: Math.min(square, CELL_MOST) };
    this.most = Math.max(1.5, CELL_MOST / Math.min(this.base.x, this.base.y));
    this.zoomer
      .extent([[0, 0], [this.plot.width, this.plot.height]])
      .constrain((transform) => this.hold(transform))
      .scaleExtent([1, this.most]);
    this.setAt(before ?? [0, 0, 1]);
    this.redraw();
  }

  /** The map stays in the plot; where it is smaller it lies in the middle of its upper edge. */
  private hold(transform: ZoomTransform): ZoomTransform {
    const { place } = this.options;
    const pull = (at: number, size: number, plot: number, rest: number) =>
      size <= plot ? (plot - size) * rest : Math.min(0, Math.max(plot - size, at));
    const x = pull(transform.x, this.base.x * place.n_keys * transform.k, this.plot.width, 0.5);
    const y = pull(transform.y, this.base.y * place.n_queries * transform.k, this.plot.height, 0);
    return zoomIdentity.translate(x, y).scale(transform.k);
  }

  private moved(transform: ZoomTransform, byHand: boolean): void {
    this.transform = transform;
    this.canvas.style.touchAction = transform.k > 1 ? "none" : "pan-y";
    this.redraw();
    if (!this.quietly || byHand) this.options.onMove?.(this.at);
  }

  private place(event: MouseEvent): { t: number; s: number } | null {
    const box = this.canvas.getBoundingClientRect();
    const x = event.clientX - box.left - this.margin.left;
    const y = event.clientY - box.top - this.margin.top;
    if (x < 0 || y < 0 || x > this.plot.width || y > this.plot.height) return null;
    const s = Math.floor((x - this.transform.x) / this.step.x);
    const t = Math.floor((y - this.transform.y) / this.step.y);
    const { n_queries, n_keys } = this.options.place;
    return s >= 0 && t >= 0 && s < n_keys && t < n_queries ? { t, s } : null;
  }

  /** null: the pointer has left. */
  private point(event: PointerEvent | null): void {
    this.hover = event && this.place(event);
    this.options.onCell?.(this.hover ? this.cell(this.hover) : this.cursor && this.cell(this.cursor), false);
    this.redraw();
  }

  /** Outline the cell that is pointed at in a map beside this one. */
  follow(cell: { t: number; s: number } | null): void {
    const { n_queries, n_keys } = this.options.place;
    this.hover = cell && cell.t < n_queries && cell.s < n_keys ? { t: cell.t, s: cell.s } : null;
    this.canvas.dataset.hover = this.hover ? `${this.hover.t},${this.hover.s}` : "";
    this.redraw();
  }

  private pick(event: MouseEvent): void {
    const here = this.place(event);
    if (here) this.setCursor(here);
  }

  setCursor(cell: { t: number; s: number }): void {
    this.cursor = cell;
    this.options.onCell?.(this.cell(cell), true);
    this.redraw();
  }

  /** What is known of the cell that covers a pair of tokens: at the level shown, or the small one. */
  cell({ t, s }: { t: number; s: number }): Cell {
    const fine = this.cellAt(t, s, this.levels);
    return fine.value === undefined && this.tiles.problem ? this.cellAt(t, s, smallTile(this.options.place, this.options.small)) : fine;
  }

  private cellAt(t: number, s: number, { lt, ls }: { lt: number; ls: number }): Cell {
    const { n_queries, n_keys } = this.options.place;
    const [y, x] = [t >> lt, s >> ls];
    const tile = this.tiles.get({ lt, ls, ti: Math.floor(y / TILE), si: Math.floor(x / TILE) });
    const value = tile && tile.values[(y % TILE) * tile.width + (x % TILE)];
    const covered = (at: number, level: number, length: number) => Math.min(length, ((at >> level) + 1) << level) - ((at >> level) << level);
    return { t, s, rows: covered(t, lt, n_queries), columns: covered(s, ls, n_keys), value };
  }

  /** The end of the colour scale being shown, and whether cells may lie beyond it. */
  get scale(): [number, boolean] {
    const all = (this.options.peers?.() ?? [this]).map((map) => map.ownScale);
    const max = Math.max(...all.map(([end]) => end));
    return [max, all.some(([, most]) => most > max)];
  }

  private get ownScale(): [number, number] {
    const { lt, ls } = this.tiles.problem ? smallTile(this.options.place, this.options.small) : this.levels;
    return [this.tiles.largest(lt, ls), this.tiles.most(lt, ls)];
  }

  private key(event: KeyboardEvent): void {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const { lt, ls } = this.levels;
    const moves: Record<string, [number, number]> = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    if (move && event.shiftKey) {
      this.glide((target) => this.zoomer.translateBy(target, (-move[1] * 120) / this.transform.k, (-move[0] * 120) / this.transform.k));
    } else if (move) {
      const { n_queries, n_keys } = this.options.place;
      const from = this.cursor ?? { t: Math.floor(this.at[0]) - move[0], s: Math.floor(this.at[1]) - move[1] };
      const keep = (value: number, count: number) => Math.min(count - 1, Math.max(0, value));
      this.setCursor({ t: keep(from.t + move[0] * 2 ** lt, n_queries), s: keep(from.s + move[1] * 2 ** ls, n_keys) });
      this.reveal();
    } else if (event.key === "+" || event.key === "=") this.zoomBy(2);
    else if (event.key === "-" || event.key === "_") this.zoomBy(0.5);
    else if (event.key === "0") this.fit();
    else return;
    event.preventDefault();
    event.stopPropagation();
  }

  /** Bring the cursor back into view when the keys have led it out. */
  private reveal(): void {
    if (!this.cursor) return;
    const x = this.transform.x + (this.cursor.s + 0.5) * this.step.x;
    const y = this.transform.y + (this.cursor.t + 0.5) * this.step.y;
    if (x < 0 || y < 0 || x > this.plot.width || y > this.plot.height) {
      this.setAt([this.cursor.t + 0.5, this.cursor.s + 0.5, this.transform.k]);
      this.options.onMove?.(this.at);
    }
  }

  /** What is on the screen as SVG: cells as they are, letters as letters. */
  toSvg(ground: string): string {
    const { draw } = this;
    const pen = new SvgPen(draw, this.element.clientWidth, this.element.clientHeight, ground);
    this.draw = pen as unknown as CanvasRenderingContext2D;
    try {
      this.paintFrame();
    } finally {
      this.draw = draw;
    }
    this.redraw();
    return pen.text;
  }

  redraw(): void {
    if (!this.frame) this.frame = requestAnimationFrame(() => this.paintFrame());
  }

  private paintFrame(): void {
    this.frame = 0;
    const scale = devicePixelRatio || 1;
    const { draw, margin, plot } = this;
    const pen = this.pen;
    draw.setTransform(scale, 0, 0, scale, 0, 0);
    draw.clearRect(0, 0, this.canvas.width, this.canvas.height);
    draw.save();
    draw.translate(margin.left, margin.top);
    this.paintTiles(scale);
    this.hatch(pen);
    draw.restore();
    drawTitles(draw, margin.left + Math.max(0, this.transform.x), margin.top, pen);
    const chosen = this.hover ?? this.cursor;
    draw.save();
    draw.translate(0, margin.top);
    drawRows(draw, this.rowAxis(), margin.left + Math.max(0, this.transform.x), chosen?.t ?? null, pen);
    draw.restore();
    draw.save();
    draw.translate(margin.left, 0);
    drawColumns(draw, this.columnAxis(), margin.top, chosen?.s ?? null, pen);
    draw.restore();
    draw.save();
    draw.translate(margin.left, margin.top);
    draw.beginPath();
    draw.rect(-1, -1, plot.width + 2, plot.height + 2);
    draw.clip();
    this.paintNumbers();
    this.manifest(this.hover, pen.accent, 1);
    this.manifest(this.cursor, pen.accent, document.activeElement === this.canvas ? 2.5 : 1.5);
    draw.restore();
    this.canvas.dataset.ready = this.tiles.waiting ? "no" : "yes";
    if (this.told !== String(this.scale)) {
      this.told = String(this.scale);
      this.options.onLoad?.(this);
    }
  }

  /** The tiles in view at the level of the zoom, and the small one that stands in for the others. */
  private inView(): TileAt[] {
    const { lt, ls } = this.levels;
    const { n_queries, n_keys } = this.options.place;
    const span = (start: number, size: number, step: number, level: number, count: number): [number, number] => {
      const tile = TILE * 2 ** level;
      const first = Math.max(0, Math.floor(-start / step / tile));
      return [first, Math.min(Math.ceil(count / tile), Math.ceil((size - start) / step / tile))];
    };
    const [t0, t1] = span(this.transform.y, this.plot.height, this.step.y, lt, n_queries);
    const [s0, s1] = span(this.transform.x, this.plot.width, this.step.x, ls, n_keys);
    const list: TileAt[] = [];
    for (let ti = t0; ti < t1; ti += 1) for (let si = s0; si < s1; si += 1) list.push({ lt, ls, ti, si });
    const far = (at: TileAt) => Math.hypot(at.ti + 0.5 - (t0 + t1) / 2, at.si + 0.5 - (s0 + s1) / 2);
    return list.sort((a, b) => far(a) - far(b));
  }

  private paintTiles(scale: number): void {
    const { draw, plot, transform, step } = this;
    const { n_queries, n_keys } = this.options.place;
    const right = Math.min(plot.width, transform.x + n_keys * step.x);
    const bottom = Math.min(plot.height, transform.y + n_queries * step.y);
    draw.beginPath();
    draw.rect(0, 0, right, bottom);
    draw.clip();
    const small = smallTile(this.options.place, this.options.small);
    const list = this.inView();
    const missing = list.some((at) => !this.tiles.get(at));
    this.tiles.want(missing ? [small, ...list] : list);
    const below = missing ? this.tiles.get(small) : undefined;
    if (below) this.paintTile(below, scale);
    for (const at of list) {
      const tile = this.tiles.get(at);
      if (tile) this.paintTile(tile, scale);
    }
  }

  private paintTile(tile: Tile, scale: number): void {
    const { lt, ls } = tile;
    this.colours ??= table(this.options.ramp());
    const max = this.options.peers ? this.scale[0] : this.tiles.largest(lt, ls);
    const curve = this.curve;
    const mark = `${max}|${curve}|${this.style}`;
    if (!tile.canvas || tile.painted !== mark) {
      tile.canvas ??= h("canvas", { width: tile.width, height: tile.height });
      const how = this.options.difference ? paintDifference : paint;
      tile.canvas.getContext("2d")!.putImageData(how(tile.shown, tile.width, max, curve, this.colours), 0, 0);
      tile.painted = mark;
    }
    const snap = (value: number, margin: number) => Math.round((value + margin) * scale) / scale - margin;
    const { left, top } = this.margin;
    const cell = { x: this.step.x * 2 ** ls, y: this.step.y * 2 ** lt };
    const x0 = snap(this.transform.x + tile.si * TILE * cell.x, left);
    const y0 = snap(this.transform.y + tile.ti * TILE * cell.y, top);
    const x1 = snap(this.transform.x + (tile.si * TILE + tile.width) * cell.x, left);
    const y1 = snap(this.transform.y + (tile.ti * TILE + tile.height) * cell.y, top);
    this.draw.imageSmoothingEnabled = false;
    this.draw.drawImage(tile.canvas, x0, y0, x1 - x0, y1 - y0);
  }

  /** Cells that a causal rule hides altogether are unlike those whose weight is 0. */
  private hatch(pen: Pen): void {
    const { n_queries, n_keys, causal } = this.options.place;
    if (!causal) return;
    const { draw, plot, transform, step } = this;
    const { lt, ls } = this.levels;
    const tall = step.y * 2 ** lt;
    const first = Math.max(0, Math.floor(-transform.y / tall));
    const last = Math.min(Math.ceil(n_queries / 2 ** lt), Math.ceil((plot.height - transform.y) / tall));
    const right = transform.x + n_keys * step.x;
    draw.beginPath();
    for (let row = first; row < last; row += 1) {
      const seen = Math.min(n_queries, (row + 1) * 2 ** lt) + n_keys - n_queries;
      const x = transform.x + Math.ceil(seen / 2 ** ls) * 2 ** ls * step.x;
      if (x < right) draw.rect(x, transform.y + row * tall, right - x, tall);
    }
    draw.clip();
    draw.beginPath();
    for (let x = -plot.height; x < plot.width; x += HATCH) {
      draw.moveTo(x, plot.height);
      draw.lineTo(x + plot.height, 0);
    }
    draw.strokeStyle = pen.muted;
    draw.globalAlpha = 0.35;
    draw.lineWidth = 1;
    draw.stroke();
  }

  /** Close up, each cell shows its weight. */
  private paintNumbers(): void {
    const { step, draw, transform, plot } = this;
    const { lt, ls } = this.levels;
    if (lt || ls || step.x < NUMBERS || step.y < 22) return;
    const { n_queries, n_keys } = this.options.place;
    const [max] = this.scale;
    const ramp = this.options.ramp();
    draw.font = `11px ${getComputedStyle(this.element).fontFamily}`;
    draw.textAlign = "center";
    draw.textBaseline = "middle";
    draw.direction = "ltr";
    for (let t = Math.max(0, Math.floor(-transform.y / step.y)); t < Math.min(n_queries, (plot.height - transform.y) / step.y); t += 1) {
      for (let s = Math.max(0, Math.floor(-transform.x / step.x)); s < Math.min(n_keys, (plot.width - transform.x) / step.x); s += 1) {
        const { value } = this.cell({ t, s });
        if (value === undefined || value === 0) continue;
        const size = onScale(Math.abs(this.curve === "chance" ? value * visibleTo(this.options.place, t) : value), max, this.curve);
        draw.fillStyle = inkOn(ramp(this.options.difference ? 0.5 + (Math.sign(value) * size) / 2 : size));
        const words = hundredths(value, this.options.difference ?? false);
        draw.fillText(words, transform.x + (s + 0.5) * step.x, transform.y + (t + 0.5) * step.y);
      }
    }
  }

  private manifest(cell: { t: number; s: number } | null, colour: string, width: number): void {
    if (!cell) return;
    const { lt, ls } = this.levels;
    const [y, x] = [(cell.t >> lt) << lt, (cell.s >> ls) << ls];
    const [w, tall] = [Math.max(3, this.step.x * 2 ** ls), Math.max(3, this.step.y * 2 ** lt)];
    this.draw.strokeStyle = colour;
    this.draw.lineWidth = width;
    this.draw.strokeRect(this.transform.x + x * this.step.x, this.transform.y + y * this.step.y, w, tall);
  }
}
