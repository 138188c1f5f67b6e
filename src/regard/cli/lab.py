"""`regard lab`: claims of lectures on attention, each run for real.

How: `regard.labs` measures and writes; here its words go to the terminal, and how far it is.
"""

# No `from __future__ import annotations` here: see `cli/__init__.py`.
import textwrap
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from regard.cli.printing import refusing, write_line
from regard.cli.progress import counting

if TYPE_CHECKING:
    import typer
    from rich.console import Console

LAB_HELP = """Predict, run, and see the true number: what lectures on attention claim.

Examples:

  regard lab

  regard lab scaling --tiny

  regard lab --all --tiny

Without a NAME the labs are listed. Each asks one question and says what one would predict; predict
yourself before it ends. It writes NAME.json (all numbers), NAME.png (the figure) and NAME.md (one
page) into --out. --tiny takes about a minute or less on a CPU and shows how it goes; whole runs are
made for a GPU and give the numbers of docs/labs. A lab that was stopped goes on when it is started
again.
"""


def list_labs(console: "Console") -> None:
    from regard.labs import NAMES, find_lab

    for name in NAMES:
        write_line(console, f"{name:<14} {find_lab(name).question}")


def run_one(name: str, out: Path, tiny: bool, device: str | None, notes: "Console") -> None:
    from rich.console import Console

    from regard.labs import find_lab, run_lab

    lab, console = find_lab(name), Console()
    for title, words in (("", lab.question), ("Predict first: ", lab.prediction)):
        write_line(console, textwrap.fill(title + words, 100))
    with counting(notes, name, None) as tell:
        run = run_lab(
            name,
            out,
            tiny=tiny,
            device=device,
            progress=lambda doing, done, total: tell(
                done, total=total, description=f"{name}: {doing}"
            ),
        )
    for sentence in lab.find(run.results):
        write_line(console, textwrap.fill(f"Finding: {sentence}", 100))
    write_line(notes, f"{run.seconds:,.0f} s; {out / name}.md, .png, .json")


def add_lab(app: "typer.Typer") -> None:
    from rich.console import Console
    from typer import Argument, Option

    @app.command("lab", help=LAB_HELP)
    def lab_command(
        name: Annotated[str | None, Argument(help="Which; none lists them.")] = None,
        every: Annotated[bool, Option("--all", help="Run all, one after another.")] = False,
        tiny: Annotated[bool, Option("--tiny", help="The short run, for a CPU.")] = False,
        out: Annotated[Path, Option(help="The folder to write into.")] = Path("labs"),
        device: Annotated[
            str | None, Option(help="cpu, cuda, ...; by default a GPU, if there is one.")
        ] = None,
    ) -> None:
        from regard.labs import NAMES, find_lab

        notes = Console(stderr=True)
        with refusing(notes):
            if every and name is not None:
                raise ValueError(f"--all runs every lab; leave out {name!r}, or --all")
            if not every and name is None:
                list_labs(Console())
                return
            names = list(NAMES) if name is None else [find_lab(name).name]
            for number, each in enumerate(names):
                if number:
                    write_line(Console(), "")
                run_one(each, out, tiny, device, notes)
