"""Bytes for people."""

GIB = 2**30


def gib(count: float) -> str:
    """`count` bytes as "1.50 GiB"."""
    return f"{count / GIB:.2f} GiB"
