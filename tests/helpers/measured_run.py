"""One training run twice: predicted by the simulation, and made for real on the CPU under the same tracker.

The real one takes the run's own steps (setup.Setup, loop.train) on a base read from a file, so that loading,
packing, streaming and the optimizer are what users get. Weights that are read and kept where they were read are told to the
tracker, which would otherwise count them as host memory.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from helpers.original_checkpoint import original_names, tiny_configs, write_words
from lora_trainer import loop
from lora_trainer.bases import architecture
from lora_trainer.bases.components import BUILDERS
from lora_trainer.bases.weights import Piece, Weights
from lora_trainer.config.schema import Config
from lora_trainer.engine.block_streaming import ring_buffers
from lora_trainer.engine.tracker import MemoryTracker, PhasePeak, mark_resident
from lora_trainer.families import resolve
from lora_trainer.files.headers import TensorInfo
from lora_trainer.machine.hardware import DTYPES, Precision
from lora_trainer.planner.ladder import Rung
from lora_trainer.planner.simulate import (
    Prediction,
    Shape,
    WatchedPlan,
    first_update,
    simulate_run,
    simulation_device,
    state_tensors,
)
from lora_trainer.planner.techniques import make_plan
from lora_trainer.run.setup import Setup, Target
from lora_trainer.seam.family import Batch, Family, Framing, Sampling
from lora_trainer.techniques import MemoryPlan

CPU = torch.device("cpu")
PHASES = ("load", "forward", "backward", "optimizer")
Configs = dict[str, dict[str, Any]]


def _sd1(configs: Configs, widths: list[int], text_width: int) -> None:
    released = architecture.shipped("sd1", "unet")
    configs["unet"] = {**released, "block_out_channels": widths, "cross_attention_dim": text_width}
    _text(configs["text_encoder"], text_width)


def _sdxl(configs: Configs, widths: list[int], layers: list[int], pooled: int) -> None:
    released = architecture.shipped("sdxl", "unet")
    _text(configs["text_encoder"], 64)
    _text(configs["text_encoder_2"], 128, pooled)
    configs["unet"] = {
        **released,
        "block_out_channels": widths,
        "attention_head_dim": [max(1, width // 64) for width in widths],
        "transformer_layers_per_block": layers,
        "cross_attention_dim": 64 + 128,
        "addition_time_embed_dim": 8,
        "projection_class_embeddings_input_dim": pooled + 6 * 8,
    }


def _text(config: dict[str, Any], width: int, pooled: int | None = None) -> None:
    config.update(hidden_size=width, intermediate_size=4 * width, num_attention_heads=width // 64)
    if pooled:
        config["projection_dim"] = pooled


def _small(configs: Configs, text_width: int) -> None:
    """Two levels of one layer."""
    configs["unet"] |= {"block_out_channels": [64, 128], "cross_attention_dim": text_width}
    _text(configs["text_encoder"], 64)


SIZES: dict[str, tuple[str, Callable[[Configs], None]]] = {
    "sd15-small": ("sd1", lambda configs: _small(configs, 64)),
    "sdxl-small": ("sdxl", lambda configs: _small(configs, 128)),
    "sd15-narrow": ("sd1", lambda configs: _sd1(configs, [64, 128, 256, 256], 128)),
    "sdxl-narrow": ("sdxl", lambda configs: _sdxl(configs, [64, 128, 256], [1, 2, 4], 64)),
    "sd15-full": ("sd1", lambda configs: _sd1(configs, [320, 640, 1280, 1280], 768)),
}
"""Name -> release, and what makes its smallest configs into these. Of the full one only the UNet is full-size."""


def write_base(folder: Path, size: str) -> Path:
    """A base of random weights in 16 bits, in the layout of an original single file."""
    release, widen = SIZES[size]
    folder.mkdir(parents=True, exist_ok=True)
    configs = tiny_configs(release, write_words(folder / "words"))
    widen(configs)
    torch.manual_seed(0)
    modules: dict[str, nn.Module] = {name: BUILDERS[name](config).half() for name, config in configs.items()}
    state = original_names(release, modules, configs)
    path = folder / "base.safetensors"
    save_file({name: value.contiguous() for name, value in state.items()}, path)
    return path


@dataclass(frozen=True)
class Case:
    """What to train, and how; `options` are of the config's sections, in their English names.

    `size`: a key of SIZES, or, where no base file is given, a family's name: its released UNet, with random weights.
    """

    size: str
    resolution: tuple[int, int] = (256, 256)
    batch: int = 1
    accumulation: int = 1
    precision: str = "bf16"
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)

    def config(self, base: Path | None) -> Config:
        files = {"base_model": str(base), "tokenizer": str(base.parent / "words")} if base else {"family": self.size}
        sections: dict[str, dict[str, Any]] = {
            "model": {**files, "lora_rank": 8},
            "data": {"resolution": list(self.resolution)},
            "training": {
                "batch_size": self.batch,
                "gradient_accumulation_steps": self.accumulation,
                "gradient_checkpointing": "no",
                "use_8bit_optimizer": "no",
            },
        }
        for name, values in self.options.items():
            sections[name] = {**sections.get(name, {}), **values}
        return Config.model_validate(sections)

    def compute(self) -> Precision:
        dtype = DTYPES["no" if self.precision == "fp32" else self.precision]
        return Precision(dtype, dtype, scaler=False)

    def open(self, base: Path | None) -> tuple[Family, Config]:
        config = self.config(base)
        family = resolve(config.model, config.data, planning=base is None)
        family.configure(config.training, config.data)
        if base is None:
            give_random_weights(family)
        return family, config


class RandomWeights(Weights):
    """As read from a file of 16-bit weights, without the file: tensors are cut from one stretch of random numbers."""

    def __init__(self, module: nn.Module) -> None:
        self.header, offset = {}, 0
        for name, value in module.state_dict().items():
            self.header[name] = TensorInfo("F16", tuple(value.shape), 2 * value.numel(), offset)
            offset += 2 * value.numel()
        longest = max(value.numel() for value in module.state_dict().values())
        self._numbers = torch.empty(longest).normal_(std=0.02, generator=torch.Generator().manual_seed(0)).half()

    def read(self, key: str) -> Tensor:
        shape = self.header[key].shape
        if len(shape) == 1:  # norms and biases
            return torch.full(shape, float(key.endswith("weight")), dtype=torch.float16)
        return self._numbers[: math.prod(shape)].reshape(shape).clone()


def give_random_weights(family: Any) -> None:
    """To the UNet or transformer of a family that was opened for planning."""
    part = next(name for name in ("unet", "transformer") if name in family.components)
    network = family.components[part]
    weights = RandomWeights(network.skeleton())
    family.components[part] = replace(network, weights=weights, locate=lambda name: [Piece(name)])


def predict(case: Case, base: Path | None, folder: Path = Path()) -> Prediction:
    family, config = case.open(base)
    plan = make_plan(config, case.compute(), simulation_device(), folder)
    shape = Shape(case.batch, case.resolution, case.accumulation, previews=False)
    return simulate_run(family, config, case.compute().frozen, plan, shape)


@dataclass(frozen=True)
class Measured:
    phases: dict[str, PhasePeak]
    losses: list[float]

    @property
    def peak(self) -> int:
        return training_peak(self.phases)


def training_peak(phases: Mapping[str, PhasePeak]) -> int:
    return max(phases[name].total for name in PHASES)


def measure(case: Case, base: Path | None, steps: int = 2, folder: Path = Path()) -> Measured:
    """The same on real tensors: the model read from its file, then whole optimizer steps."""
    family, config = case.open(base)
    with MemoryTracker() as tracker:
        tracker.enter_phase("load")
        trainee = build(case, family, config, tracker, folder)
        tracker.enter_phase("optimizer")
        if steps == 1:  # in a run the optimizer's state is there from the second step on
            first_update(trainee, tracker)
        tracker.enter_phase("forward")
        batch = random_batch(family, case)  # on the device, as a batch is when its turn comes
        watch_optimizer(trainee, tracker)
        windows = ((step, [batch] * case.accumulation) for step in range(steps))
        losses = [report.loss for report in loop.train(trainee, windows, lambda step: 1.0)]
        return Measured(tracker.peaks(), losses)


@torch.no_grad()
def measure_between(case: Case, base: Path) -> dict[str, PhasePeak]:
    """Validation and a preview after a real optimizer step, as run/training.py and data/preview.py make them."""
    family, config = case.open(base)
    with MemoryTracker() as tracker:
        tracker.enter_phase("load")
        trainee, batch = build(case, family, config, tracker, Path()), random_batch(family, case)
        watch_optimizer(trainee, tracker)
        with torch.enable_grad():
            next(loop.train(trainee, [(0, [batch])], lambda step: 1.0))
        plan = MemoryPlan(trainee.plan.techniques)
        trainee.model.eval()
        tracker.enter_phase("validation")
        with plan.step_context():
            family.loss(trainee.model, batch)
        tracker.enter_phase("preview")
        one = {name: value[0] for name, value in batch.items() if name not in ("latents", "seeds", "weight")}
        with plan.step_context():
            latents = family.sample(trainee.model, [one], one, Sampling(case.resolution, steps=2))
        vae = family.load_vae(CPU, case.compute().frozen)
        mark_resident(vae, tracker)
        family.decode_image(vae, latents)
        return tracker.peaks()


@torch.no_grad()
def measure_caching(case: Case, base: Path) -> dict[str, PhasePeak]:
    """A caption and an image encoded, as data/encode.py does."""
    family, _ = case.open(base)
    dtype = case.compute().frozen
    with MemoryTracker() as tracker:
        tracker.enter_phase("text_cache")
        encoders = family.load_text_encoders(CPU, dtype)
        mark_resident(encoders, tracker)
        family.encode_text(encoders, ["a photo"])
        del encoders
        tracker.enter_phase("latent_cache")
        vae = family.load_vae(CPU, dtype)
        mark_resident(vae, tracker)
        pixels = torch.rand(1, 3, case.resolution[1], case.resolution[0])
        family.encode_image(vae, pixels, [Framing(case.resolution, (0, 0), case.resolution)])
        return tracker.peaks()


def watch_optimizer(trainee: loop.Trainee, tracker: MemoryTracker) -> None:
    """Tell the tracker when the update begins, and what it leaves."""

    def begin(*_: object) -> None:
        tracker.mark((p.grad for p in trainee.params if p.grad is not None), "gradients")
        tracker.enter_phase("optimizer")

    trainee.optimizer.register_step_pre_hook(begin)
    trainee.optimizer.register_step_post_hook(lambda *_: tracker.mark(state_tensors(trainee.optimizer), "optimizer"))


def set_up(
    case: Case,
    family: Family,
    config: Config,
    folder: Path,
    device: torch.device = CPU,
    precision: Precision | None = None,
) -> Setup:
    """As a run does."""
    with_text = config.model.train_text_encoder
    target = Target(family, config, device, precision or case.compute(), 0, with_text, folder, tell=print)
    setup = Setup(target, Rung({}, case.batch))
    setup.build()
    return setup


def build(case: Case, family: Family, config: Config, tracker: MemoryTracker, folder: Path) -> loop.Trainee:
    """Ready to step, watched."""
    setup = set_up(case, family, config, folder)
    mark_resident(setup.model, tracker)
    tracker.mark(ring_buffers(setup.model), "frozen")
    trainee = setup.trainee()
    return replace(trainee, plan=WatchedPlan(trainee.plan.techniques, tracker))


def random_batch(family: Family, case: Case) -> Batch:
    batch, rng = family.example_batch(case.batch, case.resolution), torch.Generator().manual_seed(0)
    for name, value in batch.items():
        if value.is_floating_point() and name != "weight":
            batch[name] = torch.randn(value.shape, generator=rng)
    return {**batch, "seeds": torch.arange(case.batch)}
