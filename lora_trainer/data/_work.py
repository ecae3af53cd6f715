"""Networks of the caching phase: loaded as the rung in force says, and anew one rung down when memory runs out."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import torch
from torch import nn

from ..engine.attention import slice_where_unfused
from ..engine.tracker import hold, host_memory
from ..machine.hardware import PartRow, describe_parts
from ..planner.caching import Encoding, OnOom, exhausted, next_rung, rung_name
from ..planner.encoders import load_encoders
from ..runtime.recover import free_memory, is_out_of_memory
from ..seam.family import Example, ImageFamily

Network = TypeVar("Network", bound=nn.Module)
Entry = TypeVar("Entry")


class Encoder(Protocol):
    """What the networks are loaded for (encode.py), and where the rung in force is kept."""

    family: ImageFamily
    encoding: Encoding
    text_dtype: torch.dtype
    image_dtype: torch.dtype
    parts: list[PartRow]


@dataclass
class Work(Generic[Network, Entry]):
    """A network, loaded when it is first needed, and again one rung down whenever memory runs out."""

    phase: str
    device: torch.device
    load: Callable[[], Network]
    encode: Callable[[Network, Entry], Example]
    encoder: Encoder
    on_oom: OnOom
    network: Network | None = None

    def do(self, entry: Entry) -> Example:
        """Encode one entry, on whatever rung it takes."""
        while True:
            try:
                if self.network is None:
                    self.network = self.load()
                return self.encode(self.network, entry)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                problem = str(error)  # the error itself holds on to what must be freed
            self._descend(problem)

    def _descend(self, problem: str) -> None:
        self.network = None
        free_memory(self.device)
        lower = next_rung(self.encoder.encoding, self.phase)
        if lower is None:
            raise exhausted(self.encoder.encoding, self.phase, problem)
        self.encoder.encoding = lower
        self.on_oom(self.phase, rung_name(lower, self.phase))


def load_text_encoders(encoder: Encoder, device: torch.device) -> nn.ModuleDict:
    encoding = encoder.encoding
    with place(encoding.text_on_cpu):
        encoders = load_encoders(
            encoder.family,
            torch.device("cpu") if encoding.text_on_cpu else device,
            encoder.text_dtype,
            quantization=encoding.text_quantization,
            streaming=encoding.text_streaming,
        )
    if not encoding.text_on_cpu:
        hold(encoders)
    _note(encoder, describe_parts(encoders))
    return encoders


def load_vae(encoder: Encoder, device: torch.device) -> nn.Module:
    on_cpu = encoder.encoding.images_on_cpu
    vae = open_vae(encoder, torch.device("cpu") if on_cpu else device, on_cpu=on_cpu)
    _note(encoder, describe_parts({"vae": vae}))
    return vae


def open_vae(encoder: Encoder, device: torch.device, *, on_cpu: bool = False) -> nn.Module:
    """`on_cpu`: moved there, to save the device's memory."""
    with place(on_cpu):
        vae = encoder.family.load_vae(device, encoder.image_dtype)
    if not on_cpu:
        hold(vae)
    slice_where_unfused(vae, device, encoder.family.vae_dtype(encoder.image_dtype))
    return vae


def _note(encoder: Encoder, rows: list[PartRow]) -> None:
    """As they were loaded last."""
    names = {row.component for row in rows}
    encoder.parts[:] = [*(row for row in encoder.parts if row.component not in names), *rows]


def place(on_cpu: bool) -> AbstractContextManager[None]:
    """What is moved to the CPU does not count as memory of the device, also where the device is the CPU."""
    return host_memory() if on_cpu else nullcontext()
