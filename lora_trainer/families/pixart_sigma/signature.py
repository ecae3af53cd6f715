"""What tells a PixArt-Sigma from other bases: one modulation for all blocks, and captions that T5 read.

Sana and Open-Sora have such a projection of captions too. PixArt-Alpha's folders name their own pipeline.
"""

from ...files.classify import Folder, every, has, named, none
from ...files.kinds import Kind, Signature

_ORIGINAL = every(has("y_embedder.y_proj.fc1."), has("blocks.0.mlp.fc1."), none("attn_temp.", "attention_y_norm."))
_DIFFUSERS = every(has("adaln_single.emb.timestep_embedder."), has("caption_projection.linear_1."), has("pos_embed.proj."))
_CLASSES = named("PixArtSigma", "PixArtTransformer2DModel")


def _folder(folder: Folder) -> bool:
    return _CLASSES(folder) and "PixArtAlpha" not in folder.pipeline


PIXART_SIGMA = Kind(
    "pixart_sigma", "um PixArt-Sigma", "a PixArt-Sigma",
    file=lambda header: _ORIGINAL(header) or _DIFFUSERS(header), folder=_folder, in_gguf=True,
)  # fmt: skip
SIGNATURE = Signature((PIXART_SIGMA,), caption_tokens=(120, 300))
