"""What a language run checks beyond its rows, before anything is loaded: options that it cannot keep or will not look at,
and whether tokenizer and model belong together."""

import torch

from ..adapters import find_targets
from ..config.names import shown
from ..config.schema import Config
from ..errors import SourceError, t
from ..export.gguf_lora import check_gguf_lora
from ..families.causal_lm.family import PART, CausalLM
from ..modality.options import OF_IMAGES, unread
from .dataset import TextDataset
from .preview import TextPreviews


def check_options(family: CausalLM, config: Config) -> None:
    """ConfigError or UserError for what would fail only when the training is over, or not at all."""
    TextPreviews.find_measure(config)
    if "gguf" in family.chosen_formats(config.output.formats):
        model = family.load_model(torch.device("meta"), torch.bfloat16)
        paths = [path.removeprefix(f"{PART}.") for path in find_targets(model, family, config.model, ("gguf",))]
        check_gguf_lora(paths, family.config, dora=config.model.dora)


def option_warnings(family: CausalLM, config: Config) -> list[str]:
    """Options with a value of the user's own that changes nothing here."""
    kind, value = family.config.model_type, config.memory.base_quantization
    packing, quantization = shown("data", "packing"), shown("memory", "base_quantization")
    told = {
        t(
            pt=f"{packing}: sim não tem efeito: {kind} tem camadas em que textos da mesma linha se misturariam",
            en=f"{packing}: yes has no effect: {kind} has layers in which texts of one row would mix",
        ): config.data.packing == "yes" and not family.packs,
        t(
            pt=f"{quantization}: {value} não tem efeito: uma base GGUF fica nos blocos do próprio arquivo",
            en=f"{quantization}: {value} has no effect: a GGUF base stays in its file's own blocks",
        ): family.source.gguf is not None and value not in ("auto", "no"),
    }
    return unread(config, OF_IMAGES, "imagem") + [line for line, holds in told.items() if holds]


def check_vocabulary(family: CausalLM, dataset: TextDataset) -> None:
    """SourceError for tokens that the model has no embedding of."""
    highest = max(int(example.input_ids.max()) for example in (*dataset.examples, *dataset.validation))
    known = int(family.config.vocab_size)
    if highest >= known:
        raise SourceError.said(
            pt=f"o tokenizador escreve o token {highest}, e o modelo só tem {known}: não são um do outro",
            en=f"the tokenizer writes token {highest}, and the model has only {known}: they do not belong together",
            hint_pt="use o tokenizador do próprio modelo (modelo.tokenizador, ou os arquivos tokenizer* da pasta dele)",
            hint_en="use the model's own tokenizer (model.tokenizer, or the tokenizer* files of its folder)",
            where=family.source.what,
        )


def length_warnings(family: CausalLM, dataset: TextDataset) -> list[str]:
    """Examples longer than the model was made for."""
    limit = getattr(family.config, "max_position_embeddings", None)
    longest = max(dataset.lengths)
    if not limit or longest <= limit:
        return []
    return [
        t(
            pt=f"o maior exemplo tem {longest} tokens, e o modelo foi feito para até {limit}: além disso ele responde mal; "
            f"use dados.comprimento_maximo: {limit}",
            en=f"the longest example has {longest} tokens, and the model was made for up to {limit}: beyond that it answers "
            f"badly; use data.max_length: {limit}",
        )
    ]
