"""The peak memory of a call, beyond what was allocated before it.

How: on a GPU torch's allocator tracks the peak. On a CPU torch's profiler records every allocation
and release by torch, also inside operations, and the peak is the largest running sum.

Left out: what other libraries allocate by themselves, which the profiler does not see.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile


def measure_peak(call: Callable[[], object], device: torch.device) -> int:
    """Measure the peak in bytes, including what the call returns."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        torch.cuda.reset_peak_memory_stats(device)
        call()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    if device.type != "cpu":
        raise ValueError(f"peak memory is measured on CUDA devices and CPUs, not on {device.type}")
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else the profiler prints that it starts
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    taken = [event for event in events if event["name"] == "[memory]"]
    total = peak = 0
    for event in sorted(taken, key=lambda event: float(event["ts"])):
        total += int(event["args"]["Bytes"])
        peak = max(peak, total)
    return peak
