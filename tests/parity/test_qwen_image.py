"""Qwen-Image against diffusers' own QwenImagePipeline on tiny real classes: captions, latents, the model's answer, pictures."""

from typing import Any

import pytest
import torch
from diffusers import QwenImagePipeline
from diffusers.models.transformers.transformer_qwenimage import QwenEmbedRope
from helpers.bases import close, written

from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.diffusion.packing import pack, unpack
from lora_trainer.diffusion.prompts import MASK
from lora_trainer.engine.vae_tiling import tiled
from lora_trainer.families import resolve
from lora_trainer.families.qwen_image.family import QwenImage
from lora_trainer.families.qwen_image.names import Positions
from lora_trainer.seam.family import Framing, Sampling

CAPTION = "a photo of a cat on red"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair() -> tuple[Any, QwenImage]:
    options, _ = written("qwen_image", "folder")
    pipeline = QwenImagePipeline.from_pretrained(options["base_model"], torch_dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    family = resolve(ModelConfig(**options), DataConfig())
    assert isinstance(family, QwenImage)
    family.configure(TrainingConfig(), DataConfig())
    return pipeline, family


@torch.no_grad()
def test_captions(pair):
    """The template's beginning is dropped, its end is kept, padding is not."""
    pipeline, family = pair
    encoders = family.load_text_encoders(CPU, torch.float32)
    captions = [CAPTION, "", "a cat {on} red, " * 200]
    for caption, example in zip(captions, family.encode_text(encoders, captions), strict=True):
        embeds, mask = pipeline.encode_prompt(caption, max_sequence_length=family.tokens)
        assert mask is None
        assert close(example["prompt_embeds"], embeds[0])
    [short] = family.encode_text(encoders, [CAPTION])
    assert len(short["prompt_embeds"]) == family.count_tokens(CAPTION) + 5
    batch = family.collate(family.encode_text(encoders, captions[:2]))
    embeds, mask = pipeline.encode_prompt(captions[:2], max_sequence_length=family.tokens)
    assert close(batch["prompt_embeds"], embeds)
    assert torch.equal(batch[MASK], mask.bool())


def test_the_template_is_as_long_as_is_said(pair):
    pipeline, family = pair
    before, after = pipeline.prompt_template_encode.split("{}")
    assert len(family.tokenizer(before).input_ids) == pipeline.prompt_template_encode_start_idx == 34
    assert family.token_limit == family.tokens - len(family.tokenizer(after).input_ids)


@pytest.mark.parametrize("tiles", [False, True])
@torch.no_grad()
def test_images_there_and_back(pair, tiles):
    pipeline, family = pair
    vae, pixels = family.load_vae(CPU, torch.float32), torch.randn(1, 3, 96, 160).clamp(-1, 1)
    theirs: Any = pipeline.vae
    theirs.use_tiling = tiles
    for side in ("height", "width"):
        setattr(theirs, f"tile_sample_min_{side}", 64)
        setattr(theirs, f"tile_sample_stride_{side}", 48)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (theirs.config.latents_mean, theirs.config.latents_std))
    with tiled(vae, tiles, tile_pixels=64):
        [example] = family.encode_image(vae, pixels, [Framing((160, 96), (0, 0), (160, 96))])
        decoded = family.decode_image(vae, example["latents"][None])
    latents = (theirs.encode(pixels[:, :, None]).latent_dist.mode()[:, :, 0] - mean) / std
    assert close(example["latents"], latents[0], 1e-4)
    pixels = theirs.decode((latents * std + mean)[:, :, None]).sample[:, :, 0]
    theirs.use_tiling = False
    assert close(decoded, pixels.clamp(-1, 1), 1e-4)


def test_tiles_change_something(pair):
    _, family = pair
    vae, pixels = family.load_vae(CPU, torch.float32), torch.randn(1, 3, 96, 160).clamp(-1, 1)
    framing = [Framing((160, 96), (0, 0), (160, 96))]
    [whole] = family.encode_image(vae, pixels, framing)
    with tiled(vae, True, tile_pixels=64):
        [apart] = family.encode_image(vae, pixels, framing)
    assert not torch.allclose(whole["latents"], apart["latents"], atol=1e-4)
    assert not vae.use_tiling


@pytest.mark.parametrize(("height", "width"), [(4, 6), (5, 3)])
def test_positions(height, width):
    theirs = QwenEmbedRope(10000, [16, 56, 56], scale_rope=True)([[(1, height, width)]] * 2, CPU, 7)
    ours = Positions([16, 56, 56])([[(1, height, width)]] * 2, CPU, 7)
    assert all(torch.equal(a, b) for a, b in zip(ours, theirs, strict=True))


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@torch.no_grad()
def test_a_picture_drawn_in_four_steps(pair, guidance):
    """Guided with an empty negative prompt, shorter than the other."""
    pipeline, family = pair
    model, encoders = family.load_model(CPU, torch.float32), family.load_text_encoders(CPU, torch.float32)
    [example, empty] = family.encode_text(encoders, [CAPTION, ""])
    size = (96, 64)
    latents = family.sample(model, [example], empty, Sampling(size, steps=4, guidance=guidance, seed=5))
    noise = torch.randn(latents.shape[1:], generator=torch.Generator().manual_seed(5))[None]
    theirs = pipeline(
        prompt=CAPTION, negative_prompt="", width=size[0], height=size[1], num_inference_steps=4, true_cfg_scale=guidance,
        latents=pack(noise), output_type="latent", max_sequence_length=family.tokens,
    ).images  # fmt: skip
    assert close(latents, unpack(theirs, 8, 12), 1e-4)


def test_the_loss_is_that_of_diffusers_training_script(pair):
    """train_dreambooth_lora_qwen_image: packed noise, sigmas, timestep / 1000, the prompts' mask, target noise - model_input."""
    pipeline, family = pair
    model, batch = family.load_model(CPU, torch.float32), family.example_batch(2, (64, 96))
    generator = torch.Generator().manual_seed(1)
    for name in ("latents", "prompt_embeds"):
        batch[name] = torch.randn(batch[name].shape, generator=generator)
    batch[MASK][1, 40:] = False
    batch["seeds"] = torch.tensor([3, 4])
    ours = family.loss(model, batch)
    timesteps, noise = family.objective.draw(batch["seeds"], batch["latents"].shape)
    sigmas = (timesteps / 1000).view(-1, 1, 1, 1)
    noisy = ((1 - sigmas) * batch["latents"] + sigmas * noise)[:, :, None]
    answer = pipeline.transformer(
        hidden_states=pipeline._pack_latents(noisy.transpose(1, 2), 2, 16, 12, 8), timestep=timesteps / 1000,
        encoder_hidden_states=batch["prompt_embeds"], encoder_hidden_states_mask=batch[MASK].long(),
        img_shapes=[[(1, 6, 4)]] * 2, return_dict=False,
    )[0]  # fmt: skip
    answer = pipeline._unpack_latents(answer, 96, 64, pipeline.vae_scale_factor)[:, :, 0]
    theirs = ((answer - (noise - batch["latents"])) ** 2).mean((1, 2, 3)).sum()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
@torch.no_grad()
def test_fp16_does_not_overflow(pair, autocast):
    """Streams that pass 65504, as the released model's do: nearer to float32's answer than bf16 is."""
    _, family = pair
    batch = family.example_batch(2, (64, 32))
    generator = torch.Generator().manual_seed(1)
    batch["prompt_embeds"] = torch.randn(batch["prompt_embeds"].shape, generator=generator)
    batch[MASK][1, 40:] = False
    x_t, timesteps = torch.randn(batch["latents"].shape, generator=generator), torch.tensor([300.0, 700.0])
    largest: list[float] = []

    def answer(dtype: torch.dtype) -> torch.Tensor:
        model: Any = family.load_model(CPU, dtype)
        for block in model["transformer"].transformer_blocks:
            for layer in (block.attn.to_out[0], block.img_mlp.net[2], block.txt_mlp.net[2]):
                layer.weight.mul_(2.0**16)
                layer.bias.mul_(2.0**16)
            block.register_forward_hook(lambda _, inputs, out: largest.append(float(out[1].abs().max())))
        with torch.autocast("cpu", dtype=dtype, enabled=autocast and dtype is not torch.float32):
            return family.predict(model, x_t, timesteps, batch).float()

    full = answer(torch.float32)
    assert max(largest) > 65504
    half, brain = ((answer(dtype) - full).norm() for dtype in (torch.float16, torch.bfloat16))
    assert half < brain
    assert half < 0.1 * full.norm()
