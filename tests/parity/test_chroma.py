"""Chroma against diffusers' own ChromaPipeline on tiny real classes: captions, the mask, the model's answer, a whole picture.

The pipeline gets the masks that it makes as booleans: as floats, which it makes of them, attention adds them to its scores.
"""

from typing import Any

import pytest
import torch
from diffusers import ChromaPipeline
from helpers.bases import close, written

from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.diffusion.packing import unpack
from lora_trainer.diffusion.prompts import MASK
from lora_trainer.families import resolve
from lora_trainer.families.chroma.family import Chroma
from lora_trainer.seam.family import Sampling

CAPTIONS = ["a photo of a cat on red", "a cat"]
TOKENS = 128
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair() -> tuple[Any, Chroma]:
    folder = written("chroma", "folder")[0]["base_model"]
    pipeline = ChromaPipeline.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    family = resolve(ModelConfig(base_model=folder), DataConfig(max_caption_tokens=TOKENS))
    assert isinstance(family, Chroma)
    family.configure(TrainingConfig(), DataConfig())
    return pipeline, family


def theirs_of(pipeline: Any, caption: str) -> tuple[torch.Tensor, torch.Tensor]:
    embeds, _, mask, *_ = pipeline.encode_prompt(caption, max_sequence_length=TOKENS, do_classifier_free_guidance=False)
    return embeds, mask.bool()


@torch.no_grad()
@pytest.mark.parametrize("caption", [*CAPTIONS, "", "a photo of a cat on red, " * 40])
def test_captions_are_kept_without_what_the_pipeline_masks(pair, caption):
    pipeline, family = pair
    [example] = family.encode_text(family.load_text_encoders(CPU, torch.float32), [caption])
    embeds, mask = theirs_of(pipeline, caption)
    assert set(example) == {"prompt_embeds"}
    assert len(example["prompt_embeds"]) == int(mask.sum()) == min(TOKENS, family.count_tokens(caption) + 2)
    assert close(example["prompt_embeds"], embeds[0][mask[0]])


@torch.no_grad()
def test_the_answer_to_captions_of_unlike_length(pair):
    """Ours padded to the longer of two, theirs to the full length; and neither lets padding change a picture."""
    pipeline, family = pair
    model, encoders = family.load_model(CPU, torch.float32), family.load_text_encoders(CPU, torch.float32)
    batch = family.collate(family.encode_text(encoders, CAPTIONS))
    assert batch[MASK].sum(1).tolist() == [len(e["prompt_embeds"]) for e in family.encode_text(encoders, CAPTIONS)]
    latents, timesteps = torch.randn(2, 16, 4, 6, generator=torch.Generator().manual_seed(0)), torch.tensor([300.0, 800.0])
    ours = family.predict(model, latents, timesteps, batch)
    embeds, mask = (torch.cat(parts) for parts in zip(*(theirs_of(pipeline, c) for c in CAPTIONS), strict=True))
    packed = ChromaPipeline._pack_latents(latents, 2, 16, 4, 6)
    answer = pipeline.transformer(
        hidden_states=packed, timestep=timesteps / 1000, encoder_hidden_states=embeds, txt_ids=torch.zeros(TOKENS, 3),
        img_ids=ChromaPipeline._prepare_latent_image_ids(2, 2, 3, CPU, torch.float32),
        attention_mask=pipeline._prepare_attention_mask(2, packed.shape[1], torch.float32, mask), return_dict=False,
    )[0]  # fmt: skip
    assert torch.isfinite(ours).all()
    assert close(ours, unpack(answer, 4, 6), 1e-4)
    disturbed = {**batch, "prompt_embeds": batch["prompt_embeds"] + 100 * ~batch[MASK][..., None]}
    assert close(family.predict(model, latents, timesteps, disturbed), ours)


@torch.no_grad()
def test_a_picture_drawn_in_four_steps(pair):
    """With classifier-free guidance against another prompt."""
    pipeline, family = pair
    model, encoders = family.load_model(CPU, torch.float32), family.load_text_encoders(CPU, torch.float32)
    positive, negative = family.encode_text(encoders, CAPTIONS)
    latents = family.sample(model, [positive], negative, Sampling((96, 64), steps=4, guidance=4.0, seed=5))
    noise = torch.randn(latents.shape[1:], generator=torch.Generator().manual_seed(5))[None]
    (embeds, mask), (other, other_mask) = (theirs_of(pipeline, caption) for caption in CAPTIONS)
    theirs = pipeline(
        prompt_embeds=embeds, prompt_attention_mask=mask, negative_prompt_embeds=other, negative_prompt_attention_mask=other_mask,
        width=96, height=64, num_inference_steps=4, guidance_scale=4.0, output_type="latent",
        latents=ChromaPipeline._pack_latents(noise, 1, *noise.shape[1:]),
    ).images  # fmt: skip
    assert close(latents, unpack(theirs, 8, 12), 1e-4)


def test_the_loss_is_that_of_rectified_flow(pair):
    """Noisy latents along the straight path, packed; the target is noise - latents."""
    pipeline, family = pair
    model, batch = family.load_model(CPU, torch.float32), family.example_batch(1, (64, 96))
    generator = torch.Generator().manual_seed(1)
    for name in ("latents", "prompt_embeds"):
        batch[name] = torch.randn(batch[name].shape, generator=generator)
    batch["seeds"] = torch.tensor([3])
    ours = family.loss(model, batch)
    timesteps, noise = family.objective.draw(batch["seeds"], batch["latents"].shape)
    t = (timesteps / 1000).view(-1, 1, 1, 1)
    noisy = (1 - t) * batch["latents"] + t * noise
    answer = pipeline.transformer(
        hidden_states=ChromaPipeline._pack_latents(noisy, 1, *noisy.shape[1:]), timestep=timesteps / 1000,
        encoder_hidden_states=batch["prompt_embeds"], txt_ids=torch.zeros(TOKENS, 3), return_dict=False,
        img_ids=ChromaPipeline._prepare_latent_image_ids(1, 6, 4, CPU, torch.float32),
    )[0]  # fmt: skip
    answer = ChromaPipeline._unpack_latents(answer, 96, 64, pipeline.vae_scale_factor)
    assert ours.item() == pytest.approx(((answer - (noise - batch["latents"])) ** 2).mean().item(), rel=1e-5)


def test_gradients_are_finite_where_padding_sees_nothing(pair):
    _, family = pair
    model, encoders = family.load_model(CPU, torch.float32), family.load_text_encoders(CPU, torch.float32)
    batch = family.collate(family.encode_text(encoders, ["", CAPTIONS[0] * 3]))
    weight = model["transformer"].single_transformer_blocks[0].attn.to_k.weight
    weight.requires_grad_(True)
    latents = torch.randn(family.latents_shape(2, (64, 32)))
    loss = family.loss(model, {**batch, "latents": latents, "seeds": torch.tensor([1, 2]), "weight": torch.ones(2)})
    loss.backward()
    assert torch.isfinite(weight.grad).all()
    assert weight.grad.abs().max() > 0
