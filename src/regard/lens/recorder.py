"""The recorder of a `watch` block: it receives the attention calls from the hooks and sorts them.

How: global module hooks tell it which module of the model is running. Each call is passed to the
takes of its place (`row_takes.py`). An error in any of this leaves out the place and is reported
when the block ends; it never ends the model's own call. An error in tracking the modules ends the
recording, with a note. Layers are numbered in the order in which they are called, from 0 in each
stack and kind (`stack_of`): one module whose weights are shared by twelve layers is twelve layers,
and list entries that do not attend are none. Layers that are not recorded are counted too. If
`on_call` is set, it gets each call with all rows of the batch, and nothing is recorded.

Letters: B batch, T queries, S keys, H heads.
"""

from __future__ import annotations

import datetime
import itertools
import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from regard._torch import (
    given_by_name,
    is_backward,
    is_traced_by_jit,
    is_transforming,
    push_mode,
    remove_mode,
    without_modes,
)
from regard.lens.captured_call import Call
from regard.lens.contributions import plain_name
from regard.lens.device_to_host import HostCopier
from regard.lens.extras import Extras
from regard.lens.head_names import name_model
from regard.lens.head_shards import (
    Finished,
    HeadShard,
    choose_heads,
    gather,
    is_sharded,
    shard_of,
    take_local,
)
from regard.lens.lazy_weights import Array
from regard.lens.left_out import LeftOut
from regard.lens.row_takes import Chosen, Inputs, Located, RowTakes, name_place
from regard.lens.schema import FORMS, STATISTICS, Description
from regard.lens.stitch_calls import Take
from regard.lens.tensor_origins import TensorOrigins
from regard.ops.call import under_autocast
from regard.ops.call_hook import own_blocks

CROSS = re.compile(r"cross|encoder_attn|EncDec|enc_dec|multihead_attn|encoder_decoder", re.I)
SOURCE = re.compile(r"encoder_attn|EncDec|enc_dec|encoder_decoder", re.I)
"""Modules that attend to an encoder's output, even where both read parts of one input."""
NO_WORDS = re.compile(r"pos|type|seg|rel|bias|wpe|dist|time|layer_norm", re.I)
LENGTHS = ("trained_len", "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Config fields that give the longest text of training, the most reliable first."""
LARGE, CHECKERS = 2**18, min(4, os.cpu_count() or 1)
"""Bytes of arrays in the mean from which threads check them, and the most threads: smaller ones
take longer to hand out than to read."""
HIDDEN = (
    "its forward was replaced, by a function that does not keep torch.nn's own as an attribute of "
    "the module: the fused path behind it cannot be seen"
)
Progress: TypeAlias = Callable[[str, int], None]
"""Called with the place that was just recorded, and the number of calls so far."""


class Recorder:
    """Receives calls from hooks; knows the model's modules and which of them is running."""

    def __init__(
        self,
        model: nn.Module,
        chosen: Chosen,
        layers: Collection[int | str] | None,
        progress: Progress | None,
    ) -> None:
        found = list(model.named_modules())
        # Where weights are sharded over ranks, all heads are recorded, and selected at the end.
        own = (module._parameters.values() for _, module in found)
        self._spread = any(is_sharded(x) for weights in own for x in weights if x is not None)
        self._late_heads = chosen.heads if self._spread else None
        chosen = replace(chosen, heads=None) if self._spread else chosen
        self.shards: dict[str, HeadShard] = {}
        self.model, self.progress = model, progress
        self.layers = None if layers is None else tuple(layers)
        kind = type(model).__name__
        named = [(plain_name(name), module) for name, module in found]
        self.names = {id(module): name or kind for name, module in named}
        self.modules = [module for _, module in named]
        self.modules_by_name = {name or kind: module for name, module in named}
        self.by_id = {id(module): module for module in self.modules}  # so no other has these ids
        self._words = _word_tables(named)
        sizes = {table.num_embeddings for table in self._words.values()}
        self.extras = Extras(model, chosen.extras, chosen.heads, sizes)
        self.copier = HostCopier()
        self.takes = RowTakes(chosen, self.copier, self.extras)
        self.thread, self.is_open = threading.get_ident(), False
        # The running modules, outermost first; how often each module has begun since the outermost
        # did, and how often each name has attended; how many hooks are handling a call.
        self.stack: list[nn.Module] = []
        self.entered: Counter[int] = Counter()
        self.attended: Counter[str] = Counter()
        self.handling = self.paused = self.n_entered = 0
        self.entries: list[int] = []  # for each running module, the value of n_entered as it began
        # Modules that may run fused behind a replaced `forward`, where no hook can see it.
        self.hidden: set[int] = set()
        self.origins = TensorOrigins()
        self.left_out = LeftOut()
        self.inputs = Inputs()
        self.n_calls = 0
        self.on_call: Callable[[Call, Located], None] | None = None
        self.mode: TorchFunctionMode | None = None
        self._without_mode: nn.Module | None = None
        self._kinds: dict[str, bool] = {}
        self._layers: dict[tuple[str, bool], dict[tuple[str, int], int]] = {}
        self._passed_over: dict[str, int] = {}

    def unseen(self) -> AbstractContextManager[None]:
        """A context in which no recorder sees functions of torch: without its mode."""
        return nullcontext() if self.mode is None else without_modes(type(self.mode))

    @contextmanager
    def alone(self) -> Iterator[None]:
        """A context in which no call counts as the model's, for the recorder's own work."""
        self.handling += 1
        try:
            with self.unseen():
                yield
        finally:
            self.handling -= 1

    @contextmanager
    def follow(self) -> Iterator[None]:
        """A context that clears the stack of running modules when it ends."""
        try:
            yield
        finally:
            self._end()

    def enter(self, module: nn.Module, args: Any, compiled: bool = False) -> None:
        """A module of the model begins; `compiled`: in compiled code that must not see our mode."""
        name, outermost = self.names[id(module)], not self.stack or module is self.model
        if outermost and not self._begin(compiled):
            return
        hidden = id(module) in self.hidden and not module.training
        if (compiled or hidden) and self.mode is not None and remove_mode(self.mode):
            self._without_mode = module
        if hidden:
            self.leave_out(name, ValueError(HIDDEN))
        self.stack.append(module)
        self.entered[id(module)] += 1
        self.n_entered += 1
        self.entries.append(self.n_entered)
        if outermost and not compiled:
            self.attempt(name, self._count_inputs, args)
        if args and (self.inputs.n_inputs is None or id(module) in self._words):
            self.attempt(name, self._read_inputs, module, args)
        if self.extras.readers:
            self.attempt("gradients", self.extras.begin, module, args)

    def leave(self, module: nn.Module, output: Any) -> None:
        stack = self.stack
        if not stack or (stack[-1] is not module and id(module) not in map(id, stack)):
            return
        while stack.pop() is not module:
            pass
        del self.entries[len(stack) :]
        if self._without_mode is module and self.mode is not None:
            self._without_mode = None
            push_mode(self.mode)
        if self.extras.wants_logits:
            with self.alone():
                self.attempt("predictions", self._read_logits, output)
        if not stack:
            self._end()

    @contextmanager
    def running(self, module: int | None) -> Iterator[None]:
        """A context in which the module of this id is running, as a compiled graph says."""
        found = None if module is None else self.by_id.get(module)
        if found is not None:
            self.safely(self.enter, found, (), True)
        try:
            yield
        finally:
            if found is not None:
                self.safely(self.leave, found, None)

    def read_ids(self, module: nn.Module, ids: Tensor) -> None:
        """Note the token ids that a compiled graph looks up."""
        self.attempt(self.names[id(module)], self._read_inputs, module, (ids,))

    def _begin(self, compiled: bool) -> bool:
        """Begin an outermost module; return whether it and what it calls is recorded."""
        if self.paused or not own_blocks() or is_backward():
            return False
        if is_traced_by_jit():
            self.left_out.add("what torch.jit traces", ValueError("recording would be traced too"))
            return False
        if self._leaves_out_capture():
            return False
        self._end()
        self.entered.clear()
        self.attended.clear()
        self.inputs = Inputs(ids_bt=self.inputs.ids_bt)
        self.takes.n_passes += 1
        if self.mode is not None and not compiled:
            push_mode(self.mode)
        return True

    def _leaves_out_capture(self) -> bool:
        """Whether a CUDA graph is being captured; its contents are then left out, with a note."""
        if not is_capturing():
            return False
        unseen = "nothing is computed yet; watch the model run without a graph of its own"
        self.left_out.add("what a CUDA graph captures", ValueError(unseen))
        return True

    def _end(self) -> None:
        self.stack.clear()
        self.entries.clear()
        self._without_mode = None
        self.origins.clear()
        if self.mode is not None:
            remove_mode(self.mode)

    def _count_inputs(self, args: Any) -> None:
        """Note the batch size of the model's inputs: the largest first axis among them."""
        found = batch_sizes((*args, *given_by_name().values()))
        self.inputs.n_inputs = max(found, default=None)

    def _read_inputs(self, module: nn.Module, args: Any) -> None:
        ids = args[0] if id(module) in self._words and not is_capturing() else None
        if self.inputs.n_inputs is None:
            # An integer tensor that is not looked up as words holds positions.
            given = [x for x in args if isinstance(x, Tensor) and x.is_floating_point()]
            self.inputs.n_inputs = next(iter(batch_sizes(given if ids is None else [ids])), None)
        if isinstance(ids, Tensor) and ids.dim() == 2 and not ids.is_floating_point():
            # Copied once for all layers, and before any of them keeps the device busy; a copy on
            # the CPU too, as the caller may write the next text into the same tensor.
            self.inputs.ids_bt = ids.detach().to("cpu", copy=True)

    def _read_logits(self, output: Any) -> None:
        rows = self.takes.rows_now()
        self.extras.end(output, not self.stack, self.inputs.ids_bt, rows)

    def name_of(self, module: nn.Module | None = None) -> str | None:
        """A module's dotted name, by default the running one's; None if it is not in the model."""
        if module is None:
            return self.names[id(self.stack[-1])] if self.stack else None
        return self.names.get(id(module))

    def locate(self, call: Call) -> Located:
        """The layer and place name of a call, from how often its module has attended."""
        attended = self.attended
        entry = call.name, self.entered[id(self.stack[-1])] if self.stack else 0
        numbers = self._layers.setdefault((stack_of(call.name), bool(call.cross)), {})
        attended[call.name] += 1
        name = name_place(call.name, attended[call.name])
        return Located(name, numbers.setdefault(entry, len(numbers)))

    def is_cross(self, call: Call) -> bool:
        """Whether a call is cross-attention: as its hook says, as earlier calls, or by name."""
        if call.shape.T > call.shape.S:
            return True  # with fewer keys than queries, the keys are not the queries' own tokens
        last = call.name.rpartition(".")[2]
        if call.cross is not None:
            self._kinds[call.name] = call.cross or SOURCE.search(last) is not None
        elif call.name not in self._kinds:
            return CROSS.search(call.name) is not None and "self" not in last.lower()
        return self._kinds[call.name]

    def wanted(self, call: Call, found: Located) -> bool:
        self._passed_over[found.name] = found.layer
        if self.layers is None:
            return True
        # The module's name and those of all modules around it; "" contains everything.
        around = itertools.accumulate(call.name.split("."), "{}.{}".format)
        return not {found.layer, found.name, "", *around}.isdisjoint(self.layers)

    def record(self, read: Callable[[Recorder], Call | None]) -> bool:
        """Record the call that `read` returns; return whether it was an attention call.

        An error is noted and the place left out; the model's own call continues.
        """
        name = self.name_of() or ""
        try:
            if self._leaves_out_capture():
                # A graph that the model itself captures, of a part of it.
                return True
            with self.alone():
                call = None if name in self.left_out else read(self)
                if call is None:
                    return name in self.left_out
                name = call.name
                recorded = name not in self.left_out and self.take(call)
        except Exception as error:
            self.leave_out(name, error)
            return True
        if recorded:
            self._tell(name)
        return True

    def attempt(self, name: str, step: Callable[..., None], *args: Any) -> None:
        """Run a step for the record; if it fails, that is noted, and the place left out."""
        try:
            step(*args)
        except Exception as error:
            self.leave_out(name, error)

    def safely(self, step: Callable[..., None], *args: Any) -> None:
        """Run a step that tracks modules; if it fails, nothing more is recorded in the block."""
        try:
            step(*args)
        except Exception as error:
            self.is_open = False
            self.left_out.add(f"the rest of {type(self.model).__name__}", error)
            self.stack.clear()
            self.entries.clear()
            if self.mode is not None:
                remove_mode(self.mode)

    def leave_out(self, name: str, error: Exception) -> None:
        self.left_out.add(name, error)
        self.takes.drop(name)

    def _tell(self, name: str) -> None:
        self.n_calls += 1
        if self.progress is not None:
            with self.alone():
                self.progress(name, self.n_calls)

    @torch.no_grad()
    def take(self, call: Call) -> bool:
        """Record a call if it is wanted; return whether it was recorded."""
        if is_transforming():
            raise ValueError("it runs under torch.func (vmap, grad), whose numbers cannot be read")
        call, shard = self._find_shard(call)
        if shard is not None:
            self.shards[call.name], call = shard, replace(call, rows=None)
        cross = self.is_cross(call)
        call = call if call.cross is cross else replace(call, cross=cross)
        located = self.locate(call)
        found = located if self.wanted(call, located) else None
        # A call that is not wanted may still continue a recorded text, in a model's own decoding
        # loop.
        if found is None and not self.takes.knows(call):
            return False
        q, k, _ = under_autocast(call.q, call.k, call.k)
        dtype = torch.promote_types(q.dtype, k.dtype)
        if {q.dtype, k.dtype, call.q.dtype, call.k.dtype} != {dtype}:
            call = replace(call, q=q.to(dtype), k=k.to(dtype), rows=None)
        with torch.autocast(call.q.device.type, enabled=False):
            if self.on_call is not None:
                self.on_call(call, located)
                return True
            return self.takes.take(
                call, found, self.inputs, self.entries[-1] if self.entries else 0
            )

    def _find_shard(self, call: Call) -> tuple[Call, HeadShard | None]:
        """The call with its local heads, and how they are sharded, if they are."""
        call, shard = take_local(call)
        if shard is not None or call.name in self.shards or not self._spread:
            return call, shard
        # A module without weights gets its queries from a module around it that has them.
        around = [self.modules_by_name[call.name], *reversed(self.stack)]
        home = next((module for module in around if any(True for _ in module.parameters())), None)
        return call, None if home is None else shard_of(home, call.q, call.k)

    def _finish_takes(self) -> list[Finished]:
        """Finish all places: check their numbers, gather sharded heads, and select heads."""
        made: list[tuple[Take, Finished]] = []
        for take in list(self.takes.order):
            self.attempt(take.name, lambda one: made.append((one, one.finish())), take)
        finished: list[Finished] = []
        for (_, one), fault in zip(made, find_faults(made), strict=True):
            if fault is None:
                finished.append(one)
            else:
                self.leave_out(one[0].name, ValueError(fault))
        if self.shards:
            gather(finished, self.shards, self.left_out)
        if self._late_heads is None:
            return finished
        chosen: list[Finished] = []
        for one in finished:
            name, choose = one[0].name, partial(choose_heads, one, self._late_heads)
            self.attempt(name, lambda make: chosen.append(make()), choose)
        return chosen

    def finish(self) -> tuple[Description, dict[str, Array]]:
        kind, finished = type(self.model).__name__, self._finish_takes()
        if not finished and self.left_out:
            raise ValueError(
                f"nothing of {kind} could be recorded: {'; '.join(self.left_out.notes())}"
            )
        if not finished and self._passed_over:
            raise ValueError(
                f"none of the places of {kind} is among the layers asked for, {self.layers}; there "
                f"are {', '.join(f'{n}: {name}' for name, n in self._passed_over.items())}"
            )
        if not finished:
            raise ValueError(
                f"no attention was seen in {kind}: either it was not called in the block, or it "
                "attends in a way that cannot be watched (a kernel of its own; or, in compiled "
                "code, otherwise than by regard's attention or that of transformers)"
            )
        config = getattr(self.model, "config", None)
        name = getattr(config, "_name_or_path", None) or getattr(config, "name", None)
        model = name_model(name) if isinstance(name, str) and name else kind
        seen, arrays = Description(kept=self.takes.chosen.keep, model=model), {}
        seen.trained_len = find_trained_len(config)
        seen.created = datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        for number, (place, rule, found) in enumerate(finished):
            seen.places.append(place)
            seen.rules.append(rule)
            arrays.update({f"{number}.{name}": array for name, array in found.items()})
        seen.notes = [*self.left_out.notes(), *self.takes.remarks]
        self.extras.check(arrays)
        return seen, arrays | self.extras.finish(seen.places, arrays)


def find_faults(made: list[tuple[Take, Finished]]) -> list[str | None]:
    """For each place, what is wrong with its numbers, or None."""
    sizes = [x.nbytes for _, (_, _, arrays) in made for x in arrays.values()]
    if sum(sizes) <= LARGE * len(sizes):
        return [find_fault(*one) for one in made]
    # Numpy releases the GIL while it reads.
    with ThreadPoolExecutor(min(len(made), CHECKERS)) as threads:
        return list(threads.map(find_fault, *zip(*made, strict=True)))


def find_fault(take: Take, finished: Finished) -> str | None:
    """What is wrong with the numbers of a place, or None."""
    place, _, arrays = finished
    for name in (*STATISTICS, "lse"):
        array, T, S = arrays.get(name), place.n_queries, place.n_keys
        ends = None if array is None else take.ends_of(name)
        if array is None or (ends and FORMS[name].fault_of(ends[0], ends[1], T, S) is None):
            continue
        fault = FORMS[name].fault(array, T, S)
        if fault is not None:
            return f"its {name} {fault}, as where a model gives NaN"
    return None


def is_capturing() -> bool:
    """Whether a CUDA graph is being captured; reading from the device would invalidate it."""
    begun = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    return bool(begun and torch.cuda.is_current_stream_capturing())


def stack_of(name: str) -> str:
    """The stack of a module: its name up to the last number, without the numbers."""
    parts = name.split(".")
    numbers = [at for at, part in enumerate(parts) if part.isdecimal()]
    last = numbers[-1] if numbers else len(parts) - 1
    return ".".join(part for part in parts[:last] if not part.isdecimal())


def find_trained_len(config: Any) -> int | None:
    """The text length that a model was made for, by its config, ours or another's; or None."""
    source = getattr(config, "source", None)
    if not isinstance(source, Mapping):
        text = config.get_text_config() if hasattr(config, "get_text_config") else config
        source = {name: getattr(text, name, None) for name in LENGTHS}
    sizes = (source.get(name) for name in LENGTHS)
    return next((size for size in sizes if type(size) is int and size > 0), None)


def batch_sizes(given: Iterable[Any]) -> list[int]:
    """The batch sizes of all tensors among a module's arguments, those in dictionaries too."""
    found = []
    for value in given:
        for x in value.values() if isinstance(value, Mapping) else (value,):
            if isinstance(x, Tensor) and not x.is_nested and x.dim() > 1:
                found.append(x.shape[0])
    return found


def _word_tables(named: Iterable[tuple[str, nn.Module]]) -> dict[int, nn.Embedding]:
    return {
        id(module): module
        for name, module in named
        if isinstance(module, nn.Embedding) and not NO_WORDS.search(name.rpartition(".")[2])
    }
