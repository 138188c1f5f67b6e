"""kill -9 at any moment of a run: it goes on, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def test_a_run_killed_at_50_random_moments_ends_with_the_weights_of_one_left_in_peace(
    tmp_path: Path,
) -> None:
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    program = Path(__file__).with_name("kill_runs.py")
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path), "50"],
        capture_output=True,
        text=True,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["faults"] == [], done.stderr
    assert told["kills"] == 50
    # The kills were all over the run, and many inside the writing of a snapshot.
    places = told["places"]
    assert places["inside a snapshot"] >= 3, places
    assert places["between snapshots"] >= 5, places
    assert len(places) >= 3, places
    # The weights that are given out were the best ones, not the last: both had to survive.
    assert told["best_step"] == 4
