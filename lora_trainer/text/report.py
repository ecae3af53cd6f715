"""What the user is told of a text set before anything is trained: rows, tokens, what the limit costs, and one example
as the model sees it."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..data.notes import counted, epochs_line, naming
from ..errors import language, t
from .batches import TextBatchPlan
from .dataset import TextDataset
from .tokens import Tokenised

_BAR = 30
_BINS = 8
_NAMES = {
    "messages": ("messages (role, content)", "messages (role, content)"),
    "sharegpt": ("ShareGPT (from, value)", "ShareGPT (from, value)"),
    "alpaca": ("Alpaca (instruction, input, output)", "Alpaca (instruction, input, output)"),
    "prompt_completion": ("pergunta e resposta (prompt, completion)", "prompt and completion"),
    "text": ("texto puro", "plain text"),
}


def summary_lines(plan: TextBatchPlan, epochs: int, tokenizer: Any = None) -> list[str]:
    """Everything, in the order people ask for it; with a tokenizer, an example too."""
    dataset = plan.dataset
    return [
        *row_lines(dataset),
        *token_lines(dataset),
        *histogram_lines(dataset),
        *step_lines(plan, epochs),
        *([] if tokenizer is None else example_lines(dataset, tokenizer)),
    ]


def facts(plan: TextBatchPlan) -> dict[str, Any]:
    """The same as figures, for `--json` and the run folder."""
    dataset, counts = plan.dataset, plan.dataset.counts
    return {
        "rows": dataset.collected.rows,
        "examples": len(dataset.examples),
        "validation": len(dataset.validation),
        "dropped": {reason: len(places) for reason, places in dataset.notes.excluded.items()},
        "without_target": len(counts.without_target),
        "schemas": dict(dataset.collected.schemas),
        "chat_template": dataset.template.name,
        "tokens": sum(dataset.lengths),
        "targets": sum(example.targets for example in dataset.examples),
        "longest": max(dataset.lengths),
        "longest_row": plan.longest,
        "truncated": len(counts.truncated),
        "tokens_lost": counts.tokens_lost,
        "targets_lost": counts.targets_lost,
        "texts_split": counts.split,
        "rows_per_epoch": plan.rows_per_epoch,
        "steps_per_epoch": plan.steps_per_epoch,
    }


def row_lines(dataset: TextDataset) -> list[str]:
    """Files, schemas, template, dropped rows with their reasons."""
    found = dataset.collected
    column = 0 if language() == "pt" else 1
    schemas = ", ".join(f"{count} {_NAMES[name][column]}" for name, count in found.schemas.most_common())
    template = dataset.template.name
    lines = [
        t(pt=f"arquivos: {naming(found.files)}", en=f"files: {naming(found.files)}"),
        t(pt=f"reconhecido: {schemas}", en=f"recognised: {schemas}"),
    ]
    if set(found.schemas) != {"text"}:
        own = t(pt="o do tokenizador", en="the tokenizer's own")
        shown = own if template == "tokenizer" else template
        lines.append(t(pt=f"formato de conversa: {shown}", en=f"chat template: {shown}"))
    without = len(dataset.counts.without_target)
    usable, dropped = found.rows - found.dropped - without, found.dropped + without
    lines.append(t(pt=f"ok {usable} / descartados {dropped}", en=f"ok {usable} / dropped {dropped}"))
    lines += [
        t(pt=f"descartados ({reason}): {len(places)}: ", en=f"dropped ({reason}): {len(places)}: ") + naming(places, 10)
        for reason, places in found.notes.excluded.items()
    ]
    if dataset.validation:
        held = len(dataset.validation)
        lines.append(t(pt=f"validação: {held} fora do treino", en=f"validation: {held} held out"))
    return lines


def token_lines(dataset: TextDataset) -> list[str]:
    """Tokens and targets, and what the limit takes of them."""
    total, targets = sum(dataset.lengths), sum(example.targets for example in dataset.examples)
    counts, limit = dataset.counts, dataset.max_length
    lost, all_targets = counts.targets_lost, targets + counts.targets_lost
    rows, cut = len(counts.truncated), naming(counts.truncated)
    told = {
        t(
            pt=f"{_number(total)} tokens por época, {_number(targets)} aprendidos ({targets / total:.0%})",
            en=f"{_number(total)} tokens per epoch, {_number(targets)} learned ({targets / total:.0%})",
        ): True,
        t(
            pt=f"{counted(rows, 'exemplo cortado', 'exemplos cortados')} em {limit} tokens: {_number(counts.tokens_lost)} "
            f"tokens a menos, dos quais {_number(lost)} de resposta ({lost / all_targets:.1%} de tudo o que se "
            f"aprenderia): {cut}",
            en=f"{counted(rows, 'example', 'examples')} cut at {limit} tokens: {_number(counts.tokens_lost)} tokens less, "
            f"{_number(lost)} of them targets ({lost / all_targets:.1%} of all there was to learn): {cut}",
        ): rows,
        t(
            pt=f"{counted(counts.split, 'texto dividido', 'textos divididos')} em partes de até {limit} tokens, sem perda",
            en=f"{counted(counts.split, 'text', 'texts')} split into pieces of up to {limit} tokens, nothing lost",
        ): counts.split,
    }
    return [line for line, holds in told.items() if holds]


def histogram_lines(dataset: TextDataset) -> list[str]:
    """Examples by length, as bars."""
    lengths = np.array(dataset.lengths)
    width = max(1, -(-int(lengths.max()) // _BINS))
    width = -(-width // 8) * 8 if width > 8 else width
    counts = np.bincount((lengths - 1) // width)
    middle = int(np.median(lengths))
    lines = [
        t(
            pt=f"comprimento: mediana {middle}, média {lengths.mean():.0f}, maior {lengths.max()} tokens",
            en=f"length: median {middle}, mean {lengths.mean():.0f}, longest {lengths.max()} tokens",
        )
    ]
    for number, count in enumerate(counts):
        bar = "█" * -(-int(count) * _BAR // int(counts.max()))
        lines.append(f"{number * width + 1:>6}–{(number + 1) * width:<6} {bar:<{_BAR}} {count}".rstrip())
    return lines


def step_lines(plan: TextBatchPlan, epochs: int) -> list[str]:
    """examples → rows ÷ (batch × accumulation) = steps."""
    dataset, rows, steps = plan.dataset, plan.rows_per_epoch, plan.steps_per_epoch
    draws = counted(dataset.draws_per_epoch, t(pt="exemplo", en="example"), t(pt="exemplos", en="examples"))
    what = t(pt=f"{draws} por época", en=f"{draws} per epoch")
    if dataset.packing:
        full = sum(dataset.lengths) * dataset.repeats / (rows * dataset.max_length)
        packed = counted(rows, t(pt="linha", en="row"), t(pt="linhas", en="rows"))
        what += t(
            pt=f", juntados em {packed} de até {dataset.max_length} tokens ({full:.0%} cheias)",
            en=f", packed into {packed} of up to {dataset.max_length} tokens ({full:.0%} full)",
        )
    return [
        what
        + t(
            pt=f" ÷ (lote {plan.batch_size} × acumulação {plan.accumulation}) = "
            f"{counted(steps, 'passo', 'passos')} por época",
            en=f" ÷ (batch {plan.batch_size} × accumulation {plan.accumulation}) = "
            f"{counted(steps, 'step', 'steps')} per epoch",
        ),
        epochs_line(epochs, steps),
    ]


def example_lines(dataset: TextDataset, tokenizer: Any, most: int = 1200) -> list[str]:
    """The first example as the model sees it, what it learns between ⟦ and ⟧."""
    example = dataset.examples[0]
    text = marked(example, tokenizer)
    if len(text) > most:
        text = text[: most // 2] + "\n…\n" + text[-most // 2 :]
    head = t(pt="um exemplo; o que está entre ⟦ e ⟧ é aprendido", en="an example; what lies between ⟦ and ⟧ is learned")
    return [f"{head} ({example.where}):", *(f"  {line}" for line in text.split("\n"))]


def marked(example: Tokenised, tokenizer: Any) -> str:
    """The decoded tokens, runs of targets between ⟦ and ⟧."""
    parts: list[str] = []
    start = 0
    learned: Sequence[bool] = example.learned.tolist()
    for place in range(1, len(example) + 1):
        if place == len(example) or learned[place] != learned[start]:
            text = tokenizer.decode(example.input_ids[start:place].tolist(), clean_up_tokenization_spaces=False)
            parts.append(f"⟦{text}⟧" if learned[start] else text)
            start = place
    return "".join(parts)


def _number(count: int) -> str:
    """12.345 or 12,345, as each language writes it."""
    text = f"{count:,}"
    return text.replace(",", ".") if language() == "pt" else text
