"""The form of an answer that must call a tool: the grammar of the calls, in the form of the model.

Two forms are served, which are JSON: calls between `<tool_call>` tags, and Llama's objects.
"""

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jaxflow.request import Amount, InvalidRequest, StructuredOutputsParams
from jaxflow.structured.compiler import JSON_RULES
from jaxflow.text.tool_call_forms import FORMS
from jaxflow.text.tool_calls import Form
from serving.http.schema import ChatRequest, NamedTool, Tool

_DEFINITIONS = ("$defs", "definitions")
_HERMES, _LLAMA = FORMS["hermes"], FORMS["llama3_json"]


def is_forced(request: ChatRequest) -> bool:
    """Return True if the answer must call a tool."""
    return request.tool_choice not in (None, "none", "auto")


def form_of_calls(
    request: ChatRequest, form: Form | None, special_texts: Collection[str]
) -> StructuredOutputsParams:
    """Return the form of an answer that must call a tool.

    Args:
      request: its `tool_choice` is required, or names a tool.
      form: of the calls of the model; None for harmony.
      special_texts: texts of the tokenizer's special tokens.

    Raises:
      InvalidRequest: no tool, an unknown tool, or a form of calls that no grammar describes.
    """
    choice, tools = request.tool_choice, request.tools or ()
    if isinstance(choice, NamedTool):
        name = choice.function.name
        tools = [tool for tool in tools if tool.function.name == name]
        if not tools:
            raise InvalidRequest("tool_choice.function.name", name, "the name of a tool of the request")
    if not tools:
        raise InvalidRequest("tool_choice", Amount(repr(choice)), "auto, none or null without tools")
    if form not in (_HERMES, _LLAMA):
        accepted = "auto, none or null: a call of this model's form cannot be forced"
        raise InvalidRequest("tool_choice", Amount("a forced call"), accepted)
    one = isinstance(choice, NamedTool) or request.parallel_tool_calls is False
    return StructuredOutputsParams(grammar=_grammar(tools, form is _LLAMA, one, special_texts))


def _grammar(tools: Sequence[Tool], llama: bool, one: bool, special_texts: Collection[str]) -> str:
    """Return the grammar of one call or several. Raises: InvalidRequest."""
    arguments = "parameters" if llama else "arguments"
    start = "" if llama else f"{_mark('<tool_call>', special_texts)} {_text(chr(10))} "
    end = "" if llama else f" {_text(chr(10))} {_mark('</tool_call>', special_texts)}"
    between = "; " if llama else "\n"
    bodies = [f"body_{number}" for number in range(len(tools))]
    rules = [
        f"start: call{'' if one else f' ({_text(between)} call)*'}",
        f"call: {start}({' | '.join(bodies)}){end}",
    ]
    for number, (body, tool) in enumerate(zip(bodies, tools, strict=True)):
        schema = _call_schema(tool, arguments, f"tools[{number}].function.parameters")
        rules.append(f"{body}: %json {json.dumps(schema)}")
    return "\n".join(rules) + "\n"


def _call_schema(tool: Tool, arguments: str, field: str) -> dict[str, Any]:
    """Return the schema of a call. Raises: InvalidRequest for a reference that the call would change."""
    parameters = {"type": "object", **(tool.function.parameters or {})}
    for reference in _references(parameters):
        if not any(str(reference).startswith(f"#/{name}/") for name in _DEFINITIONS):
            raise InvalidRequest(f"{field}.$ref", str(reference), "a reference to $defs or definitions")
    shared = {name: parameters.pop(name) for name in _DEFINITIONS if name in parameters}
    return {
        "type": "object",
        "properties": {"name": {"const": tool.function.name}, arguments: parameters},
        "required": ["name", arguments],
        "additionalProperties": False,
        "x-guidance": JSON_RULES,
        **shared,
    }


def _references(schema: Any) -> list[Any]:
    """Return the values of `$ref` in a schema."""
    found, left = [], [schema]
    while left:
        value = left.pop()
        if isinstance(value, Mapping):
            found += [value["$ref"]] if isinstance(value.get("$ref"), str) else []
            left += value.values()
        elif isinstance(value, list):
            left += value
    return found


def _text(text: str) -> str:
    return json.dumps(text)


def _mark(text: str, special_texts: Collection[str]) -> str:
    """Return a mark in a grammar: the special token of this text, or the text."""
    return text if text in special_texts else _text(text)
