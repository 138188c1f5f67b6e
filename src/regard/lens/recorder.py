"""What a model's attention is called with, put in order: the recorder, to which hooks give calls.

How: it knows the modules of the model and which of them is running, by hooks that belong to no
module. A call goes to the take of its place that it continues, or opens a new one
(`stitch_calls.py`). Layers are numbered in the order in which they are called, each stack and each
kind from 0 on (`stack_of`): a module that shares its weights among twelve layers is twelve layers,
and what a list holds beside attention is none. Layers that are not wanted count too.

Letters: B batch, T queries, S keys, H heads.
"""

from __future__ import annotations

import datetime
import itertools
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard._torch import without_mode
from regard.lens.captured_call import Call
from regard.lens.device_to_host import HostCopier
from regard.lens.extras import Extras
from regard.lens.head_names import name_model
from regard.lens.lazy_weights import Array
from regard.lens.measure import FoundRuns, find_runs
from regard.lens.schema import Description
from regard.lens.stitch_calls import Take
from regard.ops import Wants
from regard.ops.call import Rule, under_autocast
from regard.ops.pack import pack

MOST_TAKES = 256
"""Places that one module may become; a training loop is not to be watched."""
CROSS = re.compile(r"cross|encoder_attn|EncDec|enc_dec|multihead_attn|encoder_decoder", re.I)
NO_WORDS = re.compile(r"pos|type|seg|rel|bias|wpe|dist|time|layer_norm", re.I)
LENGTHS = ("trained_len", "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Under which names configs say how long a text may be, the most telling first."""
Progress: TypeAlias = Callable[[str, int], None]
"""Called with the place that was just recorded, and how many calls have been so far."""


class Running(threading.local):
    """What runs in a thread: modules, outermost first, and how many hooks are handling a call.

    `entered` counts how often the outermost module of now has run each of its modules, and
    `attended` how often each name has attended.
    """

    def __init__(self) -> None:
        self.stack: list[nn.Module] = []
        self.hooks = 0
        self.entered: Counter[int] = Counter()
        self.attended: Counter[str] = Counter()


@dataclass(frozen=True)
class Located:
    """The name of the place that a call is of, and its layer."""

    name: str
    layer: int


class Recorder:
    """Where hooks give their calls; knows the model's modules and which of them is running."""

    def __init__(
        self,
        model: nn.Module,
        wants: Wants,
        layers: Collection[int | str] | None,
        heads: Sequence[int] | None,
        keep: str,
        row: int | None,
        extras: Sequence[str] = (),
    ) -> None:
        self.model, self.wants, self.keep, self.row = model, wants, keep, row
        self.layers = None if layers is None else tuple(layers)
        self.heads = None if heads is None else tuple(heads)
        kind = type(model).__name__
        self.names = {id(module): name or kind for name, module in model.named_modules()}
        self.takes: dict[str, list[Take]] = {}
        self.order: list[Take] = []
        self.copier = HostCopier()
        self.running = Running()
        self.ids_bt: Tensor | None = None
        self.progress: Progress | None = None
        self.n_calls = 0
        self.mode: TorchFunctionMode | None = None
        self._runs: dict[Any, tuple[Any, FoundRuns | None]] = {}
        self._layers: dict[tuple[str, bool], dict[tuple[str, int], int]] = {}
        self._passed_over: dict[str, int] = {}
        self._words = _word_tables(model)
        sizes = {table.num_embeddings for table in self._words.values()}
        self.extras = Extras(model, extras, self.heads, sizes)

    def stack(self) -> list[nn.Module]:
        return self.running.stack

    @property
    def busy(self) -> bool:
        """Whether a hook is handling a call, whose inner calls are its own affair."""
        return self.running.hooks > 0

    @contextmanager
    def alone(self) -> Iterator[None]:
        """What happens inside is part of a call that was seen already."""
        self.running.hooks += 1
        try:
            yield
        finally:
            self.running.hooks -= 1

    def unseen(self) -> AbstractContextManager[None]:
        return without_mode(self.mode)

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Track the running module, by global hooks: torch.nn's fast paths avoid any others."""

        def enter(module: nn.Module, args: Any) -> None:
            if id(module) not in self.names:
                return
            if not self.stack():
                self.running.entered.clear()
                self.running.attended.clear()
            self.stack().append(module)
            self.running.entered[id(module)] += 1
            ids = args[0] if args and id(module) in self._words else None
            if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
                # Once for all layers, and before any of them keeps the device busy.
                self.ids_bt = ids.detach().cpu()
            self.extras.begin(module, args)

        def leave(module: nn.Module, args: Any, output: Any) -> None:
            stack = self.stack()
            if id(module) in self.names and module in stack:
                del stack[len(stack) - 1 - stack[::-1].index(module) :]
                if self.extras.wants_logits:
                    with self.alone(), self.unseen():
                        self.extras.end(output, not stack, self.ids_bt, self.row or 0)

        hooks = torch.nn.modules.module
        with (
            hooks.register_module_forward_pre_hook(enter),
            hooks.register_module_forward_hook(leave, always_call=True),
        ):
            try:
                yield
            finally:
                self.stack().clear()

    def name_of(self, module: nn.Module | None = None) -> str | None:
        """The dotted name of a module, or of the one that is running; None if it is not ours."""
        if module is None:
            stack = self.stack()
            return self.names[id(stack[-1])] if stack else None
        return self.names.get(id(module))

    def locate(self, call: Call) -> Located:
        """The layer of a call and the name of its place, by how often it has been there."""
        entered, attended = self.running.entered, self.running.attended
        stack = self.stack()
        turn = call.name, entered[id(stack[-1])] if stack else 0
        numbers = self._layers.setdefault((stack_of(call.name), is_cross(call)), {})
        attended[call.name] += 1
        name = name_place(call.name, attended[call.name])
        return Located(name, numbers.setdefault(turn, len(numbers)))

    def wanted(self, call: Call, found: Located) -> bool:
        self._passed_over[found.name] = found.layer
        if self.layers is None:
            return True
        # "" is around everything, and "a" around "a.b".
        around = itertools.accumulate(call.name.split("."), "{}.{}".format)
        return not {found.layer, found.name, "", *around}.isdisjoint(self.layers)

    def run(self, call: Call, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.take(call)
        with self.alone():
            return function(*args, **kwargs)

    @torch.no_grad()
    def take(self, call: Call) -> None:
        located = self.locate(call)
        found = located if self.wanted(call, located) else None
        # What is not wanted may still continue what is recorded, in a loop of the model's own.
        if found is None and not self.takes.get(call.name):
            return
        q, k, _ = under_autocast(call.q, call.k, call.k)
        dtype = torch.promote_types(q.dtype, k.dtype)
        call = replace(call, q=q.to(dtype), k=k.to(dtype))
        # Measuring is made of torch's functions too, none of which our mode needs to look at.
        with self.alone(), self.unseen(), torch.autocast(call.q.device.type, enabled=False):
            if not self._take(call, found):
                return
            self.n_calls += 1
            if self.progress is not None:
                self.progress(call.name, self.n_calls)

    def _take(self, call: Call, found: Located | None) -> bool:
        """Record a call, and say whether it was: one that is not `found` only continues others."""
        B = call.shape.B
        if self.row is None and B > 1 and not call.is_row:
            what = f"{call.name} attends in a batch of {B} rows, and a record is of one"
            raise ValueError(f"{what}: name it, watch(model, row=0)")
        row = 0 if call.is_row else self.row or 0
        if not -B <= row < B:
            raise ValueError(f"row is {row}, and the batch has {B} rows")
        if self.heads is not None and not all(0 <= h < call.shape.H for h in self.heads):
            raise ValueError(f"heads are {self.heads}, and {call.name} has {call.shape.H}")
        if not call.shape.T or not call.shape.S:
            return False
        ids = self._ids(B, row % B, call.shape.T)
        whole = call if self.extras.wants_values else replace(call, v=None)
        call = whole.of(row % B, self.heads)
        runs = self.runs_of(call)
        takes = self.takes.setdefault(call.name, [])
        for take in takes:
            fit = take.fit(call, runs)
            if fit is None:
                moved = take.fit_slots(call)
                fit = None if moved is None else take.fit(moved, self.runs_of(moved))
            if fit is not None:
                take.add(fit, ids)
                return True
            if take.grows(call, ids):
                # The same text, read anew and farther: generation without a cache.
                fresh = replace(take)
                fresh.reads = take.reads
                takes[takes.index(take)] = self.order[self.order.index(take)] = fresh
                break
        else:
            if found is None:
                return False
            fresh = self._make_take(call, takes, found)
            self.extras.prepare(fresh, whole)
        fit = fresh.fit(call, runs)
        assert fit is not None, "the first call of a take always fits"
        fresh.add(fit, ids)
        self.extras.follow(fresh, whole, row % B)
        return True

    def _make_take(self, call: Call, takes: list[Take], found: Located) -> Take:
        if len(takes) >= MOST_TAKES:
            raise ValueError(
                f"{call.name} was called {MOST_TAKES} times for texts that do not continue each "
                "other; a block records one text, and what is written after it"
            )
        name, number, known = found.name, len(takes), {take.name for take in takes}
        while name in known:  # another text
            number += 1
            name = name_place(call.name, number)
        cross, heads = is_cross(call), self.heads or ()
        take = Take(name, found.layer, self.wants, self.keep, self.copier, cross, heads)
        takes.append(take)
        self.order.append(take)
        return take

    def _ids(self, B: int, row: int, T: int) -> Tensor | None:
        """The tokens of the queries, where as many were read last as there are queries."""
        ids = self.ids_bt
        if ids is None or ids.shape[1] != T or ids.shape[0] not in (1, B):
            return None
        return ids[row if ids.shape[0] > 1 else 0]

    def runs_of(self, call: Call) -> FoundRuns | None:
        """The runs of a call; layers share masks, so each is looked at once."""
        rule = call.rule
        key = _rule_key(rule)
        if key not in self._runs:
            if len(self._runs) > 16:
                self._runs.pop(next(iter(self._runs)))
            # Held with its tensors, so that no other tensor can have their addresses.
            self._runs[key] = (rule, find_runs(rule))
        return self._runs[key][1]

    def finish(self) -> tuple[Description, dict[str, Array]]:
        kind = type(self.model).__name__
        if not self.order and self._passed_over:
            raise ValueError(
                f"none of the places of {kind} is among the layers asked for, {self.layers}; there "
                f"are {', '.join(f'{n}: {name}' for name, n in self._passed_over.items())}"
            )
        if not self.order:
            raise ValueError(
                f"no attention was seen in {kind}: either it was not called in the block, or it "
                "attends in a way that cannot be watched (compiled code, or a kernel of its own)"
            )
        config = getattr(self.model, "config", None)
        name = getattr(config, "_name_or_path", None) or getattr(config, "name", None)
        model = name_model(name) if isinstance(name, str) and name else kind
        seen, arrays = Description(kept=self.keep, model=model), {}
        seen.trained_len = find_trained_len(config)
        seen.created = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for number, take in enumerate(self.order):
            place, rule, found = take.finish()
            seen.places.append(place)
            seen.rules.append(rule)
            arrays.update({f"{number}.{name}": array for name, array in found.items()})
        self.extras.check(arrays)
        return seen, arrays | self.extras.finish(seen.places, arrays)


def stack_of(name: str) -> str:
    """The stack of a module: what comes before the last number of its name, without numbers."""
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdecimal()]
    last = numbers[-1] if numbers else len(parts) - 1
    return ".".join(part for part in parts[:last] if not part.isdecimal())


def name_place(name: str, number: int) -> str:
    return name if number == 1 else f"{name}@{number}"


def find_trained_len(config: Any) -> int | None:
    """How long the texts were that a model was made for, as its config says: ours, or another's."""
    source = getattr(config, "source", None)
    if not isinstance(source, Mapping):
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        source = {name: getattr(text, name, None) for name in LENGTHS}
    sizes = (source.get(name) for name in LENGTHS)
    return next((size for size in sizes if type(size) is int and size > 0), None)


def is_cross(call: Call) -> bool:
    """Whether a call looks at another text: as its hook says, else by the place's name."""
    if call.cross is not None:
        return call.cross
    own = "self" in call.name.rpartition(".")[2].lower()
    return CROSS.search(call.name) is not None and not own


def _rule_key(rule: Rule) -> Any:
    """What tells two rules apart, without reading large tensors."""
    packed = pack(rule)
    tensors = tuple((t.data_ptr(), t.shape, t.stride(), t.dtype, _age(t)) for t in packed.tensors)
    return packed.form, tensors, tuple(packed.ints), tuple(packed.floats), rule.shape


def _age(tensor: Tensor) -> Any:
    """What changes when a tensor is written to in place, as the positions in a cache are."""
    if not tensor.is_inference():
        return tensor._version
    # In inference mode torch does not count; small tensors are read, large masks are made anew.
    return tuple(tensor.flatten().tolist()) if tensor.numel() <= 1 << 16 else 0


def _word_tables(model: nn.Module) -> dict[int, nn.Embedding]:
    return {
        id(module): module
        for name, module in model.named_modules()
        if isinstance(module, nn.Embedding) and not NO_WORDS.search(name.rpartition(".")[2])
    }
