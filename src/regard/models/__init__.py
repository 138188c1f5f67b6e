"""Models: one Transformer, many configurations, and the files they come from.

`config.py` describes a model, `transformer.py` is the model, `families/` has Hugging Face's
architectures, one file each; `hf_folder.py` reads and `save_folder.py` writes model folders,
`gguf.py` reads GGUF files, `weights.py` loads tensors into a model and saves them; `int8.py` stores
them in 8 bits, and `embedded.py` finds the models inside the package.
"""

from regard.models.config import (
    EmbedConfig,
    HeadConfig,
    ModelConfig,
    SpecialTokens,
    count_parameters,
)
from regard.models.families import FAMILIES, config_of, named_config
from regard.models.hf_folder import BadCheckpoint
from regard.models.transformer import Memory, Output, Transformer
from regard.models.weights import load, save, save_int8

__all__ = [
    "FAMILIES",
    "BadCheckpoint",
    "EmbedConfig",
    "HeadConfig",
    "Memory",
    "ModelConfig",
    "Output",
    "SpecialTokens",
    "Transformer",
    "config_of",
    "count_parameters",
    "load",
    "named_config",
    "save",
    "save_int8",
]
