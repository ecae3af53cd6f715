"""PixArt-Sigma against diffusers' own PixArtSigmaPipeline on tiny real classes: captions, latents, answer, loss, a picture."""

from typing import Any

import pytest
import torch
from diffusers import DDPMScheduler, PixArtSigmaPipeline, PixArtTransformer2DModel
from helpers.bases import close, of
from safetensors.torch import load_file, save_file

from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.diffusion.prompts import MASK
from lora_trainer.diffusion.sampling import make_scheduler
from lora_trainer.errors import ConfigError, SourceError
from lora_trainer.families import resolve
from lora_trainer.families.pixart_sigma import names
from lora_trainer.families.pixart_sigma.family import PixArtSigma
from lora_trainer.families.pixart_sigma.network import build, sizes
from lora_trainer.files.sources import open_source
from lora_trainer.seam.family import Framing, Sampling

CAPTION = "A photo of a Cat on red"
LONG = ", ".join([CAPTION] * 60)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, PixArtSigma]:
    folder = tmp_path_factory.mktemp("pixart")
    of("pixart_sigma").write_folder(folder)
    pipeline = PixArtSigmaPipeline.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True)
    pipeline.set_progress_bar_config(disable=True)
    family = resolve(ModelConfig(base_model=str(folder)), DataConfig())
    assert isinstance(family, PixArtSigma)
    family.configure(TrainingConfig(), DataConfig())
    return pipeline, family


@torch.no_grad()
@pytest.mark.parametrize("caption", [CAPTION, "", LONG], ids=["short", "empty", "long"])
def test_captions(pair, caption):
    pipeline, family = pair
    [example] = family.encode_text(family.load_text_encoders(CPU, torch.float32), [caption])
    embeds, mask, _, _ = pipeline.encode_prompt(caption, do_classifier_free_guidance=False)
    assert embeds.shape == (1, 300, 32)
    assert len(example["prompt_embeds"]) == int(mask.sum()), "kept without its padding"
    assert close(example["prompt_embeds"], embeds[0, mask[0].bool()])


@torch.no_grad()
def test_images_there_and_back(pair):
    pipeline, family = pair
    vae, pixels = family.load_vae(CPU, torch.float32), torch.randn(1, 3, 32, 64).clamp(-1, 1)
    [example] = family.encode_image(vae, pixels, [Framing((64, 32), (0, 0), (64, 32))])
    factor = pipeline.vae.config.scaling_factor
    assert factor == pytest.approx(0.13025), "SDXL's"
    assert close(example["latents"], pipeline.vae.encode(pixels).latent_dist.mode()[0] * factor)
    decoded = pipeline.vae.decode(example["latents"][None] / factor, return_dict=False)[0].clamp(-1, 1)
    assert close(family.decode_image(vae, example["latents"][None]), decoded)


def test_the_loss_is_of_the_answers_first_half(pair):
    """As its training scripts have it: noise added by DDPM's schedule, the learnt variance left alone."""
    pipeline, family = pair
    model, batch = family.load_model(CPU, torch.float32), family.example_batch(2, (64, 96))
    generator = torch.Generator().manual_seed(1)
    for name in ("latents", "prompt_embeds"):
        batch[name] = torch.randn(batch[name].shape, generator=generator)
    batch["seeds"] = torch.tensor([3, 4])
    batch[MASK][0, 7:] = False
    ours = family.loss(model, batch)
    timesteps, noise = family.objective.draw(batch["seeds"], batch["latents"].shape)
    noisy = DDPMScheduler.from_config(pipeline.scheduler.config).add_noise(batch["latents"], noise, timesteps)
    answer = pipeline.transformer(
        noisy, encoder_hidden_states=batch["prompt_embeds"], timestep=timesteps, encoder_attention_mask=batch[MASK].float(),
        added_cond_kwargs={"resolution": None, "aspect_ratio": None},
    ).sample  # fmt: skip
    assert answer.shape[1] == 2 * noise.shape[1]
    theirs = ((answer.chunk(2, 1)[0] - noise) ** 2).mean((1, 2, 3)).sum()
    assert ours.item() == pytest.approx(theirs.item(), rel=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("size", [(96, 64), (1024, 1024)], ids=["wide", "as released"])
def test_a_picture_drawn_in_few_steps(pair, size):
    """With guidance and a negative prompt; at the released size diffusers takes positions from its table."""
    pipeline, family = pair
    pipeline.scheduler = make_scheduler(family)
    model, encoders = family.load_model(CPU, torch.float32), family.load_text_encoders(CPU, torch.float32)
    [example, negative] = family.encode_text(encoders, [CAPTION, "red"])
    steps = 4 if size[0] < 1024 else 1
    latents = family.sample(model, [example], negative, Sampling(size, steps=steps, guidance=4.5, seed=5))
    noise = torch.randn(latents.shape[1:], generator=torch.Generator().manual_seed(5))[None]
    theirs = pipeline(
        prompt=CAPTION, negative_prompt="red", width=size[0], height=size[1], num_inference_steps=steps, guidance_scale=4.5,
        latents=noise, output_type="latent", use_resolution_binning=False, clean_caption=False,
    ).images  # fmt: skip
    assert close(latents, theirs, 1e-4)


@torch.no_grad()
def test_a_model_that_is_told_the_pictures_size():
    config = of("pixart_sigma").configs()["transformer"] | {"use_additional_conditions": True}
    ours, theirs = build(config), PixArtTransformer2DModel.from_config(config)
    theirs.load_state_dict(ours.state_dict())
    latents, text = torch.randn(2, 4, 8, 16), torch.randn(2, 5, 32)
    told = sizes(latents)
    assert told["resolution"].tolist() == [[64.0, 128.0]] * 2
    assert told["aspect_ratio"].tolist() == [[0.5]] * 2
    given = {"encoder_hidden_states": text, "timestep": torch.tensor([3, 700]), "added_cond_kwargs": told}
    assert close(ours(latents, **given).sample, theirs(latents, **given).sample)


def test_the_original_layout_keeps_its_table_of_positions(tmp_path):
    """Which tells the size of the pictures; its unconditional caption is not read."""
    options, _ = of("pixart_sigma").write_files(tmp_path, "fp32")
    state = load_file(options["base_model"])
    more = {"pos_embed": torch.zeros(1, 32 * 32, 288), "y_embedder.y_embedding": torch.zeros(300, 32)}
    save_file({**state, **more}, tmp_path / "512.safetensors")
    source = open_source(str(tmp_path / "512.safetensors"))
    config, _ = names.derive(source.header, of("pixart_sigma").configs()["transformer"])
    assert (config["sample_size"], config["interpolation_scale"]) == (64, 1)
    family = resolve(ModelConfig(**{**options, "base_model": str(source.path)}), DataConfig())
    assert family.name == "pixart_sigma"


def test_alpha_is_not_sigma(tmp_path):
    of("pixart_sigma").write_folder(tmp_path)
    index = tmp_path / "model_index.json"
    index.write_text(index.read_text(encoding="utf-8").replace("PixArtSigma", "PixArtAlpha"), encoding="utf-8")
    with pytest.raises(SourceError, match="DiT"):
        resolve(ModelConfig(base_model=str(tmp_path)), DataConfig())


def test_the_way_out_of_zero_terminal_snr_is_open() -> None:
    family: Any = resolve(ModelConfig(family="pixart_sigma"), DataConfig(), planning=True)
    with pytest.raises(ConfigError) as caught:
        family.configure(TrainingConfig(zero_terminal_snr=True), DataConfig())
    assert "tipo_predicao" not in caught.value.hint
    assert "prediction_type" not in caught.value.hint
