"""FLUX.1 bases in every layout people have: recognised, loaded with the right weights, refused by name in the wrong slot."""

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.bases import of, weights, write_gguf, written
from helpers.flux_converter import converted
from safetensors.torch import load_file, save_file

from lora_trainer.bases.components import BUILDERS
from lora_trainer.bases.parts import t5_keys
from lora_trainer.config.schema import DataConfig, ModelConfig
from lora_trainer.errors import SourceError
from lora_trainer.families import resolve
from lora_trainer.families.flux.family import Flux

CPU = torch.device("cpu")


@pytest.fixture
def bases() -> Any:
    return Bases()


class Bases:
    def __getitem__(self, kind: str) -> Any:
        return written("flux", kind)


def opened(options: dict[str, str], **more: Any) -> Flux:
    family = resolve(ModelConfig(**{**options, **more}), DataConfig())
    assert isinstance(family, Flux)
    return family


def test_our_names_are_the_converters():
    transformer = of("flux").modules()["transformer"]
    theirs = converted("flux", of("flux").stored_transformer(transformer))
    own = transformer.state_dict()
    assert theirs.keys() == own.keys()
    assert all(torch.equal(theirs[key], own[key]) for key in own)


@pytest.mark.parametrize("kind", ["fp8", "fp8_scaled", "gguf"])
def test_what_is_stored_in_few_bits_stays_so(bases, kind):
    options, _ = bases[kind]
    family = opened(options)
    model = family.load_model(CPU, torch.bfloat16)
    layers = [m for m in model["transformer"].modules() if isinstance(m, torch.nn.Linear)]
    assert all(hasattr(layer, "packed") for layer in layers)
    stored = sum(t.nbytes for layer in layers for t in layer.packed())
    count = sum(layer.weight_shape.numel() for layer in layers)
    assert stored < 1.2 * count, "about a byte a weight"
    assert family.components["transformer"].num_bytes(torch.bfloat16) < 1.3 * count, "what a run on the CPU must have free"
    if kind == "fp8":
        name = "double_blocks.0.img_attn.qkv.weight"
        raw = load_file(options["base_model"])[name].bfloat16()
        block: Any = model["transformer"].transformer_blocks[0]
        ours = torch.cat([block.attn.to_q.unpacked(), block.attn.to_k.unpacked(), block.attn.to_v.unpacked()])
        assert torch.equal(ours, raw), "not one bit of the file's weights changed"


def test_a_quantiser_takes_a_stored_base_further_down(bases):
    from lora_trainer.techniques.quantize_4bit import Quantize4bit
    from lora_trainer.techniques.quantize_8bit import Quantize8bit

    family = opened(bases["fp8"][0])
    for technique, title in ((Quantize4bit(), "nf4"), (Quantize8bit(), "fp8")):
        model = family.load_model(
            CPU, torch.bfloat16, prepare=lambda m, t=technique: t.convert(m, family.blocks(m))
        )
        layer: Any = model["transformer"].transformer_blocks[0].ff.net[2]
        assert layer.packing.title == title, "int8 would not be smaller than fp8"
        assert torch.isfinite(layer.unpacked()).all()
    family = opened(bases["gguf"][0])
    model = family.load_model(CPU, torch.bfloat16, prepare=lambda m: Quantize4bit().convert(m, family.blocks(m)))
    kept: Any = model["transformer"].transformer_blocks[0].ff.net[2]
    assert kept.packing.title == "q8_0", "a GGUF stays packed as it is"


def test_a_4_bit_folder_is_read_bit_for_bit(tmp_path):
    """As `save_pretrained` writes a transformer under BitsAndBytesConfig(load_in_4bit=True)."""
    import bitsandbytes as bnb

    modules = of("flux").write_folder(tmp_path / "flux")
    file = tmp_path / "flux" / "transformer" / "diffusion_pytorch_model.safetensors"
    state, expected = {}, {}
    for key, value in modules["transformer"].state_dict().items():
        if value.ndim == 2 and "_blocks." in key:
            packed, quant = bnb.functional.quantize_4bit(value, quant_type="nf4", compress_statistics=True)
            expected[key] = bnb.functional.dequantize_4bit(packed, quant)
            state |= {key: packed, **{f"{key}.{name}": part for name, part in quant.as_dict(packed=True).items()}}
        else:
            state[key] = expected[key] = value
    save_file({key: value.contiguous().clone() for key, value in state.items()}, file)
    family = opened({"base_model": str(tmp_path / "flux")})
    ours = weights(family.load_model(CPU, torch.float32)["transformer"])
    assert all(torch.allclose(ours[key], value, atol=1e-6) for key, value in expected.items())
    kept: Any = family.load_model(CPU, torch.bfloat16)["transformer"]
    assert kept.transformer_blocks[0].attn.to_q.packing.title == "nf4"
    assert "nf4" in family.notices[0]


def test_missing_parts_are_asked_for_together(bases):
    options, _ = bases["fp32"]
    with pytest.raises(SourceError) as error:
        opened({name: options[name] for name in ("base_model", "tokenizer")})
    text = str(error.value)
    assert all(f"modelo.{name}" in text for name in ("codificador_texto", "codificador_texto_2", "vae"))
    assert "clip_l.safetensors" in text
    assert "ae.safetensors" in text


@pytest.mark.parametrize(
    ("slot", "given", "said"),
    [("text_encoder", "text_encoder_2", "T5"), ("text_encoder_2", "text_encoder", "CLIP"), ("vae", "text_encoder", "CLIP"),
     ("text_encoder_2", "vae", "VAE"), ("vae", "base_model", "FLUX.1")],
)  # fmt: skip
def test_a_file_in_the_wrong_slot_is_refused_by_name(bases, slot, given, said):
    options, _ = bases["fp32"]
    with pytest.raises(SourceError, match=said) as error:
        opened({**options, slot: options[given]})
    assert Path(options[given]).name in str(error.value)


def test_parts_of_another_model_are_refused_by_their_width(bases, tmp_path):
    options, modules = bases["fp32"]
    config = modules["text_encoder"].config.to_dict() | {"hidden_size": 64, "architectures": ["CLIPTextModel"]}
    save_file(BUILDERS["text_encoder"](config).state_dict(), tmp_path / "clip_g.safetensors")
    with pytest.raises(SourceError, match="largura 64"):
        opened({**options, "text_encoder": str(tmp_path / "clip_g.safetensors")})


def test_schnell_is_told(tmp_path):
    options, _ = of("flux", "schnell").write_files(tmp_path)
    family = opened(options)
    assert any("schnell" in notice for notice in family.notices)
    assert family.tokens == 256


def test_other_flux_models_are_not_taken_for_flux_1(tmp_path):
    marks = {"double_stream_modulation_img.lin.weight": "FLUX.2", "distilled_guidance_layer.in_proj.weight": "Chroma"}
    for marker, name in marks.items():
        path = tmp_path / f"{name}.safetensors"
        save_file({marker: torch.zeros(1), "double_blocks.0.img_attn.qkv.weight": torch.zeros(1)}, path)
        with pytest.raises(SourceError, match=name):
            opened({"base_model": str(path)})


def test_t5_may_be_a_gguf_too(bases, tmp_path):
    """As city96's t5-v1_1-xxl-encoder-gguf names it."""
    options, modules = bases["fp32"]
    state = modules["text_encoder_2"].state_dict()
    write_gguf(tmp_path / "t5.gguf", {t5_keys(name)[-1]: value for name, value in state.items()}, arch="t5encoder")
    family = opened({**options, "text_encoder_2": str(tmp_path / "t5.gguf")})
    ours = weights(family.load_text_encoders(CPU, torch.float32)["text_encoder_2"])
    assert all((ours[key] - value).abs().max() <= 0.01 * value.abs().max() for key, value in state.items())


def test_parts_of_t5_that_overflow_stay_float32(bases):
    encoders: Any = opened(bases["fp32"][0]).load_text_encoders(CPU, torch.float16)
    layers = encoders["text_encoder_2"].encoder.block[0].layer
    assert layers[1].DenseReluDense.wo.weight.dtype is torch.float32
    assert layers[1].DenseReluDense.wi_0.weight.dtype is torch.float16
    [example] = opened(bases["fp32"][0]).encode_text(encoders, ["a cat"])
    assert torch.isfinite(example["prompt_embeds"]).all()


def test_gguf_kinds_that_cannot_stay_packed_are_unpacked_and_said(bases, tmp_path):
    import numpy as np
    from gguf import GGMLQuantizationType, GGUFWriter
    from gguf.quants import dequantize

    kind, rng = GGMLQuantizationType.IQ4_NL, np.random.default_rng(0)
    writer, expected = GGUFWriter(tmp_path / "flux.gguf", "flux"), {}
    for key, value in of("flux").stored_transformer(bases["fp32"][1]["transformer"]).items():
        if value.ndim == 2:
            blocks = rng.integers(0, 256, (value.shape[0], value.shape[1] // 32, 18), dtype=np.uint8)
            blocks[..., :2] = np.frombuffer(np.float16(0.01).tobytes(), np.uint8)
            raw = blocks.reshape(value.shape[0], -1)
            writer.add_tensor(key, raw, raw_dtype=kind)
            expected[key] = torch.from_numpy(dequantize(raw, kind))
        else:
            writer.add_tensor(key, value.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    family = opened({**bases["fp32"][0], "base_model": str(tmp_path / "flux.gguf")})
    assert "IQ4_NL" in family.notices[0]
    model: Any = family.load_model(CPU, torch.float32)["transformer"]
    assert torch.equal(model.x_embedder.weight, expected["img_in.weight"])
    assert torch.equal(model.single_transformer_blocks[1].attn.to_k.weight, expected["single_blocks.1.linear1.weight"][64:128])
