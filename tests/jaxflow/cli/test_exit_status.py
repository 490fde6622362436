"""Exit of interrupted commands, each in its own process with real signals and output."""

import signal
import subprocess
import sys

import paths
import pytest

PROGRAM = """
import gc, signal, sys, time
from jaxflow.cli.exit_status import exit_status

def callback(phase, info):
    if phase == "start":
        signal.raise_signal(signal.SIGINT)

def main(argv):
    {body}
    return 0

sys.exit(exit_status(main, sys.argv))
"""


# A shell without job control lets background programs ignore interrupts, and these programs inherit the
# setting.
HEARS = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"


def ended(body: str, **streams) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", HEARS + PROGRAM.format(body=body)]
    return subprocess.run(
        command, cwd=paths.ROOT, stderr=subprocess.PIPE, text=True, timeout=60, check=False, **streams
    )


@pytest.mark.parametrize(
    "body",
    [
        "signal.raise_signal(signal.SIGINT); time.sleep(100)",
        # Python drops an exception that is raised in a collector's callback: the interrupt must be sent
        # again.
        "gc.callbacks.append(callback); gc.collect(); gc.callbacks.remove(callback); time.sleep(100)",
    ],
    ids=["in code", "in a collector's callback"],
)
def test_an_interrupt_exits_with_130(body):
    done = ended(body)
    assert (done.returncode, done.stderr) == (130, "interrupted\n")


def test_an_interrupt_of_asyncio_cancels_its_task():
    """A chat continues after an interrupt, and open resources of a task are closed."""
    body = """
    import asyncio

    async def work():
        try:
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(100)
        except asyncio.CancelledError:
            print("closed", file=sys.stderr)
            raise

    with asyncio.Runner() as runner:
        try:
            runner.run(work())
        except KeyboardInterrupt:
            print("went on", file=sys.stderr)
        runner.run(work())
    """
    done = ended(body.strip())
    assert (done.returncode, done.stderr) == (130, "closed\nwent on\nclosed\ninterrupted\n")


def test_an_interrupt_that_was_ignored_stays_so():
    command = [sys.executable, "-c", PROGRAM.format(body="signal.raise_signal(signal.SIGINT)")]
    ignoring = ["sh", "-c", 'trap "" INT; exec "$@"', "sh", *command]
    assert subprocess.run(ignoring, cwd=paths.ROOT, timeout=120, check=False).returncode == 0


@pytest.mark.parametrize("body", ["print('once')", "print('x' * 1_000_000)"], ids=["buffered", "written"])
def test_a_closed_pipe_exits_with_141(body):
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
        reader.wait()
        done = ended(body, stdout=reader.stdin)
        reader.stdin = None
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")


@pytest.mark.parametrize("module", ["jaxflow.bench", "search"])
def test_a_command_exits_with_141_after_a_closed_pipe(module):
    arguments = {"jaxflow.bench": ["sweep", "--sweep=tiles"], "search": ["cost", "--model=llama-3.1-8b"]}[
        module
    ]
    with subprocess.Popen(["true"], stdin=subprocess.PIPE) as reader:
        reader.wait()
        command = [sys.executable, "-u", "-m", module, *arguments]
        done = subprocess.run(
            command,
            cwd=paths.ROOT,
            stdout=reader.stdin,
            stderr=subprocess.PIPE,
            text=True,
            timeout=300,
            check=False,
        )
        reader.stdin = None
    assert (done.returncode, done.stderr) == (128 + signal.SIGPIPE, "")
