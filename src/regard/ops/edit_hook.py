"""The hook by which `regard.edit` changes calls of attention and their outputs.

Why: whether a look matters shows when it is forbidden, and what a head adds when it is switched
off. The code that calls attention must not know of it.

How: an editor is asked about each call of its block. It answers None, and the call runs as ever, or
with the call as edited, which is what hooks that look (`call_hook.py`) are given, and a function of
the output. The output is made as without edits, on the kernel that the call has without them; then
the rows that an edit forbids something are computed again (`run_rows`), and put in their place. So
an edit costs what it changes, at any length, and all else keeps its bits.

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
"""Numbers of a rule that are rendered at a time for rows that are computed again."""


@dataclass(frozen=True, eq=False)
class Edited:
    """A call as it is after edits, and what becomes of its output (B, H, T, E)."""

    call: Call
    change: Callable[[Tensor], Tensor]


class Caller(NamedTuple):
    """Who calls attention, where a hook knows it, and where its tokens stand (`lens/edit`)."""

    module: nn.Module
    cross: bool | None = None
    standing: Any = None


class Editor(Protocol):
    """Whoever edits calls; None for those that it leaves as they are."""

    def edit(self, call: Call, caller: Caller | None = None) -> Edited | None: ...


@dataclass(eq=False)
class Block:
    """One open block; one that has ended may still be known to a context that was copied."""

    editor: Editor
    thread: int = field(default_factory=threading.get_ident)
    is_open: bool = True


n_open = 0
"""How many blocks are open, in all threads; where there is none, nothing else is asked."""
_own: ContextVar[tuple[Block, ...]] = ContextVar("regard_edits", default=())
_lock = threading.Lock()


def open_editors() -> list[Editor]:
    """Those of this thread and context, the outermost first."""
    thread = threading.get_ident()
    blocks = (block for block in _own.get() if block.is_open and block.thread == thread)
    return [block.editor for block in blocks]


@contextmanager
def editing(editor: Editor) -> Iterator[None]:
    """Ask the editor about the calls of attention in this block, after those of outer blocks."""
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
    """A call as all editors of this thread and context leave it; None where none changes it."""
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
    """Attention of some queries of a call alone: parts of the rows, and their outputs."""
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
    """Rising numbers as runs of neighbours, first and past-the-last."""
    runs: list[tuple[int, int]] = []
    for row in rows:
        if runs and runs[-1][1] == row:
            runs[-1] = runs[-1][0], row + 1
        else:
            runs.append((row, row + 1))
    return runs
