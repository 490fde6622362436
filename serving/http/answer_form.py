"""The form that a request asks for: `response_format`, `structured_outputs` or the fields `guided_*`."""

from typing import Any

from jaxflow.request import Amount, InvalidRequest, StructuredOutputsParams
from serving.http.schema import ChatRequest, CompletionRequest, ResponseFormat

_GUIDED = ("json", "regex", "choice", "grammar")


def form_of_answer(request: ChatRequest | CompletionRequest) -> tuple[StructuredOutputsParams | None, str]:
    """Return the form of a request's answer, and the path of its field; None and "" for free text.

    Raises:
      InvalidRequest: a wrong form, or several.
    """
    found: dict[str, dict[str, Any]] = {}  # the fields of `StructuredOutputsParams`, by the path of the form
    if request.response_format is not None:
        found |= _of_format(request.response_format)
    if (wanted := request.structured_outputs) is not None:
        given = {name: getattr(wanted, name) for name in wanted.__struct_fields__}
        given = {name: value for name, value in given.items() if value not in (None, False)}
        if len(given) != 1:
            shown = Amount(" and ".join(given) or "no form")
            raise InvalidRequest("structured_outputs", shown, "exactly one form")
        found |= {f"structured_outputs.{name}": {name: value} for name, value in given.items()}
    for name in _GUIDED:
        if (value := getattr(request, f"guided_{name}")) is not None:
            found[f"guided_{name}"] = {name: value}
    if len(found) > 1:
        *others, last = found
        raise InvalidRequest(last, Amount("a second form"), f"null beside {others[0]}")
    for path, given in found.items():
        try:
            return StructuredOutputsParams(**given), path
        except InvalidRequest as error:
            raise error.at(path) from None
    return None, ""


def _of_format(wanted: ResponseFormat) -> dict[str, dict[str, Any]]:
    """Return the form of a `response_format` by its path. Raises: InvalidRequest."""
    needs_schema = wanted.type == "json_schema"
    if needs_schema != (wanted.json_schema is not None):
        accepted = "an object" if needs_schema else "null"
        shown = Amount("null" if needs_schema else "an object")
        raise InvalidRequest("response_format.json_schema", shown, f"{accepted} with type {wanted.type}")
    if wanted.schema is not None and wanted.type != "json_object":
        shown = Amount("an object")
        raise InvalidRequest("response_format.schema", shown, f"null with type {wanted.type}")
    if wanted.json_schema is not None:
        return {"response_format.json_schema.schema": {"json": wanted.json_schema.schema}}
    if wanted.schema is not None:
        return {"response_format.schema": {"json": wanted.schema}}
    return {"response_format": {"json_object": True}} if wanted.type == "json_object" else {}
