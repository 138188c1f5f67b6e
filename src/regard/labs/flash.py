"""What does attention cost that never builds its matrix?

The formula needs all scores of a row before it can divide by their sum, and so, it seems, the whole
T × T matrix. The online softmax needs only the largest score m and the sum s = Σ exp(x - m) so far:
a new score x updates them to m' = max(m, x) and s' = s · exp(m - m') + exp(x - m'), and any other
running sum is multiplied by exp(m - m'), too. So keys can be processed in tiles, of which only one
is in memory at a time (FlashAttention), and memory grows with T instead of T².
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard import Causal, attention, explain
from regard.labs.lab import Lab, Results
from regard.labs.parts import Run
from regard.labs.peak_memory import measure_peak
from regard.labs.sentences import list_intervals
from regard.labs.small_training import generator_of
from regard.labs.timing import median_time, time_calls

if TYPE_CHECKING:
    from matplotlib.figure import Figure

NUMBERS = (1.0, 3.0, 2.0, 5.0, 4.0, 0.0, 7.0, 6.0, 2.0, 1.0)
EAGER, SDPA, BLOCKWISE, OURS, TRITON = WAYS = (
    "eager formula",
    "torch's SDPA",
    "blockwise",
    "regard.attention",
    "our kernels",
)
REPEATS = 5
CPU_BYTES = 2**32  # memory that the formula may use on a CPU; a GPU reports what is free
SPARE = 0.1  # of the memory that the formula needs, for allocations that are not counted
Way = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Size:
    """One layer's heads and their width, and the lengths of texts."""

    n_heads: int
    width: int
    lengths: tuple[int, ...]


TINY = Size(n_heads=4, width=32, lengths=tuple(2**n for n in range(7, 12)))
FULL = Size(n_heads=8, width=64, lengths=tuple(2**n for n in range(10, 18)))


def online_softmax(numbers: Sequence[float]) -> list[dict[str, float]]:
    """The running maximum and the running sum after each number."""
    largest, total, rows = -math.inf, 0.0, []
    for x in numbers:
        before, largest = largest, max(largest, x)
        total = total * math.exp(before - largest) + math.exp(x - largest)
        rows.append({"number": x, "maximum": largest, "sum": total})
    return rows


def online_weights(numbers: Sequence[float]) -> dict[str, Any]:
    """Weights by the online softmax, and their largest difference from the ordinary softmax."""
    rows = online_softmax(numbers)
    last = rows[-1]
    online = [math.exp(x - last["maximum"]) / last["sum"] for x in numbers]
    at_once = torch.tensor(numbers, dtype=torch.float64).softmax(-1).tolist()
    apart = max(abs(one - other) for one, other in zip(online, at_once, strict=True))
    return {"rows": rows, "weights": online, "apart": apart}


def attend_eagerly(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √d) v as written, with a causal mask; intermediates are freed early."""
    scores = q @ k.mT * q.shape[-1] ** -0.5
    later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    scores = scores.masked_fill(later, -math.inf)
    output: Tensor = scores.softmax(-1) @ v
    return output


def attend_by_sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    output: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
    return output


def attend_by(backend: str) -> Way:
    return lambda q, k, v: attention(q, k, v, mask=Causal(), backend=backend)


CALLS: dict[str, Way] = {
    EAGER: attend_eagerly,
    SDPA: attend_by_sdpa,
    BLOCKWISE: attend_by("blockwise"),
    OURS: attend_by("auto"),
    TRITON: attend_by("triton"),
}


def eager_bytes(n_heads: int, length: int, itemsize: int) -> int:
    """Peak bytes of the formula: two T × T matrices for each head, and a mask of a byte a pair."""
    return (2 * n_heads * itemsize + 1) * length * length


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        torch.cuda.empty_cache()
        return torch.cuda.mem_get_info(device)[0]
    return CPU_BYTES


def draw_inputs(length: int, size: Size, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Draw q, k and v of one text, in the dtype that is usual on the device."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    shape, drawn = (3, 1, size.n_heads, length, size.width), generator_of(length, device=device)
    q, k, v = torch.randn(shape, generator=drawn, device=device, dtype=dtype)
    return q, k, v


def measure_way(way: str, length: int, size: Size, device: torch.device) -> dict[str, Any]:
    """Measure peak memory and times of one causal forward pass, or say why it was refused."""
    q, k, v = draw_inputs(length, size, device)
    needed, free = eager_bytes(size.n_heads, length, q.dtype.itemsize), free_bytes(device)
    if way == EAGER and (1 + SPARE) * needed > free:
        return {"needed": needed, "free": free}
    refused = kernels_refusal(q, k, v) if way == TRITON else None
    if refused is not None:
        return {"refused": refused}

    @torch.no_grad()
    def call() -> Tensor:
        return CALLS[way](q, k, v)

    seconds = time_calls(call, device, REPEATS)
    found = {"peak": measure_peak(call, device), "seconds": seconds}
    chosen = explain(q, k, v, mask=Causal()).chosen if way == OURS else None
    return found if chosen is None else found | {"chosen": chosen}


def kernels_refusal(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why our kernels refuse this call, in the library's words; None if they accept it."""
    try:
        explain(q, k, v, mask=Causal(), backend="triton")
    except ValueError as refusal:
        return str(refusal)
    return None


def measure_apart(way: str, size: Size, device: torch.device) -> float | None:
    """The largest error against the formula in float64, at 257 tokens; None if refused."""
    q, k, v = draw_inputs(257, size, device)
    if way == TRITON and kernels_refusal(q, k, v) is not None:
        return None
    exact = attention(q.double(), k.double(), v.double(), mask=Causal(), backend="reference")
    return float((CALLS[way](q, k, v).double() - exact).abs().max())


def measure(run: Run) -> dict[str, Any]:
    size = TINY if run.tiny else FULL

    def one(item: tuple[str, int]) -> dict[str, Any]:
        return measure_way(*item, size, run.device)

    def apart(way: str) -> float | None:
        return measure_apart(way, size, run.device)

    return {
        "heads": size.n_heads,
        "width": size.width,
        "lengths": list(size.lengths),
        "softmax": run.map("online softmax", online_weights, [NUMBERS])[0],
        "apart": dict(zip(WAYS, run.map("against the formula", apart, WAYS), strict=True)),
        "ways": {way: run.map(way, one, [(way, n) for n in size.lengths]) for way in WAYS},
    }


def spell_bytes(count: float) -> str:
    for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.3g} {unit}"
    return f"{count:,.0f} bytes"


def find(results: Results) -> list[str]:
    return [*find_memory(results), *find_times(results), find_softmax(results)]


def find_softmax(results: Results) -> str:
    softmax = results["softmax"]
    rows, apart = softmax["rows"], softmax["apart"]
    words = [", ".join(format(row[name], "g") for row in rows) for name in ("number", "maximum")]
    sums = ", ".join(f"{row['sum']:.4f}" for row in rows)
    same = "equal" if apart < 1e-12 else "are not equal, against the prediction, to"
    return (
        f"The online softmax of {words[0]} has, number by number, the maximum {words[1]} and the "
        f"sum {sums}; its weights {same} those of the softmax in one go, to {apart:.1g}."
    )


def measured(results: Results, way: str) -> dict[int, dict[str, Any]]:
    """The measurements of one implementation, by length."""
    found = zip(results["lengths"], results["ways"][way], strict=True)
    return {length: row for length, row in found if "peak" in row}


def find_memory(results: Results) -> list[str]:
    """Say how memory grows with length, and at which length the formula runs out of it."""
    sentences = []
    words = []
    for way in WAYS:
        rows = measured(results, way)
        if len(rows) < 2:
            continue
        before, last = list(rows)[-2:]
        growth = rows[last]["peak"] / rows[before]["peak"]
        peak = spell_bytes(rows[last]["peak"])
        words.append(f"{way} {peak} at {last:,} ({growth:.2g} times that at {before:,})")
    sentences.append(
        f"One causal layer of {results['heads']} heads of width {results['width']} takes at its "
        f"peak, beside its inputs: {'; '.join(words)}."
    )
    eager, ours = measured(results, EAGER), measured(results, OURS)
    shared = [length for length in eager if length in ours]
    if shared:
        length = shared[-1]
        ratio = eager[length]["peak"] / ours[length]["peak"]
        times = f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}"
        sentences.append(
            f"At {length:,} tokens the formula takes {times} times the memory of {OURS}"
            f"{'' if ratio > 1 else ', against the prediction'}."
        )
    for length, row in zip(results["lengths"], results["ways"][EAGER], strict=True):
        if "needed" in row:
            sentences.append(
                f"At {length:,} tokens it would need {spell_bytes(row['needed'])}, and "
                f"{spell_bytes(row['free'])} are free: there and beyond it is not run."
            )
            break
    return sentences


def find_times(results: Results) -> list[str]:
    """Say the times at the longest length that the formula reaches, and at the longest of all."""
    sentences = []
    ends = sorted({max(measured(results, way), default=0) for way in WAYS} - {0})
    for length in dict.fromkeys((ends[0], ends[-1])):
        times = {
            way: median_time([1000 * each for each in rows[length]["seconds"]])
            for way in WAYS
            if length in (rows := measured(results, way))
        }
        sentences.append(
            f"At {length:,} tokens it takes, in ms, with 95% intervals of the medians: "
            f"{list_intervals(times)}.{spell_lead(times)}"
        )
    chosen = {row["chosen"] for row in results["ways"][OURS] if "chosen" in row}
    apart = {way: value for way, value in results["apart"].items() if value is not None}
    worst = max(apart, key=lambda way: apart[way])
    sentences.append(
        f"{OURS} chose the backend {' and '.join(sorted(chosen))}. All are within "
        f"{apart[worst]:.1g} of the formula in float64 ({worst} is the farthest)."
    )
    refusals = sorted({row["refused"] for row in results["ways"][TRITON] if "refused" in row})
    if refusals:
        sentences.append(f"Our kernels were not run: {'; '.join(refusals)}.")
    return sentences


def spell_lead(times: dict[str, dict[str, float]]) -> str:
    """Say whether the formula takes longer than our attention."""
    if EAGER not in times or OURS not in times:
        return ""
    eager, ours = times[EAGER], times[OURS]
    if eager["low"] > ours["high"]:
        return f" The formula takes {eager['mean'] / ours['mean']:.2g} times as long as {OURS}."
    if eager["high"] < ours["low"]:
        return f" The formula is faster than {OURS}, against the prediction."
    return f" Whether the formula takes longer than {OURS} is not clear."


def draw(results: Results, figure: Figure) -> None:
    """Draw memory and time by length, and the online softmax of ten numbers."""
    memory, times, softmax = figure.subplots(1, 3)
    for n, way in enumerate(WAYS):
        rows = measured(results, way)
        if not rows:
            continue
        style: dict[str, Any] = {"color": f"C{n}", "marker": "o", "label": way}
        style |= {"markersize": 9 - 1.5 * n}
        memory.plot(list(rows), [row["peak"] / 2**20 for row in rows.values()], **style)
        medians = [1000 * median_time(row["seconds"])["mean"] for row in rows.values()]
        times.plot(list(rows), medians, **style)
    memory.set(title="peak memory (MiB)", xlabel="length (tokens)")
    times.set(title="a forward (ms)", xlabel="length (tokens)")
    ticks = results["lengths"][::2]
    for axes in (memory, times):
        axes.set(xscale="log", yscale="log")
        axes.set_xticks(ticks, [f"{n:,}" if n < 1024 else f"{n // 1024}k" for n in ticks])
        axes.tick_params(axis="x", which="minor", bottom=False, labelbottom=False)
        axes.grid(alpha=0.3)
    lines, names = memory.get_legend_handles_labels()
    figure.legend(lines, names, loc="outside lower center", ncols=len(WAYS), frameon=False)
    at = range(1, len(results["softmax"]["rows"]) + 1)
    for name, mark in (("number", "k."), ("maximum", "C3-"), ("sum", "C4o--")):
        values = [row[name] for row in results["softmax"]["rows"]]
        label = name if name == "number" else f"running {name}"
        drawstyle = "steps-post" if name == "maximum" else "default"
        softmax.plot(at, values, mark, label=label, drawstyle=drawstyle)
    softmax.set(title="online softmax", xlabel="numbers so far", ylim=(-0.4, 10))
    softmax.set_xticks(list(at))
    softmax.grid(alpha=0.3)
    softmax.legend(frameon=False)


LAB = Lab(
    name="flash",
    question="What does attention cost that never builds its matrix?",
    prediction="The formula keeps a T × T matrix for each head: twice the length, four times the "
    "memory. Softmax can be had number by number, with a running maximum and a running sum, so "
    "that keys come in tiles: the memory then grows as the length does, the result is the same, "
    "and the time still grows with the square, but is less, since less is written and read.",
    method="One causal forward of one layer's attention, batch 1, random normal queries, keys and "
    "values: the formula as written (scores, mask, softmax, product: each a tensor), torch's "
    'scaled_dot_product_attention, regard\'s tiles in plain torch (backend="blockwise"), '
    'regard.attention as called, and on a GPU our kernels (backend="triton") where they do not '
    "refuse; bfloat16 on a GPU, float32 on a CPU. Peak memory is what is allocated at once beyond "
    "the inputs, the output counted: by torch's allocator on a GPU, on a CPU by adding up all "
    "allocations and releases that torch's profiler sees. The formula is not run where two "
    "matrices a head, the mask and a tenth are more than the free memory (4 GiB on a CPU). Times "
    "are medians of 5 calls after one that is not counted.",
    measure=measure,
    find=find,
    draw=draw,
)
