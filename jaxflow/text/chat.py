"""Rendering of a conversation as a prompt, with the chat template of the model.

Messages have the form of OpenAI's chat requests. They are not trusted: their form is checked, and their size
is bounded. `template_sandbox` runs the template. By default a control token in a user's text is plain text.
"""

import functools
import itertools
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jaxflow.config import ConfigError
from jaxflow.text.control_tokens import without_marks
from jaxflow.text.harmony import is_harmony
from jaxflow.text.template_sandbox import (
    MAX_RENDERED_CHARS,
    MAX_TEMPLATE_CHARS,
    ChatTemplateError,
    check_template,
    render,
)
from jaxflow.text.tokenizer import Tokenizer, check_text
from jaxflow.text.vocabulary import TokenizerError

MAX_MESSAGES = 10_000
MAX_CHAT_CHARS = MAX_RENDERED_CHARS // 2  # limit of all texts of a conversation together
MAX_VALUES = 200_000  # JSON values of a conversation with its tools
MAX_DEPTH = 32  # of nested JSON values
MAX_TOOLS = 128
MAX_TEMPLATE_KWARGS = 64
REASONING_NAMES = ("reasoning_content", "reasoning", "thinking")  # names of a message's reasoning

# Roles that a template may join to a control token, as <|user|>. Any other role must not be part of one.
KNOWN_ROLES = frozenset(
    (
        *("system", "developer", "user", "assistant", "tool", "model", "function", "ipython", "environment"),
        *("context", "document", "documents", "observation", "critic", "available_tools", "tool_response"),
    )
)
_ROLE = re.compile(r"[\w .\-]{1,64}")
_RESERVED = frozenset(
    (
        *("messages", "tools", "documents", "add_generation_prompt", "continue_final_message"),
        *(
            "raise_exception",
            "strftime_now",
            "range",
            "dict",
            "namespace",
            "loop",
            "self",
            "varargs",
            "kwargs",
        ),
        *("caller", "true", "false", "none", "True", "False", "None"),
    )
)
_JSON = (str, bool, int, float, type(None))


def render_chat(
    template: Tokenizer | str,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
) -> str:
    """Return the prompt of a conversation. The template writes the special tokens.

    Args:
      template: a tokenizer with a chat template, or the Jinja source.
      messages: `{"role": ..., "content": ...}` as in OpenAI's chat requests, oldest first. `content` is a
        text, a list of text parts, which are joined by line ends, or None. A message may have `name`,
        `tool_call_id`, `tool_calls` and one of `REASONING_NAMES`. The template
        gets the reasoning by the name that it reads.
      tools: descriptions of functions for the template.
      template_kwargs: further variables for the template, JSON values.
      add_generation_prompt: end the prompt with the start of an assistant message.
      continue_final_message: end the prompt within the last message, so that the model continues it.

    Raises:
      ChatTemplateError: there is no template, the messages are malformed or too large, or the template fails
        or refuses them.
    """
    source = template.chat_template if isinstance(template, Tokenizer) else template
    names = template.special_tokens if isinstance(template, Tokenizer) else {}
    given, size = _checked(source, messages, tools, template_kwargs, names)
    return _rendered(source, given, size, names, add_generation_prompt, continue_final_message)


def encode_chat(
    tokenizer: Tokenizer,
    messages: Sequence[Mapping[str, Any]],
    *,
    tools: Sequence[Mapping[str, Any]] | None = None,
    template_kwargs: Mapping[str, Any] | None = None,
    add_generation_prompt: bool = True,
    continue_final_message: bool = False,
    add_special_tokens: bool = False,
    parse_control_tokens: bool = False,
    max_tokens: int | None = None,
) -> list[int]:
    """Return the token ids of a conversation. Other arguments and errors: see `render_chat`.

    Args:
      add_special_tokens: add a BOS token if the vocabulary has this setting, beside those of the template.
      parse_control_tokens: a control token in a text of the messages becomes this token. By default it is
        plain text, and only the template writes control tokens.
      max_tokens: see `Tokenizer.check_length`; None for any length.

    Raises:
      TooManyTokens: see `Tokenizer.check_length`.
    """
    names, source = tokenizer.special_tokens, tokenizer.chat_template
    given, size = _checked(source, messages, tools, template_kwargs, names)
    if parse_control_tokens:
        text = _rendered(source, given, size, names, add_generation_prompt, continue_final_message)
        return tokenizer.encode(text, add_special_tokens, max_tokens=max_tokens)
    control = tokenizer.control_tokens
    roles = [message["role"] for message in given["messages"]]
    for i, role in enumerate(roles):
        token = None if role in KNOWN_ROLES else control.holding(role)
        if token is not None:
            raise ChatTemplateError(
                f"messages[{i}].role={role!r} is part of the control token {token!r}; accepted: system, "
                "user, assistant or another role",
                f"messages[{i}].role",
            )
    given = control.marked(given)
    for message, role in zip(given["messages"], roles, strict=True):
        message["role"] = role  # a template compares and joins roles
    text = _rendered(source, given, size, names, add_generation_prompt, continue_final_message, marked=True)
    if max_tokens is not None:
        tokenizer.check_length(without_marks(text), max_tokens)
    return control.encode(text, add_special_tokens)


def read_chat_template(path: str) -> str:
    """Return the chat template in a file. Raises: ConfigError, which names the flag and the file."""
    try:
        if Path(path).stat().st_size > 4 * MAX_TEMPLATE_CHARS:
            raise ConfigError("chat_template", path, f"a file of at most {MAX_TEMPLATE_CHARS} characters")
        source = Path(path).read_text(encoding="utf-8")
        check_template(source)
    except OSError as error:
        raise ConfigError("chat_template", path, f"a file that can be read ({error.strerror})") from error
    except (UnicodeDecodeError, ChatTemplateError) as error:
        raise ConfigError("chat_template", path, f"a Jinja template in UTF-8 ({error})") from error
    return source


def _rendered(
    source: str | None,
    given: dict[str, Any],
    size: int,
    names: Mapping[str, str],
    generation: bool,
    continued: bool,
    marked: bool = False,
) -> str:
    """Return the text that the template makes of checked variables."""
    assert source is not None
    messages, mark = given["messages"], ""
    if continued:
        # A marker that no message contains follows the last message. The prompt ends at the marker.
        mark = next(
            m
            for m in ("\ue000" * n for n in itertools.count(1))
            if not any(m in message["content"] for message in messages)
        )
        messages = [*messages[:-1], {**messages[-1], "content": messages[-1]["content"] + mark}]
    variables = {
        **names,
        "documents": None,
        **given,
        "messages": messages,
        "add_generation_prompt": generation and not continued,
    }
    text = render(source, variables, size, marked)
    if not mark:
        return text
    end = text.rfind(mark)
    if end < 0:
        raise ChatTemplateError("continue_final_message: the chat template leaves out the last message")
    return text[:end]


def _checked(
    source: str | None,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] | None,
    template_kwargs: Mapping[str, Any] | None,
    names: Mapping[str, str],
) -> tuple[dict[str, Any], int]:
    """Return the variables of a template, new JSON values, and the number of their characters."""
    if source is None:
        raise ChatTemplateError("the model has no chat template: send a text, not messages")
    if not 1 <= len(messages) <= MAX_MESSAGES:
        raise ChatTemplateError(f"messages: {len(messages)} messages; accepted: 1 to {MAX_MESSAGES}")
    called = any(message.get("tool_calls") for message in messages if isinstance(message, (dict, Mapping)))
    reader = _Reader(called and _joins_arguments(source, tuple(sorted(names.items()))))
    made = [reader.message(f"messages[{i}]", message) for i, message in enumerate(messages)]
    if "developer" not in source:  # OpenAI's newer name of the system role
        made = [{**m, "role": "system"} if m["role"] == "developer" else m for m in made]
    read = [name for name in REASONING_NAMES if re.search(rf"\b{name}\b", source)]
    made = [_with_reasoning(message, read, is_harmony(source)) for message in made]
    for name in template_kwargs or {}:
        if not (isinstance(name, str) and name.isidentifier()) or name in _RESERVED or name in names:
            raise ChatTemplateError(
                f"chat_template_kwargs: {name!r:.80} is not accepted: a name that no other setting has",
                "chat_template_kwargs",
            )
    for field, value, most in (
        ("tools", tools, MAX_TOOLS),
        ("chat_template_kwargs", template_kwargs, MAX_TEMPLATE_KWARGS),
    ):
        if value is not None and len(value) > most:
            raise ChatTemplateError(f"{field}: {len(value)} entries; accepted: at most {most}", field)
    variables = {
        **reader.json("chat_template_kwargs", dict(template_kwargs or {})),
        "messages": made,
        "tools": None if not tools else reader.json("tools", tools),
    }
    return variables, reader.chars


def _with_reasoning(message: dict[str, Any], names: Sequence[str], harmony: bool) -> dict[str, Any]:
    """Return a message with its reasoning under the names that the template reads, too.

    A harmony template refuses a message of calls with both content and reasoning, so the two are joined.
    """
    reasoning = message.get("reasoning_content")
    if reasoning is None:
        return message
    if harmony and message.get("tool_calls") and message["content"]:
        reasoning = "\n\n".join(filter(None, (reasoning, message["content"])))
        message = {**message, "content": ""}
    return {**message, **dict.fromkeys(names, reasoning)}


# A conversation with a call, whose arguments are `_ARGUMENTS` or the JSON of this.
_ARGUMENTS = {"argument": "value"}
_CALL_ID = "abcdefgh1"


@functools.lru_cache(maxsize=32)
def _joins_arguments(source: str, names: tuple[tuple[str, str], ...]) -> bool:
    """Return True if a template writes the arguments of calls as a text, so that they must be one.

    The templates of DeepSeek join them to other texts. Other templates need them as an object. A short
    conversation shows the difference: an object cannot be joined, or becomes no JSON.
    """

    def written(arguments: dict[str, str] | str) -> str | None:
        call = {"id": _CALL_ID, "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages = [
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "b", "name": "f", "tool_call_id": _CALL_ID},
        ]
        variables = {"messages": messages, "tools": None, "documents": None, "add_generation_prompt": True}
        try:
            return render(source, {**dict(names), **variables}, 100)
        except ChatTemplateError:
            return None

    as_object = written(_ARGUMENTS)
    if as_object is not None and str(_ARGUMENTS) not in as_object:
        return False
    return json.dumps(_ARGUMENTS) in (written(json.dumps(_ARGUMENTS)) or "")


class _Reader:
    """A reader of the JSON values of one conversation, with limits of their number and size.

    `text_arguments`: the arguments of calls become the text of a JSON object, otherwise an object.
    """

    def __init__(self, text_arguments: bool = False) -> None:
        self._text_arguments = text_arguments
        self.chars = 0
        self._values = 0

    def message(self, path: str, message: Any) -> dict[str, Any]:
        """Return a message as the template gets it. Raises: ChatTemplateError, which names the wrong part."""
        if not isinstance(message, (dict, Mapping)):  # a check of an abstract class alone costs much more
            raise ChatTemplateError(f"{path} is {_kind(message)}, not an object", path)
        role = self._text(f"{path}.role", message.get("role"))
        if not _ROLE.fullmatch(role):
            raise ChatTemplateError(
                f"{path}.role {'is empty' if not role else f'is {role!r:.80}'}; most templates accept "
                "system, user, assistant",
                f"{path}.role",
            )
        made: dict[str, Any] = {"role": role}
        calls = message.get("tool_calls") or None
        if calls is not None:
            made["tool_calls"] = self._calls(f"{path}.tool_calls", role, calls)
        given = [name for name in REASONING_NAMES if message.get(name) is not None]
        may_lack = role == "assistant" and (calls or given)
        made["content"] = self._content(f"{path}.content", message.get("content"), bool(may_lack))
        for key in ("name", "tool_call_id"):
            if message.get(key) is not None:
                made[key] = self._text(f"{path}.{key}", message[key])
        for name in sorted(given, key=lambda name: not message[name])[:1]:  # the first that has a text
            made["reasoning_content"] = self._text(f"{path}.{name}", message[name])
        return made

    def json(self, path: str, value: Any, depth: int = 0) -> Any:
        """Return a copy of a JSON value."""
        self._values += 1
        if self._values > MAX_VALUES or depth > MAX_DEPTH:
            accepted = f"at most {MAX_VALUES} values, nested at most {MAX_DEPTH} deep"
            raise ChatTemplateError(f"{path}: too many values; accepted: {accepted}", path)
        if isinstance(value, str):
            return self._text(path, value)
        if isinstance(value, (dict, Mapping)):
            return {self._text(path, k): self.json(path, v, depth + 1) for k, v in value.items()}
        if isinstance(value, list | tuple):
            return [self.json(path, item, depth + 1) for item in value]
        if not isinstance(value, _JSON):
            raise ChatTemplateError(f"{path} has {_kind(value)}, not a JSON value", path)
        return value

    def _text(self, path: str, value: Any) -> str:
        if not isinstance(value, str):
            raise ChatTemplateError(f"{path} is {_kind(value)}, not a text", path)
        try:
            check_text(value)
        except TokenizerError as error:
            raise ChatTemplateError(f"{path}: {error}", path) from error
        self.chars += len(value)
        if self.chars > MAX_CHAT_CHARS:
            raise ChatTemplateError(f"messages: over {MAX_CHAT_CHARS} characters; accepted: at most as many")
        return value

    def _content(self, path: str, content: Any, may_lack: bool) -> str:
        if content is None and may_lack:
            return ""
        if not isinstance(content, list | tuple):
            return self._text(path, content)
        self._values += len(content)
        if self._values > MAX_VALUES:
            raise ChatTemplateError(f"{path}: {len(content)} parts; accepted: at most {MAX_VALUES}", path)
        return "\n".join(self._part(f"{path}[{i}]", part) for i, part in enumerate(content))

    def _part(self, path: str, part: Any) -> str:
        if isinstance(part, str):
            return self._text(path, part)
        if not isinstance(part, Mapping):
            raise ChatTemplateError(f"{path} is {_kind(part)}, not a text part", path)
        kind = part.get("type")
        if kind not in ("text", "input_text", "output_text", "refusal"):
            raise ChatTemplateError(
                f"{path}.type={kind!r:.80} is not accepted: text, because this model reads text only",
                f"{path}.type",
            )
        key = "refusal" if kind == "refusal" else "text"
        return self._text(f"{path}.{key}", part.get(key))

    def _calls(self, path: str, role: str, calls: Any) -> list[dict[str, Any]]:
        if role != "assistant" or not isinstance(calls, list | tuple) or len(calls) > MAX_TOOLS:
            accepted = f"a list of at most {MAX_TOOLS} calls in an assistant message"
            raise ChatTemplateError(f"{path} is not accepted: {accepted}", path)
        return [self._call(f"{path}[{i}]", call) for i, call in enumerate(calls)]

    def _call(self, path: str, call: Any) -> dict[str, Any]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or call.get("type", "function") != "function":
            raise ChatTemplateError(f"{path} is not accepted: a call of type function", path)
        name = self._text(f"{path}.function.name", function.get("name"))
        given, at = function.get("arguments"), f"{path}.function.arguments"
        arguments = given
        if isinstance(arguments, str):
            self._text(at, arguments)
            try:
                arguments = json.loads(arguments or "{}", parse_constant=_no_constant)
            except (ValueError, RecursionError) as error:
                raise ChatTemplateError(f"{at} is not JSON: {error}"[:300], at) from error
        if not isinstance(arguments, Mapping | None):
            raise ChatTemplateError(f"{at} is {_kind(arguments)}, not an object", at)
        written: Any = self.json(at, arguments or {})
        if self._text_arguments:
            written = given if isinstance(given, str) and given else json.dumps(written, ensure_ascii=False)
        made = {"type": "function", "function": {"name": name, "arguments": written}}
        if call.get("id") is not None:
            made["id"] = self._text(f"{path}.id", call["id"])
        return made


def _kind(value: Any) -> str:
    """Return the type of a value in words. An absent value is null."""
    name = type(value).__name__
    return "null" if value is None else f"{'an' if name[0] in 'aeiou' else 'a'} {name}"


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")
