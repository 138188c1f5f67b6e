// Parts of a page that are built anew keep the focus: what had it is found again by its mark.
//
// Where the focus falls out of a page, the next key goes to nothing, or is a command to a notebook.

/** Build a part anew; what had the focus in it has it again, else `rest`, or else nothing. */
export function keepFocus(part: HTMLElement, build: () => void, rest: HTMLElement | null = null, options: FocusOptions = { preventScroll: true }): void {
  const active = (part.getRootNode() as Document | ShadowRoot).activeElement;
  const had = active instanceof HTMLElement && part.contains(active) ? active : null;
  if (had && rest?.contains(had)) rest.focus({ preventScroll: true });
  build();
  if (!had || had.isConnected) return;
  const mark = had instanceof HTMLCanvasElement ? ".map canvas" : had.dataset.focus ? `[data-focus="${CSS.escape(had.dataset.focus)}"]` : null;
  const again = mark ? part.querySelector<HTMLElement>(mark) : null;
  // What has become of no use, such as "next" at the end, hands it to what stands beside it.
  const able = again?.matches(":disabled") ? again.parentElement!.querySelector<HTMLElement>("button:enabled") : again;
  if (able) able.focus(options);
  else rest?.focus({ preventScroll: true });
}
