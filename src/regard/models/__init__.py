"""Models: one Transformer, many configurations, and the files they come from.

`config.py` says what a model is, `transformer.py` is the model, `families/` are the architectures
of Hugging Face's, one file each; `hf_folder.py` reads and `save_folder.py` writes model folders,
`gguf.py` reads GGUF files, `weights.py` puts their tensors into a model and takes them out again;
`int8.py` stores them in 8 bits, and `embedded.py` knows the models inside the package.
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
