"""Pairs of techniques that test_streaming.py does not try: each lossless one beside each that changes numbers, those two by
two, and attention slicing. A lossless technique changes nothing of the run beside it: losses 1e-5, adapters 1e-4.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from test_streaming import BF16, CHECKPOINTING, OFFLOAD, RELEASES, STREAMING, Run, bases  # noqa: F401  (a fixture)

from lora_trainer.seam.technique import Technique
from lora_trainer.techniques.attention_slicing import AttentionSlicing
from lora_trainer.techniques.cast_fp8 import CastFp8
from lora_trainer.techniques.optimizer_8bit import Optimizer8bit
from lora_trainer.techniques.optimizer_in_backward import OptimizerInBackward
from lora_trainer.techniques.quantize_4bit import Quantize4bit
from lora_trainer.techniques.quantize_8bit import Quantize8bit

SLICING, IN_BACKWARD = AttentionSlicing(score_bytes=1024), OptimizerInBackward()
LOSSLESS: dict[str, tuple[Technique, ...]] = {
    "checkpointing": (CHECKPOINTING,),
    "streaming": (CHECKPOINTING, STREAMING),
    "offload": (CHECKPOINTING, OFFLOAD),
    "in-backward": (IN_BACKWARD,),
    "slicing": (SLICING,),
}
LOSSY: dict[str, tuple[Technique, ...]] = {
    "nf4": (Quantize4bit(), Quantize8bit()),
    "int8": (Quantize8bit(),),
    "fp8": (CastFp8(),),
    "bf16": (BF16,),
    "8-bit": (Optimizer8bit(),),
}
QUANTISERS = ("nf4", "int8", "fp8")
WIDE = {"model_settings": {"lora_rank": 64}}
"""Matrices of 4096 elements, whose moments really are in 8 bits beside "8-bit"."""
Trained = tuple[list[float], torch.Tensor]


@pytest.fixture(scope="module")
def trained(bases: dict[str, Path]) -> Any:  # noqa: F811
    """(release, names of techniques) -> losses and adapter; each run is made once."""
    made: dict[tuple[str, tuple[str, ...]], Trained] = {}

    def train(release: str, *names: str) -> Trained:
        if (release, names) not in made:
            techniques = [one for name in names if name != "wide" for one in (LOSSLESS | LOSSY)[name]]
            if "in-backward" in names and "8-bit" in names:  # then the optimizer is an 8-bit one by its settings
                techniques.remove(*LOSSY["8-bit"])
            bits = {"use_8bit_optimizer": "yes"} if "8-bit" in names else {}
            settings: dict[str, Any] = {"micro_batches": 1, "training": {"max_grad_norm": 0.0, **bits}}
            settings |= WIDE if {"8-bit", "wide"} & set(names) else {}
            settings |= {"dtype": torch.bfloat16} if "bf16" in names else {}
            run = Run(bases[release], tuple(dict.fromkeys(techniques)), **settings)
            made[release, names] = run.losses(), run.state()
        return made[release, names]

    return train


@pytest.mark.parametrize("lossless", LOSSLESS)
@pytest.mark.parametrize("lossy", LOSSY)
@pytest.mark.parametrize("release", RELEASES)
def test_a_lossless_technique_beside_one_that_changes_numbers(trained, release, lossy, lossless):
    expected, adapter = trained(release, lossy)
    losses, other = trained(release, lossy, lossless)
    in_chunks = lossless == "slicing" and lossy == "bf16"  # 16-bit sums of other lengths
    assert losses == pytest.approx(expected, rel=1e-3 if in_chunks else 1e-5)
    assert (other - adapter).abs().max() < (5e-3 if in_chunks else 1e-4)


@pytest.mark.parametrize("mate", [None, *(name for name in LOSSLESS if name != "slicing")])
@pytest.mark.parametrize("release", RELEASES)
def test_slicing_changes_no_number(trained, release, mate):
    expected, adapter = trained(release)
    losses, other = trained(release, *([mate] if mate else []), "slicing")
    assert losses == pytest.approx(expected, rel=1e-5)
    assert (other - adapter).abs().max() < 1e-4


@pytest.mark.parametrize(
    "names", [*((q, other) for q in QUANTISERS for other in ("bf16", "8-bit")), ("bf16", "8-bit")], ids="+".join
)
@pytest.mark.parametrize("release", RELEASES)
def test_two_that_change_numbers_stay_within_the_sum_of_their_bounds(trained, release, names):
    """Losses within 0.2 % for each."""
    plain, _ = trained(release, "wide") if "8-bit" in names else trained(release)
    losses, _ = trained(release, *names)
    assert losses == pytest.approx(plain, rel=4e-3)
    assert losses != plain
