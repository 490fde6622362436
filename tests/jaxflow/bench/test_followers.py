"""`bench followers` starts both processes and reports what a follower costs."""

import json
import subprocess
import sys

import paths
import pytest


@pytest.mark.slow
def test_a_report(tmp_path):
    report = tmp_path / "followers.json"
    small = ["--max_num_batched_tokens=16", "--step_sizes=16", "--max_num_seqs=4", "--num_kv_pages=64"]
    small += ["--block_size=16", "--batch_size=4", "--input_len=8", "--output_len=20", "--num_iters=1"]
    command = [sys.executable, "-m", "jaxflow.bench", "followers", f"--model={paths.MODELS / 'stories260K'}"]
    done = subprocess.run(
        [*command, *small, "--tensor_parallel_size=2", "--output-json", str(report)],
        cwd=paths.ROOT,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(report.read_text())
    assert found["steps"] >= 15 and found["processes"] == 2
    assert 0 < found["record_us"] <= found["record_p99_us"]
    assert found["sender_cpu_us"] > 0
    (overhead,) = found["overheads"]
    assert found["overhead"] == overhead == pytest.approx(found["record_us"] / 1e3 / found["step_ms"])
