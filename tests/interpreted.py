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


def patch_once() -> None:
    """Spare the interpreter's own preparation at every call of a function inside a kernel.

    It prepares Triton's language for the kernel, and then again for each function that the kernel
    calls, which is most of its time.
    """
    import triton.language as tl
    from triton.runtime import interpreter

    done = set()

    def call(function: Any, *args: Any, **kwargs: Any) -> Any:
        if tl.core in function.fn.__globals__.values() and tl.core not in done:
            done.add(tl.core)
            interpreter._patch_lang(function.fn)
        return function.rewrite()(*args, **kwargs)

    interpreter.InterpretedFunction.__call__ = call
