"""SD3 against diffusers' own StableDiffusion3Pipeline on tiny real classes: captions, latents, the model's answer, a picture."""

from typing import Any

import pytest
import torch
from diffusers import StableDiffusion3Pipeline
from helpers.bases import Base, close, of

from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.families import resolve
from lora_trainer.families.sd3.family import SD3
from lora_trainer.seam.family import Framing, Sampling

CAPTION = "a photo of a cat on red"
LONG = ", ".join([CAPTION] * 12)
CPU = torch.device("cpu")
BASES: dict[str, Base] = {"3.5": of("sd3"), "3.5 without T5": of("sd3").without("text_encoder_3"), "3": of("sd3", "medium")}


@pytest.fixture(scope="module", params=BASES.values(), ids=BASES)
def pair(request: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, SD3]:
    folder = tmp_path_factory.mktemp("sd3")
    request.param.write_folder(folder)
    left_out = {"text_encoder_3": None, "tokenizer_3": None} if request.param.absent else {}
    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True, **left_out)
    pipeline.set_progress_bar_config(disable=True)
    family = resolve(ModelConfig(base_model=str(folder)), DataConfig())
    assert isinstance(family, SD3)
    family.configure(TrainingConfig(), DataConfig())
    return pipeline, family


@torch.no_grad()
@pytest.mark.parametrize("caption", [CAPTION, "", LONG], ids=["short", "empty", "long"])
def test_captions(pair, caption):
    pipeline, family = pair
    [example] = family.encode_text(family.load_text_encoders(CPU, torch.float32), [caption])
    embeds, _, pooled, _ = pipeline.encode_prompt(caption, None, None, do_classifier_free_guidance=False)
    assert embeds.shape == (1, 77 + 256, 96)
    kept = example["prompt_embeds"]
    assert kept.shape == ((333, 96) if family.reader.t5 is not None else (77, 96)), "zeros are not cached"
    assert close(kept, embeds[0, : len(kept)])
    assert not embeds[0, len(kept) :].any()
    assert close(example["pooled_embeds"], pooled[0])


def test_the_second_clip_is_padded_with_its_own_token(pair):
    _, family = pair
    [ids] = family.tokenize([CAPTION])
    assert ids["input_ids"][0, -1] == family.reader.clips[0].tokenizer.eos_token_id
    assert ids["input_ids_2"][0, -1] == 0


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
def test_a_picture_drawn_in_four_steps(pair):
    """With guidance and a negative prompt; wider than high, so that the table of positions is cropped on both sides."""
    pipeline, family = pair
    model, encoders = family.load_model(CPU, torch.float32), family.load_text_encoders(CPU, torch.float32)
    [example, negative] = family.encode_text(encoders, [CAPTION, "red"])
    size = (96, 64)
    latents = family.sample(model, [example], negative, Sampling(size, steps=4, guidance=4.5, seed=5))
    noise = torch.randn(latents.shape[1:], generator=torch.Generator().manual_seed(5))[None]
    theirs = pipeline(
        prompt=CAPTION, negative_prompt="red", width=size[0], height=size[1], num_inference_steps=4, guidance_scale=4.5,
        latents=noise, output_type="latent",
    ).images  # fmt: skip
    assert close(latents, theirs, 1e-4)


def test_the_loss_is_that_of_diffusers_training_script(pair):
    """train_dreambooth_lora_sd3: model_input, noise, sigmas of timesteps, target noise - model_input."""
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
    text = batch["prompt_embeds"]
    text = torch.cat([text, torch.zeros(2, 333 - text.shape[1], 96)], 1)
    answer = pipeline.transformer(
        hidden_states=noisy, timestep=timesteps, encoder_hidden_states=text, pooled_projections=batch["pooled_embeds"]
    ).sample
    theirs = ((answer - (noise - batch["latents"])) ** 2).mean((1, 2, 3)).sum()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


def test_noise_is_shifted_by_three_at_any_size(pair):
    _, family = pair
    shift, t = family.objective.shift, torch.tensor(0.5)
    assert {shift(t, torch.Size((16, side, side))).item() for side in (8, 64, 128)} == {0.75}
