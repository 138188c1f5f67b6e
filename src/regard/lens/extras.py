"""What is recorded beside weights if it was asked for: predictions, values and gradients.

How: the recorder calls `begin` and `end` when modules begin and end, and `prepare` and `follow`
when a call opens a place. The model's logits are kept until its outermost module ends, the weight
of a place's output projection is looked up, and tensor hooks are put on values and on the
projection's input.

Left out: gradients of a text that is read in several calls, which are not summed over calls.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from regard.lens.captured_call import Call
from regard.lens.contributions import find_projection, head_matrices, sum_gradient
from regard.lens.lazy_weights import Array
from regard.lens.predictions import Predictions, logits_of
from regard.lens.schema import Place
from regard.lens.stitch_calls import Take

EXTRAS = ("values", "predictions", "gradients")


class Extras:
    """Which extras were asked for, by name, and what has been seen of them."""

    def __init__(
        self,
        model: nn.Module,
        asked: Collection[str],
        heads: Sequence[int] | None,
        vocab_sizes: Collection[int],
    ) -> None:
        self.model, self.asked, self.heads = model, frozenset(asked), heads
        self.vocab_sizes = set(vocab_sizes)
        self.wants_logits = "predictions" in self.asked
        self.predictions: dict[int, Predictions] = {}
        self._projections: dict[str, nn.Module | None] = {}
        self.readers: dict[int, Callable[[Tensor], None]] = {}  # by the modules waited for
        self._logits_blv: Tensor | None = None

    @property
    def wants_values(self) -> bool:
        """Whether calls must be recorded with their values."""
        return not self.asked.isdisjoint({"values", "gradients"})

    def begin(self, module: nn.Module, args: Sequence[Any]) -> None:
        """A module begins; if it is a projection that is waited for, put a hook on its input."""
        read = self.readers.pop(id(module), None)
        if read is not None and args:
            read(args[0])

    def end(
        self, output: Any, outermost: bool, ids_bt: Tensor | None, rows: Mapping[int, int]
    ) -> None:
        """A module has ended; the last logits before the outermost one ends are the model's.

        rows: for each row of the record, its row in the batch now.
        """
        found = logits_of(output, self.vocab_sizes)
        self._logits_blv = self._logits_blv if found is None else found
        logits_blv = self._logits_blv
        if not outermost or logits_blv is None:
            return
        self._logits_blv = None
        fits = ids_bt is not None and len(ids_bt) in (1, len(logits_blv))
        if fits and ids_bt is not None and logits_blv.shape[1] <= ids_bt.shape[1]:
            for row, now in rows.items():
                ids_t = ids_bt[now if len(ids_bt) > 1 else 0]
                said = self.predictions.setdefault(row, Predictions())
                said.add(ids_t, logits_blv[now].detach())

    def prepare(self, take: Take, whole: Call) -> None:
        """A place is opened by `whole`, the call with all rows and heads: find its projection."""
        if "values" in self.asked and whole.v is not None:
            found = self._projection(whole, whole.v)
            if found is not None:
                take.projection_hce = head_matrices(found, whole.shape.H, self.heads)

    def follow(self, take: Take, whole: Call, row: int) -> None:
        """Put hooks on a call's values and on the output of its heads, to record gradients."""
        v = whole.v
        if "gradients" not in self.asked or v is None or not v.requires_grad:
            return
        projection = self._projection(whole, v)
        if projection is None:
            return
        H, G = whole.shape.H, v.shape[1]
        heads = list(self.heads or range(H))

        def put_columns(product_bgse: Tensor) -> None:
            sums_gs = product_bgse[row].sum(-1) / (H // G)
            take.gradients["columns"] = sums_gs.repeat_interleave(H // G, 0)[heads]

        def put_rows(product_btx: Tensor) -> None:
            T = product_btx.shape[1]
            sums_th = product_btx[row].reshape(T, H, -1).sum(-1)
            take.gradients["rows"] = sums_th.T[heads]

        sum_gradient(v, put_columns)
        self.readers[id(projection)] = lambda x: sum_gradient(x, put_rows)

    def _projection(self, whole: Call, v: Tensor) -> nn.Module | None:
        if whole.name not in self._projections:
            found = find_projection(self.model, whole.name, whole.shape.H * v.shape[3])
            self._projections[whole.name] = found
        return self._projections[whole.name]

    def finish(self, places: Sequence[Place], arrays: dict[str, Array]) -> dict[str, Array]:
        """Arrays of predictions, stored at the last causal place that read exactly these tokens."""
        reading = [
            number
            for number, place in enumerate(places)
            if place.causal and len(arrays.get(f"{number}.ids", ())) > 1
        ]
        found: dict[str, Array] = {}
        for said in self.predictions.values():
            ids = said.ids_t.tolist()
            alike = [n for n in reading if arrays[f"{n}.ids"].tolist() == ids]
            if alike:
                reading.remove(alike[-1])
                found |= {f"{alike[-1]}.{name}": array for name, array in said.finish().items()}
        return found

    def check(self, arrays: dict[str, Array]) -> None:
        """Raise ValueError if something was asked for and nothing of it was seen."""
        names = {"values": "value_norms", "gradients": "gradient_rows"}
        for asked, name in names.items():
            if asked in self.asked and not any(full.endswith(f".{name}") for full in arrays):
                raise ValueError(f'keep has "{asked}", but none were seen: {WHY_NOT[asked]}')


WHY_NOT = {
    "values": "attention hands no values to where they can be watched, or no layer of the model "
    "reads what its heads give",
    "gradients": "call backward() inside the block, on a text read in one call, with gradients on, "
    "of a model that is not compiled",
}
