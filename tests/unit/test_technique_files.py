"""What techniques declare of themselves is true, and read: by name of their file, whatever they are."""

import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch
from torch import nn

from lora_trainer import plugins
from lora_trainer.config import names
from lora_trainer.config.declared import PACKAGE, Declared, conflicts, options, sharing, techniques
from lora_trainer.config.schema import Config
from lora_trainer.planner.ladder import LADDER, SOLVED, Rung, Step, next_rung, splits
from lora_trainer.planner.table import table
from lora_trainer.seam.family import BlockGroup
from lora_trainer.seam.technique import WrapTechnique
from lora_trainer.techniques import packing
from lora_trainer.techniques._quantizer import BASE, TEXT, Quantizer

ROOT = Path(__file__).parents[2]
FILES = plugins.available(PACKAGE)
QUANTIZERS = sharing(BASE.key)


def test_their_files_are_read_without_pytorch() -> None:
    """The config, which they are part of, is read before anything heavy."""
    lines = "; ".join(f"import {PACKAGE}.{one}" for one in FILES)
    told = f"import sys; {lines}; import lora_trainer.config.loading; print('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, cwd=ROOT).stdout == "False\n"


@pytest.mark.parametrize("one", techniques(), ids=FILES)
def test_every_option_has_words_in_both_languages_and_a_row(one) -> None:
    for declared in one.options:
        option = names.options()[declared.key]
        assert option.doc_pt
        assert option.doc_en
        assert "{" not in option.doc_pt + option.doc_en
        assert option.default == declared.default
    for name in one.needs:
        assert name in FILES
    if one.options:
        assert all(one.title + one.when)


def test_the_schema_has_no_option_twice_and_places_are_their_own() -> None:
    places = [declared.place for declared in options().values()]
    assert len(set(places)) == len(places)
    shared = [declared for one in techniques() for declared in one.options]
    assert all(options()[declared.key] is declared for declared in shared)


@pytest.mark.parametrize("lang", ["pt", "en"])
def test_the_readme_says_what_techniques_declare(lang: str) -> None:
    text = (ROOT / {"pt": "README.pt-BR.md", "en": "README.md"}[lang]).read_text(encoding="utf-8")
    assert "\n".join(table(lang)) in text, f"python -m lora_trainer.planner.table {lang}"


def test_conflicts_come_from_needs_and_excludes() -> None:
    told = {(one.first, one.second) for one in conflicts()}
    assert (("memory", "block_streaming"), ("training", "gradient_checkpointing")) in told
    assert (("memory", "optimizer_in_backward"), ("training", "max_grad_norm")) in told


def test_what_forbids_accumulation_forbids_splitting() -> None:
    assert splits(Config())
    assert not splits(Config.model_validate({"training": {"max_grad_norm": 0}, "memory": {"optimizer_in_backward": "yes"}}))


# -- the ladder


def test_rungs_are_the_mildest_first_and_none_is_only_the_users() -> None:
    mildness = [step.chosen[0].mildness for step in LADDER]
    assert mildness == sorted(mildness)
    assert not any(technique.asked_only for step in LADDER for technique in step.chosen)
    assert ("memory", "optimizer_in_backward") not in SOLVED


@pytest.mark.parametrize("phase", ["train", "load", "optimizer", "validation", "preview", "save"])
def test_recovery_changes_no_number(phase: str) -> None:
    rung, lossy = Rung(dict.fromkeys(SOLVED, "no"), 2), [step.key for step in LADDER if not step.lossless]
    while (lower := next_rung(rung, phase=phase)) is not None:
        rung = lower
    assert all(rung.values[key] == "no" for key in lossy if key in rung.values)


def test_a_value_that_only_users_ask_for_may_be_tightened() -> None:
    step = next(step for step in LADDER if step.key == BASE.key)
    assert step.after("no") == "int8"
    assert step.after("fp8") == "int8"
    assert step.after("int8") == "nf4"
    assert step.after("nf4") is None
    assert step.tightness("no") < step.tightness("fp8") < step.tightness("int8")


class InWords(WrapTechnique):
    options = (Declared(("memory", "in_words"), "em_palavras", place=1, docs=("a", "b"), kind=str, steps=("half", "full")),)
    needs: ClassVar[dict[str, tuple[str, str]]] = {"block_streaming": ("a", "b")}

    @classmethod
    def on(cls, value: object) -> bool:
        return value in ("half", "full")


def test_values_in_words_are_rungs_too_and_what_is_needed_comes_with_its_own_value() -> None:
    step, streaming = Step(InWords.options[0], (InWords,)), ("memory", "block_streaming")
    assert [step.after(value) for value in ("no", "half", "full")] == ["half", "full", None]
    assert step.bringing({streaming: "no"}) == {streaming: 1.0}
    assert step.bringing({streaming: 0.25}) == {streaming: 0.25}


# -- quantisers


@pytest.mark.parametrize("one", QUANTIZERS, ids=[one.value for one in QUANTIZERS])
def test_a_quantiser_states_its_bound_and_what_it_takes(one: type[Quantizer]) -> None:
    weight = torch.randn(96, 320, generator=torch.Generator().manual_seed(0))
    block = nn.Sequential(nn.Linear(320, 96, bias=False, device="meta"))
    block.requires_grad_(False)
    for technique in packing(one.value):
        technique().convert(block, [BlockGroup("blocks", [block])])
    block[0].pack_weight(weight, torch.device("cpu"))
    error = (block[0].unpacked() - weight).norm() / weight.norm()
    assert 0.5 * one.loses < error < one.loses
    assert block[0].packing.title == one.value
    held = sum(tensor.nbytes for tensor in block[0].packed())
    assert 1 - held / (2 * weight.numel()) == pytest.approx(one.takes["frozen"], abs=0.02)


def test_text_encoders_take_what_declares_so() -> None:
    assert [one.value for one in sharing(TEXT.key)] == ["int8", "nf4"]
    assert names.options()[TEXT.key].choices == ("auto", "no", "nf4", "int8")
    assert set(names.options()[BASE.key].choices) == {"auto", "no", *(one.value for one in QUANTIZERS)}
