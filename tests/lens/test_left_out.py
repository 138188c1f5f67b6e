"""What fails in recording leaves out its place, is told once, and never reaches the model."""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from lens_subjects import SUBJECTS, draw, question
from tiny_checkpoints import CONFIGS
from torch import Tensor, nn

import regard.lens
from regard.lens.record import Record
from regard.lens.recorder import Recorder
from regard.lens.stitch_calls import Take
from regard.lens.watch import watch
from regard.models import Transformer, config_of

HOME = str(Path(regard.lens.__file__).parent)
GUARDS = {"Recorder.record", "Recorder.attempt", "Recorder.safely"}
"""Functions of the recorder in which an error is caught."""
BESIDE = {"name_of", "leave_out", "_tell", "__contains__", "add", "drop"}
"""What they call before and after."""
OUTSIDE = {
    # What runs in the model's forward and is not guarded: the guards themselves and what they call
    # before and after; who hears a call; and the wrappers, which call the model.
    *("record", "attempt", "safely", *BESIDE, "running"),
    *("enter", "leave", "tell_enter", "tell_leave", "recorders_of", "recorders_around"),
    *("__torch_function__", "hand_out", "recording", "implementation", "run", "run_recorded"),
    *("is_plain", "unseen", "asks", "<listcomp>", "<genexpr>"),
}


def transformer(name: str) -> Any:
    torch.manual_seed(5)
    return Transformer(config_of(CONFIGS[name])).eval()


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(20, 4, 37, batch_first=True)
        self.inner = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.inner(x)
        return out


def subjects() -> dict[str, tuple[Callable[[], Any], Callable[[Any], Any]]]:
    found: dict[str, Any] = {
        name: (make, lambda model, n=name: model(**question(n).given))
        for name, make in SUBJECTS.items()
    }
    for name in ("llama", "bert", "gemma2"):
        found[f"our {name}"] = (lambda n=name: transformer(n), lambda model: model(draw(1, 7) % 37))
    found["torch.nn"] = (lambda: Encoder().eval(), lambda model: model(torch.ones(1, 7, 20)))
    how = {"do_sample": False, "max_new_tokens": 3}
    for name, beams in (("llama", 1), ("gpt2", 1), ("t5", 2)):
        found[f"{name} writing"] = (SUBJECTS[name], partial(write, num_beams=beams, **how))
    return found


def write(model: Any, **how: Any) -> Tensor:
    ids = draw(1, 6)
    found: Tensor = model.generate(ids, attention_mask=torch.ones_like(ids), **how)
    return found


def floats(out: Any) -> list[Tensor]:
    if isinstance(out, Tensor):
        return [out]
    fields = out.items() if hasattr(out, "items") else vars(out).items()
    return [v for _, v in fields if isinstance(v, Tensor) and v.is_floating_point()]


class Injected(Exception):
    pass


class Fault:
    """Raises in the n-th call of a function of the lens; counts them, and those not guarded."""

    def __init__(self, at: int | None) -> None:
        self.at, self.n = at, 0
        self.unguarded: set[str] = set()

    def __call__(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(HOME) or "<gen" in code.co_name:
            return
        if not self.is_guarded(frame):
            self.unguarded.add(frame.f_code.co_name)
            return
        self.n += 1
        if self.n - 1 == self.at:
            raise Injected(frame.f_code.co_qualname)

    def is_guarded(self, frame: FrameType) -> bool:
        inner, outer = frame, frame.f_back
        while outer is not None:
            called = inner.f_code.co_name
            if outer.f_code.co_filename.startswith(HOME):
                if outer.f_code.co_qualname in GUARDS and called not in BESIDE:
                    return True
                if outer.f_code.co_name == "__torch_function__":
                    return called in ("follow", "concerns")
            inner, outer = outer, outer.f_back
        return False


def run(model: Any, call: Callable[[Any], Any], at: int | None) -> tuple[list[Tensor], Fault, Any]:
    fault = Fault(at)
    record = None
    with torch.no_grad(), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            with watch(model, row=0) as record:
                sys.settrace(fault)
                try:
                    out = call(model)
                finally:
                    sys.settrace(None)
        except ValueError as error:
            assert "could be recorded" in str(error) and "Injected" in str(error)
            return floats(out), fault, None
    notes = [str(one.message) for one in told if one.category is RuntimeWarning]
    left_out = [note for note in record.notes if "could not" in note]
    assert notes == (["; ".join(left_out)] if left_out else [])
    return floats(out), fault, record


def sizes(place: Any) -> tuple[Any, ...]:
    return place.name, place.kind, place.n_heads, place.n_queries, place.n_keys


@pytest.mark.parametrize("name", subjects())
def test_a_fault_anywhere_changes_no_output_and_ends_no_forward(name: str) -> None:
    make, call = subjects()[name]
    model = make()
    torch.manual_seed(1)
    with torch.no_grad():
        want = floats(call(model))
    torch.manual_seed(1)
    out, count, whole = run(model, call, None)
    assert count.n > 100 and count.unguarded <= OUTSIDE, count.unguarded - OUTSIDE
    assert all(torch.equal(a, b) for a, b in zip(out, want, strict=True))
    names = [place.name for place in whole.places]
    draws = random.Random(name)
    for at in (0, *(draws.randrange(count.n) for _ in range(5))):
        torch.manual_seed(1)
        out, _, record = run(model, call, at)
        assert all(torch.equal(a, b) for a, b in zip(out, want, strict=True))
        if record is not None:
            kept = [place.name for place in record.places]
            assert kept == [each for each in names if each in kept]
            ended = any("the rest of" in note for note in record.notes)
            assert ended or {*map(sizes, record.places)} <= {*map(sizes, whole.places)}
            assert any("Injected" in note for note in record.notes) or kept == names
    assert torch.overrides._get_current_function_mode_stack() == []


def fail_at(name: str) -> Any:
    add = Take.add

    def fails(take: Take, *given: Any) -> None:
        if take.name == name:
            raise IndexError("of no use")
        add(take, *given)

    return fails


def test_the_place_and_the_reason_are_told_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    model = SUBJECTS["llama"]()
    failing = "model.layers.1.self_attn"
    monkeypatch.setattr(Take, "add", fail_at(failing))
    with (
        pytest.warns(
            RuntimeWarning, match=f"{failing} could not be recorded .IndexError: of no"
        ) as told,
        torch.no_grad(),
        watch(model) as record,
    ):
        model.generate(draw(1, 5), max_new_tokens=3, do_sample=False)
    assert len(told) == 1 and record.notes == [str(told[0].message)]
    found = [place.name for place in record.places]
    assert found == [f"model.layers.{n}.self_attn" for n in range(len(found) + 1) if n != 1]
    assert {place.n_queries for place in record.places} == {7}
    record.save(tmp_path / "x.regard")
    assert Record.open(tmp_path / "x.regard").notes == record.notes


def test_a_warning_that_is_an_error_ends_the_block_and_no_forward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, done = SUBJECTS["llama"](), []
    monkeypatch.setattr(Take, "add", fail_at("model.layers.1.self_attn"))
    with (
        pytest.raises(RuntimeWarning, match=r"layers\.1"),
        torch.no_grad(),
        watch(model) as record,
    ):
        done.append(model(draw(1, 5)).logits)
    assert done and record.places


def test_what_fails_at_the_end_is_left_out_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, finish = SUBJECTS["llama"](), Take.finish

    def fails(take: Take) -> Any:
        if take.name == "model.layers.0.self_attn":
            raise MemoryError("too large")
        return finish(take)

    monkeypatch.setattr(Take, "finish", fails)
    with pytest.warns(RuntimeWarning, match="too large"), torch.no_grad(), watch(model) as record:
        model(draw(1, 5))
    assert record.places[0].name == "model.layers.1.self_attn"
    record.check()


def test_a_record_of_nothing_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    model, done = SUBJECTS["bert"](), []

    def fails(*given: Any) -> None:
        raise IndexError("of no use")

    monkeypatch.setattr(Take, "add", fails)
    with (
        pytest.raises(ValueError, match=r"nothing of BertModel could be recorded: .*of no use"),
        torch.no_grad(),
        watch(model),
    ):
        done.append(model(draw(1, 5)))
    assert done


def test_an_error_of_the_users_own_progress_is_theirs() -> None:
    model = SUBJECTS["bert"]()

    def stop(place: str, n: int) -> None:
        raise StopIteration(place)

    with pytest.raises((StopIteration, RuntimeError)), torch.no_grad(), watch(model, progress=stop):
        model(draw(1, 5))


def test_ids_that_cannot_be_read_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*given: Any) -> None:
        raise RuntimeError("no data")

    model = SUBJECTS["llama"]()
    monkeypatch.setattr(Recorder, "_read_inputs", fails)
    with (
        pytest.warns(RuntimeWarning, match="embed_tokens"),
        torch.no_grad(),
        watch(model) as record,
    ):
        model(draw(1, 5))
    assert record.ids(0) is None and record.places


def test_a_layer_that_gives_nan_is_left_out_and_the_record_can_be_kept(tmp_path: Path) -> None:
    model = SUBJECTS["bert"]()
    with torch.no_grad():
        model.encoder.layer[1].attention.self.query.weight.fill_(torch.nan)
        with pytest.warns(RuntimeWarning, match=r"layer\.1.*NaN"), watch(model, row=0) as record:
            model(draw(1, 5))
    assert record.places[0].name.startswith("encoder.layer.0")
    record.check().save(tmp_path / "x.regard")
