"""Flags in the spellings of other engines reach the flags that a command defines."""

import importlib
import subprocess
import sys

import paths
import pytest
from absl import flags
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.bench.__main__ import COMMANDS
from jaxflow.cli.flag_names import canonical


def values() -> flags.FlagValues:
    """The flags of a command."""
    made = flags.FlagValues()
    flags.DEFINE_integer("max_num_seqs", 1, "", flag_values=made)
    flags.DEFINE_integer("num_requests", 1, "", flag_values=made)
    flags.DEFINE_string("stop", "", "", flag_values=made)
    flags.DEFINE_boolean("enable_prefix_caching", True, "", flag_values=made)
    flags.DEFINE_boolean("notify", False, "", flag_values=made)
    return made


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ("--max-num-seqs=4", "--max_num_seqs=4"),
        ("--max-num-seqs 4", "--max_num_seqs 4"),
        ("-max-num-seqs 4", "--max_num_seqs 4"),
        ("--max_num-seqs 4", "--max_num_seqs 4"),
        ("--num-prompts 4", "--num_requests 4"),
        ("--num_prompts=4", "--num_requests=4"),
        ("--enable-prefix-caching", "--enable_prefix_caching"),
        ("--no-enable-prefix-caching", "--noenable_prefix_caching"),
        ("--noenable-prefix-caching x", "--noenable_prefix_caching x"),
        ("--enable-prefix-caching --max-num-seqs 3", "--enable_prefix_caching --max_num_seqs 3"),
        ("--notify", "--notify"),
        ("--stop --max-num-seqs", "--stop --max-num-seqs"),
        ("--stop=--max-num-seqs", "--stop=--max-num-seqs"),
        ("a-b --max-num-seqs 4", "a-b --max_num_seqs 4"),
        ("-- --max-num-seqs 4", "-- --max-num-seqs 4"),
        ("--max-num-seqz 4", "--max-num-seqz 4"),
        ("--max-num-seqs", "--max_num_seqs"),
        ("- --", "- --"),
    ],
)
def test_a_spelling_is_the_flag_of_the_command(given, wanted):
    assert canonical(["program", *given.split()], values()) == ["program", *wanted.split()]


def test_an_alias_does_not_hide_a_flag_of_its_name():
    own = values()
    flags.DEFINE_integer("num_prompts", 1, "", flag_values=own)
    assert canonical(["p", "--num-prompts=4"], own) == ["p", "--num_prompts=4"]


words = st.one_of(
    st.sampled_from(
        ["--", "-", "--stop", "--max-num-seqs", "--max_num_seqs=3", "--no-notify", "--notify", "x"]
    ),
    st.text(max_size=5),
)


@given(st.lists(words, max_size=6))
def test_spellings_do_not_change_twice(arguments):
    once = canonical(["p", *arguments], values())
    assert canonical(once, values()) == once and len(once) == len(arguments) + 1


@pytest.mark.parametrize(("command", "more"), [("serve", ()), ("sweep", ("--sweep=rate",))])
def test_the_names_of_vllm_exist_in_a_bench(command, more, no_flags):
    importlib.import_module(f"jaxflow.bench.{COMMANDS[command]}").define_flags()
    spelled = ["--num-prompts=3", "--random-input-len=5", "--random-output-len=7"]
    flags.FLAGS(canonical(["p", *spelled, *more]))
    f = flags.FLAGS
    assert (f.num_requests, f.input_len, f.output_len) == (3, 5, 7)


@pytest.mark.parametrize(
    ("module", "arguments", "error"),
    [
        ("serving", ["--model=/absent", "--max-num-seqs=0"], "max_num_seqs"),
        ("serving.client", ["--timeout-s=nan", "hello"], "timeout_s"),
        ("jaxflow", ["bench", "throughput", "--model=/absent", "--max-num-seqs=0"], "max_num_seqs"),
        ("jaxflow", ["search", "cost", "--prompt-tokens=x"], "prompt_tokens"),
    ],
)
def test_every_command_takes_dashes(module, arguments, error):
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=paths.ROOT,
        capture_output=True,
        text=True,
        timeout=120,
    )
    shown = done.stdout + done.stderr
    assert done.returncode != 0 and error in shown and "Unknown command line flag" not in shown
