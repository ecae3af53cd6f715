"""What all diffusion families share: corrupt, predict, compare. The loss is written once, here.

A family writes `predict` and says what its networks are; `run/run.py` hands it an objective made from the user's settings.
"""

import hashlib
import json
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from ..bases.component import Component, load_all
from ..config.names import shown
from ..config.schema import DataConfig, TrainingConfig
from ..engine.branch import taken_off
from ..engine.host import compute_device
from ..errors import ConfigError, t
from ..seam.family import Batch, Example, Framing, ImageFamily, Prepare, Sampling
from . import vae as _vae
from .objective import NoisePrediction, Objective, alphas_cumprod
from .prompts import trim
from .rectified_flow import RectifiedFlow, Shift
from .sampling import sample_latents

PROBE_SIDE = 8
"""Latent pixels, each side, of the picture that a reloaded file is tried on."""
PROBE_TOKENS = 77
"""Of the caption beside it: the proof should not need more memory than training on short captions did."""

__all__ = ["DiffusionFamily", "NoisePrediction", "Objective", "make_objective"]


class DiffusionFamily(ImageFamily):
    """`open` sets `prediction_type` and `schedule_config`; `objective` is set before the first loss."""

    objective: Objective
    prediction_type: Literal["epsilon", "v_prediction", "flow"]
    schedule_config: dict[str, Any]
    """beta_start, shift, num_train_timesteps, … as in diffusers' scheduler_config.json."""
    patch: ClassVar[int] = 2
    """Latent pixels that a transformer's token covers, along each side."""
    timestep_sampling: ClassVar[str] = "logit_normal"
    """What `treino.amostragem_passo_ruido: auto` is: as the family's own training script draws noise levels."""
    training_shift: ClassVar[float | Literal["auto", "resolution"]] = "auto"
    """How far they are shifted where the user does not say: "auto" is as its scheduler does when drawing."""
    distilled: bool = False
    """Draws from the prompt alone: its guidance, if any, is an input (`guidance` (B,) of the batch), not a difference."""

    last_level: float | None = None
    """Noise of a drawing's last step before the shift, where it is not 1 / steps."""
    levels: Sequence[float] | None = None
    """Noise of each step of a drawing in just so many, where the model was distilled to these."""
    training_guidance: float = 1.0
    components: Mapping[str, Component]
    """Networks by part: unet, vae, text_encoder, …"""
    trained: ClassVar[str]
    """The part that is trained: unet, transformer."""
    text_parts: tuple[str, ...]
    """Text encoders, by their diffusers names."""
    upcast_vae: ClassVar[bool] = True
    """The VAE's activations overflow fp16, unless its own config says that it was mended."""
    latents: ClassVar[_vae.Latents | None] = None
    """Of a VAE that is spoken to in its own way."""
    scaling_factor: float
    shift_factor: float = 0.0
    latent_facts: tuple[float, ...] = ()
    """What latents depend on besides the VAE."""

    # -- networks

    def architecture(self) -> str:
        return json.dumps({name: part.config for name, part in self.components.items()}, sort_keys=True, default=str)

    def num_bytes(self, dtype: torch.dtype) -> int:
        return max(component.num_bytes(dtype) for component in self.components.values())

    def load_model(
        self, device: torch.device, dtype: torch.dtype, *, with_text: bool = False, prepare: Prepare | None = None
    ) -> nn.ModuleDict:
        names = [self.trained, *(self.text_parts if with_text else ())]
        return load_all(self.components, names, device, dtype, prepare)

    def load_text_encoders(
        self, device: torch.device, dtype: torch.dtype, prepare: Prepare | None = None
    ) -> nn.ModuleDict:
        return load_all(self.components, self.text_parts, device, dtype, prepare)

    def vae_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return _vae.vae_dtype(dtype, self.components["vae"].config, upcast=self.upcast_vae)

    def load_vae(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        return self.components["vae"].load(device, self.vae_dtype(dtype))

    # -- captions and pictures

    @abstractmethod
    def tokenizers(self) -> list[Any]:
        """All that text embeds depend on besides the encoders."""

    def text_fingerprint(self) -> str:
        parts = [self.components[name].fingerprint() for name in self.text_parts]
        return hashlib.sha256(json.dumps([*parts, *self.tokenizers()]).encode()).hexdigest()

    @abstractmethod
    def encode_ids(self, model: nn.ModuleDict, batch: Batch) -> Batch:
        """What `tokenize` made, stacked -> prompt embeds, and `prompts.MASK` (B, L) where padding is not to be attended to."""

    @torch.no_grad()
    def encode_text(self, encoders: nn.ModuleDict, captions: Sequence[str]) -> list[Example]:
        examples, device = self.tokenize(captions), compute_device(encoders)
        batch = {name: torch.stack([example[name] for example in examples]).to(device) for name in examples[0]}
        encoded = {name: value.cpu() for name, value in self.encode_ids(encoders, batch).items()}
        rows = ({name: value[row].clone() for name, value in encoded.items()} for row in range(len(examples)))
        return [trim(example) for example in rows]

    def image_fingerprint(self) -> str:
        network = self.components["vae"].fingerprint()
        if not self.latent_facts:
            return network
        return hashlib.sha256(json.dumps([network, *self.latent_facts]).encode()).hexdigest()

    def conditions(self, framing: Framing) -> Example:
        """What the model wants to know of a picture besides its caption."""
        return {}

    def encode_image(self, vae: nn.Module, pixels: Tensor, framings: Sequence[Framing]) -> list[Example]:
        if self.latents:
            encoded = self.latents.encode(vae, pixels)
        else:
            encoded = _vae.encode(vae, pixels, self.scaling_factor, self.shift_factor)
        pairs = zip(encoded, framings, strict=True)
        return [{"latents": latents.clone(), **self.conditions(framing)} for latents, framing in pairs]

    def decode_image(self, vae: nn.Module, latents: Tensor) -> Tensor:
        if self.latents:
            return self.latents.decode(vae, latents)
        return _vae.decode(vae, latents, self.scaling_factor, self.shift_factor)

    def latents_shape(self, batch_size: int, size: tuple[int, int]) -> tuple[int, int, int, int]:
        """(B, C, H, W) of pictures of `size` (width, height) pixels."""
        shape = self.latents.shape if self.latents else _vae.shape
        return (batch_size, *shape(self.components["vae"].config, size))

    def preview_conditions(self, size: tuple[int, int]) -> Example:
        return self.conditions(Framing(original=size, crop=(0, 0), target=size))

    def bare_batch(self, batch_size: int, size: tuple[int, int]) -> Batch:
        """An example batch without captions."""
        known = self.preview_conditions(size)
        return {
            "latents": torch.zeros(self.latents_shape(batch_size, size)),
            **{name: torch.zeros(batch_size, *value.shape) for name, value in known.items()},
            "seeds": torch.zeros(batch_size, dtype=torch.int64),
            "weight": torch.ones(batch_size),
        }

    # -- training

    @property
    def zero_terminal_snr(self) -> bool:
        """Whether the last timestep is pure noise, which samplers need to know."""
        return isinstance(self.objective, NoisePrediction) and float(self.objective.alphas_cumprod[-1]) == 0

    def configure(self, training: TrainingConfig, data: DataConfig) -> None:
        self.objective = make_objective(training, self, unmasked_weight=data.unmasked_weight)
        self.training_guidance = training.guidance

    @abstractmethod
    def predict(self, model: nn.ModuleDict, x_t: Tensor, timesteps: Tensor, batch: Batch) -> Tensor:
        """The network's output for noisy latents x_t (B, C, H, W) float32 at timesteps (B,); shaped like x_t."""

    def num_terms(self, batch: Batch) -> int:
        return len(batch["latents"])

    def loss(self, model: nn.ModuleDict, batch: Batch) -> Tensor:
        """Sum over examples of mean error × weight, float32. `mask` (B, 1, H, W) is optional in the batch."""
        x0 = batch["latents"].float()
        timesteps, noise = self.objective.draw(batch["seeds"], x0.shape)
        x_t, target = self.objective.corrupt(x0, noise.to(x0.device), timesteps)
        prediction = self.predict(model, x_t, timesteps.to(x0.device), batch).float()
        each = self.objective.error(prediction, target, batch.get("mask"))
        return (each * self.objective.weight(timesteps).to(each) * batch["weight"].to(each)).sum()

    def sample(
        self, model: nn.ModuleDict, positive: Sequence[Example], negative: Example, sampling: Sampling
    ) -> Tensor:
        with taken_off(model):  # as the file will be used
            return sample_latents(self, model, positive, negative, sampling)

    def guide(self, with_prompt: Tensor, without: Tensor, scale: float) -> Tensor:
        """Classifier-free guidance between two answers (B, C, H, W), both float32."""
        return without + scale * (with_prompt - without)

    def sampling_mu(self, steps: int, shape: torch.Size) -> float:
        """log of the shift when drawing latents of `shape` (…, H, W) in so many steps, where it is not fixed."""
        return Shift.of(self.schedule_config, self.patch).mu(shape)

    def probe(self, model: nn.ModuleDict) -> Tensor:
        device, generator = compute_device(model), torch.Generator().manual_seed(0)
        batch = self.example_batch(1, (256, 256))
        batch["latents"] = batch["latents"][:, :, :PROBE_SIDE, :PROBE_SIDE]
        if "prompt_embeds" in batch:
            batch["prompt_embeds"] = batch["prompt_embeds"][:, :PROBE_TOKENS]
        for name, value in batch.items():
            random = torch.randn(value.shape, generator=generator) if value.is_floating_point() else value
            batch[name] = random.to(device)
        shape = batch["latents"].shape[1:]
        timesteps = self.objective.sample_t(generator, shape).reshape(1).to(device)
        return self.predict(model, batch["latents"], timesteps, batch)


def make_objective(settings: TrainingConfig, family: DiffusionFamily, *, unmasked_weight: float = 0.0) -> Objective:
    """The objective the user asked for, on the family's noise schedule; `unmasked_weight` is an option of the data."""
    flow = family.prediction_type == "flow"
    _refuse_foreign(settings, OF_NOISE if flow else OF_FLOW, family)
    return (_flow if flow else _noise_prediction)(settings, family, unmasked_weight)


OF_NOISE = ("min_snr_gamma", "debiased", "zero_terminal_snr")
OF_FLOW = ("timestep_sampling", "timestep_shift", "logit_mean", "logit_std", "mode_scale", "loss_weighting")
"""Options of `training` that only one kind of objective knows."""


def _refuse_foreign(settings: TrainingConfig, names: Sequence[str], family: DiffusionFamily) -> None:
    changed = [name for name in names if getattr(settings, name) != TrainingConfig.model_fields[name].default]
    if changed:
        listed = ", ".join(shown("training", name) for name in changed)
        title = getattr(family, "title", "")
        raise ConfigError(
            t(pt=f"{listed}: não se aplica a {title}", en=f"{listed}: does not apply to {title}"),
            t(
                pt="apague; é dos modelos que preveem ruído (SD, SDXL)" if names is OF_NOISE
                else "apague; é dos modelos de fluxo retificado (FLUX, SD3, …)",
                en="delete it; it is for models that predict noise (SD, SDXL)" if names is OF_NOISE
                else "delete it; it is for models of rectified flow (FLUX, SD3, …)",
            ),
            shown("training", changed[0]),
        )  # fmt: skip


def _own(kind: type[Objective], settings: TrainingConfig) -> dict[str, Any]:
    """What an objective takes from the options of `training` that are called as its fields are."""
    names = {field.name for field in fields(kind)} & TrainingConfig.model_fields.keys()
    return {name: getattr(settings, name) for name in names}


def _flow(settings: TrainingConfig, family: DiffusionFamily, unmasked_weight: float) -> RectifiedFlow:
    asked: Any = {None: family.training_shift, 0.0: "resolution"}.get(settings.timestep_shift, settings.timestep_shift)
    return RectifiedFlow(
        **_own(RectifiedFlow, settings),
        shift=Shift.of(family.schedule_config, family.patch, asked),
        sampling=family.timestep_sampling if settings.timestep_sampling == "auto" else settings.timestep_sampling,
        timestep_range=_timestep_range(settings, 1000),
        weighting=settings.loss_weighting,
        unmasked_weight=unmasked_weight,
    )


def _noise_prediction(settings: TrainingConfig, family: DiffusionFamily, unmasked_weight: float) -> NoisePrediction:
    if settings.zero_terminal_snr and family.prediction_type == "epsilon":
        settled = hasattr(type(family), "prediction_type")  # all bases of the family predict the same
        raise ConfigError.said(
            pt="treino.snr_terminal_zero não serve para um modelo que prevê epsilon: "
            "no último nível de ruído não haveria nada a aprender",
            en="training.zero_terminal_snr does not suit a model that predicts epsilon: "
            "there would be nothing to learn at the last noise level",
            hint_pt="retire a chave"
            + ("" if settled else ", ou use modelo.tipo_predicao: v se o modelo base for mesmo de predição v"),
            hint_en="remove the key"
            + ("" if settled else ", or set model.prediction_type: v_prediction if the base really predicts v"),
        )
    assert family.prediction_type != "flow"
    schedule = alphas_cumprod(family.schedule_config, settings.zero_terminal_snr)
    return NoisePrediction(
        **_own(NoisePrediction, settings),
        alphas_cumprod=schedule,
        prediction_type=family.prediction_type,
        timestep_range=_timestep_range(settings, len(schedule)),
        unmasked_weight=unmasked_weight,
    )


def _timestep_range(settings: TrainingConfig, count: int) -> tuple[int, int]:
    low, high = settings.timestep_min, min(settings.timestep_max, count)
    if low < high:
        return low, high
    raise ConfigError.said(
        pt=f"nenhum nível de ruído entre passo_ruido_minimo ({low}) e passo_ruido_maximo ({settings.timestep_max})",
        en=f"no timestep between timestep_min ({low}) and timestep_max ({settings.timestep_max})",
        hint_pt=f"este modelo base tem os níveis 0 a {count - 1}; o mínimo deve ser menor que o máximo",
        hint_en=f"this base has timesteps 0 to {count - 1}; the lowest must be below the highest",
    )
