"""One real optimizer step of a FLUX.1-sized stack (full width, 2 double and 4 single blocks, 1.3 billion weights) on this CPU:
the predicted peak beside the tracked one, with the base in nf4, streamed, and from a Q4_0 GGUF.

python tests/bench/bench_flux_stack.py [nf4|gguf]      some minutes and 6 GB of RAM each
"""

import json
import sys
import tempfile
import time
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]

import numpy as np  # noqa: E402
from gguf import GGMLQuantizationType, GGUFWriter  # noqa: E402
from helpers.measured_run import PHASES, Case, measure, predict, training_peak  # noqa: E402
from helpers.originals import original_state  # noqa: E402

from lora_trainer.bases.architecture import shipped  # noqa: E402
from lora_trainer.config.schema import Config  # noqa: E402
from lora_trainer.families import resolve  # noqa: E402
from lora_trainer.families.flux import names  # noqa: E402
from lora_trainer.families.flux.family import FluxTransformer2DModel  # noqa: E402
from lora_trainer.seam.family import Family  # noqa: E402

LAYERS = {"num_layers": 2, "num_single_layers": 4}
LEAN = {
    "training": {"gradient_checkpointing": "yes"},
    "memory": {"block_streaming": 1.0, "activation_offload": "yes"},
    "data": {"max_caption_tokens": 128},
}


class Alone(Case):
    """A transformer's file without text encoders and VAE: opened as for planning, and its weights read all the same."""

    def open(self, base: Path | None) -> tuple[Family, Config]:
        config = self.config(base)
        family = resolve(config.model, config.data, planning=True)
        family.configure(config.training, config.data)
        return family, config


def architecture(folder: Path) -> Path:
    config = shipped("flux", "transformer") | LAYERS
    (folder / "transformer").mkdir(parents=True)
    (folder / "transformer" / "config.json").write_text(json.dumps(config))
    return folder


def write_q4_0(path: Path) -> None:
    """Random Q4_0 blocks under Black Forest Labs' names: a factor of 0.01 before codes that are bytes of a generator."""
    import torch

    with torch.device("meta"):
        model = FluxTransformer2DModel.from_config(shipped("flux", "transformer") | LAYERS)
    shapes = {key: list(value.shape) for key, value in original_state(model, names.FLUX).items()}
    writer, rng = GGUFWriter(path, "flux"), np.random.default_rng(0)
    for key, shape in shapes.items():
        if len(shape) == 2:
            blocks = rng.integers(0, 256, (shape[0], shape[1] // 32, 18), dtype=np.uint8)
            blocks[..., :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
            writer.add_tensor(key, blocks.reshape(shape[0], -1), raw_dtype=GGMLQuantizationType.Q4_0)
        else:
            writer.add_tensor(key, np.full(shape, float(key.endswith("scale")), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def report(title: str, case: Case, base: Path | None) -> None:
    start = time.time()
    predicted = predict(case, base).phases
    middle = time.time()
    real = measure(case, base, steps=1).phases
    print(f"{title}: predicted in {middle - start:.0f} s, real in {time.time() - middle:.0f} s")
    for phase in PHASES:
        one, other = predicted[phase].total, real[phase].total
        print(f"  {phase:10} predicted {one / 2**20:9.2f} MiB, real {other / 2**20:9.2f} MiB ({100 * (one / other - 1):+.3f} %)")
    one, other = training_peak(predicted), training_peak(real)
    print(f"  peak {one / 2**30:.3f} / {other / 2**30:.3f} GiB ({100 * (one / other - 1):+.3f} %)", flush=True)


def main(kinds: list[str]) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        stack = str(architecture(folder / "stack"))
        if "nf4" in kinds:
            options = {**LEAN, "memory": {**LEAN["memory"], "base_quantization": "nf4"}, "model": {"architecture": stack}}
            report("nf4, streamed", Case("flux", (128, 128), options=options), None)
        if "gguf" in kinds:
            write_q4_0(folder / "flux.gguf")
            report("Q4_0, streamed", Alone("flux", (128, 128), options=LEAN), folder / "flux.gguf")


if __name__ == "__main__":
    main(sys.argv[1:] or ["nf4", "gguf"])
