"""How far long work is: a bar on a terminal, one plain line elsewhere, nothing for short work.

Why: a long text is read for minutes, and silence looks like a fault.

How: in a block of `showing` a model reads, as `see` of `_look.py` has it; it gives the function
that `watch(progress=...)` calls with each place and its number. `counting` is the bar itself.
`working` says what is done, where there are no steps to count. All are on standard error and go
away when the work is done. Nothing is to be printed meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING

from regard.cli.printing import write_line

if TYPE_CHECKING:
    from rich.console import Console

    from regard.lens.recorder import Progress

MANY = 2000  # tokens; from here on reading takes more than a moment


@contextmanager
def showing(
    notes: Console, n_tokens: int, n_places: int | None, *, again: bool = False
) -> Iterator[Progress | None]:
    """Show how far the reading is; `again`: the tokens were there before (a translation)."""
    if n_tokens < MANY:
        yield None
        return
    doing = f"reading {n_tokens:,} tokens{' again' if again else ''}"
    if not notes.is_terminal:
        write_line(notes, f"{doing} ...")
        yield None
        return
    with counting(notes, doing, n_places) as count:
        yield lambda place, done: count(done)


@contextmanager
def counting(notes: Console, doing: str, total: int | None) -> Iterator[Callable[..., None]]:
    """A bar on a terminal, that is told how much of the total is done, and, by their names, another
    `total` or `description`; elsewhere nothing."""
    from rich import progress

    columns = (
        progress.TextColumn("{task.description}", markup=False),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(
        *columns,
        console=notes,
        transient=True,
        redirect_stdout=False,
        redirect_stderr=False,
        disable=not notes.is_terminal,
    ) as bar:
        task = bar.add_task(doing, total=total)
        yield lambda done, **other: bar.update(task, completed=done, **other)


def working(notes: Console, doing: str) -> AbstractContextManager[object]:
    from rich.text import Text

    return notes.status(Text(doing))
