"""Small tokenizers of every kind that real models use, made in the tests themselves."""

import functools
import json
from typing import Any

from tokenizers import Tokenizer as Backend
from tokenizers import decoders, models, pre_tokenizers, processors, trainers

TEXTS = {
    "english": "The animal didn't cross the street because it was too tired.",
    "japanese": "動物は疲れていたので、道を渡らなかった。",
    "arabic": "لم يعبر الحيوان الشارع لأنه كان متعبًا.",
    "hindi": "जानवर ने सड़क पार नहीं की क्योंकि वह थका हुआ था।",
    "joined emoji": "👩‍👩‍👧‍👦 and 🏳️‍🌈, 👍🏽!",
    "combining marks": "e\u0301 n\u0303 Z\u0351\u036bA\u0334 \u1112\u1161\u11ab",
    "control characters": "a\x00b\x01\x07\x1b[0m\x7f\u200e\ufeff\u2028",
    "spaces": "   two  spaces   and more    ",
    "newlines": "\n\na\r\n\tb\r \n",
    "replacement signs": "\ufffd\ufffd x \ufffd",
    "nothing": "",
    "beyond the first plane": "𝔸𐍈𠜎\U0010ffff",
}
CHAT = (
    "{{ bos_token }}{% for message in messages %}\n"
    "[{{ message.role }}] {{ message['content'] | trim }}\n"
    "{% endfor %}\n"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


@functools.cache
def byte_level() -> str:
    """GPT-2's kind: every byte is a token, so every text has ids."""
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=397,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        special_tokens=["<pad>", "<|end|>"],
        show_progress=False,
    )
    backend.train_from_iterator([text for text in TEXTS.values() for _ in range(3)], trainer)
    return backend.to_str()


def added(number: int, content: str) -> dict[str, Any]:
    flags = dict.fromkeys(("lstrip", "rstrip", "single_word", "normalized"), False)
    return {"id": number, "content": content, "special": True, **flags}


@functools.cache
def sentence_pieces() -> str:
    """LLaMA's kind: a space in front that the decoder strips, and bytes for unknown letters."""
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "e", "d", "日", "▁a", "be", "▁▁"]
    start = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    replace = {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}
    back = {"type": "Replace", "pattern": {"String": "▁"}, "content": " "}
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    chain = [back, {"type": "ByteFallback"}, {"type": "Fuse"}, strip]
    model = {
        "type": "BPE",
        "unk_token": "<unk>",
        "fuse_unk": True,
        "byte_fallback": True,
        "vocab": {piece: number for number, piece in enumerate(pieces)},
        "merges": [["▁", "a"], ["b", "e"], ["▁", "▁"]],
    }
    whole = {
        "version": "1.0",
        "added_tokens": [added(number, pieces[number]) for number in range(3)],
        "normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend", "prepend": "▁"}]},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [start, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [start, {"Sequence": {"id": "A", "type_id": 0}}],
            "special_tokens": {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}},
        },
        "decoder": {"type": "Sequence", "decoders": chain},
        "model": model,
    }
    whole["normalizer"]["normalizers"].append(replace)
    return json.dumps(whole)


@functools.cache
def word_pieces(truncated: bool = False) -> str:
    """BERT's kind, also with settings that cut and pad every text."""
    words = "[PAD] [UNK] [CLS] [SEP] [MASK] the bird sing ##s ##ing un ##happy ##ily ! , é 鳥"
    model = {
        "type": "WordPiece",
        "unk_token": "[UNK]",
        "continuing_subword_prefix": "##",
        "max_input_chars_per_word": 100,
        "vocab": {word: number for number, word in enumerate(words.split())},
    }
    backend = Backend.from_str(json.dumps({"version": "1.0", "model": model}))
    told = json.loads(backend.to_str())
    told["added_tokens"] = [added(number, word) for number, word in enumerate(words.split()[:5])]
    told["normalizer"] = {"type": "BertNormalizer", "clean_text": True, "strip_accents": False}
    told["normalizer"] |= {"handle_chinese_chars": True, "lowercase": True}
    told["pre_tokenizer"] = {"type": "BertPreTokenizer"}
    told["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    told["post_processor"] = {"type": "BertProcessing", "sep": ["[SEP]", 3], "cls": ["[CLS]", 2]}
    if truncated:
        told["truncation"] = {"max_length": 3, "strategy": "LongestFirst", "stride": 0}
        told["truncation"]["direction"] = "Right"
        told["padding"] = {"strategy": {"Fixed": 7}, "direction": "Right", "pad_id": 0}
        told["padding"] |= {"pad_to_multiple_of": None, "pad_type_id": 0, "pad_token": "[PAD]"}
    return json.dumps(told)


@functools.cache
def with_decoder(*steps: str) -> str:
    """A few plain tokens under the decoder made of the given steps."""
    chain = [json.loads(step) for step in steps]
    words = ["a", "▁b", "▁", "##c", "d</w>", ".", "<0xE6>", "<0x97>", "<0xA5>", "�", "x|", "▁n't"]
    model = {"type": "WordLevel", "unk_token": "a", "vocab": {w: n for n, w in enumerate(words)}}
    decoder = {"type": "Sequence", "decoders": chain}
    return json.dumps({"version": "1.0", "model": model, "decoder": decoder})
