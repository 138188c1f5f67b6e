"""Generation: text from a model, by greedy, sampled or beam search; returned whole or streamed.

`generate.py` and `streaming.py` have the public functions, `config.py` the settings;
`decode_loop.py` and `beams.py` are the two loops around `engine.py`, which runs prefill and decode
steps; `sampling.py` turns logits into tokens, `prompts.py` pads prompts to a batch, `stopping.py`
finds where a text ends. `score.py` computes how likely texts are. `eviction.py` removes keys from a
KV cache. `translation.py` translates texts sentence by sentence, as split by `sentences.py`.
"""

from regard.generation.config import GenerationConfig
from regard.generation.engine import Decoding
from regard.generation.eviction import evict
from regard.generation.generate import Generated, generate, generate_batch, generate_ids
from regard.generation.score import Score, score
from regard.generation.streaming import Stream, stream, stream_ids
from regard.generation.translation import translate

__all__ = [
    "Decoding",
    "Generated",
    "GenerationConfig",
    "Score",
    "Stream",
    "evict",
    "generate",
    "generate_batch",
    "generate_ids",
    "score",
    "stream",
    "stream_ids",
    "translate",
]
