"""Where a model comes from: a file, a diffusers folder or a Hugging Face id, opened without reading a weight.

`open_source` tells what is wrong with a path or file before anything is loaded. A path that exists is never looked up
on the network; an id is taken from the local cache when it is there whole. Left out: revisions, gated-model login
prompts.
"""

import difflib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal, NoReturn

from ..errors import SourceError, t
from .classify import classify, classify_folder
from .gguf_reader import GgufFile, is_gguf, open_gguf
from .headers import PICKLE_SUFFIXES, Header, read_header, refuse_pickle
from .kinds import LANGUAGE_MODEL, T5, UNKNOWN, Kind

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
COMPONENTS = ("unet", "transformer", "vae", "text_encoder", "text_encoder_2", "text_encoder_3")
_CONFIG_FILES = {
    "": "config.json",
    "model_index": "model_index.json",
    "scheduler": "scheduler/scheduler_config.json",
    "tokenizer": "tokenizer/tokenizer_config.json",
    "tokenizer_2": "tokenizer_2/tokenizer_config.json",
}


IMAGE_GGUF = ("flux", "sd1", "sdxl", "sd3", "aura", "ltxv", "hyvid", "wan", "qwen_image", "qwen_image21", "lumina2", "pixart",
              "chroma")
"""`general.architecture` of GGUF files that hold image and video models."""


T5_GGUF = ("t5", "t5encoder")


@dataclass(frozen=True)
class Source:
    """A "file" has the `header` and `metadata` of one .safetensors; of a "folder", use `config` and `weight_files`."""

    path: Path
    kind: Literal["file", "folder"]
    what: str
    """The config key it was given under, for messages."""
    header: Header = field(default_factory=dict, repr=False)
    metadata: dict[str, str] = field(default_factory=dict, repr=False)
    hub_id: str | None = None
    planning: bool = False
    """Only the architecture is wanted: a folder of config files is enough, weights and tokenizer may be missing."""

    def config(self, sub: str) -> dict[str, Any] | None:
        """A config of a folder, None if absent: "unet", "vae", "scheduler", "model_index", "" for the root's."""
        if self.kind == "file":
            return None
        return _read_json(self.path / _CONFIG_FILES.get(sub, f"{sub}/config.json"), self.what)

    def weight_files(self, sub: str) -> list[Path]:
        """The .safetensors files of a folder's component: whole or sharded, plain before fp16 and bf16 variants."""
        folder = self.path / sub
        names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
        chosen = _choose_weights(names)
        if chosen is None and self.planning:
            return []
        if chosen is None:
            self._refuse_weights(folder, names)
        if not chosen.endswith(".json"):
            return [folder / chosen]
        places = (_read_json(folder / chosen, self.what) or {}).get("weight_map")
        if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
            raise SourceError.said(
                pt=f"{folder / chosen} não diz em que arquivo está cada tensor (weight_map)",
                en=f"{folder / chosen} does not tell which file holds each tensor (weight_map)",
                hint_pt="baixe este arquivo de novo",
                hint_en="download this file again",
                where=self.what,
            )
        shards = sorted(set(places.values()))
        if missing := [name for name in shards if name not in names]:
            raise SourceError.said(
                pt=f"{folder}: faltam partes do modelo: {', '.join(missing)}",
                en=f"{folder}: parts of the model are missing: {', '.join(missing)}",
                hint_pt="baixe as partes que faltam",
                hint_en="download the missing parts",
                where=self.what,
            )
        return [folder / name for name in shards]

    def _refuse_weights(self, folder: Path, names: Iterable[str]) -> NoReturn:
        pickles = sorted(name for name in names if Path(name).suffix in PICKLE_SUFFIXES)
        if pickles:
            refuse_pickle(folder / pickles[0], self.what)
        raise SourceError(
            t(pt=f"não há pesos .safetensors em {folder}", en=f"there are no .safetensors weights in {folder}"),
            t(pt="a pasta está incompleta: baixe-a de novo", en="the folder is incomplete: download it again"),
            self.what,
        )

    @cached_property
    def gguf(self) -> GgufFile | None:
        single = self.kind == "file" and self.path.is_file() and is_gguf(self.path)
        return open_gguf(self.path, self.what) if single else None

    @cached_property
    def tensors(self) -> Header:
        """Of a single file of either format; of GGUF, the dtype is ggml's name ("Q4_K")."""
        return self.header if self.gguf is None else self.gguf.tensors

    def looks_like(self) -> Kind:
        return self._looks_like

    @cached_property
    def _looks_like(self) -> Kind:
        if self.kind == "folder":
            return classify_folder(self.config)
        kind = classify(self.tensors)
        if self.gguf is None or kind.in_gguf:
            return kind
        if self.gguf.architecture in T5_GGUF:
            return T5
        return UNKNOWN if self.gguf.architecture in IMAGE_GGUF else LANGUAGE_MODEL

    def title(self) -> str:
        """The name people know it by."""
        return self.hub_id or self.path.name


def _read_json(path: Path, what: str) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SourceError(
            t(pt=f"{path} não é um JSON legível: {error}", en=f"{path} is not readable JSON: {error}"),
            t(pt="baixe este arquivo de novo", en="download this file again"),
            what,
        ) from error
    if not isinstance(content, dict):
        raise SourceError.said(pt=f"{path}: esperava um objeto JSON", en=f"{path}: expected a JSON object", where=what)
    return content


def _choose_weights(names: Iterable[str]) -> str | None:
    """Among a component's file names, the one to read: plain, index of shards, then the variants, each likewise."""
    names = sorted(names)
    for variant in ("", ".fp16", ".bf16", ".fp32"):
        for stem in ("diffusion_pytorch_model", "model"):
            for name in (
                f"{stem}{variant}.safetensors",
                f"{stem}.safetensors.index{variant}.json",
                f"{stem}{variant}.safetensors.index.json",
            ):
                if name in names:
                    return name
    weights = [name for name in names if name.endswith(".safetensors")]
    return weights[0] if len(weights) == 1 else None


def open_source(text: str, what: str = "") -> Source:
    """Open a path or a Hugging Face id given under the key `what`; unsaid, that of the base."""
    what = what or t(pt="modelo.modelo_base", en="model.base_model")
    path = Path(text).expanduser()
    if path.is_dir():
        return _open_folder(path, what)
    if path.is_file():
        return _open_file(path, what)
    if HUB_ID.fullmatch(text) and path.suffix.lower() not in PICKLE_SUFFIXES | {".safetensors", ".gguf"}:
        return _open_hub(text, what)
    raise SourceError(
        t(
            pt=f"{text} não existe (procurado em {path.absolute()})",
            en=f"{text} does not exist (looked at {path.absolute()})",
        ),
        _near(path),
        what,
    )


def _near(path: Path) -> str:
    """What lies where the path should have been."""
    parent = path.absolute().parent
    while not parent.is_dir() and parent != parent.parent:
        parent = parent.parent
    try:
        names = [
            p.name for p in parent.iterdir() if p.is_dir() or p.suffix.lower() in PICKLE_SUFFIXES | {".safetensors"}
        ]
    except OSError:
        names = []
    close = difflib.get_close_matches(path.name, names, n=3, cutoff=0.6)
    if close:
        return t(pt=f"em {parent} há: {', '.join(close)}", en=f"{parent} has: {', '.join(close)}")
    return t(
        pt="dê um arquivo .safetensors, uma pasta do diffusers ou um id do Hugging Face (dono/nome)",
        en="give a .safetensors file, a diffusers folder or a Hugging Face id (owner/name)",
    )


def _open_file(path: Path, what: str) -> Source:
    if is_gguf(path):
        if not open_gguf(path, what).tensors:  # which says what else may be wrong with it
            raise SourceError(
                t(pt=f"{path.name} é um GGUF sem tensores", en=f"{path.name} is a GGUF without tensors"),
                t(pt="baixe o arquivo de novo", en="download the file again"),
                what,
            )
        return Source(path, "file", what)
    header, metadata = read_header(path, what)
    return Source(path, "file", what, header, metadata)


def _open_folder(path: Path, what: str) -> Source:
    markers = [path / "model_index.json", path / "config.json", *(path / sub / "config.json" for sub in COMPONENTS)]
    if any(marker.is_file() for marker in markers):
        return Source(path, "folder", what)
    files = sorted(p for p in path.iterdir() if p.is_file())
    weights = [p for p in files if p.suffix.lower() in (".safetensors", ".gguf")]
    if len(weights) == 1:
        return _open_file(weights[0], what)
    if len(weights) > 1:
        raise SourceError.said(
            pt=f"a pasta {path} tem {len(weights)} modelos: {', '.join(p.name for p in weights[:6])}",
            en=f"the folder {path} has {len(weights)} models: {', '.join(p.name for p in weights[:6])}",
            hint_pt="dê o caminho de um deles",
            hint_en="give the path of one of them",
            where=what,
        )
    if pickles := [p for p in files if p.suffix.lower() in PICKLE_SUFFIXES]:
        refuse_pickle(pickles[0], what)
    raise SourceError(
        t(
            pt=f"a pasta {path} não tem modelo: nem model_index.json, nem config.json, nem um .safetensors ou .gguf",
            en=f"the folder {path} has no model: no model_index.json, no config.json, no .safetensors or .gguf",
        ),
        _near(path),
        what,
    )


# -- Hugging Face ids


def _open_hub(hub_id: str, what: str) -> Source:
    """From the local cache if it is there whole, else downloaded: .safetensors (fp16 if offered), json and txt."""
    from huggingface_hub import snapshot_download

    try:
        return _open_snapshot(Path(snapshot_download(hub_id, local_files_only=True)), hub_id, what)
    except (OSError, ValueError, SourceError):
        pass  # not cached, or only in part: the download below says what is wrong
    try:
        wanted = _wanted_files(hub_id)
        path = Path(snapshot_download(hub_id, allow_patterns=wanted))
    except hub_errors() as error:
        cause = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise SourceError.said(
            pt=f"{hub_id}: não existe neste computador e não pôde ser baixado ({cause})",
            en=f"{hub_id}: is not on this computer and could not be downloaded ({cause})",
            hint_pt="se é uma pasta ou arquivo seu, confira o caminho; se é um id do Hugging Face, confira o nome, a "
            "internet "
            "e, em modelos restritos, rode `hf auth login`",
            hint_en="if it is your own folder or file, check the path; if it is a Hugging Face id, check its name, the "
            "network "
            "and, for gated models, run `hf auth login`",
            where=what,
        ) from error
    return _open_snapshot(path, hub_id, what)


def hub_errors() -> tuple[type[BaseException], ...]:
    """What huggingface_hub raises without a network: requests' errors are OSErrors, httpx's are not."""
    from huggingface_hub.errors import HfHubHTTPError

    transport = [base for base in HfHubHTTPError.__mro__ if base.__name__ in ("HTTPError", "RequestException")]
    return (OSError, ValueError, *transport)


def _open_snapshot(path: Path, hub_id: str, what: str) -> Source:
    """The source in a cache folder; SourceError when a component's weights are missing."""
    opened = _open_folder(path, what)
    source = Source(opened.path, opened.kind, what, opened.header, opened.metadata, hub_id)
    for sub, value in (source.config("model_index") or {}).items():
        if sub in COMPONENTS and isinstance(value, list) and value[0] is not None:
            source.weight_files(sub)
    return source


def _wanted_files(hub_id: str) -> list[str]:
    """Of the repository's files, each component's weights once, and all small text files."""
    from huggingface_hub import HfApi

    names = list(HfApi().list_repo_files(hub_id))
    wanted = [name for name in names if name.endswith((".json", ".txt", ".jinja", ".model")) and name.count("/") <= 1]
    for sub in ("", *COMPONENTS):
        inside = [n.removeprefix(f"{sub}/" if sub else "") for n in names if n.startswith(f"{sub}/" if sub else n)]
        inside = [n for n in inside if "/" not in n and n.endswith(".safetensors")]
        half = [n for n in inside if ".fp16." in n or ".fp16-" in n]
        plain = [n for n in inside if not re.search(r"\.(fp16|bf16|fp32|non_ema|ema|openvino|onnx)[.-]", n)]
        if sub or "model_index.json" not in names:  # the single files beside a diffusers layout hold the same again
            wanted += [f"{sub}/{n}" if sub else n for n in half or plain]
    return wanted
