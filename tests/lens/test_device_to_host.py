"""What is copied from a GPU keeps nobody waiting for what never got under way.

That it arrives is judged on a GPU, in test_gpu.py.
"""

from __future__ import annotations

import threading
from contextlib import closing, nullcontext
from typing import Any

import pytest
import torch

from regard.lens import device_to_host


class Stream:
    """What stands for a stream of a GPU, and for an event on it: all is done at once."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any) -> None:
        pass

    def record(self, _: Any) -> None:
        pass

    def synchronize(self) -> None:
        pass


@pytest.fixture(autouse=True)
def failing(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """No GPU; for each in this list no memory can be pinned."""
    empty, found = torch.empty, list[int]()

    def pin(size: int, dtype: torch.dtype, pin_memory: bool) -> torch.Tensor:
        assert pin_memory
        if found and found.pop():
            raise RuntimeError("CUDA error: out of memory")
        return empty(size, dtype=dtype)

    monkeypatch.setattr(device_to_host, "is_large", lambda _: True)
    for name, what in {"Stream": Stream, "Event": Stream, "current_stream": Stream}.items():
        monkeypatch.setattr(torch.cuda, name, what)
    monkeypatch.setattr(torch.cuda, "stream", nullcontext)
    monkeypatch.setattr(torch, "empty", pin)
    return found


def test_what_is_copied_in_inference_mode_arrives() -> None:
    """The thread that lands it is in no such mode, and numbers made there may not be written to."""
    x = torch.arange(7.0)
    with closing(device_to_host.HostCopier()) as copier:
        with torch.inference_mode():
            copy = copier.copy({"x": x, "twice": 2 * x})
        found = copy.result()
    assert torch.equal(found["x"], x) and torch.equal(found["twice"], 2 * x)


def test_a_copy_for_which_no_memory_can_be_pinned_is_not_waited_for(
    failing: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(device_to_host, "BACKLOG", 2 * 28)
    failing += [1, 1]
    x, found = torch.arange(7.0), list[torch.Tensor]()
    with closing(device_to_host.HostCopier()) as copier:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of memory"):
                copier.copy({"x": x})
        # In a thread, as one that waits for ever must fail.
        waiting = threading.Thread(
            target=lambda: found.append(copier.copy({"x": x}).result()["x"]), daemon=True
        )
        waiting.start()
        waiting.join(20)
        assert len(found) == 1 and torch.equal(found[0], x)


def test_what_lies_in_one_buffer_is_copied_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nobody writes to it again; else it is copied on the device at once."""
    buffer = torch.arange(40, dtype=torch.uint8)
    values = {"b": buffer[32:40], "a": buffer[:32].view(torch.float32).view(2, 4)}
    want = {name: x.clone() for name, x in values.items()}
    joined = list[Any]()
    plain = device_to_host.join
    monkeypatch.setattr(device_to_host, "join", lambda x: (joined.append(x), plain(x))[1])
    with closing(device_to_host.HostCopier()) as copier:
        copies = [copier.copy(values, final=final) for final in (True, False)]
        assert len(joined) == 1
        # Not contiguous, of two buffers, and a small part of a large one.
        others = [
            {"a": buffer[:32].view(4, 8).T, "b": buffer[32:]},
            {"a": buffer[:32].clone(), "b": buffer[32:]},
            {"a": buffer[:8]},
        ]
        copies += [copier.copy(one, final=True) for one in others]
        assert len(joined) == 4
        wanted = [want, want, *({name: x.clone() for name, x in one.items()} for one in others)]
        buffer.zero_()
        for copy, expected in zip(copies[1:], wanted[1:], strict=True):
            found = copy.result()
            assert found.keys() == expected.keys()
            for name, x in expected.items():
                assert torch.equal(found[name], x) and found[name].dtype == x.dtype
        assert copies[0].result()["a"].shape == (2, 4)
