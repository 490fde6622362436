"""Who may import whom: what BUILD declares, held against what the sources import.

BUILD is Bazel's syntax, which Python's parser reads. The laws, each a line of `violations` when it is broken:
every source has one owner; a target names only targets declared above it, so that there is no circle; a
source imports only its own target's sources and its target's direct deps, packages from an index included;
and sources do not import one another in a circle.
"""

import ast
import dataclasses
import functools
import graphlib
import importlib.metadata
import itertools
import re
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path

RULES = ("py_library", "py_binary")
PYPI = "@pypi//"
NOT_SOURCES = ("tests", "build", "dist")


@dataclasses.dataclass(frozen=True)
class Target:
    name: str
    srcs: frozenset[str]  # paths from the root
    deps: tuple[str, ...]  # ":target" or "@pypi//package"


def parse_build(root: Path) -> list[Target]:
    """The targets of root/BUILD, in their order. Raises ValueError for what is no literal rule or names no
    file.
    """
    targets = []
    for statement in ast.parse((root / "BUILD").read_text("utf-8")).body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if (
            not isinstance(call, ast.Call)
            or not isinstance(call.func, ast.Name)
            or call.func.id not in (*RULES, "load", "package")
        ):
            raise ValueError(
                f"BUILD:{statement.lineno}: only {', '.join(RULES)}, load and package are understood"
            )
        if call.func.id in RULES:
            fields = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
            srcs = _files(root, fields["srcs"])
            if not srcs or not all((root / path).is_file() for path in srcs):
                raise ValueError(f"BUILD:{statement.lineno}: srcs that are no files: {sorted(srcs)}")
            deps = tuple(ast.literal_eval(fields["deps"])) if "deps" in fields else ()
            targets.append(Target(ast.literal_eval(fields["name"]), srcs, deps))
    return targets


def _files(root: Path, value: ast.expr) -> frozenset[str]:
    """A list of paths, or glob(include, exclude = ...)."""
    if not isinstance(value, ast.Call):
        return frozenset(ast.literal_eval(value))
    exclude = next(
        (ast.literal_eval(keyword.value) for keyword in value.keywords if keyword.arg == "exclude"), []
    )

    def expand(patterns: list[str]) -> set[str]:
        return {
            str(path.relative_to(root))
            for pattern in patterns
            for path in root.glob(pattern)
            if path.is_file()
        }

    return frozenset(expand(ast.literal_eval(value.args[0])) - expand(exclude))


def sources(root: Path) -> list[str]:
    """Every Python file that is not a test, hidden, or made by a build."""
    found = (path.relative_to(root) for path in root.rglob("*.py"))
    return sorted(
        str(p)
        for p in found
        if p.parts[0] not in NOT_SOURCES and not any(part.startswith(".") for part in p.parts)
    )


def imports(path: Path, module: str) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """(node, dotted name) of everything the file imports, wherever in it; `from a import b` is a.b."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            package = (
                module.split(".")[: -node.level + (path.name == "__init__.py") or None] if node.level else []
            )
            base = ".".join([*package, *([node.module] if node.module else [])])
            yield from ((node, f"{base}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", getattr(node.func, "id", ""))
            if (
                called in ("import_module", "__import__")
                and node.args
                and isinstance(node.args[0], ast.Constant)
            ):
                yield node, str(node.args[0].value)


def module_name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def declared_packages(root: Path) -> set[str]:
    """Packages that pyproject.toml's dependencies and extras name, written as labels are: grpcio_status."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    named = [
        *project.get("dependencies", []),
        *itertools.chain(*project.get("optional-dependencies", {}).values()),
    ]
    return {_label(re.split(r"[^A-Za-z0-9._-]", requirement)[0]) for requirement in named}


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Top-level module -> the installed distributions that have it."""
    return importlib.metadata.packages_distributions()


def _label(distribution: str) -> str:
    return re.sub(r"[-_.]+", "_", distribution).lower()


def violations(root: Path) -> list[str]:
    """One line for each breach of the laws above; empty when all hold."""
    targets = parse_build(root)
    found = []
    owner: dict[str, Target] = {}
    above: set[str] = set()
    packages = declared_packages(root)
    for target in targets:
        for src in sorted(target.srcs):
            if src in owner:
                found.append(f"{src}: owned by {owner[src].name} and by {target.name}")
            owner[src] = target
        for dep in target.deps:
            if dep.startswith(PYPI) and dep.removeprefix(PYPI) not in packages:
                found.append(f"{target.name}: {dep} is not among pyproject.toml's dependencies")
            if not dep.startswith(PYPI) and dep.removeprefix(":") not in above:
                found.append(f"{target.name}: {dep} is not declared above it")
        above.add(target.name)

    module_files = {module_name(src): src for src in sources(root)}
    top_level = {name.split(".")[0] for name in module_files}
    distributions = _distributions()
    graph: dict[str, set[str]] = {}
    for src in sources(root):
        if src not in owner:
            found.append(f"{src}: no target of BUILD owns it")
            continue
        target, edges = owner[src], graph.setdefault(src, set())
        for node, name in imports(root / src, module_name(src)):
            where, first = f"{src}:{node.lineno}", name.split(".")[0]
            if first in top_level:
                imported = module_files.get(name) or module_files.get(name.rpartition(".")[0])
                if imported is None:
                    found.append(f"{where}: no file is the module {name}")
                elif imported not in target.srcs and (
                    imported not in owner or f":{owner[imported].name}" not in target.deps
                ):
                    found.append(f"{where}: {target.name} may not import {name}")
                elif imported != src:
                    edges.add(imported)
            elif first not in sys.stdlib_module_names:
                labels = {_label(distribution) for distribution in distributions.get(first, [first])}
                if not any(PYPI + label in target.deps for label in labels):
                    found.append(
                        f"{where}: {target.name} may not import {name}: no dep "
                        f"{' or '.join(sorted(PYPI + x for x in labels))}"
                    )
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        found.append("a circle of imports: " + " -> ".join(error.args[1]))
    return found
