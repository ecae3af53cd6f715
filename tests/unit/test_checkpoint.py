"""States appear whole, the newest good one is found, and nothing in them is executed."""

import hashlib
import json
import pickle

import pytest
import torch

from lora_trainer.errors import UserError
from lora_trainer.journal.checkpoint import KEPT_STATES, State, latest_step, load_state, save_state


def state(step):
    weight = torch.full((4, 4), float(step))
    return State(
        step,
        {"a": weight},
        {"state": {0: {"exp_avg": weight * 2, "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1}]},
        {},
        {"seed": 1},
    )


def test_round_trip_keeps_the_newest(tmp_path):
    assert load_state(tmp_path) is None
    assert latest_step(tmp_path) == 0
    for step in (2, 4, 6, 100_000_000):
        save_state(tmp_path, state(step))
    assert len(list(tmp_path.iterdir())) == KEPT_STATES
    loaded = load_state(tmp_path)
    assert loaded.step == latest_step(tmp_path) == 100_000_000
    assert torch.equal(loaded.optimizer["state"][0]["exp_avg"], torch.full((4, 4), 2e8))
    assert loaded.facts == {"seed": 1}


def test_saving_the_same_step_again_replaces_it(tmp_path):
    save_state(tmp_path, state(3))
    other = state(3)
    other.adapter["a"].fill_(9)
    save_state(tmp_path, other)
    assert load_state(tmp_path).adapter["a"][0, 0] == 9


@pytest.mark.parametrize("name", ["adapter.safetensors", "optimizer.pt", "state.json"])
@pytest.mark.parametrize("content", [b"", b"\0" * 4096, None, "flip"])
def test_damaged_state_is_passed_over(tmp_path, name, content):
    save_state(tmp_path, state(1))
    newest = save_state(tmp_path, state(2))
    if content is None:
        (newest / name).unlink()
    elif content == "flip":
        data = bytearray((newest / name).read_bytes())
        data[-2] ^= 1
        (newest / name).write_bytes(data)
    else:
        (newest / name).write_bytes(content)
    (tmp_path / "passo-00000009 (copia)").mkdir()
    assert load_state(tmp_path).step == 1


def test_states_of_which_none_reads_are_an_error(tmp_path):
    newest = save_state(tmp_path, state(2))
    (newest / "optimizer.pt").write_bytes(b"x")
    with pytest.raises(UserError, match="passo-00000002"):
        load_state(tmp_path)


def test_a_pickle_is_not_executed(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (open, (str(tmp_path / "executado"), "w"))

    folder = save_state(tmp_path, state(1))
    (folder / "optimizer.pt").write_bytes(pickle.dumps(Bomb()))
    described = json.loads((folder / "state.json").read_text())
    described["sha256"]["optimizer.pt"] = hashlib.sha256((folder / "optimizer.pt").read_bytes()).hexdigest()
    (folder / "state.json").write_text(json.dumps(described))
    with pytest.raises(UserError, match="nenhum dos estados"):
        load_state(tmp_path)
    assert not (tmp_path / "executado").exists()


def test_a_refusing_disk_leaves_what_was_there(tmp_path, monkeypatch):
    save_state(tmp_path, state(1))

    def full(*args, **kwargs):
        raise RuntimeError("[enforce fail at inline_container.cc:664] . unexpected pos")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(UserError, match="não consegui salvar"):
        save_state(tmp_path, state(2))
    assert load_state(tmp_path).step == 1
    assert len(list(tmp_path.iterdir())) == 1
