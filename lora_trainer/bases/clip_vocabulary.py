"""CLIP's vocabulary as a function of its merges: 256 byte symbols, the same as word ends, the merges, two marks."""

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
END = "</w>"

Merge = tuple[str, str]


def byte_symbols() -> dict[int, str]:
    """GPT-2's printable stand-in for each byte, in the order in which CLIP lists them."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    rest = [b for b in range(256) if b not in printable]
    return {b: chr(b) for b in printable} | {b: chr(256 + i) for i, b in enumerate(rest)}


def vocabulary(merges: list[Merge]) -> dict[str, int]:
    """Token to id. The end-of-text token has the highest id, as in CLIP."""
    symbols = list(byte_symbols().values())
    tokens = [*symbols, *(s + END for s in symbols), *("".join(m) for m in merges), BOS, EOS]
    return {token: i for i, token in enumerate(tokens)}
