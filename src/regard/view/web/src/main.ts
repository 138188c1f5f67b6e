// The three hosts: a file with everything in it, the local server, a notebook's widget.

import { App, type Line } from "./app";
import { h, message } from "./dom";
import { words } from "./context";
import { readManifest } from "./manifest";
import type { Theme } from "./theme";
import { SurveyPage } from "./pages/survey";
import { isTable, readTable } from "./headtable";
import { InlineSource, LayeredSource, RemoteSource, askServer } from "./source";

class AddressLine implements Line {
  read(): string {
    return location.hash;
  }

  write(line: string, quietly: boolean): void {
    const hash = `#${line}`;
    if (hash === location.hash) return;
    try {
      if (quietly) history.replaceState(null, "", hash);
      else history.pushState(null, "", hash);
    } catch {
      // A browser allows so many changes a second; the next one will be written.
    }
  }

  changed(listen: () => void): () => void {
    addEventListener("hashchange", listen);
    addEventListener("popstate", listen);
    return () => {
      removeEventListener("hashchange", listen);
      removeEventListener("popstate", listen);
    };
  }
}

function trouble(root: HTMLElement, problem: unknown): void {
  root.classList.add("regard");
  root.replaceChildren(h("main", { class: "main" }, message(`This record cannot be shown: ${words(problem)}`, "error")));
}

async function start(root: HTMLElement): Promise<void> {
  try {
    if (root.dataset.host === "server") {
      const reply = await fetch("manifest", { credentials: "omit" });
      if (!reply.ok) throw new Error((await reply.text()).slice(0, 300));
      const manifest = readManifest(await reply.json());
      new App(root, manifest, new RemoteSource(manifest, askServer), new AddressLine(), document);
      return;
    }
    const data: unknown = JSON.parse(document.getElementById("regard-data")?.textContent ?? "");
    if (isTable(data)) {
      new SurveyPage(root, readTable(data), new AddressLine());
      return;
    }
    const manifest = readManifest(data);
    new App(root, manifest, new InlineSource(manifest), new AddressLine(), document);
  } catch (problem) {
    trouble(root, problem);
  }
}

// What anywidget hands to a widget, as far as it is used here.
interface Model {
  get(name: string): any;
  set(name: string, value: unknown): void;
  save_changes(): void;
  send(content: unknown): void;
  on(event: string, listen: (...args: any[]) => void): void;
  off(event: string, listen: (...args: any[]) => void): void;
}

class WidgetLine implements Line {
  constructor(private readonly model: Model) {}

  read(): string {
    return String(this.model.get("line") ?? "");
  }

  write(line: string): void {
    this.model.set("line", line);
    this.model.save_changes();
  }

  changed(listen: () => void): () => void {
    this.model.on("change:line", listen);
    return () => this.model.off("change:line", listen);
  }
}

/** Questions to the kernel and its answers, matched by name: all views of a widget hear every answer. */
function askKernel(model: Model): { ask: (question: string) => Promise<Uint8Array>; close: () => void } {
  const waiting = new Map<string, { done: (bytes: Uint8Array) => void; failed: (problem: Error) => void }>();
  const view = crypto.getRandomValues(new Uint32Array(2)).join("-");
  let last = 0;
  const heard = (content: any, buffers: DataView[]) => {
    const one = waiting.get(content?.id);
    if (!one) return;
    waiting.delete(content.id);
    const buffer = buffers?.[0];
    if (buffer) one.done(new Uint8Array(buffer.buffer, buffer.byteOffset, buffer.byteLength));
    else one.failed(new Error(String(content.error ?? "the kernel did not answer").slice(0, 300)));
  };
  model.on("msg:custom", heard);
  const ask = (question: string) =>
    new Promise<Uint8Array>((done, failed) => {
      const id = `${view}-${(last += 1)}`;
      waiting.set(id, { done, failed });
      model.send({ id, question });
      setTimeout(() => {
        if (waiting.delete(id)) failed(new Error("The kernel does not answer. Run the cell again to see more."));
      }, 60_000);
    });
  return { ask, close: () => model.off("msg:custom", heard) };
}

/** JupyterLab says in an attribute of the body whether its theme is light; it may change. */
function followTheme(theme: Theme): () => void {
  const follow = () => {
    const said = document.body.dataset.jpThemeLight;
    theme.followHost(said === undefined ? null : said === "false" ? "dark" : "light");
  };
  follow();
  const watcher = new MutationObserver(follow);
  watcher.observe(document.body, { attributes: true, attributeFilter: ["data-jp-theme-light"] });
  return () => watcher.disconnect();
}

function render({ model, el }: { model: Model; el: HTMLElement }): () => void {
  // Keys pressed in the widget are not the notebook's commands, of which x cuts the cell. The mark
  // is for notebooks that listen before the widget does, the stop for those that listen after it.
  const keep = (event: KeyboardEvent) => void (event.ctrlKey || event.metaKey || event.stopPropagation());
  const root = h("div", { class: "widget", tabindex: -1, "data-lm-suppress-shortcuts": "true", on: { keydown: keep } });
  el.append(root);
  const kernel = askKernel(model);
  try {
    const manifest = readManifest(JSON.parse(String(model.get("manifest"))));
    const source = new LayeredSource(new InlineSource(manifest), new RemoteSource(manifest, kernel.ask));
    const app = new App(root, manifest, source, new WidgetLine(model), root);
    const unfollow = followTheme(app.theme);
    return () => {
      unfollow();
      app.close();
      kernel.close();
    };
  } catch (problem) {
    trouble(root, problem);
    return kernel.close;
  }
}

const root = typeof document === "undefined" ? null : document.getElementById("regard");
if (root?.dataset.host) void start(root);

export default { render };
