// Controls that several pages share: which head, which colours, the scale's legend.

import { CURVES, FAINT, PALETTES, onScale, type Curve, type PaletteName, type Ramp } from "./colour";
import { colours, current, wordCurve, type Context } from "./context";
import { h, select, strip } from "./dom";
import { elementSvg } from "./domsvg";
import { sinksOf } from "./bare";
import type { Heatmap } from "./heatmap";
import { MEASURE_HINTS, MEASURE_WORDS, measureOf, offeredMeasures, type Measure } from "./measures";
import { allLayers, isMeantWith, keyTokens, placeLabel, type Recorded } from "./manifest";
import { about, score, spell, strength, told } from "./roles";
import type { HeadChoice } from "./source";
import { isSpecial, quoted } from "./words";

export interface Choice {
  record: Recorded;
  place: number;
  head: HeadChoice;
  means: boolean; // whether means over heads and layers can be chosen
  places?: number[];
  label?: string; // said before "Layer" and "Head", where there are two pickers
  choose(place: number, head: HeadChoice): void;
}

/** Two lists, layer and head; the means of all layers stand among the layers. */
export function headLists({ record, place, head, means, places, label = "", choose }: Choice): HTMLElement[] {
  const here = record.places[place]!;
  const all = places ?? record.places.map((_, at) => at);
  const layers: [string, string][] = all.map((at) => [String(at), placeLabel(record, at)]);
  for (const at of means ? all : []) {
    const first = all.find((other) => isMeantWith(record.places[other]!, record.places[at]!));
    const words = allLayers(record.places[at]!);
    if (first === at) layers.push([`all-${at}`, words[0]!.toUpperCase() + words.slice(1)]);
  }
  const whole = head === "all";
  const shown = whole ? `all-${all.find((at) => isMeantWith(record.places[at]!, here)) ?? place}` : String(place);
  const heads: [string, string][] = Array.from({ length: here.n_heads }, (_, at) => [String(at), `Head ${here.heads[at]}`]);
  if (means) heads.push(["layer", "Mean of this layer"]);
  return [
    select(`${label}Layer`, layers, shown, (value) => {
      if (value.startsWith("all-")) choose(Number(value.slice(4)), "all");
      else choose(Number(value), whole ? "layer" : head);
    }),
    select(`${label}Head`, whole ? [["all", "Mean of all heads"]] : heads, String(head), (value) => choose(place, value === "layer" ? value : Number(value))),
  ];
}

/** Layer and head, each with a list and steps to the neighbours; `means` adds means over heads. */
export function headPicker(context: Context, means: boolean, places?: number[]): HTMLElement {
  const { record } = current(context);
  const { place, head } = context.state;
  const lists = headLists({ record, place, head, means, ...(places && { places }), choose: (to, which) => stepTo(context, to, which) });
  const arrow = (words: string, sign: string, by: number) =>
    h("button", { type: "button", class: "step", "data-focus": `step${by + 1}`, "aria-label": words, title: words, text: sign, on: { click: () => stepHead(context, by) } });
  return h("div", { class: "picker" }, ...lists, h("div", { class: "steps" }, arrow("Previous head  [", "‹", -1), arrow("Next head  ]", "›", 1)));
}

export function stepTo(context: Context, place: number, head: HeadChoice): void {
  const { record } = current(context);
  const here = record.places[place];
  if (!here) return;
  const before = record.places[context.state.place]!;
  const same = before.n_queries === here.n_queries && before.n_keys === here.n_keys;
  const change = { place, head: typeof head === "number" ? Math.min(head, here.n_heads - 1) : head, also: [] };
  context.go(same ? change : { ...change, at: null, token: -1 });
}

/** The next head, going on into the next layer. */
export function stepHead(context: Context, by: number): void {
  const { record } = current(context);
  let [place, head] = [context.state.place, context.state.head];
  if (typeof head !== "number") head = by > 0 ? -1 : 0;
  head += by;
  if (head < 0) {
    place -= 1;
    head = (record.places[place]?.n_heads ?? 1) - 1;
  } else if (head >= record.places[place]!.n_heads) {
    place += 1;
    head = 0;
  }
  stepTo(context, place, head);
}

export function stepLayer(context: Context, by: number): void {
  stepTo(context, context.state.place + by, context.state.head);
}

const CURVE_WORDS: Record<Curve, string> = { root: "Root", linear: "Linear", log: "Log", chance: "× chance" };
const PALETTE_WORDS: Record<PaletteName, string> = { regard: "Tide", viridis: "Viridis", cividis: "Cividis" };

/** What words or cells are shaded by; nothing where there is no choice. */
export function measurePicker(context: Context): HTMLElement[] {
  const measure = measureOf(context);
  const options = offeredMeasures(context).map((name) => [name, MEASURE_WORDS[name]] as const);
  if (options.length < 2) return [];
  const choose = (by: string) => context.go({ by: by as Measure });
  const picker = options.length === 2 ? strip("Measure", options, measure, choose) : select("Measure", options, measure, choose);
  return [picker, ...MEASURE_HINTS[measure].map((text) => h("p", { class: "hint", text }))];
}

/** `curve`: the scale in use; `chance`: whether times chance can be told here. */
export function colourPicker(context: Context, curve: Curve, chance: boolean): HTMLElement {
  const { state } = context;
  const offered = CURVES.filter((name) => chance || name !== "chance");
  return h(
    "div",
    { class: "picker" },
    h("div", { class: "field" }, h("span", { text: "Scale" }), strip("Scale", offered.map((name) => [name, CURVE_WORDS[name]] as const), curve, (to) => context.go({ curve: to }))),
    select("Colours", PALETTES.map((name) => [name, PALETTE_WORDS[name]] as const), state.palette, (value) => context.go({ palette: value as PaletteName })),
  );
}

/** The scale with its numbers; `max` is what the darkest colour stands for. */
export class Legend {
  readonly element: HTMLElement;
  private readonly canvas: HTMLCanvasElement;
  private readonly ends: HTMLElement;

  constructor(private readonly context: Context, private readonly curve: Curve, private readonly signed: Ramp | null = null, of = "") {
    this.canvas = h("canvas", { width: 256, height: 1, "aria-hidden": "true" });
    this.ends = h("div", { class: "ends" });
    const chance = curve === "chance" && !signed ? h("p", { class: "hint", text: "Times chance: 1 is what each key would get if a query looked at all it may see alike." }) : null;
    this.element = h("div", { class: "legend", role: "group" }, of ? h("p", { class: "hint", text: of }) : null, this.canvas, this.ends, chance);
    this.update(0);
  }

  /** Each map has its own end. */
  updateOwn(): void {
    this.update(0);
    this.ends.replaceChildren(...["least", "", "most of each map"].map((text) => h("span", { text })));
    this.element.setAttribute("aria-label", "Colours run from the least to the most of each map");
  }

  /** `beyond`: some cells are above the end of the scale. */
  update(max: number, beyond = false): void {
    const ramp = this.signed ?? colours(this.context);
    const draw = this.canvas.getContext("2d")!;
    for (let x = 0; x < 256; x += 1) {
      draw.fillStyle = ramp(x / 255);
      draw.fillRect(x, 0, 1, 1);
    }
    const mid = this.signed ? 0 : invert(max, this.curve);
    const low = this.signed ? -max : this.curve === "log" ? max / 1e4 : this.curve === "chance" ? Math.min(FAINT, max) : 0;
    const spellOut = (value: number) => (value === 0 ? "0" : Math.abs(value) >= 0.001 ? Number(value.toPrecision(2)).toString() : value.toExponential(0));
    const shown = max > 0 ? [low, mid, max].map(spellOut) : ["", "", ""];
    if (this.curve === "chance" && !this.signed && max > 0) [shown[0], shown[1], shown[2]] = [`≤ ${shown[0]}×`, `${shown[1]}×`, `${shown[2]}×`];
    if (beyond && max > 0) shown[2] = `≥ ${shown[2]}`;
    this.ends.replaceChildren(...shown.map((text) => h("span", { text })));
    this.element.setAttribute("aria-label", `Colours run from ${shown[0]} to ${shown[2]}`);
  }
}

/** The weight whose colour lies in the middle of the scale. */
function invert(max: number, curve: Curve): number {
  if (curve === "linear") return max / 2;
  if (curve === "chance") return Math.sqrt(max * Math.min(FAINT, max));
  return curve === "root" ? max / 4 : max / 100;
}

/** What one head does: each score as a bar. */
export function scoreBars(context: Context): HTMLElement {
  const { record } = current(context);
  const { place, head, sort } = context.state;
  const list = h("ul", { class: "bars", "aria-label": "What this head does" });
  if (typeof head !== "number") return list;
  for (const name of Object.keys(record.scores)) {
    const value = score(record, name, place, head);
    const bar = h("span", { class: "fill" });
    bar.style.width = `${strength(record, name, value) * 100}%`;
    list.append(
      h("li", { title: told(context.manifest, name), "data-score": name, class: name === sort ? "chosen" : "" }, h("span", { class: "name", text: about(context.manifest, name) }), h("span", { class: "bar" }, bar), h("span", { class: "value", text: spell(value) })),
    );
  }
  return list;
}

/** Save what is on the screen: as SVG for paper, as PNG for slides. `source`: a map, or a part of the page;
 * `ready`: draws what of it is not drawn yet. */
export function savers(context: Context, source: Heatmap | HTMLElement, name: string, ready?: () => Promise<void>): HTMLElement {
  const hand = (part: Blob, ending: string) => {
    const link = h("a", { href: URL.createObjectURL(part), download: `${name.replace(/[^\p{L}\p{N}]+/gu, "-")}.${ending}` });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 10_000);
  };
  const element = source instanceof HTMLElement ? source : source.element;
  const draw = () => {
    const ground = getComputedStyle(element).getPropertyValue("--paper").trim();
    return source instanceof HTMLElement ? elementSvg(source, ground) : source.toSvg(ground);
  };
  const asSvg = async () => hand(new Blob([draw()], { type: "image/svg+xml" }), "svg");
  const asPng = async () => {
    const picture = h("img", { src: `data:image/svg+xml;charset=utf-8,${encodeURIComponent(draw())}` });
    await picture.decode();
    const sharp = Math.max(2, devicePixelRatio || 1);
    const sheet = h("canvas", { width: Math.round(picture.width * sharp), height: Math.round(picture.height * sharp) });
    sheet.getContext("2d")!.drawImage(picture, 0, 0, sheet.width, sheet.height);
    sheet.toBlob((blob) => blob && hand(blob, "png"), "image/png");
  };
  const save = async (act: () => Promise<void>) => {
    await ready?.();
    await act();
    context.announce("Saved.");
  };
  const button = (text: string, act: () => Promise<void>) =>
    h("button", { type: "button", class: "plain", text, title: `Save what is on the screen as ${text}`, on: { click: () => void save(act) } });
  return h("div", { class: "savers", role: "group", "aria-label": "Save this view" }, h("span", { class: "said", text: "Save" }), button("SVG", asSvg), button("PNG", asPng));
}

/** Show all keys, or leave out those that take what nobody wants; and say so. */
export function sinkPicker(context: Context): HTMLElement {
  const { manifest, state } = context;
  const { record, place } = current(context);
  const tokens = keyTokens(record, place);
  const names = [...new Set(sinksOf(manifest, state.record, place).map((at) => (isSpecial(tokens[at]!) ? quoted(tokens[at]!) : "the first token")))];
  const choice = strip("Keys", [["all", "All keys"], ["without", "Without sinks"]], state.bare ? "without" : "all", (value) => context.go({ bare: value === "without" }));
  const said = names.length ? `Left out: ${names.slice(0, 6).join(", ")}${names.length > 6 ? ", …" : ""}. The weights of each query on the other keys are made to add up to 1.` : "No key here is a special token.";
  return h("div", { class: "sinks" }, choice, state.bare ? h("p", { class: "hint", role: "note", text: said }) : null);
}

/** What must be known of all that a record shows, such as a text longer than its model was made for. */
export function notes(context: Context): HTMLElement[] {
  const said = current(context).record.notes.map((note) => h("p", { class: "message warning", role: "note", text: note }));
  const { bound } = context.manifest;
  if (!bound) return said;
  const words = `The weights in this file are rounded, each by at most ${Number(bound.toPrecision(2))}; “regard view” shows a saved record as it is.`;
  return [...said, h("p", { class: "hint rounded", role: "note", text: words })];
}

export function shade(context: Context, value: number, max: number): string {
  return colours(context)(onScale(value, max, wordCurve(context)));
}
