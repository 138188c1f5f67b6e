// A part of a page as SVG: its words as text where they stand, grounds and outlines as rectangles,
// small maps as pictures, lines as lines. What is scrolled out of sight is left out.

import { svg } from "./dom";

type Box = { left: number; top: number; right: number; bottom: number };

export function elementSvg(root: HTMLElement, ground: string): string {
  const { left, top, width, height } = root.getBoundingClientRect();
  const sheet = svg("svg", { xmlns: "http://www.w3.org/2000/svg", width, height, viewBox: `${left} ${top} ${width} ${height}` });
  sheet.append(svg("rect", { x: left, y: top, width, height, fill: ground }));
  visit(root, sheet, root.getBoundingClientRect());
  return new XMLSerializer().serializeToString(sheet);
}

function visit(element: Element, sheet: SVGElement, clip: Box): void {
  const style = getComputedStyle(element);
  if (style.display === "none" || style.visibility === "hidden") return;
  const box = element.getBoundingClientRect();
  if (!meets(box, clip)) return;
  const place = { x: box.left, y: box.top, width: box.width, height: box.height };
  if (element instanceof HTMLCanvasElement || element instanceof HTMLImageElement) {
    const href = element instanceof HTMLImageElement ? element.src : element.toDataURL("image/png");
    sheet.append(svg("image", { ...place, href, preserveAspectRatio: "none", "image-rendering": "pixelated" }));
    return;
  }
  if (element instanceof SVGSVGElement) {
    for (const path of element.querySelectorAll("path")) {
      const drawn = getComputedStyle(path);
      sheet.append(svg("path", { d: path.getAttribute("d"), transform: `translate(${box.left} ${box.top})`, fill: "none", stroke: drawn.stroke, "stroke-width": drawn.strokeWidth, "stroke-opacity": drawn.strokeOpacity, "stroke-linecap": "round" }));
    }
    return;
  }
  const rx = parseFloat(style.borderTopLeftRadius) || 0;
  if (!/rgba\(.*, 0\)|transparent/.test(style.backgroundColor)) sheet.append(svg("rect", { ...place, rx, fill: style.backgroundColor }));
  if (style.outlineStyle !== "none" && parseFloat(style.outlineWidth) > 0) sheet.append(svg("rect", { ...place, rx, fill: "none", stroke: style.outlineColor, "stroke-width": style.outlineWidth }));
  const inner = style.overflow === "visible" ? clip : overlap(clip, box);
  for (const child of element.childNodes) {
    if (child instanceof Element) visit(child, sheet, inner);
    else if (child instanceof Text) write(child, style, sheet, inner);
  }
}

/** Each word where it stands, so that lines break as they do on the page. */
function write(text: Text, style: CSSStyleDeclaration, sheet: SVGElement, clip: Box): void {
  for (const found of text.data.matchAll(/\S+/g)) {
    const range = document.createRange();
    range.setStart(text, found.index);
    range.setEnd(text, found.index + found[0].length);
    const box = range.getBoundingClientRect();
    if (box.width === 0 || !meets(box, clip)) continue;
    const middle = { x: (box.left + box.right) / 2, y: (box.top + box.bottom) / 2 };
    sheet.append(svg("text", { ...middle, "text-anchor": "middle", "dominant-baseline": "central", fill: style.color, "font-size": parseFloat(style.fontSize), "font-weight": style.fontWeight, "font-family": style.fontFamily, textLength: box.width, lengthAdjust: "spacingAndGlyphs", text: found[0] }));
  }
}

function meets(box: Box, clip: Box): boolean {
  return box.right > clip.left && box.left < clip.right && box.bottom > clip.top && box.top < clip.bottom;
}

function overlap(one: Box, other: Box): Box {
  return { left: Math.max(one.left, other.left), top: Math.max(one.top, other.top), right: Math.min(one.right, other.right), bottom: Math.min(one.bottom, other.bottom) };
}
