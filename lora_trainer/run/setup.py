"""What is trained, ready to step: model, adapter, techniques, optimizer, loss scaler. Built under a plan, and anew under a
tighter one, with everything that was learned so far.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import adapters
from ..adapters import training_lora
from ..config.declared import with_values
from ..config.schema import Config
from ..engine.tracker import hold, host_memory
from ..journal.checkpoint import State, on_cpu
from ..loop import Trainee
from ..machine import hardware
from ..optim import optimizers, resume
from ..planner.ladder import Rung
from ..planner.techniques import make_plan
from ..runtime.recover import free_memory
from ..seam.family import Family
from ..techniques import MemoryPlan
from .resume import resume_options


@dataclass(frozen=True)
class Target:
    """Where and of what a setup is built; the same however often."""

    family: Family
    config: Config
    device: torch.device
    precision: hardware.Precision
    seed: int
    with_text: bool
    """Captions are encoded while training."""
    folder: Path
    """For a host master on disk."""
    tell: Callable[..., None]


@dataclass
class Setup:
    """`build` first. Dropping and building again leaves the adapter's numbers as the state given says."""

    target: Target
    rung: Rung
    checked: bool = False
    """The base was found whole."""
    model: nn.ModuleDict = field(init=False)
    adapter: adapters.Adapter = field(init=False)
    optimizer: torch.optim.Optimizer = field(init=False)
    scaler: torch.amp.GradScaler = field(init=False)
    plan: MemoryPlan = field(init=False)

    def build(self, state: State | None = None) -> None:
        """Load the frozen base, put the adapter on it, apply the plan, make the optimizer; then `state`, if given."""
        target, config = self.target, self.config
        family = target.family
        self.plan = make_plan(config, target.precision, target.device, target.folder)
        self.model = family.load_model(
            target.device,
            target.precision.frozen,
            with_text=target.with_text,
            prepare=lambda model: self.plan.convert(model, family.blocks(model)),
        )
        training_lora.wear(self.model, family, config.model, target.precision.frozen)
        hold(self.model)
        if not self.checked:
            target.tell(*adapters.check_base(self.model))
        self.checked = True
        groups = family.blocks(self.model)
        formats = family.chosen_formats(config.output.formats)
        self.adapter = adapters.inject(self.model, family, config.model, target.seed, formats)
        if config.model.initial_lora:
            self.adapter.load_file(Path(config.model.initial_lora))
        hardware.assert_trainable_float32(self.model)
        self.plan.wrap(self.model, groups)
        named = self.adapter.named_parameters()
        param_groups = optimizers.param_groups(named, config.training, self.adapter.rates)
        self.optimizer = self.plan.build_optimizer(param_groups, config.training)
        self.scaler = self.plan.scaler()
        if state is not None:
            self.load(state)
        free_memory(target.device)

    @property
    def config(self) -> Config:
        """With the options of the rung in force."""
        return with_values(self.target.config, dict(self.rung.values))

    def options(self) -> dict[str, Any]:
        """What a state depends on."""
        return resume_options(self.config, self.target.seed)

    def techniques(self) -> list[str]:
        """Names of the classes in force, in their order."""
        return [type(technique).__name__ for technique in self.plan.ordered()]

    def trainee(self) -> Trainee:
        target, params = self.target, list(self.adapter.named_parameters().values())
        limit = target.config.training.max_grad_norm
        return Trainee(
            target.family, self.model, params, self.optimizer, self.scaler, self.plan, target.device, target.seed, limit
        )

    def state(self, step: int, data: str) -> State:
        """Everything learned so far, on the CPU. `data`: the dataset's fingerprint."""
        with host_memory():
            optimizer, scaler = on_cpu(self.optimizer.state_dict()), self.scaler.state_dict()
            return State(step, self.adapter.state_dict(), optimizer, scaler, {"data": data, "options": self.options()})

    def load(self, state: State) -> None:
        self.adapter.load_state_dict(state.adapter)
        resume.load_state(self.optimizer, state.optimizer, self.target.config.training)
        self.scaler.load_state_dict(state.scaler)

    def forget_gradients(self) -> None:
        """Of a window that is not to be used; a scaler would remember that it had unscaled them."""
        self.optimizer.zero_grad(set_to_none=True)
        kept = self.scaler.state_dict()
        self.scaler = self.plan.scaler()
        self.scaler.load_state_dict(kept)
        free_memory(self.target.device)

    def drop(self) -> None:
        """Let go of everything on the device."""
        for name in ("model", "adapter", "optimizer", "scaler", "plan"):
            vars(self).pop(name, None)
        free_memory(self.target.device)
