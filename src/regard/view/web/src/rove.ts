// Many things of a kind that are one stop for the tab key; arrows move between them.

/** `kinds`: selectors, each of things that arrows move among. */
export function rove(grid: HTMLElement, kinds: string[]): void {
  const groups = kinds.map((kind) => [...grid.querySelectorAll<HTMLElement>(kind)]);
  for (const all of groups) {
    const stop = Math.max(0, all.findIndex((one) => one.ariaPressed === "true")); // what is chosen, else the first
    all.forEach((one, at) => one.setAttribute("tabindex", at === stop ? "0" : "-1"));
  }
  grid.onkeydown = (event) => {
    const active = (grid.getRootNode() as Document | ShadowRoot).activeElement as HTMLElement;
    const all = groups.find((group) => group.includes(active));
    const turned = getComputedStyle(active).direction === "rtl" ? { ArrowLeft: "ArrowRight", ArrowRight: "ArrowLeft" }[event.key] : null;
    const next = all ? neighbour(all, all.indexOf(active), turned ?? event.key) : null;
    if (!all || next === null) return;
    event.preventDefault();
    event.stopPropagation();
    active.setAttribute("tabindex", "-1");
    all[next]!.setAttribute("tabindex", "0");
    all[next]!.focus();
  };
}

function neighbour(cards: HTMLElement[], at: number, key: string): number | null {
  if (key === "ArrowRight") return Math.min(cards.length - 1, at + 1);
  if (key === "ArrowLeft") return Math.max(0, at - 1);
  if (key === "Home") return 0;
  if (key === "End") return cards.length - 1;
  if (key !== "ArrowDown" && key !== "ArrowUp") return null;
  const from = cards[at]!.getBoundingClientRect();
  const down = key === "ArrowDown";
  let [best, distance] = [at, Infinity];
  cards.forEach((card, index) => {
    const to = card.getBoundingClientRect();
    const along = down ? to.top - from.top : from.top - to.top;
    if (along < from.height / 2) return;
    const far = along * 4 + Math.abs(to.left - from.left);
    if (far < distance) [best, distance] = [index, far];
  });
  return best;
}
