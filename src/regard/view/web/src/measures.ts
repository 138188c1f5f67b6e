// What words and cells are shaded by: weights, and where a record has them other measures.
//
// Value-weighted is ‖weight · f(x)‖, where f(x) is a key's value as the output projection takes it
// (Kobayashi et al. 2020). Rollout goes through all layers. Attention × gradient has sums only: of a
// key's column and of a query's row. The probability of a token is what the model gave it before it
// read it.

import { current, type Context } from "./context";
import { percent } from "./dom";
import type { Place, Recorded } from "./manifest";

export const MEASURES = ["weights", "values", "rollout", "gradient", "probability"] as const;
export type Measure = (typeof MEASURES)[number];

export const MEASURE_WORDS: Record<Measure, string> = {
  weights: "Weights",
  values: "Value-weighted",
  rollout: "Across layers (rollout)",
  gradient: "Attention × gradient",
  probability: "Token probability",
};

export const MEASURE_HINTS: Record<Measure, string[]> = {
  weights: [],
  values: ["A weight times the length of the value that it takes, after the output projection: ‖weight · f(x)‖."],
  rollout: ["Each layer is half the mean of its heads and half the word itself; the layers are multiplied."],
  gradient: [],
  probability: [],
};

/** The measures that a page can show of a place. */
function offered(page: string, record: Recorded, place: Place): Measure[] {
  if (page === "head") return place.values ? ["weights", "values"] : ["weights"];
  if (page !== "text") return ["weights"];
  const has: Record<Measure, boolean> = {
    weights: true,
    values: place.values,
    rollout: record.rollout.includes(record.places.indexOf(place)),
    gradient: place.gradient,
    probability: record.next !== null && place.queries === "target",
  };
  return MEASURES.filter((name) => has[name]);
}

export function offeredMeasures(context: Context): Measure[] {
  const { record, place } = current(context);
  return offered(context.state.page, record, place);
}

/** The chosen measure, where this page has it; else weights. */
export function measureOf(context: Context): Measure {
  const { by } = context.state;
  return offeredMeasures(context).includes(by) ? by : "weights";
}

/** A number of a measure: shares in percent, all else with three digits. */
export function amount(measure: Measure, value: number): string {
  if (measure !== "values" && measure !== "gradient") return percent(value);
  if (!Number.isFinite(value)) return "–";
  return Math.abs(value) >= 1e-3 || value === 0 ? String(Number(value.toPrecision(3))) : value.toExponential(1);
}
