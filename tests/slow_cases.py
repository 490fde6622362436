"""Cases that the usual suite leaves out: long cases of a test of which other, shorter cases run.

Tests that are slow as a whole carry the mark `slow` in their own file.
"""

import re

import pytest

# A pattern of `file.py::test[case]`, and the reason that the usual suite can leave the cases out.
SLOW_CASES = {
    r"test_goldens\.py::TestGoldens::test_through_host_and_disk\[2-(?!tiny-gemma2|tiny-llama\])": (
        "tiny-llama and tiny-gemma2 run on two devices; all families run on one device"
    ),
    r"test_offloaded_tokens\.py::test_every_other_family\[tiny-(mistral|qwen2|qwen3)-two devices": (
        "these families differ from tiny-llama in weights only; gemma2, gemma3, mixtral and qwen3_moe run"
    ),
    r"test_offload_calls\.py::test_the_run_after_a_stopped_run_gets_its_tokens\[(host|disk|mixed, |KV on the)": (
        "the cases device, mixed and `KV on disk, the host attends` cover every tier"
    ),
    r"test_compiler\.py::test_drawn_plans\[tiny-gemma2-2": (
        "a drawn plan and a phased plan of tiny-gemma2 run compiled"
    ),
    r"test_chunk_attention\.py::test_for_the_h200_it_uses_its_units\[(32-8-128-int8|8-4-256-bfloat16)": (
        "the e4m3 kernel is compiled; test_compiled_step compiles the bfloat16 kernel"
    ),
    r"test_chunk_attention\.py::test_chunk_attention_equals_its_reference\[chunks[35]-": (
        "the e4m3 cases have keys in second pages and a scale of 0"
    ),
    r"test_chunk_attention\.py::test_an_e4m3_cache_is_multiplied_as_e4m3\[chunks1-": (
        "the same chunks run without a cap, and bfloat16 runs with a cap"
    ),
    r"test_chunk_attention\.py::test_rows_outside_the_unified_max_value_fall_back"
    r"\[(above-1-False-2|below-256-False-2|both-256-False-2)": (
        "the cases above-1-False-3, both-256-True-2 and within-256-False-2 run"
    ),
    r"test_decode_attention\.py::test_decode_attention_equals_its_reference\[lengths[036]-": (
        "the same lengths, heads and tiles run with another dtype or window"
    ),
    r"test_decode_attention\.py::test_rows_outside_the_unified_max_value_equal_the_reference"
    r"\[(None-float8_e4m3fn|unified_max1-bfloat16)": "three dtypes run with and without rows outside",
    r"test_two_stage_search\.py::test_found_plans_are_the_plain_forward\[fp8, sums alone": (
        "the scattered case and the fp8 case run"
    ),
    r"test_sampling_memory\.py::test_full_makes_few_and_counts_in_place\[token_limits-2": (
        "this case compiles the reference search; the case of the kernel's search runs"
    ),
    r"test_notebooks\.py::test_notebook_runs_and_draws\[sweep": "test_sweep runs the command of the notebook",
    r"test_smollm2\.py::test_perplexity\[smollm2_ppl-8": "two of the eight windows run",
}


def mark(items: list[pytest.Item]) -> set[str]:
    """Mark the items that a pattern matches as `slow`. Return the patterns without an item."""
    unmatched = set(SLOW_CASES)
    for item in items:
        name = item.nodeid.rpartition("/")[2]
        for pattern, reason in SLOW_CASES.items():
            if re.match(pattern, name):
                item.add_marker(pytest.mark.slow(reason=reason))
                unmatched.discard(pattern)
    return unmatched
