"""FLUX.1 against diffusers' own FluxPipeline on tiny real classes: captions, latents, the model's answer, a whole picture."""

from typing import Any

import pytest
import torch
from diffusers import FluxPipeline
from helpers.bases import close, of

from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.diffusion.packing import pack, positions, unpack
from lora_trainer.families import resolve
from lora_trainer.families.flux.family import Flux
from lora_trainer.seam.family import Framing, Sampling

CAPTION = "a photo of a cat on red"
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["", "schnell"], ids=["dev", "schnell"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Flux]:
    folder = tmp_path_factory.mktemp("flux")
    of("flux", request.param).write_folder(folder)
    pipeline = FluxPipeline.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    family = resolve(ModelConfig(base_model=str(folder)), DataConfig())
    assert isinstance(family, Flux)
    family.configure(TrainingConfig(), DataConfig())
    return pipeline, family


@torch.no_grad()
def test_captions(pair):
    pipeline, family = pair
    [example] = family.encode_text(family.load_text_encoders(CPU, torch.float32), [CAPTION])
    embeds, pooled, _ = pipeline.encode_prompt(CAPTION, max_sequence_length=family.tokens)
    assert example["prompt_embeds"].shape == (family.tokens, 32)
    assert close(example["prompt_embeds"], embeds[0])
    assert close(example["pooled_embeds"], pooled[0])


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


def test_packing_and_positions():
    latents = torch.randn(2, 16, 4, 6)
    assert torch.equal(pack(latents), FluxPipeline._pack_latents(latents, 2, 16, 4, 6))
    assert torch.equal(unpack(pack(latents), 4, 6), latents)
    theirs = FluxPipeline._prepare_latent_image_ids(2, 2, 3, CPU, torch.float32)
    assert torch.equal(positions(2, 3, CPU), theirs)


@torch.no_grad()
def test_a_picture_drawn_in_four_steps(pair):
    pipeline, family = pair
    model, encoders = family.load_model(CPU, torch.float32), family.load_text_encoders(CPU, torch.float32)
    [example, empty] = family.encode_text(encoders, [CAPTION, ""])
    size = (96, 64)
    latents = family.sample(model, [example], empty, Sampling(size, steps=4, guidance=3.5, seed=5))
    noise = torch.randn(latents.shape[1:], generator=torch.Generator().manual_seed(5))[None]
    theirs = pipeline(
        prompt=CAPTION, width=size[0], height=size[1], num_inference_steps=4, guidance_scale=3.5,
        latents=FluxPipeline._pack_latents(noise, 1, *noise.shape[1:]), output_type="latent",
        max_sequence_length=family.tokens,
    ).images  # fmt: skip
    assert close(latents, unpack(theirs, 8, 12), 1e-4)


def test_the_loss_is_that_of_diffusers_training_script(pair):
    """train_dreambooth_lora_flux: model_input, noise, sigmas, packed call with guidance 1, target noise - model_input."""
    pipeline, family = pair
    model, batch = family.load_model(CPU, torch.float32), family.example_batch(2, (64, 96))
    generator = torch.Generator().manual_seed(1)
    for name in ("latents", "prompt_embeds", "pooled_embeds"):
        batch[name] = torch.randn(batch[name].shape, generator=generator)
    batch["seeds"] = torch.tensor([3, 4])
    ours = family.loss(model, batch)
    timesteps, noise = family.objective.draw(batch["seeds"], batch["latents"].shape)
    sigmas = (timesteps / 1000).view(-1, 1, 1, 1)
    noisy = (1 - sigmas) * batch["latents"] + sigmas * noise
    guidance = torch.ones(2) if family.guided else None
    answer = pipeline.transformer(
        hidden_states=FluxPipeline._pack_latents(noisy, 2, *noisy.shape[1:]), timestep=timesteps / 1000, guidance=guidance,
        pooled_projections=batch["pooled_embeds"], encoder_hidden_states=batch["prompt_embeds"],
        txt_ids=torch.zeros(family.tokens, 3), img_ids=FluxPipeline._prepare_latent_image_ids(2, 6, 4, CPU, torch.float32),
        return_dict=False,
    )[0]  # fmt: skip
    answer = FluxPipeline._unpack_latents(answer, 96, 64, pipeline.vae_scale_factor)
    theirs = ((answer - (noise - batch["latents"])) ** 2).mean((1, 2, 3)).sum()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)
