"""A causal LM whose base is a GGUF file, packed or not."""

from pathlib import Path

from lora_trainer.bases.gguf import GgufWeights
from lora_trainer.config.schema import ModelConfig
from lora_trainer.families.causal_lm.base import GgufBase
from lora_trainer.families.causal_lm.family import CausalLM
from lora_trainer.files.gguf_reader import GgufFile
from lora_trainer.files.sources import Source


class GgufLM(CausalLM):
    def __init__(self, path: Path, *, packed: bool = True) -> None:
        source = Source(path, "file", "modelo_base")
        super().__init__(source, ModelConfig(base_model=str(path)), GgufBase(source, unpacked=not packed))

    @property
    def file(self) -> GgufFile:
        assert isinstance(self.base, GgufBase)
        return self.base.weights.file

    @file.setter
    def file(self, file: GgufFile) -> None:
        assert isinstance(self.base, GgufBase)
        self.base.weights = GgufWeights(file)
