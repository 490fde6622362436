"""Rendering of a Jinja template that is not trusted, in bounded time, memory and output.

A template reaches no Python attribute and changes no data. Every loop iteration and every call is a step, and
the steps are bounded. Every operation that makes a text or a list is charged for its size before it runs. So
no single operation holds Python's lock for long, and other threads continue.
"""

import datetime
import functools
import html
import itertools
import json
import re
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from typing import Any

import jinja2
from jinja2 import filters, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.runtime import Context, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from jaxflow.text.control_tokens import unescape_marks

MAX_TEMPLATE_CHARS = 500_000
MAX_STEPS = 1_000_000  # loop iterations and calls of one rendering
MAX_RENDERED_CHARS = 8_000_000
MAX_CPU_S = 0.8  # processor time of one rendering
BASE_SIZE = 4_000_000  # characters and list entries that a rendering may make, beside a multiple of its input
SIZE_PER_INPUT = 16
ENTRY = 8  # what an entry of a list counts, in characters
MAX_WIDTH = 1000  # of a format, an indent and a padded text
MAX_INT_BITS = 4096

_WIDTH = re.compile(r"\d{4,}|\*")


class ChatTemplateError(ValueError):
    """A conversation that cannot be rendered: malformed messages, or a template that fails or refuses them.

    Attributes:
      field: path of the wrong value in a chat request, as `messages[2].content`.
    """

    def __init__(self, message: str, field: str = "messages"):
        self.field = field
        super().__init__(message)


class _Budget:
    """What one rendering may still use."""

    def __init__(self, input_chars: int, marked: bool = False):
        self.marked = marked
        self.steps = MAX_STEPS
        self.size = BASE_SIZE + SIZE_PER_INPUT * input_chars
        self.longest = MAX_RENDERED_CHARS
        self.until_s = time.thread_time() + MAX_CPU_S
        self.sizes: dict[int, tuple[Any, int]] = {}  # by id: a container, kept alive, and its size as a text

    def step(self) -> None:
        self.steps -= 1
        if self.steps < 0:
            raise ChatTemplateError(f"the chat template does not end within {MAX_STEPS} steps")
        if not self.steps % 64 and time.thread_time() > self.until_s:
            raise ChatTemplateError(f"the chat template does not end within {MAX_CPU_S:g} s")

    def charge(self, size: int) -> None:
        self.size -= size
        if size > self.longest or self.size < 0:
            raise ChatTemplateError(f"the chat template makes texts and lists of {size} characters and more")

    def measure(self, value: Any) -> int:
        """Return about the length of `str(value)`. Each container is counted once and remembered."""
        if isinstance(value, str):
            return len(value)
        if isinstance(value, bool | float | None | Undefined):
            return 8
        if isinstance(value, int):
            if value.bit_length() > MAX_INT_BITS:
                raise ChatTemplateError(f"the chat template makes an integer of over {MAX_INT_BITS} bits")
            return 8 + value.bit_length() // 3
        if not isinstance(value, list | tuple | dict):
            raise ChatTemplateError(f"the chat template uses a {type(value).__name__} as data")
        known = self.sizes.get(id(value))
        if known is not None:
            return known[1]
        entries = itertools.chain.from_iterable(value.items()) if isinstance(value, dict) else value
        size = ENTRY
        for entry in entries:
            size += ENTRY + self.measure(entry)
        if size > self.longest:
            raise ChatTemplateError(f"the chat template makes a value of over {self.longest} characters")
        self.sizes[id(value)] = (value, size)
        return size


_budget: ContextVar[_Budget] = ContextVar("budget of the current rendering")


def render(source: str, variables: Mapping[str, Any], input_chars: int, marked: bool = False) -> str:
    """Return the text that a template makes of variables, which are JSON values.

    Args:
      input_chars: characters of the variables.
      marked: the texts have marks of `jaxflow.text.control_tokens`.

    Raises:
      ChatTemplateError: the template fails, refuses the messages, or uses too much.
    """
    _budget.set(_Budget(input_chars, marked))
    try:
        parts: list[str] = []
        size = 0
        for part in _compiled(source).generate(variables):
            _budget.get().step()
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
        raise ChatTemplateError(f"chat template: {error or type(error).__name__}"[:500]) from error


def check_template(source: str) -> None:
    """Raise ChatTemplateError for a template that does not compile."""
    _budget.set(_Budget(0))
    try:
        _compiled(source)
    except jinja2.TemplateSyntaxError as error:
        raise ChatTemplateError(f"chat template, line {error.lineno}: {error.message}") from error
    except RecursionError as error:
        raise ChatTemplateError("chat template: expressions are nested too deep") from error


def _counted(items: Iterable) -> Iterator:
    budget = _budget.get()
    for item in items:
        budget.step()
        yield item


def _made(value: Any) -> Any:
    """Return a value after it was charged for its entries and measured."""
    budget = _budget.get()
    if isinstance(value, str):
        budget.charge(len(value))
    elif isinstance(value, list | tuple | dict):
        budget.charge(ENTRY * len(value))
        budget.measure(value)
    return value


def _concat(*values: Any) -> str:
    budget = _budget.get()
    budget.step()
    budget.charge(sum(map(budget.measure, values)))
    return "".join(map(str, values))


def _slice(value: Any, start: Any, stop: Any, step: Any) -> Any:
    budget = _budget.get()
    budget.step()
    if isinstance(value, str | list | tuple):
        taken = len(range(*slice(start, stop, step).indices(len(value))))
        budget.charge(taken if isinstance(value, str) else ENTRY * taken)
    return _made_unless_text(value[start:stop:step])


def _made_unless_text(value: Any) -> Any:
    if not isinstance(value, str):
        _budget.get().measure(value)
    return value


class _Charged(NodeTransformer):
    """A transformation that puts a charged filter in the place of syntax that makes texts and lists."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.recursive:
            raise jinja2.TemplateSyntaxError("recursive loops are not supported", node.lineno)
        self.generic_visit(node)
        node.iter = _filter(node.iter, "jaxflow_counted")
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        first, *others = node.nodes
        return _filter(first, "jaxflow_concat", others)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        none = nodes.Const(None, lineno=node.lineno)
        cut = node.arg
        return _filter(node.node, "jaxflow_slice", [cut.start or none, cut.stop or none, cut.step or none])

    def _literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") == "store" else _filter(node, "jaxflow_made")

    def visit_Name(self, node: nodes.Name) -> nodes.Node:
        loaded = node.ctx == "load" and node.name in ("varargs", "kwargs")
        return _filter(node, "jaxflow_made") if loaded else node

    visit_List = visit_Dict = visit_Tuple = _literal


def _filter(node: Any, name: str, args: list[nodes.Expr] | None = None) -> nodes.Filter:
    return nodes.Filter(node, name, args or [], [], None, None, lineno=node.lineno)


def _length(value: Any) -> int:
    return len(value) if isinstance(value, str | list | tuple) else 0


def _width(value: Any) -> int:
    if not isinstance(value, int) or abs(value) > MAX_WIDTH:
        raise ChatTemplateError(f"the chat template uses a width of {value!r:.20}; accepted: to {MAX_WIDTH}")
    return value


def _check_format(text: str, values: Iterable[Any]) -> None:
    """Charge for a text made by a format. Raises: ChatTemplateError for a width of four digits or more."""
    if _WIDTH.search(text):
        raise ChatTemplateError(f"the chat template formats with a width; accepted: to {MAX_WIDTH - 1}")
    budget = _budget.get()
    fields = text.count("%") + text.count("{")
    largest = max(map(budget.measure, values), default=0)
    budget.charge(len(text) + fields * (MAX_WIDTH + largest))


# The methods of texts that a template may call, and the size of each result:
# (text, *arguments) -> characters.
_TEXT_METHODS: dict[str, Callable[..., int]] = {
    **dict.fromkeys(
        (
            *("upper", "lower", "title", "capitalize", "casefold", "swapcase", "strip", "lstrip", "rstrip"),
            *("removeprefix", "removesuffix", "partition", "rpartition"),
        ),
        lambda text, *_: len(text),
    ),
    **dict.fromkeys(
        (
            *("startswith", "endswith", "find", "rfind", "index", "rindex", "count", "isalpha", "isdigit"),
            *("isalnum", "isdecimal", "isnumeric", "isspace", "islower", "isupper", "istitle", "isascii"),
        ),
        lambda *_: 0,
    ),
    **dict.fromkeys(("center", "ljust", "rjust"), lambda text, width, *_: max(len(text), _width(width))),
    "zfill": lambda text, width: max(len(text), _width(width)),
    "expandtabs": lambda text, size=8: len(text) + text.count("\t") * _width(size),
    "replace": lambda text, old, new, *_: len(text) + text.count(old) * len(new),
    **dict.fromkeys(
        ("split", "rsplit"), lambda text, sep=None, most=-1: len(text) + ENTRY * _parts(text, sep, most)
    ),
    "splitlines": lambda text, *_: len(text) * (1 + ENTRY // 2),
}
_SCOPES = ("_loop_vars", "_block_vars")  # Jinja adds these arguments to calls within loops and blocks
_LIST_METHODS = ("count", "index", "copy")
_DICT_METHODS = ("items", "keys", "values", "get", "copy")


def _parts(text: str, separator: str | None, most: int) -> int:
    count = len(text) // 2 if separator is None else text.count(separator)
    return 8 * (min(count, most) if most >= 0 else count)


def _call_method(method: Any, args: tuple, named: dict[str, Any]) -> Any:
    """Call a method of a text, list or dict, if it is known and its result is not too large."""
    owner, name, budget = method.__self__, method.__name__, _budget.get()
    if isinstance(owner, str) and name == "join":
        parts = list(_counted(args[0]))
        budget.charge(sum(map(budget.measure, parts)) + len(owner) * len(parts))
        return owner.join(parts)
    if isinstance(owner, str) and name in _TEXT_METHODS:
        names = {"maxsplit": "most", "tabsize": "size"}
        relevant = {names.get(key, key): value for key, value in named.items() if key != "keepends"}
        budget.charge(_TEXT_METHODS[name](owner, *args, **relevant))
        return _made_unless_text(method(*args, **named)) if "split" in name else method(*args, **named)
    known = (
        _LIST_METHODS if isinstance(owner, list | tuple) else _DICT_METHODS if isinstance(owner, dict) else ()
    )
    if name not in known:
        raise ChatTemplateError(
            f"the chat template calls {type(owner).__name__}.{name}, which is not supported"
        )
    result = method(*args, **named)
    return _made(result) if name == "copy" else result


class _Sandbox(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with a budget."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        template = _Charged().visit(super()._parse(source, name, filename))
        template.set_environment(self)  # the new nodes have no environment
        return template

    @staticmethod
    def concat(parts: Iterable[str]) -> str:
        """Return the text of a block or macro."""
        parts = list(parts)
        _budget.get().charge(sum(map(len, parts)))
        return "".join(parts)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return a charged `str.format` or `str.format_map`."""
        wrapped = super().wrap_str_format(value)
        if wrapped is None:
            return None

        def checked(*args: Any, **named: Any) -> str:
            values = args[0].values() if value.__name__ == "format_map" else [*args, *named.values()]
            if re.search(r"\{[^{}]*\{", value.__self__.replace("{{", "")):
                raise ChatTemplateError("the chat template formats with a width from a value")
            _check_format(value.__self__, values)
            return wrapped(*args, **named)

        return checked

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function, as one step."""
        _budget.get().step()
        if isinstance(obj, types.BuiltinFunctionType | types.MethodWrapperType) and not isinstance(
            obj.__self__, types.ModuleType
        ):
            if not self.is_safe_callable(obj):
                raise jinja2.exceptions.SecurityError(f"{obj.__name__} is not safely callable")
            named = {name: value for name, value in kwargs.items() if name not in _SCOPES}
            return _call_method(obj, args, named)
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result may be much larger than its operands."""
        budget = _budget.get()
        budget.step()
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if numbers:
            if operator == "**" and not (abs(left) < 2**31 and abs(right) <= 64):
                raise ChatTemplateError("the chat template uses ** with operands that are not small numbers")
            result = super().call_binop(context, operator, left, right)
            budget.measure(result)
            return result
        if operator == "**":
            raise ChatTemplateError("the chat template uses ** with operands that are not small numbers")
        if operator == "*":
            times = next((v for v in (left, right) if isinstance(v, int)), 0)
            item = right if times is left else left
            size = _length(item) * (1 if isinstance(item, str) else ENTRY)
            if size * times > MAX_RENDERED_CHARS:
                raise ChatTemplateError(
                    f"the chat template repeats a value to more than {MAX_RENDERED_CHARS} characters"
                )
            budget.charge(max(0, size * times))
        elif operator == "%" and isinstance(left, str):
            values = (
                right if isinstance(right, tuple) else right.values() if isinstance(right, dict) else [right]
            )
            _check_format(left, values)
        elif operator == "+" and _length(left) + _length(right):
            unit = 1 if isinstance(left, str) else ENTRY
            budget.charge(unit * (_length(left) + _length(right)))
        return _made_unless_text(super().call_binop(context, operator, left, right))


class _Generation(Extension):
    """The tag `{% generation %}`, which marks text for training. The text is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Any) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> None:
    raise ChatTemplateError(f"the chat template refuses the messages: {message}"[:1000])


def _now(form: str) -> str:
    _check_format(form, [])
    return datetime.datetime.now().strftime(form)


def _dict(*args: Any, **named: Any) -> dict:
    return _made(dict(*args, **named))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: Any = None,
    sort_keys: bool = False,
) -> str:
    """Return `value` as JSON, without the HTML escapes of Jinja's own filter."""
    budget = _budget.get()
    width = 0 if indent is None else len(indent) if isinstance(indent, str) else _width(indent)
    between = sum(map(len, separators or ()))
    budget.charge(budget.measure(value) * (1 + _width(width + between)))
    text = json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
    return unescape_marks(text) if ensure_ascii and budget.marked else text


def _written(value: Any) -> Any:
    """Return a value that the template writes, after it was measured."""
    if not isinstance(value, str):
        _budget.get().charge(_budget.get().measure(value))
    return value


# Jinja's filters that templates may use. Results are charged; those in _LAZY are generators.
_FILTERS = (
    *("abs", "capitalize", "count", "d", "default", "dictsort", "first", "float", "int", "items", "last"),
    *(
        "length",
        "list",
        "lower",
        "max",
        "min",
        "reverse",
        "round",
        "sort",
        "string",
        "title",
        "trim",
        "unique",
    ),
    *("upper", "attr"),
)
_LAZY = ("map", "reject", "rejectattr", "select", "selectattr")


def _charged(function: Callable) -> Callable:
    """Return a filter that is a step, measures its input and is charged for its result."""

    @functools.wraps(function)
    def charged(*args: Any, **named: Any) -> Any:
        budget = _budget.get()
        budget.step()
        for value in args:
            if isinstance(value, str):
                budget.charge(len(value))
        return _made(function(*args, **named))

    return charged


def _lazy(function: Callable) -> Callable:
    @functools.wraps(function)
    def lazy(*args: Any, **named: Any) -> Iterator:
        _budget.get().step()
        return _counted(function(*args, **named))

    return lazy


def _string(value: Any) -> str:
    return str(_written(value))


def _join(value: Iterable, d: str = "", attribute: str | int | None = None) -> str:
    if attribute is not None:
        value = (item[attribute] for item in value)
    budget = _budget.get()
    parts = list(_counted(value))
    budget.charge(sum(map(budget.measure, parts)) + budget.measure(d) * len(parts))
    return str(d).join(map(str, parts))


def _replace(text: Any, old: str, new: str, count: int = -1) -> str:
    text = _string(text)
    _budget.get().charge(len(text) + text.count(old) * len(new))
    return text.replace(old, new, -1 if count is None else count)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    size = len(width) if isinstance(width, str) else _width(width)
    _budget.get().charge(len(text) + (text.count("\n") + 1) * size)
    return filters.do_indent(text, width, first, blank)


def _sum(values: Iterable, attribute: str | int | None = None, start: float = 0) -> float:
    for value in _counted(values):
        value = value if attribute is None else value[attribute]
        if not isinstance(value, int | float):
            raise ChatTemplateError("the chat template adds values that are not numbers")
        start += value
    return start


def _format(text: str, *args: Any, **named: Any) -> str:
    _check_format(text, [*args, *named.values()])
    return text % (named or args)


def _escape(value: Any) -> str:
    text = _string(value)
    _budget.get().charge(6 * len(text))
    return html.escape(text)


@functools.lru_cache(maxsize=16)
def _compiled(source: str) -> jinja2.Template:
    if len(source) > MAX_TEMPLATE_CHARS:
        raise ChatTemplateError(
            f"the chat template has {len(source)} characters; accepted: at most {MAX_TEMPLATE_CHARS}"
        )
    sandbox = _Sandbox(
        trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_written
    )
    own = sandbox.filters
    sandbox.filters = {
        **{name: _charged(own[name]) for name in _FILTERS},
        **{name: _lazy(own[name]) for name in _LAZY},
        "e": _escape,
        "escape": _escape,
        "format": _format,
        "indent": _indent,
        "join": _join,
        "replace": _replace,
        "safe": _string,
        "string": _string,
        "sum": _sum,
        "tojson": _tojson,
        "jaxflow_counted": _counted,
        "jaxflow_concat": _concat,
        "jaxflow_made": _made,
        "jaxflow_slice": _slice,
    }
    for name in ("lipsum", "cycler", "joiner"):
        del sandbox.globals[name]
    sandbox.globals["dict"] = _dict
    sandbox.globals["raise_exception"] = _refuse
    sandbox.globals["strftime_now"] = _now
    template = sandbox.from_string(source)
    # Each rendering copies the names. A copy of Jinja's chain of dicts costs more than a short template.
    template.globals = dict(template.globals)
    return template
