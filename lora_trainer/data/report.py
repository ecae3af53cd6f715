"""The lines that tell the user what was found, before anything is trained."""

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Sequence

from ..errors import t
from .batches import BatchPlan
from .dataset import Dataset
from .notes import counted, epochs_line, naming
from .scan import ImageItem


def summary_lines(plan: BatchPlan, epochs: int) -> list[str]:
    """Images, captions, what was left out, buckets, and the arithmetic of the steps."""
    dataset = plan.dataset
    return [
        *_folder_lines(dataset.training),
        *_set_lines(dataset),
        *_excluded_lines(dataset),
        *bucket_lines(dataset),
        *step_lines(plan, epochs),
    ]


def _folder_lines(items: Sequence[ImageItem], most: int = 12) -> list[str]:
    folders = Counter((item.name.rpartition("/")[0] or ".", item.repeats) for item in items)
    lines = []
    for (folder, repeats), count in sorted(folders.items())[:most]:
        images = counted(count, t(pt="imagem", en="image"), t(pt="imagens", en="images"))
        lines.append(f"{folder}: {images} × {repeats}")
    if len(folders) > most:
        lines.append(t(pt=f"… e mais {len(folders) - most} pastas", en=f"… and {len(folders) - most} more folders"))
    return lines


def _set_lines(dataset: Dataset) -> list[str]:
    sources = Counter(_source_kind(item) for item in dataset.training)
    kinds = ", ".join(f"{count} {kind}" for kind, count in sources.most_common())
    images, draws = len(dataset.regularization), sum(item.repeats for item in dataset.regularization)
    held, names = len(dataset.validation), naming([item.name for item in dataset.validation])
    repeated = len(dataset.training) - len({item.content for item in dataset.training})
    told = {
        t(pt=f"legendas: {kinds}", en=f"captions: {kinds}"): True,
        t(
            pt=f"regularização: {counted(images, 'imagem', 'imagens')}, {draws} exemplos por época "
            f"(peso {dataset.config.prior_weight:g})",
            en=f"regularization: {counted(images, 'image', 'images')}, {draws} examples per epoch "
            f"(weight {dataset.config.prior_weight:g})",
        ): images,
        t(pt=f"validação: {held} fora do treino: {names}", en=f"validation: {held} held out: {names}"): held,
        t(pt=f"cópias idênticas de outra imagem: {repeated}", en=f"exact copies of another image: {repeated}"): repeated,
    }
    return [line for line, holds in told.items() if holds]


def _source_kind(item: ImageItem) -> str:
    names = {
        "folder": t(pt="do nome da pasta", en="from the folder's name"),
        "trigger": t(pt="só com a palavra-gatilho", en="with the trigger word alone"),
        "none": t(pt="sem texto", en="without text"),
    }
    source = item.caption.source.rpartition("/")[2]
    if source in names:
        return names[source]
    shared = source.lower() in ("metadata.jsonl", "metadata.csv", "default.txt")
    return t(pt="de ", en="from ") + (source if shared else "." + source.rpartition(".")[2].lower())


def _excluded_lines(dataset: Dataset) -> list[str]:
    return [
        t(pt=f"fora do treino ({reason}): {len(names)}: ", en=f"left out ({reason}): {len(names)}: ")
        + naming(names, 10)
        for reason, names in dataset.notes.excluded.items()
    ]


def bucket_lines(dataset: Dataset) -> list[str]:
    """A table: size, images, and how much of them the crop loses on average and at worst."""
    buckets: dict[tuple[int, int], list[float]] = {}
    for item in dataset.examples:
        assert item.fit is not None
        buckets.setdefault(item.fit.target, []).append(item.fit.cropped)
    lines = [t(pt="bucket      imagens  cortado (pior)", en="bucket       images  cropped (worst)")]
    for (width, height), shares in sorted(buckets.items(), key=lambda pair: -len(pair[1])):
        mean, worst = sum(shares) / len(shares), max(shares)
        lines.append(f"{f'{width}x{height}':<10} {len(shares):>8}  {mean:>6.1%} ({worst:.1%})")
    return lines


def step_lines(plan: BatchPlan, epochs: int) -> list[str]:
    """images × repeats ÷ (batch × accumulation) = steps, with the micro-batches that buckets leave short."""
    draws, batches, steps = plan.dataset.draws_per_epoch, plan.batches_per_epoch, plan.steps_per_epoch
    extra = batches - -(-draws // plan.batch_size)
    more = t(pt=f" ({extra} a mais por haver vários buckets)", en=f" ({extra} more, as there are several buckets)")
    short = more if extra else ""
    return [
        t(
            pt=f"{draws} exemplos por época ÷ lote {plan.batch_size} = {batches} micro-lotes{short} "
            f"÷ acumulação {plan.accumulation} = {counted(steps, 'passo', 'passos')} por época",
            en=f"{draws} examples per epoch ÷ batch {plan.batch_size} = {batches} micro-batches{short} "
            f"÷ accumulation {plan.accumulation} = {counted(steps, 'step', 'steps')} per epoch",
        ),
        epochs_line(epochs, steps),
    ]


def token_lines(dataset: Dataset, count_tokens: Callable[[str], int], limit: int) -> list[str]:
    """Captions that lose their end, with the end of the longest one; [] if all fit."""
    lengths = [(count_tokens(text), item, text) for item in dataset.examples for text in item.caption.texts]
    long = [entry for entry in lengths if entry[0] > limit]
    if not long:
        return []
    longest, item, text = max(long, key=lambda entry: entry[0])
    name = item.caption.source if item.caption.own else item.name
    lost = dropped_tail(text, count_tokens, limit)
    lost = lost if len(lost) <= 80 else lost[:50] + " … " + lost[-25:]
    one, many = t(pt="legenda passa de", en="caption exceeds"), t(pt="legendas passam de", en="captions exceed")
    head = f"{counted(len(long), one, many)} {limit} tokens"
    return [
        t(
            pt=f"{head}; a maior: {name} ({longest}). Fica de fora: “{lost}”",
            en=f"{head}; the longest: {name} ({longest}). Left out: “{lost}”",
        )
    ]


def dropped_tail(text: str, count_tokens: Callable[[str], int], limit: int) -> str:
    """The words from the first one that no longer fits."""
    words = text.split()
    fitting = bisect_right(range(1, len(words) + 1), limit, key=lambda count: count_tokens(" ".join(words[:count])))
    return " ".join(words[fitting:])
