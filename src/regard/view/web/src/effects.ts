// What heads are worth: how the log-probability of what the model says changes with each of them
// edited alone, where a record has it. Below 0 it is less likely so. Sign and number always stand
// beside the colour.

import { differenceRamp, inkOn, onScale } from "./colour";
import { current, wordCurve, type Context } from "./context";
import { h, percent } from "./dom";
import type { Effect, Recorded } from "./manifest";
import type { HeadChoice } from "./source";
import { quoted } from "./words";

export const MATTERS = "matters"; // what heads are sorted by

/** The effect that is shown; null where the record has none. */
export function shownEffect(context: Context): Effect | null {
  return current(context).record.effects[context.state.effect] ?? null;
}

/** The change with a head edited, with a layer, or with all heads. */
export function changeOf(effect: Effect, place: number, head: HeadChoice): number | null {
  if (head === "all") return effect.whole;
  return (head === "layer" ? effect.layers[place] : effect.heads[place]?.[head]) ?? null;
}

/** The largest change of a head, to either side. */
export function largestChange(effect: Effect): number {
  return Math.max(0, ...effect.heads.map((row) => Math.max(0, ...row.map((value) => Math.abs(value ?? 0)))));
}

/** A change with its sign: "−1.70", "+0.35"; what is there is never written as nothing. */
export function signed(value: number | null, digits = 3): string {
  if (value === null) return "–";
  if (Math.abs(value) < 0.5 * 10 ** -digits) return value === 0 ? "0" : "≈0";
  return `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(digits)}`;
}

/** What was done, said of one head, of a layer, or of all. */
function done(effect: Effect, head: HeadChoice): string {
  const which = head === "all" ? "all heads" : head === "layer" ? "all heads of this layer" : "this head";
  const said = effect.edit.replace(/a head(?!.*a head)/u, which);
  return said.charAt(0).toUpperCase() + said.slice(1);
}

/** "−1.700 (77.3% → 14.1%)": the change, and the probability before and after. */
export function spellChange(effect: Effect, value: number | null): string {
  if (value === null) return "not measured";
  return `${signed(value)} (${percent(Math.exp(effect.log_prob))} → ${percent(Math.exp(Math.min(0, effect.log_prob + value)))})`;
}

/** What the numbers of an effect mean, in a sentence. */
export function explain(effect: Effect): string {
  return `Matters: how the log-probability of ${quoted(effect.token)} (${percent(Math.exp(effect.log_prob))}) changes with ${effect.edit}, in nats. Below 0: it is less likely so.`;
}

export function changeColour(context: Context, effect: Effect, value: number, max = largestChange(effect)): string {
  const size = onScale(Math.abs(value), max, wordCurve(context)) / 2;
  return differenceRamp(context.dark())(0.5 + (value < 0 ? -size : size));
}

/** What a head is worth, on its colour. */
export function chip(context: Context, effect: Effect, value: number | null): HTMLElement {
  const shown = h("span", { class: "chip", text: `${MATTERS} ${signed(value)}` });
  if (value === null) return shown;
  const ground = changeColour(context, effect, value);
  shown.style.backgroundColor = ground;
  shown.style.color = inkOn(ground);
  return shown;
}

/** What the chosen head is worth, a line for each effect; nothing where none was recorded. */
export function worthOf(context: Context): HTMLElement[] {
  const { record } = current(context);
  const { place, head } = context.state;
  if (!record.effects.length) return [];
  const lines = record.effects.map((effect, at) => {
    const value = changeOf(effect, place, head);
    return h("li", { "data-effect": at }, h("span", { text: `${done(effect, head)}: ${quoted(effect.token)} ` }), h("b", { class: "change", text: spellChange(effect, value) }));
  });
  return [h("div", { class: "worth" }, h("h2", { text: "Matters" }), h("ul", {}, ...lines))];
}

/** Whether looks were forbidden that are measured here. */
export function hasLooks(record: Recorded): boolean {
  return record.effects.some(({ query }) => query !== null);
}

/** What one look of a head is worth, where it was forbidden and measured. */
export function tellLook(context: Context, t: number, s: number): string {
  const { record } = current(context);
  const { place, head } = context.state;
  const found = record.effects.filter(({ query, key }) => query?.includes(t) && key?.includes(s));
  return found.map((effect) => `Without this look ${quoted(effect.token)} ${spellChange(effect, changeOf(effect, place, head))}`).join("; ");
}
