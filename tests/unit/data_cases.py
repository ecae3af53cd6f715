"""Recipes for small data folders, as in real users' reports, and a family of tiny real networks to encode them."""

import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers import AutoencoderKL
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel

from lora_trainer.config.schema import DataConfig
from lora_trainer.data.dataset import Dataset, build
from lora_trainer.seam.family import Example, Family, Framing


def img(path: Path, width: int = 256, height: int = 256, **save: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(zlib.crc32(path.name.encode()))
    Image.fromarray(rng.integers(0, 255, (height, width, 3), dtype=np.uint8)).save(path, **save)
    return path


def cap(path: Path, text: str, encoding: str = "utf-8") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text.encode(encoding))
    return path


def good(folder: Path, count: int = 4) -> Path:
    for i in range(count):
        img(folder / f"ok{i}.png")
        cap(folder / f"ok{i}.txt", f"foto de ohwx gato {i}")
    return folder


def config(data_dir: Path, **options: Any) -> DataConfig:
    return DataConfig(data_dir=str(data_dir), **options)


def built(data_dir: Path, **options: Any) -> Dataset:
    """Build with the cache beside the data folder."""
    return build(config(data_dir, **options), data_dir.parent / "cache")


def names(dataset: Dataset) -> list[str]:
    return [item.name for item in dataset.examples]


def captions(dataset: Dataset) -> dict[str, str]:
    return {item.name: item.caption.texts[0] for item in dataset.examples}


def left_out(dataset: Dataset) -> list[str]:
    return [name for names in dataset.notes.excluded.values() for name in names]


class TinyFamily(Family):
    """A real VAE and a real CLIP text model, a few thousand weights each; counts how often they are loaded."""

    name, title, side_multiple, lora_targets, text_targets = "tiny", "Tiny", 64, {}, ""

    def __init__(self) -> None:
        self.loaded: list[str] = []

    @classmethod
    def open(cls, source: Any, settings: Any, max_caption_tokens: int = 75) -> "TinyFamily":
        return cls()

    def text_fingerprint(self) -> str:
        return "text 1"

    def image_fingerprint(self) -> str:
        return "image 1"

    def load_text_encoders(self, device: torch.device, dtype: torch.dtype, prepare: Any = None) -> nn.ModuleDict:
        self.loaded.append("text")
        torch.manual_seed(0)
        shape = CLIPTextConfig(
            vocab_size=512,
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            num_attention_heads=2,
            bos_token_id=0,
            eos_token_id=1,
            pad_token_id=1,
        )
        return nn.ModuleDict({"text_encoder": CLIPTextModel(shape).to(device, dtype).eval()})

    def vae_dtype(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def load_vae(self, device: torch.device, dtype: torch.dtype) -> nn.Module:
        self.loaded.append("vae")
        torch.manual_seed(0)
        blocks = 4
        vae = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * blocks,
            up_block_types=("UpDecoderBlock2D",) * blocks,
            block_out_channels=(4,) * blocks,
            norm_num_groups=2,
            latent_channels=4,
        )
        return vae.to(device, dtype).eval()

    def tokenize(self, captions: Sequence[str]) -> list[Example]:
        return [{"input_ids": torch.tensor(self._ids(caption))} for caption in captions]

    def _ids(self, caption: str) -> list[int]:
        words = [2 + zlib.crc32(word.encode()) % 510 for word in caption.split()][:75]
        return [0, *words] + [1] * (76 - len(words))

    def count_tokens(self, caption: str) -> int:
        return len(caption.split())

    def encode_text(self, encoders: nn.ModuleDict, captions: Sequence[str]) -> list[Example]:
        ids = torch.stack([example["input_ids"] for example in self.tokenize(captions)])
        return [{"prompt_embeds": row} for row in encoders["text_encoder"](ids).last_hidden_state]

    def encode_image(self, vae: Any, pixels: Tensor, framings: Sequence[Framing]) -> list[Example]:
        latents = vae.encode(pixels).latent_dist.mean
        ids = [torch.tensor([*f.original, *f.crop, *f.target]) for f in framings]
        return [{"latents": one, "time_ids": i} for one, i in zip(latents, ids, strict=True)]


TinyFamily.__abstractmethods__ = frozenset()
"""Caching and batching need only the verbs above; whatever else the seam asks for has its own tests."""
