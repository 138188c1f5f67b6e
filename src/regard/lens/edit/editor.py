"""The editor of a block: it knows which module is running, and which edits apply to a call.

How: the running module is tracked by global hooks, as in watching. Layers are numbered in the order
in which they are called, from 0 in each stack and each kind. An edit applies to the layers of one
stack: in a model with several, such as an encoder–decoder, layers must be named. The positions of
queries and keys are read from the call's mask, if it has positions (our caches). Otherwise they
follow from the length of a Hugging Face model's cache before the call, and from the padding in its
attention mask; otherwise tokens are in order, the last query on the last key.

An edit that names something that the model does not have is refused: heads and positions in the
first call that they are for, layers when the model has run once, and at the latest when the block
ends.

Letters: B batch, H heads, T queries, S keys, E value width; N rows of positions, B or 1.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor, nn

from regard.lens.edit import change
from regard.lens.edit.positions import Span, Standing, across, find_spans, holds, in_line
from regard.lens.edit.values import Block, Edit, HeadOutputs, Patch, as_tuple
from regard.lens.head_shards import HeadShard, is_sharded, shard_of
from regard.lens.lazy_weights import Array
from regard.lens.recorder import CROSS, stack_of
from regard.ops.call import Call
from regard.ops.edit_hook import Caller, Edited, open_editors
from regard.ops.mask import At

NO_PADDING = np.zeros((1, 1), np.int64)
HIDDEN = -1e4
"""Numbers up to this, added to a score, hide its key."""


def count_hidden(real_bs: Tensor) -> Array:
    """The number of keys before the first real one in each row, (B, 1): left padding."""
    counted: Array = (real_bs.cumsum(-1) == 0).sum(-1, keepdim=True).cpu().numpy()
    return counted


def is_around(outer: str, name: str) -> bool:
    """Whether a module is or contains another, by their dotted names; "" is the whole model."""
    return not outer or f"{name}.".startswith(f"{outer}.")


@dataclass(frozen=True)
class Layer:
    """One layer's attention: the module's name, its number in its stack, and its heads.

    `key` distinguishes layers that share a module: name, name@2, ... as in `watch`. `shard`: if the
    heads are sharded over ranks, those that are local.
    """

    name: str
    number: int
    stack: tuple[str, bool]
    n_heads: int
    key: str
    shard: HeadShard | None = None

    def heads_here(self, bound: Bound, n_here: int) -> Sequence[int] | None:
        """The heads that an edit names, by their local numbers; None for all of them."""
        heads = bound.heads()
        return heads if self.shard is None else self.shard.local(heads, n_here)

    def is_in(self, asked: Sequence[int | str] | None) -> bool:
        if asked is None or self.number in asked:
            return True
        return any(isinstance(outer, str) and is_around(outer, self.name) for outer in asked)


@dataclass(frozen=True)
class Capture:
    """Store the outputs of heads, without changing them."""

    outputs: HeadOutputs
    layers: Any = None
    heads: None = None


@dataclass(eq=False)
class Bound:
    """An edit in an open block, for some rows of the batch, or all.

    `spans` are its positions in the text that is being read; `seen` names the fields of the edit
    for which there have been tokens.
    """

    edit: Edit | Capture
    rows: Sequence[int] | None = None
    stack: tuple[str, bool] | None = None
    seen: set[str] = field(default_factory=set)
    spans: dict[str, list[Span]] = field(default_factory=dict)

    def find(self, name: str, standing: Standing, side: str) -> Array:
        """Which queries or keys its field `name` covers, (N, T) or (N, S)."""
        if standing.begins or name not in self.spans:
            lengths = getattr(standing, f"{side}_lengths")
            self.spans[name] = find_spans(getattr(self.edit, name), lengths)
        positions = standing.queries if side == "query" else standing.keys
        found = holds(self.spans[name], positions)
        if found.any():
            self.seen.add(name)
        return found

    def heads(self) -> tuple[int, ...] | None:
        return as_tuple(self.edit.heads)


class Editor:
    """The edits of one model in one block."""

    def __init__(self, model: nn.Module, bound: Sequence[Bound]) -> None:
        self.model, self.bound = model, list(bound)
        named = list(model.named_modules())
        self.names = {id(module): name for name, module in named}
        self.modules = [module for _, module in named]
        # Modules that have "attention" in their class name, and which of them have run.
        self._attentions = {
            id(x): name for name, x in named if "attention" in type(x).__name__.lower()
        }
        self._ran: set[str] = set()
        self._spread = any(map(is_sharded, model.parameters()))
        self.running: list[nn.Module] = []
        self.entered: Counter[int] = Counter()
        self.layers: dict[tuple[str, int], Layer] = {}
        self._numbers: Counter[tuple[str, bool]] = Counter()
        self._queries: Array | None = None
        self._before: int | None = None
        self._padding: dict[str, Array] = {}
        # The padding of texts that caches hold, which began in earlier calls.
        self._padded: WeakKeyDictionary[Any, Array] = WeakKeyDictionary()

    @contextmanager
    def follow(self) -> Iterator[None]:
        """Track the running module, and how many tokens its cache holds as the model is called."""
        hooks = torch.nn.modules.module
        with ExitStack() as handles:
            handles.enter_context(hooks.register_module_forward_pre_hook(self._enter))
            handles.enter_context(hooks.register_module_forward_hook(self._leave, always_call=True))
            for module in self.modules:
                if hasattr(module, "config"):
                    read = module.register_forward_pre_hook(self._read_inputs, with_kwargs=True)
                    handles.enter_context(read)
            yield

    def _is_here(self) -> bool:
        return any(editor is self for editor in open_editors())

    def _enter(self, module: nn.Module, args: Any) -> None:
        if id(module) not in self.names:
            return
        if torch.compiler.is_compiling():
            raise RuntimeError(
                "compiled code cannot be edited, as it runs unseen: in the block call the model "
                "that is not compiled (model._orig_mod), and let generate compile nothing"
            )
        if not self._is_here():
            return
        if not self.running:
            self.entered.clear()
            self._before, self._padding = None, {}
        self.running.append(module)
        self.entered[id(module)] += 1
        if id(module) in self._attentions:
            self._ran.add(self._attentions[id(module)])

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if id(module) not in self.names or not self._is_here():
            return
        while self.running and self.running.pop() is not module:
            pass
        if module is self.model and not self.running and output is not None:
            self.check(whole=False)

    def _read_inputs(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        """Read how many tokens a Hugging Face model's cache holds, and the padding of each row.

        The cache is read in the first module that is given it: inner ones see it change.
        """
        if not self._is_here():
            return
        if len(args) > 1:
            kwargs = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
        cache, real = kwargs.get("past_key_values"), kwargs.get("attention_mask")
        if self._before is None and cache is not None and hasattr(cache, "get_seq_length"):
            self._before = int(cache.get_seq_length())
        name = self.names[id(module)]
        if isinstance(real, Tensor) and real.dim() == 2:
            self._padding[name] = count_hidden(real)
        elif real is None and "attention_mask" in kwargs:
            self._padding[name] = NO_PADDING
        elif hasattr(module, "main_input_name") and self._padding_around(name) is None:
            self._padding[name] = self._find_padding(real, cache)

    def _find_padding(self, masks: Any, cache: Any) -> Array:
        """The padding of a text, from 4-dimensional masks: one, or one for each kind of layer.

        `generate` makes these for a cache of fixed size. Masks of windows are only read as a text
        begins.
        """
        if cache in self._padded and self._before:
            return self._padded[cache]
        found = list(masks.values()) if isinstance(masks, Mapping) else [masks]
        whole = [x for x in found if isinstance(x, Tensor) and x.dim() == 4]
        padding = NO_PADDING
        if whole:
            mask = max(whole, key=lambda x: x.shape[-1])
            if not self._before or mask.shape[-1] >= self._before + mask.shape[-2]:
                seen = mask if mask.dtype == torch.bool else mask > HIDDEN
                padding = count_hidden(seen.any(2).any(1))
        if hasattr(cache, "get_seq_length"):
            self._padded[cache] = padding
        return padding

    def _padding_around(self, name: str) -> Array | None:
        """The padding that the innermost module around this one was given."""
        around = [outer for outer in self._padding if is_around(outer, name)]
        return self._padding[max(around, key=len)] if around else None

    def edit(self, call: Call, caller: Caller | None = None) -> Edited | None:
        if caller is None:
            if not self.running:
                return None
            caller = Caller(self.running[-1])
        if id(caller.module) not in self.names:
            return None
        layer = self._locate(caller, call)
        bound = [each for each in self.bound if layer.is_in(as_tuple(each.edit.layers))]
        for each in bound:
            check_layer(each, layer)
        standing = self._stand(caller, layer, call)
        return self._edit(call, layer, standing, bound) if bound else None

    def _locate(self, caller: Caller, call: Call) -> Layer:
        name, turn = self.names[id(caller.module)], self.entered[id(caller.module)]
        at = name, turn
        if at not in self.layers:
            last = name.rpartition(".")[2].lower()
            cross = CROSS.search(name) is not None and "self" not in last
            stack = stack_of(name), cross if caller.cross is None else caller.cross
            key = f"{name}@{turn}" if turn > 1 else name
            shard = shard_of(caller.module, call.q, call.k) if self._spread else None
            n_heads = call.rule.shape.H if shard is None else shard.total
            self.layers[at] = Layer(name, self._numbers[stack], stack, n_heads, key, shard)
            self._numbers[stack] += 1
        return self.layers[at]

    def _stand(self, caller: Caller, layer: Layer, call: Call) -> Standing:
        _, _, T, S = call.rule.shape
        if caller.standing is not None:
            standing: Standing = caller.standing
        elif layer.stack[1]:
            known = self._queries is not None and self._queries.shape[1] == T
            return across(self._queries if known else np.arange(T)[None], S)  # type: ignore[arg-type]
        else:
            standing = self._stand_in_text(call, layer.name)
        self._queries = standing.queries
        return standing

    def _stand_in_text(self, call: Call, name: str) -> Standing:
        _, _, T, S = call.rule.shape
        terms = [] if call.rule.mask is None else call.rule.mask.leaf_terms()
        at = next((term for term in terms if isinstance(term, At)), None)
        if at is None:
            before = S - T if self._before is None or T == S else self._before
            padding = self._padding_around(name)
            return in_line(T, S, before, NO_PADDING if padding is None else padding)
        queries = at.queries.cpu().numpy().reshape(-1, T).astype(np.int64)
        keys = np.arange(S)[None] if at.keys is None else at.keys.cpu().numpy().reshape(-1, S)
        lengths = queries.max(1, keepdims=True, initial=-1) + 1
        return Standing(queries, keys.astype(np.int64), lengths, lengths)

    def _edit(self, call: Call, layer: Layer, standing: Standing, bound: Sequence[Bound]) -> Edited:
        masks = []
        for each in bound:
            if isinstance(each.edit, Block):
                looking = each.find("queries", standing, "query")
                hidden = each.find("keys", standing, "key")
                rows, heads = each.rows, layer.heads_here(each, call.rule.shape.H)
                if looking.any() and hidden.any() and heads != []:
                    masks.append(change.make_blocked(looking, hidden, rows, heads, call))
        blocked = change.block_call(call, masks) if masks else call

        def finish(output_bhte: Tensor) -> Tensor:
            output_bhte = output_bhte.clone() if output_bhte.requires_grad else output_bhte
            if masks:
                output_bhte = change.redo_rows(blocked, masks, output_bhte)
            for each in bound:
                self._change_heads(each, call, layer, standing, output_bhte)
            return output_bhte

        return Edited(blocked, finish)

    def _change_heads(
        self, bound: Bound, call: Call, layer: Layer, standing: Standing, output_bhte: Tensor
    ) -> None:
        edit = bound.edit
        if isinstance(edit, Block):
            return
        if isinstance(edit, Capture):
            change.keep_outputs(edit.outputs, layer.key, standing, output_bhte)
            return
        B, H, _, _ = output_bhte.shape
        heads = layer.heads_here(bound, H)
        b, h = change.pick(bound.rows, B)[:, None], change.pick(heads, H)[None]
        if isinstance(edit, Patch):
            chosen = None
            if edit.positions is not None:
                chosen = bound.find("positions", standing, "query")
            t, values = change.find_source(edit, layer.key, standing, call, chosen)
            output_bhte[:, h[0][:, None], t[None]] = values[:, h[0]].to(output_bhte)
        elif edit.to == "zero":
            output_bhte[b, h] = 0.0
        else:
            if not standing.begins:
                raise ValueError(
                    f"{layer.name} continues a text from a KV cache, so the mean over the tokens "
                    'of the text is not known: use Ablate(..., to="zero"), or give the whole text'
                )
            real_bt = change.find_real(call, standing, cross=layer.stack[1])
            output_bhte[b, h] = change.average(output_bhte, real_bt)[b, h]

    def check(self, whole: bool = True) -> None:
        """Refuse edits that did nothing; `whole`: positions too, which may come in later calls."""
        kind = type(self.model).__name__
        if not self.layers:
            if whole:
                raise ValueError(
                    f"no attention of {kind} was edited: either it was not called in the block, or "
                    "it attends in a way that cannot be edited (compiled, or written out in its "
                    "own code)"
                )
            return
        for each in self.bound:
            asked = as_tuple(each.edit.layers)
            there = any(layer.is_in(asked) for layer in self.layers.values())
            if not there:
                known = ", ".join(f"{one.number}: {one.name}" for one in self.layers.values())
                wrong = ", ".join(map(repr, asked or ()))
                raise ValueError(f"{kind} has no layer {wrong}; there are {known}")
            missing = [name for name in each.spans if name not in each.seen]
            if whole and missing:
                raise ValueError(
                    f"{each.edit} changed nothing: no text that was read in the block has tokens "
                    f"at its {missing[0]}"
                )
            unedited = [name for name in self._unreached() if whole and speaks_of(each, name)]
            if unedited:
                raise ValueError(
                    f"{each.edit} is for {unedited[0]} too, which computes attention in its own "
                    "code and cannot be edited; name modules that can, of "
                    f"{', '.join(layer.name for layer in self.layers.values())}"
                )

    def _unreached(self) -> list[str]:
        """Innermost modules named as attention that have run, but of which no call was seen."""
        seen = {layer.name for layer in self.layers.values()}
        return [
            name
            for name in sorted(self._ran)
            if not any(is_around(name, other) or is_around(other, name) for other in seen)
            and not any(name != other and is_around(name, other) for other in self._ran)
        ]


def speaks_of(bound: Bound, name: str) -> bool:
    """Whether an edit names a module as a layer, or counts it among its layers by number."""
    asked = as_tuple(bound.edit.layers)
    if isinstance(bound.edit, Capture):
        return False  # The outputs that it stores are by name.
    if asked is None:
        return True
    counts = bound.stack is not None and bound.stack[0] == stack_of(name)
    return any(is_around(outer, name) if isinstance(outer, str) else counts for outer in asked)


def check_layer(bound: Bound, layer: Layer) -> None:
    """Refuse heads that do not exist, and layers of a second stack."""
    heads = bound.heads() or ()
    missing = [head for head in heads if head >= layer.n_heads]
    if missing:
        raise ValueError(
            f"head {missing[0]} does not exist: {layer.name} has heads 0 to {layer.n_heads - 1}"
        )
    if bound.stack not in (None, layer.stack) and not isinstance(bound.edit, Capture):
        raise ValueError(
            f"{bound.edit} reaches layers of several stacks, such as an encoder's and a decoder's; "
            f"give one edit for each, layers=({layer.name!r},) for one"
        )
    bound.stack = layer.stack
