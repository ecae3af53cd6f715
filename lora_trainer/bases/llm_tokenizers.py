"""Find a language model's vocabulary without asking the user to care, as tokenizers.py does for CLIP's and T5's.

Templates and padding are the families': a vocabulary that came without its config has neither.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..config.names import shown
from ..errors import SourceError, t
from ..files.sources import Source, hub_errors
from .tokenizers import EmptyTokenizer
from .tokenizers import _is_vocabulary as is_vocabulary
from .tokenizers import _quiet as quiet
from .tokenizers import _unusable as unusable

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


def find_llm_tokenizer(source: Source, folder: str | None, sub: str, places: Sequence[tuple[str, str]], title: str) -> Any:
    """A language model's tokenizer: from `modelo.tokenizador`, the base's own folder, the local cache, or one download.

    `places`: repositories with the same vocabulary, each with the folder inside it; the first is the one that is downloaded.
    `title` is what people call it ("Qwen2.5"). Padding and templates are the family's.
    """
    if source.planning:
        return EmptyTokenizer()
    own = [Path(folder) / sub, Path(folder)] if folder else []
    own += [source.path / sub] if source.kind == "folder" else []
    for place in own:
        if is_vocabulary(place):
            return _load(place)
        if folder and place == Path(folder):
            raise _no_vocabulary(folder, places[0][0])
    from huggingface_hub import hf_hub_download, try_to_load_from_cache

    for repo, inside in places:
        for name in ("tokenizer.json", "merges.txt"):
            found = try_to_load_from_cache(repo, inside + name)
            if isinstance(found, str) and is_vocabulary(Path(found).parent):
                return _load(Path(found).parent)
    repo, inside = places[0]
    try:
        files = [Path(hf_hub_download(repo, inside + name)) for name in FILES]
    except hub_errors() as error:
        raise SourceError.said(
            pt=f"não achei o vocabulário do {title}: o modelo base não o traz, não está no cache do Hugging Face e o "
            "download falhou",
            en=f"{title}'s vocabulary was not found: the base does not bring it, it is not in the Hugging Face cache "
            "and the download failed",
            hint_pt=f"ponha {' e '.join(FILES)} de {repo} numa subpasta {sub} e indique a pasta em modelo.tokenizador",
            hint_en=f"put {' and '.join(FILES)} of {repo} in a sub-folder {sub} and name the folder in model.tokenizer",
            where=shown("model", "tokenizer"),
        ) from error
    return _load(files[0].parent)


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
    kind: Any = AutoTokenizer if described else PreTrainedTokenizerFast
    try:
        with quiet():
            tokenizer = kind.from_pretrained(str(folder), local_files_only=True)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise unusable(folder, str(error)) from error
    except Exception as error:  # as for CLIP's
        if type(error) is not Exception:
            raise
        raise unusable(folder, str(error)) from error
    if len(set(tokenizer("a b c d", add_special_tokens=False).input_ids)) < 4:
        raise unusable(
            folder, t(pt="não distingue as letras a, b, c e d", en="it does not tell the letters a, b, c, d apart")
        )
    return tokenizer
