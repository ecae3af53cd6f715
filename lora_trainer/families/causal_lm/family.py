"""Causal language models: any that transformers builds with AutoModelForCausalLM and that attends through its interface.

One part, `language_model`, whose body runs without its head; the loss is _lm_loss's, over label tokens, and attention
_lm_attention's, text by text. What differs between architectures (where the decoder layers are, how logits are scaled) is
read off the built model and its config, never off a list of names. Without a base, `shipped_architecture` and the folders
of arch/ hold the configs of popular models, for planning.
"""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ...config.names import shown
from ...config.schema import Config, DataConfig, ModelConfig, TrainingConfig
from ...engine.host import compute_device
from ...errors import ConfigError
from ...files.gguf_names import ARCHITECTURES
from ...files.gguf_tokenizer import tokenizer as tokenizer_of
from ...files.sources import Source
from ...seam.family import Batch, BlockGroup, Family, Prepare
from ...seam.readers import LANGUAGE_MODELS
from . import loss as _lm_loss
from .attention import IMPLEMENTATION, Texts, texts_of
from .base import Base, load_tokenizer, open_base

PART = "language_model"
PROBE_TOKENS = 16
BLIND_LAYERS = ("full_attention", "sliding_attention")
"""Kinds of layer that never look over the border of a text; others (recurrent, chunked) are not known to."""

_ATTENTION = r"(?:self_attn|attention|attn|self_attention|linear_attn)"
_LAYER = rf"{PART}\.(?:\w+\.)*?\d+\."
_NOT_EXPERTS = r"(?!.*\.experts\.)"


class CausalLM(Family):
    sizes: ClassVar = {2.0: "qwen3-1.7b", 5.0: "qwen3-4b", 10.0: "llama-3.1-8b", 16.0: "qwen3-14b", 40.0: "qwen3-32b"}
    usual_release = "llama-3.2-1b"
    learns_from = "texts"
    formats = LANGUAGE_MODELS
    name = "causal_lm"
    title = "causal LM"
    lora_targets: ClassVar[dict[str, str]] = {
        "attention": rf"{_LAYER}{_ATTENTION}\..+",
        "attention+mlp": rf"{_NOT_EXPERTS}{_LAYER}(?:{_ATTENTION}|mlp|feed_forward|shared_experts?)\..+",
        "all": rf"{_NOT_EXPERTS}{_LAYER}.+",
    }
    lora_targets["auto"] = lora_targets["all"]
    """Linear layers inside the decoder layers. Experts of a mixture and the head get adapters only when a regular
    expression of the user's names them."""

    def __init__(self, source: Source, settings: ModelConfig, base: Base) -> None:
        self.source, self.settings, self.base, self.config = source, settings, base, base.config
        self.notices = list(base.notices)
        """What the user should know, each a line in their language."""

    @classmethod
    def takes(cls, source: Source) -> bool:
        if source.gguf is not None:
            return source.gguf.architecture in ARCHITECTURES
        return super().takes(source)

    @classmethod
    def open(cls, source: Source, settings: ModelConfig, max_caption_tokens: int | None = None) -> "CausalLM":
        if settings.train_text_encoder:
            raise _no_text_encoder()
        return cls(source, settings, open_base(source, settings))

    def configure(self, training: TrainingConfig, data: DataConfig) -> None:
        """The loss of a language model has no options."""

    def largest(self, config: Config) -> tuple[int, int]:
        return config.data.max_length, 1

    def tokenizer(self) -> Any:
        """From the folder that the user names, the GGUF file, or the base's own folder; SourceError where there is none."""
        if not self.settings.tokenizer and self.source.gguf is not None:
            return tokenizer_of(self.source.gguf)
        where = Path(self.settings.tokenizer) if self.settings.tokenizer else self.source.path
        return load_tokenizer(where, self.source)

    def architecture(self) -> str:
        return json.dumps(self.config.to_dict(), sort_keys=True, default=str)

    @property
    def packs(self) -> bool:
        """Whether several texts may stand in one row without seeing each other."""
        return set(getattr(self.config, "layer_types", None) or BLIND_LAYERS) <= set(BLIND_LAYERS)

    def num_bytes(self, dtype: torch.dtype) -> int:
        model = self.base.build(torch.bfloat16)
        return sum(x.numel() for x in model.state_dict().values()) * dtype.itemsize

    # -- training

    def load_model(
        self, device: torch.device, dtype: torch.dtype, *, with_text: bool = False, prepare: Prepare | None = None
    ) -> nn.ModuleDict:
        """The frozen model, without adapters; on device "meta" the same modules without weights."""
        model = nn.ModuleDict({PART: self.base.build(dtype)})
        if prepare is not None:
            prepare(model)
        if device.type != "meta":
            self.base.fill(model[PART], device, dtype)
        return model.eval()

    def blocks(self, model: nn.ModuleDict) -> list[BlockGroup]:
        """The decoder layers. Embeddings and head are embedding_offload's."""
        return [BlockGroup("layers", list(_layers(model[PART])))]

    def num_terms(self, batch: Batch) -> int:
        return _lm_loss.count_targets(batch["labels"])

    def loss(self, model: nn.ModuleDict, batch: Batch) -> Tensor:
        """Sum over label tokens of cross-entropy × the example's weight: float32, shape ().

        `input_ids`, `labels`, `position_ids`, `segment_ids` (B, L) int64; labels are those of the tokens themselves, so
        a text's first one must be ignored (-100). Segments are numbered from 1; 0 is padding.
        """
        targets = _lm_loss.find_targets(batch["labels"], batch["weight"])
        texts = texts_of(batch.get("segment_ids"), batch["input_ids"].shape)
        if texts.packed and not self.packs:
            raise _cannot_pack(self.config)
        return _lm_loss.sum_of_losses(self.head(model), self.hidden_states(model, batch, texts), targets)

    def loss_facts(self, mean: float) -> dict[str, float]:
        return {"perplexity": math.exp(min(mean, 700.0))}

    def hidden_states(self, model: nn.ModuleDict, batch: Batch, texts: Texts) -> Tensor:
        """(B, L, D), after the final norm."""
        body = cast(Any, model[PART]).base_model
        ids = batch["input_ids"]
        # All ones: transformers would look for packs in the positions otherwise, which fakes cannot answer.
        seen = torch.ones_like(ids, dtype=torch.bool)
        out = body(input_ids=ids, attention_mask=seen, position_ids=batch["position_ids"], use_cache=False, texts=texts)
        return cast(Tensor, out.last_hidden_state)

    def head(self, model: nn.ModuleDict) -> _lm_loss.Head:
        scale = getattr(self.config, "logit_scale", None) or 1.0  # Cohere
        scale /= getattr(self.config, "logits_scaling", None) or 1.0  # Granite
        module = cast(Any, model[PART]).get_output_embeddings()
        return _lm_loss.Head(module, float(scale), getattr(self.config, "final_logit_softcapping", None))

    def example_batch(self, batch_size: int, size: tuple[int, int]) -> Batch:
        """Zeros shaped as a worst-case batch of (tokens, 1): every token is a label, every row one text."""
        length, _ = size
        shape = (batch_size, length)
        names = ("input_ids", "labels", "segment_ids")
        return {name: torch.zeros(shape, dtype=torch.int64) for name in names} | {
            "position_ids": torch.arange(length).expand(shape).contiguous(),
            "seeds": torch.zeros(batch_size, dtype=torch.int64),
            "weight": torch.ones(batch_size),
        }

    # -- previews

    @torch.no_grad()
    def generate(
        self, model: nn.ModuleDict, prompts: Sequence[Sequence[int]], most: int, stop: Sequence[int]
    ) -> list[list[int]]:
        """The likeliest continuation of each prompt, token by token, up to `most` tokens or one of `stop` (included).

        All at once, padded on their left: a base that is packed or streamed is unpacked or brought in once a token.
        """
        if len(prompts) > 1 and not self.packs:
            return [self.generate(model, [prompt], most, stop)[0] for prompt in prompts]
        lm, training = cast(Any, model[PART]), model.training
        width = max(map(len, prompts))
        ids = torch.tensor([[stop[0]] * (width - len(prompt)) + list(prompt) for prompt in prompts])
        seen = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        model.eval()
        try:
            with _cached_attention(lm):
                out = lm.generate(
                    input_ids=ids.to(compute_device(model)),
                    attention_mask=seen.to(compute_device(model)),
                    max_new_tokens=most,
                    do_sample=False,
                    use_cache=True,
                    eos_token_id=list(stop),
                    pad_token_id=stop[0],
                )
        finally:
            model.train(training)
        return [_until(row, stop) for row in out[:, width:].tolist()]

    # -- output

    def probe(self, model: nn.ModuleDict) -> Tensor:
        """Logits (1, L, V), float32, of a fixed random text."""
        device = compute_device(model)
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(self.config.vocab_size, (1, PROBE_TOKENS), generator=generator).to(device)
        batch = {"input_ids": ids, "position_ids": torch.arange(PROBE_TOKENS, device=device)[None]}
        head = self.head(model)
        return head.shaped(head.module(self.hidden_states(model, batch, texts_of(None, ids.shape))))

    def export_prefixes(self) -> dict[str, str]:
        return {PART: ""}

    def metadata(self) -> dict[str, str]:
        return {"base_model": self.source.title(), "model_type": str(self.config.model_type)}


@contextmanager
def _cached_attention(model: Any) -> Iterator[None]:
    """transformers' own attention, which knows caches; eager where scores are capped."""
    capped = getattr(model.config, "attn_logit_softcapping", None) is not None
    model.config._attn_implementation = "eager" if capped else "sdpa"
    try:
        yield
    finally:
        model.config._attn_implementation = IMPLEMENTATION


def _until(tokens: list[int], stop: Sequence[int]) -> list[int]:
    end = next((at for at, token in enumerate(tokens, 1) if token in stop), len(tokens))
    return tokens[:end]


def _layers(model: Any) -> nn.ModuleList:
    count = model.config.num_hidden_layers
    found = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) == count]
    assert found, "a decoder without a list of layers"
    return found[0]


def _cannot_pack(config: Any) -> ConfigError:
    return ConfigError.said(
        pt=f"{config.model_type} tem camadas recorrentes: textos empacotados numa linha se misturariam",
        en=f"{config.model_type} has recurrent layers: texts packed into one row would mix",
        hint_pt="desligue o empacotamento",
        hint_en="turn packing off",
    )


def _no_text_encoder() -> ConfigError:
    return ConfigError.said(
        pt="um modelo de linguagem não tem codificador de texto à parte: ele mesmo é treinado",
        en="a language model has no text encoder beside it: it is itself what is trained",
        hint_pt="apague a linha",
        hint_en="delete the line",
        where=shown("model", "train_text_encoder"),
    )


FAMILY = CausalLM
