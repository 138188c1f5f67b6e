// A pen that draws SVG with the strokes of a canvas, as far as a map needs them: so that what is on the
// screen can be saved for paper, its letters as letters and its cells as they are.
//
// Left out: every other method of a canvas; a map that would use one fails where it is drawn.

import { svg } from "./dom";

interface Frame {
  group: SVGElement;
  alpha: number;
}

export class SvgPen {
  font = "12px sans-serif";
  fillStyle = "#000000";
  strokeStyle = "#000000";
  lineWidth = 1;
  globalAlpha = 1;
  textAlign = "left";
  textBaseline = "alphabetic";
  direction = "ltr";
  imageSmoothingEnabled = true;
  readonly element: SVGSVGElement;
  private group: SVGElement;
  private readonly frames: Frame[] = [];
  private path = "";
  private clips = 0;

  /** `measured`: a canvas, which knows how wide letters are; `ground`: the colour of the paper. */
  constructor(private readonly measured: CanvasRenderingContext2D, width: number, height: number, ground: string) {
    this.element = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `0 0 ${width} ${height}` });
    this.element.append(svg("rect", { width, height, fill: ground }));
    this.group = this.element;
  }

  get text(): string {
    return new XMLSerializer().serializeToString(this.element);
  }

  private nest(attributes: Record<string, string>): void {
    const inner = svg("g", attributes);
    this.group.append(inner);
    this.group = inner;
  }

  setTransform(): void {
    this.group = this.element;
  }

  clearRect(): void {}

  save(): void {
    this.frames.push({ group: this.group, alpha: this.globalAlpha });
  }

  restore(): void {
    const frame = this.frames.pop();
    if (frame) [this.group, this.globalAlpha] = [frame.group, frame.alpha];
  }

  translate(x: number, y: number): void {
    this.nest({ transform: `translate(${x} ${y})` });
  }

  rotate(by: number): void {
    this.nest({ transform: `rotate(${(by * 180) / Math.PI})` });
  }

  beginPath(): void {
    this.path = "";
  }

  moveTo(x: number, y: number): void {
    this.path += `M${x} ${y}`;
  }

  lineTo(x: number, y: number): void {
    this.path += `L${x} ${y}`;
  }

  rect(x: number, y: number, width: number, height: number): void {
    this.path += `M${x} ${y}h${width}v${height}h${-width}z`;
  }

  clip(): void {
    const id = `clip${(this.clips += 1)}`;
    this.group.append(svg("clipPath", { id }, svg("path", { d: this.path || "M0 0" })));
    this.nest({ "clip-path": `url(#${id})` });
  }

  stroke(): void {
    this.group.append(svg("path", { d: this.path, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth, "stroke-opacity": this.globalAlpha }));
  }

  strokeRect(x: number, y: number, width: number, height: number): void {
    this.group.append(svg("rect", { x, y, width, height, fill: "none", stroke: this.strokeStyle, "stroke-width": this.lineWidth }));
  }

  measureText(text: string): TextMetrics {
    this.measured.font = this.font;
    return this.measured.measureText(text);
  }

  fillText(text: string, x: number, y: number, most = Infinity): void {
    const anchor = { left: "start", center: "middle", right: "end" }[this.textAlign] ?? "start";
    const turned = this.direction === "rtl" && anchor !== "middle" ? (anchor === "start" ? "end" : "start") : anchor;
    const [, weight = "400", size = "12", family = "sans-serif"] = /^(?:(\d+) )?([\d.]+)px (.*)$/.exec(this.font) ?? [];
    const wide = this.measureText(text).width;
    const squeezed = wide > most ? { textLength: most, lengthAdjust: "spacingAndGlyphs" } : {};
    const middle = this.textBaseline === "middle" ? { "dominant-baseline": "central" } : {};
    this.group.append(svg("text", { x, y, fill: this.fillStyle, "text-anchor": turned, direction: this.direction, "font-size": size, "font-weight": weight, "font-family": family, ...middle, ...squeezed, text }));
  }

  drawImage(canvas: HTMLCanvasElement, x: number, y: number, width: number, height: number): void {
    this.group.append(svg("image", { href: canvas.toDataURL("image/png"), x, y, width, height, preserveAspectRatio: "none", "image-rendering": "pixelated" }));
  }
}
