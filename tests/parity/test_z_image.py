"""Z-Image against diffusers' own ZImagePipeline on tiny real classes: captions, latents, the model's answer, whole pictures."""

from typing import Any

import pytest
import torch
from diffusers import ZImagePipeline
from helpers.bases import close, of

from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.families import resolve
from lora_trainer.families.z_image.family import ZImage
from lora_trainer.seam.family import Framing, Sampling

CAPTIONS = ["a photo of a cat on red", "a cat", "a red cat <|im_end|> of texture, size, shape " + "background " * 30]
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["", "turbo"], ids=["base", "turbo"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, ZImage]:
    folder = tmp_path_factory.mktemp("z_image")
    of("z_image", request.param).write_folder(folder)
    pipeline = ZImagePipeline.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    family = resolve(ModelConfig(base_model=str(folder)), DataConfig())
    assert isinstance(family, ZImage)
    family.configure(TrainingConfig(), DataConfig())
    return pipeline, family


@torch.no_grad()
def test_captions(pair):
    """In the chat template, without padding, one layer before the last."""
    pipeline, family = pair
    examples = family.encode_text(family.load_text_encoders(CPU, torch.float32), [*CAPTIONS, ""])
    theirs, _ = pipeline.encode_prompt([*CAPTIONS, ""], do_classifier_free_guidance=False)
    assert [len(example["prompt_embeds"]) for example in examples] == [len(embeds) for embeds in theirs]
    assert len(examples[3]["prompt_embeds"]) == family.tokens - family.token_limit
    assert all(close(ours["prompt_embeds"], embeds) for ours, embeds in zip(examples, theirs, strict=True))


@torch.no_grad()
def test_a_caption_too_long_is_cut_as_theirs(pair):
    pipeline, family = pair
    short = resolve(ModelConfig(base_model=str(family.source.path)), DataConfig(max_caption_tokens=128))
    assert isinstance(short, ZImage)
    [example] = short.encode_text(short.load_text_encoders(CPU, torch.float32), ["cat " * 200])
    [theirs], _ = pipeline.encode_prompt("cat " * 200, do_classifier_free_guidance=False, max_sequence_length=128)
    assert len(example["prompt_embeds"]) == 128
    assert close(example["prompt_embeds"], theirs)


@torch.no_grad()
def test_images_there_and_back(pair):
    pipeline, family = pair
    vae, pixels = family.load_vae(CPU, torch.float32), torch.randn(1, 3, 32, 48).clamp(-1, 1)
    [example] = family.encode_image(vae, pixels, [Framing((48, 32), (0, 0), (48, 32))])
    config = pipeline.vae.config
    theirs = (pipeline.vae.encode(pixels).latent_dist.mode() - config.shift_factor) * config.scaling_factor
    assert close(example["latents"], theirs[0])
    decoded = pipeline.vae.decode(theirs / config.scaling_factor + config.shift_factor, return_dict=False)[0].clamp(-1, 1)
    assert close(family.decode_image(vae, example["latents"][None]), decoded)


@torch.no_grad()
@pytest.mark.parametrize("guidance", [1.0, 5.0])
def test_a_picture_drawn_in_four_steps(pair, guidance):
    """Their guidance counts from 0, ours, as everybody else's, from 1. 5 x 7 tokens: filled up to 64."""
    pipeline, family = pair
    model, encoders = family.load_model(CPU, torch.float32), family.load_text_encoders(CPU, torch.float32)
    [example, empty] = family.encode_text(encoders, [CAPTIONS[2], ""])
    size = (112, 80)
    latents = family.sample(model, [example], empty, Sampling(size, steps=4, guidance=guidance, seed=5))
    noise = torch.randn(latents.shape[1:], generator=torch.Generator().manual_seed(5))[None]
    theirs = pipeline(
        prompt=CAPTIONS[2], width=size[0], height=size[1], num_inference_steps=4, guidance_scale=guidance - 1,
        latents=noise, output_type="latent",
    ).images  # fmt: skip
    assert close(latents, theirs, 1e-4)


@torch.no_grad()
def test_the_answer_to_captions_of_unlike_lengths(pair):
    """diffusers' training script: the transformer called with lists, at time (1000 - t) / 1000, its answer negated."""
    pipeline, family = pair
    model, encoders = family.load_model(CPU, torch.float32), family.load_text_encoders(CPU, torch.float32)
    examples = [{**text, "latents": torch.randn(16, 4, 6)} for text in family.encode_text(encoders, CAPTIONS)]
    batch, timesteps = family.collate(examples), torch.tensor([20.0, 500.0, 990.0])
    ours = family.predict(model, batch["latents"], timesteps, batch)
    embeds, _ = pipeline.encode_prompt(list(CAPTIONS), do_classifier_free_guidance=False)
    theirs = pipeline.transformer(
        list(batch["latents"].unsqueeze(2).unbind(0)), (1000 - timesteps) / 1000, embeds, return_dict=False
    )[0]  # fmt: skip
    assert close(ours, -torch.stack(theirs, 0).squeeze(2))


def test_rotations_are_theirs_to_the_bit():
    from diffusers.models.transformers.transformer_z_image import RopeEmbedder

    from lora_trainer.families.z_image.network import Rotations

    ids = torch.randint(0, 512, (300, 3), generator=torch.Generator().manual_seed(0), dtype=torch.int32)
    theirs = RopeEmbedder(256.0, [32, 48, 48], [1536, 512, 512])(ids)
    assert torch.equal(Rotations(256.0, [32, 48, 48])(ids), theirs)


def test_the_loss(pair):
    pipeline, family = pair
    model, batch = family.load_model(CPU, torch.float32), family.example_batch(2, (64, 96))
    generator = torch.Generator().manual_seed(1)
    for name in ("latents", "prompt_embeds"):
        batch[name] = torch.randn(batch[name].shape, generator=generator)
    batch["seeds"] = torch.tensor([3, 4])
    ours = family.loss(model, batch)
    timesteps, noise = family.objective.draw(batch["seeds"], batch["latents"].shape)
    sigmas = (timesteps / 1000).view(-1, 1, 1, 1)
    noisy = (1 - sigmas) * batch["latents"] + sigmas * noise
    answer = pipeline.transformer(
        list(noisy.unsqueeze(2).unbind(0)), (1000 - timesteps) / 1000, list(batch["prompt_embeds"]), return_dict=False
    )[0]  # fmt: skip
    answer = -torch.stack(answer, 0).squeeze(2)
    theirs = ((answer - (noise - batch["latents"])) ** 2).mean((1, 2, 3)).sum()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


@torch.no_grad()
def test_fp16_stays_in_range_and_is_exact(pair):
    """Values that the MLPs of the released model reach: fp16 as it is overflows, scaled it answers as float32 does."""
    _, family = pair
    batch = family.example_batch(1, (64, 64))
    generator = torch.Generator().manual_seed(0)
    batch |= {name: torch.randn(batch[name].shape, generator=generator) for name in ("latents", "prompt_embeds")}

    def answer(half: bool) -> torch.Tensor:
        model: Any = family.load_model(CPU, torch.float16 if half else torch.float32)
        for block in model["transformer"].layers:
            block.feed_forward.w1.weight *= 70
            block.feed_forward.w3.weight *= 70
        return family.predict(model, batch["latents"], torch.tensor([500.0]), batch).float()

    exact, half = answer(half=False), answer(half=True)
    assert bool(half.isfinite().all())
    assert close(half, exact, 0.02)
    plain: Any = family.load_model(CPU, torch.float32)["transformer"].half()
    hidden = torch.randn(8, 96, generator=generator).half() * 3
    mlp = plain.layers[0].feed_forward
    mlp.w1.weight *= 70
    mlp.w3.weight *= 70
    assert not bool(mlp(hidden).isfinite().all()), "the test shows nothing if plain fp16 would do"


@torch.no_grad()
def test_the_scaled_network_is_the_network(pair):
    """In float32, scaled and not: the same numbers."""
    from lora_trainer.families.z_image.network import keep_in_range

    _, family = pair
    model, batch = family.load_model(CPU, torch.float32), family.example_batch(1, (64, 64))
    batch |= {name: torch.randn(batch[name].shape) for name in ("latents", "prompt_embeds")}
    before = family.predict(model, batch["latents"], torch.tensor([500.0]), batch)
    keep_in_range([block for group in family.blocks(model) for block in group.blocks])
    assert close(family.predict(model, batch["latents"], torch.tensor([500.0]), batch), before, 1e-5)
