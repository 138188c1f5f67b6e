"""The `regard` command: look at attention, and let models write, from a terminal.

Why: the shortest way from an installed package to a picture of what a head looks at, and from a
model's folder to its text.
How: each command is a plain function that writes to a rich console; `build_app` hands them to
typer. Both packages belong to the extra `cli` and are imported where used, so that this module
always imports. Every word of a user or a model is made printable first: no text can steer the
terminal.
Left out: a model inside the package. Until regard carries one, `look` shows the three-word worked
example, and `generate` needs --model.

Letters: T queries, S keys, C model width.
"""

# No `from __future__ import annotations` here: typer reads the annotations of functions that are
# defined inside `build_app`, and could not resolve them from strings.
import io
import platform
import sys
import time
from collections.abc import Sequence
from functools import partial
from importlib import metadata
from typing import TYPE_CHECKING, Annotated, Any

from regard._version import __version__

if TYPE_CHECKING:
    import typer
    from rich.console import Console
    from rich.text import Text

# The worked example: one vector of width 4 for each of three words, used as Q, K and V alike.
EXAMPLE_TC = (
    (1.0, 0.5, 0.2, 0.1),
    (0.3, 1.0, 0.4, 0.2),
    (0.2, 0.3, 1.0, 0.5),
)
EXAMPLE_TEXT = "I love Transformers"

TOP_HELP = f"""Look at what attention looks at.

Start here:  regard look "{EXAMPLE_TEXT}"

Attention lets every word look at every other and take up what it finds. Each head does this in
its own way; its weights say how much of each word it took. `look` shows them.
"""
LOOK_HELP = f"""Show what each head looks at, as a table shaded by weight.

Example:  regard look "{EXAMPLE_TEXT}"

A row is the word that looks; the numbers along it say how its attention is shared out among all
words, and add up to 1.

regard does not carry a trained model yet. The numbers come from a small worked example, three
fixed vectors of width 4: seen first by one head, then split between two heads of width 2. The
words you give name the rows and columns and do not change the numbers.
"""
GENERATE_HELP = """Let a model go on with a text, and show it as it is written.

Examples:

  regard generate --model ./smollm2 "The capital of France is"

  regard generate --model model.gguf --chat --temperature 0.7 --seed 1 "Write a haiku about rain."

  regard generate --model ./opus-mt-en-de --beams 4 "The cat sat on the mat."

  cat story.txt | regard generate --model ./llama --max-new-tokens 400 -

MODEL is a folder in Hugging Face's layout (config.json, model.safetensors, tokenizer.json), a GGUF
file, or a name on the Hugging Face hub, which is fetched once. A decoder continues the text; a
translator reads it and writes its own. Without --temperature the likeliest token is taken each
time, and the same command gives the same text.

The text goes to standard output; what it took, in tokens and seconds, to standard error.
"""
DOCTOR_HELP = """Say what this machine has, and which backends answer.

Versions, devices, and for each backend whether it would take a plain causal call or why not. Send
the output along when you report a problem.
"""

NUMBER_CELLS = 6  # "0.3963"
BAR_CELLS = 10  # a weight of 1
GAP = "  "
# A full block, then what is left over in eighths of a cell.
EIGHTHS = ("", "▏", "▎", "▍", "▌", "▋", "▊", "▉")
PALE_RGB, DEEP_RGB = (236, 240, 248), (16, 62, 138)

# Joiners are invisible, but emoji and several scripts are spelled with them.
JOINERS = "\u200c\u200d"


class CannotLook(ValueError):
    """The text is not one that `regard look` can show; the message says what it can."""


def make_printable(text: str, encoding: str, kept: str = "") -> str:
    """Spell out each character that would steer the terminal, hide, reorder, or not encode.

    Those in `kept` stay as they are.
    """

    def spell(char: str) -> str:
        if char.isprintable() or char in JOINERS + kept:
            return char.encode(encoding, "backslashreplace").decode(encoding)
        return char.encode("unicode_escape").decode("ascii")

    return "".join(spell(char) for char in text)


def read_words(text: str) -> list[str]:
    """Split at whitespace into exactly as many words as the worked example has vectors."""
    words = text.split()
    if len(words) != len(EXAMPLE_TC):
        counted = f"{len(words):,} word" + ("s" if len(words) > 1 else "")
        came = f"The text has {counted}" if words else "The text is empty"
        raise CannotLook(
            f"{came}, and regard does not carry a trained model yet. What it can show now is a "
            f"worked example of exactly {len(EXAMPLE_TC)} words, separated by spaces. "
            f'Try: regard look "{EXAMPLE_TEXT}"'
        )
    return words


def weigh_example(n_heads: int) -> list[list[list[float]]]:
    """The attention weights of the worked example, split into `n_heads`: [head][query][key]."""
    import torch

    from regard.attention import Wants, observe

    x_tc = torch.tensor(EXAMPLE_TC)
    T, C = x_tc.shape
    # Split the width first, then move the heads forward: every head keeps all T words.
    x_bhtd = x_tc.view(1, T, n_heads, C // n_heads).transpose(1, 2)
    seen = observe(x_bhtd, x_bhtd, x_bhtd, wants=Wants(weights=True))
    assert seen.weights is not None
    weights: list[list[list[float]]] = seen.weights[0].tolist()
    return weights


def draw_bar(weight: float, blocks: bool) -> str:
    """A bar whose length is the weight, in eighths of a cell or, without block signs, in #."""
    if not blocks:
        return "#" * round(weight * BAR_CELLS)
    full, rest = divmod(round(weight * BAR_CELLS * 8), 8)
    return "█" * full + EIGHTHS[rest]


def shade(depth: float) -> str:
    """A rich style from pale (0) to deep (1) with letters that stay readable on it."""
    red, green, blue = (
        round(pale + (deep - pale) * depth) for pale, deep in zip(PALE_RGB, DEEP_RGB, strict=True)
    )
    letters = "white" if depth > 0.5 else "black"
    return f"{letters} on rgb({red},{green},{blue})"


def draw_head(
    weights_ts: Sequence[Sequence[float]], words: Sequence[str], console: "Console"
) -> list["Text"]:
    """One head as lines: a row for each looking word, a column for each word looked at."""
    from rich.cells import cell_len
    from rich.text import Text

    coloured = console.color_system is not None and not console.no_color
    blocks = console.encoding.lower().startswith("utf")
    with_bar = NUMBER_CELLS + 1 + BAR_CELLS
    room = console.width // (len(words) + 1) - len(GAP)
    column = min(max(room, NUMBER_CELLS), with_bar)

    def fit(label: str, cells: int) -> Text:
        text = Text(label)
        text.truncate(cells, overflow="ellipsis", pad=True)
        return text

    first = min(column, max(cell_len(word) for word in words))
    header = Text(GAP).join([Text(), fit("", first), *(fit(word, column) for word in words)])
    header.rstrip()
    lines = [header]
    largest = max(max(row) for row in weights_ts)
    for word, row in zip(words, weights_ts, strict=True):
        line = Text(GAP).join([Text(), fit(word, first)])
        for weight in row:
            number = f"{weight:.4f}"
            line.append(GAP)
            if coloured:
                line.append(number.center(column), shade(weight / largest))
            elif column == with_bar:
                line.append(fit(f"{number} {draw_bar(weight, blocks)}", column))
            else:
                line.append(fit(number, column))
        if not coloured:
            line.rstrip()
        lines.append(line)
    return lines


def write_line(console: "Console", line: "Text | str" = "") -> None:
    """Write a line as it is: not wrapped, and never read as markup, emoji codes or highlights."""
    from rich.text import Text

    console.print(line if isinstance(line, Text) else Text(line), soft_wrap=True)


def look(text: str, console: "Console") -> None:
    """Write what each head of the worked example looks at, under the words of `text`."""
    words = [make_printable(word, console.encoding) for word in read_words(text)]
    say = partial(write_line, console)
    say("A row is a word that looks, a column a word it looks at; each row adds up to 1.")
    for n_heads in (1, 2):
        width = len(EXAMPLE_TC[0]) // n_heads
        for head, weights_ts in enumerate(weigh_example(n_heads), start=1):
            say()
            say(f"head {head} of {n_heads}, width {width}")
            for line in draw_head(weights_ts, words, console):
                say(line)
    say()
    say("A worked example, not a trained model: three fixed vectors x, and Q = K = V = x.")
    say("Your words only name the rows and columns; any three give the same numbers.")


def write_text(
    model_name: str,
    prompt: str,
    console: "Console",
    notes: "Console",
    *,
    chat: bool = False,
    dtype: str | None = None,
    device: str | None = None,
    **options: Any,
) -> None:
    """Load the model, write what it generates to `console`, and what it took to `notes`."""
    import torch

    from regard.generation import GenerationConfig, generate, stream
    from regard.models import load

    config = GenerationConfig(**options)
    if dtype not in (None, "float32", "bfloat16", "float16"):
        raise ValueError(f"--dtype is {dtype!r}; expected float32, bfloat16 or float16")
    where = device or ("cuda" if torch.cuda.is_available() else "cpu")
    shown = make_printable(model_name, notes.encoding)
    with notes.status(f"loading {shown}"):
        model = load(
            model_name, dtype=None if dtype is None else getattr(torch, dtype), device=where
        )
    if chat:
        if model.tokenizer is None or model.tokenizer.chat_template is None:
            raise ValueError(f"{shown} has no chat template; leave out --chat")
        prompt = model.tokenizer.apply_chat([{"role": "user", "content": prompt}])

    def show(piece: str) -> None:
        text = make_printable(piece, console.encoding, kept="\n\t")
        console.file.write(text)
        console.file.flush()

    start = time.perf_counter()
    if config.num_beams > 1:
        show(generate(model, prompt, config=config, special=not chat) + "\n")
        write_line(notes, f"{time.perf_counter() - start:.2f} s, {config.num_beams} beams")
        return
    with stream(model, prompt, config=config, special=not chat) as pieces:
        try:
            for piece in pieces:
                show(piece)
        finally:
            show("\n")
            after = max(pieces.n_new - 1, 0) / pieces.decode_seconds if pieces.n_new > 1 else 0.0
            write_line(
                notes,
                f"{pieces.n_prompt} tokens read in {pieces.prefill_seconds:.2f} s, "
                f"{pieces.n_new} written, {after:.1f} tokens/s; "
                f"ended by {pieces.reason or 'interruption'}",
            )


def read_prompt(words: Sequence[str]) -> str:
    """The words of the command line as one text; "-" is standard input."""
    text = sys.stdin.read() if list(words) == ["-"] else " ".join(words)
    if not text.strip():
        raise ValueError('the prompt is empty; try: regard generate --model M "Once upon a time"')
    return text


def version_of(package: str) -> str:
    """The installed version of a package, or words that say it is not there."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def doctor(console: "Console") -> None:
    """Write the versions, the devices, and which backend answers a plain causal call on each."""
    import torch

    from regard.attention import Causal, explain

    say = partial(write_line, console)
    say(f"{'regard':<16} {__version__}")
    say(f"{'python':<16} {platform.python_version()} on {platform.system()} {platform.machine()}")
    known = ("torch", "numpy", "safetensors", "triton", "tokenizers", "huggingface_hub", "gguf")
    for package in (*known, "typer", "rich"):
        say(f"{package:<16} {version_of(package)}")
    say(f"{'cpu':<16} {torch.get_num_threads()} threads")
    devices = ["cpu"]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            devices.append(f"cuda:{index}")
            say(f"{devices[-1]:<16} {found.name}, {found.total_memory / 2**30:.0f} GiB")
    else:
        say(f"{'cuda':<16} none that torch can use")
    for device in devices:
        q_bhtd = torch.zeros(1, 2, 64, 32, device=device)
        say()
        say(f"backends on {device}, asked for a causal call in float32:")
        for line in str(explain(q_bhtd, q_bhtd, q_bhtd, mask=Causal())).splitlines():
            say(f"  {line}")


def build_app() -> "typer.Typer":
    """The command line itself; needs the extra `cli`."""
    import typer
    from rich.console import Console

    app = typer.Typer(
        name="regard",
        add_completion=False,
        no_args_is_help=True,
        pretty_exceptions_enable=False,
        rich_markup_mode=None,
    )

    def show_version(wanted: bool) -> None:
        if wanted:
            typer.echo(__version__)
            raise typer.Exit

    @app.callback(help=TOP_HELP)
    def top(
        version: Annotated[
            bool,
            typer.Option(
                "--version", callback=show_version, is_eager=True, help="Say the version and stop."
            ),
        ] = False,
    ) -> None:
        pass

    @app.command("look", help=LOOK_HELP)
    def look_command(
        text: Annotated[
            list[str], typer.Argument(help="Three words; for now, no more and no fewer.")
        ],
    ) -> None:
        try:
            look(" ".join(text), Console())
        except CannotLook as refusal:
            write_line(Console(stderr=True), str(refusal))
            raise typer.Exit(code=2) from None

    add_generate(app)

    @app.command("doctor", help=DOCTOR_HELP)
    def doctor_command() -> None:
        doctor(Console())

    return app


def add_generate(app: "typer.Typer") -> None:
    """`regard generate`, whose options are the fields of `GenerationConfig`."""
    import typer
    from rich.console import Console

    @app.command("generate", help=GENERATE_HELP)
    def generate_command(
        prompt: Annotated[
            list[str], typer.Argument(help='The text to go on with; "-" reads standard input.')
        ],
        model: Annotated[
            str | None, typer.Option("--model", "-m", help="Folder, GGUF file or hub name.")
        ] = None,
        max_new_tokens: Annotated[int, typer.Option(help="Write at most so many tokens.")] = 128,
        temperature: Annotated[
            float | None, typer.Option(help="Above 0: draw tokens; higher is wilder.")
        ] = None,
        top_k: Annotated[int | None, typer.Option(help="Draw among the k likeliest.")] = None,
        top_p: Annotated[
            float | None, typer.Option(help="Draw among the likeliest with this share in sum.")
        ] = None,
        min_p: Annotated[
            float | None, typer.Option(help="Draw among those with this part of the likeliest's.")
        ] = None,
        repetition_penalty: Annotated[
            float, typer.Option(help="Above 1: what was said becomes less likely.")
        ] = 1.0,
        beams: Annotated[int, typer.Option(help="Above 1: search so many texts at once.")] = 1,
        length_penalty: Annotated[
            float, typer.Option(help="Of beams: above 0 favours longer texts.")
        ] = 1.0,
        stop: Annotated[
            list[str] | None, typer.Option(help="End before this text; may be given again.")
        ] = None,
        seed: Annotated[int | None, typer.Option(help="The same seed, the same draws.")] = None,
        chat: Annotated[bool, typer.Option("--chat", help="Put it as a user's message.")] = False,
        compile_step: Annotated[
            bool, typer.Option("--compile", help="Compile the step: slow start, then fast.")
        ] = False,
        dtype: Annotated[
            str | None, typer.Option(help="float32, bfloat16 or float16; else as stored.")
        ] = None,
        device: Annotated[str | None, typer.Option(help="cpu, cuda, ...; else the best.")] = None,
    ) -> None:
        notes = Console(stderr=True)
        if model is None:
            write_line(
                notes,
                "regard does not carry a trained model yet: give --model a folder, a GGUF file, "
                "or the name of a model on the Hugging Face hub.",
            )
            raise typer.Exit(code=2)
        options: dict[str, Any] = {
            "max_new_tokens": max_new_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "min_p": min_p,
            "repetition_penalty": repetition_penalty,
            "num_beams": beams,
            "length_penalty": length_penalty,
            "stop": stop or (),
            "seed": seed,
            "compiled": compile_step,
        }
        try:
            text = read_prompt(prompt)
            write_text(
                model, text, Console(), notes, chat=chat, dtype=dtype, device=device, **options
            )
        except (ValueError, TypeError, OSError, ModuleNotFoundError) as refusal:
            write_line(notes, make_printable(str(refusal), notes.encoding))
            raise typer.Exit(code=2) from None
        except KeyboardInterrupt:
            raise typer.Exit(code=130) from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and leave with its exit code: 0 done, 2 not understood or refused."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A terminal that cannot show a sign gets its number instead of a traceback.
            stream.reconfigure(errors="backslashreplace")
    try:
        app = build_app()
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if package not in ("typer", "rich"):
            raise
        print(
            f"The regard command needs the package {package}, which is not installed: "
            "pip install 'regard[cli]'",
            file=sys.stderr,
        )
        raise SystemExit(1) from None
    app(args=None if arguments is None else list(arguments), prog_name="regard")
