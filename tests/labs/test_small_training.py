"""What small trainings start from."""

import torch
from torch import nn

from regard.labs.small_training import build_seeded


def test_first_weights_are_a_function_of_the_numbers_alone() -> None:
    torch.manual_seed(3)
    first = build_seeded(lambda: nn.Linear(3, 5), 7, 11)
    torch.manual_seed(4)
    again = build_seeded(lambda: nn.Linear(3, 5), 7, 11)
    other = build_seeded(lambda: nn.Linear(3, 5), 7, 13)
    assert torch.equal(first.weight, again.weight)
    assert not torch.equal(first.weight, other.weight)


def test_building_leaves_the_random_numbers_of_others_as_they_were() -> None:
    torch.manual_seed(3)
    drawn = torch.rand(5)
    torch.manual_seed(3)
    build_seeded(lambda: nn.Linear(3, 5), 7)
    assert torch.equal(torch.rand(5), drawn)
