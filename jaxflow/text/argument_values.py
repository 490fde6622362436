"""The values of a tool's arguments that a model wrote as bare text, as the tool's JSON schema types them."""

import json
import re
from typing import Any

MAX_SCHEMAS = 256  # schemas that are read for the types of one argument

_ALIASES = {
    **{"str": "string", "text": "string", "int": "integer", "float": "number", "double": "number"},
    **{"bool": "boolean", "dict": "object", "map": "object", "list": "array", "tuple": "array"},
}
_TYPES = frozenset(("string", "integer", "number", "boolean", "null", "object", "array"))
# A string that does not end is a match, too. So every character is looked at once.
_PYTHON = re.compile(
    r"""'(?:[^'\\]|\\.)*(?:'|\\?\Z)|"(?:[^"\\]|\\.)*(?:"|\\?\Z)|\b(?:True|False|None)\b""", re.DOTALL
)
_CONSTANTS = {"True": "true", "False": "false", "None": "null"}

Types = frozenset[str]
ANY: Types = frozenset()
STRING: Types = frozenset(("string",))


class ArgumentTypes:
    """The JSON types that a tool accepts for its arguments. `parameters`: their JSON schema."""

    def __init__(self, parameters: Any):
        self._root = parameters if isinstance(parameters, dict) else {}
        properties = self._root.get("properties")
        self._properties = properties if isinstance(properties, dict) else {}
        self._known: dict[str | None, Types] = {}

    def of(self, name: str) -> Types:
        """Return the types of an argument, or `ANY`."""
        key = name if name in self._properties else None
        if key not in self._known:
            schema = self._root.get("additionalProperties") if key is None else self._properties[key]
            self._known[key] = _Schemas(self._root).types(schema)
        return self._known[key]


def json_text(text: str, types: Types) -> str:
    """Return the JSON of a value that a model wrote as bare text.

    A text that is the JSON of an accepted type is this value. `True`, `None` and lists as Python writes them
    are read where their type is accepted. Any other text is a string.
    """
    if types != STRING:
        found = text.strip()
        for candidate in (found, _from_python(found) if types else found):
            kind = _kind(candidate)
            if kind and (not types or kind in types or (kind == "integer" and "number" in types)):
                return candidate
    return json.dumps(text, ensure_ascii=False)


def strict_json(text: str) -> Any:
    """Return the value of a JSON text. Raises: ValueError, for NaN and infinity, too; RecursionError."""
    return json.loads(text, parse_constant=_no_constant)


def _kind(text: str) -> str:
    """Return the type of a JSON text, or "" for other texts and for strings, which are written bare."""
    try:
        value = strict_json(text)
    except (ValueError, RecursionError):
        return ""
    return "" if isinstance(value, str) else _type(value)


def _type(value: Any) -> str:
    if isinstance(value, bool):
        return "boolean"
    if isinstance(value, float):
        return "integer" if value.is_integer() else "number"
    kinds = {str: "string", int: "integer", dict: "object", list: "array"}
    return kinds.get(type(value), "null")


def _from_python(text: str) -> str:
    """Return a text with the strings and constants of Python as those of JSON."""

    def converted(found: re.Match[str]) -> str:
        part = found[0]
        if part[0] != "'":
            return _CONSTANTS.get(part, part)
        inner = re.sub(r'\\(.)|(")', lambda c: "'" if c[1] == "'" else '\\"' if c[2] else c[0], part[1:-1])
        return f'"{inner}"'

    return _PYTHON.sub(converted, text)


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON number")


class _Schemas:
    """The schemas within one root. Each reference is followed once."""

    def __init__(self, root: dict[str, Any]):
        self._root = root
        self._followed: set[str] = set()
        self._left = MAX_SCHEMAS

    def types(self, schema: Any) -> Types:
        """Return the types that a schema accepts."""
        self._left -= 1
        if not isinstance(schema, dict) or self._left < 0:
            return ANY
        found = self._own(schema)
        return found | {"null"} if found and schema.get("nullable") is True else found

    def _own(self, schema: dict[str, Any]) -> Types:
        named = schema.get("type")
        if named is not None:
            names = named if isinstance(named, list) else [named]
            given = [_ALIASES.get(n, n) for n in (str(name).lower() for name in names)]
            return frozenset(given) if _TYPES.issuperset(given) else ANY
        if isinstance(schema.get("enum"), list):
            return frozenset(map(_type, schema["enum"]))
        if "const" in schema:
            return frozenset((_type(schema["const"]),))
        reference = schema.get("$ref")
        if isinstance(reference, str) and reference not in self._followed:
            self._followed.add(reference)
            return self.types(self._found(reference))
        for key in ("anyOf", "oneOf"):
            if isinstance(schema.get(key), list):
                each = [self.types(option) for option in schema[key]]
                return frozenset().union(*each) if all(each) else ANY
        each = map(self.types, schema["allOf"]) if isinstance(schema.get("allOf"), list) else ()
        return next(filter(None, each), ANY)

    def _found(self, reference: str) -> Any:
        """Return the schema of a reference within the root, or None."""
        found: Any = self._root
        for step in reference.removeprefix("#").strip("/").split("/"):
            found = found.get(step) if isinstance(found, dict) else None
        return found if reference.startswith("#") else None
