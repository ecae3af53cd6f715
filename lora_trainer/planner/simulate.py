"""Peak memory of a run before it starts: the real code of every phase, run on fake tensors, watched by the tracker.

Nothing here is a formula for what can be run. The family builds its modules on meta, the plan's techniques change them
as they would, every parameter becomes a fake tensor, and two real optimizer steps are made. Under a CPU-only PyTorch the
fake tensors are "cpu" ones (SDPA then takes its fused kernel, as on a card); on a CUDA build they are "cuda" ones.
What a tracker cannot see (CUDA context, workspaces, fragmentation) is allowance.py's business.
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from .. import adapters, loop
from ..adapters import training_lora
from ..config.schema import Config
from ..engine.block_streaming import ring_buffers
from ..engine.fake import QuickFakeMode
from ..engine.tracker import MemoryTracker, PhasePeak, host_memory, mark_resident, own_tensors
from ..engine.vae_tiling import decodes_tiled, tiled
from ..optim import optimizers
from ..optim.offloaded import Offloaded
from ..seam.family import Batch, Family, Framing, ImageFamily, Sampling
from ..techniques import MemoryPlan
from .encoders import load_encoders, stream_encoders

TRAINING_PHASES = ("forward", "backward", "optimizer")


@dataclass(frozen=True)
class Prediction:
    """Bytes by phase; FLOPs and transferred bytes of one optimizer step."""

    phases: dict[str, PhasePeak]
    flops: int
    transferred: int


@dataclass(frozen=True)
class Shape:
    """The worst batch of the run: pixels as (width, height), and what surrounds a step."""

    batch_size: int
    resolution: tuple[int, int]
    accumulation: int = 1
    previews: bool = True
    validation: bool = False
    preview_resolution: tuple[int, int] | None = None


def simulation_device() -> torch.device:
    """Where fake tensors live: "cuda" aborts in the backward pass of a CPU-only build."""
    return torch.device("cuda" if torch.version.cuda and torch.cuda.is_available() else "cpu")


def simulate_run(family: Family, config: Config, dtype: torch.dtype, plan: MemoryPlan, shape: Shape) -> Prediction:
    """Load, forward, backward, optimizer, and what happens between two steps beside the optimizer's state: validation and a
    preview. `plan` is one made for `simulation_device()`."""
    vae = None
    if shape.previews and isinstance(family, ImageFamily):
        vae = family.load_vae(torch.device("meta"), dtype)
    batch = family.example_batch(shape.batch_size, shape.resolution)
    with _fake_run(family, config, dtype, plan) as (tracker, trainee):
        flops, transferred = _step(trainee, _fake_batch(batch, trainee.device), tracker, shape.accumulation)
        trainee.model.eval()
        with torch.no_grad():
            if shape.validation:
                tracker.enter_phase("validation")
                with plan.step_context():
                    family.loss(trainee.model, _fake_batch(batch, trainee.device))
            if vae is not None and isinstance(family, ImageFamily):
                tracker.enter_phase("preview")
                size = shape.preview_resolution or shape.resolution
                guidance = family.usual_guidance if config.samples.guidance is None else config.samples.guidance
                with tiled(vae, decodes_tiled(config.memory.vae_tiling, size)):
                    _preview(family, trainee.model, vae, plan, Sampling(size, 1, guidance), tracker)
        phases = tracker.peaks()
    return Prediction(phases, flops, transferred)


def simulate_captions(
    family: ImageFamily, dtype: torch.dtype, *, quantization: str = "no", streaming: bool = False
) -> PhasePeak:
    """Text encoders, loaded and run on one caption."""
    encoders = load_encoders(family, torch.device("meta"), dtype, quantization=quantization, streaming=streaming)
    with _simulation() as tracker, torch.no_grad():
        tracker.enter_phase("text_cache")
        make_fake(encoders, simulation_device(), tracker)
        if streaming:
            stream_encoders(encoders)
            tracker.mark(ring_buffers(encoders), "frozen")
        family.encode_text(encoders, [""])
        return tracker.peaks()["text_cache"]


def simulate_images(
    family: ImageFamily, dtype: torch.dtype, resolution: tuple[int, int], *, tiles: bool = False
) -> PhasePeak:
    """The VAE, loaded and run on one image of (width, height) pixels."""
    device, vae = simulation_device(), family.load_vae(torch.device("meta"), dtype)
    with _simulation() as tracker, torch.no_grad(), tiled(vae, tiles):
        tracker.enter_phase("latent_cache")
        make_fake(vae, device, tracker)
        pixels = torch.empty(1, 3, resolution[1], resolution[0], device=device)
        family.encode_image(vae, pixels, [Framing(resolution, (0, 0), resolution)])
        return tracker.peaks()["latent_cache"]


@contextmanager
def _simulation() -> Iterator[MemoryTracker]:
    """Fake tensors, a tracker, and the caller's random state untouched."""
    tracker = MemoryTracker(device=simulation_device())
    with torch.random.fork_rng(devices=[]), QuickFakeMode(), tracker:
        yield tracker


@contextmanager
def _fake_run(
    family: Family, config: Config, dtype: torch.dtype, plan: MemoryPlan
) -> Iterator[tuple[MemoryTracker, loop.Trainee]]:
    """Model, adapter and optimizer as run/training.py builds them, after their first update.

    The model is made on meta before the mode is entered: `Module.to` and peft's injection fail on fake parameters.
    """
    model = meta_model(family, config, dtype, plan)
    training_lora.wear(model, family, config.model, dtype)
    adapter = adapters.inject(model, family, config.model, seed=0, formats=family.chosen_formats(config.output.formats))
    with _simulation() as tracker:
        tracker.enter_phase("load")
        make_fake(model, simulation_device(), tracker, checked=True)
        adapter.rehearse_start()
        plan.wrap(model, family.blocks(model))
        tracker.mark(ring_buffers(model), "frozen")
        trainee = _trainee(family, config, model, adapter, plan, tracker)
        tracker.enter_phase("optimizer")
        first_update(trainee, tracker)
        yield tracker, trainee


def meta_model(family: Family, config: Config, dtype: torch.dtype, plan: MemoryPlan) -> nn.ModuleDict:
    """The base on meta, as the plan stores it; with text encoders where they are part of the trained model."""
    with_text = config.model.train_text_encoder or config.data.cache_text_encoder == "no"
    return family.load_model(
        torch.device("meta"), dtype, with_text=with_text, prepare=lambda m: plan.convert(m, family.blocks(m))
    )


def make_fake(model: nn.Module, device: torch.device, tracker: MemoryTracker, *, checked: bool = False) -> None:
    """Give every meta tensor a fake one: packed layers what they pack, layers with a `home` in host memory.

    In the order of the base's file, where one is known; adapters come last, after a `checked` base was looked through.
    Of packed layers that need the same, only the last is packed by `pack_weight`: most lies beside it. The others, and what
    comes packed from a file, get tensors of the packed shapes.
    """
    layer: Any
    layers: list[Any] = sorted(model.modules(), key=lambda layer: getattr(layer, "read_at", (math.inf, 0)))
    packed = (layer for layer in layers if hasattr(layer, "pack_weight") and not _comes_packed(layer))
    last = {(layer.packing, layer.weight_shape, layer.weight_dtype): layer for layer in packed}
    to_pack = set(last.values())
    for layer in layers:
        home = getattr(layer, "home", device)
        if layer in to_pack:
            layer.pack_weight(torch.empty(layer.weight_shape, dtype=layer.weight_dtype, device=device), home)
        _fake_tensors(layer, home, trained=False)
    if checked:
        _unpack_one_by_one(model)
    for layer in model.modules():
        _fake_tensors(layer, getattr(layer, "home", device), trained=True)
    mark_resident(model, tracker)


def _comes_packed(layer: Any) -> bool:
    return layer.packing.from_file or getattr(layer, "as_stored", False)


def _fake_tensors(layer: Any, home: torch.device, *, trained: bool) -> None:
    with host_memory(hasattr(layer, "home")):
        for owner, name, old in own_tensors(layer):
            if old.is_meta and old.requires_grad == trained:
                value = torch.empty(old.shape, dtype=old.dtype, device=home)
                owner[name] = nn.Parameter(value, old.requires_grad) if isinstance(old, nn.Parameter) else value


def _unpack_one_by_one(model: nn.Module) -> None:
    """As adapters.check_base does to packed layers; those of one shape need the same."""
    layers: list[Any] = [layer for layer in model.modules() if hasattr(layer, "unpacked") and not hasattr(layer, "home")]
    for layer in {(layer.packing, layer.weight_shape): layer for layer in layers}.values():
        layer.unpacked()


def _trainee(
    family: Family,
    config: Config,
    model: nn.ModuleDict,
    adapter: adapters.Adapter,
    plan: MemoryPlan,
    tracker: MemoryTracker,
) -> loop.Trainee:
    named = adapter.named_parameters()
    groups = optimizers.param_groups(named, config.training, adapter.rates)
    optimizer = plan.build_optimizer(groups, config.training)
    scaler = torch.amp.GradScaler("cpu", enabled=False)  # the real one waits for values, which fakes have not
    watched = WatchedPlan(plan.techniques, tracker)
    limit, device = config.training.max_grad_norm, simulation_device()
    return loop.Trainee(family, model, list(named.values()), optimizer, scaler, watched, device, 0, limit)


@dataclass(frozen=True)
class WatchedPlan(MemoryPlan):
    """Tells the tracker where the forward pass begins and the backward pass follows."""

    tracker: MemoryTracker | None = None

    @contextmanager
    def step_context(self) -> Iterator[None]:
        assert self.tracker is not None
        self.tracker.enter_phase("forward")
        with super().step_context():
            yield
        self.tracker.mark_saved()
        self.tracker.enter_phase("backward")


def first_update(trainee: loop.Trainee, tracker: MemoryTracker) -> None:
    """The optimizer's state comes to be in the first update; the steps after it are the ones that count."""
    for parameter in trainee.params:
        parameter.grad = torch.zeros_like(parameter)
    trainee.optimizer.step()
    tracker.mark(state_tensors(trainee.optimizer), "optimizer")
    trainee.optimizer.zero_grad(set_to_none=True)


def _step(trainee: loop.Trainee, batch: Batch, tracker: MemoryTracker, accumulation: int) -> tuple[int, int]:
    """The last micro-batch of a window and the update: earlier ones have left their gradients behind.

    Returns FLOPs and transferred bytes of the whole window.
    """
    if accumulation > 1:
        for parameter in trainee.params:
            parameter.grad = torch.zeros_like(parameter)
        tracker.mark((p.grad for p in trainee.params if p.grad is not None), "gradients")
    tracker.flops = tracker.transferred = 0
    loop.gradients(trainee, [batch], 0, trainee.family.num_terms(batch))
    tracker.mark((p.grad for p in trainee.params if p.grad is not None), "gradients")
    flops, transferred = tracker.flops * accumulation, tracker.transferred * (accumulation - 1)
    tracker.enter_phase("optimizer")
    trainee.optimizer.step()
    trainee.optimizer.zero_grad(set_to_none=True)
    return flops, transferred + tracker.transferred


def state_tensors(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """Moments and what else an optimizer keeps of each parameter, but for what lies in host memory."""
    away = optimizer.in_host() if isinstance(optimizer, Offloaded) else set()
    values = (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))
    return (value for value in values if id(value) not in away)


def _fake_batch(batch: Batch, device: torch.device) -> Batch:
    """All but the seeds, whose values drive random generators."""
    moved = {name: torch.empty(value.shape, dtype=value.dtype, device=device) for name, value in batch.items()}
    return {**moved, "seeds": batch["seeds"]}


def _preview(
    family: ImageFamily,
    model: nn.ModuleDict,
    vae: nn.Module,
    plan: MemoryPlan,
    sampling: Sampling,
    tracker: MemoryTracker,
) -> None:
    """Denoising, and the decoding of one picture."""
    example = {name: value[0] for name, value in family.example_batch(1, sampling.size).items()}
    conditions = {name: value for name, value in example.items() if name not in ("latents", "seeds", "weight")}
    with plan.step_context():
        latents = family.sample(model, [conditions], conditions, sampling)
    make_fake(vae, latents.device, tracker)
    family.decode_image(vae, latents)
