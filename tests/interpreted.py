"""Triton kernels on the CPU: a test file run as a script, by Triton's own interpreter.

Triton decides at import whether it interprets, so this takes a process of its own.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve()


def run_interpreted(script: Path) -> Any:
    """What the script prints last, which is JSON."""
    path = os.pathsep.join([str(HERE.parents[1] / "src"), str(HERE.parent)])
    done = subprocess.run(
        [sys.executable, str(script)],
        capture_output=True,
        text=True,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])
