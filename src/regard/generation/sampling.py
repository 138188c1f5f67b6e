"""Logits processing and sampling: from the logits of the next token to the token.

Why: what is likely, what is allowed and what is drawn are three questions; each is a few lines.

How: logits (B, V) are processed in a fixed order, then one token per row is chosen. The order is:
repetition penalty, suppressed tokens, forced tokens; and for sampling, temperature, top-k, top-p,
min-p. A token that is not possible has the logit -inf. `LogitsProcessor` holds what is constant
over a text and runs the steps.

Sampling draws one random number in [0, 1) per row and step, from the row's own seed; the token is
the one at which the cumulative probability exceeds it. So a row's text does not depend on the other
rows of the batch, and there is no need for random numbers for the whole vocabulary.

Nothing here synchronizes with the device.

Letters: B rows, V vocabulary, T steps.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.generation.config import GenerationConfig
from regard.models import SpecialTokens

NEVER = float("-inf")


def penalise_seen(logits_bv: Tensor, seen_bv: Tensor, penalty: float) -> Tensor:
    """Logits of seen tokens divided by the penalty, or multiplied where they are negative."""
    lower_bv = torch.where(logits_bv < 0, logits_bv * penalty, logits_bv / penalty)
    return torch.where(seen_bv, lower_bv, logits_bv)


def keep_top_k(logits_bv: Tensor, k: int) -> Tensor:
    """Keep the k largest logits of each row, and those equal to the k-th; set others to -inf."""
    least_b1 = logits_bv.topk(min(k, logits_bv.shape[-1]), dim=-1).values[:, -1:]
    return logits_bv.masked_fill(logits_bv < least_b1, NEVER)


def keep_top_p(logits_bv: Tensor, p: float) -> Tensor:
    """Keep the likeliest tokens up to the one that brings the sum of their probabilities to p."""
    rising_bv, order_bv = logits_bv.sort(dim=-1)
    # Summed from the least likely token, where sums are small and exact: a token is dropped if it
    # and all below it sum to at most 1 - p.
    tail_bv = rising_bv.softmax(-1).cumsum(-1)
    goes_bv = tail_bv <= 1 - p
    goes_bv[:, -1] = False
    return logits_bv.masked_fill(goes_bv.scatter(-1, order_bv, goes_bv), NEVER)


def keep_min_p(logits_bv: Tensor, share: float) -> Tensor:
    """Keep the tokens with at least this share of the likeliest one's probability."""
    weights_bv = logits_bv.softmax(-1)
    return logits_bv.masked_fill(weights_bv < share * weights_bv.amax(-1, keepdim=True), NEVER)


def force_token(logits_bv: Tensor, rows_b: Tensor, token: int) -> Tensor:
    """In the rows where rows_b is True, allow only this token, with logit 0."""
    only_v = torch.full_like(logits_bv[0], NEVER)
    only_v[token] = 0
    return torch.where(rows_b[:, None], only_v, logits_bv)


def draw(logits_bv: Tensor, chance_b: Tensor) -> Tensor:
    """The token (B,) at which the cumulative probability exceeds chance_b in [0, 1)."""
    reached_bv = logits_bv.double().softmax(-1).cumsum(-1)
    aim_b1 = (chance_b * reached_bv[:, -1])[:, None]
    # The first sum above the aim is never at a token of probability 0, which adds nothing.
    token_b1 = torch.searchsorted(reached_bv, aim_b1, right=True)
    return token_b1[:, 0].clamp(max=logits_bv.shape[-1] - 1)


def make_chances(seeds: Sequence[int], n_steps: int) -> Tensor:
    """A random number in [0, 1) per row and step, (B, T) float64, each row from its own seed."""
    rows = [
        torch.rand(n_steps, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        for seed in seeds
    ]
    # The largest double below 1 times a sum may round up to the sum itself, which none exceeds.
    return torch.stack(rows).clamp(max=1 - 2**-50)


def make_seeds(config: GenerationConfig, n_rows: int) -> list[int]:
    seed = config.seed
    if seed is None:
        seed = int(torch.randint(2**62, ()))
    if isinstance(seed, int):
        return [(seed + row) % 2**63 for row in range(n_rows)]
    if len(seed) != n_rows:
        raise ValueError(f"there are {len(seed)} seeds for {n_rows} rows; give one for each")
    return list(seed)


class LogitsProcessor:
    """Processes the logits at each step of one batch; it has no state that changes."""

    def __init__(
        self,
        config: GenerationConfig,
        tokens: SpecialTokens,
        stop_tokens: Sequence[int],
        vocab_size: int,
        device: torch.device,
    ) -> None:
        self.config, self.tokens, self.vocab_size = config, tokens, vocab_size

        def mark(ids: Sequence[int]) -> Tensor | None:
            known = [at for at in ids if at < vocab_size]
            marked_v = torch.zeros(vocab_size, dtype=torch.bool)
            marked_v[known] = True
            return marked_v.to(device) if known else None

        self.banned_v = mark(tokens.suppressed)
        self.early_v = mark(stop_tokens) if config.min_new_tokens else None

    @property
    def plain(self) -> bool:
        """Whether each token is the argmax of the model's own logits, unprocessed."""
        forced = (self.tokens.forced_bos, self.tokens.forced_eos)
        held = (self.banned_v, self.early_v, *forced)
        return not self.config.samples and not self.counts_seen and held == (None,) * 4

    @property
    def counts_seen(self) -> bool:
        """Whether `process` needs `seen_bv`, for the repetition penalty."""
        return self.config.repetition_penalty != 1.0

    def process(
        self, logits_bv: Tensor, seen_bv: Tensor | None, step: int, lone_b: Tensor, limit_b: Tensor
    ) -> Tensor:
        """The processed logits at this step; steps count from 0.

        seen_bv: True for tokens that the row contains. lone_b: whether its prompt is one token.
        limit_b: how many steps it has in all.
        """
        config, tokens = self.config, self.tokens
        if seen_bv is not None:
            logits_bv = penalise_seen(logits_bv, seen_bv, config.repetition_penalty)
        if self.banned_v is not None:
            logits_bv = logits_bv.masked_fill(self.banned_v, NEVER)
        if self.early_v is not None and step < config.min_new_tokens:
            logits_bv = logits_bv.masked_fill(self.early_v, NEVER)
        if tokens.forced_bos is not None and step == 0:
            logits_bv = force_token(logits_bv, lone_b, tokens.forced_bos)
        if tokens.forced_eos is not None:
            logits_bv = force_token(logits_bv, limit_b == step + 1, tokens.forced_eos)
        return narrow(logits_bv, config) if config.samples else logits_bv


def narrow(logits_bv: Tensor, config: GenerationConfig) -> Tensor:
    """Logits for sampling: temperature, then top-k, top-p and min-p."""
    assert config.temperature is not None
    # Relative to the largest logit, and with a divisor that float32 can hold: no inf, no NaN.
    temperature = max(config.temperature, 1e-30)
    logits_bv = (logits_bv - logits_bv.amax(-1, keepdim=True)) / temperature
    if config.top_k is not None:
        logits_bv = keep_top_k(logits_bv, config.top_k)
    if config.top_p is not None and config.top_p < 1:
        logits_bv = keep_top_p(logits_bv, config.top_p)
    if config.min_p is not None:
        logits_bv = keep_min_p(logits_bv, config.min_p)
    return logits_bv
