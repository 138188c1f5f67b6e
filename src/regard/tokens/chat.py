"""Chat templates: untrusted Jinja programs that turn messages into a prompt, run in a sandbox.

Why: every chat model needs its messages formatted in its own way, and ships a Jinja template for
it. The template comes with the weights, so it is only as trustworthy as their source.

How: Jinja's immutable sandbox, in which a template can neither access Python's internals nor change
its arguments. Ours raises on such an access instead of printing nothing, and limits the total of
loop iterations, macro calls, and what ranges and products create. The names that templates expect
are there: the messages, tools and documents, the special tokens, `raise_exception`, `strftime_now`,
`tojson` without HTML escapes, `break` and `continue`, and the `generation` block.

Left out: limits on memory and time. A template that doubles a text over and over can still fill the
memory, and one that sorts long lists over and over can run for long.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from jinja2.sandbox import ImmutableSandboxedEnvironment

# The limit for one rendering: loop iterations, macro calls, numbers in ranges, letters and entries
# that products create, all counted together.
WORK = 100_000


def render(template: str, messages: Sequence[Mapping[str, Any]], names: Mapping[str, Any]) -> str:
    """The prompt that the template makes of the messages; ValueError if it refuses or fails."""
    check_messages(messages)
    try:
        import jinja2
    except ImportError as error:
        what = "chat templates need the jinja2 package"
        raise ImportError(f"{what}: pip install 'regard[tokens]'") from error
    try:
        environment = _sandbox()
        tree = environment.parse(template)
        loops: list[Any] = [*tree.find_all((jinja2.nodes.For, jinja2.nodes.Macro))]
        for node in loops:
            # An attribute of the environment, not a name: a template cannot put its own there.
            count = jinja2.nodes.EnvironmentAttribute("spend")
            call = jinja2.nodes.Call(count, [], [], None, None)
            node.body.insert(0, jinja2.nodes.ExprStmt(call))
            node.set_lineno(node.lineno)
        tree.set_environment(environment)
        known = {"messages": [*messages], "raise_exception": _refuse, "strftime_now": _now}
        unasked = {"tools": None, "documents": None}  # templates test whether these are none
        return environment.from_string(tree).render({**known, **unasked, **names})
    except Exception as error:  # a template can raise whatever Python can
        said, todo = f"{error or type(error).__name__}", "write the prompt as text yourself"
        if isinstance(error, jinja2.exceptions.SecurityError):
            what = f"was stopped in its sandbox: {said}; do not use this template, {todo}"
        elif isinstance(error, jinja2.TemplateSyntaxError):
            line = f"line {error.lineno}: {error.message}"
            what = f"is not a Jinja template: {line}; fetch its file again, or {todo}"
        else:
            fields = "see which roles and fields it reads (tokenizer.chat_template)"
            what = f"refused these messages: {said}; {fields}"
        raise ValueError(f"the chat template {what}") from error


def check_messages(messages: Sequence[Mapping[str, Any]]) -> None:
    if isinstance(messages, (str, Mapping)) or not isinstance(messages, Sequence):
        what = f"messages is a {type(messages).__name__}"
        raise TypeError(f'{what}, expected a list of {{"role": ..., "content": ...}} objects')
    for n, message in enumerate(messages):
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise TypeError(
                f"messages[{n}] is {message!r:.99}, expected an object with a text under "
                '"role" (such as "user") and one under "content"'
            )


def _refuse(message: str) -> NoReturn:
    raise ValueError(message)


def _now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None, ensure_ascii: bool = False, **how: Any) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii, **how)


def _sandbox() -> ImmutableSandboxedEnvironment:
    """A sandbox for one rendering, as it counts work. Its classes are here as they need jinja2."""
    from jinja2 import nodes
    from jinja2.exceptions import SecurityError
    from jinja2.ext import Extension, loopcontrols
    from jinja2.parser import Parser
    from jinja2.runtime import Context, Undefined
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class GenerationBlock(Extension):
        """`{% generation %}` marks what the model wrote; it does not change the text."""

        tags = {"generation"}  # noqa: RUF012 (Jinja reads it from the class)

        def parse(self, parser: Parser) -> list[nodes.Node]:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Sandbox(ImmutableSandboxedEnvironment):
        intercepted_binops = frozenset({"*", "**"})
        left = WORK

        def spend(self, work: int = 1) -> None:
            self.left -= work
            if self.left < 0:
                raise SecurityError(f"it does more than {WORK:,} turns of its loops")

        def unsafe_undefined(self, obj: Any, attribute: str) -> Undefined:
            kind = type(obj).__name__
            raise SecurityError(f"it reaches for {attribute!r} of a {kind}, which is out of bounds")

        def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
            if operator == "**" and not (abs(left) <= WORK and abs(right) <= 8):
                raise SecurityError("it takes a power beyond what a prompt can need")
            for one, other in ((left, right), (right, left)):
                if hasattr(one, "__len__"):
                    self.spend(len(one) * max(0, int(other)))
            return super().call_binop(context, operator, left, right)

    box = Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols])

    def counted_range(*bounds: int) -> range:
        box.spend(len(range(*bounds)))
        return range(*bounds)

    box.globals["range"] = counted_range
    box.filters["tojson"] = _to_json
    return box
