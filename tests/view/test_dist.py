"""The committed bundle is what its sources say, to the byte."""

import hashlib
import json
import shutil
import subprocess
from pathlib import Path

import pytest

import regard.view

WEB = Path(regard.view.__file__).parent / "web"
NODE = shutil.which("node")


def told() -> dict[str, str]:
    lines = (WEB / "dist" / "SOURCES.sha256").read_text(encoding="ascii").splitlines()
    return {name: digest for digest, name in (line.split("  ") for line in lines)}


def test_the_bundle_was_built_from_these_sources() -> None:
    sums = told()
    for name, digest in sums.items():
        assert hashlib.sha256((WEB / name).read_bytes()).hexdigest() == digest, (
            f"{name} changed since dist/ was built: cd {WEB} && npm ci --ignore-scripts && "
            "node build.mjs"
        )


def test_no_source_and_no_output_is_left_out_of_the_sums() -> None:
    own = [p for kind in ("*.ts", "*.css") for p in (WEB / "src").rglob(kind)]
    built = [p for p in (WEB / "dist").iterdir() if p.name != "SOURCES.sha256"]
    tools = ["build.mjs", "package.json", "package-lock.json", "tsconfig.json"]
    files = {p.relative_to(WEB).as_posix() for p in [*own, *built]} | set(tools)
    assert set(told()) == files


def test_every_tool_is_pinned_exactly_and_locked_with_its_checksum() -> None:
    package = json.loads((WEB / "package.json").read_text(encoding="utf-8"))
    lock = json.loads((WEB / "package-lock.json").read_text(encoding="utf-8"))
    for name, version in {**package["dependencies"], **package["devDependencies"]}.items():
        assert version[0].isdigit()
        assert lock["packages"][f"node_modules/{name}"]["version"] == version
    parts = [part for path, part in lock["packages"].items() if path]
    assert parts
    assert [part for part in parts if not part["integrity"].startswith("sha512-")] == []


def test_the_bundle_parses_no_html_and_evaluates_no_text() -> None:
    """Tokens reach the page as text nodes and canvas text only."""
    for path in (WEB / "src").rglob("*.ts"):
        source = path.read_text(encoding="utf-8")
        for word in ("innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("):
            assert word not in source, f"{path.name} uses {word}"
        assert "new Function" not in source


def test_the_bundle_stays_small() -> None:
    sizes = {name: (WEB / "dist" / name).stat().st_size for name in ("regard.js", "regard.css")}
    assert sum(sizes.values()) < 225_000


def test_building_again_gives_the_same_bytes() -> None:
    if NODE is None or not (WEB / "node_modules" / "esbuild").is_dir():
        pytest.skip("the pinned toolchain is not installed: npm ci --ignore-scripts in view/web")
    done = subprocess.run(
        [NODE, "build.mjs", "--check"], cwd=WEB, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stdout + done.stderr
