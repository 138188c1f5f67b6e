"""A GGUF file with the interface of a Hugging Face folder: the same config, names and numbers.

Why: small quantised models are distributed as one GGUF file with weights and tokenizer. The loader
should not need to know that.

How: `GGUFFile.open` checks the header (`gguf_header.py`) and makes the `config.json` that the model
would have. `read` unpacks one tensor from the mapped file with `gguf`'s own code, always to
float32, and undoes what the conversion to GGUF did to it:

- LLaMA's rows of queries and keys were reordered for the other rotary pairing;
- Gemma's norms, which are differences from 1, had 1 added.

The format omits what llama.cpp has in its source: Gemma's activation, which layers have windows,
and the scale of queries, which llama.cpp derives from the number of layers. The same rules are
here. An unknown setting under the architecture's name is refused, since it may change the model's
output. LLaMA 3's rotary scaling is in the file as a tensor of divisors.

Left out: architectures other than LLaMA's and Gemma's, mixtures of experts, pictures, adapters,
writing GGUF files.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from regard._files import spell, spell_path, spell_some
from regard.models.gguf_header import Header, Metadata, Packed, import_gguf, read_gguf_header
from regard.models.gguf_tokens import find_tokens, make_tokenizer
from regard.models.header import BadCheckpoint, check_unchanged
from regard.models.hf_folder import Stored
from regard.positions import Llama3
from regard.tokens import Tokenizer

LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
SANDWICH = {
    **LAYER,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
WHOLE = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
DIVISORS = "rope_freqs.weight"
"""LLaMA 3's tensor of divisors of the rotary frequencies."""

SIZES = ("block_count", "context_length", "embedding_length", "feed_forward_length", "vocab_size")
HEADS = ("head_count", "head_count_kv", "key_length", "value_length", "layer_norm_rms_epsilon")
YARN = ("yarn_beta_fast", "yarn_beta_slow")
SCALING = ("type", "factor", "original_context_length", "finetuned", *YARN)
SETTINGS = {*SIZES, "tensor_data_layout", "rope.dimension_count", "rope.freq_base"}
SETTINGS |= {f"attention.{name}" for name in HEADS} | {f"rope.scaling.{name}" for name in SCALING}
"""Settings that are known for every architecture."""
WINDOW = "attention.sliding_window"
CAP, FINAL_CAP = "attn_logit_softcapping", "final_logit_softcapping"


@dataclass(frozen=True, kw_only=True)
class Architecture:
    """How an architecture differs from others in the format; `more`: its additional settings."""

    model_type: str
    layer: Mapping[str, str]
    more: tuple[str, ...] = ()
    is_gemma: bool = True


EXPERTS = ("expert_count", "expert_used_count")
LLAMA = Architecture(model_type="llama", layer=LAYER, more=(WINDOW, *EXPERTS), is_gemma=False)
GEMMA3 = (WINDOW, f"{WINDOW}_pattern", FINAL_CAP, "rope.freq_base_swa", "mm.tokens_per_image")
GELU = {"hidden_activation": "gelu_pytorch_tanh"}
ARCHITECTURES = {
    "llama": LLAMA,
    "mistral": LLAMA,
    "gemma": Architecture(model_type="gemma", layer=LAYER),
    "gemma2": Architecture(model_type="gemma2", layer=SANDWICH, more=(WINDOW, FINAL_CAP, CAP)),
    "gemma3": Architecture(model_type="gemma3_text", layer={**SANDWICH, **QK_NORMS}, more=GEMMA3),
}


@final
class GGUFFile:
    """An opened GGUF file; made by `GGUFFile.open`. `stored` has Hugging Face's names.

    The shapes in `stored` are Hugging Face's too, and every type there is float32, however the
    file packs it, since `read` returns float32.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path = path
        self._header = header
        self._architecture = find_architecture(header.metadata)
        self._sources = rename(header, self._architecture)
        self.config = make_config(header, self._architecture, self._unpack)
        self.stored = {
            name: Stored(header.tensors[source].shape, torch.float32, path)
            for name, source in self._sources.items()
        }

    @staticmethod
    def open(path: str | os.PathLike[str]) -> GGUFFile:
        """Open a file and check everything but the values; `BadCheckpoint` says what is wrong."""
        import_gguf()
        path = Path(os.fsdecode(path))
        return GGUFFile(path, read_gguf_header(path))

    def read(self, name: str) -> Tensor:
        """The tensor of this Hugging Face name, unpacked to float32, in Hugging Face's order."""
        if name not in self._sources:
            what = f"{spell_path(self.path)} has no tensor {spell(name)}"
            raise BadCheckpoint(f"{what}; it has {len(self.stored)}: {spell_some(self.stored)}")
        source = self._sources[name]
        tensor = self._unpack(source)
        if self._architecture.is_gemma and source.endswith("norm.weight"):
            return tensor - 1
        heads = {"attn_q": "num_attention_heads", "attn_k": "num_key_value_heads"}
        part = source.split(".")[-2]
        if part in heads and not self._architecture.is_gemma:
            return halve(tensor, self.config[heads[part]])
        return tensor

    @cached_property
    def tokenizer(self) -> Tokenizer | None:
        return make_tokenizer(self._header.metadata, self.config["vocab_size"])

    def _unpack(self, source: str) -> Tensor:
        check_unchanged(self.path, self._header.stamp)
        return unpack(self._header.data, self._header.tensors[source])


def unpack(data: Any, packed: Packed) -> Tensor:
    gguf = import_gguf()
    rows = (*packed.shape[:-1], -1)
    raw = np.frombuffer(data, np.uint8, packed.n_bytes, packed.start).reshape(rows)
    with np.errstate(all="ignore"):  # damaged scales overflow; the loader checks for inf and NaN
        numbers = gguf.quants.dequantize(raw, gguf.GGMLQuantizationType(packed.kind))
    # Float32 is returned as a read-only view of the file, which torch could not write to: copied.
    owned = np.array(numbers, dtype=np.float32, copy=None if numbers.flags.writeable else True)
    return torch.from_numpy(owned).reshape(packed.shape)


def halve(tensor: Tensor, n_heads: int) -> Tensor:
    """Reorder the rows of each head from neighbouring rotary pairs (0, 1), ... to (0, d/2), ..."""
    if tensor.shape[0] % (2 * n_heads):
        what = f"{tensor.shape[0]} rows of queries or keys make no {n_heads} heads of even width"
        raise BadCheckpoint(f"{what}: the file's settings and tensors are of different models")
    rest = tensor.shape[1:]
    return tensor.reshape(n_heads, -1, 2, *rest).transpose(1, 2).reshape(tensor.shape)


def find_architecture(metadata: Metadata) -> Architecture:
    name = metadata.word("general.architecture")
    if name not in ARCHITECTURES:
        raise BadCheckpoint(
            f"{metadata.where} is of the architecture {spell(name)}; regard reads GGUF files of "
            f"{', '.join(ARCHITECTURES)}. Load the model from its Hugging Face folder instead"
        )
    architecture = ARCHITECTURES[name]
    known = {f"{name}.{key}" for key in (*SETTINGS, *architecture.more)}
    own = [key for key in metadata.source if key.startswith(f"{name}.")]
    if unknown := [key for key in own if key not in known]:
        raise BadCheckpoint(
            f"{metadata.where} has settings that are not known here and may change the model's "
            f"answers: {spell_some(unknown)}. Load the model from its Hugging Face folder instead"
        )
    return architecture


def rename(header: Header, architecture: Architecture) -> dict[str, str]:
    """Hugging Face's name of each tensor -> its name in the file; unknown names are kept."""
    found: dict[str, str] = {}
    for source in header.tensors:
        name = WHOLE.get(source, source)
        layer = re.fullmatch(r"blk\.(0|[1-9][0-9]{0,5})\.(\w+)\.(weight|bias)", source, re.ASCII)
        if layer is not None and layer[2] in architecture.layer:
            name = f"model.layers.{layer[1]}.{architecture.layer[layer[2]]}.{layer[3]}"
        if source == DIVISORS and not architecture.is_gemma:
            continue  # a setting, not a weight
        if name in found:
            raise BadCheckpoint(
                f"{header.metadata.where} has both {spell(found[name])} and {spell(source)}, which "
                "are the same tensor; it is damaged: download it again"
            )
        found[name] = source
    return found


def make_config(header: Header, architecture: Architecture, unpack: Any) -> dict[str, Any]:
    metadata = header.metadata
    arch = metadata.word("general.architecture")
    n_layers = metadata.count(f"{arch}.block_count")
    dim = metadata.count(f"{arch}.embedding_length")
    n_heads = read_alike(metadata, f"{arch}.attention.head_count", n_layers)
    n_kv_heads = read_alike(metadata, f"{arch}.attention.head_count_kv", n_layers, n_heads)
    head_dim = metadata.count(f"{arch}.attention.key_length", max(dim // n_heads, 1))
    base = 1e6 if arch == "gemma3" else 10000.0
    config: dict[str, Any] = {
        "model_type": architecture.model_type,
        "hidden_size": dim,
        "num_hidden_layers": n_layers,
        "num_attention_heads": n_heads,
        "num_key_value_heads": n_kv_heads,
        "head_dim": head_dim,
        "intermediate_size": read_alike(metadata, f"{arch}.feed_forward_length", n_layers),
        "max_position_embeddings": metadata.count(f"{arch}.context_length"),
        "rms_norm_eps": metadata.number(f"{arch}.attention.layer_norm_rms_epsilon", above=0),
        "rope_theta": metadata.number(f"{arch}.rope.freq_base", base, above=0),
        "tie_word_embeddings": "output.weight" not in header.tensors,
        **(GELU if architecture.is_gemma else {"hidden_act": "silu"}),
    }
    check_sizes(header, arch, config)
    for key in (f"{arch}.attention.value_length", f"{arch}.rope.dimension_count"):
        if (width := metadata.count(key, head_dim)) != head_dim:
            raise metadata.wrong(key, width, f"{head_dim}, as heads are wide; others are unknown")
    config["vocab_size"] = header.tensors["token_embd.weight"].shape[0]
    config.update(find_tokens(metadata, config["vocab_size"]))
    config["rope_scaling"] = find_scaling(header, arch, config, unpack)
    if architecture is LLAMA:
        config.update(finish_llama(header, arch))
    if arch in ("gemma2", "gemma3"):
        config.update(finish_gemma(metadata, arch, config))
    name = config["model_type"].removesuffix("_text").capitalize()
    config["architectures"] = [f"{name}ForCausalLM"]
    return config


def read_alike(metadata: Metadata, key: str, n_layers: int, default: int | None = None) -> int:
    """A whole number that GGUF may give per layer; refused unless all layers have the same."""
    value = metadata.source.get(key)
    if not isinstance(value, np.ndarray):
        return metadata.count(key, default)
    numbers = {int(number) for number in metadata.numbers(key, n_layers)}
    if len(numbers) != 1 or not 1 <= min(numbers) < 2**31:
        raise metadata.wrong(key, value, "the same in every layer; other models are not supported")
    return numbers.pop()


def check_sizes(header: Header, arch: str, config: Mapping[str, Any]) -> None:
    """Refuse sizes that contradict the tensors, before anything of these sizes is allocated."""
    where = header.metadata.where
    if "token_embd.weight" not in header.tensors:
        raise BadCheckpoint(f"{where} has no tensor 'token_embd.weight', the embedding of tokens")
    shape = header.tensors["token_embd.weight"].shape
    if len(shape) != 2 or shape[1] != config["hidden_size"]:
        raise BadCheckpoint(
            f"{where}: tensor 'token_embd.weight' has the shape {list(shape)}; expected one row "
            f"of {arch}.embedding_length, {config['hidden_size']}, for each token"
        )
    vocab_size = header.metadata.count(f"{arch}.vocab_size", shape[0])
    if vocab_size != shape[0]:
        rows = f"{shape[0]}, as the embedding has rows"
        raise header.metadata.wrong(f"{arch}.vocab_size", vocab_size, rows)
    widest = max(size for packed in header.tensors.values() for size in packed.shape)
    heads, width = config["num_attention_heads"], config["head_dim"]
    for what, size in {
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count times the heads' width": heads * width,
        "attention.head_count_kv times the heads' width": config["num_key_value_heads"] * width,
    }.items():
        if size > widest:
            what = f"{where}: {arch}.{what} is {size}, but no tensor is wider than {widest}"
            raise BadCheckpoint(f"{what}; the file's settings and tensors are of different models")


def find_scaling(
    header: Header, arch: str, config: Mapping[str, Any], unpack: Any
) -> dict[str, Any] | None:
    """Hugging Face's `rope_scaling`, from the settings or from LLaMA 3's tensor of divisors."""
    metadata, key = header.metadata, f"{arch}.rope.scaling"
    kind = metadata.word(f"{key}.type", "none")
    if DIVISORS in header.tensors and not ARCHITECTURES[arch].is_gemma:
        if kind != "none":
            raise metadata.wrong(f"{key}.type", kind, f"none beside the tensor {DIVISORS!r}")
        return name_divisors(unpack(DIVISORS), config, metadata.where)
    if kind == "none":
        return None
    metadata.choice(f"{key}.type", ("none", "linear", "yarn"), "none")
    factor = metadata.number(f"{key}.factor", above=0)
    scaling: dict[str, Any] = {"rope_type": kind, "factor": factor}
    if kind == "yarn":
        longest = config["max_position_embeddings"]
        original = metadata.count(f"{key}.original_context_length", longest)
        scaling["original_max_position_embeddings"] = original
        for theirs in ("beta_fast", "beta_slow"):
            if metadata.has(f"{key}.yarn_{theirs}"):
                scaling[theirs] = metadata.number(f"{key}.yarn_{theirs}", above=0)
    return scaling


def name_divisors(divisors: Tensor, config: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """The `rope_scaling` that divides the frequencies by these numbers.

    All of LLaMA 3's models differ in `factor` only. If type "llama3" gives other numbers,
    "longrope" is used, which allows any; not by default, as it rotates cached keys at every step.
    """
    n_pairs = config["head_dim"] // 2
    in_range = bool(((divisors > 0) & (divisors < 1e9)).all())
    if tuple(divisors.shape) != (n_pairs,) or not in_range:
        raise BadCheckpoint(
            f"{where}: tensor {DIVISORS!r} must hold {n_pairs} numbers above 0, one for each "
            f"rotary pair; it has the shape {list(divisors.shape)} or numbers out of range"
        )
    factor = round(float(divisors.max()), 4)
    if factor == 1 and bool((divisors == 1).all()):
        return None
    rule = {"factor": factor, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    exponents = torch.arange(n_pairs, dtype=torch.float64) / n_pairs
    frequencies = config["rope_theta"] ** -exponents
    scaled = Llama3(**rule, original_max_len=8192).scale(frequencies, config["rope_theta"], None)
    if torch.allclose(frequencies / scaled, divisors.double(), rtol=1e-4, atol=0):
        return {"rope_type": "llama3", **rule, "original_max_position_embeddings": 8192}
    return {
        "rope_type": "longrope",
        **dict.fromkeys(("short_factor", "long_factor"), divisors.tolist()),
        **dict.fromkeys(("factor", "attention_factor"), 1.0),
        "original_max_position_embeddings": config["max_position_embeddings"],
    }


def finish_llama(header: Header, arch: str) -> dict[str, Any]:
    metadata = header.metadata
    if n_experts := metadata.count(f"{arch}.expert_count", 0, least=0):
        what = f"{metadata.where} is a mixture of {n_experts} experts"
        raise BadCheckpoint(f"{what}, which is not supported")
    found: dict[str, Any] = {
        "attention_bias": "blk.0.attn_q.bias" in header.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in header.tensors,
    }
    window = metadata.count(f"{arch}.{WINDOW}", 0, least=0)
    if arch == "mistral" or window:
        found |= {"model_type": "mistral", "sliding_window": window or None}
    return found


def finish_gemma(metadata: Metadata, arch: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Gemma 2's and 3's windows and caps, with llama.cpp's defaults."""
    n_layers, head_dim = config["num_hidden_layers"], config["head_dim"]
    # The largest model of each scales queries by hidden_size / n_heads instead of by head_dim.
    largest = n_layers == {"gemma2": 46, "gemma3": 62}[arch]
    width = config["hidden_size"] // config["num_attention_heads"] if largest else head_dim
    found: dict[str, Any] = {"query_pre_attn_scalar": width, CAP: None, FINAL_CAP: None}

    def above_zero(key: str, default: float) -> float:
        return metadata.number(f"{arch}.{key}", default, above=0)

    window = metadata.count(f"{arch}.{WINDOW}", 4096 if arch == "gemma2" else 0, least=0)
    if arch == "gemma2":
        found |= {CAP: above_zero(CAP, 50.0), FINAL_CAP: above_zero(FINAL_CAP, 30.0)}
    else:
        found["rope_local_base_freq"] = above_zero("rope.freq_base_swa", 10000.0)
        if metadata.has(f"{arch}.{FINAL_CAP}"):
            found[FINAL_CAP] = above_zero(FINAL_CAP, 1.0)
    slides = find_slides(metadata, arch, n_layers) if window else [False] * min(n_layers, 10_000)
    if window:
        found["sliding_window"] = window
    kinds = {True: "sliding_attention", False: "full_attention"}
    return {**found, "layer_types": [kinds[slide] for slide in slides]}


def find_slides(metadata: Metadata, arch: str, n_layers: int) -> list[bool]:
    """Which layers have the window: all but every second (Gemma 2) or sixth (Gemma 3)."""
    key = f"{arch}.{WINDOW}_pattern"
    if isinstance(metadata.source.get(key), np.ndarray):
        return [bool(slide) for slide in metadata.numbers(key, n_layers)]
    every = metadata.count(key, 2 if arch == "gemma2" else 6)
    # A false, huge number of layers must not fill the memory; the loader refuses it later.
    return [(n + 1) % every != 0 for n in range(min(n_layers, 10_000))]
