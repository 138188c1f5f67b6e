"""What every test starts from: the same seeds, and one thread for each worker.

`REGARD_TEST_THREADS=2` gives each of them two instead: sums are then made in other parts.

Torch is imported inside the fixtures, so that the process that only hands out tests to the
workers never loads it.
"""

import gc
import getpass
import os
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

SEED = 20170612

# Workers share the cores. None outside a worker, where torch takes what it finds.
THREADS = os.environ.get(
    "REGARD_TEST_THREADS", "1" if "PYTEST_XDIST_WORKER" in os.environ else None
)

if THREADS is not None:
    # Set before torch is loaded, and inherited by every subprocess.
    os.environ["OMP_NUM_THREADS"] = THREADS
    os.environ["MKL_NUM_THREADS"] = THREADS

if "ATEN_CPU_CAPABILITY" in os.environ:
    # Another CPU is imitated. Torch would take what it compiled for this one from its cache, and
    # compiled FlexAttention then gives wrong numbers.
    imitated = f"torchinductor-{getpass.getuser()}-{os.environ['ATEN_CPU_CAPABILITY']}"
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(Path(tempfile.gettempdir()) / imitated))

# Some virtual machines announce AMX and then refuse it: there a bfloat16 matrix product ends the
# process.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_FP16")

# Hypothesis draws the same examples in every run, so that a red test is red for everyone.
# `--hypothesis-profile explore` goes looking for new ones instead.
settings.register_profile("repeat", derandomize=True, deadline=None)
settings.register_profile("explore", deadline=None, max_examples=1000)
settings.register_profile("long", deadline=None, max_examples=1400)
settings.load_profile("repeat")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Modules and tests live to the end; to search them for garbage takes a second each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # libraries say at the end what nothing freed


@pytest.fixture(scope="session", autouse=True)
def threads_of_a_worker() -> None:
    import torch

    if THREADS is not None:
        torch.set_num_threads(int(THREADS))


@pytest.fixture(autouse=True)
def seeds() -> None:
    import numpy
    import torch

    random.seed(SEED)
    numpy.random.seed(SEED)
    torch.manual_seed(SEED)


@pytest.fixture(autouse=True)
def nothing_compiled_before(request: pytest.FixtureRequest) -> None:
    """Torch compiles one function a few times and then gives up; each test has all of them."""
    if "compil" in request.node.name:
        import torch

        torch.compiler.reset()


@pytest.fixture(autouse=True)
def torch_left_as_found() -> Iterator[None]:
    """A test that changes a global of torch for good would change its neighbours."""
    import torch

    before = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    yield
    after = (torch.get_default_dtype(), torch.get_num_threads(), torch.is_grad_enabled())
    assert after == before, f"the test left torch changed: {before} before, {after} after"


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`-m gpu` on a machine without one skips in words instead of failing inside CUDA."""
    if item.get_closest_marker("gpu") is not None:
        import torch

        if not torch.cuda.is_available():
            pytest.skip("no CUDA device that torch can use")
