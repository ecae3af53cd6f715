"""Find a language model's vocabulary without asking the user to care, as tokenizers.py does for CLIP's and T5's.

Templates and padding are the families': a vocabulary that came without its config has neither.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config.names import shown
from ..errors import SourceError
from ..files.sources import Source
from .tokenizers import CLIP_FILES, EmptyTokenizer, Place, cached, download, is_vocabulary, own_places, read_tokenizer

FILES = ("tokenizer.json", "tokenizer_config.json")
QWEN2_PLACES = (
    ("Qwen/Qwen2.5-VL-7B-Instruct", ""),
    ("Qwen/Qwen-Image", "tokenizer/"),
    ("Qwen/Qwen-Image-2512", "tokenizer/"),
    ("Qwen/Qwen2.5-7B-Instruct", ""),
)
QWEN3_PLACES = (
    ("Qwen/Qwen3-4B", ""),
    ("Qwen/Qwen3-8B", ""),
    ("Tongyi-MAI/Z-Image-Turbo", "tokenizer/"),
    ("black-forest-labs/FLUX.2-klein-4B", "tokenizer/"),
)
QWEN3_VL_PLACES = (
    ("Qwen/Qwen3-VL-8B-Instruct", ""),
    ("Qwen/Qwen-Image-2.1", "processor/"),
    ("Qwen/Qwen3-VL-4B-Instruct", ""),
)


def find_llm_tokenizer(source: Source, folder: str | None, sub: str, places: Sequence[Place], title: str) -> Any:
    """A language model's tokenizer: from `modelo.tokenizador`, the base's own folder, the local cache, or one download.

    `places`: repositories with the same vocabulary, each with the folder inside it; the first is the one that is downloaded.
    `title` is what people call it ("Qwen2.5"). Padding and templates are the family's.
    """
    if source.planning:
        return EmptyTokenizer()
    for place in own_places(source, folder, sub):
        if is_vocabulary(place):
            return _load(place)
        if folder and place == Path(folder):
            raise _no_vocabulary(folder, places[0][0])
    for known in places:
        found = cached([known], "tokenizer.json") or cached([known], *CLIP_FILES)
        if found:
            return _load(found)
    repo = places[0][0]
    missing = SourceError.said(
        pt=f"não achei o vocabulário do {title}: o modelo base não o traz, não está no cache do Hugging Face e o "
        "download falhou",
        en=f"{title}'s vocabulary was not found: the base does not bring it, it is not in the Hugging Face cache "
        "and the download failed",
        hint_pt=f"ponha {' e '.join(FILES)} de {repo} numa subpasta {sub} e indique a pasta em modelo.tokenizador",
        hint_en=f"put {' and '.join(FILES)} of {repo} in a sub-folder {sub} and name the folder in model.tokenizer",
        where=shown("model", "tokenizer"),
    )
    return _load(download(places[0], FILES, missing))


def _no_vocabulary(folder: str, repo: str) -> SourceError:
    return SourceError.said(
        pt=f"{folder} não tem tokenizer.json, nem vocab.json e merges.txt",
        en=f"{folder} has no tokenizer.json, nor vocab.json and merges.txt",
        hint_pt=f"ponha ali {' e '.join(FILES)} de {repo}, ou apague a chave",
        hint_en=f"put {' and '.join(FILES)} of {repo} there, or remove the key",
        where=shown("model", "tokenizer"),
    )


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    described = (folder / "tokenizer_config.json").is_file()
    return read_tokenizer(AutoTokenizer if described else PreTrainedTokenizerFast, folder)
