"""How a caption changes from draw to draw: pure functions of (seed, draw, image), so any step can be rebuilt.

A *draw* counts how often an image has been seen: epoch * repeats + occurrence. A *tag* is what stands between two
separators (`dados.separador`), not a tokenizer's token; a sentence with commas has tags too, so shuffle only tag
lists. Captions encoded on the fly get a new variant per draw. Cached ones come from `dados.variantes_legenda` variants
that do not depend on the seed (a new seed finds the cache full) and are taken in turn; dropping the whole caption
still happens per draw, as "" is one cached entry.
"""

import hashlib
import random

from ..config.schema import DataConfig
from .captions import has_word, joined


def stable_hash(*parts: object) -> int:
    """64 bits that depend on nothing but the parts: not on the process, the platform or the library versions."""
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8"), digest_size=8).digest(), "big")


def varies(config: DataConfig) -> bool:
    return config.shuffle_captions or config.tag_dropout > 0


def variant(caption: str, config: DataConfig, seed: int, draw: int, uid: str) -> str:
    """The caption as this draw sees it, tags shuffled and dropped."""
    fixed, free = _split(caption, config)
    if not varies(config):
        return joined(fixed + free, config.separator) if _marked(caption, config) else caption
    rng = random.Random(stable_hash("tags", seed, draw, uid))
    if config.tag_dropout:
        free = [tag for tag in free if rng.random() >= config.tag_dropout]
    if config.shuffle_captions:
        rng.shuffle(free)
    return joined(fixed + free, config.separator)


def plain(caption: str, config: DataConfig) -> str:
    """The caption for validation: nothing shuffled, nothing dropped."""
    return variant(caption, config.model_copy(update={"shuffle_captions": False, "tag_dropout": 0.0}), 0, 0, "")


def drawn(captions: tuple[str, ...], config: DataConfig, seed: int, draw: int, uid: str, *, cached: bool) -> str:
    """What one draw trains on: "" if the caption is dropped, else a variant of one of the image's captions."""
    if config.caption_dropout:
        chance = stable_hash("caption dropout", seed, draw, uid) / 2**64
        if chance < config.caption_dropout:
            return ""
    caption = captions[stable_hash("caption", seed, draw, uid) % len(captions)]
    if not cached:
        return variant(caption, config, seed, draw, uid)
    turn = (stable_hash("variant", seed, uid) + draw) % config.caption_variants
    return variant(caption, config, 0, turn, uid)


def all_variants(captions: tuple[str, ...], config: DataConfig, uid: str) -> list[str]:
    """Every text that `drawn(…, cached=True)` can return, whatever the seed: what the cache must hold."""
    count = config.caption_variants if varies(config) else 1
    texts = [variant(caption, config, 0, turn, uid) for caption in captions for turn in range(count)]
    return list(dict.fromkeys(texts + ([""] if config.caption_dropout else [])))


def _marked(caption: str, config: DataConfig) -> bool:
    return bool(config.keep_separator) and str(config.keep_separator) in caption


def _split(caption: str, config: DataConfig) -> tuple[list[str], list[str]]:
    """(tags that stay, tags that may move or drop). What precedes the mark stays; else the first `keep_tags`."""
    if _marked(caption, config):
        head, _, tail = caption.partition(str(config.keep_separator))
        fixed, free = _tags(head, config), _tags(tail.replace(str(config.keep_separator), config.separator), config)
        return fixed, free
    tags = _tags(caption, config)
    keep = config.keep_tags
    if config.trigger and tags and has_word(tags[0], config.trigger):
        keep = max(1, keep)  # the trigger is what the LoRA answers to; it neither moves nor drops
    return tags[:keep], tags[keep:]


def _tags(text: str, config: DataConfig) -> list[str]:
    mark = config.separator.strip() or config.separator
    return [tag.strip() for tag in text.split(mark) if tag.strip()]
