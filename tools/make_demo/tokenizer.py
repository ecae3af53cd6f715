"""A small CLIP-format tokenizer: byte-level BPE, learnt from the demo captions until each word is one token.

CLIP's vocabulary is 256 byte symbols, the same 256 as word ends ("</w>"), the merges in order, and two special tokens.
Any text therefore tokenizes, accents included, at one token per byte in the worst case.
"""

from __future__ import annotations

import json
from collections import Counter
from itertools import pairwise
from pathlib import Path

from lora_trainer.bases.clip_vocabulary import BOS, END, EOS, Merge, byte_symbols, vocabulary

MAX_LENGTH = 77


def _merged(word: tuple[str, ...], pair: Merge) -> tuple[str, ...]:
    out: list[str] = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return tuple(out)


def learn_merges(texts: list[str]) -> list[Merge]:
    """Byte-pair merges, most frequent pair first, until every word of `texts` is a single symbol."""
    symbols = byte_symbols()
    words: Counter[tuple[str, ...]] = Counter()
    for word in (w for text in texts for w in text.lower().replace(",", " , ").split()):
        letters = [symbols[b] for b in word.encode()]
        letters[-1] += END
        words[tuple(letters)] += 1
    merges: list[Merge] = []
    while True:
        pairs: Counter[Merge] = Counter()
        for symbols_of_word, count in words.items():
            for pair in pairwise(symbols_of_word):
                pairs[pair] += count
        if not pairs:
            return merges
        best = min(pairs, key=lambda p: (-pairs[p], p))
        merges.append(best)
        words = Counter({_merged(parts, best): count for parts, count in words.items()})


def write_tokenizer(texts: list[str], folder: Path) -> None:
    """Write the files that `CLIPTokenizer.from_pretrained(folder)` reads."""
    folder.mkdir(parents=True, exist_ok=True)
    merges = learn_merges(texts)
    (folder / "vocab.json").write_text(json.dumps(vocabulary(merges), ensure_ascii=False), encoding="utf-8")
    lines = ["#version: 0.2", *(" ".join(m) for m in merges)]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")
    config = {
        "tokenizer_class": "CLIPTokenizer",
        "bos_token": BOS,
        "eos_token": EOS,
        "unk_token": EOS,
        "pad_token": EOS,
        "model_max_length": MAX_LENGTH,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2), encoding="utf-8")
