// Light or dark: as it was chosen here, else as the notebook has it, else as the system.

export class Theme {
  constructor(private readonly root: HTMLElement, private readonly turned: () => void) {
    root.classList.add("regard");
    this.set(recall());
  }

  /** Follow the system until `end` is called. */
  follow(): () => void {
    const scheme = matchMedia("(prefers-color-scheme: dark)");
    scheme.addEventListener("change", this.turned);
    return () => scheme.removeEventListener("change", this.turned);
  }

  dark(): boolean {
    const said = this.root.dataset.theme;
    return said ? said === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  }

  /** The theme of a notebook, unless one was chosen here. */
  followHost(name: "light" | "dark" | null): void {
    if (recall() !== null) return;
    this.set(name);
    this.turned();
  }

  toggle(): void {
    const name = this.dark() ? "light" : "dark";
    this.set(name);
    remember(name);
    this.turned();
  }

  private set(name: string | null): void {
    if (name === "light" || name === "dark") this.root.dataset.theme = name;
    else delete this.root.dataset.theme;
  }
}

// Some browsers refuse storage to files; the theme is then forgotten with the page.
function recall(): string | null {
  try {
    return localStorage.getItem("regard-theme");
  } catch {
    return null;
  }
}

function remember(name: string): void {
  try {
    localStorage.setItem("regard-theme", name);
  } catch {
    return;
  }
}
