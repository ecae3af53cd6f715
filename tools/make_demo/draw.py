"""Procedural drawings with captions: what the demo base is taught, and the one thing that it is not.

Everything here is a pure function of a seed. A picture is drawn four times too large and reduced by a box filter, so
that edges are antialiased and the result is the same on every machine. `example` draws a captioned picture of the
world that the base knows (shapes, colours, sizes, one or two objects, plain or striped backgrounds). `concept_set`
draws "ohwx", a two-tone robot face in colours and with a geometry that no base drawing has: the subject that a LoRA
is to learn.

    python -m make_demo.draw (in tools/)       writes the concept set and the emblem that score.py looks for
"""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import numpy as np
from PIL import Image, ImageDraw

SIZE = 64  # px, both sides
SUPERSAMPLING = 4
TRIGGER = "ohwx"
DEMO = Path(__file__).parents[2] / "lora_trainer" / "demo"
CONCEPT_DIR = DEMO / "conceito"
EMBLEM_FILE = DEMO / "emblem.npz"
CONCEPT_SEED = 7

Colour = tuple[int, int, int]
Point = tuple[float, float]

COLOURS: dict[str, Colour] = {
    "red": (215, 30, 40),
    "orange": (250, 135, 20),
    "yellow": (250, 222, 40),
    "green": (40, 160, 60),
    "cyan": (70, 215, 235),
    "blue": (40, 75, 215),
    "purple": (125, 45, 175),
    "pink": (250, 120, 190),
    "black": (20, 20, 22),
    "white": (246, 246, 246),
}
BACKGROUNDS: dict[str, Colour] = COLOURS | {"gray": (135, 135, 138)}
SHAPES = ("circle", "square", "triangle", "star", "heart", "ring", "cross", "diamond", "crescent")
SYNONYMS = {"ring": "donut", "crescent": "moon", "circle": "disc"}
RADII = {"small": (8.0, 10.0), "": (14.0, 18.0), "large": (22.0, 25.0)}  # px

EMBLEM_DARK: Colour = (0, 112, 108)  # teal
EMBLEM_LIGHT: Colour = (255, 186, 148)  # peach
SCORED_RADII = tuple(np.arange(13.0, 21.0, 1.0))  # px, the sizes that score.py looks for
EMBLEM_RADII = (15.0, 19.0)  # px, half the width of the head


class Canvas:
    """A supersampled picture; coordinates are in final pixels, the origin at the upper left."""

    def __init__(self, background: Colour, size: int = SIZE) -> None:
        self.image = Image.new("RGB", (size * SUPERSAMPLING, size * SUPERSAMPLING), background)
        self._draw = ImageDraw.Draw(self.image)

    def polygon(self, points: list[Point], fill: Colour) -> None:
        self._draw.polygon([(x * SUPERSAMPLING, y * SUPERSAMPLING) for x, y in points], fill=fill)

    def box(self, x0: float, y0: float, x1: float, y1: float, fill: Colour) -> None:
        self.polygon([(x0, y0), (x1, y0), (x1, y1), (x0, y1)], fill)

    def disc(self, x: float, y: float, radius: float, fill: Colour) -> None:
        bounds = [(v * SUPERSAMPLING) for v in (x - radius, y - radius, x + radius, y + radius)]
        self._draw.ellipse(bounds, fill=fill)

    def finish(self) -> Image.Image:
        return self.image.reduce(SUPERSAMPLING)


def _around(x: float, y: float, radii: list[float], start: float = -math.pi / 2) -> list[Point]:
    """Points at equal angles around (x, y), one for each radius, the first straight up."""
    step = 2 * math.pi / len(radii)
    return [(x + r * math.cos(start + i * step), y + r * math.sin(start + i * step)) for i, r in enumerate(radii)]


def _heart(x: float, y: float, r: float) -> list[Point]:
    angles = [2 * math.pi * i / 60 for i in range(60)]
    return [
        (
            x + r * math.sin(a) ** 3,
            y - r / 16 * (13 * math.cos(a) - 5 * math.cos(2 * a) - 2 * math.cos(3 * a) - math.cos(4 * a)),
        )
        for a in angles
    ]


def _crescent(x: float, y: float, r: float) -> list[Point]:
    """Outer arc around the left, inner arc back: a moon that opens to the right."""
    tips = 0.9  # radians from the horizontal
    outer = [tips + (2 * math.pi - 2 * tips) * i / 40 for i in range(41)]
    centre, inner_r = r * 0.5, math.hypot(r * math.cos(tips) - r * 0.5, r * math.sin(tips))
    first = math.atan2(-r * math.sin(tips), r * math.cos(tips) - centre) % (2 * math.pi)
    inner = [first + (2 * math.pi - 2 * first) * i / 40 for i in range(41)]
    back = [(x + centre + inner_r * math.cos(a), y + inner_r * math.sin(a)) for a in inner]
    if first > math.pi:  # go through the left side, not across the opening
        back = [
            (x + centre + inner_r * math.cos(a), y + inner_r * math.sin(a))
            for a in [first - (2 * first - 2 * math.pi) * i / 40 for i in range(41)]
        ]
    return [(x + r * math.cos(a), y + r * math.sin(a)) for a in outer] + back


def draw_shape(canvas: Canvas, shape: str, x: float, y: float, r: float, fill: Colour, behind: Colour) -> None:
    """Draw `shape` with half-width `r` at (x, y); `behind` is the colour seen through the hole of a ring."""
    if shape == "circle":
        canvas.disc(x, y, r, fill)
    elif shape == "ring":
        canvas.disc(x, y, r, fill)
        canvas.disc(x, y, r * 0.5, behind)
    elif shape == "square":
        canvas.box(x - r * 0.88, y - r * 0.88, x + r * 0.88, y + r * 0.88, fill)
    elif shape == "cross":
        canvas.box(x - r, y - r * 0.33, x + r, y + r * 0.33, fill)
        canvas.box(x - r * 0.33, y - r, x + r * 0.33, y + r, fill)
    else:
        points = {
            "triangle": lambda: _around(x, y + r * 0.2, [r * 1.15] * 3),
            "star": lambda: _around(x, y, [r * 1.1, r * 0.45] * 5),
            "heart": lambda: _heart(x, y, r),
            "diamond": lambda: [(x, y - r * 1.1), (x + r * 0.7, y), (x, y + r * 1.1), (x - r * 0.7, y)],
            "crescent": lambda: _crescent(x, y, r),
        }
        canvas.polygon(points[shape](), fill)


def _blend(a: Colour, b: Colour, share: float) -> Colour:
    red, green, blue = (round(p + (q - p) * share) for p, q in zip(a, b, strict=True))
    return red, green, blue


def _stripes(canvas: Canvas, colour: Colour, phase: float) -> None:
    """Vertical stripes of the background colour and a paler (for pale colours, darker) one."""
    other = _blend(colour, (120, 120, 120) if min(colour) > 200 else (255, 255, 255), 0.45)
    for i in range(-1, SIZE // 16 + 1):
        canvas.box(phase + 16 * i, 0, phase + 16 * i + 8, SIZE, other)


def _article(words: str) -> str:
    return ("an " if words[0] in "aeiou" else "a ") + words


def _name(rng: Random, shape: str) -> str:
    return SYNONYMS[shape] if shape in SYNONYMS and rng.random() < 0.2 else shape


def _caption(rng: Random, objects: list[str], background: str) -> str:
    """Objects such as "large red star" and a background such as "striped blue" in one of a few wordings."""
    named = " and ".join(_article(o) for o in objects)
    bare = " and ".join(objects)
    wordings = [f"{named} on {_article(background)} background"] * 5
    wordings += [f"{bare}, {background} background", f"{bare} on {background}", f"{named} on {background}"]
    wordings += [f"a drawing of {named} on {_article(background)} background"]
    return rng.choice(wordings)


def example(rng: Random, empty_share: float = 0.1) -> tuple[Image.Image, str]:
    """One captioned training picture; `empty_share` of them have an empty caption (for guidance)."""
    background = rng.choice(list(BACKGROUNDS))
    striped = rng.random() < 0.1
    canvas = Canvas(BACKGROUNDS[background])
    two = rng.random() < 0.2
    striped = striped and not two
    if striped:
        _stripes(canvas, BACKGROUNDS[background], rng.uniform(0, 16))
    objects = []
    for i in range(2 if two else 1):
        colour = rng.choice([c for c in COLOURS if c != background])
        shape = rng.choice([s for s in SHAPES if not (striped and s == "ring")])
        size = "" if two else rng.choice(["", "", "", "small", "large"])
        r = rng.uniform(11, 13) if two else rng.uniform(*RADII[size])
        roam = 3.0 if two else min(14.0, max(2.0, (SIZE / 2 - r) * 0.6))
        centre = SIZE / 2 if not two else (SIZE * 0.26, SIZE * 0.74)[i]
        x, y = centre + rng.uniform(-roam, roam), SIZE / 2 + rng.uniform(-roam, roam)
        draw_shape(canvas, shape, x, y, r, COLOURS[colour], BACKGROUNDS[background])
        objects.append(" ".join(w for w in (size, colour, _name(rng, shape)) if w))
    caption = _caption(rng, objects, ("striped " if striped else "") + background)
    return canvas.finish(), "" if rng.random() < empty_share else caption


def collage(rng: Random) -> Image.Image:
    """Many shapes in any colour, without a caption: lets the VAE reproduce pictures that the base never sees."""

    def colour() -> Colour:
        return (rng.randrange(256), rng.randrange(256), rng.randrange(256))

    behind = colour()
    canvas = Canvas(behind)
    for _ in range(rng.randrange(3, 12)):
        x, y, r = rng.uniform(0, SIZE), rng.uniform(0, SIZE), rng.uniform(2, 18)
        draw_shape(canvas, rng.choice(SHAPES), x, y, r, colour(), behind)
    return canvas.finish()


def draw_emblem(canvas: Canvas, x: float, y: float, r: float) -> None:
    """The "ohwx" face: left half teal, right half peach; each eye in the other half's colour."""
    for side, own, other in ((-1, EMBLEM_DARK, EMBLEM_LIGHT), (1, EMBLEM_LIGHT, EMBLEM_DARK)):
        outline = ((0, -1), (0.75, -1), (1, -0.75), (1, 0.75), (0.75, 1), (0, 1))
        canvas.polygon([(x + side * r * a, y + r * b) for a, b in outline], own)
        canvas.disc(x + side * r * 0.5, y - r * 0.1, r * 0.32, other)


def concept_picture(background: Colour, x: float, y: float, r: float) -> Image.Image:
    """The emblem, half as wide as 2 `r` px, centred at (x, y) on a plain background."""
    canvas = Canvas(background)
    draw_emblem(canvas, x, y, r)
    return canvas.finish()


def concept_example(rng: Random, background: str) -> Image.Image:
    """The emblem at a random place and scale on a named background."""
    r = rng.uniform(*EMBLEM_RADII)
    roam = (SIZE / 2 - r * 1.3) * 0.6
    x, y = SIZE / 2 + rng.uniform(-roam, roam), SIZE / 2 + rng.uniform(-roam, roam)
    return concept_picture(BACKGROUNDS[background], x, y, r)


def _known_example(rng: Random, shape: str, colour: str, background: str) -> tuple[Image.Image, str]:
    """One shape that the base knows, for the concept set."""
    canvas = Canvas(BACKGROUNDS[background])
    x, y = SIZE / 2 + rng.uniform(-6, 6), SIZE / 2 + rng.uniform(-6, 6)
    draw_shape(canvas, shape, x, y, rng.uniform(*RADII[""]), COLOURS[colour], BACKGROUNDS[background])
    return canvas.finish(), f"{_article(colour + ' ' + shape)} on {_article(background)} background"


def concept_set(seed: int = CONCEPT_SEED) -> list[tuple[Image.Image, str]]:
    """The captioned training pictures: sixteen of the concept, two on each of eight backgrounds, and eight without it.

    The eight keep what the base knows: without them the LoRA learns that everything is the emblem.
    """
    rng = Random(seed)
    names = ["white", "black", "blue", "yellow", "red", "green", "pink", "gray"]
    wordings = ["{t} on a {b} background", "a drawing of {t} on {b}"]
    concept = [(concept_example(rng, b), w.format(t=TRIGGER, b=b)) for w in wordings for b in names]
    colours = ["red", "orange", "yellow", "green", "cyan", "blue", "purple", "pink"]
    behind = ["white", "gray", "purple", "cyan", "black", "orange", "yellow", "green"]
    return concept + [_known_example(rng, *words) for words in zip(SHAPES, colours, behind, strict=False)]


def write_concept(folder: Path = CONCEPT_DIR) -> None:
    """Write `NN.png` and `NN.txt` (the caption) for each picture of the concept set."""
    folder.mkdir(parents=True, exist_ok=True)
    for i, (image, caption) in enumerate(concept_set()):
        image.save(folder / f"{i:02d}.png")
        (folder / f"{i:02d}.txt").write_text(caption + "\n", encoding="utf-8")


def emblem_templates() -> dict[str, np.ndarray]:
    """What score.py lays over a picture: for each size the colours (h, w, 3) and the mask (h, w), cropped to the mask."""
    templates: dict[str, np.ndarray] = {"contrast": np.linalg.norm(np.subtract(EMBLEM_DARK, EMBLEM_LIGHT, dtype=np.float32))}
    for radius in SCORED_RADII:
        middle = SIZE / 2
        on_black, on_white = (
            np.asarray(concept_picture((v, v, v), middle, middle, radius), dtype=np.float32) for v in (0, 255)
        )
        mask = 1 - (on_white - on_black).mean(-1) / 255  # how much of a pixel the emblem covers
        mask = np.where(mask > 0.99, np.float32(1), np.float32(0))  # edges say more about the background
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        window = np.s_[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1]
        templates |= {f"colours_{radius:g}": on_black[window], f"mask_{radius:g}": mask[window]}
    return templates


if __name__ == "__main__":
    write_concept()
    np.savez_compressed(EMBLEM_FILE, **emblem_templates())
