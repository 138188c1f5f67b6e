"""Which token of a sentence translates which token of the other: links of pairs, by statistics.

Why: a translator's cross-attention is asked to look where the translation comes from. Nobody has
marked that by hand; a corpus of pairs tells it by itself: what always comes together, belongs
together.

How: IBM model 1 with a prior for the diagonal and a null word, the way of fast_align (Dyer,
Chahuneau and Smith, "A simple, fast, and effective reparameterization of IBM model 2", 2013). Token
j of T in the one sentence was made by token i of S in the other, or by nothing, with probability

    p(i | j) ∝ (1 - null) · exp(-tension · |(i + ½)/S - (j + ½)/T|) / Z_j · theta(made_j | given_i)
    p(nothing | j) ∝ null · theta(made_j | nothing)

and expectation–maximisation finds `theta` and `tension`. The tension begins at 0, which is model 1:
languages whose words stand in other places (English and Japanese) are not pressed onto the diagonal
before the words have spoken. With `alpha` above 0 counts are smoothed as variational Bayes does
under a Dirichlet prior, theta = exp(ψ(count + alpha) - ψ(sum)), which keeps rare words from
explaining everything near them; 0 is plain maximum likelihood. Both directions are fitted, and a
link stays where both believe in it (`agree`): so a word of several pieces may keep several links,
which the intersection of best guesses forbids, and a doubtful one keeps none, where "grow-diag"
would fill it in. Attention is better told nothing than told wrong.

All possible links of the corpus ("cells") lie in one flat array, ordered by pair, made token and
given token, so that every step is a few numpy calls over all of them. What depends on positions
alone lies in a much smaller table, one block for each pair of lengths.

Left out: fertility, hidden Markov chains, and corpora whose cells do not fit into memory, which are
refused. There is no chance in it: the same pairs give the same links.

Letters: S, T lengths of the two sentences of a pair; N made tokens of the corpus.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, final

import numpy as np
import numpy.typing as npt

Ints: TypeAlias = npt.NDArray[np.integer[Any]]
Floats: TypeAlias = npt.NDArray[np.float64]

MOST_CELLS = 400_000_000
"""Above this the arrays take tens of gigabytes."""
MOST_TENSION = 20.0


class Ragged(Protocol):
    """Rows of token ids: row r is ids[bounds[r]:bounds[r + 1]]. A token file is one."""

    @property
    def ids(self) -> Ints: ...

    @property
    def bounds(self) -> Ints: ...


class Rows(NamedTuple):
    """The plainest `Ragged`; `Rows.of` makes one from lists."""

    ids: Ints
    bounds: Ints

    @staticmethod
    def of(rows: list[list[int]]) -> Rows:
        bounds = np.cumsum([0, *map(len, rows)])
        return Rows(np.array([each for row in rows for each in row], np.int64), bounds)


@dataclass(frozen=True, eq=False)
class Links:
    """Source token `source_index` of pair `pair` and its target token `target_index` belong
    together. Three arrays of one length, in the order of pair, target, source."""

    pair: Ints
    source_index: Ints
    target_index: Ints

    def __len__(self) -> int:
        return len(self.pair)

    def turned(self) -> Links:
        """The same links for pairs whose source and target changed places."""
        order = np.lexsort((self.target_index, self.source_index, self.pair))
        return Links(self.pair[order], self.target_index[order], self.source_index[order])

    def then(self, other: Links, n_pairs: int) -> Links:
        """These links of the first `n_pairs` pairs, and behind them those of other pairs."""
        if len(self) and n_pairs <= int(self.pair.max()):
            raise ValueError(
                f"n_pairs is {n_pairs}, but these links reach pair {int(self.pair.max())}; "
                "give the number of pairs that they were made from"
            )
        return Links(
            np.concatenate([self.pair, other.pair + n_pairs]),
            np.concatenate([self.source_index, other.source_index]),
            np.concatenate([self.target_index, other.target_index]),
        )


def align_pairs(
    sources: Ragged,
    targets: Ragged,
    *,
    iterations: int = 5,
    alpha: float = 0.01,
    null: float = 0.2,
    agreement: float = 0.4,
    progress: Callable[[int, int], None] | None = None,
) -> Links:
    """The links of all pairs (row r of sources with row r of targets).

    iterations: of expectation–maximisation, in each direction. alpha, null: see the module.
    agreement: between 0 and 1; more of it gives fewer and surer links, see `agree`. progress: is
    called with the iterations done and their number.
    """
    given, made = _check_rows("sources", sources), _check_rows("targets", targets)
    _check_pairs(given, made)
    if iterations < 1:
        raise ValueError(f"iterations is {iterations}, expected at least 1")
    if not (alpha >= 0.0 and 0.0 < null < 1.0 and 0.0 < agreement <= 1.0):
        raise ValueError(
            f"alpha={alpha}, null={null}, agreement={agreement}; expected alpha from 0 on, null "
            "and agreement between 0 and 1"
        )
    fits = [Fit(Cells(a, b), alpha=alpha, null=null) for a, b in [(given, made), (made, given)]]
    for turn, fit in enumerate(fits):
        for done in range(1, iterations + 1):
            fit.step()
            if progress is not None:
                progress(turn * iterations + done, 2 * iterations)
    return agree(fits[0], fits[1], given, made, agreement)


@final
class Cells:
    """Every link that could be, of `made` tokens to the `given` tokens that may have made them.

    The cells of one made token lie side by side: nothing first, then the given tokens in order.
    `key` numbers the distinct (given, made) ids, `place` the distinct positions.
    """

    def __init__(self, given: Rows, made: Rows) -> None:
        n_given, n_made = np.diff(given.bounds), np.diff(made.bounds)
        pair_n = np.repeat(np.arange(len(n_made)), n_made)
        self.width_n = n_given[pair_n] + 1
        self.start_n = np.cumsum(self.width_n) - self.width_n
        inside = np.arange(int(self.width_n.sum())) - np.repeat(self.start_n, self.width_n)
        first = np.repeat(given.bounds[:-1][pair_n], self.width_n)
        ids = np.append(given.ids, 0)  # the last one is never read for a word, but must exist
        word = np.where(inside > 0, ids[np.maximum(first + inside - 1, 0)] + 1, 0)
        base = int(made.ids.max(initial=0)) + 1
        key = word * base + np.repeat(made.ids, self.width_n)
        del first, word
        distinct, number = np.unique(key, return_inverse=True)
        self.key = number.astype(np.int32)
        self.given_of_key = distinct // base
        self.made_of_key = distinct % base
        self._lay_places(n_given, n_made, inside, pair_n)

    def _lay_places(self, n_given: Ints, n_made: Ints, inside: Ints, pair_n: Ints) -> None:
        """One block of cells for each pair of lengths that occurs, and which one each cell has."""
        base = int(n_made.max(initial=0)) + 1
        shapes, shape_of = np.unique(n_given * base + n_made, return_inverse=True)
        S, T = shapes // base, shapes % base
        size = (S + 1) * T
        block = np.cumsum(size) - size
        made_in_pair = np.arange(len(pair_n)) - np.repeat(np.cumsum(n_made) - n_made, n_made)
        row_place = block[shape_of[pair_n]] + made_in_pair * self.width_n
        self.place = (np.repeat(row_place, self.width_n) + inside).astype(np.int32)
        table_width = np.repeat(S + 1, T)
        self.row_width = table_width
        self.row_start = np.cumsum(table_width) - table_width
        at = np.arange(int(size.sum())) - np.repeat(self.row_start, table_width)
        j = np.arange(len(table_width)) - np.repeat(np.cumsum(T) - T, T)
        made_at = np.repeat((j + 0.5) / np.repeat(np.maximum(T, 1), T), table_width)
        given_at = (at - 0.5) / np.maximum(np.repeat(table_width - 1, table_width), 1)
        self.off_diagonal = np.abs(given_at - made_at)
        self.is_null = at == 0


@final
class Fit:
    """Expectation–maximisation over cells. `theta` is per key, `posterior` per cell.

    Each `step` makes posteriors from theta and tension, then theta and tension from those.
    `log_likelihood` is the corpus's, under the parameters that the last step began with.
    """

    def __init__(
        self, cells: Cells, *, alpha: float = 0.0, null: float = 0.08, tension: float = 0.0
    ) -> None:
        self.cells, self.alpha, self.null, self.tension = cells, alpha, null, tension
        n_words = max(len(np.unique(cells.made_of_key)), 1)
        self.theta: Floats = np.full(len(cells.given_of_key), 1.0 / n_words)
        self.posterior: Floats = np.zeros(len(cells.key))
        self.log_likelihood = -np.inf

    def step(self) -> None:
        """One iteration."""
        cells = self.cells
        if not len(cells.key):
            return
        made = self.theta[cells.key]
        made *= self.prior()[cells.place]
        total_n = np.add.reduceat(made, cells.start_n)
        made /= np.repeat(total_n, cells.width_n)
        self.log_likelihood = float(np.log(total_n).sum())
        self.posterior = made
        self.theta = self._best_theta()
        self.tension = self._best_tension()

    def prior(self) -> Floats:
        """The probability of each place, from positions alone."""
        cells = self.cells
        near = np.exp(-self.tension * cells.off_diagonal)
        near[cells.is_null] = 0.0
        total = np.add.reduceat(near, cells.row_start)
        share = np.divide(1.0 - self.null, total, out=np.zeros_like(total), where=total > 0)
        near *= np.repeat(share, cells.row_width)
        near[cells.is_null] = self.null
        return np.asarray(near, np.float64)

    def _best_theta(self) -> Floats:
        cells, size = self.cells, len(self.theta)
        count = np.bincount(cells.key, self.posterior, minlength=size).astype(np.float64)
        total = np.bincount(cells.given_of_key, count)[cells.given_of_key]
        if not self.alpha:
            # A word that nothing stands for any more keeps no words; its counts are 0 too.
            share: Floats = np.divide(count, total, out=np.zeros_like(count), where=total > 0)
            return share
        n_kinds = np.bincount(cells.given_of_key)[cells.given_of_key]
        smooth: Floats = np.exp(digamma(count + self.alpha) - digamma(total + self.alpha * n_kinds))
        return smooth

    def _best_tension(self) -> float:
        """The tension at which the prior is as far off the diagonal as the posteriors are.

        The prior's mean distance falls as the tension grows, so halving an interval finds it.
        """
        cells = self.cells
        mass = np.bincount(cells.place, self.posterior, minlength=len(cells.is_null))
        mass[cells.is_null] = 0.0
        wanted = float(mass @ cells.off_diagonal)
        row_mass = np.add.reduceat(mass, cells.row_start)

        def distance(tension: float) -> float:
            near = np.exp(-tension * cells.off_diagonal)
            near[cells.is_null] = 0.0
            total = np.add.reduceat(near, cells.row_start)
            mean = np.add.reduceat(near * cells.off_diagonal, cells.row_start)
            return float(row_mass @ np.divide(mean, total, out=mean, where=total > 0))

        low, high = 0.0, MOST_TENSION
        for _ in range(24):
            middle = (low + high) / 2
            low, high = (middle, high) if distance(middle) > wanted else (low, middle)
        return (low + high) / 2


def digamma(x: Floats) -> Floats:
    """The derivative of log Γ for x > 0: shifted up until the asymptotic series is exact enough."""
    shifted = np.zeros_like(x)
    x = x.copy()
    for _ in range(6):
        low = x < 6.0
        shifted[low] -= 1.0 / x[low]
        x[low] += 1.0
    square = 1.0 / (x * x)
    series = square * (1 / 12 - square * (1 / 120 - square * (1 / 252 - square / 240)))
    result: Floats = shifted + np.log(x) - 0.5 / x - series
    return result


def agree(forward: Fit, backward: Fit, sources: Rows, targets: Rows, agreement: float) -> Links:
    """The links that both directions believe in: √(p(s | t) · p(t | s)) is at least `agreement`.

    forward: target tokens made by source tokens; backward: the other way round.
    """
    cells, other = forward.cells, backward.cells
    # The other direction can at most be certain, so most cells need no second look.
    at = np.flatnonzero(forward.posterior >= agreement**2)
    token = np.searchsorted(cells.start_n, at, side="right") - 1
    s = at - cells.start_n[token] - 1
    at, token, s = at[s >= 0], token[s >= 0], s[s >= 0]  # nothing is no link
    pair_n, t_n = _count_up(targets.bounds)
    pair, t = pair_n[token], t_n[token]
    back = other.start_n[sources.bounds[:-1][pair] + s] + 1 + t
    both = np.sqrt(forward.posterior[at] * backward.posterior[back]) >= agreement
    return Links(pair[both], s[both], t[both])


def _count_up(bounds: Ints) -> tuple[Ints, Ints]:
    """For each token its row, and its index there."""
    length = np.diff(bounds)
    row = np.repeat(np.arange(len(length)), length)
    return row, np.arange(len(row)) - bounds[:-1][row]


def _check_rows(name: str, rows: Ragged) -> Rows:
    """Ids and bounds as int64 arrays that fit together, or what is wrong with them."""
    ids, bounds = np.asarray(rows.ids), np.asarray(rows.bounds)
    for what, array in (("ids", ids), ("bounds", bounds)):
        if array.ndim != 1 or not (np.issubdtype(array.dtype, np.integer) or not array.size):
            raise TypeError(
                f"{name}.{what} is {array.dtype} of shape {array.shape}; expected one axis of "
                "whole numbers"
            )
    ids, bounds = ids.astype(np.int64), bounds.astype(np.int64)
    if not len(bounds) or bounds[0] != 0 or bounds[-1] != len(ids) or (np.diff(bounds) < 0).any():
        raise ValueError(
            f"{name}.bounds must rise from 0 to the number of ids, {len(ids)}: row r is "
            "ids[bounds[r]:bounds[r + 1]]"
        )
    if len(ids) and not 0 <= int(ids.min()) <= int(ids.max()) < 2**31:
        raise ValueError(f"{name}.ids run from {ids.min()} to {ids.max()}; expected token ids")
    return Rows(ids, bounds)


def _check_pairs(sources: Rows, targets: Rows) -> None:
    S, T = np.diff(sources.bounds), np.diff(targets.bounds)
    if len(S) != len(T):
        raise ValueError(
            f"there are {len(S)} sources and {len(T)} targets; expected one target for each source"
        )
    n_cells = int(((S + 1) * (T + 1)).sum())
    if n_cells > MOST_CELLS:
        raise ValueError(
            f"{len(S)} pairs have {n_cells:,} possible links, and {MOST_CELLS:,} is the most that "
            "fits into memory; align in parts, or leave out the longest pairs"
        )
