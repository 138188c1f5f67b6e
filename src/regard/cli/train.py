"""`regard train`: a model from a text file, or from a file of sentence pairs."""

# No `from __future__ import annotations`: typer reads the annotations of nested functions.
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from regard.cli.printing import make_printable, write_line

if TYPE_CHECKING:
    import typer

TRAIN_HELP = """Train a model; the folder that comes of it opens with regard and transformers.

regard train lm book.txt --out run          a language model of a text

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
COMMANDS = {
    "lm": "`regard train lm`",
    "masked": "`regard train lm --masked`",
    "translate": "`regard train translate`",
}
TRANSLATE_HELP = """Train a translator on sentence pairs: a .tsv or .jsonl file, or two files.

regard train translate pairs.tsv --out run --valid held_out.tsv

regard train translate train.en --target train.de --out run --recipe multi30k --device cuda
"""


def add_train(app: "typer.Typer") -> None:
    """`regard train lm` and `regard train translate`."""
    import typer

    trainer = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
    app.add_typer(trainer, name="train", help=TRAIN_HELP)
    Data = Annotated[Path, typer.Argument(help="The file, or the folder of files, to learn from.")]
    Out = Annotated[Path, typer.Option("--out", "-o", help="The folder for the run and the model.")]
    Valid = Annotated[Path | None, typer.Option(help="A held-out file, to evaluate with.")]
    Name = Annotated[str | None, typer.Option("--recipe", help="A whole run by name.")]
    Size = Annotated[str | None, typer.Option(help="A model by its named size, such as gpt2.")]
    Set = Annotated[
        list[str] | None,
        typer.Option("--set", help="key=value: a setting of the run, or model.key=value."),
    ]
    Tok = Annotated[Path | None, typer.Option(help="A tokenizer's folder; else one is trained.")]
    Resume = Annotated[bool, typer.Option("--resume", help="Go on with the run in --out.")]
    Board = Annotated[bool, typer.Option("--tensorboard", help="Write TensorBoard's files too.")]
    Device = Annotated[str | None, typer.Option(help="cpu, cuda, ...; else the best.")]
    Test = Annotated[list[Path] | None, typer.Option(help="Score the model on this, at the end.")]
    Data_n = Annotated[int, typer.Option(help="Processes that share the rows of a batch.")]
    Tensor_n = Annotated[int, typer.Option(help="Processes that share each layer.")]
    Context_n = Annotated[int, typer.Option(help="Processes that share each text.")]

    @trainer.command("lm", help=LM_HELP)
    def lm_command(
        data: Data,
        out: Out,
        valid: Valid = None,
        recipe: Name = None,
        size: Size = None,
        masked: Annotated[bool, typer.Option("--masked", help="Fill gaps, as BERT does.")] = False,
        settings: Set = None,
        tokenizer: Tok = None,
        resume: Resume = False,
        tensorboard: Board = False,
        device: Device = None,
        test: Test = None,
        data_parallel: Data_n = 1,
        tensor_parallel: Tensor_n = 1,
        context_parallel: Context_n = 1,
    ) -> None:
        """Train a language model."""
        start(
            Asked(
                recipe=recipe or ("masked-small" if masked else "lm-small"),
                kind="masked" if masked else "lm",
                files={"data": data, "valid": valid, "tokenizer": tokenizer},
                tests={"files": tuple(test or ())},
                layout=(data_parallel, tensor_parallel, context_parallel),
                out=out,
                size=size,
                settings=settings or (),
                resume=resume,
                tensorboard=tensorboard,
                device=device,
            )
        )

    @trainer.command("translate", help=TRANSLATE_HELP)
    def translate_command(
        data: Data,
        out: Out,
        target: Annotated[Path | None, typer.Option(help="The targets, line by line.")] = None,
        valid: Valid = None,
        valid_target: Annotated[Path | None, typer.Option(help="Their targets.")] = None,
        languages: Annotated[
            str, typer.Option(help="Source and target, for models that know both ways.")
        ] = "source,target",
        recipe: Name = None,
        size: Size = None,
        settings: Set = None,
        tokenizer: Tok = None,
        resume: Resume = False,
        tensorboard: Board = False,
        device: Device = None,
        test: Test = None,
        test_target: Annotated[Path | None, typer.Option(help="Their targets.")] = None,
        data_parallel: Data_n = 1,
        tensor_parallel: Tensor_n = 1,
    ) -> None:
        """Train a translator."""
        names = tuple(name.strip() for name in languages.split(","))
        if len(names) != 2 or not all(names) or names[0] == names[1]:
            raise typer.BadParameter(f"{languages!r}; expected two, such as en,ja")
        files = {"data": data, "target": target, "valid": valid, "valid_target": valid_target}
        start(
            Asked(
                recipe=recipe or "translate-small",
                kind="translate",
                files=files | {"tokenizer": tokenizer, "languages": names},
                tests={"files": tuple(test or ()), "target": test_target},
                layout=(data_parallel, tensor_parallel, 1),
                out=out,
                size=size,
                settings=settings or (),
                resume=resume,
                tensorboard=tensorboard,
                device=device,
            )
        )


@dataclass(frozen=True, kw_only=True)
class Asked:
    """What a command line asks for; `files` and `tests` are fields of `Files` and `Tests`."""

    recipe: str
    kind: str
    files: dict[str, Any]
    out: Path
    tests: dict[str, Any] = field(default_factory=dict)
    layout: tuple[int, int, int] = (1, 1, 1)
    """Processes that share rows, layers and texts."""
    size: str | None = None
    settings: Sequence[str] = ()
    resume: bool = False
    tensorboard: bool = False
    device: str | None = None


def start(asked: Asked) -> None:
    """Run, or say in one line why not."""
    import typer
    from rich.console import Console

    notes = Console(stderr=True)
    try:
        report = launch(asked)
    except (ValueError, TypeError, OSError, ImportError, ArithmeticError) as refusal:
        write_line(notes, make_printable(str(refusal), notes.encoding))
        raise typer.Exit(code=2) from None
    except KeyboardInterrupt:
        raise typer.Exit(code=130) from None
    if report["ended"] == "interrupted":
        write_line(notes, f"go on with: the same command and --resume (--out {asked.out})")
        raise typer.Exit(code=130)


def launch(asked: Asked) -> dict[str, Any]:
    """Make the recipe and the mesh, and run."""
    import torch

    from regard.models.weights import find_device
    from regard.training.config import split_settings
    from regard.training.parallel import Layout, Mesh
    from regard.training.prepare import Files
    from regard.training.recipes import named_recipe, sized
    from regard.training.run import Tests, old_recipe, run

    # A run goes on as it was told; what this command changes is changed in that.
    old = old_recipe(asked.out) if asked.resume else None
    recipe = old or named_recipe(asked.recipe)
    if recipe.task != asked.kind:
        what = f"the recipe {asked.recipe!r}" if old is None else f"the run in {asked.out}"
        raise ValueError(f"{what} is for {COMMANDS[recipe.task]}")
    if asked.size is not None:
        recipe = sized(recipe, asked.size)
    recipe = recipe.changed(split_settings(asked.settings))
    where = asked.device or ("cuda" if torch.cuda.is_available() else "cpu")
    data, tensor, context = asked.layout
    wanted = Layout(data=data, tensor=tensor, context=context)
    try:
        mesh = Mesh.alone(find_device(where)) if wanted.size == 1 else Mesh.launch(wanted, where)
    except RuntimeError as wrong:
        raise ValueError(str(wrong)) from wrong
    with mesh:
        return run(
            Files(**asked.files),
            recipe,
            asked.out,
            tests=Tests(**asked.tests),
            mesh=mesh,
            resume=asked.resume,
            tensorboard=asked.tensorboard,
        )
