"""The KV cache: keys and values of earlier calls, so that each new token is computed once.

How: a layer passes its new keys and values to `update` and attends to what this returns. `Slots`
(`cache_slots.py`) hold the positions of all keys, which the layer gives to its masks and biases. A
negative position is padding or an empty slot, which is masked whatever it contains. So each row of
a batch has its own positions.

- `KVCache.growing()` keeps everything, in order of arrival. Gradients flow through it if they are
  needed; if not, buffers grow by half when they are full, so that a step does not copy all earlier
  keys.
- `KVCache.fixed(size)` is a static cache: allocated at its first call and written in place, so that
  one compiled graph serves every step. Without gradients.
- `KVCache.windowed(left)` is a ring buffer for layers that attend `left` keys back: it holds these
  and the newest key, and never more. Without gradients.
- `CrossCache` holds the keys and values of a memory, which are computed once.

The first call gets back its own keys and values, so a prompt costs no more than without a cache.

`evict` keeps some keys of a growing cache, different ones in each head, and loses their positions:
layers with a window, a bias or a rotary scaling that `rotates_kept_keys` then refuse the cache.

Left out: pages shared between rows, quantised keys, rewinding to an earlier position.

Letters: B batch, G key heads, T new tokens, S kept keys, D and E widths of keys and values. N rows
of positions: B, or 1 while all rows of the batch are alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple, final

import torch
from torch import Tensor

from regard._check import check_shapes
from regard.layers.cache_slots import (
    FixedSlots,
    GrowingSlots,
    RingSlots,
    Slots,
    Step,
    reorder_in_place,
    writable,
)


class Kept(NamedTuple):
    """What a call attends to: keys (B, G, S, D), values (B, G, S, E), the keys' positions (N, S).

    `queries` (N, T) are the new tokens' positions. `in_line`: masks need no positions, see `Step`.
    """

    k: Tensor
    v: Tensor
    positions: Tensor
    queries: Tensor
    in_line: bool


@final
class KVCache:
    """The keys and values of one self-attention layer: `KVCache.growing()`, `.fixed`, `.windowed`.

    Pass it to each call of the layer, which adds its new keys and values. For a whole model,
    `model.make_cache()` makes one for each layer.

    Example:
        >>> layer, x = regard.MultiHeadAttention(64, 8, causal=True), torch.randn(2, 11, 64)
        >>> cache = regard.KVCache.growing()
        >>> steps = [layer(x[:, t : t + 1], cache=cache) for t in range(11)]
        >>> torch.testing.assert_close(torch.cat(steps, dim=1), layer(x))
    """

    def __init__(self, slots: Slots) -> None:
        """slots: the positions of the keys; the caches of a stack share them."""
        self.slots = slots
        self.window = slots.window  # how many keys back a query may attend; None: no limit
        # Whether keys are stored in order of arrival, as masks that index keys by slot need it.
        self.in_order = slots.n_slots is None
        self._kept: tuple[Tensor, Tensor] | None = None
        self._buffers: tuple[Tensor, Tensor] | None = None

    @staticmethod
    def growing() -> KVCache:
        """A cache that keeps everything. Gradients flow through it where they are needed."""
        return KVCache(GrowingSlots())

    @staticmethod
    def fixed(size: int) -> KVCache:
        """A static cache: buffers for `size` tokens a row, padding included, written in place.

        Every decoding step has the same shapes, so one compiled graph serves all. No gradients.
        """
        return KVCache(FixedSlots(size))

    @staticmethod
    def windowed(left: int) -> KVCache:
        """A ring buffer for a layer with the window (left, 0): the last `left` keys and the newest.

        No gradients.
        """
        return KVCache(RingSlots(left))

    @property
    def length(self) -> Tensor | None:
        """The length of each row's text, which is its next position: (N,); None while empty."""
        return self.slots.length

    @property
    def nbytes(self) -> int:
        """Bytes of keys and values, including what is allocated for later ones."""
        return count_bytes(self._kept if self._buffers is None else self._buffers)

    def update(self, k: Tensor, v: Tensor, positions: Tensor | Step | None = None) -> Kept:
        """Add k (B, G, T, D) and v (B, G, T, E), and return what these tokens may attend to.

        `positions` (T,) or (B, T) are the tokens' positions, negative for padding; those of real
        tokens increase along a row. None: each row continues its own count. Or the `Step` that
        `slots.advance` returned, computed once for all layers that share the slots.
        """
        if not isinstance(positions, Step):
            sizes = check_shapes({"k": (k, "B G T D"), "v": (v, "B G T E")})
            positions = self.slots.advance(sizes["B"], sizes["T"], k.device, positions)
        read = self._append if self.in_order else self._write
        k_bgsd, v_bgsd = read(k, v, positions)
        return Kept(k_bgsd, v_bgsd, positions.keys, positions.queries, positions.in_line)

    def reorder(self, index: Tensor, slots: bool = True) -> None:
        """Replace row b by the old row index[b]; there are then as many rows as index has.

        slots: whether to reorder the slots too; a stack does that once for shared slots.
        """
        if slots:
            self.slots.reorder(index)
        if not self.in_order:
            if self._buffers is not None:
                self._buffers = reorder_in_place(self._buffers, index)
        elif self._kept is not None:
            n = self._kept[0].shape[2]
            k, v = self._kept if self._buffers is None else self._buffers
            k, v = k.index_select(0, index), v.index_select(0, index)
            self._buffers = None if self._buffers is None else (k, v)
            self._kept = k[:, :, :n], v[:, :, :n]

    @property
    def keys(self) -> Tensor:
        """The keys that a growing cache holds, (B, G, S, D)."""
        if self._kept is None:
            why = "is empty" if self.in_order else "is a fixed or windowed one, with empty slots"
            raise ValueError(f"the cache {why}; keys can be read from a filled KVCache.growing()")
        return self._kept[0]

    def evict(self, index_bgk: Tensor, slots: bool = True) -> None:
        """Keep only the keys index[b, g] of row b and key head g; for a growing cache.

        slots: whether to update the slots too; `generation.evict` does that once for shared slots.
        """
        assert self.keys is not None and self._kept is not None
        k, v = (pick_keys(x, index_bgk) for x in self._kept)
        if slots:
            self.slots.evict(index_bgk.shape[2])
        self._kept, self._buffers = (k, v), None

    def reset(self, slots: bool = True) -> None:
        """Empty the cache; static buffers stay allocated."""
        if slots:
            self.slots.reset()
        self._kept = None
        if self.in_order:
            self._buffers = None

    def _append(self, k: Tensor, v: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        if self._kept is None:
            self._kept = k, v
            return self._kept
        old_k, old_v = self._kept
        check_fit(self._kept, k, v)
        before, after = old_k.shape[2], old_k.shape[2] + k.shape[2]
        if after != step.keys.shape[1]:
            raise ValueError(
                f"this cache holds {before} keys, but the other layers of its stack hold "
                f"{step.keys.shape[1] - k.shape[2]}: a cache from make_cache() is for the whole "
                "stack; give a layer that runs alone a KVCache.growing() of its own"
            )
        tracked = torch.is_grad_enabled() and any(x.requires_grad for x in (old_k, old_v, k, v))
        if tracked or torch.compiler.is_compiling():
            self._buffers = None
            self._kept = torch.cat((old_k, k), 2), torch.cat((old_v, v), 2)
            return self._kept
        buffers = self._buffers
        if buffers is None or buffers[0].shape[2] < after:
            k_buffer, v_buffer = allocate(old_k, old_v, after + max(after // 2, 64))
            k_buffer[:, :, :before], v_buffer[:, :, :before] = old_k, old_v
            buffers = k_buffer, v_buffer
        k_buffer, v_buffer = buffers
        if k_buffer.is_inference() and not torch.is_inference_mode_enabled():
            k_buffer, v_buffer = writable(k_buffer), writable(v_buffer)
        self._buffers = k_buffer, v_buffer
        k_buffer[:, :, before:after], v_buffer[:, :, before:after] = k, v
        self._kept = k_buffer[:, :, :after], v_buffer[:, :, :after]
        return self._kept

    def _write(self, k: Tensor, v: Tensor, step: Step) -> tuple[Tensor, Tensor]:
        """Write new keys and values into their slots, and return what these tokens attend to."""
        if torch.is_grad_enabled() and (k.requires_grad or v.requires_grad):
            raise ValueError(
                "this cache is written in place and carries no gradient: call the model under "
                "torch.no_grad(), or use KVCache.growing()"
            )
        buffers, slots = self._buffers, self.slots
        assert slots.n_slots is not None and slots.n_read is not None and step.slots is not None
        if buffers is None or (step.first and not fits(buffers, k, v)):
            buffers = allocate(k, v, slots.n_slots)
        check_fit(buffers, k, v)
        self._buffers = buffers = writable(buffers[0]), writable(buffers[1])
        read = (k, v) if step.first else buffers
        if slots.n_read < slots.n_slots and not step.first:
            read = buffers[0][:, :, : slots.n_read], buffers[1][:, :, : slots.n_read]
            if step.keys.shape[1] > slots.n_read:
                read = torch.cat((read[0], k), 2), torch.cat((read[1], v), 2)
        # If `read` is a view of the buffers, it contains what is written here.
        for buffer, x in zip(buffers, (k, v), strict=True):
            if step.slots.shape[0] == 1:
                buffer.index_copy_(2, step.slots[0], x)
            else:
                buffer.scatter_(2, step.slots[:, None, :, None].expand_as(x), x)
        return read


@final
class CrossCache:
    """Keys and values of a memory, computed at the first call and used in all later ones."""

    def __init__(self) -> None:
        self.reset()

    @property
    def filled(self) -> bool:
        return self.k is not None

    @property
    def nbytes(self) -> int:
        return count_bytes((self.k, self.v) if self.k is not None and self.v is not None else None)

    def reset(self) -> None:
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def fill(self, k: Tensor, v: Tensor) -> None:
        check_shapes({"k": (k, "B G S D"), "v": (v, "B G S E")})
        self.k, self.v = k, v

    def reorder(self, index: Tensor) -> None:
        if self.k is not None and self.v is not None:
            self.k, self.v = self.k.index_select(0, index), self.v.index_select(0, index)


@final
@dataclass(frozen=True, eq=False)
class BlockCache:
    """The caches of one decoder block; `cross_attn` is None without cross-attention."""

    self_attn: KVCache
    cross_attn: CrossCache | None = None


@final
class DecoderCache:
    """The caches of a stack of decoder blocks, made by `Decoder.make_cache`."""

    def __init__(self, blocks: Iterable[BlockCache]) -> None:
        self.blocks = tuple(blocks)
        of_blocks = [block.self_attn.slots for block in self.blocks]
        self.slots = list(dict.fromkeys(of_blocks))  # each once, however many blocks share it
        self.slots_of = [self.slots.index(slots) for slots in of_blocks]

    @property
    def length(self) -> Tensor | None:
        """The length of each row's text so far, (N,); None before the first call."""
        return self.slots[0].length if self.slots else None

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values, including the memory's and what is allocated ahead."""
        kept = [cache for block in self.blocks for cache in (block.self_attn, block.cross_attn)]
        return sum(cache.nbytes for cache in kept if cache is not None)

    def next_positions(self, n: int, device: torch.device) -> Tensor:
        """Positions (N, n) of the next n tokens of each row."""
        return self.slots[0].next_positions(n, device)

    def reorder(self, index: Tensor) -> None:
        """Replace row b by the old row index[b], in every block."""
        for slots in self.slots:
            slots.reorder(index)
        for block in self.blocks:
            block.self_attn.reorder(index, slots=False)
            if block.cross_attn is not None:
                block.cross_attn.reorder(index)

    def reset(self) -> None:
        """Empty all caches, including those of the memory."""
        for slots in self.slots:
            slots.reset()
        for block in self.blocks:
            block.self_attn.reset(slots=False)
            if block.cross_attn is not None:
                block.cross_attn.reset()


def count_bytes(pair: tuple[Tensor, Tensor] | None) -> int:
    return 0 if pair is None else sum(x.nbytes for x in pair)


def pick_keys(x_bgsd: Tensor, index_bgk: Tensor) -> Tensor:
    """The keys or values with these indices, for each row and key head."""
    return x_bgsd.gather(2, index_bgk[..., None].expand(-1, -1, -1, x_bgsd.shape[3]))


def allocate(k: Tensor, v: Tensor, size: int) -> tuple[Tensor, Tensor]:
    k_buffer, v_buffer = (x.new_zeros(*x.shape[:2], size, x.shape[3]) for x in (k, v))
    return k_buffer, v_buffer


def fits(kept: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> bool:
    for old, new in zip(kept, (k, v), strict=True):
        if old.dtype != new.dtype or old.device != new.device:
            return False
        if old.shape[:2] != new.shape[:2] or old.shape[3] != new.shape[3]:
            return False
    return True


def check_fit(kept: tuple[Tensor, Tensor], k: Tensor, v: Tensor) -> None:
    if fits(kept, k, v):
        return
    for name, old, new in (("k", kept[0], k), ("v", kept[1], v)):
        check_shapes({f"kept {name}": (old, "B G S D"), name: (new, "B G T D")})
        if old.dtype != new.dtype or old.device != new.device:
            raise TypeError(
                f"{name} is {new.dtype} on {new.device}, but the cache holds {old.dtype} on "
                f"{old.device}; use a new cache"
            )
