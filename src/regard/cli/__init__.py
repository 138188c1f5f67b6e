"""The `regard` command: look at attention, and let models write, from a terminal.

Why: the shortest way from an installed package to a picture of what a head looks at, and from a
model's folder to its text.

How: one file a command; each has a plain function that writes to a rich console, and a function
`add_...` that hands it to typer. Both packages belong to the extra `cli` and are imported where
used, so that these modules always import; torch is imported only by the command that needs it.
Every word of a user or a model is made printable first (`printing.py`): no text can steer the
terminal.

Left out: what a command does beyond words and files; that is the library's.
"""

# No `from __future__ import annotations` here: typer reads the annotations of functions that are
# defined inside `build_app`, and could not resolve them from strings.
import io
import os
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

from regard._version import __version__
from regard.cli.doctor import add_doctor
from regard.cli.fill import add_fill
from regard.cli.generate import add_generate
from regard.cli.lab import add_lab
from regard.cli.look import EXAMPLE_TEXT, add_look
from regard.cli.survey import add_survey
from regard.cli.train import add_train
from regard.cli.translate import add_translate
from regard.cli.view import add_view

if TYPE_CHECKING:
    import typer

TOP_HELP = f"""See what the attention heads of a model look at.

Start here:  regard look "{EXAMPLE_TEXT}"

In attention every word looks at other words and takes in what it finds there. Each head does this
in its own way; its weights say how much it takes from each word. `look` shows them.
"""


def build_app() -> "typer.Typer":
    """The command line itself; needs the extra `cli`."""
    import typer

    app = typer.Typer(
        name="regard",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(__version__)
            raise typer.Exit

    @app.callback(help=TOP_HELP)
    def top(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=show_version, is_eager=True, help="Show the version and exit."
            ),
        ] = False,
    ) -> None:
        pass

    looking, writing = (add_look, add_survey, add_view), (add_translate, add_generate, add_fill)
    for add in (*looking, *writing, add_train, add_lab, add_doctor):
        add(app)
    return app


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code: 0 done, 2 not understood or refused."""
    if "OMP_NUM_THREADS" not in os.environ:
        # Read when numpy is loaded. Its products here are small: threads would wait for each other.
        os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # whoever started us had closed it
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a sign gets its number instead of a traceback.
            stream.reconfigure(errors="backslashreplace")
    try:
        app = build_app()
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(
            f"The regard command needs the package {package}, which is not installed: "
            "pip install 'regard[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    app(args=None if arguments is None else list(arguments), prog_name="regard")
