"""Models of architectures that are no family of ours, run by the package `transformers`.

Why: a picture of what heads do needs no model of ours; `regard.watch` sees most of theirs in place.

How: the folder is opened by our own reader first, so that pickles, bad headers and missing shards
are refused in its words. Then `transformers`, where it is installed, loads it from this machine
alone: safetensors only, no code from the folder, no kernels from elsewhere (the way of attending is
named here and not left to config.json). Weights that are missing are an error, since that package
would draw them at random; only a pooler, which comes after all attention, may be.

Left out: encoder–decoders, adapters, GGUF files, and models that need more than one text.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from regard._look import Said, Subject, name_tokens

if TYPE_CHECKING:
    from torch import Tensor

    from regard.models.families import UnknownFamily

# All that the package raises where a folder or a text does not suit it; there is no base of them.
RUN_FAULTS = (RuntimeError, LookupError, TypeError, AttributeError)
FAULTS = (ValueError, OSError, ImportError, *RUN_FAULTS)
ADAPTER = "adapter_config.json"
TOKENIZER_FILES = ["*.model", "*.txt"]
"""What tokenizers are made from where there is no tokenizer.json, beside what `load` fetches."""
NO_TOKENIZER = "expected tokenizer.json beside its weights, without which it cannot read a text"
LOCAL = {"local_files_only": True, "trust_remote_code": False}
"""Nothing is fetched, and no code of a folder runs."""


def foreign_subject(name: str, unknown: UnknownFamily, *, device: str) -> Subject:
    """The model of this folder or hub name; `unknown` is why it is none of ours."""
    from regard.lens.head_names import name_model

    if name.endswith(".gguf"):
        raise unknown
    transformers = find_package(name, unknown)
    with quiet(transformers):
        folder = find_folder(name)
        config = read_config(transformers, name, folder, unknown)
        with refusing_as(f"{name} has no tokenizer that transformers can open; {NO_TOKENIZER}"):
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **LOCAL)
        model = load_weights(transformers, name, folder, config).to(device)

    def encode(text: str) -> Said:
        with quiet(transformers):
            return encode_text(tokenizer, text)

    def runner(part: Any) -> Callable[[Tensor], object]:
        def run(ids_bt: Tensor) -> object:
            what = f"{name} ({type(model).__name__}) on {ids_bt.shape[1]:,} tokens"
            with quiet(transformers), refusing_as(f"transformers cannot run {what}", RUN_FAULTS):
                return part(input_ids=ids_bt)

        return run

    def size(key: str) -> int | None:
        value = getattr(config.get_text_config(), key, None)
        return value if isinstance(value, int) and value > 0 else None

    max_len, n_layers = size("max_position_embeddings"), size("num_hidden_layers")
    n_heads = size("num_attention_heads")
    run = runner(model.base_model)  # without the head of a language model
    subject = Subject(name_model(name), model, max_len, n_layers, n_heads, encode, run)
    if not is_language_model(transformers, config):
        return subject
    n_words = size("vocab_size") or 0
    return replace(subject, say=runner(model), vocab_size=n_words, tokenizer=tokenizer)


def tell_package(subject: Subject) -> str:
    version = importlib.import_module("transformers").__version__
    kind = type(subject.module).__name__
    return f"transformers {version} runs this model ({kind}), which is no family of regard's"


def find_package(name: str, unknown: UnknownFamily) -> Any:
    try:
        return importlib.import_module("transformers")
    except ModuleNotFoundError as missing:
        if missing.name != "transformers":
            raise
        raise ModuleNotFoundError(
            f"{name}: {unknown}. Most others are read through the package transformers: "
            "pip install transformers",
            name=missing.name,
        ) from None


def find_folder(name: str) -> Path:
    """The folder of a name, as `load` finds it; with the files of older tokenizers."""
    from regard.models.hub import fetch_folder

    folder = Path(name) if os.path.exists(name) else fetch_folder(name, None, TOKENIZER_FILES)
    if (folder / ADAPTER).exists():
        raise ValueError(
            f"{name} holds an adapter ({ADAPTER}) beside its model; merge it with the library that "
            "made it, or move it away to look at the model alone"
        )
    return folder


def read_config(transformers: Any, name: str, folder: Path, unknown: UnknownFamily) -> Any:
    version = transformers.__version__
    with refusing_as(f"{name}: {unknown}. Nor can transformers {version} read it"):
        config = transformers.AutoConfig.from_pretrained(folder, **LOCAL)
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name} is an encoder–decoder ({config.model_type}), which reads one text and writes "
            "another: `regard translate --look` shows such models, of regard's own families alone"
        )
    return config


def is_language_model(transformers: Any, config: Any) -> bool:
    """Whether the folder holds a model that says what comes next, by what it was saved as."""
    names = getattr(config, "architectures", None) or []
    saved = any("ForCausalLM" in name or name.endswith("LMHeadModel") for name in names)
    return saved and type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING


def load_weights(transformers: Any, name: str, folder: Path, config: Any) -> Any:
    """The model without its head, which no attention depends on; of a language model with it."""
    speaks = is_language_model(transformers, config)
    kind = transformers.AutoModelForCausalLM if speaks else transformers.AutoModel
    options = {"config": config, "use_safetensors": True, "dtype": "auto", **LOCAL}

    def load(attention: str) -> Any:
        return kind.from_pretrained(
            folder, attn_implementation=attention, output_loading_info=True, **options
        )

    with refusing_as(f"transformers cannot load {name}"):
        try:
            model, loaded = load("sdpa")
        except ValueError:  # how an architecture without it says so, before it loads
            model, loaded = load("eager")
    missing = sorted(key for key in loaded["missing_keys"] if "pooler" not in key.split("."))
    if missing:
        raise ValueError(
            f"{name} lacks {len(missing)} of the tensors that its config.json asks for "
            f"({', '.join(missing[:3])}{', ...' if len(missing) > 3 else ''}): config and weights "
            "are of different models; download both again"
        )
    # Keys of earlier tokens are for writing; here all are read at once.
    model.config.use_cache = False
    return model.eval()


def encode_text(tokenizer: Any, text: str) -> Said:
    fast = bool(tokenizer.is_fast)
    found = tokenizer(text, return_offsets_mapping=fast, verbose=False)
    ids = [int(number) for number in found["input_ids"]]
    pieces = [str(piece) for piece in tokenizer.convert_ids_to_tokens(ids)]
    if not fast:
        return Said(ids, pieces, None)
    spans = [(int(start), int(end)) for start, end in found["offset_mapping"]]
    return Said(ids, name_tokens(text, pieces, spans), spans)


@contextmanager
def refusing_as(what: str, faults: tuple[type[Exception], ...] = FAULTS) -> Iterator[None]:
    """Whatever the package raises, as one ValueError that says what could not be done."""
    try:
        yield
    except faults as wrong:
        said = " ".join(str(wrong).split())[:300]
        raise ValueError(f"{what}: {type(wrong).__name__}: {said}") from wrong


@contextmanager
def quiet(transformers: Any) -> Iterator[None]:
    """Without the package's bars and warnings, whose causes are checked here."""
    log = transformers.utils.logging
    level, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        yield
    finally:
        log.set_verbosity(level)
        if bars:
            log.enable_progress_bar()
