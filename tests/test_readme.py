"""The commands of the README and the docs exist, and the README's programs run unchanged."""

import asyncio
import functools
import re
import runpy
import shlex
import subprocess
import sys

import paths
import pytest
from harness import serving

README = (paths.ROOT / "README.md").read_text("utf-8")
MODEL = str(paths.MODELS / "stories260K")

PROGRAMS = re.findall(r"```python\n(.*?)```", README, re.S)
TEXTS = [README, *(page.read_text("utf-8") for page in (paths.ROOT / "docs").glob("*.md"))]
COMMANDS = sorted({found for text in TEXTS for found in re.findall(r"python -m [\w.]+[^\n`]*", text)})


@functools.cache
def run_python(*arguments):
    return subprocess.run(
        [sys.executable, *arguments], cwd=paths.ROOT, capture_output=True, text=True, timeout=300
    )


def test_the_client_program_runs():
    (program,) = [text for text in PROGRAMS if "Client(" in text]

    async def ask():
        async with serving() as (server, _):
            here = program.replace("127.0.0.1:50051", f"127.0.0.1:{server.port}")
            return await asyncio.to_thread(run_python, "-c", here)

    done = asyncio.run(ask())
    assert done.returncode == 0, done.stderr
    assert "32 tokens, the first after" in done.stdout


def test_the_python_program_runs(capsys):
    (program,) = [text for text in PROGRAMS if "LLM(" in text]
    exec(program.replace("path/to/model", MODEL), {})
    done = capsys.readouterr()
    assert re.search(r"Once upon a time -> .+\nThe little dog -> .+", done.out)
    assert re.findall("^.*kernels:.*$", done.err, re.MULTILINE) == ["kernels: cpu, for every op"]


@pytest.fixture
def help_of(no_flags, monkeypatch, capsys):
    """Return a function that runs a module's help.

    The server's commands define flags on import, so each gets a process.
    """

    def ask(module, *words):
        if module.startswith("serving"):
            done = run_python("-m", module, "--helpfull")
            return done.stdout + done.stderr
        monkeypatch.setattr(sys, "argv", [module, *words, "--help"])
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        assert not ended.value.code
        return capsys.readouterr().out

    return ask


@pytest.mark.filterwarnings("ignore:.* found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: re.sub(r"\s+#.*", "", command))
def test_a_command_and_its_flags_exist(command, help_of):
    _, _, module, *arguments = shlex.split(command, comments=True)
    shown = help_of(module, *[word for word in arguments if re.fullmatch(r"[a-z_]+", word)][:1])
    for flag in (word.partition("=")[0] for word in arguments if word.startswith("--")):
        assert re.search(rf"--(\[no\])?{flag.removeprefix('--')}\b", shown), f"{module} has no {flag}"
    assert "Traceback" not in shown


def test_the_flags_it_names_exist(help_of):
    named = set(re.findall(r"`(--\w+)", README))
    shown = help_of("serving") + help_of("serving.demo") + help_of("jaxflow.bench", "throughput")
    assert named
    assert not {flag for flag in named if not re.search(rf"--(\[no\])?{flag.removeprefix('--')}\b", shown)}
