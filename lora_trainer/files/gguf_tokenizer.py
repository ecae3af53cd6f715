"""The tokenizer and chat template that a GGUF file carries, built by transformers' own reader.

`AutoTokenizer` would first read the whole vocabulary a second time to find the config; the fast class does not need it.
How a byte-level vocabulary cuts text into words is named in the file (`tokenizer.ggml.pre`). Names that transformers does
not know it treats as GPT-2's, which is said here, or mended where llama.cpp's rule is known to differ.
"""

import logging
from typing import Any

from ..errors import SourceError, t
from .gguf_reader import GgufFile

EACH_DIGIT = frozenset({"smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"})
"""Every digit is a word of its own; the rest is cut as GPT-2 does (llama.cpp, llm_tokenizer_bpe)."""
LIKE_GPT2 = frozenset({"gpt-2", "phi-2", "mpt", "olmo", "jina-en"})

log = logging.getLogger(__name__)


def tokenizer(file: GgufFile, what: str = "modelo_base") -> Any:
    """A fast tokenizer, special tokens and `chat_template` included. SourceError where there is none in the file."""
    from transformers import PreTrainedTokenizerFast

    if not file.metadata.get("tokenizer.ggml.tokens"):
        _refuse(file, t(pt="o arquivo não traz tokenizador", en="the file carries no tokenizer"), what)
    try:
        made = PreTrainedTokenizerFast.from_pretrained(str(file.path.parent), gguf_file=file.path.name)
    except (ValueError, KeyError) as error:
        _refuse(file, str(error), what)
    _cut_words(made, file)
    length = file.metadata.get(f"{file.architecture}.context_length")
    if length:
        made.model_max_length = int(length)
    return made


def _cut_words(made: Any, file: GgufFile) -> None:
    from tokenizers import pre_tokenizers

    rule = file.metadata.get("tokenizer.ggml.pre")
    if file.metadata.get("tokenizer.ggml.model") != "gpt2" or rule is None:
        return
    if rule in EACH_DIGIT:
        digits = pre_tokenizers.Digits(individual_digits=True)
        made.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False)]
        )
    elif rule not in LIKE_GPT2 | _known_to_transformers():
        log.warning(
            t(
                pt=f"{file.path.name}: não conheço a regra {rule!r} com que este tokenizador separa palavras; uso a do "
                "GPT-2. Se as respostas saírem estranhas, use a pasta do modelo em safetensors",
                en=f"{file.path.name}: the rule {rule!r} by which this tokenizer cuts words is not known; GPT-2's is used. "
                "If answers look strange, use the model's safetensors folder",
            )
        )


def _known_to_transformers() -> frozenset[str]:
    try:
        from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS
    except ImportError:  # before 5.24
        return frozenset()
    return frozenset(GGUF_PRE_TOKENIZER_SPLITS)


def _refuse(file: GgufFile, reason: str, what: str) -> None:
    kind = file.metadata.get("tokenizer.ggml.model", "?")
    raise SourceError.said(
        pt=f"{file.path.name}: não consegui montar o tokenizador ({kind}): {reason}",
        en=f"{file.path.name}: the tokenizer ({kind}) could not be built: {reason}",
        hint_pt="dê em modelo.tokenizador a pasta do modelo original (tokenizer.json, tokenizer_config.json)",
        hint_en="give the original model's folder (tokenizer.json, tokenizer_config.json) in model.tokenizer",
        where=what,
    )
