// Controls that several pages share: which head, which colours, the scale's legend.

import { CURVES, PALETTES, bend, type Curve, type PaletteName, type Ramp } from "./colour";
import { colours, current, type Context } from "./context";
import { h, select, strip } from "./dom";
import { allLayers, isMeantWith, placeLabel, type Recorded } from "./outline";
import { about, score, spell, strength, told } from "./roles";
import type { HeadChoice } from "./source";

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
  const change = { place, head: typeof head === "number" ? Math.min(head, here.n_heads - 1) : head };
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

const CURVE_WORDS: Record<Curve, string> = { root: "Root", linear: "Linear", log: "Log" };
const PALETTE_WORDS: Record<PaletteName, string> = { regard: "Tide", viridis: "Viridis", cividis: "Cividis" };

export function colourPicker(context: Context): HTMLElement {
  const { state } = context;
  return h(
    "div",
    { class: "picker" },
    h("div", { class: "field" }, h("span", { text: "Scale" }), strip("Scale", CURVES.map((name) => [name, CURVE_WORDS[name]] as const), state.curve, (curve) => context.go({ curve }))),
    select("Colours", PALETTES.map((name) => [name, PALETTE_WORDS[name]] as const), state.palette, (value) => context.go({ palette: value as PaletteName })),
  );
}

/** The scale with its numbers; `max` is what the darkest colour stands for. */
export class Legend {
  readonly element: HTMLElement;
  private readonly canvas: HTMLCanvasElement;
  private readonly ends: HTMLElement;

  constructor(private readonly context: Context, private readonly signed: Ramp | null = null, of = "") {
    this.canvas = h("canvas", { width: 256, height: 1, "aria-hidden": "true" });
    this.ends = h("div", { class: "ends" });
    this.element = h("div", { class: "legend" }, of ? h("p", { class: "hint", text: of }) : null, this.canvas, this.ends);
    this.update(0);
  }

  /** `beyond`: some cells are above the end of the scale. */
  update(max: number, beyond = false): void {
    const ramp = this.signed ?? colours(this.context);
    const draw = this.canvas.getContext("2d")!;
    for (let x = 0; x < 256; x += 1) {
      draw.fillStyle = ramp(x / 255);
      draw.fillRect(x, 0, 1, 1);
    }
    const mid = this.signed ? 0 : invert(max, this.context.state.curve);
    const low = this.signed ? -max : this.context.state.curve === "log" ? max / 1e4 : 0;
    const spellOut = (value: number) => (value === 0 ? "0" : Math.abs(value) >= 0.001 ? Number(value.toPrecision(2)).toString() : value.toExponential(0));
    const shown = max > 0 ? [low, mid, max].map(spellOut) : ["", "", ""];
    if (beyond && max > 0) shown[2] = `≥ ${shown[2]}`;
    this.ends.replaceChildren(...shown.map((text) => h("span", { text })));
    this.element.setAttribute("aria-label", `Colours run from ${shown[0]} to ${shown[2]}`);
  }
}

/** The weight whose colour lies in the middle of the scale. */
function invert(max: number, curve: Curve): number {
  if (curve === "linear") return max / 2;
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
      h("li", { title: told(context.outline, name), "data-score": name, class: name === sort ? "chosen" : "" }, h("span", { class: "name", text: about(context.outline, name) }), h("span", { class: "bar" }, bar), h("span", { class: "value", text: spell(value) })),
    );
  }
  return list;
}

/** What must be known of all that a record shows, such as a text longer than its model was made for. */
export function notes(context: Context): HTMLElement[] {
  return current(context).record.notes.map((note) => h("p", { class: "message warning", role: "note", text: note }));
}

export function shade(context: Context, value: number, max: number): string {
  return colours(context)(bend(value, max, context.state.curve));
}
