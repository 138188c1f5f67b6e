// Generation played step by step: previous, play, next, and how far it is. Each call of the model is
// a step; its last token is the one that looks.

import { h } from "./dom";

const PACE = 700; // milliseconds a step

export class Player {
  readonly element: HTMLElement;
  private readonly status = h("output", { "aria-live": "polite" });
  private readonly slider: HTMLInputElement;
  private readonly buttons: Record<"back" | "play" | "on", HTMLButtonElement>;
  private timer = 0;

  /** `steps`: so many; `step`: the one shown, -1 for none; `show` is called with another. */
  constructor(private readonly steps: number, private step: number, private readonly name: (step: number) => string, private readonly show: (step: number) => void) {
    const button = (sign: string, words: string, act: () => void) =>
      h("button", { type: "button", class: "step", text: sign, "aria-label": words, title: words, on: { click: act } });
    this.buttons = {
      back: button("‹", "Previous step  ,", () => this.go(this.step - 1)),
      play: button("▶", "Play  p", () => this.play()),
      on: button("›", "Next step  .", () => this.go(this.step + 1)),
    };
    this.slider = h("input", { type: "range", min: -1, max: steps - 1, "aria-label": "Step", on: { input: () => this.go(Number(this.slider.value)) } });
    this.element = h("div", { class: "player", role: "group", "aria-label": "Generation, step by step" }, ...Object.values(this.buttons), this.slider, this.status);
    this.tell();
  }

  close(): void {
    clearInterval(this.timer);
    this.timer = 0;
  }

  key({ key }: KeyboardEvent): boolean {
    if (key === ",") this.go(this.step - 1);
    else if (key === ".") this.go(this.step + 1);
    else if (key === "p") this.play();
    else return false;
    return true;
  }

  private play(): void {
    if (this.timer) {
      this.close();
      this.tell();
      return;
    }
    if (this.step >= this.steps - 1) this.move(0);
    else this.move(this.step + 1);
    this.timer = window.setInterval(() => this.move(this.step + 1), PACE);
    this.tell();
  }

  private go(step: number): void {
    this.close();
    this.move(step);
  }

  private move(step: number): void {
    this.step = Math.min(this.steps - 1, Math.max(-1, step));
    if (this.step === this.steps - 1) this.close();
    this.tell();
    this.show(this.step);
  }

  private tell(): void {
    const { back, play, on } = this.buttons;
    back.disabled = this.step < 0;
    on.disabled = this.step >= this.steps - 1;
    // A button that has become of no use lets the focus go.
    const { activeElement } = this.element.getRootNode() as Document | ShadowRoot;
    if (activeElement?.matches(":disabled") && this.element.contains(activeElement)) this.slider.focus();
    play.textContent = this.timer ? "❚❚" : "▶";
    play.setAttribute("aria-label", this.timer ? "Pause  p" : "Play  p");
    this.slider.value = String(this.step);
    this.status.textContent = this.step < 0 ? `The whole text; ${this.steps} steps` : `Step ${this.step + 1} of ${this.steps}: ${this.name(this.step)}`;
  }
}
