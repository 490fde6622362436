"""The house's floors: imports point down only. The laws are in `layers`; here they are held, and shown to
bite.
"""

from pathlib import Path

import layers
import paths
import pytest

# The floors of the design, bottom up. A target may not depend on one of a later line.
FLOORS = (
    ("pallas_kernels", "kernel_checks", "config", "request", "text", "offload_policy"),
    ("mesh",),
    ("pages", "memory"),
    ("graph", "model"),
    ("pipeline",),
    ("schedule", "engine"),
    ("offload", "llm", "jaxflow"),
    ("serving_proto", "serving"),
    ("bench",),
)


def test_the_house_keeps_its_laws():
    assert layers.violations(paths.ROOT) == []


def test_floors_are_in_the_order_of_the_design():
    floor = {name: level for level, names in enumerate(FLOORS) for name in names}
    for target in layers.parse_build(paths.ROOT):
        if target.name in floor:
            local = [dep.removeprefix(":") for dep in target.deps if dep.startswith(":")]
            assert all(floor[dep] <= floor[target.name] for dep in local), (target.name, local)
    assert set(floor) <= {target.name for target in layers.parse_build(paths.ROOT)}


def test_nothing_below_the_top_depends_on_what_is_beside_the_house():
    house = {name for names in FLOORS for name in names}
    for target in layers.parse_build(paths.ROOT):
        if target.name in house:
            assert {dep.removeprefix(":") for dep in target.deps if dep.startswith(":")} <= house, target.name


BUILD = """
load("@rules_python//python:defs.bzl", "py_library")

py_library(name = "low", srcs = glob(["low/**/*.py"]), deps = ["@pypi//pytest"])

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


def test_a_lawful_house_has_no_violations(tmp_path):
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
        ({"high/x.py": "import pytest\n"}, "high/x.py:1: high may not import pytest: no dep @pypi//pytest"),
        ({"high/x.py": "import not_installed_at_all\n"}, "no dep @pypi//not_installed_at_all"),
        ({"high/x.py": "import low.gone.module\n"}, "high/x.py:1: no file is the module low.gone.module"),
        ({"high/new/y.py": ""}, "high/new/y.py: no target of BUILD owns it"),
        ({"top.py": ""}, "top.py: no target of BUILD owns it"),
        (
            {"BUILD": BUILD + 'py_library(name = "two", srcs = ["low/b.py"])'},
            "low/b.py: owned by low and by two",
        ),
        (
            {"BUILD": BUILD.replace('["@pypi//pytest"]', '["@pypi//pytest", ":high"]')},
            "low: :high is not declared above it",
        ),
        (
            {"BUILD": BUILD.replace('deps = [":low"]', 'deps = [":low", ":high"]')},
            "high: :high is not declared above it",
        ),
        ({"pyproject.toml": "[project]\n"}, "low: @pypi//pytest is not among pyproject.toml's dependencies"),
        (
            {"low/b.py": "from low.deep import d\n", "low/deep/d.py": "import low.b\n"},
            "a circle of imports: ",
        ),
        ({"low/b.py": "if __name__ == '__main__':\n    from low import a\n"}, "a circle of imports: "),
    ],
)
def test_a_breach_is_named(tmp_path, changes, complaint):
    assert any(complaint in line for line in house(tmp_path, changes)), house(tmp_path, changes)


@pytest.mark.parametrize(
    "rule", ["x = 1", "genrule(name = 'g')", 'py_library(name = "n", srcs = ["gone.py"])']
)
def test_a_build_file_that_says_nothing_checkable_is_refused(tmp_path, rule):
    with pytest.raises(ValueError, match="BUILD:"):
        house(tmp_path, {"BUILD": BUILD + rule})
