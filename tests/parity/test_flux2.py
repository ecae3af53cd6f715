"""FLUX.2 against diffusers' own pipelines on tiny real classes: captions, latents, the model's answer, a whole picture."""

from typing import Any

import diffusers
import pytest
import torch
from diffusers import Flux2KleinPipeline
from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu
from helpers.bases import close, of

from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.families import resolve
from lora_trainer.families.flux2.family import Flux2, empirical_mu, positions, text_positions
from lora_trainer.families.flux2.vae import patchify, unpatchify
from lora_trainer.seam.family import Framing, Sampling

CAPTION = "a photo of a cat on red"
CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=["", "distilled", "dev"], ids=["base", "distilled", "dev"])
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Flux2]:
    folder = tmp_path_factory.mktemp("flux2")
    of("flux2", request.param).write_folder(folder)
    kind = diffusers.Flux2Pipeline if request.param == "dev" else Flux2KleinPipeline
    pipeline = kind.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    family = resolve(ModelConfig(base_model=str(folder)), DataConfig(max_caption_tokens=128))
    assert isinstance(family, Flux2)
    family.configure(TrainingConfig(), DataConfig())
    return pipeline, family


@pytest.mark.parametrize("caption", [CAPTION, "", "a {cat}[IMG] on <red>", "a red cat, " * 60])
@torch.no_grad()
def test_captions(pair, caption):
    """Padding included, on the side where the pipeline has it: the model sees it."""
    pipeline, family = pair
    [example] = family.encode_text(family.load_text_encoders(CPU, torch.float32), [caption])
    embeds, ids = pipeline.encode_prompt(caption, max_sequence_length=family.tokens)
    assert example["prompt_embeds"].shape == (128, 96)
    assert close(example["prompt_embeds"], embeds[0])
    assert torch.equal(text_positions(128, CPU), ids[0])


@torch.no_grad()
def test_images_there_and_back(pair):
    pipeline, family = pair
    vae, pixels = family.load_vae(CPU, torch.float32), torch.randn(1, 3, 32, 48).clamp(-1, 1)
    [example] = family.encode_image(vae, pixels, [Framing((48, 32), (0, 0), (48, 32))])
    theirs = pipeline._encode_vae_image(pixels, torch.Generator())
    assert theirs.shape[1:] == family.latents_shape(1, (48, 32))[1:]
    assert close(example["latents"], theirs[0])
    bn = pipeline.vae.bn
    raw = theirs * (bn.running_var + 1e-4).sqrt().view(1, -1, 1, 1) + bn.running_mean.view(1, -1, 1, 1)
    decoded = pipeline.vae.decode(Flux2KleinPipeline._unpatchify_latents(raw)).sample.clamp(-1, 1)
    assert close(family.decode_image(vae, example["latents"][None]), decoded)


def test_patches_and_positions():
    latents = torch.randn(2, 32, 4, 6)
    assert torch.equal(patchify(latents), Flux2KleinPipeline._patchify_latents(latents))
    assert torch.equal(unpatchify(patchify(latents)), latents)
    assert torch.equal(positions(2, 3, CPU), Flux2KleinPipeline._prepare_latent_ids(torch.zeros(1, 1, 2, 3))[0])


def test_the_shift_of_drawings():
    for tokens in (16, 1024, 4096, 4300, 4301, 9216):
        for steps in (4, 10, 50, 200):
            assert empirical_mu(tokens, steps) == pytest.approx(compute_empirical_mu(tokens, steps), abs=1e-6)


@torch.no_grad()
def test_a_picture_drawn_in_four_steps(pair):
    """klein base with true guidance, distilled without, dev with the guidance it is told."""
    pipeline, family = pair
    model, encoders = family.load_model(CPU, torch.float32), family.load_text_encoders(CPU, torch.float32)
    [example, empty] = family.encode_text(encoders, [CAPTION, ""])
    size = (96, 64)
    latents = family.sample(model, [example], empty, Sampling(size, steps=4, guidance=4.0, seed=5))
    noise = torch.randn(latents.shape[1:], generator=torch.Generator().manual_seed(5))[None]
    theirs = pipeline(
        prompt=CAPTION, width=size[0], height=size[1], num_inference_steps=4, guidance_scale=4.0, latents=noise,
        output_type="pt", max_sequence_length=family.tokens,
    ).images  # fmt: skip
    drawn = family.decode_image(family.load_vae(CPU, torch.float32), latents)
    assert close(drawn / 2 + 0.5, theirs, 1e-4)


def test_the_loss_is_that_of_diffusers_training_script(pair):
    """train_dreambooth_lora_flux2_klein: packed call, text and image ids, guidance 1 for dev, target noise - model_input."""
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
    ids = Flux2KleinPipeline._prepare_latent_ids(noisy)
    answer = pipeline.transformer(
        hidden_states=Flux2KleinPipeline._pack_latents(noisy), timestep=timesteps / 1000,
        guidance=torch.ones(2) if family.guided else None, encoder_hidden_states=batch["prompt_embeds"],
        txt_ids=Flux2KleinPipeline._prepare_text_ids(batch["prompt_embeds"]), img_ids=ids, return_dict=False,
    )[0]  # fmt: skip
    answer = Flux2KleinPipeline._unpack_latents_with_ids(answer, ids)
    theirs = ((answer - (noise - batch["latents"])) ** 2).mean((1, 2, 3)).sum()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


def test_noise_levels_in_training_are_shifted_by_the_schedulers_line(pair):
    """By a picture's tokens, from 0.5 at 256 to 1.15 at 4096: what drawings in 200 steps come to."""
    _, family = pair
    for side, mu in ((16, 0.5), (64, 1.15)):
        assert family.objective.shift.mu(torch.Size((128, side, side))) == pytest.approx(mu)
        assert empirical_mu(side * side, 200) == pytest.approx(mu, abs=1e-5)
