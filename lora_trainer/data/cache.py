"""A content-addressed store of encoded examples: one small safetensors file per key.

The key says everything that could change the content, so nothing is ever invalidated, only not found. Files appear by
rename: a run that is killed leaves whole entries behind, and two runs that write the same key write the same bytes. A
damaged entry counts as missing and is made again. Not done: deleting old entries; the folder may be deleted at any
time.
"""

import hashlib
import json
from pathlib import Path

import safetensors.torch
from safetensors import SafetensorError, safe_open

from ..atomic import replacing
from ..config.names import shown
from ..errors import DataError
from ..seam.family import Example


def cache_key(*parts: object) -> str:
    return hashlib.sha256(json.dumps(parts, default=str, ensure_ascii=False).encode("utf-8")).hexdigest()


class Cache:
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, key: str) -> Path:
        return self.folder / key[:2] / f"{key}.safetensors"

    def has(self, key: str) -> bool:
        """Whether a whole entry is there: the header read, the length compared; the tensors not read."""
        try:
            with safe_open(self.path(key), framework="pt"):
                return True
        except (OSError, SafetensorError):
            return False

    def read(self, key: str) -> Example | None:
        """None if the entry is missing or damaged."""
        try:
            return safetensors.torch.load(self.path(key).read_bytes())
        except (FileNotFoundError, SafetensorError):
            return None

    def write(self, key: str, example: Example) -> None:
        data = safetensors.torch.save({name: tensor.detach().cpu().clone() for name, tensor in example.items()})
        path = self.path(key)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with replacing(path) as temporary:
                temporary.write_bytes(data)
        except OSError as error:
            if self.has(key):  # Windows lets nobody replace an entry that the other run is reading
                return
            raise DataError.said(
                pt=f"não consigo gravar no cache: {error}",
                en=f"cannot write to the cache: {error}",
                hint_pt="libere espaço ou escolha outra pasta em dados.diretorio_cache; o que já foi feito fica",
                hint_en="free some space or choose another folder in data.cache_dir; what is done is kept",
                where=shown("data", "cache_dir"),
            ) from error
