"""One image file: is it whole, how large is it upright, and its pixels as sRGB at the size a bucket wants.

`inspect` decodes the file to the end (JPEGs at 1/8 scale, which reads every byte but holds little), so nothing breaks
in the middle of a run. Pillow's size limits are switched off here, process-wide: `dados.pixels_maximos` is the limit,
checked before decoding. Not done: 16-bit training data (everything becomes 8-bit sRGB), CMYK without a profile beyond
Pillow's own.
"""

import contextlib
import functools
import hashlib
import io
import math
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image, ImageCms, ImageColor, PngImagePlugin, UnidentifiedImageError

from ..config.names import shown
from ..errors import ConfigError, t
from .buckets import Fit

Image.MAX_IMAGE_PIXELS = None
PngImagePlugin.MAX_TEXT_CHUNK = 64 * 2**20
PngImagePlugin.MAX_TEXT_MEMORY = 256 * 2**20
warnings.filterwarnings("ignore", module=r"PIL\.")

_UPRIGHT = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_COLOURS_PT = {"branco": "white", "preto": "black", "cinza": "gray"}
_LARGE_PIXELS = 16_000_000
_one_large = threading.Lock()
"""Held while a large picture is decoded, so that the workers never hold one full-size copy each."""


class BadImage(Exception):
    """The file cannot be used; the message says why, in the user's language."""


@dataclass(frozen=True)
class ImageFacts:
    content: str
    """SHA-256 of the file."""
    size: tuple[int, int]
    """(width, height) after the EXIF orientation."""
    notes: frozenset[str] = frozenset()
    """Any of: animated, alpha, broken_profile, broken_exif."""


def background_colour(name: str) -> tuple[int, int, int]:
    try:
        return ImageColor.getrgb(_COLOURS_PT.get(name.strip().lower(), name.strip()))[:3]
    except ValueError:
        raise ConfigError(
            t(pt=f"cor desconhecida: {name!r}", en=f"unknown colour: {name!r}"),
            hint=t(pt="use um nome (white, black, gray) ou #rrggbb", en="use a name (white, black, gray) or #rrggbb"),
            where=shown("data", "background"),
        ) from None


def inspect(path: Path, max_pixels: int) -> ImageFacts:
    """Decode the whole file once; raises BadImage."""
    with _opened(path) as (data, image):
        width, height = image.size
        if width * height > max_pixels:
            raise BadImage(too_large(width * height, max_pixels))
        jpeg = image.format in ("JPEG", "MPO")
        if jpeg:
            image.draft(image.mode, (1, 1))
        with _one_large if width * height > _LARGE_PIXELS and not jpeg else contextlib.nullcontext():
            _decode(image)
            orientation, broken_exif = _orientation(image)
            notes = {
                "animated": getattr(image, "is_animated", False) and image.format != "MPO",
                "alpha": image.has_transparency_data,
                "broken_exif": broken_exif,
                "broken_profile": bool(_profile(image)) and _to_srgb(_profile(image), _colour_mode(image)) is None,
            }
            image.close()  # before the next worker may hold a large one
    size = (height, width) if orientation >= 5 else (width, height)
    return ImageFacts(hashlib.sha256(data).hexdigest(), size, frozenset(k for k, holds in notes.items() if holds))


def too_large(pixels: int, max_pixels: int) -> str:
    return t(
        pt=f"{pixels:,} pixels; o limite é {max_pixels:,} (dados.pixels_maximos)".replace(",", "."),
        en=f"{pixels:,} pixels; the limit is {max_pixels:,} (data.max_pixels)",
    )


def load(
    path: Path, fit: Fit, box: tuple[float, float, float, float], background: tuple[int, int, int]
) -> tuple[Image.Image, Image.Image | None]:
    """The part of the upright picture inside `box` (fractions of its sides) at the bucket's size.

    Returns (RGB over the background, alpha as L or None).
    """
    with _opened(path) as (_, image):
        if image.format in ("JPEG", "MPO"):  # decode at twice the wanted size, if that is below the full one
            sides = (fit.resized[1], fit.resized[0]) if _orientation(image)[0] >= 5 else fit.resized
            image.draft(image.mode, (2 * sides[0], 2 * sides[1]))
        _decode(image)
        orientation, _ = _orientation(image)
        rgb, alpha = _flatten(_shrunk(image, fit.resized), background)
        if orientation in _UPRIGHT:
            rgb = rgb.transpose(_UPRIGHT[orientation])
            alpha = alpha.transpose(_UPRIGHT[orientation]) if alpha is not None else None
        return resized(rgb, fit.target, box), resized(alpha, fit.target, box) if alpha is not None else None


def resized(image: Image.Image, size: tuple[int, int], box: tuple[float, float, float, float]) -> Image.Image:
    width, height = image.size
    pixels = (box[0] * width, box[1] * height, box[2] * width, box[3] * height)
    return image.resize(size, Image.Resampling.LANCZOS, box=pixels, reducing_gap=3.0)


def load_grey(path: Path, size: tuple[int, int], box: tuple[float, float, float, float]) -> Image.Image:
    """A mask file, upright, as L."""
    with _opened(path) as (_, image):
        _decode(image)
        orientation, _ = _orientation(image)
        grey = _flatten(image, (0, 0, 0))[0].convert("L")
        if orientation in _UPRIGHT:
            grey = grey.transpose(_UPRIGHT[orientation])
        return resized(grey, size, box)


@contextlib.contextmanager
def _opened(path: Path) -> Iterator[tuple[bytes, Image.Image]]:
    """The file's bytes and its picture, not yet decoded; its pixels are freed at the end, whoever refers to it."""
    data = _read(path)
    image = _open(data)
    try:
        yield data, image
    finally:
        image.close()


def _read(path: Path) -> bytes:
    try:
        data = path.read_bytes()
    except PermissionError:
        raise BadImage(t(pt="sem permissão de leitura", en="no permission to read")) from None
    except OSError as error:
        raise BadImage(t(pt=f"não pôde ser lida ({error.strerror})", en=f"cannot be read ({error.strerror})")) from None
    start = data[:64].lstrip().lower()
    if data.count(0) == len(data):
        raise BadImage(t(pt="arquivo vazio ou só com zeros", en="empty file, or only zeros"))
    if start.startswith((b"<!doctype", b"<html")):
        raise BadImage(t(pt="é uma página web, não uma imagem", en="a web page, not an image"))
    if start.startswith(b"version https://git-lfs"):
        raise BadImage(
            t(pt="é um ponteiro git-lfs: falta baixar o arquivo", en="a git-lfs pointer: the file is missing")
        )
    return data


def _open(data: bytes) -> Image.Image:
    _register_heif()
    try:
        return Image.open(io.BytesIO(data))
    except UnidentifiedImageError:
        raise BadImage(t(pt="não é uma imagem conhecida", en="not a known image")) from None
    except Exception as error:  # a damaged header makes Pillow's readers raise almost anything
        raise BadImage(_damaged(error)) from error


def _decode(image: Image.Image) -> None:
    try:
        image.load()
    except MemoryError:
        raise BadImage(t(pt="não cabe na memória", en="does not fit in memory")) from None
    except Exception as error:  # as above
        raise BadImage(_damaged(error)) from error


def _damaged(error: Exception) -> str:
    return t(pt=f"incompleta ou danificada ({error})", en=f"incomplete or damaged ({error})")


@functools.cache
def _register_heif() -> None:
    try:
        import pillow_heif
    except ImportError:
        return
    pillow_heif.register_heif_opener()


def _orientation(image: Image.Image) -> tuple[int, bool]:
    """(EXIF orientation 1-8, whether the EXIF block is broken). After decoding: a PNG may carry its EXIF at the end."""
    try:
        value = image.getexif().get(0x0112, 1)
    except Exception:  # broken EXIF raises almost anything; the picture is still good
        return 1, True
    return (value, False) if value in range(1, 9) else (1, False)


def _shrunk(image: Image.Image, wanted: tuple[int, int]) -> Image.Image:
    """A much too large picture by a whole factor, to at least twice `wanted`: the copies to come are then small."""
    factor = int(math.sqrt(image.width * image.height / (wanted[0] * wanted[1]))) // 2
    return image.reduce(factor) if factor > 1 and image.mode in ("L", "RGB", "RGBA", "CMYK") else image


def _profile(image: Image.Image) -> bytes:
    return image.info.get("icc_profile") or b""


def _colour_mode(image: Image.Image) -> str:
    """The mode a colour profile speaks about, once palette and alpha are out of the way."""
    return image.mode if image.mode in ("L", "CMYK") else "RGB"


@functools.lru_cache(maxsize=16)
def _to_srgb(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """None if the profile is broken or speaks of another colour space."""
    try:
        source = ImageCms.ImageCmsProfile(io.BytesIO(profile))
        return ImageCms.buildTransform(source, ImageCms.createProfile("sRGB"), mode, "RGB")
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None


def _flatten(image: Image.Image, background: tuple[int, int, int]) -> tuple[Image.Image, Image.Image | None]:
    """Any mode -> (RGB in sRGB over the background, alpha or None)."""
    alpha = None
    profile, mode = _profile(image), _colour_mode(image)
    if image.mode.startswith("I") or image.mode == "F":
        image = _to_8_bit(image)
        mode = "L"
    elif image.has_transparency_data:
        image = image.convert("RGBA")
        alpha = image.getchannel("A")
    transform = _to_srgb(profile, mode) if profile else None
    wanted = mode if transform else "RGB"
    rgb = image if image.mode == wanted else image.convert(wanted)
    if transform:
        rgb = ImageCms.applyTransform(rgb, transform) or rgb
    if alpha is not None:
        rgb = Image.composite(rgb, Image.new("RGB", rgb.size, background), alpha)
    return rgb, alpha


def _to_8_bit(image: Image.Image) -> Image.Image:
    """16-bit, 32-bit and float greys are scaled, where Pillow's convert would clip them to white."""
    values = np.asarray(image).astype(np.float32)
    top = float(values.max(initial=0))
    if image.mode.startswith("I;16"):
        white = 65535.0
    else:
        white = next((w for w in (1.0, 255.0, 65535.0) if top <= w and (w > 1 or image.mode == "F")), top)
    return Image.fromarray(np.clip(values / white * 255 + 0.5, 0, 255).astype(np.uint8))
