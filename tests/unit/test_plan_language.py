"""The planner on a tiny language model with a large vocabulary: embeddings leave first, a preset's quantised base stays, a
GGUF base is left as it is."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gguf_files import tiny_model, write_model

from lora_trainer.config.declared import with_values
from lora_trainer.config.names import Key
from lora_trainer.config.schema import Config
from lora_trainer.engine.packed import _Packed
from lora_trainer.families import resolve
from lora_trainer.files.sources import open_source
from lora_trainer.machine.hardware import Precision
from lora_trainer.machine.speed import Speed, speed_of
from lora_trainer.planner import ladder
from lora_trainer.planner.advice import remedies
from lora_trainer.planner.ask import not_quantized
from lora_trainer.planner.foresee import _architecture
from lora_trainer.planner.ladder import SOLVED, plain_values
from lora_trainer.planner.plan import (
    CHECKPOINTING,
    EMBEDDINGS,
    OFFLOAD,
    QUANTIZATION,
    STREAMING,
    Candidate,
    Planner,
)
from lora_trainer.planner.rungs import Rungs
from lora_trainer.planner.simulate import Prediction, Shape
from lora_trainer.techniques.optimizer_8bit import Optimizer8bit

BF16 = Precision(torch.bfloat16, torch.bfloat16, scaler=False)
OPTIMIZER_8BIT = Optimizer8bit.key
NOTHING: dict[Key, Any] = {key: "no" for key in SOLVED if key != EMBEDDINGS}
PLAIN: dict[Key, Any] = {**NOTHING, EMBEDDINGS: "no"}
LEAN = {**PLAIN, CHECKPOINTING: "yes"}
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 65536, "hidden_size": 128,
    "intermediate_size": 4096, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 1024, "tie_word_embeddings": False, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
SIMULATED: dict[str, Prediction] = {}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("language")
    (folder / "config.json").write_text(json.dumps(CONFIG), encoding="utf-8")
    return folder


def planner_of(path: Path, available: int | None = None, written: dict[Key, Any] | None = None, **preset: Any) -> Planner:
    """Simulations are made once for all tests; `preset`: memory options that a preset set."""
    config = with_values(
        Config.model_validate({"model": {"architecture": str(path), "lora_rank": 4}, "memory": preset}), written or {}
    )
    family = resolve(config.model, config.data, planning=True)
    family.configure(config.training, config.data)

    def recall(values: Any, simulate: Any) -> Prediction:
        key = f"{path}{sorted(values.items(), key=str)}"
        if key not in SIMULATED:
            SIMULATED[key] = simulate()
        return SIMULATED[key]

    return Planner(family, config, BF16, Shape(1, (16, 1)), available, frozenset(written or {}), recall=recall)


def peak(path: Path, values: dict[Key, Any]) -> int:
    return planner_of(path).simulate(values).peak


def solved(planner: Planner) -> Candidate:
    best = planner.solve()
    assert best.fits(planner.available)
    return best


def test_nothing_leaves_the_card_where_all_fits(base: Path) -> None:
    assert solved(planner_of(base, peak(base, PLAIN))).values == PLAIN


def test_embeddings_leave_before_anything_is_recomputed(base: Path) -> None:
    nothing, lean = peak(base, PLAIN), peak(base, LEAN)
    assert lean < nothing
    assert solved(planner_of(base, (lean + nothing) // 2)).values == {**PLAIN, EMBEDDINGS: "yes"}


def test_embeddings_leave_before_blocks_are_streamed(base: Path) -> None:
    lean, away = peak(base, LEAN), peak(base, {**LEAN, EMBEDDINGS: "yes"})
    assert solved(planner_of(base, (lean + away) // 2)).values == {**LEAN, EMBEDDINGS: "yes"}
    best = solved(planner_of(base, away - 2**20))
    assert best.values[EMBEDDINGS] == "yes"
    assert 0 < best.share < 1
    assert best.lossless


def test_embeddings_that_the_user_keeps_stay(base: Path) -> None:
    planner = planner_of(base, peak(base, {**LEAN, EMBEDDINGS: "yes"}), {EMBEDDINGS: "no"})
    assert planner.solve().values[EMBEDDINGS] == "no"
    assert {one.values[EMBEDDINGS] for one in planner.tried} == {"no"}


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_the_estimate_of_embeddings_is_near(base: Path, share: float) -> None:
    planner = planner_of(base)
    known = planner.simulate({**LEAN, STREAMING: share or "no"})
    away = {**known.values, EMBEDDINGS: "yes"}
    assert planner._peak(known, share, away) == pytest.approx(planner.simulate(away).peak, rel=0.1)


def test_a_preset_s_quantised_base_is_kept_and_is_no_last_resort(base: Path) -> None:
    best = solved(planner_of(base, peak(base, PLAIN), base_quantization="nf4"))
    assert best.values == {**PLAIN, QUANTIZATION: "nf4"}
    tight = planner_of(base, peak(base, {**LEAN, QUANTIZATION: "nf4", EMBEDDINGS: "yes"}), base_quantization="nf4")
    assert solved(tight).values[OPTIMIZER_8BIT] == "no"
    assert all(one.values[QUANTIZATION] == "nf4" for one in tight.tried)


def test_a_larger_quantisation_of_a_preset_may_be_tightened(base: Path) -> None:
    tight = planner_of(base, peak(base, {**LEAN, QUANTIZATION: "nf4"}) // 4, base_quantization="int8")
    tight.solve()
    assert {one.values[QUANTIZATION] for one in tight.tried} <= {"int8", "nf4"}


# -- GGUF


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "base.gguf"
    return write_model(path, tiny_model("llama", intermediate_size=256, num_hidden_layers=6), "llama", "Q4_0")


@pytest.mark.parametrize("written", [False, True])
def test_a_gguf_base_stays_packed_as_it_is(gguf: Path, written: bool) -> None:
    config = Config.model_validate({"model": {"base_model": str(gguf)}, "memory": {"base_quantization": "nf4"}})
    family = resolve(config.model, config.data, planning=True)
    keys = frozenset({QUANTIZATION} if written else ())
    planner = Planner(family, config, BF16, Shape(1, (64, 1)), 1, keys)
    best = planner.solve()
    assert {one.values[QUANTIZATION] for one in planner.tried} == {"no"}
    assert QUANTIZATION not in Rungs(planner, best).saves(simulate=False)
    assert "não se aplica" in str(not_quantized(config, best.values))
    assert not_quantized(Config(), best.values) is None


def test_loading_a_gguf_holds_no_16_bit_copy(gguf: Path) -> None:
    config = Config.model_validate({"model": {"base_model": str(gguf)}})
    family = resolve(config.model, config.data, planning=True)
    planner = Planner(family, config, BF16, Shape(1, (64, 1)), None)
    causes = planner.simulate(LEAN).prediction.phases["load"].causes
    assert causes["temporary"] <= 96 * 64 * 2 * 3  # to look at one layer unpacked


def test_two_gguf_files_are_two_questions(gguf: Path, tmp_path: Path) -> None:
    other = write_model(tmp_path / "base.gguf", tiny_model("llama"), "llama", "Q8_0")
    first, second = (_architecture(open_source(str(path))) for path in (gguf, other))
    assert first == _architecture(open_source(str(gguf)))
    assert first != second


# -- loading, the ladder and the advice


def test_layers_that_need_the_same_are_packed_once(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That the peak is that of packing each is parity/test_prediction.py's to show."""
    packed, pack = [], _Packed.pack_weight
    monkeypatch.setattr(_Packed, "pack_weight", lambda *args: (packed.append(args[0]), pack(*args))[1])
    planner = planner_of(base)
    planner.predict({**LEAN, QUANTIZATION: "nf4"}, planner.shape)
    assert len(packed) == 4  # q and o, k and v, gate and up, down: of the last layer


def test_the_ladder_puts_embeddings_away_where_there_are_any() -> None:
    rung = ladder.Rung({CHECKPOINTING: "no", EMBEDDINGS: "no", OFFLOAD: "no", STREAMING: "no"}, 1)
    changed = []
    while (after := ladder.next_rung(rung)) is not None:
        changed += [key[1] for key, value in after.values.items() if rung.values[key] != value]
        rung = after
    assert changed[:3] == ["gradient_checkpointing", "embedding_offload", "activation_offload"]
    assert set(changed[3:]) == {"block_streaming"}
    fixed = ladder.next_rung(ladder.Rung(LEAN, 1), frozenset({EMBEDDINGS}))
    assert fixed is not None
    assert fixed.values[EMBEDDINGS] == "no"
    loading = ladder.next_rung(ladder.Rung({**PLAIN, CHECKPOINTING: "no"}, 1), frozenset({CHECKPOINTING}), "load")
    assert loading is not None
    assert loading.values[EMBEDDINGS] == "yes"  # needs no recomputation
    images = ladder.next_rung(ladder.Rung({**NOTHING, CHECKPOINTING: "yes"}, 1))
    assert images is not None
    assert EMBEDDINGS not in images.values


def test_without_a_plan_nobody_knows_of_embeddings() -> None:
    assert EMBEDDINGS not in plain_values(Config())
    asked = Config.model_validate({"memory": {"embedding_offload": "yes"}})
    assert plain_values(asked)[EMBEDDINGS] == "yes"


def test_rungs_and_remedies_speak_of_tokens_and_embeddings(base: Path) -> None:
    planner = planner_of(base)
    rungs = Rungs(planner, planner.simulate(LEAN))
    saves = rungs.saves(simulate=False)
    assert saves[EMBEDDINGS] == 2 * 65536 * 128 * 2
    assert saves["data", "max_length"] > 0
    first, second = list(rungs.below())[:2]
    assert first.values == {**LEAN, EMBEDDINGS: "yes"}
    assert first.transferred == pytest.approx(2 * 65536 * 128 * 2, rel=0.2)  # the head, twice
    assert second.values[OFFLOAD] == "yes"
    named = [next(iter(remedy.settings)) for remedy in remedies(planner.config, "backward", saves=saves)]
    assert ("data", "max_length") in named
    assert EMBEDDINGS in named
    assert ("data", "resolution") not in named
    away = replace(planner, tried=[], available=peak(base, {**LEAN, EMBEDDINGS: "yes"}))
    assert Rungs(away, away.solve()).without()[EMBEDDINGS] == peak(base, LEAN)


def test_copies_overlap_with_computing_on_a_card_only() -> None:
    assert Speed(1e9, 1e9, "").seconds(3_000_000_000, 2_000_000_000) == 3
    assert Speed(1e9, 1e9, "", overlaps=False).seconds(3_000_000_000, 2_000_000_000) == 5
    assert (speed_of(None, 8).overlaps, speed_of(None).overlaps) == (True, False)


def test_remedies_for_images_do_not(base: Path) -> None:
    named = [next(iter(remedy.settings)) for remedy in remedies(Config(), "backward")]
    assert ("data", "max_length") not in named
    assert EMBEDDINGS not in named
    assert ("data", "resolution") in named
