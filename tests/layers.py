"""Compare BUILD with the imports of the sources.

BUILD is written in Bazel's syntax, which Python's parser reads. `violations` returns one line
for each breach of these rules:

- Every source file has one owner.
- A target depends only on targets that are declared above it, so no circle of targets exists.
- A source imports only sources of its own target and of its target's `deps`.
- A source imports only packages that pyproject.toml names.
- No files import one another in a circle, and no two folders of one parent do.
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
NOT_SOURCES = ("tests", "build", "dist")


@dataclasses.dataclass(frozen=True)
class Target:
    """One room of the house. srcs: paths from the root. deps: names of other targets. tags: as in BUILD."""

    name: str
    srcs: frozenset[str]
    deps: tuple[str, ...]
    tags: tuple[str, ...]


def parse_build(root: Path) -> list[Target]:
    """Return the targets of root/BUILD in their order.

    Raises: ValueError for a statement that is no rule, and for a path that is no file.
    """
    targets = []
    for statement in ast.parse((root / "BUILD").read_text("utf-8")).body:
        call = statement.value if isinstance(statement, ast.Expr) else None
        if (
            not isinstance(call, ast.Call)
            or not isinstance(call.func, ast.Name)
            or call.func.id not in (*RULES, "load")
        ):
            raise ValueError(f"BUILD:{statement.lineno}: accepted: {', '.join(RULES)} and load")
        if call.func.id in RULES:
            fields = {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
            srcs = _files(root, fields["srcs"])
            if not srcs or not all((root / path).is_file() for path in srcs):
                raise ValueError(f"BUILD:{statement.lineno}: srcs that are no files: {sorted(srcs)}")
            deps, tags = (
                tuple(ast.literal_eval(fields[key])) if key in fields else () for key in ("deps", "tags")
            )
            name = ast.literal_eval(fields["name"])
            targets.append(Target(name, srcs, tuple(dep.removeprefix(":") for dep in deps), tags))
    return targets


def _files(root: Path, value: ast.expr) -> frozenset[str]:
    """Return the paths of a list, or of glob(include, exclude = ...)."""
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
    """Return the Python files that are not tests, not hidden and not made by a build."""
    found = []
    for folder, names, files in root.walk():
        names[:] = [name for name in names if name[0] != "." and (folder != root or name not in NOT_SOURCES)]
        found += [str((folder / name).relative_to(root)) for name in files if name.endswith(".py")]
    return sorted(found)


def imports(path: Path, module: str) -> Iterator[tuple[ast.stmt | ast.expr, str]]:
    """Yield (node, dotted name) of each import at any depth of the file; `from a import b` is a.b."""
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
    """Return the packages of pyproject.toml's dependencies and extras, written like grpcio_status."""
    project = tomllib.loads((root / "pyproject.toml").read_text("utf-8"))["project"]
    named = [
        *project.get("dependencies", []),
        *itertools.chain(*project.get("optional-dependencies", {}).values()),
    ]
    return {_label(re.split(r"[^A-Za-z0-9._-]", requirement)[0]) for requirement in named}


@functools.cache
def _distributions() -> Mapping[str, list[str]]:
    """Return the installed distributions of each top-level module."""
    return importlib.metadata.packages_distributions()


def _label(distribution: str) -> str:
    return re.sub(r"[-_.]+", "_", distribution).lower()


def _label(distribution: str) -> str:
    return re.sub(r"[-_.]+", "_", distribution).lower()


def violations(root: Path) -> list[str]:
    """Return one line for each breach of the rules above."""
    targets = parse_build(root)
    found = []
    owner: dict[str, Target] = {}
    above: set[str] = set()
    for target in targets:
        for src in sorted(target.srcs):
            if src in owner:
                found.append(f"{src}: owned by {owner[src].name} and by {target.name}")
            owner[src] = target
        found += [f"{target.name}: {dep} is not declared above it" for dep in target.deps if dep not in above]
        above.add(target.name)

    packages = declared_packages(root)
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
                    imported not in owner or owner[imported].name not in target.deps
                ):
                    found.append(f"{where}: {target.name} may not import {name}")
                elif imported != src:
                    edges.add(imported)
            elif first not in sys.stdlib_module_names:
                labels = {_label(distribution) for distribution in distributions.get(first, [first])}
                if not labels & packages:
                    found.append(f"{where}: pyproject.toml does not name {' or '.join(sorted(labels))}")
    return found + _circles(graph)


def _circles(graph: Mapping[str, set[str]]) -> list[str]:
    """Return circles of files, and circles of folders that have the same parent."""
    graphs: dict[str, dict[str, set[str]]] = {"files": dict(graph)}
    for src, edges in graph.items():
        for imported in edges:
            ours, theirs = Path(src).parts[:-1], Path(imported).parts[:-1]
            shared = next(
                (n for n, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), len(ours)
            )
            if 0 < shared < min(len(ours), len(theirs)):
                parent = "/".join(ours[:shared])
                graphs.setdefault(f"folders of {parent}", {}).setdefault(ours[shared], set()).add(
                    theirs[shared]
                )
    found = []
    for name, nodes in graphs.items():
        try:
            graphlib.TopologicalSorter(nodes).prepare()
        except graphlib.CycleError as error:
            found.append(f"a circle of {name}: " + " -> ".join(error.args[1]))
    return found
