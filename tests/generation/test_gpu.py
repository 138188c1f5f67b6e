"""On a GPU: the same texts as on the CPU, and no waiting for the device at each step."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from scripted import make_model

from regard.generation import Decoding, generate_ids, stream_ids
from regard.generation.decode_loop import DecodeLoop
from regard.models import Transformer, config_of

pytestmark = pytest.mark.gpu

WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"repetition_penalty": 1.3},
    "sampled": {"temperature": 1.5, "top_k": 31, "top_p": 0.9, "min_p": 0.01, "seed": 5},
    "beams": {"num_beams": 3},
}
PROMPTS = [[3, 5, 7], [11, 2, 13, 17, 19], [4]]


@pytest.mark.parametrize("way", WAYS)
def test_texts_are_those_of_the_cpu(way: str) -> None:
    # In float64 no rounding decides between two tokens.
    model = make_model(53, eos_token_id=2).double()
    options: dict[str, Any] = {"max_new_tokens": 37, **WAYS[way]}
    expected = generate_ids(model, PROMPTS, **options)
    made = generate_ids(model.cuda(), PROMPTS, **options)
    assert made.ids.is_cuda
    assert made.rows() == expected.rows()
    assert made.reasons == expected.reasons
    if way != "beams":
        assert list(stream_ids(model, PROMPTS[0], **options)) == expected.rows()[0]


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.parametrize("way", ["greedy", "sampled"])
def test_a_step_does_not_wait_for_the_device(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """From one look to the next, nothing is read back: torch would raise."""
    scores = torch.randn(3, 53, device="cuda")

    def waiting(method: Callable[[DecodeLoop], Any]) -> Callable[[DecodeLoop], Any]:
        def wrapped(self: DecodeLoop) -> Any:
            torch.cuda.set_sync_debug_mode("default")
            answer = method(self)
            torch.cuda.set_sync_debug_mode("error")
            return answer

        return wrapped

    def read(self: Decoding, *args: Any) -> torch.Tensor:
        torch.cuda.set_sync_debug_mode("error")
        return scores

    monkeypatch.setattr(DecodeLoop, "_look", waiting(DecodeLoop._look))
    monkeypatch.setattr(DecodeLoop, "result", waiting(DecodeLoop.result))
    monkeypatch.setattr(Decoding, "read", read)
    monkeypatch.setattr(Decoding, "step", lambda self, ids_b: scores)
    try:
        made = generate_ids(make_model(53).cuda(), PROMPTS, max_new_tokens=40, **WAYS[way])
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert made.lengths == (40, 40, 40)


@pytest.mark.parametrize("family", ["gpt2", "llama", "mistral"])
def test_compiled_texts_are_those_of_the_cpu(family: str) -> None:
    """Padded rows, a single row, a second batch on the same graph; windows shorter than the text.

    Scores are spread far apart, so that float32's rounding decides nothing.
    """
    model = make_spread(family)
    for prompts in (PROMPTS, [[5, 9, 4, 8]], [[7, 7], [3, 1, 2], [9]]):
        expected = generate_ids(model.cpu(), prompts, max_new_tokens=37)
        made = generate_ids(model.cuda(), prompts, max_new_tokens=37, compiled=True)
        assert made.rows() == expected.rows()
        drawn = {"max_new_tokens": 21, "temperature": 1.0, "seed": 3}
        expected = generate_ids(model, prompts, **drawn)
        assert generate_ids(model, prompts, compiled=True, **drawn).rows() == expected.rows()


def make_spread(family: str) -> Any:
    """A tiny model of a family whose scores differ by far more than rounding does."""
    plain = {"vocab_size": 53, "hidden_size": 48, "num_hidden_layers": 2, "intermediate_size": 64}
    plain |= {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 128}
    words: dict[str, dict[str, Any]] = {
        "gpt2": {"vocab_size": 53, "n_embd": 48, "n_layer": 2, "n_head": 3, "n_positions": 128},
        "llama": plain,
        "mistral": {**plain, "sliding_window": 9},
    }
    torch.manual_seed(0)
    model = Transformer(config_of({"model_type": family, **words[family]})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.7)
    return model
