"""`regard look` with models that are no family of ours: `transformers` runs them, watched."""

import functools
import json
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from commands import run_command
from lens_subjects import SUBJECTS, attentions, t5, text_model
from lens_words import SENTENCE
from rich.console import Console
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer as Backend
from tokenizers import models, normalizers, pre_tokenizers, processors

from regard.cli.hf_models import foreign_subject
from regard.cli.loading import load_subject
from regard.lens.record import Record
from regard.models import load
from regard.models.families import BY_MODEL_TYPE, UnknownFamily

VOCABULARY = "[UNK] <s> the animal didn t cross street because it was too tired ' ."
WORDS = VOCABULARY.split()


def write_tokenizer(folder: Path, max_length: int | None = None) -> None:
    """Words as tokens, a sign at the start; letters of other scripts are taken away."""
    backend = Backend(models.WordLevel({w: n for n, w in enumerate(WORDS)}, unk_token="[UNK]"))
    backend.normalizer = normalizers.Sequence(
        [normalizers.Replace("\u200b", ""), normalizers.Lowercase()]
    )
    backend.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    if max_length is None:
        backend.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", 1)]
        )
    hf.PreTrainedTokenizerFast(
        tokenizer_object=backend, unk_token="[UNK]", bos_token="<s>", model_max_length=max_length
    ).save_pretrained(folder)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of each kind, made once; tests that change one make their own copy."""
    made: dict[str, Path] = {}

    def make(name: str) -> Path:
        if name not in made:
            made[name] = tmp_path_factory.mktemp(name)
            SUBJECTS[name]().save_pretrained(made[name])
            write_tokenizer(made[name])
        return made[name]

    return make


@pytest.fixture
def copied(folders: Callable[[str], Path], tmp_path: Path) -> Path:
    """A folder of olmo2 of one's own."""
    root = tmp_path / "model"
    root.mkdir()
    for path in folders("olmo2").iterdir():
        (root / path.name).write_bytes(path.read_bytes())
    return root


@pytest.fixture(autouse=True)
def plain_surroundings(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("COLUMNS", "FORCE_COLOR", "NO_COLOR", "TTY_COMPATIBLE", "TERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def reach(self: Any, address: Any) -> None:
        pytest.fail(f"something was asked of {address}")

    monkeypatch.setattr(socket.socket, "connect", reach)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    capsys.readouterr()  # what saving the model had to say
    return run_command(capsys, *arguments)


def refused(capsys: pytest.CaptureFixture[str], model: Path | str, *more: str) -> str:
    """The one line that is said in place of a picture."""
    code, out, err = run(capsys, "look", SENTENCE, "--model", str(model), *more)
    assert (code, out) == (2, "") and err.count("\n") == 1, err
    return err


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("olmo2", "Olmo2ForCausalLM"),
        ("distilbert", "DistilBertModel"),
        ("gpt_oss", "GptOssForCausalLM"),
    ],
)
def test_look_reads_with_a_model_that_is_no_family_of_ours(
    name: str,
    kind: str,
    folders: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
) -> None:
    assert name not in BY_MODEL_TYPE
    folder, html, kept = folders(name), tmp_path / "page.html", tmp_path / "a.regard"
    with pytest.raises(UnknownFamily, match=f"model_type '{name}'"):
        load(folder)
    code, out, err = run(
        capsys, "look", SENTENCE, "-m", str(folder), "--html", str(html), "--save", str(kept)
    )
    assert code == 0, err
    layers = SUBJECTS[name]().config.num_hidden_layers
    assert out.startswith(f"{folder.name}: 15 tokens, {layers} attention layers, ")
    assert '"it" looks at' in out and "animal" in html.read_text(encoding="utf-8")
    said = f"transformers {hf.__version__} runs this model ({kind}), which is no family of regard's"
    assert err.splitlines()[0] == said and err.count("\n") == 3, err
    record = Record.open(kept)
    assert record.tokens[:4] == ["<s>", "The", "animal", "didn"] and record.spans is not None
    assert record.text == SENTENCE and record.model == folder.name
    found, ids = record.next_tokens(), record.ids(0)
    assert (found is not None) == kind.endswith("CausalLM")
    if found is not None and ids is not None:
        with torch.no_grad():
            chances = SUBJECTS[name]()(torch.tensor(ids)[None]).logits[0].double().softmax(-1)
        assert found.probs == pytest.approx(chances.topk(5).values.numpy(), abs=1e-5)
        assert record.vocabulary is not None and set(record.vocabulary) == set(found.ids.flat)


@pytest.mark.parametrize("name", ["olmo2", "distilbert", "gpt_oss"])
def test_every_weight_is_the_eager_one(
    name: str, folders: Callable[[str], Path], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    kept = tmp_path / "a.regard"
    given = ("--html", str(tmp_path / "x.html"), "--save", str(kept))
    assert run(capsys, "look", SENTENCE, "-m", str(folders(name)), *given)[0] == 0
    record = Record.open(kept)
    words = SENTENCE.lower().replace("'", " ' ").replace(".", " .").split()
    ids = [1, *(WORDS.index(word) for word in words)]
    model = SUBJECTS[name]()
    maps = attentions(model, {"input_ids": torch.tensor([ids])})
    assert len(record.places) == len(maps)
    for number, map_bhts in enumerate(maps):
        n = len(ids)
        for head, want in enumerate(map_bhts[0].double().numpy()):
            assert np.abs(record.map(number, head, size=(n, n)) - want).max() <= 1e-5


def test_the_package_is_left_as_it_was(folders: Callable[[str], Path]) -> None:
    log, folder = hf.utils.logging, str(folders("olmo2"))
    before = log.get_verbosity(), log.is_progress_bar_enabled()
    try:
        for level, bars in ((log.INFO, True), (log.WARNING, False)):
            log.set_verbosity(level)
            (log.enable_progress_bar if bars else log.disable_progress_bar)()
            subject = foreign_subject(folder, UnknownFamily("x"), device="cpu")
            subject.run(torch.tensor([subject.read(SENTENCE).ids]))
            assert (log.get_verbosity(), log.is_progress_bar_enabled()) == (level, bars)
    finally:
        log.set_verbosity(before[0])
        (log.enable_progress_bar if before[1] else log.disable_progress_bar)()


def test_the_package_is_asked_for_plain_tensors_of_this_machine_alone(
    folders: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: dict[str, dict[str, Any]] = {}
    for kind in (hf.AutoConfig, hf.AutoTokenizer, hf.AutoModelForCausalLM):
        load_theirs = kind.from_pretrained

        def ask(*args: Any, load_theirs: Any, kind: str, **given: Any) -> Any:
            asked.setdefault(kind, dict(given))  # the first is ours, others are its own
            return load_theirs(*args, **given)

        spy = functools.partial(ask, load_theirs=load_theirs, kind=kind.__name__)
        monkeypatch.setattr(kind, "from_pretrained", spy)
    foreign_subject(str(folders("olmo2")), UnknownFamily("x"), device="cpu")
    assert set(asked) == {"AutoConfig", "AutoTokenizer", "AutoModelForCausalLM"}
    assert asked["AutoModelForCausalLM"]["use_safetensors"] is True
    for given in asked.values():
        assert given["local_files_only"] is True and given["trust_remote_code"] is False


def test_without_the_package_the_line_names_the_families_and_the_way(
    folders: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = refused(capsys, folders("olmo2"))
    assert "model_type 'olmo2', which regard does not know" in said
    assert "bert, " in said and "llama, " in said and "pip install transformers" in said


def test_an_architecture_that_nobody_knows_is_told(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(copied, model_type="nonesuch")
    said = refused(capsys, copied)
    assert "model_type 'nonesuch'" in said and "Nor can transformers" in said


def change_config(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def test_code_in_a_folder_never_runs(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (copied / "code.py").write_text("raise SystemExit(99)")
    change_config(
        copied, model_type="nonesuch", auto_map={"AutoConfig": "code.C", "AutoModel": "code.M"}
    )
    assert "nonesuch" in refused(capsys, copied)


def test_a_config_cannot_name_a_kernel_from_elsewhere(
    copied: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    change_config(copied, attn_implementation="somebody/kernel")
    code, _, err = run(
        capsys, "look", SENTENCE, "-m", str(copied), "--html", str(tmp_path / "x.html")
    )
    assert code == 0, err
    model = load_subject(str(copied), Console(stderr=True), device="cpu").module
    assert model.config._attn_implementation == "sdpa"


def test_an_encoder_decoder_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    t5(hf.UMT5ForConditionalGeneration).save_pretrained(tmp_path / "umt5")
    write_tokenizer(tmp_path / "umt5")
    said = refused(capsys, tmp_path / "umt5")
    assert "is an encoder–decoder (umt5)" in said and "regard translate --look" in said


def test_pickled_weights_are_refused(copied: Path, capsys: pytest.CaptureFixture[str]) -> None:
    torch.save(load_file(copied / "model.safetensors"), copied / "pytorch_model.bin")
    (copied / "model.safetensors").unlink()
    assert "only as pickle" in refused(capsys, copied)


def test_a_tensor_that_is_missing_is_no_random_one(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rewrite(copied, lambda tensors: tensors.pop("model.layers.1.self_attn.q_proj.weight"))
    said = refused(capsys, copied)
    assert "lacks 1 of the tensors" in said and "layers.1.self_attn.q_proj.weight" in said


def rewrite(folder: Path, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


def test_weights_of_another_shape_are_refused(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shorten(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.0.mlp.up_proj.weight"
        tensors[name] = tensors[name][:5].clone()

    rewrite(copied, shorten)
    said = refused(capsys, copied)
    assert f"transformers cannot load {copied}: RuntimeError" in said


def test_a_folder_without_a_tokenizer_is_told(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path in copied.glob("*token*"):
        path.unlink()
    assert "has no tokenizer that transformers can open" in refused(capsys, copied)


def test_an_adapter_beside_the_model_is_refused(
    copied: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (copied / "adapter_config.json").write_text("{}")
    assert "an adapter" in refused(capsys, copied)


def test_too_many_tokens_and_none_are_told(
    copied: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    most = SUBJECTS["olmo2"]().config.max_position_embeddings
    text = "it " * most
    code, _, err = run(capsys, "look", text, "-m", str(copied))
    assert code == 2 and err.splitlines()[1:] == [
        f"the text has {most + 1} tokens, but {copied.name} takes {most}; give a shorter one, "
        "truncate it, or read it in windows (truncate, window)"
    ]
    page = tmp_path / "cut.html"
    code, out, err = run(capsys, "look", text, "-m", str(copied), "--truncate", "--html", str(page))
    assert code == 0 and f": {most:,} tokens, " in out
    assert f"the first {most:,} of {most + 1:,} tokens are read" in err
    code, out, err = run(capsys, "look", text, "-m", str(copied), "--window", "--html", str(page))
    assert code == 0 and f"read in windows of {most:,} tokens" in out
    code, _, err = run(capsys, "look", text, "-m", str(copied), "--window", "--truncate")
    assert code == 2 and "give one" in err
    write_tokenizer(copied, max_length=3)
    code, _, err = run(capsys, "look", "\u200b", "-m", str(copied))
    assert code == 2 and "makes no token of this text of 1 characters" in err
    code, out, _ = run(
        capsys, "look", SENTENCE, "-m", str(copied), "--html", str(tmp_path / "x.html")
    )
    assert code == 0 and ": 14 tokens, " in out  # what the tokenizer calls its longest cuts nothing


def test_what_a_model_cannot_be_run_on_is_one_line(
    folders: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: Any, **given: Any) -> None:
        raise IndexError("index out of\nrange in self")

    monkeypatch.setattr(hf.DistilBertModel, "forward", fail)
    code, _, err = run(capsys, "look", SENTENCE, "-m", str(folders("distilbert")))
    assert code == 2 and err.count("\n") == 2
    assert "(DistilBertModel) on 15 tokens: IndexError: index out of range in self" in err


def test_a_hub_name_is_fetched_by_our_rule_and_opened_from_disk(
    folders: Callable[[str], Path],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    asked: list[tuple[str, list[str]]] = []

    def give(name: str, *, revision: str | None, allow_patterns: list[str]) -> str:
        asked.append((name, allow_patterns))
        return str(folders("olmo2"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", give)
    html = tmp_path / "x.html"
    code, out, err = run(capsys, "look", SENTENCE, "-m", "owner/olmo", "--html", str(html))
    assert code == 0 and out.startswith("owner/olmo: 15 tokens"), err
    assert {name for name, _ in asked} == {"owner/olmo"}
    assert "*.model" in asked[-1][1] and "*.safetensors" in asked[-1][1]
    assert not any("bin" in pattern or pattern == "*" for _, one in asked for pattern in one)


def test_a_gguf_file_is_left_to_its_own_reader() -> None:
    with pytest.raises(UnknownFamily, match="why"):
        foreign_subject("model.gguf", UnknownFamily("why"), device="cpu")


def test_layers_that_share_weights_are_asked_for_by_their_numbers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"embedding_size": 12, "hidden_size": 36, "num_attention_heads": 4, "vocab_size": 83}
    config = hf.AlbertConfig(**sizes, intermediate_size=52, num_hidden_layers=12)
    folder = tmp_path / "albert"
    text_model(config, hf.AlbertModel).save_pretrained(folder)
    write_tokenizer(folder)
    kept = tmp_path / "x.regard"
    given = ("--model", str(folder), "--png", str(tmp_path / "x.png"), "--save", str(kept))
    code, out, err = run(capsys, "look", SENTENCE, *given, "--layer", "10", "--head", "1")
    assert code == 0 and "12 attention layers" in out, err
    assert [place.layer for place in Record.open(kept).places] == list(range(12))
    code, out, err = run(capsys, "look", SENTENCE, *given, "--layer", "12")
    assert (code, out) == (2, "") and err.endswith("--layer is 12; the model has layers 0 to 11\n")
