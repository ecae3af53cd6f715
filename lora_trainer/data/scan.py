"""From a folder to checked image items: walk, decode everything once, find captions, masks and repeats.

Nothing is dropped in silence: every file that is left out stands in `Notes.excluded` under its reason, every bad one is
named before any model is loaded.
"""

import functools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..config.fields import printable
from ..config.names import shown
from ..config.schema import DataConfig
from ..errors import DataError, t
from ..modality import Progress, no_progress
from .buckets import Fit
from .captions import Caption, CaptionReader
from .check import FileIndex, check_files
from .images import ImageFacts
from .notes import Notes, counted, listing, naming
from .variants import stable_hash
from .walk import MASK_ENDING, Found, folder_repeats, large_number, nfc, readable_suffixes, stem_key, walk

Facts = dict[Path, ImageFacts]
Bad = list[tuple[str, str]]
"""(name, reason)"""


@dataclass(frozen=True)
class Mask:
    path: Path
    content: str


@dataclass(frozen=True)
class ImageItem:
    path: Path
    name: str
    """Relative to its data folder, with `/`: what messages call it."""
    facts: ImageFacts
    repeats: int
    caption: Caption
    mask: Mask | None = None
    regularization: bool = False
    fit: Fit | None = None
    """Set by `dataset.build`; items without one were left out."""

    @property
    def content(self) -> str:
        return self.facts.content

    @functools.cached_property
    def uid(self) -> str:
        """The same for the same file at the same place in the data folder, wherever that folder lies."""
        return f"{stable_hash(self.regularization, self.name, self.facts.content):016x}"


class Scanner:
    """Scans folders against one file index, gathering what it meets in `notes`."""

    def __init__(self, config: DataConfig, index: FileIndex, notes: Notes, progress: Progress = no_progress) -> None:
        self.config, self.index, self.notes, self.progress = config, index, notes, progress

    def scan(self, root: Path, *, regularization: bool = False, exclude: Iterable[Path] = ()) -> list[ImageItem]:
        """Items of one data folder, sorted by name. Raises DataError at once if the folder itself is unusable."""
        _check_root(root, "regularization_dir" if regularization else "data_dir")
        found = walk(root, recursive=self.config.recursive, exclude=exclude)
        paths = [image for folder in found.folders for image in folder.images]
        if not paths and not found.unreadable:
            raise _nothing(found)
        facts, reasons = check_files(paths, self.index, self.config.max_pixels, self.progress)
        bad = found.unreadable + [(found.name(path), reason) for path, reason in reasons.items()]
        masks = {} if regularization else self._masks(found, facts, bad)
        self._report_bad(bad, found)
        self._report_notes(found, facts)
        self._report_folders(found, regularization)
        trigger = None if regularization else self.config.trigger
        reader = CaptionReader(found, self.config, self.notes, trigger)
        items = [self._item(path, found, fact, reader, regularization) for path, fact in facts.items()]
        reader.finish()
        items = [replace(item, mask=masks.get(item.path)) for item in self._captioned(items)]
        return sorted(items, key=lambda item: item.name)

    # -- files

    def _masks(self, found: Found, facts: Facts, bad: Bad) -> dict[Path, Mask]:
        """Masks of the images; one of another shape than its image is bad, a missing one is said."""
        if self.config.mask == "no":
            return {}
        if self.config.mask == "alpha":
            self._report_unmasked([found.name(path) for path, fact in facts.items() if "alpha" not in fact.notes])
            return {}
        folder = Path(self.config.mask_dir) if self.config.mask_dir is not None else None
        if folder is not None:
            _check_root(folder, "mask_dir")
        wanted = mask_paths(list(facts), found, folder)
        mask_facts, reasons = check_files(
            sorted(set(wanted.values())), self.index, self.config.max_pixels, self.progress
        )
        for path, mask in wanted.items():
            if mask in mask_facts and (problem := shape_problem(mask_facts[mask], facts[path])):
                reasons[mask] = problem
        bad.extend((printable(mask.name), reason) for mask, reason in reasons.items())
        self._report_unmasked([found.name(path) for path in facts if path not in wanted])
        return {path: Mask(mask, mask_facts[mask].content) for path, mask in wanted.items() if mask not in reasons}

    def _report_unmasked(self, names: list[str]) -> None:
        if names:
            self.notes.warn(
                pt=f"sem máscara, valem por inteiro: {naming(names)} ({len(names)})",
                en=f"without a mask, trained as a whole: {naming(names)} ({len(names)})",
            )

    def _report_bad(self, bad: Bad, found: Found) -> None:
        if self.config.bad_images == "skip":
            for name, reason in bad:
                self.notes.exclude(t(pt=f"ruim: {reason}", en=f"bad: {reason}"), name)
        elif bad:
            lines = listing([f"{name}: {reason}" for name, reason in sorted(bad)])
            root = printable(str(found.root))
            self.notes.fail(
                t(
                    pt=f"{counted(len(bad), 'arquivo ruim', 'arquivos ruins')} em {root}:\n{lines}",
                    en=f"{counted(len(bad), 'bad file', 'bad files')} in {root}:\n{lines}",
                ),
                t(
                    pt="conserte ou apague os arquivos, ou use dados.imagens_ruins: pular.",
                    en="mend or delete the files, or set data.bad_images: skip.",
                ),
            )

    def _report_folders(self, found: Found, regularization: bool) -> None:
        """Folders that were not read, or whose number was not taken for a repeat count."""
        if found.runs:
            self.notes.warn(
                pt=f"pastas de execuções deste programa dentro de {printable(str(found.root))}, não lidas: "
                + naming(found.runs),
                en=f"run folders of this program inside {printable(str(found.root))}, not read: "
                + naming(found.runs),
            )
        if self.config.repeats is not None or regularization:
            return
        for folder in found.folders:
            if folder.images and (number := large_number(folder.path)):
                name = printable(nfc(folder.path.name))
                self.notes.warn(
                    pt=f"pasta {name}: {number} é grande demais para um número de repetições e não conta como tal",
                    en=f"folder {name}: {number} is too large for a repeat count and is not taken for one",
                )

    def _report_notes(self, found: Found, facts: Facts) -> None:
        if found.unsupported:
            count, names = len(found.unsupported), naming(found.unsupported)
            self.notes.warn(
                pt=f"{counted(count, 'arquivo', 'arquivos')} de tipo não lido: {names}",
                en=f"{counted(count, 'file', 'files')} of a type that is not read: {names}",
            )
        said = {
            "animated": t(
                pt="só o primeiro quadro da animação conta", en="only the first frame of the animation counts"
            ),
            "broken_profile": t(pt="perfil de cor inválido, ignorado", en="broken colour profile, ignored"),
            "broken_exif": t(pt="EXIF danificado, ignorado", en="broken EXIF, ignored"),
        }
        for note, text in said.items():
            names_with = [found.name(path) for path, fact in facts.items() if note in fact.notes]
            if names_with:
                self.notes.warnings.append(f"{text}: {naming(names_with)} ({len(names_with)})")

    # -- items

    def _item(
        self, path: Path, found: Found, facts: ImageFacts, reader: CaptionReader, regularization: bool
    ) -> ImageItem:
        repeats, words = folder_repeats(path.parent, found.root)
        if self.config.repeats is not None and not regularization:
            repeats = self.config.repeats
        caption = reader.read(path, words)
        times = 1 if repeats is None else repeats
        return ImageItem(path, found.name(path), facts, times, caption, regularization=regularization)

    def _captioned(self, items: list[ImageItem]) -> list[ImageItem]:
        bare = [item for item in items if not item.caption.own]
        if not bare:
            return items
        summary = t(pt=f"{len(bare)} de {len(items)} sem legenda", en=f"{len(bare)} of {len(items)} without a caption")
        if items[0].regularization:
            summary = t(pt="regularização: ", en="regularization: ") + summary
        names = naming([item.name for item in bare])
        if self.config.uncaptioned == "stop":
            pt, en = "escreva as legendas, ou use dados.sem_legenda: usar", "write the captions, or set data.uncaptioned: use"
            self.notes.fail(f"{summary}: {names}", t(pt=pt, en=en))
        elif self.config.uncaptioned == "skip":
            for item in bare:
                self.notes.exclude(t(pt="sem legenda", en="no caption"), item.name)
            return [item for item in items if item.caption.own]
        elif any(item.caption.source == "none" for item in bare):
            self.notes.warn(
                pt=f"{summary} nem palavra-gatilho: treinam sem texto ({names})",
                en=f"{summary} nor a trigger word: trained without text ({names})",
            )
        else:
            self.notes.note(
                pt=f"{summary}: vale a palavra-gatilho ou o nome da pasta ({names})",
                en=f"{summary}: the trigger or the folder's name counts ({names})",
            )
        return items


def _check_root(root: Path, option: str) -> None:
    """`option` of `data` names it."""
    name, where = printable(str(root)), shown("data", option)
    if not root.exists():
        raise DataError.said(pt=f"a pasta não existe: {name}", en=f"no such folder: {name}", where=where)
    if not root.is_dir():
        raise DataError.said(
            pt=f"{name} é um arquivo; preciso de uma pasta", en=f"{name} is a file; a folder is needed", where=where
        )


def _nothing(found: Found) -> DataError:
    suffixes, count = " ".join(sorted(readable_suffixes())), found.skipped_subfolders
    runs, unsupported, root = naming(found.runs), naming(found.unsupported), printable(str(found.root))
    hints = {
        t(pt=f"extensões aceitas: {suffixes}", en=f"accepted suffixes: {suffixes}"): True,
        t(
            pt=f"Há {counted(count, 'subpasta', 'subpastas')}: use dados.recursivo: sim",
            en=f"There are {counted(count, 'sub-folder', 'sub-folders')}: set data.recursive: true",
        ): count,
        t(pt=f"Pastas de execuções não são lidas: {runs}", en=f"Run folders are not read: {runs}"): runs,
        t(pt=f"Não lidos: {unsupported}", en=f"Not read: {unsupported}"): unsupported,
    }
    hint = ". ".join(line for line, holds in hints.items() if holds)
    return DataError(t(pt=f"nenhuma imagem em {root}", en=f"no image in {root}"), hint=hint)


def mask_paths(images: Sequence[Path], found: Found, mask_dir: Path | None) -> dict[Path, Path]:
    """Image -> its mask file, where there is one."""
    if mask_dir is None or mask_dir.resolve() == found.root.resolve():  # beside them, or each would be its own mask
        return {image: found.masks[key] for image in images if (key := stem_key(image)) in found.masks}
    source = walk(mask_dir)
    files = [path for folder in source.folders for path in folder.images] + list(source.masks.values())
    by_place = {_place(path, source.root): path for path in files}
    return {image: by_place[key] for image in images if (key := _place(image, found.root)) in by_place}


def _place(path: Path, root: Path) -> str:
    return stem_key(path.relative_to(root)).removesuffix(MASK_ENDING)


def shape_problem(mask: ImageFacts, image: ImageFacts) -> str:
    """Why the mask cannot lie on the image, or "". Another size of the same shape is fine, within 2 %."""
    (mw, mh), (iw, ih) = mask.size, image.size
    if abs(mw * ih / (mh * iw) - 1) <= 0.02:
        return ""
    return t(pt=f"máscara de {mw}x{mh} para imagem de {iw}x{ih}", en=f"mask of {mw}x{mh} for an image of {iw}x{ih}")
