"""What a saved state depends on, and what may have changed when a run goes on from it."""

from pathlib import Path
from typing import Any

from ..config import names
from ..config.schema import Config
from ..errors import ConfigError, language, t

FIXED = ("training.optimizer", "training.use_8bit_optimizer", "training.lora_plus_ratio")
"""Besides all of `model`, options that a run may not change when it resumes."""
FREE = ("epochs", "max_steps", "validate_every", "gradient_checkpointing")
"""Options of `training` that change nothing of what was trained so far."""
DATA = (
    "resolution", "max_caption_tokens", "caption_dropout", "flip", "mask", "unmasked_weight", "prior_weight",
    "loss_on", "chat_template",
)  # fmt: skip
"""Options of `data` that change what is learned, and leave the list of examples as it was."""
PATHS = {
    "base_model", "vae", "text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer", "architecture", "initial_lora",
    "training_lora",
}  # fmt: skip


def resume_options(config: Config, seed: int) -> dict[str, Any]:
    """What a state depends on, by "section.option"; paths are left out, since they may move."""
    model = config.model.model_dump(mode="json", exclude=PATHS | {"family"})
    training = config.training.model_dump(mode="json", exclude=set(FREE))
    flat = {f"model.{name}": value for name, value in model.items()}
    flat |= {f"training.{name}": value for name, value in training.items()}
    flat["memory.base_quantization"] = config.memory.base_quantization
    flat["model.training_lora"] = config.model.training_lora and Path(config.model.training_lora).name
    data = config.data.model_dump(mode="json", include=set(DATA))
    return {**flat, "system.seed": seed, **{f"data.{name}": data[name] for name in DATA}}


def changes(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """A line for each option that changed; raises ConfigError where the change would spoil the run."""
    changed = [key for key in now if before.get(key, now[key]) != now[key]]  # a state of an older version knows fewer options
    lines = {key: f"{_option(key).shown()}: {_said(key, before.get(key))} → {_said(key, now[key])}" for key in changed}
    spoiling = "; ".join(lines[key] for key in changed if key.startswith("model.") or key in FIXED)
    if spoiling:
        raise ConfigError.said(
            pt=f"não dá para retomar com outras opções de modelo ou otimizador ({spoiling})",
            en=f"cannot resume with other options of model or optimizer ({spoiling})",
            hint_pt="volte às de antes, ou comece de novo com --recomecar (a execução antiga é guardada)",
            hint_en="go back to those before, or start over with --restart (the old run is kept)",
        )
    return [t(pt=f"mudou desde o estado salvo: {one}", en=f"changed since the saved state: {one}") for one in lines.values()]


def data_changed() -> str:
    return t(
        pt="os dados mudaram desde o estado salvo; a ordem daqui em diante é a do conjunto novo",
        en="the data changed since the state was saved; from here on the order is the new set's",
    )


def _said(key: str, value: Any) -> Any:
    """A value as users write it."""
    if value is None:
        return t(pt="sem valor", en="unset")
    if isinstance(value, bool):
        return t(pt="sim", en="yes") if value else t(pt="nao", en="no")
    return _option(key).word(value, language()) if isinstance(value, str) else value


def _option(key: str) -> names.Option:
    section, _, name = key.partition(".")
    return names.options()[section, name]
