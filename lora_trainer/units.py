"""Bytes for people."""

GIB = 2**30


def in_gib(count: int) -> float:
    """For files and JSON."""
    return round(count / GIB, 4)


def gib(count: float) -> str:
    """`count` bytes as "1.50 GiB"."""
    return f"{count / GIB:.2f} GiB"
