"""The networks of a Stable Diffusion base, whatever it is kept in: an original single file or a diffusers folder.

Everything is checked here, from headers and configs, before any weight is read: each parameter of each network has its
place in the files, with the right shape, and nothing of the UNet is left over.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from diffusers import AutoencoderKL, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTextModelWithProjection

from ..config.names import shown
from ..config.schema import ModelConfig
from ..errors import SourceError, t
from ..files.kinds import UNKNOWN, VAE, Kind, Part
from ..files.sources import Source, open_source
from . import architecture, single_file
from .component import Component
from .stored import open_weights
from .weights import Locate

Config = dict[str, Any]
OPEN_CLIP_SD2_LAYERS = 23
"""SD2 was trained on the last but one of OpenCLIP's 24 layers; the released diffusers folders hold 23."""


@dataclass
class Networks:
    """A base's components by their diffusers names, its noise schedule, and what should be said about them."""

    components: dict[str, Component]
    scheduler: dict[str, Any]
    notices: list[str] = field(default_factory=list)


def build_text_encoder(config: Mapping[str, Any]) -> nn.Module:
    config = config.get("text_config", config)
    projected = "WithProjection" in str(config.get("architectures"))
    known = {k: v for k, v in config.items() if k not in ("dtype", "torch_dtype", "architectures")}
    encoder: nn.Module = (CLIPTextModelWithProjection if projected else CLIPTextModel)(CLIPTextConfig(**known))
    return encoder


BUILDERS: dict[str, Callable[[Mapping[str, Any]], nn.Module]] = {
    "unet": UNet2DConditionModel.from_config,
    "vae": AutoencoderKL.from_config,
    "text_encoder": build_text_encoder,
    "text_encoder_2": build_text_encoder,
}


def open_networks(source: Source, settings: ModelConfig, release: str) -> Networks:
    """All components of a base of the given release ("sd1", "sd2", "sdxl"), checked against its files."""
    if source.kind == "folder":
        networks = _from_folder(source, release)
    else:
        networks = _SingleFile(source, settings, release).networks()
    if settings.vae:
        networks.components["vae"] = open_vae(settings.vae, release)
    used: set[str] = set()
    for component in networks.components.values():
        keys = component.used_keys()
        used |= keys if component.what == source.what else set()
    if source.kind == "file":
        _report_leftovers(source, used, networks)
    _check_latents(networks)
    return networks


def _check_latents(networks: Networks) -> None:
    vae, unet = networks.components["vae"], networks.components["unet"]
    has, wants = vae.config.get("latent_channels", 4), unet.config.get("in_channels", 4)
    if has != wants:
        raise SourceError.said(
            pt=f"o VAE tem {has} canais e o modelo espera {wants}",
            en=f"the VAE has {has} channels, the model wants {wants}",
            hint_pt="use o VAE da mesma família do modelo base",
            hint_en="use a VAE of the base's own family",
            where=vae.what,
        )


# -- original single files


@dataclass(frozen=True)
class _SingleFile:
    """Builds the components of one file; remembers which of them had to be guessed in part."""

    source: Source
    settings: ModelConfig
    release: str
    guessed: dict[str, Config] = field(default_factory=dict)

    def networks(self) -> Networks:
        folder = self.settings.architecture
        scheduler = architecture.given(folder, "scheduler") or architecture.shipped(self.release, "scheduler")
        components = [*self.text_encoders(), self.unet()] + ([] if self.settings.vae else [self.vae()])
        notices = [architecture.guess_notice(self.guessed)] if self.guessed else []
        return Networks({component.name: component for component in components}, scheduler, notices)

    def component(self, name: str, derive: Callable[[Config], Config], locate: Callable[[Config], Locate]) -> Component:
        """The config is that of `modelo.arquitetura`, else derived from the header; places may depend on it."""
        config = architecture.given(self.settings.architecture, name)
        if config is None:
            standard = architecture.shipped(self.release, name)
            config = derive(standard)
            if architecture.unusual(config, standard):
                self.guessed[name] = config
        return Component(name, config, BUILDERS[name], open_weights(self.source), locate(config), self.source.what)

    def text_encoders(self) -> list[Component]:
        if self.release == "sd1":
            return [self.clip("cond_stage_model.")]
        if self.release == "sd2":
            return [self.open_clip("text_encoder", "cond_stage_model.", most_layers=OPEN_CLIP_SD2_LAYERS)]
        return [self.clip("conditioner.embedders.0."), self.open_clip("text_encoder_2", "conditioner.embedders.1.")]

    def clip(self, prefix: str) -> Component:
        part = single_file.text_part(self.source.header, prefix)
        derive = partial(architecture.derive_clip, part)
        return self.component("text_encoder", derive, lambda config: single_file.locate_clip(part))

    def open_clip(self, name: str, prefix: str, most_layers: int | None = None) -> Component:
        part = single_file.text_part(self.source.header, prefix)
        derive = partial(architecture.derive_open_clip, part, most_layers=most_layers)
        return self.component(name, derive, lambda config: single_file.locate_open_clip(part))

    def unet(self) -> Component:
        part = single_file.unet_part(self.source.header)
        derive = partial(architecture.derive_unet, part, what=self.source.what)
        return self.component("unet", derive, partial(single_file.locate_unet, part))

    def vae(self) -> Component:
        part = single_file.vae_part(self.source.header)
        if part is None:
            name = self.source.path.name
            raise SourceError(
                t(pt=f"{name} não traz o VAE", en=f"{name} brings no VAE"),
                t(pt="indique um arquivo em modelo.vae", en="give a file in model.vae"),
                self.source.what,
            )
        return self.component("vae", partial(architecture.derive_vae, part), partial(single_file.locate_vae, part))


def _report_leftovers(source: Source, used: set[str], networks: Networks) -> None:
    left = single_file.leftovers(source.header, used)
    unet = single_file.unet_part(source.header)
    own = [key for key in left if key.startswith(unet.prefix) and unet.prefix]
    if own:
        raise SourceError.said(
            pt=f"a UNet deste arquivo tem {len(own)} tensores que não sei onde encaixar: {', '.join(own[:4])}",
            en=f"the UNet of this file has {len(own)} tensors that I cannot place: {', '.join(own[:4])}",
            hint_pt="é uma variante que não conheço; se há uma pasta do diffusers deste modelo, use-a",
            hint_en="it is a variant I do not know; if there is a diffusers folder of this model, use that",
            where=source.what,
        )
    if networks.components["vae"].what != source.what:
        left = [key for key in left if "first_stage_model." not in key]
    if left:
        networks.notices.append(
            t(
                pt=f"{source.path.name}: {len(left)} tensores não são usados: {', '.join(left[:4])}",
                en=f"{source.path.name}: {len(left)} tensors are not used: {', '.join(left[:4])}",
            )
        )


# -- diffusers folders


def _from_folder(source: Source, release: str) -> Networks:
    names = ["unet", "vae", "text_encoder"] + (["text_encoder_2"] if release == "sdxl" else [])
    components = {}
    for name in names:
        config = source.config(name)
        if config is None:
            raise SourceError(
                t(pt=f"{source.path} não tem {name}/config.json", en=f"{source.path} has no {name}/config.json"),
                t(pt="a pasta está incompleta: baixe-a de novo", en="the folder is incomplete: download it again"),
                source.what,
            )
        components[name] = _folder_component(source, name, name, config)
    return Networks(components, source.config("scheduler") or architecture.shipped(release, "scheduler"))


def _folder_component(source: Source, name: str, sub: str, config: dict[str, Any]) -> Component:
    locate = {"vae": single_file.locate_diffusers_vae, "unet": single_file.locate_same}.get(
        name, single_file.locate_clip()
    )
    return Component(name, config, BUILDERS[name], open_weights(source, sub), locate, source.what)


# -- a VAE of its own

_LATENTS = {"sd1": "sd", "sd2": "sd", "sdxl": "sdxl"}
_SCALING = {"sd": 0.18215, "sdxl": 0.13025}
"""What the released VAEs' configs say: 1 / standard deviation of their latents."""


def open_vae(text: str, release: str) -> Component:
    """The VAE of `modelo.vae`: a VAE file (ldm or diffusers names), a VAE folder, or that of a whole checkpoint."""
    what = shown("model", "vae")
    source = open_source(text, what)
    kind = source.looks_like()
    if kind is not VAE and kind.name not in _LATENTS:
        raise SourceError(
            t(
                pt=f"este arquivo parece {kind.title()}, não um VAE",
                en=f"this file looks like {kind.title()}, not a VAE",
            )
            if kind is not UNKNOWN
            else t(pt="não há um VAE neste arquivo", en="there is no VAE in this file"),
            t(
                pt=f"dê um VAE (autoencoder KL) ou retire a chave para usar o do modelo base; recebi "
                f"{source.path.name}",
                en=f"give a VAE (KL autoencoder) or remove the key to use the base's own; got {source.path.name}",
            ),
            what,
        )
    _check_latent_space(source, kind, release)
    if source.kind == "folder":
        sub = "vae" if source.config("vae") else ""
        return _folder_component(source, "vae", sub, source.config(sub) or {})
    config, locate = describe_vae(Part(source.header, ""), architecture.shipped(release, "vae"))
    return Component("vae", config, BUILDERS["vae"], open_weights(source), locate, what)


def describe_vae(part: Part, standard: Config) -> tuple[Config, Locate]:
    """Config and places of the VAE in a file, whichever names it has."""
    original = single_file.vae_part(part.header)
    if original is None:
        return architecture.derive_diffusers_vae(Part(part.header, ""), standard), single_file.locate_diffusers_vae
    config = architecture.derive_vae(original, standard)
    return config, single_file.locate_vae(original, config)


def _check_latent_space(source: Source, kind: Kind, release: str) -> None:
    """Refuse a VAE that says it belongs to another family: the shapes are the same, the latents are not."""
    theirs = _LATENTS.get(kind.name)
    marked = source.metadata.get("modelspec.architecture", "")
    if kind is VAE and marked.startswith("stable-diffusion-"):
        theirs = "sdxl" if marked.startswith("stable-diffusion-xl") else "sd" if marked[17:19] in ("v1", "v2") else None
    if source.kind == "folder":
        config = source.config("vae") or source.config("") or {}
        factor = float(config.get("scaling_factor") or 0.0)
        theirs = theirs or next((name for name, known in _SCALING.items() if abs(factor - known) < 1e-4), None)
    ours = "sdxl" if release == "sdxl" else "sd"
    if theirs in (None, ours):
        return
    titles = {"sd": "Stable Diffusion 1.x/2.x", "sdxl": "SDXL"}
    raise SourceError.said(
        pt=f"{source.title()} traz o VAE de {titles[theirs]}, e o modelo base é {titles[ours]}: as formas são iguais, "
        "mas os latentes não, e o treino daria errado sem aviso",
        en=f"{source.title()} brings the VAE of {titles[theirs]}, and the base is {titles[ours]}: the shapes are the "
        "same but the latents are not, and training would go wrong without a word",
        hint_pt="dê um VAE da família do modelo base, ou retire a chave para usar o do próprio modelo base",
        hint_en="give a VAE of the base's family, or remove the key to use the base's own",
        where=source.what,
    )
