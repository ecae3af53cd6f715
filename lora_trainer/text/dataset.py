"""The tokenised set that one run trains on, and its held-out part.

What is held out does not depend on the tokenizer. Everything here is in RAM: 5 bytes a
token.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ..config.names import shown
from ..config.schema import DataConfig
from ..data.held_out import hold_out
from ..data.notes import Notes, naming
from ..errors import ConfigError, DataError, t
from ..modality import Progress, no_progress
from .read import FIRST_PROBLEMS, read_rows
from .schemas import NOTHING_USABLE, Collected, Conversation, collect
from .templates import ChatTemplate, choose
from .tokens import Counts, TextEncoder, Tokenised, check_tokenizer


@dataclass(frozen=True)
class TextDataset:
    config: DataConfig
    examples: tuple[Tokenised, ...]
    validation: tuple[Tokenised, ...]
    template: ChatTemplate
    collected: Collected
    """What reading gave, without its examples."""
    counts: Counts
    pad_id: int

    @property
    def notes(self) -> Notes:
        return self.collected.notes

    @property
    def max_length(self) -> int:
        return self.config.max_length

    @property
    def packing(self) -> bool:
        return self.config.packing != "no"

    @property
    def repeats(self) -> int:
        return self.config.repeats or 1

    @property
    def draws_per_epoch(self) -> int:
        return len(self.examples) * self.repeats

    @property
    def lengths(self) -> list[int]:
        return [len(example) for example in self.examples]

    def fingerprint(self) -> str:
        """Changes whenever a resumed run would see other tokens, targets or rows."""
        facts = (self.max_length, self.packing, self.repeats, len(self.examples))
        digest = hashlib.sha256(repr(facts).encode())
        for example in (*self.examples, *self.validation):
            digest.update(example.uid.encode())
        return digest.hexdigest()


def build(
    config: DataConfig, tokenizer: Any, *, exclude: Iterable[Path] = (), progress: Progress = no_progress
) -> TextDataset:
    """Read, recognise, split and tokenise. Raises UserErrors, each kind all at once, before any weight is read."""
    if config.data_dir is None:
        raise ConfigError.said(
            pt="falta dados.diretorio_dados: o arquivo ou a pasta dos textos",
            en="data.data_dir is missing: the file or folder of the texts",
        )
    check_tokenizer(tokenizer)
    rows = read_rows(Path(config.data_dir), recursive=config.recursive, exclude=exclude)
    collected = collect(rows, config)
    template = choose(tokenizer, config.chat_template, collected.schemas)
    encoder = TextEncoder(tokenizer, template, config.max_length, config.loss_on, collected.notes)
    everything = encoder.encode(collected.examples, progress)
    if encoder.counts.swallowed:
        _report_swallowed(encoder.counts.swallowed, collected)
    if encoder.counts.without_target:
        _report_without_target(encoder.counts.without_target, config, collected)
    if not everything:
        raise _nothing_left(encoder.counts, config, collected)
    two = ("dois exemplos diferentes", "two different examples")
    examples, validation = hold_out(everything, config.validation_fraction, collected.notes, two)
    collected.notes.warnings += template.notes
    _report_folding(template, collected)
    pad = tokenizer.pad_token_id
    pad = int(tokenizer.eos_token_id if pad is None else pad)
    collected = replace(collected, examples=[])  # the texts themselves are not needed again
    return TextDataset(config, tuple(examples), tuple(validation), template, collected, encoder.counts, pad)


def _report_swallowed(places: list[str], collected: Collected) -> None:
    collected.notes.warn(
        pt=f"em {len(places)} exemplos o começo da resposta se funde com o fim da pergunta em um só token e não é "
        f"aprendido: termine as perguntas com dois-pontos ou quebra de linha ({naming(places)})",
        en=f"in {len(places)} examples the start of the answer merges with the end of the question into one token, "
        f"and is not learned: end the questions with a colon or a line break ({naming(places)})",
    )


def _report_without_target(without: dict[str, int], config: DataConfig, collected: Collected) -> None:
    """Told and dropped, or refused, as the config says (case C01)."""
    limit = config.max_length
    listed = [f"{where} ({tokens} tokens)" for where, tokens in without.items()]
    count, total = len(listed), len(collected.examples)
    problem = t(
        pt=f"{count} de {total} exemplos sem resposta depois do corte em {limit} tokens: {naming(listed, FIRST_PROBLEMS)}",
        en=f"{count} of {total} examples without an answer after the cut at {limit} tokens: "
        f"{naming(listed, FIRST_PROBLEMS)}",
    )
    if config.rows_without_target == "stop":
        raise DataError(problem, _longer_hint(), shown("data", "rows_without_target"))
    collected.notes.warnings.append(problem + t(pt="; foram descartados", en="; they are dropped"))


def _nothing_left(counts: Counts, config: DataConfig, collected: Collected) -> DataError:
    if counts.without_target:
        return DataError(
            t(
                pt=f"nenhum exemplo tem resposta depois do corte em {config.max_length} tokens "
                f"({naming(list(counts.without_target))})",
                en=f"no example has an answer after the cut at {config.max_length} tokens "
                f"({naming(list(counts.without_target))})",
            ),
            _longer_hint(),
            shown("data", "max_length"),
        )
    return collected.notes.nothing_left(**NOTHING_USABLE)


def _longer_hint() -> str:
    return t(
        pt="aumente dados.comprimento_maximo, ou encurte as perguntas",
        en="raise data.max_length, or shorten the prompts",
    )


def _report_folding(template: ChatTemplate, collected: Collected) -> None:
    if template.takes_system:
        return
    folded = [e.where for e in collected.examples if isinstance(e, Conversation) and e.turns[0].role == "system"]
    if folded:
        collected.notes.note(
            pt=f"o formato de conversa não aceita instrução de sistema: em {len(folded)} exemplos ela foi posta no "
            "começo da primeira pergunta",
            en=f"the chat template takes no system prompt: in {len(folded)} examples it was put at the start of the "
            "first question",
        )

