"""The files that define a tokenizer: finding, reading, checking and writing them.

Why: a tokenizer is defined by up to five files, some of which say the same thing in several ways,
and any of them may be damaged or malicious.

How: every file is read once as text and kept under its name, so that saving writes back what was
read, byte for byte. The functions here turn these texts into plain data: the names of the special
tokens, tokens added to the vocabulary, the chat templates, and, for a folder that has only GPT-2's
`vocab.json` and `merges.txt`, an equivalent `tokenizer.json`. Every fault is a ValueError that
names the file.

Left out: SentencePiece models, BERT's lone `vocab.txt` and other folders without a
`tokenizer.json`; they are refused with the way to make one.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from regard._files import parse_json, read_bytes, replace_file

TOKENIZER = "tokenizer.json"
CONFIG = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
ADDED = "added_tokens.json"
TEMPLATE = "chat_template.jinja"
OLD_TEMPLATE = "chat_template.json"
MAX_BYTES = 200_000_000  # six times the largest tokenizer.json of a known model
MAX_VALUES = 10_000_000
KNOWN = (TOKENIZER, CONFIG, SPECIAL, ADDED, TEMPLATE, OLD_TEMPLATE)
SAID_TWICE = {
    "do_lower_case": ("normalizer", "BertNormalizer", "lowercase"),
    "strip_accents": ("normalizer", "BertNormalizer", "strip_accents"),
    "tokenize_chinese_chars": ("normalizer", "BertNormalizer", "handle_chinese_chars"),
    "add_prefix_space": ("pre_tokenizer", "ByteLevel", "add_prefix_space"),
}
"""Settings of tokenizer_config.json that `tokenizer.json` has too: part, type and key there."""
PLAIN_CLASSES = ("PreTrainedTokenizerFast", "TokenizersBackend", "Llama")
"""Beginnings of class names in `transformers` that read these from `tokenizer.json` alone."""
ROLES = ("bos", "eos", "pad", "unk", "sep", "cls", "mask")
GPT2_CLASSES = ("GPT2Tokenizer", "GPT2TokenizerFast")
ANOTHER_COPY = "fetch the file again, or save the tokenizer again where it came from"
MAKE_ONE = (
    "make a tokenizer.json once, with transformers: "
    "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
)


def read_texts(path: Path) -> dict[str, str]:
    if path.is_file():
        return {TOKENIZER: _read(path)}
    if not path.is_dir():
        raise FileNotFoundError(
            f"{path}: no such file or folder; give a folder with a {TOKENIZER}, or that file itself"
        )
    # A broken link counts as there, so that reading it raises: its file must not be ignored.
    texts = {name: _read(path / name) for name in KNOWN if os.path.lexists(path / name)}
    if TOKENIZER in texts:
        return texts
    if os.path.lexists(path / "vocab.json") and os.path.lexists(path / "merges.txt"):
        return texts | _byte_level(path, texts)
    pieces = sorted(p.name for p in path.iterdir() if p.suffix in (".model", ".spm"))
    if pieces:
        raise ValueError(
            f"{path}: only a SentencePiece model ({', '.join(pieces)}) and no {TOKENIZER}; that "
            f"format does not say how text is prepared, so it is not read here; {MAKE_ONE}"
        )
    raise FileNotFoundError(f"{path}: no {TOKENIZER} in this folder; {MAKE_ONE}")


def _read(path: Path) -> str:
    try:
        return read_bytes(path, MAX_BYTES, ValueError).decode("utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error}); {ANOTHER_COPY}") from error


def write_texts(folder: Path, texts: Mapping[str, str]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    foreign = [name for name in KNOWN if name not in texts and (folder / name).exists()]
    if foreign:
        what = f"{folder}: holds {', '.join(foreign)} of another tokenizer, which would be read"
        raise ValueError(f"{what} together with this one; remove it, or save into another folder")
    for name, text in texts.items():
        with replace_file(folder / name) as file:
            file.write(text.encode("utf-8"))


def parse(texts: Mapping[str, str], name: str, origin: str) -> dict[str, Any]:
    data = texts.get(name, "{}").encode("utf-8", "surrogatepass")
    return parse_json(data, f"{origin}: {name}", ValueError, MAX_VALUES)


def special_tokens(texts: Mapping[str, str], origin: str) -> dict[str, dict[str, Any]]:
    """Role ("bos", ...) -> the token's entry; `tokenizer_config.json` takes precedence."""
    found: dict[str, dict[str, Any]] = {}
    for name in (CONFIG, SPECIAL):
        named = parse(texts, name, origin)
        for role in ROLES:
            token = named.get(f"{role}_token")
            if token is None or role in found:
                continue
            entry = token if isinstance(token, dict) else {"content": token}
            content = entry.get("content")
            if not isinstance(content, str) or not content:
                raise ValueError(
                    f"{origin}: {name} gives {role}_token as {token!r:.99}; expected a text, or an "
                    f'object with a text under "content"; {ANOTHER_COPY}'
                )
            found[role] = entry
    return found


def added_tokens(texts: Mapping[str, str], origin: str) -> list[dict[str, Any]]:
    """Tokens defined beside `tokenizer.json`, by id: "content", flags, and "id" if it is given.

    Where `transformers` looks for them: in the config, else in `added_tokens.json` of older
    folders; then special tokens without a role.
    """
    named = [parse(texts, name, origin) for name in (CONFIG, SPECIAL)]
    told = named[0].get("added_tokens_decoder")
    if told is None:
        told = {at: token for token, at in parse(texts, ADDED, origin).items()}
    entries: list[tuple[Any, Any]] = [*told.items()] if isinstance(told, dict) else [("", told)]
    for words in named:
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = words.get(key) or []
            more = [*more.values()] if isinstance(more, dict) else more
            entries += [(None, token) for token in (more if isinstance(more, list) else [more])]
    roles = {entry["content"] for entry in special_tokens(texts, origin).values()}
    found = [_added_token(at, token, roles, origin) for at, token in entries]
    return sorted(found, key=lambda entry: entry.get("id", float("inf")))


def _added_token(at: Any, token: Any, roles: Collection[str], origin: str) -> dict[str, Any]:
    entry = token if isinstance(token, dict) else {"content": token}
    content, number = entry.get("content"), "" if at is None else str(at)
    if not isinstance(content, str) or not content or not (at is None or number.isdecimal()):
        what = f"{origin}: {CONFIG}, {SPECIAL} or {ADDED} adds the token {token!r:.99}"
        raise ValueError(f"{what} with id {at!r:.20}; expected a text and an id; {ANOTHER_COPY}")
    special = bool(entry.get("special", False)) or at is None or content in roles
    how = {flag: bool(entry.get(flag, False)) for flag in ("lstrip", "rstrip", "single_word")}
    how |= {"special": special, "normalized": bool(entry.get("normalized", not special))}
    return {"content": content, **how, **({} if at is None else {"id": int(number)})}


def apply_config(texts: Mapping[str, str], described: Mapping[str, Any], origin: str) -> str:
    """`tokenizer.json` with the config's settings, which take precedence in `transformers`."""
    config = parse(texts, CONFIG, origin)
    changed: dict[str, Any] = {}
    if not str(config.get("tokenizer_class")).startswith(PLAIN_CLASSES):
        for key, (part, kind, word) in SAID_TWICE.items():
            step, said = changed.get(part, described.get(part)), config.get(key)
            if not isinstance(step, dict) or step.get("type") != kind:
                continue
            if isinstance(said, bool) and step.get(word) != said:
                changed[part] = {**step, word: said}
    return json.dumps({**described, **changed}) if changed else texts[TOKENIZER]


def chat_templates(texts: Mapping[str, str], origin: str) -> dict[str, str]:
    """Name -> template; one without a name is "default". The newest file format has precedence."""
    if TEMPLATE in texts:
        return {"default": texts[TEMPLATE]}
    for name in (OLD_TEMPLATE, CONFIG):
        given = parse(texts, name, origin).get("chat_template")
        if given is None:
            continue
        entries = [{"name": "default", "template": given}] if isinstance(given, str) else given
        if isinstance(entries, dict):
            entries = [{"name": key, "template": text} for key, text in entries.items()]
        if not isinstance(entries, list) or not all(
            isinstance(entry, dict)
            and isinstance(entry.get("name"), str)
            and isinstance(entry.get("template"), str)
            for entry in entries
        ):
            raise ValueError(
                f"{origin}: {name} gives chat_template as {given!r:.99}; expected a text, or a "
                f'list of objects with the texts "name" and "template"; {ANOTHER_COPY}'
            )
        return {entry["name"]: entry["template"] for entry in entries}
    return {}


def _byte_level(folder: Path, texts: Mapping[str, str]) -> dict[str, str]:
    vocab = parse({"vocab.json": _read(folder / "vocab.json")}, "vocab.json", str(folder))
    for key, value in vocab.items():
        if type(value) is not int:
            what = f"{folder}: vocab.json gives {key!r:.99} the id {value!r:.99}"
            raise ValueError(f"{what}, expected an integer; {ANOTHER_COPY}")
    config = parse(texts, CONFIG, str(folder))
    kind = config.get("tokenizer_class")
    end = "<|endoftext|>"
    if kind not in GPT2_CLASSES and not (kind is None and end in vocab):
        raise ValueError(
            f"{folder}: vocab.json and merges.txt of {kind or 'an unnamed kind of tokenizer'}; "
            f"only GPT-2's kind is built from these two files ({end} in its vocabulary, or "
            f"tokenizer_class {GPT2_CLASSES[0]}); {MAKE_ONE}"
        )
    named = special_tokens(texts, str(folder))
    defaults = {role: {"content": end} for role in ("bos", "eos", "unk") if end in vocab}
    contents = {role: entry["content"] for role, entry in (defaults | named).items()}
    plain = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False}
    ids = {text: vocab[text] for text in contents.values() if text in vocab}
    added = [
        {"id": vocab[text], "content": text, "special": True, **plain}
        for text in sorted(ids, key=lambda text: ids[text])
    ]
    spaced = bool(config.get("add_prefix_space", False))
    level = {"type": "ByteLevel", "add_prefix_space": spaced, "use_regex": True}
    post: dict[str, Any] = {**level, "trim_offsets": False}
    if config.get("add_bos_token"):
        bos = contents.get("bos")
        if bos is None or bos not in ids:
            what = f"{folder}: {CONFIG} asks for a bos token in front, but {bos!r} is not in"
            raise ValueError(f"{what} vocab.json; name one that is, or take add_bos_token out")
        post = surround({bos: ids[bos]}, {})
    affixes = {"continuing_subword_prefix": "", "end_of_word_suffix": ""}
    tokenizer = {
        "version": "1.0",
        "added_tokens": added,
        "pre_tokenizer": {**level, "trim_offsets": False},
        "post_processor": post,
        "decoder": {**level, "trim_offsets": False},
        "model": {"type": "BPE", **affixes, "vocab": vocab, "merges": _merges(folder)},
    }
    named_now = {f"{role}_token": text for role, text in contents.items()}
    config = {"tokenizer_class": GPT2_CLASSES[0], **named_now, **config}
    return {
        TOKENIZER: json.dumps(tokenizer, ensure_ascii=False),
        CONFIG: json.dumps(config, ensure_ascii=False, indent=2),
    }


def surround(before: Mapping[str, int], after: Mapping[str, int]) -> dict[str, Any]:
    """The post-processor that adds tokens (content -> id) before and after every text."""
    first, last = ([{"SpecialToken": {"id": t, "type_id": 0}} for t in x] for x in (before, after))
    one, two = ({"Sequence": {"id": name, "type_id": at}} for at, name in enumerate("AB"))
    tokens = {**before, **after}
    return {
        "type": "TemplateProcessing",
        "single": [*first, one, *last],
        "pair": [*first, one, *last, *first, two, *last],
        "special_tokens": {t: {"id": t, "ids": [n], "tokens": [t]} for t, n in tokens.items()},
    }


def _merges(folder: Path) -> list[list[str]]:
    lines = _read(folder / "merges.txt").replace("\r\n", "\n").split("\n")
    pairs = []
    for number, line in enumerate(lines, start=1):
        if not line or (number == 1 and line.startswith("#version")):
            continue
        pairs.append(line.split(" "))
        if len(pairs[-1]) != 2:
            what = f"{folder}: merges.txt, line {number} holds {line!r:.99}"
            raise ValueError(f"{what}, expected two tokens and one space; {ANOTHER_COPY}")
    return pairs
