"""Why scores are divided: the derivation against the measurement."""

import torch

from regard.labs.scaling import find, measure_seed

CPU = torch.device("cpu")


def test_scores_spread_by_the_root_of_the_width() -> None:
    plain = measure_seed(256, 1.0, 2048, 0, CPU)
    scaled = measure_seed(256, 256**-0.5, 2048, 0, CPU)
    assert 0.95 < plain["spread"] / 16 < 1.05  # the deviation of 64 keys' mean norm is 1.1%
    assert abs(plain["spread"] / scaled["spread"] / 16 - 1) < 1e-5


def test_the_gradients_norm_is_that_of_the_jacobian() -> None:
    found = measure_seed(4, 0.5, 3, 7, CPU)
    from regard.labs.small_training import generator_of

    drawn = generator_of(7, 4)
    q, k = torch.randn(3, 4, generator=drawn), torch.randn(64, 4, generator=drawn)
    norms = [
        torch.func.jacrev(lambda s: s.softmax(-1))(row).norm() for row in (q @ k.mT * 0.5).double()
    ]
    assert abs(found["gradient"] - float(torch.stack(norms).mean())) < 1e-6


def test_the_sentences_turn_with_the_numbers() -> None:
    def row(d: int, plain: float, scaled: float) -> dict[str, object]:
        names = ("spread", "largest", "gradient")
        found = [("plain", plain), ("scaled", scaled)]
        return {"d": d} | {
            f"{name} {what}": {"mean": x, "low": x - 0.1, "high": x + 0.1}
            for name, x in found
            for what in names
        }

    said = find({"keys": 64, "widths": [row(4, 1, 2), row(16, 1, 2)]})
    assert "at d = 16" in said[0] and "where √d is 4;" in said[1]
    assert len(said) == 3
    said = find({"keys": 64, "widths": [row(4, 3, 2), row(16, 4, 2), row(64, 2.15, 2)]})
    assert "Against the prediction" in said[3]
    assert "at d = 4, 16, most at d = 16 (4 " in said[3], "64 is not clearly above"
    wide = row(64, 9, 2) | {"plain gradient": {"mean": 9, "low": -9, "high": 27}}
    said = find({"keys": 64, "widths": [row(4, 3, 2), row(16, 4, 2), wide]})
    assert "at d = 4, 16, most at d = 16 (4 " in said[3], "the largest of those that are clear"
    assert "2.1) with the division, 2 to 2 at all d." in said[2]
    said = find({"keys": 64, "widths": [row(4, 1, 2), row(16, 1, 5), row(64, 1, 3)]})
    assert "with the division, 2 to 5 at all d." in said[2]
