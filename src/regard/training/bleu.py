"""BLEU and chrF of translations, computed by sacrebleu, with its signatures.

Why: scores can be compared only if texts were tokenised and counted alike; sacrebleu fixes both,
and its signature says how.

How: sources are translated by beam search in batches of similar lengths, then compared with the
references. `tokenize` names sacrebleu's tokenizer: "13a" for European languages, "char" for
Japanese, "none" for text that is tokenised already.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from regard._check import check_choice
from regard.generation import GenerationConfig, generate_ids
from regard.models import Transformer
from regard.tokens import Tokenizer


@dataclass(frozen=True, kw_only=True)
class Scores:
    bleu: float
    chrf: float
    bleu_signature: str
    chrf_signature: str
    n_sentences: int


def translate_rows(
    model: Transformer,
    tokenizer: Tokenizer,
    rows: Sequence[Sequence[int]],
    *,
    beams: int = 5,
    length_penalty: float = 1.0,
    at_once: int = 128,
    max_new_tokens: int = 128,
) -> list[str]:
    """Translate each row of source ids; a row must end with the end token."""
    config = GenerationConfig(max_new_tokens=max_new_tokens)
    if beams > 1:
        config = replace(config, num_beams=beams, length_penalty=length_penalty)
    order = sorted(range(len(rows)), key=lambda row: len(rows[row]))
    texts = [""] * len(rows)
    for start in range(0, len(order), at_once):
        some = order[start : start + at_once]
        answers = generate_ids(model, source=[list(rows[row]) for row in some], config=config)
        for row, ids in zip(some, answers.rows(), strict=True):
            texts[row] = tokenizer.decode(ids)
    return texts


def score(translations: Sequence[str], references: Sequence[str], tokenize: str = "13a") -> Scores:
    """Compute BLEU and chrF of translations against one reference each."""
    if len(translations) != len(references):
        what = f"{len(translations)} translations and {len(references)} references"
        raise ValueError(f"{what}; expected as many")
    try:
        from sacrebleu import metrics
    except ModuleNotFoundError as missing:
        what = f"scoring translations needs the package {missing.name}: pip install 'regard[train]'"
        raise ModuleNotFoundError(what, name=missing.name) from None
    sacrebleu: Any = metrics
    check_choice("tokenize", tokenize, tuple(sacrebleu.BLEU.TOKENIZERS))
    try:
        # force: else sacrebleu warns that the text looks tokenised, which "none" promises.
        bleu, chrf = sacrebleu.BLEU(tokenize=tokenize, force=tokenize == "none"), sacrebleu.CHRF()
    except (RuntimeError, ImportError) as missing:
        said = " ".join(str(missing).split())
        raise ModuleNotFoundError(f"tokenize={tokenize!r}: {said}") from None
    by_bleu = bleu.corpus_score(list(translations), [list(references)])
    by_chrf = chrf.corpus_score(list(translations), [list(references)])
    return Scores(
        bleu=float(by_bleu.score),
        chrf=float(by_chrf.score),
        bleu_signature=str(bleu.get_signature()),
        chrf_signature=str(chrf.get_signature()),
        n_sentences=len(references),
    )
