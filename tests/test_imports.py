"""Imports point one way, need nothing optional, and are quick.

The first half reads the sources as syntax trees, so that an import inside a function counts like
any other. The second half runs real imports in fresh interpreters.
"""

import ast
import importlib.metadata
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "regard"
CORE = ("torch", "numpy", "safetensors")

# Package -> the packages right above it. A package may import these and everything they may import.
# "regard" is the top of the package: the public names, gathered in its __init__.
UPSTREAM: dict[str, tuple[str, ...]] = {
    "_version": (),
    "_torch": (),
    "_files": (),
    "_check": ("_torch",),
    "tokens": ("_files",),
    "ops": ("_check", "_version"),
    "positions": ("ops",),
    "layers": ("positions",),
    "nn": ("layers",),
    "models": ("layers", "tokens"),
    "lens": ("ops", "_files"),
    "hf": ("ops",),
    "view": ("lens",),
    "generation": ("nn", "models"),
    "_look": ("generation", "lens"),
    "_fill": ("_look",),
    "training": ("generation",),
    "labs": ("generation", "training", "view", "regard"),
    "cli": ("labs",),
    "regard": ("generation", "training", "_fill", "view"),
    "__main__": ("cli",),
}


def packages_open_to(package: str) -> set[str]:
    open_packages = {package}
    for upper in UPSTREAM[package]:
        open_packages |= packages_open_to(upper)
    return open_packages


def package_of(module: str) -> str:
    """`regard.ops.mask` is in `ops`; `regard` itself is the top."""
    return module.split(".")[1] if "." in module else "regard"


def own_modules() -> dict[str, Path]:
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        parts = ("regard", *path.relative_to(PACKAGE).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imported_modules(source: str, module: str, is_package: bool, known: set[str]) -> Iterator[str]:
    """Every module of ours that the source imports, wherever in the file the import stands, or
    names in a string constant, through which it could import it unseen."""
    package = module if is_package else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(source)):
        targets: list[str] = []
        if isinstance(node, ast.Import):
            targets = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parts = package.split(".")
                base = ".".join([*parts[: len(parts) - node.level + 1], *filter(None, [base])])
            # `from regard import nn` names a module; `from regard import observe` names the top.
            full = [f"{base}.{alias.name}" for alias in node.names]
            targets = [name if name in known else base for name in full]
        elif isinstance(node, ast.Call) and node.args:
            called = ast.unparse(node.func).rpartition(".")[2]
            name = node.args[0]
            if called in ("import_module", "__import__") and isinstance(name, ast.Constant):
                targets = [str(name.value)]
        elif isinstance(node, ast.Constant) and node.value in known - {"regard"}:
            targets = [node.value]  # "regard" alone is a word like any other
        yield from (name for name in targets if name.split(".")[0] == "regard")


def wrong_imports(source: str, module: str, is_package: bool, known: set[str]) -> list[str]:
    allowed = packages_open_to(package_of(module))
    return [
        f"{module} imports {target}"
        for target in imported_modules(source, module, is_package, known)
        if package_of(target) not in allowed
    ]


def test_imports_point_one_way() -> None:
    modules = own_modules()
    wrong = []
    for module, path in modules.items():
        source = path.read_text(encoding="utf-8")
        wrong += wrong_imports(source, module, path.stem == "__init__", set(modules))
    assert not wrong, "\n".join(wrong)


def test_every_file_lives_in_a_known_package() -> None:
    modules = own_modules()
    assert {"regard", "regard.cli"} <= set(modules)
    assert not [module for module in modules if package_of(module) not in UPSTREAM]


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("regard.ops.mask", "import regard.layers"),
        ("regard.ops.mask", "from regard.layers.cache import Cache"),
        ("regard.ops.mask", "from ..positions import rotate"),
        ("regard.ops.mask", "from .. import positions"),
        ("regard.ops.mask", "from regard import attention as a, nn"),
        ("regard.ops.mask", "from regard import observe"),
        ("regard.ops.mask", "def late():\n    if True:\n        from regard import nn"),
        ("regard.ops.mask", "import importlib\nimportlib.import_module('regard.nn')"),
        ("regard.lens.watch", "HOME = 'regard.view'\nfetch(HOME)"),
        ("regard.positions", "from regard.nn import functional"),
        ("regard.nn.convert", "from regard.models import weights"),
        ("regard.models.config", "import regard.nn"),
        ("regard.generation", "from .training import loop"),
        ("regard.lens.watch", "from regard.layers import block"),
        ("regard.view.page", "import regard.models.config"),
        ("regard.tokens", "from regard._check import check_shapes"),
        ("regard._check", "import regard.ops"),
        ("regard._files", "from regard.models import config"),
        ("regard.layers.block", "from regard.cli import main"),
    ],
)
def test_an_import_against_the_direction_is_found(module: str, source: str) -> None:
    known = {f"regard.{package}" for package in UPSTREAM} | {"regard", module}
    assert wrong_imports(source, module, False, known)


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("regard.ops.op", "from regard.ops.mask import Mask\nfrom . import bias"),
        ("regard.layers.block", "from regard import positions, ops\nimport regard._check"),
        ("regard.layers.block", "from ..ops.mask import Causal\nimport torch.nn"),
        ("regard.models.config", "from regard.layers import block\nimport regard.tokens"),
        ("regard.training.loop", "from regard.models import config\nimport regard.nn.convert"),
        ("regard.view.page", "from regard.lens import record"),
        ("regard.cli", "from regard import observe\nfrom regard.view import page"),
        ("regard.labs.sinks", "import regard\nimport regard.training.loop"),
        ("regard.positions", "import regarding"),
    ],
)
def test_an_import_along_the_direction_passes(module: str, source: str) -> None:
    known = {f"regard.{package}" for package in UPSTREAM} | {"regard", module}
    assert wrong_imports(source, module, False, known) == []


def core_top_levels() -> set[str]:
    """The importable names of torch, numpy, safetensors and of all that these cannot do without."""
    wanted, seen = list(CORE), set()
    while wanted:
        name = wanted.pop().lower().replace("_", "-")
        if name in seen:
            continue
        seen.add(name)
        try:
            needs = importlib.metadata.requires(name) or []
        except importlib.metadata.PackageNotFoundError:
            continue
        for need in map(Requirement, needs):
            if need.marker is None or need.marker.evaluate({"extra": ""}):
                wanted.append(need.name)
    owners = importlib.metadata.packages_distributions()
    return {
        top for top, names in owners.items() if {n.lower().replace("_", "-") for n in names} & seen
    }


def run_fresh(code: str, *arguments: str) -> str:
    """What a fresh interpreter prints; it finds the sources as they are here, and fails loudly."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# Refuses every package that is not in the list handed over; the standard library always passes.
BLOCK_THE_REST = """
import json, sys
ALLOWED = set(json.loads(sys.argv[1])) | set(sys.stdlib_module_names) | {"regard"}
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in ALLOWED:
            raise ModuleNotFoundError(f"{name} is blocked: no extra is installed", name=name)
sys.meta_path.insert(0, Block())
"""

# Kernels are written in triton's own language, so their files need it, and are imported where run.
NEED_TRITON = {
    "regard.ops.kernels.backward_tile_kernels",
    "regard.ops.kernels.decode_kernels",
    "regard.ops.kernels.flash_backward_hopper_kernels",
    "regard.ops.kernels.flash_backward_kernels",
    "regard.ops.kernels.flash_hopper_kernels",
    "regard.ops.kernels.flash_kernels",
    "regard.ops.kernels.hopper_backward_tile_kernels",
    "regard.ops.kernels.hopper_tile_kernels",
    "regard.ops.kernels.largest_hopper_kernels",
    "regard.ops.kernels.largest_kernels",
    "regard.ops.kernels.pooling_hopper_kernels",
    "regard.ops.kernels.pooling_kernels",
    "regard.ops.kernels.row_stats_kernels",
    "regard.ops.kernels.tile_kernels",
    "regard.ops.kernels.tile_lists_kernels",
    "regard.layers.matvec_kernels",
    "regard.training.loss_kernels",
}

IMPORT_EVERY_MODULE = f"""
import importlib, pkgutil, regard
def fail(name):
    raise
for found in pkgutil.walk_packages(regard.__path__, "regard.", onerror=fail):
    if found.name not in {NEED_TRITON | {"regard.hf"}}:
        importlib.import_module(found.name)
    print(found.name)
"""


def test_the_module_for_transformers_says_what_it_needs() -> None:
    code = """
try:
    import regard.hf
except ImportError as missing:
    print(missing)
"""
    allowed = json.dumps(sorted(core_top_levels()))
    assert "pip install transformers" in run_fresh(BLOCK_THE_REST + code, allowed)


def test_every_module_imports_with_no_extra_installed() -> None:
    allowed = sorted(core_top_levels() - {"triton"})
    printed = run_fresh(BLOCK_THE_REST + IMPORT_EVERY_MODULE, json.dumps(allowed))
    assert {"regard", *printed.split()} == set(own_modules())


def test_the_block_really_blocks() -> None:
    tries = """
for name in ("typer", "rich.text", "pytest"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        print("blocked", name)
"""
    printed = run_fresh(BLOCK_THE_REST + tries, json.dumps(sorted(core_top_levels())))
    assert printed.splitlines() == ["blocked typer", "blocked rich.text", "blocked pytest"]


def test_import_regard_loads_nothing_optional() -> None:
    """Beside what torch loads by itself, only ours, the standard library and the core."""
    code = """
import json, sys, torch
before = set(sys.modules)
import regard
regard.attention, regard.observe
print(json.dumps(sorted({name.partition(".")[0] for name in set(sys.modules) - before})))
"""
    loaded = set(json.loads(run_fresh(code)))
    assert "regard" in loaded
    assert not loaded - core_top_levels() - set(sys.stdlib_module_names) - {"regard"}


@pytest.mark.parametrize(
    "first",
    ["regard.observe", "from regard import Causal", "import regard.ops.mask", "regard.nn"],
)
def test_regard_attention_is_the_function_whatever_was_touched_first(first: str) -> None:
    """No module is loaded over it."""
    code = f"""
import regard, types
{first}
assert isinstance(regard.attention, types.FunctionType), regard.attention
from regard import attention
assert attention is regard.attention
"""
    run_fresh(code)


@pytest.mark.parametrize("package", ["ops", "layers", "training", "labs"])
def test_a_package_is_loaded_when_it_is_first_named(package: str) -> None:
    code = f"import regard; print(regard.{package}.__name__, {package!r} in dir(regard))"
    assert run_fresh(code).split() == [f"regard.{package}", "True"]


def test_every_public_name_is_there() -> None:
    code = "import regard; print(*(name for name in regard.__all__ if not hasattr(regard, name)))"
    assert run_fresh(code).split() == []


def test_import_regard_adds_under_100_ms() -> None:
    """Of processor time, the best of several fresh interpreters: neighbours on a busy machine
    make the clock on the wall run on, but not the work that the import does."""
    code = """
import time, torch
start = time.process_time()
import regard
regard.attention, regard.observe
print(time.process_time() - start)
"""
    seconds: list[float] = []
    while len(seconds) < 5 and min(seconds, default=1.0) >= 0.1:
        seconds.append(float(run_fresh(code)))
    assert min(seconds) < 0.1, f"import regard took {min(seconds):.3f} s at best, of {seconds}"
