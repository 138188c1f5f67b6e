"""The hook by which `regard.edit` changes calls of attention and their outputs.

Why: forbidding a look shows whether it matters, and switching off a head shows what it adds. The
code that calls attention must not depend on it.

How: an editor gets each call of its block. It returns None, and the call runs unchanged, or an
`Edited`: the edited call, which is what observing hooks (`call_hook.py`) get, and a function of the
output. The output is computed without edits, on the kernel that the call has without them; then the
rows that an edit forbids something are recomputed (`run_rows`) and replaced. So an edit costs what
it changes, at any length, and everything else keeps its bits.

A block belongs to the thread and the context (`contextvars`) in which it was opened.

Letters: B batch, H heads, T queries, S keys, E value width.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn

from regard.ops.backends import choose
from regard.ops.bias import DenseBias
from regard.ops.call import Call, make_call, outside_autocast, score_dtype
from regard.ops.shape import Tile

PIECE = 1 << 24
"""Numbers of a rule that are rendered at a time for rows that are recomputed."""


@dataclass(frozen=True, eq=False)
class Edited:
    """An edited call, and the function that changes its output (B, H, T, E)."""

    call: Call
    change: Callable[[Tensor], Tensor]


class Caller(NamedTuple):
    """The module that calls attention, where known, and its tokens' positions (`lens/edit`)."""

    module: nn.Module
    cross: bool | None = None
    standing: Any = None


class Editor(Protocol):
    """Edits calls; `edit` returns None for a call that it leaves unchanged."""

    def edit(self, call: Call, caller: Caller | None = None) -> Edited | None: ...


@dataclass(eq=False)
class Block:
    """One block of an editor; when it has ended, copies of the context may still refer to it."""

    editor: Editor
    thread: int = field(default_factory=threading.get_ident)
    is_open: bool = True


n_open = 0
"""How many blocks are open, in all threads; while it is 0, nothing else is checked."""
_own: ContextVar[tuple[Block, ...]] = ContextVar("regard_edits", default=())
_lock = threading.Lock()


def open_editors() -> list[Editor]:
    """The editors of this thread and context, outermost first."""
    thread = threading.get_ident()
    blocks = (block for block in _own.get() if block.is_open and block.thread == thread)
    return [block.editor for block in blocks]


@contextmanager
def editing(editor: Editor) -> Iterator[None]:
    """Let the editor edit the calls of attention in this block, after editors of outer blocks."""
    global n_open
    block = Block(editor)
    with _lock:
        n_open += 1
    _own.set((*_own.get(), block))
    try:
        yield
    finally:
        block.is_open = False
        with _lock:
            n_open -= 1
        _own.set(tuple(other for other in _own.get() if other.is_open))


def edit_call(call: Call, caller: Caller | None = None) -> Edited | None:
    """Apply all editors of this thread and context to a call; None if none changes it."""
    if torch.compiler.is_compiling():
        return None
    found: list[Edited] = []
    for editor in open_editors():
        edited = editor.edit(call, caller)
        if edited is not None:
            found.append(edited)
            call = edited.call

    def change(output: Tensor) -> Tensor:
        for edited in found:
            output = edited.change(output)
        return output

    return Edited(call, change) if found else None


def run_rows(call: Call, rows: Sequence[int]) -> Iterator[tuple[list[int], Tensor]]:
    """Attention for some queries of a call: yields parts of these rows, each with its output."""
    rule, shape = call.rule, call.rule.shape
    like = call.q.new_empty(0, dtype=score_dtype(call.q.dtype))
    first = rule.block(Tile(0, 1, 0, shape.S), like)
    step = max(PIECE // max(first.shape[0] * first.shape[1] * shape.S, 1), 1)
    for start in range(0, len(rows), step):
        part = list(rows[start : start + step])
        tiles = (Tile(t0, t1, 0, shape.S) for t0, t1 in runs_of(part))
        added = torch.cat([rule.block(tile, like) for tile in tiles], 2)
        few = make_call(
            call.q[:, :, part],
            call.k,
            call.v,
            bias=DenseBias(added),
            scale=rule.scale,
            softcap=rule.softcap,
            sinks=call.sinks,
            dropout=call.dropout,
        )
        with outside_autocast(call.q.device.type):
            yield part, choose(few, "auto").run(few)


def runs_of(rows: Sequence[int]) -> list[tuple[int, int]]:
    """Ascending numbers as runs of neighbours, (first, past the last) each."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = runs[-1][0], row + 1
        else:
            runs.append((row, row + 1))
    return runs
