// Making elements. Text only ever enters through textContent: nothing in this bundle parses HTML.

export type Child = Node | string | null | undefined | false;
type Handler = (event: any) => void;
export interface Props {
  class?: string;
  text?: string;
  on?: Record<string, Handler>;
  [attribute: string]: string | number | boolean | null | undefined | Record<string, Handler>;
}

const SVG = "http://www.w3.org/2000/svg";

function dress<E extends Element>(element: E, props: Props, children: Child[]): E {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "text") element.textContent = String(value);
    else if (name === "on") {
      for (const [event, handler] of Object.entries(value as Record<string, Handler>)) {
        element.addEventListener(event, handler);
      }
    } else element.setAttribute(name, value === true ? "" : String(value));
  }
  for (const child of children) if (child) element.append(child);
  return element;
}

export function h<K extends keyof HTMLElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): HTMLElementTagNameMap[K] {
  return dress(document.createElement(tag), props, children);
}

export function svg<K extends keyof SVGElementTagNameMap>(
  tag: K,
  props: Props = {},
  ...children: Child[]
): SVGElementTagNameMap[K] {
  return dress(document.createElementNS(SVG, tag), props, children);
}

export function clear(element: Element): void {
  element.replaceChildren();
}

/** The sign at the top of every page. */
export function brand(): HTMLElement {
  return h("span", { class: "brand" }, h("span", { class: "eye", "aria-hidden": "true" }), "regard");
}

/** A button of one sign. */
export function tool(sign: string, words: string, act: () => void): HTMLElement {
  return h("button", { type: "button", class: "tool", text: sign, "aria-label": words, title: words, on: { click: act } });
}

/** A labelled choice of one among a few: radio buttons that look like one strip. */
export function strip<T extends string>(
  label: string,
  options: readonly (readonly [T, string])[],
  value: T,
  choose: (value: T) => void,
): HTMLElement {
  const group = h("div", { class: "strip", role: "radiogroup", "aria-label": label });
  const buttons = options.map(([key, words]) =>
    h("button", {
      type: "button",
      role: "radio",
      text: words,
      "data-value": key,
      "data-focus": `${label}-${key}`,
      "aria-checked": String(key === value),
      tabindex: key === value ? 0 : -1,
      on: { click: () => choose(key) },
    }),
  );
  group.append(...buttons);
  group.addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (!step) return;
    event.preventDefault();
    event.stopPropagation();
    const at = buttons.indexOf(event.target as HTMLButtonElement);
    const next = buttons[(at + step + buttons.length) % buttons.length];
    next?.focus();
    next?.click();
  });
  return group;
}

export function select(
  label: string,
  options: readonly (readonly [string, string])[],
  value: string,
  choose: (value: string) => void,
): HTMLElement {
  const box = h("select", { "data-focus": label.replace(/\W/g, ""), on: { change: () => choose(box.value) } });
  for (const [key, words] of options) {
    const option = h("option", { value: key, text: words });
    option.selected = key === value;
    box.append(option);
  }
  return h("label", { class: "field" }, h("span", { text: label }), box);
}

/** A message where a picture would have been. */
export function message(words: string, kind = "note"): HTMLElement {
  return h("p", { class: `message ${kind}`, role: kind === "error" ? "alert" : "status", text: words });
}

export function percent(value: number | null | undefined): string {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (value === 0) return "0%";
  const hundred = value * 100;
  if (Math.abs(hundred) < 0.01) return "<0.01%";
  return `${hundred >= 99.95 ? hundred.toFixed(0) : hundred >= 10 ? hundred.toFixed(1) : hundred.toFixed(2)}%`;
}

/** A weight in two digits; what is there is never written as nothing. */
export function hundredth(value: number): string {
  if (value === 0) return "0";
  return value > 0 && value < 0.005 ? "<0.01" : value.toFixed(2);
}

/** A weight in the width of a cell; what is there is never written as nothing. */
export function hundredths(value: number, difference: boolean): string {
  if (!Number.isFinite(value)) return "?";
  if (Math.abs(value) < 0.005) return difference ? "≈0" : "<.01";
  return value.toFixed(2).replace(/^(-?)0\./, "$1.");
}

/** "1 token", "2 tokens", "1,000 tokens". */
export function many(count: number, what: string): string {
  return `${count.toLocaleString("en")} ${what}${count === 1 ? "" : "s"}`;
}

/** A weight with all the digits a float32 has, or with its bound where it was rounded. */
export function exact(value: number, bound = 0): string {
  if (bound && Number.isFinite(value)) {
    const digits = Math.ceil(-Math.log10(bound)) + 1;
    const off = Number(bound.toPrecision(2));
    return value === 0 ? `at most ${off}` : `${value.toFixed(digits)} ± ${off}`;
  }
  if (Number.isNaN(value)) return "not a number";
  if (!Number.isFinite(value)) return value > 0 ? "+∞" : "−∞";
  if (value === 0) return "0";
  return Math.abs(value) >= 1e-4 ? value.toPrecision(6) : value.toExponential(5);
}
