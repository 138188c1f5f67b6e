"""What is private in torch is used in `_torch.py` alone, with the versions it was seen in."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from test_imports import PACKAGE

from regard import _torch


def private_names(source: str) -> Iterator[str]:
    """Every private name of torch that a source uses: `torch._C`, `from torch._dynamo import x`."""
    tree = ast.parse(source)
    modules = {"torch"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules |= {a.asname or a.name for a in node.names if a.name.startswith("torch")}
            spelled = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules |= {
                alias.asname or alias.name
                for alias in node.names
                if (node.module or "").startswith("torch") and alias.name.islower()
            }
            spelled = [f"{node.module}.{alias.name}" for alias in node.names]
        else:
            continue
        yield from (name for name in spelled if re.match(r"torch(\.\w+)*\._[a-zA-Z]", name))
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and re.match(r"_[a-zA-Z]", node.attr):
            spelled_out = ast.unparse(node)
            if spelled_out.split(".")[0] in modules and "(" not in spelled_out:
                yield spelled_out


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch._C._functorch.x()",
        "from torch._dynamo import x",
        "from torch.utils import _pytree",
        "from torch.autograd import forward_ad\nforward_ad._current_level",
        "import torch\ntorch.ops.aten._flash(1)",
        "from torch import overrides\nstack = overrides._get_current_function_mode_stack",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    assert list(private_names(source))


def test_no_other_file_uses_private_names_of_torch() -> None:
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in sorted(PACKAGE.rglob("*.py"))
        if path.name != "_torch.py"
        and (names := list(private_names(path.read_text(encoding="utf-8"))))
    }
    assert not found, found


def test_the_version_that_runs_is_one_they_were_seen_in() -> None:
    text = Path(_torch.__file__).read_text(encoding="utf-8")
    seen = re.search(r"Seen in torch ([\d. and,]+):", text)
    assert seen is not None
    running = ".".join(torch.__version__.split(".")[:2])
    assert running in re.findall(r"\d+\.\d+", seen[1])
