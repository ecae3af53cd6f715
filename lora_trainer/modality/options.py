"""Options that only one modality looks at, and how it is said that a run of the other has set them."""

from collections.abc import Mapping

from ..config.names import shown
from ..config.schema import Config
from ..errors import t

OF_IMAGES = {
    "model": "vae prediction_type clip_skip conv_rank conv_alpha",
    "data": "trigger caption_column uncaptioned bad_images min_side max_pixels buckets upscale flip crop crop_variants "
    "background separator shuffle_captions keep_tags keep_separator tag_dropout caption_dropout caption_variants "
    "max_caption_tokens cache_text_encoder mask mask_dir unmasked_weight regularization_dir prior_weight",
    "training": "text_encoder_learning_rate loss huber_delta min_snr_gamma debiased noise_offset zero_terminal_snr "
    "timestep_min timestep_max",
    "samples": "negative_prompt steps guidance resolution",
}
"""Sizes and the VAE's memory are left out: presets set them for all."""
OF_TEXTS = {
    "data": "text_format chat_template loss_on max_length packing bad_rows rows_without_target",
    "samples": "max_tokens",
}


def unread(config: Config, options: Mapping[str, str], models_pt: str) -> list[str]:
    """A line for those to which the user gave a value of their own; `models_pt`: whose options they are."""
    found = [
        shown(section, name)
        for section, names in options.items()
        for name in names.split()
        if getattr(getattr(config, section), name) != type(getattr(config, section)).model_fields[name].default
    ]
    listed = ", ".join(found)
    line = t(pt=f"só para modelos de {models_pt}, sem efeito aqui: {listed}", en=f"of no effect here: {listed}")
    return [line] if found else []
