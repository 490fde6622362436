"""Rendering of a conversation as a prompt, with the chat template of the model, in a Jinja sandbox.

Templates and messages are not trusted. A template reaches no Python attribute, changes no data, and runs a
bounded number of steps. The size of the messages is bounded.
"""

import datetime
import functools
import itertools
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment

from jaxflow.text.tokenizer import Tokenizer, check_text
from jaxflow.text.vocabulary import TokenizerError

MAX_MESSAGES = 10_000
MAX_CHAT_CHARS = 4_000_000  # limit of all messages together, and limit of a template
MAX_STEPS = 1_000_000  # loop iterations and calls of one rendering
MAX_RENDERED_CHARS = 2 * MAX_CHAT_CHARS


class ChatTemplateError(ValueError):
    """A conversation that cannot be rendered: malformed messages, or a template that fails or refuses them."""


def render_chat(
    template: Tokenizer | str,
    messages: Sequence[Mapping[str, str]],
    *,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Return the prompt of a conversation. The template writes the special tokens.

    Args:
      template: a tokenizer with a chat template, or the Jinja source.
      messages: `{"role": ..., "content": ...}`, oldest first.
      add_generation_prompt: end the prompt with the start of an assistant message.
      continue_final_message: end the prompt within the last message, so that the model continues it.

    Raises:
      ChatTemplateError: there is no template, the messages are malformed or too large, or the template fails
        or refuses them.
    """
    source = template.chat_template if isinstance(template, Tokenizer) else template
    names = template.special_tokens if isinstance(template, Tokenizer) else {}
    if source is None:
        raise ChatTemplateError("the model has no chat template: send a text, not messages")
    conversation = _checked(messages)
    mark = ""
    if continue_final_message:
        # A marker that no message contains follows the last message. The prompt ends at the marker.
        mark = next(
            m
            for m in ("\ue000" * n for n in itertools.count(1))
            if not any(m in message["content"] for message in conversation)
        )
        conversation[-1]["content"] += mark
    variables = {**names, "messages": conversation, "tools": None, "documents": None}
    text = _render(
        source, {**variables, "add_generation_prompt": add_generation_prompt and not continue_final_message}
    )
    if not mark:
        return text
    end = text.rfind(mark)
    if end < 0:
        raise ChatTemplateError("continue_final_message: the chat template leaves out the last message")
    return text[:end]


def encode_chat(tokenizer: Tokenizer, messages: Sequence[Mapping[str, str]], **how: bool) -> list[int]:
    """Return the token ids of `render_chat`. Raises: ChatTemplateError."""
    return tokenizer.encode(render_chat(tokenizer, messages, **how), add_special_tokens=False)


def _checked(messages: Sequence[Mapping[str, str]]) -> list[dict[str, str]]:
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise ChatTemplateError(f"messages: {len(messages)} messages; accepted: 1 to {MAX_MESSAGES}")
    for i, message in enumerate(messages):
        for key in ("role", "content"):
            value = message.get(key) if isinstance(message, Mapping) else None
            if not isinstance(value, str):
                raise ChatTemplateError(f"messages[{i}].{key} is a {type(value).__name__}, not a text")
            try:
                check_text(value)
            except TokenizerError as error:
                raise ChatTemplateError(f"messages[{i}].{key}: {error}") from error
        if not message["role"]:
            raise ChatTemplateError(
                f"messages[{i}].role is empty; most templates accept system, user, assistant"
            )
    size = sum(len(message["role"]) + len(message["content"]) for message in messages)
    if size > MAX_CHAT_CHARS:
        raise ChatTemplateError(f"messages: {size} characters; accepted: at most {MAX_CHAT_CHARS}")
    return [{"role": message["role"], "content": message["content"]} for message in messages]


def _render(source: str, variables: dict[str, Any]) -> str:
    _steps.set(itertools.count(1))
    try:
        parts: list[str] = []
        size = 0
        for part in _compiled(source).generate(variables):
            size += len(part)
            if size > MAX_RENDERED_CHARS:
                raise ChatTemplateError(f"the chat template writes more than {MAX_RENDERED_CHARS} characters")
            parts.append(part)
        return "".join(parts)
    except ChatTemplateError:
        raise
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from error
    except Exception as error:  # a template can raise any exception
        raise ChatTemplateError(f"chat template: {error or type(error).__name__}") from error


_steps: ContextVar[Iterator[int]] = ContextVar("steps of the current rendering")


def _step() -> None:
    if next(_steps.get()) > MAX_STEPS:
        raise ChatTemplateError(f"the chat template does not end within {MAX_STEPS} steps")


def _counted(items: Iterable) -> Iterator:
    for item in items:
        _step()
        yield item


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a limit of steps. Every loop iteration and every call is a step.

    Operators whose result could be huge are refused.
    """

    intercepted_binops = frozenset(["*", "**"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = super()._parse(source, name, filename)
        for loop in template.find_all(nodes.For):
            if loop.recursive:
                raise jinja2.TemplateSyntaxError("recursive loops are not supported", loop.lineno)
            loop.iter = nodes.Filter(loop.iter, "jaxflow_counted", [], [], None, None, lineno=loop.lineno)
        template.set_environment(self)  # the new nodes have no environment
        return template

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        _step()
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [abs(value) if isinstance(value, int | float) else len(value) for value in (left, right)]
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "**" and not (numbers and sizes[0] < 2**31 and sizes[1] <= 64):
            raise ChatTemplateError("the chat template uses ** with operands that are not small numbers")
        if operator == "*" and not numbers and math.prod(sizes) > MAX_RENDERED_CHARS:
            raise ChatTemplateError(
                f"the chat template repeats a value to more than {MAX_RENDERED_CHARS} characters"
            )
        return super().call_binop(context, operator, left, right)


class _Generation(Extension):
    """The tag `{% generation %}`, which marks text for training. The text is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise ChatTemplateError(f"the chat template refuses the messages: {message}")


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON, without the HTML escapes of Jinja's own filter."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    if len(source) > MAX_CHAT_CHARS:
        raise ChatTemplateError(
            f"the chat template has {len(source)} characters; accepted: at most {MAX_CHAT_CHARS}"
        )
    sandbox = _Sandbox(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    sandbox.filters["tojson"] = _tojson
    sandbox.filters["jaxflow_counted"] = _counted
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    return sandbox.from_string(source)
