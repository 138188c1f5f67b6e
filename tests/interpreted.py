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


def patch_bfloat16() -> None:
    """Make bfloat16 what it is on a GPU: rounded to the nearest, and multiplied as numbers.

    The interpreter keeps it as bits, cuts these off, and multiplies them.
    """
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime import interpreter

    builder, handle = interpreter.InterpreterBuilder, interpreter.TensorHandle
    plain_dot, plain_cast = builder.create_dot, builder.cast_impl

    def widen(x: Any) -> Any:
        bits = torch.from_numpy(x.data.view(np.int16))
        return handle(bits.view(torch.bfloat16).float().numpy(), tl.float32)

    def dot(self: Any, a: Any, b: Any, *more: Any) -> Any:
        if a.dtype.scalar == tl.bfloat16:
            a, b = widen(a), widen(b)
        return plain_dot(self, a, b, *more)

    def cast(self: Any, x: Any, kind: Any) -> Any:
        if x.dtype.scalar == tl.float32 and kind.scalar == tl.bfloat16:
            bits = torch.from_numpy(x.data).bfloat16().view(torch.int16)
            return handle(bits.numpy().view(np.uint16), tl.bfloat16)
        return plain_cast(self, x, kind)

    builder.create_dot, builder.cast_impl = dot, cast
