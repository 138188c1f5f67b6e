"""The examples are programs, no package: their folders are put where Python looks."""

import sys
from pathlib import Path

for name in ("translate_aligned", "evict", "encoder_distilled"):
    sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / name))
