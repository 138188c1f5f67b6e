"""Generation: text from a model, greedy, sampled or searched with beams; whole or as it comes.

`generate.py` and `streaming.py` are the doors, `config.py` says how a text is written;
`decode_loop.py` and `beams.py` are the two loops around `engine.py`, which runs prefill and decode
steps; `sampling.py` turns logits into tokens, `prompts.py` makes rows of prompts, `stopping.py`
knows where a text ends. `score.py` tells how likely texts are. `eviction.py` lets a KV cache keep
some of its keys. `translation.py` translates texts sentence by sentence, as `sentences.py` finds
them.
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
