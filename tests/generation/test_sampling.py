"""Each way to reshape scores: by hand, and against `transformers`' logits processors."""

import pytest
import torch
from torch import Tensor

from regard.generation import GenerationConfig
from regard.generation.sampling import (
    LogitsProcessor,
    draw,
    force_token,
    keep_min_p,
    keep_top_k,
    keep_top_p,
    make_chances,
    make_seeds,
    narrow,
    penalise_seen,
)
from regard.models import SpecialTokens

INF = float("inf")
LOGS = torch.tensor([[0.5, 0.25, 0.125, 0.125]]).log()


def random_scores() -> Tensor:
    return 3 * torch.randn(29, 101)


def kept(scores: Tensor) -> list[int]:
    return scores[0].isfinite().nonzero()[:, 0].tolist()


def test_penalty_divides_positive_scores_and_multiplies_negative_ones() -> None:
    seen = torch.tensor([[True, True, False, False]])
    got = penalise_seen(torch.tensor([[3.0, -3.0, 3.0, -3.0]]), seen, 1.5)
    assert got.tolist() == [[2.0, -4.5, 3.0, -3.0]]


def test_top_k_keeps_k_and_those_equal_to_the_last() -> None:
    assert kept(keep_top_k(LOGS, 2)) == [0, 1]
    assert kept(keep_top_k(LOGS, 3)) == [0, 1, 2, 3]
    assert kept(keep_top_k(LOGS, 99)) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("p", "expected"), [(0.4, [0]), (0.6, [0, 1]), (0.74, [0, 1]), (0.76, 3), (0.99, 4)]
)
def test_top_p_keeps_the_token_that_reaches_p(p: float, expected: list[int] | int) -> None:
    got = kept(keep_top_p(LOGS, p))
    assert (len(got) if isinstance(expected, int) else got) == expected


def test_top_p_keeps_one_token_however_small_p_is() -> None:
    assert kept(keep_top_p(LOGS, 1e-9)) == [0]


def test_min_p_is_a_share_of_the_largest() -> None:
    assert kept(keep_min_p(LOGS, 0.51)) == [0]
    assert kept(keep_min_p(LOGS, 0.49)) == [0, 1]
    assert kept(keep_min_p(LOGS, 0.24)) == [0, 1, 2, 3]


def test_a_forced_token_is_the_only_one_in_its_rows() -> None:
    got = force_token(torch.ones(2, 3), torch.tensor([True, False]), 1)
    assert got.tolist() == [[-INF, 0, -INF], [1, 1, 1]]


def test_each_reshaping_is_that_of_transformers() -> None:
    from transformers.generation import logits_process as theirs

    scores = random_scores()
    ids = torch.randint(101, (29, 17))
    seen = torch.zeros(29, 101, dtype=torch.bool).scatter(1, ids, True)
    for penalty in (0.7, 1.3):
        judge = theirs.RepetitionPenaltyLogitsProcessor(penalty)(ids, scores.clone())
        assert torch.equal(penalise_seen(scores, seen, penalty), judge)
    for k in (1, 7, 500):
        judge = theirs.TopKLogitsWarper(k)(ids, scores)
        assert torch.equal(keep_top_k(scores, k), judge)
    for p in (0.05, 0.5, 0.9, 0.999):
        judge = theirs.TopPLogitsWarper(p)(ids, scores)
        assert torch.equal(keep_top_p(scores, p), judge)
        judge = theirs.MinPLogitsWarper(p)(ids, scores)
        assert torch.equal(keep_min_p(scores, p), judge)


def test_all_together_give_the_probabilities_of_transformers() -> None:
    from transformers.generation import logits_process as theirs

    scores = random_scores()
    config = GenerationConfig(temperature=0.7, top_k=23, top_p=0.8, min_p=0.05)
    judge = scores
    for step in (
        theirs.TemperatureLogitsWarper(0.7),
        theirs.TopKLogitsWarper(23),
        theirs.TopPLogitsWarper(0.8),
        theirs.MinPLogitsWarper(0.05),
    ):
        judge = step(torch.zeros(29, 1, dtype=torch.int64), judge)
    got = narrow(scores, config)
    assert torch.equal(got.isfinite(), judge.isfinite())
    assert 1 < got.isfinite().sum(-1).float().mean() < 20
    torch.testing.assert_close(got.softmax(-1), judge.softmax(-1))


def test_the_order_is_penalty_bans_forced_tokens() -> None:
    tokens = SpecialTokens(forced_bos=4, forced_eos=3, suppressed=(0, 4))
    config = GenerationConfig(min_new_tokens=2, repetition_penalty=2.0)
    processor = LogitsProcessor(config, tokens, (3,), 5, torch.device("cpu"))
    scores, lone = torch.full((2, 5), 2.0), torch.tensor([True, False])
    seen = torch.tensor([[False, True, False, False, False]] * 2)
    limits = torch.tensor([7, 6])

    def at(step: int) -> list[list[float]]:
        return processor.process(scores, seen, step, lone, limits).tolist()

    plain = [-INF, 1.0, 2.0, 2.0, -INF]
    assert at(0) == [[-INF, -INF, -INF, -INF, 0.0], [-INF, 1.0, 2.0, -INF, -INF]]
    assert at(1) == [[-INF, 1.0, 2.0, -INF, -INF]] * 2
    assert at(2) == [plain, plain]
    assert at(5) == [plain, [-INF, -INF, -INF, 0.0, -INF]]
    assert at(6) == [[-INF, -INF, -INF, 0.0, -INF], plain]


def test_a_draw_is_where_the_sum_of_probabilities_passes_the_chance() -> None:
    scores = torch.tensor([0.0, 0.25, 0.0, 0.25, 0.5, 0.0]).log().expand(7, -1)
    chance = torch.tensor([0.0, 0.2, 0.25, 0.49, 0.5, 0.9, 1 - 2**-50], dtype=torch.float64)
    assert draw(scores, chance).tolist() == [1, 1, 3, 3, 4, 4, 4]


def test_draws_are_as_frequent_as_they_are_likely() -> None:
    n = 20011
    chance = make_chances([5], n)[0]
    counts = draw(LOGS.expand(n, -1), chance).bincount(minlength=4) / n
    # Four standard deviations of a share of one half.
    torch.testing.assert_close(counts, LOGS.exp()[0], atol=4 * 0.5 / n**0.5, rtol=0)


def test_the_smallest_temperature_is_greedy_and_makes_no_nan() -> None:
    scores = 1e4 * random_scores()
    got = narrow(scores, GenerationConfig(temperature=1e-300, top_p=0.9, min_p=0.1))
    assert not got.isnan().any()
    assert torch.equal(draw(got, make_chances(range(29), 1)[:, 0]), scores.argmax(-1))


def test_the_highest_temperature_stays_a_draw() -> None:
    got = narrow(random_scores(), GenerationConfig(temperature=1e30))
    assert torch.equal(got.softmax(-1), torch.full((29, 101), 1 / 101))


def test_a_rows_chances_hang_on_its_seed_alone_and_do_not_change_with_the_number_of_steps() -> None:
    both, lone = make_chances([7, 8], 67), make_chances([8], 67)
    assert torch.equal(both[1], lone[0])
    assert not torch.equal(both[0], both[1])
    for n in (1, 3, 15, 16, 17, 64):
        assert torch.equal(make_chances([8], n)[0], lone[0, :n])


def test_seeds_count_up_from_one_or_are_given_or_come_from_torch() -> None:
    assert make_seeds(GenerationConfig(seed=11), 3) == [11, 12, 13]
    assert make_seeds(GenerationConfig(seed=[5, 5, 9]), 3) == [5, 5, 9]
    with pytest.raises(ValueError, match="2 seeds for 3 rows"):
        make_seeds(GenerationConfig(seed=[5, 5]), 3)
    torch.manual_seed(3)
    first = make_seeds(GenerationConfig(), 2)
    assert make_seeds(GenerationConfig(), 2) != first
    torch.manual_seed(3)
    assert make_seeds(GenerationConfig(), 2) == first
