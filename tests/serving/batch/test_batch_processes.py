"""The commands with a real model, as processes of their own."""

import json
import subprocess
import sys
import time
from pathlib import Path

import openai
import paths
import pytest

pytestmark = pytest.mark.slow

MODEL = str(paths.MODELS / "stories260K")
SETTINGS = ("--max_num_seqs=4", "--max_num_batched_tokens=64", "--max_model_len=128")


def write(path: Path, count: int) -> Path:
    lines = [
        {
            "custom_id": f"r-{i}",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"prompt": f"Once upon a time, {i}", "max_tokens": 8, "temperature": 0, "seed": 1},
        }
        for i in range(count)
    ]
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), "utf-8")
    return path


def texts(output: str) -> dict[str, str]:
    lines = [json.loads(each) for each in output.splitlines()]
    return {each["custom_id"]: each["response"]["body"]["choices"][0]["text"] for each in lines}


def test_the_command_and_a_server_give_the_same_answers(tmp_path):
    source = write(tmp_path / "in.jsonl", 12)
    command = [sys.executable, "-m", "serving.batch", "--model", MODEL, *SETTINGS]
    done = subprocess.run(
        [*command, "-i", str(source), "-o", str(tmp_path / "out.jsonl")],
        cwd=paths.ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "12/12" in done.stderr and "12 answers, 0 errors" in done.stdout
    alone = texts((tmp_path / "out.jsonl").read_text("utf-8"))
    assert len(alone) == 12 and all(alone.values())

    command = [sys.executable, "-m", "serving", "--model", MODEL, *SETTINGS, "--nogrpc", "--http_port=0"]
    command += [f"--batch_dir={tmp_path / 'batches'}", "--batch_tpot_ms=20"]
    with subprocess.Popen(command, cwd=paths.ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = next(line.split()[-1] for line in process.stdout if line.startswith("ready on "))
        api = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        with open(source, "rb") as file:
            file_id = api.files.create(file=file, purpose="batch").id
        batch = api.batches.create(input_file_id=file_id, endpoint="/v1/completions", completion_window="24h")
        while batch.status not in ("completed", "failed"):
            time.sleep(0.05)
            batch = api.batches.retrieve(batch.id)
        assert batch.status == "completed" and batch.output_file_id is not None
        assert texts(api.files.content(batch.output_file_id).text) == alone
        process.terminate()
        assert process.wait(60) == 0
