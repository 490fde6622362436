"""The command of a batch, whole, over a fake engine: answers, refusals, kills, signals and memory."""

import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import paths
import pytest
from fake_llm import FakeLLM

from serving.batch.journal import AnsweredLine, _decode, read_frames
from serving.batch.runner import write_lines
from serving.batch_command import Options, answer_file
from serving.batch_engine import LocalEngine

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
TEMPLATE = "{% for message in messages %}{{ message.content }}{% endfor %}"


def line(number: int, url: str = COMPLETIONS, **body) -> dict:
    prompt = {} if "messages" in body else {"prompt": [3 + number % 250, 3 + number // 250]}
    return {
        "custom_id": f"r-{number}",
        "method": "POST",
        "url": url,
        "body": {"model": "fake", "max_tokens": 2, "ignore_eos": True, **prompt, **body},
    }


def write(path: Path, lines: list[dict]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in lines), "utf-8")
    return path


def run(folder: Path, lines: list[dict], *, load=None, **options) -> int:
    def fake():
        return LocalEngine(FakeLLM(chat_template=TEMPLATE), options.get("served_model_names", ()))

    source = write(folder / "in.jsonl", lines)
    return answer_file(
        Options(source, folder / "out.jsonl", "models/fake", progress=False, **options), load or fake
    )


def never():
    raise AssertionError("the model is loaded")


def outputs(folder: Path) -> list[dict]:
    return [json.loads(each) for each in (folder / "out.jsonl").read_text("utf-8").splitlines()]


def test_answers_are_in_the_order_of_the_input(tmp_path, capsys):
    lines = [line(i) for i in range(40)]
    lines[7] = line(7, CHAT, messages=[{"role": "user", "content": "Once"}], max_tokens=5)
    assert run(tmp_path, lines) == 0
    found = outputs(tmp_path)
    assert [each["custom_id"] for each in found] == [f"r-{i}" for i in range(40)]
    for i, each in enumerate(found):
        body = each["response"]["body"]
        assert each["response"]["status_code"] == 200 and each["error"] is None
        assert body["object"] == ("chat.completion" if i == 7 else "text_completion")
        assert body["usage"]["completion_tokens"] == (5 if i == 7 else 2)
    assert "40 answers, 0 errors" in capsys.readouterr().out


def test_a_second_run_loads_no_model_and_writes_the_output_again(tmp_path):
    lines = [line(i) for i in range(5)]
    assert run(tmp_path, lines) == 0
    first = (tmp_path / "out.jsonl").read_bytes()
    (tmp_path / "out.jsonl").unlink()
    assert run(tmp_path, lines, load=never) == 0
    assert (tmp_path / "out.jsonl").read_bytes() == first


def test_an_invalid_line_is_named_before_the_model_is_loaded(tmp_path, capsys):
    lines = [line(i) for i in range(6)]
    lines[2]["body"]["temperature"] = -1
    lines[4]["body"]["no_such_field"] = 1
    assert run(tmp_path, lines, load=never) == 1
    error = capsys.readouterr().err
    assert "line 3: " in error and "temperature" in error
    assert "line 5: " in error and "no_such_field" in error
    assert not (tmp_path / "out.jsonl").exists() and not (tmp_path / "out.jsonl.journal").exists()


@pytest.mark.parametrize("names", [(), ("small",)])
def test_another_model_is_refused_before_a_line_runs(tmp_path, capsys, names):
    lines = [line(i, model=names[0] if names else "fake") for i in range(4)]
    lines[3]["body"]["model"] = "another"
    load = never if names else lambda: LocalEngine(FakeLLM())
    assert run(tmp_path, lines, load=load, served_model_names=names) == 1
    assert "line 4: model" in capsys.readouterr().err
    lines[3] = line(3, model=names[0] if names else "fake")
    (tmp_path / "out.jsonl.journal").exists()
    assert run(tmp_path, lines[:3], journal=tmp_path / "j", served_model_names=names) == 0


def test_a_line_that_the_engine_refuses_is_an_answer(tmp_path, capsys):
    lines = [line(0), line(1, prompt=[3] * 5000), line(2)]
    assert run(tmp_path, lines) == 1
    statuses = [each["response"]["status_code"] for each in outputs(tmp_path)]
    assert statuses == [200, 400, 200]
    assert "2 answers, 1 errors" in capsys.readouterr().out


def test_a_changed_input_does_not_use_the_journal(tmp_path, capsys):
    assert run(tmp_path, [line(0)]) == 0
    assert run(tmp_path, [line(1)], load=never) == 1
    assert "another input file" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_refused_first(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", [line(0)])
    assert answer_file(Options(source, tmp_path / "none" / "out", "fake"), never) == 1
    assert "output_file" in capsys.readouterr().err


def test_an_output_that_is_no_regular_file_is_refused(tmp_path, capsys):
    source, pipe = write(tmp_path / "in.jsonl", [line(0)]), tmp_path / "pipe"
    os.mkfifo(pipe)
    assert answer_file(Options(source, pipe, "fake"), never) == 1
    assert "regular file" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_a_link_to_the_output_stays_a_link(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "target")
    assert write_lines([b"{}"], link) == 1
    assert link.is_symlink() and (tmp_path / "target").read_bytes() == b"{}\n"


@pytest.mark.parametrize(
    ("field", "source", "output"), [("input", "in.parquet", "out"), ("output", "in", "out.parquet")]
)
def test_parquet_without_pyarrow_is_refused_first(tmp_path, monkeypatch, capsys, field, source, output):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    write(tmp_path / source, [line(0)])
    assert answer_file(Options(tmp_path / source, tmp_path / output, "fake"), never) == 1
    error = capsys.readouterr().err
    assert f"{field}_file=" in error and ".parquet" in error and "jaxflow[cluster]" in error


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "status", "said"),
    [
        (["--engine=no"], 2, ["engine", "no", "local|ray"]),
        (["--engine=ray", "--replicas=0"], 1, ["replicas", "0", "1 or more"]),
        (["--replicas=2"], 1, ["replicas", "2", "--engine ray"]),
        (["--ray_address=auto"], 1, ["ray_address", "auto", "--engine ray"]),
        (
            ["--engine=ray", "--coordinator=a:1", "--num_processes=2", "--process_id=0"],
            1,
            ["coordinator", "a:1"],
        ),
        pytest.param(
            ["--engine=ray"],
            1,
            ["engine", "without ray", "jaxflow[cluster]"],
            marks=pytest.mark.skipif(importlib.util.find_spec("ray") is not None, reason="ray is installed"),
        ),
    ],
)
def test_wrong_engines_are_refused_before_the_input_is_read(tmp_path, arguments, status, said):
    command = [sys.executable, "-m", "serving.batch", "--model=/no/such", *arguments]
    ended = subprocess.run(
        [*command, "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out")],
        cwd=paths.ROOT, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert ended.returncode == status and all(text in ended.stderr for text in said), ended.stderr
    assert "Traceback" not in ended.stderr and "/no/such" not in ended.stderr


def start(*arguments) -> subprocess.Popen:
    here = Path(__file__).parent
    path = os.pathsep.join(map(str, (paths.ROOT, paths.ROOT / "tests", here.parent, here)))
    command = [sys.executable, str(here / "fake_command.py"), *map(str, arguments)]
    return subprocess.Popen(
        command, env=os.environ | {"PYTHONPATH": path}, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def loaded(process: subprocess.Popen) -> subprocess.Popen:
    assert process.stdout is not None and process.stdout.readline() == b"loaded\n"
    return process


def asked(file: Path) -> list[int]:
    return [int(each) for each in file.read_text().split()] if file.exists() else []


def test_a_signal_keeps_what_is_finished(tmp_path):
    count = 1000
    source = write(tmp_path / "in", [line(i) for i in range(count)])
    process = loaded(start(source, tmp_path / "out"))
    while sum(each.stat().st_size for each in (tmp_path / "out.journal").glob("*.segment")) < 20_000:
        time.sleep(0.005)
    process.send_signal(signal.SIGTERM)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGTERM
    assert b"run the same command again to continue" in error and not (tmp_path / "out").exists()
    done = len(finished_lines(tmp_path / "out.journal"))
    assert 0 < done < count
    llm = FakeLLM()
    assert (
        answer_file(
            Options(source, tmp_path / "out", "models/fake", progress=False), lambda: LocalEngine(llm)
        )
        == 0
    )
    assert len(llm.driver.submitted) == count - done
    lines = [json.loads(each) for each in (tmp_path / "out").read_text("utf-8").splitlines()]
    assert [each["custom_id"] for each in lines] == [f"r-{i}" for i in range(count)]


@pytest.mark.slow
def test_kills_at_random_times(tmp_path):
    """No finished line runs again, and none is lost or doubled. Two processes share the lines."""
    count, draw = 480, random.Random(3)
    write(tmp_path / "in", [line(i, prompt=[3 + i, 7]) for i in range(count)])
    kills = runs = 0
    while not (tmp_path / "out").exists():
        finished = finished_lines(tmp_path / "out.journal")
        files = [tmp_path / f"asked-{runs}", tmp_path / f"asked-{runs + 1}"]
        both = [start(tmp_path / "in", tmp_path / "out", file) for file in files]
        for process, file in zip(both, files, strict=True):
            most = draw.randrange(80)
            while process.poll() is None and len(asked(file)) < most:
                time.sleep(draw.uniform(0, 0.004))
            kills += process.poll() is None
            process.kill()
            process.wait()
        assert not finished & {token - 2 for file in files for token in asked(file)}
        assert finished <= finished_lines(tmp_path / "out.journal")
        runs += 2
        assert runs < 120
    lines = [json.loads(each) for each in (tmp_path / "out").read_text("utf-8").splitlines()]
    assert [each["custom_id"] for each in lines] == [f"r-{i}" for i in range(count)]
    assert kills >= 2


def finished_lines(folder: Path) -> set[int]:
    found = set()
    for path in folder.glob("*.segment"):
        with open(path, "rb") as file:
            for _, payload in read_frames(file, 0):
                if isinstance(record := _decode(payload), AnsweredLine):
                    found.add(record.line)
    return found


@pytest.mark.slow
def test_memory_does_not_grow_with_the_file(tmp_path):
    """50,000 lines of 600 prompt tokens each; the process's peak grows by at most 200 MB."""
    prompt = [3 + i % 250 for i in range(600)]
    with open(tmp_path / "in", "w", encoding="utf-8") as file:
        for i in range(50_000):
            file.write(json.dumps(line(i, prompt=prompt)) + "\n")
    process = start(tmp_path / "in", tmp_path / "out")
    out, error = process.communicate(timeout=1000)
    assert process.returncode == 0, error
    assert int(out.splitlines()[-1]) <= 200e6
    with open(tmp_path / "out", "rb") as file:
        assert sum(1 for _ in file) == 50_000
