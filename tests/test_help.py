"""What `help()` shows of the public names: every parameter is explained, and the examples run."""

import contextlib
import doctest
import importlib
import inspect
import io
import re
from pathlib import Path
from typing import Any

import pytest
import torch

import regard

PARTS = {
    "layers": "BlockConfig Decoder Encoder FeedForward ProjectionBias RelativeConfig make_norm",
    "positions": "DynamicNTK Learned Linear Llama3 LongRoPE Rotary RotaryConfig Sinusoidal YaRN "
    "scaling_from_dict",
    "models": "config_of named_config",
    "view": "make_widget plot serve write_page",
    "labs": "fit_chinchilla fit_kaplan",
}
"""What is made or called by hand of the packages below."""
NAMES = [name for name in regard.__all__ if callable(getattr(regard, name))]
NAMES += [f"{part}.{name}" for part, names in PARTS.items() for name in names.split()]
FOUND = {"Record", "Tokenizer", "KVCache", "Mask", "Bias", "HeadOutputs", "Explanation"}
"""Classes that a user is given, by a call or a static method, and does not construct by arguments;
`Observation` is one, too, whose fields are those of `Wants`."""
PARAMETERS = sorted(set(NAMES) - FOUND - {"Observation"})


def find(name: str) -> Any:
    part, _, own = name.rpartition(".")
    return getattr(importlib.import_module(f"regard.{part}") if part else regard, own)


def explained(name: str) -> str:
    """The docstrings that `help()` shows first: of a class those of its constructor, too."""
    thing = find(name)
    parts = [inspect.getdoc(thing)]
    if inspect.isclass(thing) and "__init__" in vars(thing):
        parts.append(inspect.cleandoc(thing.__init__.__doc__ or ""))
    return "\n\n".join(part for part in parts if part)


@pytest.mark.parametrize("name", PARAMETERS)
def test_every_parameter_is_explained(name: str) -> None:
    text = explained(name)
    parameters = inspect.signature(find(name)).parameters
    named = {
        n
        for group in re.findall(r"(?:^|\. )\s*((?:\w+,\s+)*\w+):\s", text, re.M)
        for n in re.split(r",\s+", group)
    }
    asked = {
        parameter.name
        for parameter in parameters.values()
        if parameter.kind is not parameter.VAR_KEYWORD
    }
    assert asked - named == set()


@pytest.mark.parametrize("name", NAMES)
def test_the_examples_run(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    example = doctest.DocTestParser().get_doctest(
        explained(name), {"regard": regard, "torch": torch}, name, None, 0
    )
    report = io.StringIO()
    runner = doctest.DocTestRunner(verbose=False, optionflags=doctest.ELLIPSIS)
    with contextlib.redirect_stdout(io.StringIO()):
        runner.run(example, out=report.write)
    assert runner.failures == 0, report.getvalue()
