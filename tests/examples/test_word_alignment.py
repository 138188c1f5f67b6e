"""Links are found where they are, and the statistics behind them are their formula."""

import itertools
import math
from typing import Any

import numpy as np
import pytest
from word_alignment import Cells, Fit, Links, Rows, align_pairs, digamma

Pairs = tuple[Rows, Rows, set[tuple[int, int, int]]]


def cipher(n_pairs: int, n_words: int, seed: int = 3, longest: int = 13) -> Pairs:
    """A language whose words are other words in a locally shuffled order, with words of its own.

    Targets have a word that translates nothing (a particle) now and then.
    """
    random = np.random.default_rng(seed)
    code = random.permutation(n_words)
    sources, targets, links = [], [], set()
    for pair in range(n_pairs):
        words = random.choice(n_words, int(random.integers(3, longest)), replace=False)
        order = np.argsort(np.arange(len(words)) + random.uniform(0, 2.5, len(words)))
        target: list[int] = []
        for at in order:
            links.add((pair, int(at), len(target)))
            target.append(int(code[words[at]]))
            if random.random() < 0.2:
                target.append(n_words)
        sources.append(words.tolist())
        targets.append(target)
    return Rows.of(sources), Rows.of(targets), links


def as_set(links: Links) -> set[tuple[int, int, int]]:
    rows = zip(links.pair, links.source_index, links.target_index, strict=True)
    return {(int(p), int(s), int(t)) for p, s, t in rows}


def theta_of(fit: Fit) -> dict[tuple[int, int], float]:
    """(given, made) -> theta; the given word -1 is nothing."""
    keys = zip(fit.cells.given_of_key - 1, fit.cells.made_of_key, fit.theta, strict=True)
    return {(int(given), int(made)): float(theta) for given, made, theta in keys}


def test_two_steps_of_the_textbook_case_worked_by_hand() -> None:
    das, haus, buch, ein = range(4)
    the, house, book, a = range(4)
    given = Rows.of([[das, haus], [das, buch], [ein, buch]])
    made = Rows.of([[the, house], [the, book], [a, book]])
    fit = Fit(Cells(given, made), alpha=0.0, null=0.0)
    fit.step()
    theta = theta_of(fit)
    assert [theta[das, x] for x in (the, house, book)] == pytest.approx([1 / 2, 1 / 4, 1 / 4])
    assert [theta[buch, x] for x in (the, book, a)] == pytest.approx([1 / 4, 1 / 2, 1 / 4])
    fit.step()
    theta = theta_of(fit)
    # das: 1/2 + 2/3 of "the", 1/3 of "house", 1/3 of "book".
    found = [theta[das, x] for x in (the, house, book)]
    assert found == pytest.approx([7 / 11, 2 / 11, 2 / 11], abs=1e-5)
    assert theta[haus, house] == pytest.approx((2 / 3) / (1 / 2 + 2 / 3), abs=1e-5)
    assert (das, a) not in theta


@pytest.mark.parametrize("alpha", [0.0, 0.3])
def test_a_step_is_the_formula_written_with_loops(alpha: float) -> None:
    sources, targets, _ = cipher(7, 11, longest=6)
    fit = Fit(Cells(sources, targets), alpha=alpha, null=0.13, tension=1.7)
    fit.step()
    before, tension = theta_of(fit), fit.tension
    fit.step()
    posteriors, logs, counts = [], 0.0, dict.fromkeys(before, 0.0)
    for r in range(7):
        given = sources.ids[sources.bounds[r] : sources.bounds[r + 1]].tolist()
        made = targets.ids[targets.bounds[r] : targets.bounds[r + 1]].tolist()
        for j, word in enumerate(made):
            off = [abs((i + 0.5) / len(given) - (j + 0.5) / len(made)) for i in range(len(given))]
            near = [math.exp(-tension * x) for x in off]
            p = [0.13 * before[-1, word]]
            p += [0.87 * x / sum(near) * before[w, word] for x, w in zip(near, given, strict=True)]
            logs += math.log(sum(p))
            posteriors += [x / sum(p) for x in p]
            for w, x in zip([-1, *given], p, strict=True):
                counts[w, word] += x / sum(p)
    np.testing.assert_allclose(fit.posterior, posteriors, rtol=1e-9)
    assert fit.log_likelihood == pytest.approx(logs)
    for (given_word, made_word), theta in theta_of(fit).items():
        row = [count for (w, _), count in counts.items() if w == given_word]
        mine = counts[given_word, made_word]
        expected = mine / sum(row)
        if alpha:
            total = np.array([sum(row) + alpha * len(row)])
            expected = float(np.exp(digamma(np.array([mine + alpha])) - digamma(total))[0])
        assert theta == pytest.approx(expected, rel=1e-9)


def test_the_tension_is_the_best_one() -> None:
    """Of the expected log prior, as a function of the tension alone."""
    fit = Fit(Cells(*cipher(31, 17)[:2]))
    for _ in range(3):
        fit.step()
    best, mass = fit.tension, np.bincount(fit.cells.place, fit.posterior)

    def gain(tension: float) -> float:
        fit.tension = tension
        return float((mass * np.log(fit.prior())).sum())

    assert 0.5 < best < 19
    assert gain(best) > max(gain(best - 0.05), gain(best + 0.05))


def test_digamma_at_known_places() -> None:
    euler = 0.5772156649015329
    known = {1.0: -euler, 0.5: -euler - 2 * math.log(2), 2.0: 1 - euler, 0.01: -100.56088545786866}
    np.testing.assert_allclose(digamma(np.array(list(known))), list(known.values()), rtol=1e-9)


def test_likelihood_rises_with_every_iteration() -> None:
    fit, found = Fit(Cells(*cipher(67, 31)[:2]), alpha=0.0), []
    for _ in range(9):
        fit.step()
        found.append(fit.log_likelihood)
    assert all(later > earlier for earlier, later in itertools.pairwise(found))


def test_a_cipher_is_broken() -> None:
    sources, targets, gold = cipher(701, 199)
    links = align_pairs(sources, targets)
    found = as_set(links)
    assert len(found) == len(links)
    assert len(found & gold) >= 0.95 * len(gold)
    assert len(found & gold) >= 0.95 * len(found)
    order = np.lexsort((links.source_index, links.target_index, links.pair))
    assert (order == np.arange(len(links))).all()


def test_of_two_equal_words_the_nearer_one_is_linked() -> None:
    sources, targets, _ = cipher(401, 97, longest=9)
    plain = [r.tolist() for r in np.split(sources.ids, sources.bounds[1:-1])]
    coded = [r.tolist() for r in np.split(targets.ids, targets.bounds[1:-1])]
    twice = Rows.of([a + a for a in plain]), Rows.of([b + b for b in coded])
    links = align_pairs(*twice)
    half_s = np.diff(sources.bounds)[links.pair]
    half_t = np.diff(targets.bounds)[links.pair]
    same = (links.source_index >= half_s) == (links.target_index >= half_t)
    assert len(links) > 0.9 * len(twice[0].ids)
    assert same.mean() > 0.95


def test_one_word_of_two_pieces_keeps_both_links() -> None:
    """Word 0 is in half of the sentences, and is written as 0 1 on the other side, anywhere."""
    random = np.random.default_rng(5)
    sources, targets = [], []
    for at in range(301):
        words = random.choice(np.arange(2, 31), 5, replace=False).tolist()
        place, moved = int(random.integers(5)), random.permutation(words).tolist()
        sources.append([0] * (at % 2) + words)
        targets.append(moved[:place] + [0, 1] * (at % 2) + moved[place:])
    links = align_pairs(Rows.of(sources), Rows.of(targets))
    zero = (links.source_index == 0) & (links.pair % 2 == 1)
    linked = [
        targets[p][t] for p, t in zip(links.pair[zero], links.target_index[zero], strict=True)
    ]
    assert linked.count(0) > 120 and linked.count(1) > 120
    assert len(linked) - linked.count(0) - linked.count(1) < 5


def test_the_same_pairs_give_the_same_links_and_progress_is_told() -> None:
    sources, targets, _ = cipher(101, 41)
    told: list[tuple[int, int]] = []
    one = align_pairs(
        sources, targets, iterations=3, progress=lambda done, of: told.append((done, of))
    )
    narrow = Rows(targets.ids.astype(np.uint16), targets.bounds)
    two = align_pairs(sources, narrow, iterations=3)
    assert told == [(done, 6) for done in range(1, 7)]
    for name in ("pair", "source_index", "target_index"):
        assert np.array_equal(getattr(one, name), getattr(two, name))


def test_empty_sentences_have_no_links() -> None:
    sources, targets, _ = cipher(101, 23)
    plain = [r.tolist() for r in np.split(sources.ids, sources.bounds[1:-1])]
    coded = [r.tolist() for r in np.split(targets.ids, targets.bounds[1:-1])]
    whole = as_set(align_pairs(sources, targets))
    holes = align_pairs(Rows.of([[], *plain, [1, 2], []]), Rows.of([[3], *coded, [], []]))
    assert {pair for pair, _, _ in as_set(holes)} <= set(range(1, 102))
    assert len(as_set(holes) ^ {(p + 1, s, t) for p, s, t in whole}) < 0.02 * len(whole)
    assert len(align_pairs(Rows.of([[]]), Rows.of([[]]))) == 0
    assert len(align_pairs(Rows.of([]), Rows.of([]))) == 0


def test_links_turn_round_and_follow_each_other() -> None:
    links = Links(np.array([0, 0, 1]), np.array([2, 0, 5]), np.array([0, 1, 3]))
    turned = links.turned()
    assert as_set(turned) == {(0, 0, 2), (0, 1, 0), (1, 3, 5)}
    assert turned.target_index.tolist() == [0, 2, 5]
    both = links.then(turned, 3)
    assert both.pair.tolist() == [0, 0, 1, 3, 3, 4]
    with pytest.raises(ValueError, match="n_pairs is 1"):
        links.then(turned, 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"targets": Rows.of([[1]])}, "2 sources and 1 targets"),
        ({"sources": Rows(np.array([1, 2]), np.array([0, 1]))}, "must rise from 0"),
        ({"sources": Rows(np.array([1, -2]), np.array([0, 1, 2]))}, "expected token ids"),
        ({"iterations": 0}, "iterations is 0"),
        ({"null": 0.0}, "null=0.0"),
        ({"agreement": 1.5}, "agreement=1.5"),
    ],
)
def test_what_cannot_be_aligned_is_refused(change: dict[str, Any], words: str) -> None:
    given: dict[str, Any] = {"sources": Rows.of([[1], [2]]), "targets": Rows.of([[1], [2]])}
    given |= change
    with pytest.raises(ValueError, match=words):
        align_pairs(given.pop("sources"), given.pop("targets"), **given)


def test_a_corpus_beyond_memory_is_refused_before_it_is_tried() -> None:
    long = Rows(np.zeros(30_000, np.int64), np.array([0, 30_000]))
    with pytest.raises(ValueError, match="align in parts"):
        align_pairs(long, long)
