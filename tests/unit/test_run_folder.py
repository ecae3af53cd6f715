"""The run folder: what is already there, who holds it, and files that appear whole."""

import json
import os
import subprocess
import sys

import pytest

from lora_trainer.atomic import write_json
from lora_trainer.errors import ConfigError, MachineError
from lora_trainer.journal.progress import Metrics
from lora_trainer.journal.run_folder import Lock, RunFolder, check, claim, keep_last


@pytest.fixture
def folder(tmp_path):
    return RunFolder(tmp_path / "saida" / "meu [lora]", "meu [lora]")


def begin(folder, *, finished=False):
    claim(folder, resume=False)
    write_json(folder.facts, {"seed": 1})
    (folder.state / "passo-00000002").mkdir()
    if finished:
        write_json(folder.done, {})


def test_unfinished_run_needs_the_users_word(folder):
    begin(folder)
    with pytest.raises(ConfigError, match="não terminada") as caught:
        check(folder, resume=False, restart=False)
    assert "--retomar" in caught.value.hint
    check(folder, resume=True, restart=False)
    assert claim(folder, resume=True) == ""
    assert folder.read_facts() == {"seed": 1}
    check(folder, resume=False, restart=True)
    assert "antigo-1" in claim(folder, resume=False)
    assert not folder.worth_keeping


def test_a_failed_start_is_no_run(folder):
    claim(folder, resume=False)
    write_json(folder.facts, {"seed": 1})
    folder.metrics.write_text('{"event": "stopped"}\n')
    check(folder, resume=False, restart=False)
    assert claim(folder, resume=False) == ""
    assert not folder.metrics.exists()
    assert [path.name for path in folder.path.parent.iterdir()] == ["meu [lora]"]


@pytest.mark.parametrize("content", ["", "half", "[1]"])
def test_damaged_facts_count_as_none(folder, content):
    claim(folder, resume=False)
    folder.facts.write_text(content)
    assert folder.read_facts() == {}


def test_finished_runs_are_moved_aside_one_by_one(folder):
    for _ in range(3):
        begin(folder, finished=True)
    names = sorted(path.name for path in folder.path.parent.iterdir())
    assert names == ["meu [lora]", "meu [lora].antigo-1", "meu [lora].antigo-2"]


def test_lock_is_held_by_one_process_and_survives_a_crash(folder):
    folder.path.parent.mkdir(parents=True)
    with Lock(folder) as lock:
        code = (
            "import sys; from pathlib import Path; from lora_trainer.journal.run_folder import Lock, RunFolder\n"
            "Lock(RunFolder(Path(sys.argv[1]), 'x')).__enter__()"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, str(folder.path)], capture_output=True, text=True, check=False
        )
        assert "MachineError" in done.stderr
        assert str(os.getpid()) in done.stderr
    assert not lock.path.exists()
    lock.path.write_text(json.dumps({"pid": os.getpid(), "started": 1.0}))  # another process once had this number
    with Lock(folder):
        pass
    lock.path.write_text("half")
    with Lock(folder):
        assert json.loads(lock.path.read_text())["pid"] == os.getpid()


def test_living_owner_is_not_pushed_aside(folder):
    sleeper = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    try:
        import psutil

        folder.path.parent.mkdir(parents=True)
        lock = Lock(folder)
        lock.path.write_text(json.dumps({"pid": sleeper.pid, "started": psutil.Process(sleeper.pid).create_time()}))
        with pytest.raises(MachineError, match=str(sleeper.pid)):
            lock.__enter__()
    finally:
        sleeper.kill()
        sleeper.wait()


def test_intermediate_files_are_found_by_exact_name_and_pruned(folder):
    begin(folder)
    for step in (5, 10, 15, 20):
        folder.adapter("kohya", step).write_bytes(b"x")
    folder.adapter("diffusers", 5).write_bytes(b"x")
    folder.adapter("kohya").write_bytes(b"x")
    keep_last(folder.intermediate("kohya"), 2)
    assert [p.name for p in folder.intermediate("kohya")] == [
        "meu [lora]-passo000015.safetensors",
        "meu [lora]-passo000020.safetensors",
    ]
    assert folder.intermediate("diffusers") == [folder.adapter("diffusers", 5)]
    assert folder.adapter("kohya").exists()


def test_metrics_drop_a_line_cut_by_a_killed_process(tmp_path):
    path = tmp_path / "metricas.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2, "lo')
    metrics = Metrics()
    metrics.event("lost", reason="before the folder is ours")
    metrics.open(path)
    metrics.event("resumed", step=1)
    metrics.close()
    assert [json.loads(line) for line in path.read_text().splitlines()] == [
        {"step": 1},
        {"event": "resumed", "step": 1},
    ]


def test_json_is_whole_or_absent(tmp_path):
    path = tmp_path / "plano.json"
    write_json(path, {"a": 1})
    with pytest.raises(TypeError):
        write_json(path, {"a": object()})
    assert json.loads(path.read_text()) == {"a": 1}
    assert list(tmp_path.iterdir()) == [path]
