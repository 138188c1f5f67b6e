"""Trace scores from a product of queries and keys to a softmax, through code of any kind.

Each step between them is recognised by its function: products, scaling by numbers, additions,
masked fills, and changes of type or shape. At the softmax the scores are recomputed from the trace,
some rows at a time, and compared with the actual ones. Where they disagree, or something else
happened to the numbers on the way, the scores themselves are recorded. A function that moves scores
to other positions ends the trace, as sliding windows in pieces do (Longformer), or heads that are
mixed while they are the last axis (talking heads): its softmax is left out, and the record says so.

Letters: B batch, T queries, S keys, H heads, D head width.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.weak import WeakIdKeyDictionary

from regard.lens.captured_call import Call, whole_scores
from regard.lens.tensor_origins import PROJECTING, Moved, TensorOrigins, is_parameter
from regard.ops import Dense, DenseBias
from regard.ops.call import score_dtype

SOFTMAX = {F.softmax, torch.softmax, torch.special.softmax, Tensor.softmax}
MATMUL = {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm}
BADDBMM = {torch.baddbmm, Tensor.baddbmm}
BEGINNINGS = MATMUL | BADDBMM | {torch.einsum}
TIMES = {torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__, Tensor.mul_, Tensor.__imul__}
DIVIDE = {torch.div, torch.true_divide, Tensor.div, Tensor.true_divide, Tensor.__truediv__}
DIVIDE |= {Tensor.div_, Tensor.__itruediv__, Tensor.__div__}
PLUS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__, Tensor.add_, Tensor.__iadd__}
FILL = {torch.masked_fill, Tensor.masked_fill, Tensor.masked_fill_}
SAME = {Tensor.to, Tensor.float, Tensor.half, Tensor.type, Tensor.type_as, Tensor.contiguous}
SAME |= {Tensor.double, Tensor.bfloat16, torch.clone, Tensor.clone, Tensor.detach}
MINUS = {torch.sub, Tensor.sub, Tensor.__sub__, Tensor.sub_, Tensor.__isub__}
MOVING = {torch.transpose, Tensor.transpose, torch.permute, Tensor.permute, torch.flip, Tensor.flip}
MOVING |= {torch.roll, Tensor.roll, torch.gather, Tensor.gather, torch.sort, Tensor.sort}
MOVING |= {Tensor.mT.__get__, Tensor.T.__get__, Tensor.swapaxes, Tensor.index_select}  # type: ignore[attr-defined]
JOINING = {torch.cat, torch.concat, torch.concatenate, torch.stack}
AXES = (3, 4, 5)
"""The numbers of axes that scores may have; the last two are queries and keys."""
SHAPED = {Tensor.view, Tensor.reshape, torch.reshape, Tensor.unflatten}
HIDDEN = -1e4
"""A fill value up to this is meant to hide the key."""
NEARLY_HIDDEN = 0.99 * HIDDEN
"""What HIDDEN may become in half types, and with a score added to it."""
DROWNED = -float(1 << 20)
"""A score up to this was hidden: in float32 hardly anything of the original score is left."""
COMPARED = 1 << 22
"""Scores that are recomputed at once."""


@dataclass(frozen=True, eq=False)
class Step:
    """A traced state of scores: scale · q kᵀ + added, some hidden; q (..., T, D), k (..., S, D).

    `given`: queries and keys as the model has them, by which their origin is known. `opaque`:
    something else has happened to the numbers too.
    """

    q: Tensor
    k: Tensor
    given: tuple[Tensor, Tensor]
    scale: float = 1.0
    added: tuple[Tensor, ...] = ()
    hidden: tuple[Tensor, ...] = ()
    opaque: bool = False


class ScoreTrace:
    def __init__(self, origins: TensorOrigins) -> None:
        self.steps = WeakIdKeyDictionary()
        self._get: Any = self.steps.get
        self.origins = origins

    def concerns(self, func: Any) -> bool:
        """Whether a function can begin or continue a trace; most often it cannot."""
        return func in BEGINNINGS or bool(self.steps.data) or bool(self.origins.moved.known)

    def follow(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        """Extend the trace by a function that computed scores or changed them."""
        if func not in BEGINNINGS:
            self._follow_change(func, args, kwargs, result)
            return
        if not isinstance(result, Tensor) or result.dim() not in AXES:
            return
        if func in MATMUL:
            step = product(args[0], args[1] if len(args) > 1 else kwargs.get("mat2"), result)
        elif func in BADDBMM:
            step = added_product(args, kwargs, result)
        else:
            step = summed_product(args, result)
        if step is None:
            self._follow_mixing(func, args, result)
        else:
            self.steps[result] = step

    def _follow_change(self, func: Any, args: Any, kwargs: dict[str, Any], result: Any) -> None:
        if func in SOFTMAX:
            return
        if func in PROJECTING and args:
            self._follow_mixing(func, args, result)
            return
        moved, scores = self.origins.moved, None
        if self.steps.data:
            scores = self._operand(func, args, kwargs)
        if scores is None:
            if moved.known and args:
                self._follow_moved(args, result)
        elif isinstance(result, Tensor) and result.is_floating_point():
            step = self._changed(func, args, kwargs, result)
            if step is None and result.shape == scores.shape and func not in MOVING:
                step = replace(self._known(scores), opaque=True)  # type: ignore[type-var]
            if step is not None and result.dim() in AXES:
                self.steps[result] = step
            else:
                moved.put(result, Moved(name_of(func), tuple(scores.shape)))

    def _follow_mixing(self, func: Any, args: Any, result: Any) -> None:
        """Scores whose heads are mixed by weights are still scores if keys remain the last axis."""
        operands = args[1] if len(args) == 2 and isinstance(args[1], (tuple, list)) else args
        if not isinstance(result, Tensor) or not any(map(is_parameter, operands)):
            return
        step = next(filter(None, map(self._known, operands)), None)
        shape = (*step.q.shape[:-1], step.k.shape[-2]) if step is not None else ()
        if step is not None and func is not F.linear and result.shape == shape:
            self.steps[result] = replace(step, opaque=True)
        for x in operands:
            moved = self.origins.moved.get(x)
            if moved is not None and sorted(x.shape) == sorted(moved.shape):
                self.origins.moved.put(result, moved._replace(by=name_of(func)))

    def _operand(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Tensor | None:
        """The scores among the arguments."""
        given = args if func is torch.where else args[:2]
        if func in JOINING and args:
            given = args[0]
        given = given or tuple(kwargs.values())
        known = (x for x in given if isinstance(x, Tensor) and self._get(x) is not None)
        return next(known, None)

    def _follow_moved(self, args: Any, result: Any) -> None:
        """Scores that were moved remain so, even when they are written into other tensors."""
        moved, found = self.origins.moved, None
        for given in args:
            for x in given if isinstance(given, (tuple, list)) else (given,):
                found = found or moved.get(x)
        if found is not None:
            changed = args[0] if result is None else result
            if isinstance(changed, Tensor) and changed.is_floating_point():
                moved.put(changed, found)

    def _changed(self, func: Any, args: Any, kwargs: dict[str, Any], result: Tensor) -> Step | None:
        if not args:
            return None
        if func is torch.where and len(args) == 3:
            step = self._known(args[1])
            hides = step is not None and is_low(args[2])
            return replace(step, hidden=(*step.hidden, ~args[0])) if step and hides else None
        step, other = self._known(args[0]), args[1] if len(args) > 1 else None
        if step is None and func in PLUS | TIMES:
            step, other = self._known(other), args[0]
        if step is None:
            return None
        if func in SAME:
            return step
        if func in SHAPED:
            return reshaped(step, result)
        factor = number(other) if func in TIMES | DIVIDE else None
        if factor is not None:
            factor = factor if func in TIMES else 1.0 / factor
            added = tuple(x * factor for x in step.added)
            return replace(step, scale=step.scale * factor, added=added)
        if func in PLUS | MINUS and isinstance(other, Tensor) and kwargs.get("alpha", 1) == 1:
            return replace(step, added=(*step.added, other if func in PLUS else -other))
        value = args[2] if len(args) > 2 else kwargs.get("value")
        if func in FILL and is_low(value) and isinstance(other, Tensor):
            return replace(step, hidden=(*step.hidden, other))
        return None

    def _known(self, value: Any) -> Step | None:
        found: Step | None = self._get(value) if isinstance(value, Tensor) else None
        return found

    def other_axis(self, args: Any, kwargs: dict[str, Any]) -> int | None:
        """The axis of a softmax of traced scores, if it is not that of keys; else None."""
        scores: Any = args[0] if args else kwargs.get("input")
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        found = self._known(scores) is not None and dim not in (-1, scores.dim() - 1)
        return dim if found else None

    def end(self, name: str, heads: Heads, args: Any, kwargs: dict[str, Any]) -> Call | None:
        """The attention call that ends in this softmax, if its argument was traced; else None."""
        scores = args[0] if args else kwargs.get("input")
        dim = args[1] if len(args) > 1 else kwargs.get("dim")
        step, moved = self._known(scores), self.origins.moved.get(scores)
        if moved is not None:
            raise ValueError(
                f"between the product of queries and keys and the softmax is {moved.by}, which "
                "moves scores, so that it is not known which keys they are of"
            )
        if step is None or not isinstance(scores, Tensor) or dim not in (-1, scores.dim() - 1):
            return None
        cross = self.origins.relate(*step.given, *scores.shape[-2:])
        scores = scores.detach()
        if scores.dim() == 5 and heads.come_first(scores.shape):
            scores, step = scores.transpose(1, 2), transposed(step)
        if scores.dim() != 4:
            n_heads = heads.count(scores.shape[0]) if scores.dim() == 3 else scores.shape[-3]
            scores = scores.reshape(-1, n_heads, *scores.shape[-2:])
            step = reshaped(step, scores)
        found = None if step is None or step.opaque else call_of(name, step)
        if found is None or not agrees(found, scores):
            found = whole_scores(name, hide_drowned(scores))
        return replace(found, cross=cross)


def product(q: Any, k_t: Any, result: Tensor) -> Step | None:
    if not isinstance(q, Tensor) or not isinstance(k_t, Tensor) or q.dim() != k_t.dim():
        return None
    if q.shape[-1] == 1 and q.dim() == 3:
        # Rotary embeddings multiply frequencies by positions like this: no heads, and nothing to
        # sum.
        return None
    weights = any(isinstance(x, nn.Parameter) for y in (q, k_t) for x in (y, y._base))
    one_key_head = q.dim() == 4 and k_t.shape[:2] == (q.shape[0], 1)
    if weights or q.dim() != result.dim() or not (q.shape[:-2] == k_t.shape[:-2] or one_key_head):
        return None
    k = k_t.detach().mT
    return Step(q.detach(), k.expand(*q.shape[:-2], *k.shape[-2:]), (q, k_t))


def added_product(args: Any, kwargs: dict[str, Any], result: Tensor) -> Step | None:
    """`baddbmm`: beta · input + alpha · b1 b2."""
    names = ("input", "batch1", "batch2")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    beta, alpha = given.get("beta", 1), given.get("alpha", 1)
    step = product(given.get("batch1"), given.get("batch2"), result)
    if step is None or "input" not in given:
        return None
    added = () if not beta else (given["input"].detach() * beta,)
    return replace(step, scale=float(alpha), added=added)


def summed_product(args: Any, result: Tensor) -> Step | None:
    """An einsum of two activations over one axis, such as "bhtd,bhsd->bhts"."""
    if len(args) == 2 and isinstance(args[1], (tuple, list)):
        args = (args[0], *args[1])
    if len(args) != 3 or not isinstance(args[0], str):
        return None
    ins, arrow, out = args[0].replace(" ", "").partition("->")
    letters = ins.split(",")
    if "..." in out:
        # Unused letters for the axes that the dots stand for.
        dots = "\u2460\u2461\u2462\u2463"[: result.dim() - len(out) + 3]
        letters, out = [each.replace("...", dots) for each in letters], out.replace("...", dots)
    lengths = [len(each) for each in (out, *letters)]
    if not arrow or lengths != [x.dim() for x in (result, *args[1:])]:
        return None
    inner = [x for x in letters[0] if x in letters[1] and x not in out]
    wanted = [out[:-1] + "".join(inner), out[:-2] + out[-1] + "".join(inner)]
    if len(inner) != 1 or any(sorted(a) != sorted(b) for a, b in zip(letters, wanted, strict=True)):
        return None
    q, k = (
        x.detach().permute([have.index(c) for c in want])
        for x, have, want in zip(args[1:], letters, wanted, strict=True)
    )
    return Step(q, k, (args[1], args[2]))


def reshaped(step: Step, result: Tensor) -> Step | None:
    """The step after a reshape, if only axes before the last two were merged or split."""
    T, S, D = step.q.shape[-2], step.k.shape[-2], step.q.shape[-1]
    if result.shape[-2:] != (T, S):
        return None
    lead, old = result.shape[:-2], step.q.shape[:-2]

    def change(x: Tensor) -> Tensor:
        if x.dim() < 3:
            return x
        return x.expand(*old, *x.shape[-2:]).reshape(*lead, *x.shape[-2:])

    return replace(
        step,
        q=step.q.reshape(*lead, T, D),
        k=step.k.reshape(*lead, S, D),
        added=tuple(change(x) for x in step.added),
        hidden=tuple(change(x) for x in step.hidden),
    )


def transposed(step: Step) -> Step:
    """The step with the second and third of its five axes swapped."""

    def transpose(x: Tensor) -> Tensor:
        return x if x.dim() < 3 else x[(None,) * (4 - x.dim())].transpose(-4, -3)

    return replace(
        step,
        q=transpose(step.q),
        k=transpose(step.k),
        added=tuple(map(transpose, step.added)),
        hidden=tuple(map(transpose, step.hidden)),
    )


def call_of(name: str, step: Step) -> Call | None:
    if step.q.dim() != 4 or step.q.shape[:2] != step.k.shape[:2]:
        return None
    added = (part.detach().to(score_dtype(part.dtype)) for part in step.added)
    biases = [DenseBias(hide_drowned(part)) for part in added]
    masks = [Dense(~part.detach().bool()) for part in step.hidden]
    bias = functools.reduce(operator.add, biases) if biases else None
    mask = functools.reduce(operator.and_, masks) if masks else None
    dtype = step.q.dtype if step.k.dtype == step.q.dtype else torch.float32
    q, k = step.q.to(dtype), step.k.to(dtype)
    return Call(name=name, q=q, k=k, mask=mask, bias=bias, scale=float(step.scale))


def hide_drowned(numbers: Tensor) -> Tensor:
    """Replace numbers to add that leave nothing of a score by -inf.

    Padded rows have such a number at every key: they see nothing, and do not count.
    """
    return numbers.masked_fill(numbers <= DROWNED, -torch.inf)


def agrees(call: Call, scores_bhts: Tensor) -> bool:
    """Whether the trace reproduces the actual scores, and hides what they hide.

    All rows are compared, some at a time: writing into scores (`scores[:, :, later] = -inf`) is not
    traced, nor is writing into queries after their product.
    """
    if tuple(scores_bhts.shape) != tuple(call.shape):
        return False
    B, H, T, S = call.shape
    rows = max(1, COMPARED // max(B * H * S, 1))
    device = scores_bhts.device
    parts = [torch.arange(t, min(t + rows, T), device=device) for t in range(0, T, rows)]
    agreed = [rows_agree(call, scores_bhts, part) for part in parts]
    return not agreed or bool(torch.stack(agreed).all())


def rows_agree(call: Call, scores_bhts: Tensor, rows: Tensor) -> Tensor:
    shape, dtype, rule = call.shape, score_dtype(call.q.dtype), call.rule
    traced = (call.q[:, :, rows].to(dtype) * (call.scale or 1.0)) @ call.k.to(dtype).mT
    b, h, j = (torch.arange(n, device=traced.device) for n in (shape.B, shape.H, shape.S))
    where = (b[:, None, None, None], h[:, None, None], rows[:, None] + shape.offset, j, shape)
    if rule.bias is not None:
        traced = traced + rule.bias.add(*where, dtype)
    seen = scores_bhts[:, :, rows].to(dtype)
    hidden = traced <= NEARLY_HIDDEN
    if rule.mask is not None:
        hidden = hidden | ~rule.mask.allows(*where)
    slack = 1e-4 if dtype == scores_bhts.dtype else 3e-2
    # The slack would be infinite at infinite scores.
    near = ((traced - seen).abs() <= slack * (1 + seen.abs())) & seen.isfinite()
    return torch.where(hidden, seen <= NEARLY_HIDDEN, near).all()


def number(value: Any) -> float | None:
    plain = isinstance(value, (int, float)) and not isinstance(value, bool)
    return float(value) if plain or (isinstance(value, Tensor) and value.dim() == 0) else None


def is_low(value: Any) -> bool:
    found = number(value)
    return found is not None and found <= HIDDEN


def name_of(func: Any) -> str:
    return getattr(func, "__name__", str(func))


@dataclass(frozen=True)
class Heads:
    """The number of heads that a module declares, if it does, and the number of inputs."""

    said: int | None
    n_inputs: int | None

    @staticmethod
    def of(module: nn.Module, n_inputs: int | None) -> Heads:
        names = ("num_heads", "n_heads", "num_attention_heads", "n_head", "heads", "nhead")
        found = (getattr(module, name, None) for name in names)
        return Heads(next((n for n in found if isinstance(n, int) and n > 0), None), n_inputs)

    def count(self, rows: int) -> int:
        """The number of heads, where one axis holds samples and heads together.

        It is what the module declares, unless there are no more rows than inputs, as when heads are
        called one by one. If the module declares none, all rows of a single input are heads.
        """
        if self.said is not None and rows % self.said == 0 and not 1 < rows == self.n_inputs:
            return self.said
        return rows if self.n_inputs == 1 else 1

    def come_first(self, shape: Sequence[int]) -> bool:
        """Whether, of five axes, the second is that of heads, and the third that of windows."""
        return shape[-4] == self.said != shape[-3]

    def doubt(self, shape: Sequence[int]) -> str | None:
        """A remark if it is unclear which axis is that of heads; else None."""
        said = self.said or 1
        if len(shape) == 3 and 1 < said <= shape[0] == self.n_inputs and shape[0] % said == 0:
            return (
                f"attends in {shape[0]} rows, as many as there are inputs, and says that it has "
                f"{said} heads; each row is taken for one head of an input"
            )
        if len(shape) == 4 and 1 < said == shape[0] != shape[1]:
            return (
                f"has axes of {shape[0]} and {shape[1]} before its tokens, and says that it has "
                f"{said} heads; the second is taken for that of heads"
            )
        if len(shape) != 5 or 1 in shape[-4:-2]:
            return None
        if self.said in shape[-4:-2] and shape[-4] != shape[-3]:
            return None
        return (
            f"has axes of {shape[-4]} and {shape[-3]} before its tokens, and does not say which is "
            "that of heads; the second is taken for it"
        )
