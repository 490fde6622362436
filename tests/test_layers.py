"""Imports point down only: the rules of `layers` hold for this tree, and each breach is reported."""

import ast
import collections
import re
import subprocess
import sys
from pathlib import Path

import layers
import paths
import pytest

# The floors of docs/architecture.md, bottom up. A target depends on no target of a later line.
FLOORS = (
    ("pallas_kernels", "config", "request", "cli", "text", "request_output", "structured"),
    ("parallel",),
    ("kv",),
    ("architectures", "model", "checkpoints"),
    ("scheduler",),
    ("pipeline",),
    ("engine",),
    ("prompt", "flexgen"),
    ("llm", "jaxflow"),
    ("serving_proto", "serving"),
    ("bench",),
)


# Circles of folders that are still to be opened. This list may only shrink.
KNOWN_CIRCLES = ()


def test_imports_keep_the_rules():
    known = tuple(f"a circle of {name}:" for name in KNOWN_CIRCLES)
    assert [line for line in layers.violations(paths.ROOT) if not line.startswith(known)] == []


def test_floors_are_in_the_order_of_the_design():
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    targets = layers.parse_build(paths.ROOT)
    for target in targets:
        if target.name in floor:
            assert set(target.deps) <= set(floor), target.name
            assert all(floor[dep] <= floor[target.name] for dep in target.deps), target
    assert set(floor) <= {target.name for target in targets}


def test_files_of_tests_have_different_names():
    # pytest imports a test file under its name without folders.
    names = collections.Counter(path.name for path in (paths.ROOT / "tests").rglob("test_*.py"))
    assert [name for name, files in names.items() if files > 1] == []


def test_no_module_writes_the_cache_of_an_executor():
    def writes(node: ast.AST) -> bool:
        foreign = isinstance(node, ast.Attribute) and not (
            isinstance(node.value, ast.Name) and node.value.id == "self"
        )
        return foreign and node.attr == "kv" and not isinstance(node.ctx, ast.Load)

    texts = {source: (paths.ROOT / source).read_text("utf-8") for source in layers.sources(paths.ROOT)}
    named = {source: text for source, text in texts.items() if re.search(r"\.\s*kv\b", text)}
    found = [name for name, text in named.items() if any(map(writes, ast.walk(ast.parse(text))))]
    assert named and found == []


def test_build_stays_short():
    assert len((paths.ROOT / "BUILD").read_text("utf-8").splitlines()) <= 100


def test_rooms_without_jax_do_not_import_it():
    modules = [
        layers.module_name(src)
        for target in layers.parse_build(paths.ROOT)
        if "no_jax" in target.tags
        for src in sorted(target.srcs)
        if not src.startswith("jaxflow/__init__")
    ]
    program = f"import importlib, sys\nfor name in {modules!r}: importlib.import_module(name)\n"
    program += "sys.exit('jax' in sys.modules)"
    assert modules and not subprocess.run([sys.executable, "-c", program], cwd=paths.ROOT).returncode


BUILD = """
load("@rules_python//python:defs.bzl", "py_library")

py_library(name = "low", srcs = glob(["low/**/*.py"]))

py_library(name = "high", srcs = glob(["high/*.py"], exclude = ["high/made.py"]), deps = [":low"])

py_library(name = "made", srcs = ["high/made.py"])
"""

FILES = {
    "BUILD": BUILD,
    "pyproject.toml": '[project]\ndependencies = ["pytest>=9"]\n',
    "low/__init__.py": "",
    "low/a.py": "import json\nimport pytest\nfrom low import b\n",
    "low/b.py": "",
    "low/deep/c.py": "from . import d\nfrom ..b import x\n",
    "low/deep/d.py": "",
    "low/deeper/e.py": "from low.deep import c\n",
    "high/__init__.py": "",
    "high/x.py": "from low.a import thing\nimport low.deep.c\n",
    "high/made.py": "",
    "tests/free.py": "import high.x, numpy\n",
    ".hidden/free.py": "import numpy\n",
}


def house(root: Path, changes: dict[str, str]) -> list[str]:
    for name, text in (FILES | changes).items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return layers.violations(root)


def test_a_tree_that_keeps_the_rules_has_no_violations(tmp_path):
    assert house(tmp_path, {}) == []


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"low/b.py": "import high.x\n"}, "low/b.py:1: low may not import high.x"),
        ({"low/b.py": "def f():\n    from high import x\n"}, "low/b.py:2: low may not import high.x"),
        (
            {"low/b.py": "import importlib\nimportlib.import_module('high.x')\n"},
            "low/b.py:2: low may not import high.x",
        ),
        ({"low/deep/d.py": "from ...high import x\n"}, "low/deep/d.py:1: low may not import high.x"),
        ({"high/x.py": "from high import made\n"}, "high/x.py:1: high may not import high.made"),
        ({"high/x.py": "import numpy\n"}, "high/x.py:1: pyproject.toml does not name numpy"),
        ({"high/x.py": "import not_installed_at_all\n"}, "does not name not_installed_at_all"),
        ({"high/x.py": "import low.gone.module\n"}, "high/x.py:1: no file is the module low.gone.module"),
        ({"high/new/y.py": ""}, "high/new/y.py: no target of BUILD owns it"),
        ({"top.py": ""}, "top.py: no target of BUILD owns it"),
        (
            {"BUILD": BUILD + 'py_library(name = "two", srcs = ["low/b.py"])'},
            "low/b.py: owned by low and by two",
        ),
        (
            {"BUILD": BUILD.replace('"low/**/*.py"])', '"low/**/*.py"]), deps = [":high"]')},
            "low: high is not declared above it",
        ),
        (
            {"low/b.py": "from low.deep import d\n", "low/deep/d.py": "import low.b\n"},
            "a circle of files: ",
        ),
        ({"low/b.py": "if __name__ == '__main__':\n    from low import a\n"}, "a circle of files: "),
        (
            {"low/deep/f.py": "import low.deeper.g\n", "low/deeper/g.py": ""},
            "a circle of folders of low: ",
        ),
    ],
)
def test_a_breach_is_reported(tmp_path, changes, complaint):
    assert any(complaint in line for line in house(tmp_path, changes)), house(tmp_path, changes)


@pytest.mark.parametrize(
    "rule", ["x = 1", "genrule(name = 'g')", 'py_library(name = "n", srcs = ["gone.py"])']
)
def test_a_build_file_with_an_unknown_statement_is_refused(tmp_path, rule):
    with pytest.raises(ValueError, match="BUILD:"):
        house(tmp_path, {"BUILD": BUILD + rule})
