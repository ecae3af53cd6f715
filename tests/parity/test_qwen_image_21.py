"""Qwen-Image 2.1 against diffusers' own QwenImage21Pipeline on tiny real classes: captions, latents, the answer, pictures."""

from typing import Any

import pytest
import torch
from diffusers.models.transformers.transformer_qwenimage21 import QwenImage21Rope
from helpers import bases
from helpers.bases import close, written

from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.diffusion.prompts import MASK
from lora_trainer.engine.vae_tiling import tiled
from lora_trainer.families import resolve
from lora_trainer.families.qwen_image_21.family import SYSTEM, QwenImage21
from lora_trainer.families.qwen_image_21.names import Positions
from lora_trainer.seam.family import Framing, Sampling

CAPTION = "a photo of a cat on red"
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair() -> tuple[Any, QwenImage21]:
    options, _ = written("qwen_image_21", "folder")
    pipeline = bases.pipeline("qwen_image_21", options["base_model"])
    pipeline.set_progress_bar_config(disable=True)
    family = resolve(ModelConfig(**options), DataConfig())
    assert isinstance(family, QwenImage21)
    family.configure(TrainingConfig(), DataConfig())
    return pipeline, family


@torch.no_grad()
def test_captions(pair):
    """The system's turn is dropped, the final norm left out, an empty caption is a space; padding is on their other side."""
    pipeline, family = pair
    encoders = family.load_text_encoders(CPU, torch.float32)
    captions = [CAPTION, "", "\na cat {on} red, " * 20]
    for caption, example in zip(captions, family.encode_text(encoders, captions), strict=True):
        embeds, mask, pictures = pipeline.encode_prompt(caption)
        assert mask is None
        assert not pictures.any()
        assert close(example["prompt_embeds"], embeds[0])
    batch = family.collate(family.encode_text(encoders, captions))
    embeds, mask, _ = pipeline.encode_prompt(captions)
    assert close(batch["prompt_embeds"], embeds)
    assert torch.equal(batch[MASK], mask.bool())


def test_the_template(pair):
    pipeline, family = pair
    assert family.reader.dropped == pipeline._drop_idx
    assert pipeline.prompt_template_t2i.startswith(SYSTEM)
    ids = family.tokenizer(pipeline.prompt_template_t2i.format(CAPTION)).input_ids
    rest = family.tokens - family.token_limit
    assert len(ids) == family.reader.dropped + family.count_tokens(CAPTION) + rest


def test_a_caption_too_long_keeps_the_end_of_the_template(pair):
    _, family = pair
    [example] = family.tokenize(["a cat " * 900])
    assert len(example["input_ids"]) == family.reader.dropped + family.tokens
    assert bool(example["attention_mask"].all())
    assert family.tokenizer.decode(example["input_ids"][-5:]) == "<|im_end|>\n<|im_start|>assistant\n"
    assert family.tokenizer.decode(example["input_ids"][-7:-5]) == " a cat"


@pytest.mark.parametrize("tiles", [False, True])
@torch.no_grad()
def test_images_there_and_back(pair, tiles):
    """Opaque when they are encoded, on white when they are drawn."""
    pipeline, family = pair
    vae, pixels = family.load_vae(CPU, torch.float32), torch.randn(1, 3, 192, 160).clamp(-1, 1)
    theirs: Any = pipeline.vae
    theirs.use_tiling = tiles
    for side in ("height", "width"):
        setattr(theirs, f"tile_sample_min_{side}", 128)
        setattr(theirs, f"tile_sample_stride_{side}", 96)
    mean, std = (torch.tensor(values).view(1, -1, 1, 1) for values in (theirs.config.latents_mean, theirs.config.latents_std))
    with tiled(vae, tiles, tile_pixels=128):
        [example] = family.encode_image(vae, pixels, [Framing((160, 192), (0, 0), (160, 192))])
        decoded = family.decode_image(vae, example["latents"][None])
    opaque = torch.cat([pixels, torch.ones(1, 1, 192, 160)], 1)[:, :, None]
    latents = (theirs.encode(opaque).latent_dist.mode()[:, :, 0] - mean) / std
    assert close(example["latents"], latents[0], 1e-4)
    drawn = theirs.decode((latents * std + mean)[:, :, None]).sample[:, :, 0]
    theirs.use_tiling = False
    alpha = (drawn[:, 3:] + 1) / 2
    assert alpha.min() < 0.5 < alpha.max()
    assert close((decoded + 1) / 2, (drawn[:, :3] + 1) / 2 * alpha + 1 - alpha, 1e-4)


@pytest.mark.parametrize(("height", "width"), [(4, 6), (5, 3)])
def test_positions(height, width):
    axes, length = [4, 14, 14], 7
    there = torch.arange(length + height * width) >= length
    theirs = QwenImage21Rope(10000, axes)([(1, height, width)], there, CPU)
    assert torch.allclose(Positions(axes)(length, None, (height, width), CPU)[0], theirs, atol=1e-6)
    mask = torch.arange(length)[None] < torch.tensor([[length], [length - 3]])
    both = Positions(axes)(length, mask, (height, width), CPU)
    alone = Positions(axes)(length - 3, None, (height, width), CPU)
    assert torch.equal(both[0], Positions(axes)(length, None, (height, width), CPU)[0])
    assert torch.equal(both[1, length:], alone[0, length - 3 :])


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@torch.no_grad()
def test_a_picture_drawn_in_four_steps(pair, guidance):
    """Guided with an empty negative prompt, shorter than the other; theirs keeps the caption's keys from step to step."""
    pipeline, family = pair
    model, encoders = family.load_model(CPU, torch.float32), family.load_text_encoders(CPU, torch.float32)
    [example, empty] = family.encode_text(encoders, [CAPTION, ""])
    size = (192, 128)
    latents = family.sample(model, [example], empty, Sampling(size, steps=4, guidance=guidance, seed=5))
    noise = torch.randn(latents.shape[1:], generator=torch.Generator().manual_seed(5))[None]
    theirs = pipeline(
        prompt=CAPTION, negative_prompt=" " if guidance > 1 else None, width=size[0], height=size[1], num_inference_steps=4,
        true_cfg_scale=guidance, latents=noise.flatten(2).transpose(1, 2), output_type="latent",
    ).images  # fmt: skip
    assert close(latents, theirs.transpose(1, 2).unflatten(2, (8, 12)), 1e-4)
    if guidance == 1:
        picture = pipeline(prompt=CAPTION, width=192, height=128, num_inference_steps=4,
                           latents=noise.flatten(2).transpose(1, 2), output_type="pt").images  # fmt: skip
        ours = family.decode_image(family.load_vae(CPU, torch.float32), latents)
        assert close((ours + 1) / 2, picture[:, :3] * picture[:, 3:] + 1 - picture[:, 3:], 1e-4)


def test_the_loss_is_that_of_the_path(pair):
    """diffusers' transformer, its masks and its joint sequence; sigmas, timestep / 1000, target noise - latents."""
    pipeline, family = pair
    model, batch = family.load_model(CPU, torch.float32), family.example_batch(2, (128, 192))
    generator = torch.Generator().manual_seed(1)
    for name in ("latents", "prompt_embeds"):
        batch[name] = torch.randn(batch[name].shape, generator=generator)
    batch["seeds"] = torch.tensor([3, 4])
    ours = family.loss(model, batch)
    timesteps, noise = family.objective.draw(batch["seeds"], batch["latents"].shape)
    sigmas = (timesteps / 1000).view(-1, 1, 1, 1)
    noisy = (1 - sigmas) * batch["latents"] + sigmas * noise
    slots = torch.cat([torch.zeros(2, family.tokens, dtype=torch.bool), torch.ones(2, 24, dtype=torch.bool)], 1)
    answer = pipeline.transformer(
        hidden_states=noisy.flatten(2).transpose(1, 2), timestep=timesteps / 1000, img_mask=slots,
        encoder_hidden_states=batch["prompt_embeds"], encoder_hidden_states_mask=batch[MASK], img_shapes=[[(1, 12, 8)]] * 2,
        return_dict=False,
    )[0][:, -96:]  # fmt: skip
    theirs = ((answer.transpose(1, 2).unflatten(2, (12, 8)) - (noise - batch["latents"])) ** 2).mean((1, 2, 3)).sum()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


@torch.no_grad()
def test_padding_is_not_seen(pair):
    _, family = pair
    model, batch = family.load_model(CPU, torch.float32), family.example_batch(2, (64, 64))
    batch["prompt_embeds"] = torch.randn(batch["prompt_embeds"].shape, generator=torch.Generator().manual_seed(1))
    batch[MASK][:, 40:] = False
    x_t, timesteps = torch.randn(batch["latents"].shape), torch.tensor([300.0, 700.0])
    before = family.predict(model, x_t, timesteps, batch)
    batch["prompt_embeds"][:, 40:] += 1
    assert torch.equal(family.predict(model, x_t, timesteps, batch), before)
    batch["prompt_embeds"][:, 39] += 1
    assert not torch.equal(family.predict(model, x_t, timesteps, batch), before)


@pytest.mark.parametrize("autocast", [False, True])
@torch.no_grad()
def test_fp16_does_not_overflow(pair, autocast):
    """Streams and answers of layers that pass 65504: nearer to float32's answer than bf16 is."""
    _, family = pair
    batch = family.example_batch(2, (64, 32))
    generator = torch.Generator().manual_seed(1)
    batch["prompt_embeds"] = torch.randn(batch["prompt_embeds"].shape, generator=generator)
    x_t, timesteps = torch.randn(batch["latents"].shape, generator=generator), torch.tensor([300.0, 700.0])
    largest: list[float] = []

    def answer(dtype: torch.dtype) -> torch.Tensor:
        model: Any = family.load_model(CPU, dtype)
        model["transformer"].modulation[1].weight.mul_(4)
        for block in model["transformer"].transformer_blocks:
            for layer in (block.attn.to_out[0], block.img_mlp.out):
                layer.weight.mul_(2.0**15)
            block.register_forward_hook(lambda _, inputs, out: largest.append(float(out.abs().max())))
        with torch.autocast("cpu", dtype=dtype, enabled=autocast and dtype is not torch.float32):
            return family.predict(model, x_t, timesteps, batch).float()

    full = answer(torch.float32)
    assert max(largest) > 65504
    half, brain = ((answer(dtype) - full).norm() for dtype in (torch.float16, torch.bfloat16))
    assert half < brain
    assert half < 0.1 * full.norm()
