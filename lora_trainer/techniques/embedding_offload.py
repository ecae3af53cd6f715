"""Keep embeddings and head in host memory, where a large vocabulary weighs most: 2 GiB of an 8 B model.

A token looks its row up in host memory and only the row crosses over; the head comes in some thousand rows at a time
(engine/vocabulary.py). What is moved is every embedding outside the blocks, and the linear layer as high as the vocabulary.
Frozen weights only; adapters stay on the card. Left out: a head that carries an adapter still comes in whole at each use.
"""

from __future__ import annotations

from ..config.declared import Declared
from ..seam.technique import RESIDENT, Blocks, ConvertTechnique, Module, WrapTechnique


class EmbeddingOffload(ConvertTechnique, WrapTechnique):
    title = ("descarga de embeddings", "embedding offload")
    when = ("vocabulários grandes, de modelos de linguagem", "large vocabularies, of language models")
    options = (Declared(
        ("memory", "embedding_offload"), "descarga_embeddings", place=20, phases=RESIDENT, docs=(
            "Guarda na RAM os embeddings e a cabeça de um modelo de linguagem; só as linhas em uso vêm à placa.",
            "Keep a language model's embeddings and head in RAM; only the rows in use come to the card.")),)
    mildness = 20
    order = 14
    some_bases = True

    @classmethod
    def finds(cls, model: Module, groups: Blocks) -> bool:
        from ..engine.vocabulary import vocabulary_bytes

        return bool(vocabulary_bytes(model, groups))

    def convert(self, model: Module, groups: Blocks) -> None:
        from ..engine import vocabulary

        vocabulary.send_home(model, groups)

    def wrap(self, model: Module, groups: Blocks) -> None:
        from ..engine import vocabulary

        vocabulary.work_from_home(model, groups)


TECHNIQUE = EmbeddingOffload
