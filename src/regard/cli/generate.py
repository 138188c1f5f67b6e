"""`regard generate`: a model goes on with a text, shown as it is written.

Why: from a model's folder, or from nothing but the package, to its text in one line.

How: the options are the fields of `GenerationConfig`; the text goes to standard output as it comes,
what it took to standard error. Without --model the embedded language model writes.

Left out: talking in turns; --chat puts one message.
"""

# No `from __future__ import annotations` here: see `cli/__init__.py`.
import time
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from regard.cli.loading import few_threads, is_small, load_model
from regard.cli.printing import read_utf8, refusing, write_line, write_out

if TYPE_CHECKING:
    import typer
    from rich.console import Console

    from regard.generation import Stream

DEFAULT_MODEL = "embedded:lm"
LIVELY = {"temperature": 0.8, "top_p": 0.9, "seed": 0}
"""How the small model writes by default: its greedy text repeats itself."""
OWN = ("prompt", "model")
"""What is no keyword of `write_text`: all other options go on under their own names."""
GENERATE_HELP = """Continue a text with a language model, and show it as it is written.

Examples:

  regard generate "Once upon a time"

  regard generate --model ./smollm2 "The capital of France is"

  regard generate --model model.gguf --chat --temperature 0.7 --seed 1 "Write a haiku about rain."

  regard generate --model ./opus-mt-en-de --beams 4 "The cat sat on the mat."

  cat story.txt | regard generate --model ./llama --max-new-tokens 400 -

MODEL is a folder in Hugging Face's layout (config.json, model.safetensors, tokenizer.json), a GGUF
file, or a name on the Hugging Face hub, which is fetched once; without --model it is the small
language model inside the package, embedded:lm, which needs no network. A decoder continues the
text; an encoder–decoder reads it and writes another. Without --temperature decoding is greedy,
except for embedded:lm, which samples (temperature 0.8, top-p 0.9, seed 0), since its greedy text
repeats itself. The same command gives the same text.

The text goes to standard output; the numbers of tokens and seconds go to standard error.
"""


def write_text(
    model_name: str,
    prompt: str,
    notes: "Console",
    *,
    chat: bool = False,
    dtype: str | None = None,
    device: str | None = None,
    **options: Any,
) -> None:
    from regard.generation import GenerationConfig, generate, stream

    config = GenerationConfig(**options)
    model = load_model(model_name, notes, dtype=dtype, device=device)
    if chat:
        if model.tokenizer is None or model.tokenizer.chat_template is None:
            raise ValueError(f"{model_name} has no chat template; leave out --chat")
        prompt = model.tokenizer.apply_chat([{"role": "user", "content": prompt}])

    show = partial(write_out, kept="\n\t")
    with few_threads(is_small(model)):
        if config.num_beams > 1:
            start = time.perf_counter()
            show(generate(model, prompt, config=config, special=not chat) + "\n")
            write_line(notes, f"{time.perf_counter() - start:.2f} s, {config.num_beams} beams")
            return
        with stream(model, prompt, config=config, special=not chat) as pieces:
            try:
                for piece in pieces:
                    show(piece)
            finally:
                show("\n")
                write_line(notes, sum_up(pieces))


def sum_up(pieces: "Stream[str]") -> str:
    speed = max(pieces.n_new - 1, 0) / pieces.decode_seconds if pieces.n_new > 1 else 0.0
    return (
        f"{pieces.n_prompt} tokens read in {pieces.prefill_seconds:.2f} s, {pieces.n_new} written, "
        f"{speed:.1f} tokens/s; ended by {pieces.reason or 'interruption'}"
    )


def add_generate(app: "typer.Typer") -> None:
    from rich.console import Console
    from typer import Argument, Context, Option

    @app.command("generate", help=GENERATE_HELP)
    def generate_command(
        context: Context,
        prompt: Annotated[list[str], Argument(help='The text; "-" reads standard input.')],
        model: Annotated[
            str, Option("--model", "-m", help="Folder, GGUF file or hub name.")
        ] = DEFAULT_MODEL,
        max_new_tokens: Annotated[int, Option(help="The most tokens to write.")] = 128,
        temperature: Annotated[
            float | None, Option(help="Sampling temperature; 0 is greedy.")
        ] = None,
        top_k: Annotated[int | None, Option(help="Sample from the k likeliest tokens.")] = None,
        top_p: Annotated[
            float | None,
            Option(help="Sample from the likeliest tokens with this total probability."),
        ] = None,
        min_p: Annotated[
            float | None,
            Option(help="Sample from tokens with this part of the largest probability."),
        ] = None,
        repetition_penalty: Annotated[
            float, Option(help="Above 1: tokens of the text so far become less likely.")
        ] = 1.0,
        num_beams: Annotated[
            int, Option("--beams", help="Number of beams; above 1: beam search.")
        ] = 1,
        length_penalty: Annotated[
            float, Option(help="For beams: above 0 favours longer texts.")
        ] = 1.0,
        stop: Annotated[
            list[str] | None, Option(help="Stop before this text; may be repeated.")
        ] = None,
        seed: Annotated[int | None, Option(help="Seed of the sampling.")] = None,
        chat: Annotated[
            bool,
            Option(
                "--chat", help="Use the model's chat template, with the text as the user's message."
            ),
        ] = False,
        compiled: Annotated[
            bool, Option("--compile", help="Compile the decoding step: slow to start, then fast.")
        ] = False,
        dtype: Annotated[
            str | None, Option(help="float32, bfloat16 or float16; by default as stored.")
        ] = None,
        device: Annotated[
            str | None, Option(help="cpu, cuda, ...; by default a GPU, if there is one.")
        ] = None,
    ) -> None:
        notes = Console(stderr=True)
        options = {name: context.params[name] for name in context.params if name not in OWN}
        with refusing(notes):
            text = read_utf8(None) if prompt == ["-"] else " ".join(prompt)
            if not text.strip():
                raise ValueError('the prompt is empty; try: regard generate "Once upon a time"')
            plain = temperature is None and top_k is None and top_p is None and min_p is None
            if model == DEFAULT_MODEL and plain and num_beams == 1:
                options |= LIVELY | ({} if seed is None else {"seed": seed})
            write_text(model, text, notes, **options | {"stop": stop or ()})
