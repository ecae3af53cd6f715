"""Times the first and the second scan of 10,000 small JPEGs, with captions, and the order of one epoch.

    python tests/bench/bench_scan.py [number of images]

The promise: scan + bucket plan in at most 60 s on two cores, memory flat (peak growth printed), nothing quadratic (the
last column, time per image, stays about the same for a tenth of the images).
"""

import random
import resource
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from PIL import Image

from lora_trainer.config.schema import DataConfig
from lora_trainer.data.batches import BatchPlan
from lora_trainer.data.dataset import build


def make(folder: Path, count: int) -> None:
    """Smooth random pictures of 256-512 px, which compress as photographs do."""
    rng, sides = np.random.default_rng(0), random.Random(0)
    folder.mkdir()
    sources = [Image.fromarray(rng.integers(0, 255, (24, 24, 3), dtype=np.uint8)) for _ in range(16)]
    for i in range(count):
        size = sides.randrange(256, 513), sides.randrange(256, 513)
        sources[i % 16].resize(size, Image.Resampling.BICUBIC).save(folder / f"{i:06}.jpg", comment=str(i))
        (folder / f"{i:06}.txt").write_text(f"foto {i}", encoding="utf-8")


def peak_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def measure(folder: Path, cache: Path, count: int) -> None:
    for name in ("first", "second"):
        start, before = time.perf_counter(), peak_mib()
        dataset = build(DataConfig(data_dir=str(folder)), cache)
        scanned = time.perf_counter()
        plan = BatchPlan(dataset, 4, 2, seed=0)
        plan.window(0)
        end = time.perf_counter()
        assert len(dataset.examples) == count
        print(
            f"{count:>6} images, {name:<6} scan {scanned - start:6.2f} s, order {end - scanned:5.2f} s, "
            f"peak +{peak_mib() - before:5.1f} MiB, {1000 * (end - start) / count:.2f} ms per image"
        )


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 10_000
    with tempfile.TemporaryDirectory() as root:
        for images in (count // 10, count):
            folder = Path(root) / str(images)
            make(folder, images)
            measure(folder, Path(root) / f"cache{images}", images)


if __name__ == "__main__":
    main()
