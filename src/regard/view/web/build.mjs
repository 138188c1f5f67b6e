// Builds the one bundle that all three hosts of the view use, and writes down what it was built from.
//
//   npm ci --ignore-scripts && node build.mjs            build into dist/
//   node build.mjs --check                               build beside it and compare every byte
//
// Left out: watching for changes, source maps, several targets. The bundle is one module that runs
// in browsers of 2023 and later; the same bytes on every machine, because every tool is pinned.
import { createHash } from "node:crypto";
import { mkdirSync, mkdtempSync, readFileSync, readdirSync, rmSync, writeFileSync } from "node:fs";
import { tmpdir } from "node:os";
import { dirname, join } from "node:path";
import { fileURLToPath } from "node:url";
import { build } from "esbuild";

const here = dirname(fileURLToPath(import.meta.url));
const outputs = ["regard.css", "regard.js", "SOURCES.sha256"];

function sources() {
  const own = readdirSync(join(here, "src"), { recursive: true })
    .map((name) => `src/${String(name).replaceAll("\\", "/")}`)
    .filter((name) => /\.(ts|css)$/.test(name));
  return [...own, "build.mjs", "package-lock.json", "package.json", "tsconfig.json"].sort();
}

function digest(path) {
  return createHash("sha256").update(readFileSync(path)).digest("hex");
}

async function buildInto(folder) {
  await build({
    absWorkingDir: here,
    entryPoints: { regard: "src/main.ts" },
    outdir: folder,
    bundle: true,
    format: "esm",
    minify: true,
    charset: "utf8",
    target: ["es2022"],
    legalComments: "none",
    logLevel: "warning",
  });
  await build({
    absWorkingDir: here,
    entryPoints: { regard: "src/style.css" },
    outdir: folder,
    minify: true,
    charset: "utf8",
    legalComments: "none",
    logLevel: "warning",
  });
  const lines = sources().map((name) => `${digest(join(here, name))}  ${name}`);
  for (const name of ["regard.css", "regard.js"]) {
    lines.push(`${digest(join(folder, name))}  dist/${name}`);
  }
  writeFileSync(join(folder, "SOURCES.sha256"), lines.join("\n") + "\n");
}

const dist = join(here, "dist");
if (process.argv.includes("--check")) {
  const beside = mkdtempSync(join(tmpdir(), "regard-view-"));
  await buildInto(beside);
  const differ = outputs.filter((name) => {
    return !readFileSync(join(beside, name)).equals(readFileSync(join(dist, name)));
  });
  rmSync(beside, { recursive: true });
  if (differ.length) {
    console.error(`dist/ was not built from these sources: ${differ.join(", ")} differ; run node build.mjs`);
    process.exit(1);
  }
  console.log("dist/ matches its sources, byte for byte");
} else {
  mkdirSync(dist, { recursive: true });
  await buildInto(dist);
  for (const name of outputs) console.log(`${name} ${readFileSync(join(dist, name)).length} bytes`);
}
