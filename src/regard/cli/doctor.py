"""`regard doctor`: what this machine has, and which backends answer on it."""

# No `from __future__ import annotations` here: see `cli/__init__.py`.
import platform
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING

from regard._version import __version__
from regard.cli.printing import refusing, write_line

if TYPE_CHECKING:
    import typer
    from rich.console import Console

DOCTOR_HELP = """Say what this machine has, and which backends answer.

Versions, devices, and for each backend whether it would take a plain causal call or why not. Send
the output along when you report a problem.
"""


def version_of(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def doctor(console: "Console") -> None:
    import torch

    from regard.ops import Causal, explain
    from regard.ops.kernels.tiles import describe_tiles

    say = partial(write_line, console)
    say(f"{'regard':<16} {__version__}")
    say(f"{'python':<16} {platform.python_version()} on {platform.system()} {platform.machine()}")
    known = ("torch", "numpy", "safetensors", "triton", "tokenizers", "huggingface_hub", "gguf")
    for package in (*known, "typer", "rich"):
        say(f"{package:<16} {version_of(package)}")
    say(f"{'cpu':<16} {torch.get_num_threads()} threads")
    devices = ["cpu"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            devices.append(f"cuda:{index}")
            say(f"{devices[-1]:<16} {found.name}, {found.total_memory / 2**30:.0f} GiB")
            say(f"{'':<16} {describe_tiles((found.major, found.minor))}")
    else:
        say(f"{'cuda':<16} none that torch can use")
    for device in devices:
        q_bhtd = torch.zeros(1, 2, 64, 32, device=device)
        say()
        say(f"backends on {device}, asked for a causal call in float32:")
        for line in str(explain(q_bhtd, q_bhtd, q_bhtd, mask=Causal())).splitlines():
            say(f"  {line}")


def add_doctor(app: "typer.Typer") -> None:
    from rich.console import Console

    @app.command("doctor", help=DOCTOR_HELP)
    def doctor_command() -> None:
        with refusing(Console(stderr=True)):
            doctor(Console())
