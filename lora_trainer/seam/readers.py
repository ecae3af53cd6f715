"""Which programs read a family's files, as data: it decides the usual layout, whose loader proves a file, what users are told.

Read against the programs' sources; `diffusers` stands where the loader of the family's pipeline makes of the file what was
trained.
"""

from collections.abc import Mapping

Readers = Mapping[str, tuple[str, ...]]
"""Layout of a file -> the programs that read it; the usual layout first."""

DIFFUSERS = "diffusers"
UNETS: Readers = {"kohya": (DIFFUSERS, "ComfyUI", "A1111", "Forge"), "diffusers": (DIFFUSERS,)}
TRANSFORMERS: Readers = {"diffusers": (DIFFUSERS, "ComfyUI", "Forge"), "kohya": (DIFFUSERS, "ComfyUI", "Forge")}
KOHYA_WITHOUT_DIFFUSERS: Readers = {**TRANSFORMERS, "kohya": ("ComfyUI", "Forge")}
"""Of transformers whose kohya files diffusers does not take apart."""
LANGUAGE_MODELS: Readers = {
    "peft": ("peft", "transformers", "vLLM"),
    "gguf": ("llama.cpp", "Ollama"),
    "merged": ("transformers", "vLLM"),
}
