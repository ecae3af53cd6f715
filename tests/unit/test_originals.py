"""Places read off diffusers' converters: a few of each original's, as its released file has them, whatever the width."""

from fractions import Fraction
from functools import partial
from typing import Any

import pytest
import torch

from lora_trainer.bases import originals
from lora_trainer.bases.originals import Original, _Rows, locate
from lora_trainer.bases.weights import WHOLE, Piece, Spelled
from lora_trainer.families.flux.names import CHROMA, FLUX
from lora_trainer.families.flux2.names import FLUX2
from lora_trainer.families.qwen_image_21.names import QWEN_21
from lora_trainer.families.sd3.names import SD3
from lora_trainer.families.z_image.names import Z_IMAGE
from lora_trainer.files.headers import TensorInfo
from lora_trainer.files.kinds import Part


def part(first: int, number: int, of: int) -> tuple[Fraction, Fraction]:
    return Fraction(first, of), Fraction(number, of)


RELEASED: list[tuple[Original, str, str, Any, bool]] = [
    (FLUX, "single_transformer_blocks.2.proj_mlp.bias", "single_blocks.2.linear1.bias", part(3, 4, 7), False),
    (FLUX, "transformer_blocks.1.attn.add_k_proj.weight", "double_blocks.1.txt_attn.qkv.weight", part(1, 1, 3), False),
    (FLUX, "transformer_blocks.0.attn.norm_q.weight", "double_blocks.0.img_attn.norm.query_norm.scale", WHOLE, False),
    (FLUX, "time_text_embed.guidance_embedder.linear_2.bias", "guidance_in.out_layer.bias", WHOLE, False),
    (FLUX, "norm_out.linear.weight", "final_layer.adaLN_modulation.1.weight", WHOLE, True),
    (CHROMA, "distilled_guidance_layer.norms.2.weight", "distilled_guidance_layer.norms.2.scale", WHOLE, False),
    (CHROMA, "distilled_guidance_layer.layers.0.linear_1.bias", "distilled_guidance_layer.layers.0.in_layer.bias", WHOLE, False),
    (FLUX2, "single_transformer_blocks.1.attn.to_qkv_mlp_proj.weight", "single_blocks.1.linear1.weight", WHOLE, False),
    (FLUX2, "transformer_blocks.2.attn.to_v.weight", "double_blocks.2.img_attn.qkv.weight", part(2, 1, 3), False),
    (FLUX2, "single_stream_modulation.linear.weight", "single_stream_modulation.lin.weight", WHOLE, False),
    (SD3, "transformer_blocks.1.norm1_context.linear.bias", "joint_blocks.1.context_block.adaLN_modulation.1.bias", WHOLE, False),
    (SD3, "transformer_blocks.2.norm1_context.linear.bias", "joint_blocks.2.context_block.adaLN_modulation.1.bias", WHOLE, True),
    (SD3, "transformer_blocks.0.attn2.to_q.weight", "joint_blocks.0.x_block.attn2.qkv.weight", part(0, 1, 3), False),
    (SD3, "pos_embed.pos_embed", "pos_embed", WHOLE, False),
    (Z_IMAGE, "context_refiner.1.attention.to_out.0.weight", "context_refiner.1.attention.out.weight", WHOLE, False),
    (Z_IMAGE, "all_final_layer.2-1.adaLN_modulation.1.bias", "final_layer.adaLN_modulation.1.bias", WHOLE, False),
    (QWEN_21, "transformer_blocks.1.img_mlp.proj.weight", "transformer_blocks.1.img_mlp.gate_up.weight", part(1, 1, 2), False),
]  # fmt: skip


@pytest.mark.parametrize(("original", "name", "key", "share", "swapped"), RELEASED)
def test_where_parameters_lie(original, name, key, share, swapped):
    assert original.places(3).pieces[name] == Piece(key, share=share, swapped=swapped)


def test_slots_know_the_rows_of_each_part():
    slot = FLUX.places(3).slot("single_transformer_blocks.0.attn.to_v", 64)
    assert slot is not None
    assert (slot.name, slot.index, slot.rows) == ("lora_unet_single_blocks_0_linear1", 2, (64, 64, 64, 256))
    assert FLUX.places(3).slot("no_such_layer", 64) is None


def test_comfyuis_spelling_of_norms_and_names_that_are_the_same():
    header = {"x.double_blocks.0.img_attn.norm.query_norm.weight": TensorInfo("F32", (8,), 32, 0)}
    file = Spelled(header, partial(locate, Part(header, "x."), FLUX2.places(1)))
    assert file.shape("transformer_blocks.0.attn.norm_q.weight") == (8,)
    assert file.locate("of_no_converter.weight") == [Piece("x.of_no_converter.weight")]


def test_the_converter_runs_once(monkeypatch):
    FLUX2.places(2)
    monkeypatch.setattr(originals, "_Rows", None)
    assert FLUX2.places(2).pieces


def test_what_a_converter_does_beyond_rows_is_refused():
    with pytest.raises(AssertionError, match="a converter calls roll"):
        torch.roll(_Rows("a"), 1)  # type: ignore[call-overload]
