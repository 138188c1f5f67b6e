"""Decoder-only families against tiny random originals: see `family_judge` for what is compared."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from decoder_originals import ROTATES_KEPT_KEYS, STATEFUL, VARIANTS
from family_judge import CHECKS, Draw, Subject, make_subject

LIVELY = Draw(seed=98, matrices=1.5, table=0.4, vectors=0.1)


@pytest.fixture(scope="module", params=VARIANTS)
def subject(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Subject:
    name = request.param
    folder = tmp_path_factory.mktemp(name)
    return make_subject(
        VARIANTS[name](),
        folder,
        draw=LIVELY,
        keeps_state=name in STATEFUL,
        rotates_kept_keys=name in ROTATES_KEPT_KEYS,
    )


@pytest.mark.parametrize("check", CHECKS)
def test_like_the_original(
    subject: Subject, check: Callable[[Subject, Path], None], tmp_path: Path
) -> None:
    check(subject, tmp_path)
