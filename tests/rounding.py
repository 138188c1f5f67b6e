"""How far right answers may lie apart: bounds that hold on every CPU.

A sum depends in its last bits on the order of its terms, and that order on the CPU, the memory
layout and the number of threads. So each bound here follows from eps and the sizes of the numbers,
or from the error that the plain formula makes in the same type, and none from what one CPU gave.
Where the same operation runs on the same layout, tests ask for equal bits instead.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regard.ops import Bias


def bound_sum(n_terms: int, size: float | Tensor, dtype: torch.dtype = torch.float32) -> float:
    """How far two sums of the same `n_terms` numbers may lie apart.

    Each of the additions of one sum rounds by at most eps / 2 of what the terms come to, all taken
    without their signs; this is `size`, and there are two sums.
    """
    return n_terms * torch.finfo(dtype).eps * float(torch.as_tensor(size).detach())


def measure_error(found: Any, exact: Any) -> float:
    """The largest distance of `found` from `exact`, taken in float64; 0 where both are empty."""
    gap = np.abs(_as_array(found) - _as_array(exact))
    return float(gap.max()) if gap.size else 0.0


def bound_error(plain: Any, exact: Any, n_terms: int, dtype: torch.dtype = torch.float32) -> float:
    """How far from `exact` (in float64) an answer may lie; `plain` is what its formula gives.

    Twice the error of the plain formula, and that of one more sum of `n_terms`, the last one that
    the answer goes through: the plain formula may have been lucky there.
    """
    size = measure_error(exact, np.zeros(()))
    return 2 * measure_error(plain, exact) + bound_sum(n_terms, size, dtype)


def bound_weights(plain: Any, exact: Any, dtype: torch.dtype = torch.float32) -> float:
    """How far from `exact` (in float64) weights of attention may lie; `plain` is their formula's.

    Twice the error of the plain formula, and eps times the largest score: a weight is
    exp(score - logsumexp), and rounding that exponent takes eps of its size at most. How far it
    reaches is seen in the smallest of the exact weights that are not 0.
    """
    wide = _as_array(exact)
    size = -np.log(wide[wide > 0].min()) if (wide > 0).any() else 0.0
    return 2 * measure_error(plain, exact) + bound_sum(1, size, dtype)


def assert_within(found: Any, exact: Any, bound: float, what: str = "") -> None:
    """No number of `found` is farther from `exact` than `bound`; NaN is farther than anything."""
    assert np.shape(_as_array(found)) == np.shape(_as_array(exact))
    error = measure_error(found, exact)
    assert error <= bound, f"{what} off by {error:.3g}, at most {bound:.3g} is rounding"


def widen(given: Any) -> Any:
    """The same in float64: tensors, biases that hold some, dicts of these; the rest as it is."""
    if isinstance(given, Tensor):
        return given.double() if given.is_floating_point() else given
    if isinstance(given, dict):
        return {name: widen(value) for name, value in given.items()}
    if isinstance(given, Bias):
        given = copy.copy(given)
        for name, value in vars(given).items():
            object.__setattr__(given, name, widen(value))
    return given


def _as_array(values: Any) -> npt.NDArray[Any]:
    if isinstance(values, Tensor):
        values = values.detach().double().numpy()
    return np.asarray(values, np.float64)
