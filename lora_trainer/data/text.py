"""Bytes of a caption file -> text, without ever losing a letter.

UTF-8 (with or without BOM), UTF-16 by its BOM or its zeros, else the Windows code page of Western Europe and Brazil.
"""

import codecs
import os
from dataclasses import dataclass


@dataclass(frozen=True)
class Decoded:
    text: str
    encoding: str
    """"utf-8", "utf-16" or, when it had to be guessed, "cp1252"."""


def decode(data: bytes) -> Decoded:
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        return Decoded(_lines(data.decode("utf-16", errors="replace")), "utf-16")
    if len(data) >= 2 and data.count(0) > len(data) // 4:
        return Decoded(_lines(data.decode("utf-16-le" if data[1] == 0 else "utf-16-be", errors="replace")), "utf-16")
    try:
        return Decoded(_lines(data.decode("utf-8-sig")), "utf-8")
    except UnicodeDecodeError:
        pass
    try:
        return Decoded(_lines(data.decode("cp1252")), "cp1252")
    except UnicodeDecodeError:  # cp1252 leaves five bytes undefined; latin-1 none
        return Decoded(_lines(data.decode("latin-1")), "cp1252")


def decode_name(name: str) -> str:
    """A file name's words: like `decode`, for what an old program wrote in another encoding than UTF-8."""
    return name if name.isascii() else decode(os.fsencode(name)).text


def _lines(text: str) -> str:
    return text.replace("\r\n", "\n").replace("\r", "\n")
