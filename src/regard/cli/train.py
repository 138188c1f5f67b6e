"""`regard train`: a model from a text file, or from a file of sentence pairs.

The options of a command are the fields of a dataclass; `add_command` makes typer's signature of it.
"""

# No `from __future__ import annotations`: typer reads the types of the fields.
import inspect
from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args

from regard.cli.printing import refusing, write_line

if TYPE_CHECKING:
    import typer

    from regard.training.recipes import Recipe, TaskKind

TRAIN_HELP = """Train a model; the folder that comes of it opens with regard and transformers.

regard train lm book.txt --out run          a language model of a text

regard train mlm book.txt --out run         a masked language model, as BERT is; fills gaps

regard train translate pairs.tsv --out run  a translator; a source, a tab and its target a line

regard train lm book.txt --out run --resume goes on where a run was stopped, exactly

Ctrl-C saves and stops. On four devices put `torchrun --nproc-per-node 4 -m` before `regard train`,
and add --data-parallel 4.
"""
LM_HELP = """Train a language model on a text file, a folder of them, or JSONL.

Documents are separated by a line <|endoftext|>, or are the lines of a .jsonl file (field "text").
Without --valid the end of the text is held out. Files may be packed (.gz, .xz).

regard train lm book.txt --out run --set steps=2000 --set lr=0.001

regard train lm input.txt --out run --recipe shakespeare --device cuda
"""
MLM_HELP = """Train a masked language model, as BERT is, on a text file, a folder of them, or JSONL.

It learns to fill gaps: of every text 15% of the tokens are chosen, and it is asked what they were.
Of these 80% are hidden behind [MASK], 10% are another token, 10% stay; in each epoch they are
others. So it knows a word from both sides; it writes no text (regard train lm does).

regard train mlm book.txt --out run --set steps=2000

regard fill --model run "The [MASK] sat on the mat."

Without --recipe it is mlm-small, a BERT of 4 layers and width 256 with a WordPiece vocabulary in
lower case: minutes on two cores for a few megabytes. --set cutting=bpe keeps upper case, --size
takes a larger one, such as bert-base-uncased, --set context=256 longer texts.

The loss is the mean over gaps of held-out text, which are the same at each evaluation. Beside it
stands what a guess by frequency alone would have, "unigram": the loss begins there, and falls as
the model learns to read what is around a gap.

Documents are separated by a line <|endoftext|>, or are the lines of a .jsonl file (field "text").
Without --valid the end of the text is held out. Files may be packed (.gz, .xz).
"""
TRANSLATE_HELP = """Train a translator on sentence pairs: a .tsv or .jsonl file, or two files.

regard train translate pairs.tsv --out run --valid held_out.tsv

regard train translate train.en --target train.de --out run --recipe multi30k --device cuda
"""
DEFAULTS = {"lm": "lm-small", "masked": "mlm-small", "translate": "translate-small"}
"""The recipe of each kind of run, unless another is named."""


@dataclass(frozen=True)
class Named:
    """The help of an option, and its names where they are not the field's."""

    help: str
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Options:
    """What all commands take."""

    data: Annotated[Path, Named("The file, or the folder of files, to learn from.")]
    out: Annotated[Path, Named("The folder for the run and the model.", ("--out", "-o"))]
    valid: Annotated[Path | None, Named("A held-out file, to evaluate with.")] = None
    recipe: Annotated[str | None, Named("A whole run by name.")] = None
    size: Annotated[str | None, Named("A model by its named size, such as gpt2.")] = None
    settings: Annotated[
        list[str] | None, Named("key=value: a setting of the run, or model.key=value.", ("--set",))
    ] = None
    tokenizer: Annotated[Path | None, Named("A tokenizer's folder; else one is trained.")] = None
    resume: Annotated[bool, Named("Go on with the run in --out.", ("--resume",))] = False
    tensorboard: Annotated[bool, Named("Write TensorBoard's files too.", ("--tensorboard",))] = (
        False
    )
    device: Annotated[str | None, Named("cpu, cuda, ...; by default a GPU, if there is one.")] = (
        None
    )
    test: Annotated[list[Path] | None, Named("Score the model on this, at the end.")] = None
    data_parallel: Annotated[int, Named("Processes that share the rows of a batch.")] = 1
    tensor_parallel: Annotated[int, Named("Processes that share each layer.")] = 1


@dataclass(frozen=True, kw_only=True)
class TextOptions(Options):
    context_parallel: Annotated[int, Named("Processes that share each text.")] = 1


@dataclass(frozen=True, kw_only=True)
class PairOptions(Options):
    target: Annotated[Path | None, Named("The targets, line by line.")] = None
    valid_target: Annotated[Path | None, Named("The targets of --valid.")] = None
    test_target: Annotated[Path | None, Named("The targets of --test.")] = None
    languages: Annotated[str, Named("Source and target, for models that know both ways.")] = (
        "source,target"
    )


def add_train(app: "typer.Typer") -> None:
    import typer

    trainer = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(trainer, name="train", help=TRAIN_HELP)
    trainer.command("lm", help=LM_HELP)(make_command("lm", TextOptions))
    trainer.command("mlm", help=MLM_HELP)(make_command("masked", TextOptions))
    trainer.command("translate", help=TRANSLATE_HELP)(make_command("translate", PairOptions))


def make_command(task: "TaskKind", kind: type[Options]) -> Callable[..., None]:
    """A function that typer takes for one with the fields as its parameters."""
    import typer

    def command(**given: Any) -> None:
        start(task, kind(**given))

    parameters = []
    for one in fields(kind):
        value_type, named = get_args(one.type)
        make = typer.Argument if one.name == "data" else typer.Option
        info = make(*named.flags, help=named.help)
        annotation = Annotated[value_type, info]  # type: ignore[valid-type]
        default = inspect.Parameter.empty if one.default is MISSING else one.default
        by_name = inspect.Parameter.KEYWORD_ONLY
        parameter = inspect.Parameter(one.name, by_name, default=default, annotation=annotation)
        parameters.append(parameter)
    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.__annotations__ = {one.name: one.annotation for one in parameters}
    return command


def start(task: "TaskKind", options: Options) -> None:
    import typer
    from rich.console import Console

    notes = Console(stderr=True)
    with refusing(notes):
        report = launch(task, options)
    if report["ended"] == "interrupted":
        write_line(notes, f"go on with: the same command and --resume (--out {options.out})")
        raise typer.Exit(code=130)


def change(recipe: "Recipe", options: Options) -> "Recipe":
    """The recipe with what a command says besides."""
    from regard.training.config import split_settings
    from regard.training.recipes import sized

    recipe = recipe if options.size is None else sized(recipe, options.size)
    return recipe.changed(split_settings(options.settings or ()))


def launch(task: "TaskKind", options: Options) -> dict[str, Any]:
    import torch

    from regard.models.weights import find_device
    from regard.training.parallel import Layout, Mesh
    from regard.training.prepare import Files
    from regard.training.recipes import COMMANDS, named_recipe
    from regard.training.run import Tests, old_recipe, run

    paths: dict[str, Any] = {"data": options.data, "valid": options.valid}
    wanted = Layout(data=options.data_parallel, tensor=options.tensor_parallel)
    target = None
    if isinstance(options, PairOptions):
        paths |= {"target": options.target, "valid_target": options.valid_target}
        paths["languages"] = split_languages(options.languages)
        check_targets(options)
        target = options.test_target
    elif isinstance(options, TextOptions):
        wanted = replace(wanted, context=options.context_parallel)
    # A run goes on as it was told; what this command changes is changed in that.
    old = old_recipe(options.out) if options.resume else None
    if options.resume and old is None:
        raise ValueError(f"there is no run in {options.out} to go on with; leave --resume out")
    recipe = old or named_recipe(options.recipe or DEFAULTS[task])
    if recipe.task != task:
        what = f"the run in {options.out}" if old else f"the recipe {options.recipe!r}"
        raise ValueError(f"{what} is for {COMMANDS[recipe.task]}")
    recipe = change(recipe, options)
    if old and options.recipe and change(named_recipe(options.recipe), options) != recipe:
        what = f"the run in {options.out} goes on as it was told, which {options.recipe!r} is not"
        raise ValueError(f"{what}: leave --recipe out, or train into another folder")
    device = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        mesh = Mesh.alone(find_device(device)) if wanted.size == 1 else Mesh.launch(wanted, device)
    except RuntimeError as wrong:
        raise ValueError(str(wrong)) from wrong
    with mesh:
        return run(
            Files(**paths, tokenizer=options.tokenizer),
            recipe,
            options.out,
            tests=Tests(files=tuple(options.test or ()), target=target),
            mesh=mesh,
            resume=options.resume,
            tensorboard=options.tensorboard,
        )


def check_targets(options: PairOptions) -> None:
    """Refuse the targets of sources that are not there: they would not be read."""
    for name in ("valid", "test"):
        if getattr(options, f"{name}_target") is not None and not getattr(options, name):
            what = f"--{name}-target has the targets of --{name}"
            raise ValueError(f"{what}: give --{name} too, or leave it out")


def split_languages(words: str) -> tuple[str, str]:
    import typer

    names = [name.strip() for name in words.split(",")]
    if len(names) != 2 or not all(names) or names[0] == names[1]:
        raise typer.BadParameter(f"{words!r}; expected two, such as en,ja")
    return names[0], names[1]
