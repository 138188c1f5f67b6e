"""Positions that are added to the embeddings, sinusoidal and learned; positions of padded rows.

Why: the first Transformer, Marian, GPT-2, BERT, OPT and BART encode the order this way.

How: `Sinusoidal` and `Learned` map each position to a vector; `add` adds it to the embeddings. The
sinusoid is computed from the position, so it has no table and no maximum length.

Left out: the sinusoids of tensor2tensor and fairseq, whose exponent is 2i / (dim - 2).

Letters: B batch, T tokens, C model width, R pairs of sine and cosine.
"""

from typing import Literal, get_args

import torch
from torch import Tensor, nn

from regard._check import check_choice, check_count, check_number, check_positions, readable
from regard.positions.frequencies import make_frequencies

Layout = Literal["interleaved", "halves"]


def sinusoidal(
    length: int,
    dim: int,
    base: float = 10000.0,
    *,
    layout: Layout = "interleaved",
    device: torch.device | str | None = None,
) -> Tensor:
    """Positions 0 .. length - 1, float32 (length, dim): sin and cos of position / base^(2i / dim).

    Layout "interleaved" is sin, cos, sin, cos, ... (the paper); "halves" is all sines, then all
    cosines (Marian). An odd width has one sine more than cosines.
    """
    if length != 0:
        check_count("length", length)
    positions_t = torch.arange(length, device=device)
    return Sinusoidal(dim, base=base, layout=layout).forward(positions_t)


class Sinusoidal(nn.Module):
    """The sinusoidal encoding of positions: sin and cos of position / base^(2i / dim).

    Args:
        dim: The width of the encoding.
        max_len: Positions from here on are refused. None: any position will do.
        base: The base of the frequencies.
        layout: "interleaved": sin and cos alternate, as in the paper. "halves": first all sines.

    Example:
        >>> regard.positions.Sinusoidal(8)(torch.arange(5)).shape
        torch.Size([5, 8])
    """

    def __init__(
        self,
        dim: int,
        max_len: int | None = None,
        *,
        base: float = 10000.0,
        layout: Layout = "interleaved",
    ) -> None:
        super().__init__()
        check_count("dim", dim)
        check_number("base", base, above=1)
        check_choice("layout", layout, get_args(Layout))
        if max_len is not None:
            check_count("max_len", max_len)
        self.dim, self.max_len, self.base, self.layout = dim, max_len, float(base), layout

    def forward(self, positions: Tensor) -> Tensor:
        """(T,) or (B, T) -> float32 (T, C) or (B, T, C)."""
        check_positions(positions)
        if self.max_len is not None:
            _check_range(positions, self.max_len)
        frequencies_r = make_frequencies(self.dim, self.base, positions.device)
        angles_tr = positions[..., None] * frequencies_r
        sin_tr, cos_tr = angles_tr.sin().float(), angles_tr.cos().float()
        if self.layout == "halves":
            return torch.cat((sin_tr, cos_tr[..., : self.dim // 2]), -1)
        return torch.stack((sin_tr, cos_tr), -1).flatten(-2)[..., : self.dim]

    def add(self, x_btc: Tensor, positions: Tensor) -> Tensor:
        """x plus its encoding, summed in float32 (or wider) and rounded once, to the type of x."""
        return x_btc.add(self(positions)).to(x_btc.dtype)

    def extra_repr(self) -> str:
        return f"{self.dim}, max_len={self.max_len}, base={self.base:g}, layout={self.layout!r}"


class Learned(nn.Module):
    """Learned positions: a table with one vector for each position 0 .. max_len - 1.

    Positions out of range are refused, except in compiled code, where reading their values would
    make the host wait for the device.

    Args:
        max_len: The number of positions.
        dim: The width of a vector.
        offset: How many more rows the table has before them, which stay unused: 2 in OPT and BART,
            the padding index + 1 in RoBERTa.
        device, dtype: Of the table.

    Example:
        >>> regard.positions.Learned(512, 64)(torch.arange(5)).shape
        torch.Size([5, 64])
    """

    def __init__(
        self,
        max_len: int,
        dim: int,
        offset: int = 0,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_count("max_len", max_len)
        check_count("dim", dim)
        if offset != 0:
            check_count("offset", offset)
        self.max_len, self.dim, self.offset = max_len, dim, offset
        self.table = nn.Embedding(max_len + offset, dim, device=device, dtype=dtype)

    def forward(self, positions: Tensor) -> Tensor:
        """(T,) or (B, T) -> (T, C) or (B, T, C), in the type of the table."""
        check_positions(positions)
        _check_range(positions, self.max_len)
        encoding_tc: Tensor = self.table(positions.long() + self.offset)
        return encoding_tc

    def add(self, x_btc: Tensor, positions: Tensor) -> Tensor:
        """x plus its encoding, in the type of x."""
        return x_btc.add(self(positions)).to(x_btc.dtype)

    def extra_repr(self) -> str:
        return f"{self.max_len}, {self.dim}, offset={self.offset}"


def count_positions(real_bt: Tensor) -> Tensor:
    """Positions (B, T) of padded rows: the running count of real tokens, from 0.

    `real_bt` is True where a token is real. So a row has the same positions wherever its padding
    is. Padding gets some position that is in range: it still has to be masked.
    """
    if real_bt.dtype != torch.bool or real_bt.ndim != 2:
        raise ValueError(
            f"real_bt is {real_bt.dtype} of shape {tuple(real_bt.shape)}; "
            "expected bool (B, T), True where a token is real"
        )
    return (real_bt.cumsum(-1) - 1).clamp(min=0)


def _check_range(positions: Tensor, max_len: int) -> None:
    """Refuse positions outside 0 .. max_len - 1, if their values can be read."""
    if not readable(positions) or positions.numel() == 0:
        return
    if positions.is_cuda and torch.cuda.is_current_stream_capturing():
        return
    lowest, highest = torch.stack(torch.aminmax(positions)).tolist()
    if lowest < 0 or highest >= max_len:
        raise ValueError(
            f"position {lowest if lowest < 0 else highest} is outside max_len {max_len}: positions "
            f"run from 0 to {max_len - 1}; shorten the text or choose a larger max_len"
        )
