"""Which family a base belongs to, and that what it encodes is what diffusers encodes (G08 G09 B02 E05 F07)."""

import ctypes
import gc
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from helpers.original_checkpoint import CAPTION, write_folder, write_single_file
from safetensors.torch import save_file

from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.diffusion import unet as _unet
from lora_trainer.engine.vae_tiling import tiled
from lora_trainer.errors import ConfigError, SourceError
from lora_trainer.families import resolve
from lora_trainer.families.sdxl.family import time_ids
from lora_trainer.seam.family import Framing

CPU = torch.device("cpu")
RELEASES = ("sd1", "sd2", "sdxl")


def opened(path: Path, tokens: int = 75, **settings: Any) -> Any:
    if path.is_file():
        settings.setdefault("tokenizer", str(path.parent / "words"))
        settings.setdefault("prediction_type", "epsilon")
    return resolve(ModelConfig(base_model=str(path), **settings), DataConfig(max_caption_tokens=tokens))


@pytest.fixture(scope="module")
def bases(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A diffusers folder of each release, never written to."""
    root = tmp_path_factory.mktemp("bases")
    for release in RELEASES:
        write_folder(root / release, release)
    return {release: root / release for release in RELEASES}


# -- which family


@pytest.mark.parametrize(("release", "name"), [("sd1", "sd15"), ("sd2", "sd15"), ("sdxl", "sdxl")])
def test_file_and_folder_find_their_family(tmp_path: Path, bases: dict[str, Path], release: str, name: str) -> None:
    write_single_file(tmp_path / "lixo_sd_v1-sdxl.safetensors", release)  # the name tells nothing
    for path in (tmp_path / "lixo_sd_v1-sdxl.safetensors", bases[release]):
        family = opened(path)
        assert family.name == name
        if name == "sd15":
            assert family.release == release


def test_a_family_that_does_not_match_names_both(bases: dict[str, Path]) -> None:
    with pytest.raises(SourceError, match=r"familia: sd15 \(Stable Diffusion 1.x/2.x\), mas sdxl é um SDXL"):
        opened(bases["sdxl"], family="sd15")
    with pytest.raises(SourceError, match="familia: sdxl"):
        opened(bases["sd1"], family="sdxl")
    with pytest.raises(ConfigError, match="'sd5'"):
        opened(bases["sd1"], family="sd5")


def test_no_base_is_said() -> None:
    with pytest.raises(ConfigError, match=r"falta modelo\.modelo_base"):
        resolve(ModelConfig(), DataConfig())


@pytest.mark.parametrize(("channels", "name"), [(9, "inpainting (9 canais)"), (8, "pix2pix"), (5, "profundidade")])
def test_variants_with_more_channels_are_refused(tmp_path: Path, channels: int, name: str) -> None:
    def widen(configs: dict[str, dict[str, Any]]) -> None:
        configs["unet"]["in_channels"] = channels

    write_single_file(tmp_path / "m.safetensors", "sd1", change=widen)
    with pytest.raises(SourceError, match=re.escape(name)) as caught:
        opened(tmp_path / "m.safetensors")
    assert "modelo base comum" in caught.value.hint
    write_folder(tmp_path / "folder", "sd1")
    config = tmp_path / "folder" / "unet" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"in_channels": channels}))
    with pytest.raises(SourceError, match=re.escape(name)):
        opened(tmp_path / "folder")


@pytest.mark.parametrize(
    ("names", "like"),
    [
        (["lora_unet_x.lora_down.weight"], "um LoRA"),
        (["encoder.conv_in.weight", "decoder.conv_in.weight"], "um VAE"),
        (["controlnet_cond_embedding.conv_in.weight"], "um ControlNet"),
        (["encoder.block.0.layer.0.SelfAttention.q.weight"], "T5"),
        (["model.diffusion_model.input_blocks.0.0.weight"], "só uma UNet"),
        (["a"], "não reconheço"),
    ],
)
def test_wrong_files_in_the_base_slot_are_named(tmp_path: Path, names: list[str], like: str) -> None:
    save_file({name: torch.zeros(4, 4, 3, 3) for name in names}, tmp_path / "m.safetensors")
    with pytest.raises(SourceError, match=like) as caught:
        opened(tmp_path / "m.safetensors")
    assert caught.value.hint


# -- what the model predicts


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("predicts", ["epsilon", "v_prediction"])
def test_a_folder_says_what_it_predicts(tmp_path: Path, release: str, predicts: str) -> None:
    write_folder(tmp_path / "m", release, prediction_type=predicts)
    assert opened(tmp_path / "m").prediction_type == predicts


def test_sdxl_files_mark_v_prediction_and_zero_snr(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_single_file(path, "sdxl")
    plain = opened(path, prediction_type="auto")
    assert plain.prediction_type == "epsilon"
    assert not plain.schedule_config.get("rescale_betas_zero_snr")
    write_single_file(path, "sdxl", extra={"v_pred": torch.tensor([]), "ztsnr": torch.tensor([])})
    family = opened(path, prediction_type="auto")
    assert family.prediction_type == "v_prediction"
    assert family.schedule_config["rescale_betas_zero_snr"]
    assert family.metadata()["modelspec.prediction_type"] == "v"


def test_an_sd2_file_must_be_told(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_single_file(path, "sd2")
    with pytest.raises(SourceError, match="não diz se prevê epsilon ou v") as caught:
        opened(path, prediction_type="auto")
    assert "modelo.tipo_predicao" in caught.value.hint
    assert opened(path, prediction_type="v_prediction").prediction_type == "v_prediction"
    write_single_file(path, "sd2", metadata={"modelspec.prediction_type": "v"})
    assert opened(path, prediction_type="auto").prediction_type == "v_prediction"


def test_the_users_word_wins_and_is_said(tmp_path: Path) -> None:
    write_folder(tmp_path / "m", "sd1", prediction_type="epsilon")
    family = opened(tmp_path / "m", prediction_type="v_prediction")
    assert family.prediction_type == "v_prediction"
    assert any("modelo.tipo_predicao" in notice for notice in family.notices)


# -- text, against diffusers' own pipelines


def pipeline(path: Path) -> Any:
    kind = StableDiffusionXLPipeline if path.name == "sdxl" else StableDiffusionPipeline
    return kind.from_pretrained(str(path), torch_dtype=torch.float32)


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("caption", [CAPTION, "", "cat " * 90])
def test_prompt_embeds_are_those_of_the_pipeline(bases: dict[str, Path], release: str, caption: str) -> None:
    family = opened(bases[release])
    (encoded,) = family.encode_text(family.load_text_encoders(CPU, torch.float32), [caption])
    theirs = pipeline(bases[release]).encode_prompt(
        caption, device=CPU, num_images_per_prompt=1, do_classifier_free_guidance=False
    )
    torch.testing.assert_close(encoded["prompt_embeds"], theirs[0][0], rtol=1e-5, atol=1e-5)
    if release == "sdxl":
        torch.testing.assert_close(encoded["pooled_embeds"], theirs[2][0], rtol=1e-5, atol=1e-5)


def test_clip_skip_2_is_an_encoder_without_its_last_layer(bases: dict[str, Path]) -> None:
    """With the final norm. (diffusers' own clip_skip fails with transformers 5.)"""
    family = opened(bases["sd1"], clip_skip=2)
    encoders = family.load_text_encoders(CPU, torch.float32)
    (encoded,) = family.encode_text(encoders, [CAPTION])
    _unet.text_body(encoders["text_encoder"]).encoder.layers.pop(-1)
    (expected,) = opened(bases["sd1"]).encode_text(encoders, [CAPTION])
    torch.testing.assert_close(encoded, expected, rtol=1e-5, atol=1e-5)
    assert family.text_fingerprint() != opened(bases["sd1"]).text_fingerprint()


@pytest.mark.parametrize(("release", "clip_skip"), [("sd1", 3), ("sd2", 3), ("sdxl", 3)])
def test_a_clip_skip_that_cannot_be_is_refused(bases: dict[str, Path], release: str, clip_skip: int) -> None:
    with pytest.raises(ConfigError, match="pular_clip: 3"):
        opened(bases[release], clip_skip=clip_skip)


@pytest.mark.parametrize("release", RELEASES)
def test_long_captions_are_chunks_end_to_end(bases: dict[str, Path], release: str) -> None:
    short, long = opened(bases[release]), opened(bases[release], tokens=225)
    encoders = short.load_text_encoders(CPU, torch.float32)
    (whole,) = long.encode_text(encoders, ["cat " * 75 + "red"])
    first, second, empty = short.encode_text(encoders, ["cat " * 75, "red", ""])
    assert len(whole["prompt_embeds"]) == 3 * 77
    parts = torch.cat([first["prompt_embeds"], second["prompt_embeds"], empty["prompt_embeds"]])
    torch.testing.assert_close(whole["prompt_embeds"], parts, rtol=1e-5, atol=1e-5)
    if release == "sdxl":
        torch.testing.assert_close(whole["pooled_embeds"], first["pooled_embeds"], rtol=1e-5, atol=1e-5)
    assert short.truncate_report("cat " * 75 + "red") == (76, "red")
    assert long.truncate_report("cat " * 75 + "red") == (76, "")
    assert short.count_tokens(CAPTION) == 7


@pytest.mark.parametrize("release", RELEASES)
def test_captions_encoded_in_training_equal_cached_ones_and_carry_gradients(
    bases: dict[str, Path], release: str
) -> None:
    family = opened(bases[release])
    model = family.load_model(CPU, torch.float32, with_text=True)
    for parameter in model.parameters():
        parameter.requires_grad_(True)
    images = family.encode_image(
        family.load_vae(CPU, torch.float32), torch.zeros(2, 3, 32, 32), [Framing((32, 32), (0, 0), (32, 32))] * 2
    )
    captions = [CAPTION, "red"]

    def stacked(texts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        rows = [image | text for image, text in zip(images, texts, strict=True)]
        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}

    live, cached = stacked(family.tokenize(captions)), stacked(family.encode_text(model, captions))
    timesteps = torch.tensor([3, 900])
    predicted = family.predict(model, live["latents"], timesteps, live)
    torch.testing.assert_close(predicted, family.predict(model, cached["latents"], timesteps, cached))
    predicted.square().sum().backward()
    for name in family.export_prefixes():
        assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in model[name].parameters()), name


# -- pictures


@pytest.mark.parametrize("release", RELEASES)
def test_latents_are_the_scaled_mean_of_the_vae(bases: dict[str, Path], release: str) -> None:
    family = opened(bases[release])
    vae = family.load_vae(CPU, torch.float32)
    pixels = torch.rand(2, 3, 32, 64, generator=torch.Generator().manual_seed(1)) * 2 - 1
    encoded = family.encode_image(vae, pixels, [Framing((100, 50), (6, 2), (64, 32))] * 2)
    scaling = 0.13025 if release == "sdxl" else 0.18215
    assert encoded[1]["latents"].shape == (4, 4, 8)  # an eighth
    with torch.no_grad():
        expected = vae.encode(pixels).latent_dist.mode() * scaling
        decoded = vae.decode(expected / scaling).sample.clamp(-1, 1)
    assert torch.equal(torch.stack([example["latents"] for example in encoded]), expected)
    torch.testing.assert_close(family.decode_image(vae, expected), decoded, rtol=1e-4, atol=1e-4)


def test_sdxl_sizes_are_in_diffusers_order(bases: dict[str, Path]) -> None:
    framing = Framing(original=(1000, 500), crop=(30, 20), target=(64, 32))
    theirs = StableDiffusionXLPipeline._get_add_time_ids
    pipe = pipeline(bases["sdxl"])
    expected = theirs(pipe, (500, 1000), (20, 30), (32, 64), torch.float32, text_encoder_projection_dim=40)
    assert torch.equal(time_ids(framing), expected[0])
    family = opened(bases["sdxl"])
    assert family.preview_conditions((64, 32))["time_ids"].tolist() == [32, 64, 0, 0, 32, 64]


def test_sdxls_vae_never_runs_in_fp16(tmp_path: Path, bases: dict[str, Path]) -> None:
    fp16, bf16, fp32 = torch.float16, torch.bfloat16, torch.float32
    family = opened(bases["sdxl"])
    for wanted, real in ((fp16, fp32), (bf16, bf16), (fp32, fp32)):
        assert next(family.load_vae(CPU, wanted).parameters()).dtype is real is family.vae_dtype(wanted)
    assert next(opened(bases["sd1"]).load_vae(CPU, fp16).parameters()).dtype is fp16
    write_folder(tmp_path / "mended", "sdxl")
    config = tmp_path / "mended" / "vae" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"force_upcast": False}))
    assert opened(tmp_path / "mended").vae_dtype(fp16) is fp16


@pytest.mark.parametrize("on", [False, True])
def test_pictures_pass_as_the_vae_is_set(bases: dict[str, Path], monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    """Whole or in tiles: who calls decides, not the family."""
    family = opened(bases["sd1"])
    vae = family.load_vae(CPU, torch.float32)
    calls = []
    for name in ("tiled_decode", "_tiled_encode"):
        original = getattr(vae, name)
        monkeypatch.setattr(vae, name, lambda *a, o=original, **k: calls.append(1) or o(*a, **k))
    with tiled(vae, on, tile_pixels=64):
        assert family.decode_image(vae, torch.zeros(1, 4, 12, 8)).shape == (1, 3, 96, 64)
        (example,) = family.encode_image(vae, torch.zeros(1, 3, 96, 64), [Framing((64, 96), (0, 0), (64, 96))])
    assert example["latents"].shape == (4, 12, 8)
    assert len(calls) == 2 * on


# -- fingerprints


@pytest.mark.parametrize("release", RELEASES)
def test_fingerprints_follow_the_content_not_the_place(tmp_path: Path, bases: dict[str, Path], release: str) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        write_single_file(tmp_path / folder / "m.safetensors", release)
    first, second = (opened(tmp_path / folder / "m.safetensors") for folder in ("a", "b"))
    assert first.text_fingerprint() == second.text_fingerprint()
    assert first.image_fingerprint() == second.image_fingerprint()
    assert first.text_fingerprint() != opened(tmp_path / "a" / "m.safetensors", tokens=150).text_fingerprint()
    header = first.source.header
    for key, changed in (("vae", "first_stage_model"), ("text", "embeddings")):
        name = next(n for n in header if changed in n or (key == "text" and "token_embedding" in n))
        with (tmp_path / "b" / "m.safetensors").open("r+b") as file:
            file.seek(header[name].offset + header[name].nbytes // 2)
            file.write(b"\x01")
        other = opened(tmp_path / "b" / "m.safetensors")
        assert other.image_fingerprint() != first.image_fingerprint()
        assert (other.text_fingerprint() != first.text_fingerprint()) == (key == "text")


# -- layers


@pytest.mark.parametrize("release", RELEASES)
def test_targets_are_the_layers_they_name(bases: dict[str, Path], release: str) -> None:
    model = opened(bases[release]).load_model(torch.device("meta"), torch.float32, with_text=True)
    layers = {n for n, m in model.named_modules() if isinstance(m, (torch.nn.Linear, torch.nn.Conv2d))}
    chosen = {
        preset: {name for name in layers if re.fullmatch(pattern, name)}
        for preset, pattern in _unet.LORA_TARGETS.items()
    }
    assert chosen["attention"] < chosen["attention+mlp"] < chosen["all"]
    assert all(re.search(r"\.attn[12]\.to_", name) for name in chosen["attention"])
    attentions = [n for n, m in model.named_modules() if type(m).__name__ == "Attention" and n.startswith("unet.")]
    assert len(chosen["attention"]) == 4 * len(attentions)
    left = {name for name in layers if name.startswith("unet.")} - chosen["all"]
    assert {name.split(".")[1] for name in left} <= {"conv_in", "conv_out", "time_embedding", "add_embedding"}
    text = {name for name in layers if re.fullmatch(_unet.TEXT_TARGETS, name)}
    encoders = {"text_encoder": 2, "text_encoder_2": 3} if release == "sdxl" else {"text_encoder": 2}
    assert len(text) == 6 * sum(encoders.values())
    # nothing but layers matches, so that a pattern can be given to peft as it is
    everything = {n for n, _ in model.named_modules()}
    assert {n for n in everything if re.fullmatch(_unet.LORA_TARGETS["all"], n)} <= layers


@pytest.mark.parametrize("release", RELEASES)
def test_blocks_are_all_there_in_execution_order(bases: dict[str, Path], release: str) -> None:
    family = opened(bases[release])
    model = family.load_model(CPU, torch.float32)
    blocks = [block for group in family.blocks(model) for block in group.blocks]
    found = [m for m in model["unet"].modules() if isinstance(m, _unet.BLOCK_TYPES)]
    assert {id(block) for block in blocks} == {id(block) for block in found}
    order: list[int] = []
    for block in blocks:
        block.register_forward_pre_hook(lambda module, _: order.append(id(module)))
    batch = family.example_batch(1, (64, 64))
    family.predict(model, batch["latents"], torch.tensor([5]), batch)
    assert order == [id(block) for block in blocks]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("train_text", [False, True])
def test_the_example_batch_trains(bases: dict[str, Path], release: str, train_text: bool) -> None:
    family = opened(bases[release], tokens=150, train_text_encoder=train_text)
    family.configure(TrainingConfig(), DataConfig())
    model = family.load_model(CPU, torch.float32, with_text=train_text)
    batch = family.example_batch(2, (64, 32))
    assert batch["latents"].shape == (2, 4, 4, 8)
    loss = family.loss(model, batch)
    assert loss.shape == ()
    assert loss.isfinite()
    (caption,) = family.tokenize(["cat"]) if train_text else family.encode_text(
        family.load_text_encoders(CPU, torch.float32), ["cat"])  # fmt: skip
    for name, value in caption.items():
        assert batch[name].shape[1:] == value.shape, name


# -- output


@pytest.mark.parametrize(
    ("release", "architecture", "version"),
    [("sd1", "stable-diffusion-v1/lora", "sd_v1"), ("sd2", "stable-diffusion-v2-512/lora", "sd_v2"),
     ("sdxl", "stable-diffusion-xl-v1-base/lora", "sdxl_base_v1-0")],
)  # fmt: skip
def test_metadata_names_the_base(bases: dict[str, Path], release: str, architecture: str, version: str) -> None:
    metadata = opened(bases[release]).metadata()
    assert metadata["modelspec.architecture"] == architecture
    assert metadata["ss_base_model_version"] == version
    assert all(isinstance(value, str) for value in metadata.values())
    assert str(bases[release].parent) not in json.dumps(metadata)


# -- memory


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A UNet of 20 million parameters in float16."""

    def widen(configs: dict[str, dict[str, Any]]) -> None:
        configs["unet"] |= {"block_out_channels": [160, 320]}

    path: Path = tmp_path_factory.mktemp("wide") / "m.safetensors"
    write_single_file(path, "sd1", dtype=torch.float16, change=widen)
    return path


def memory_bytes(field: str) -> int:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+)", status)[1]) * 1024  # type: ignore[index]


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs Linux's resettable peak")
@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16, torch.float32])
def test_loading_holds_little_more_than_the_component(wide: Path, wanted: torch.dtype) -> None:
    """Case F07: peak RSS under 1.5 times the component in the wanted dtype, also when every tensor is cast."""
    family = opened(wide)
    family.load_vae(CPU, wanted)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    before = memory_bytes("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")
    unet = family.load_model(CPU, wanted)["unet"]
    peak = memory_bytes("VmHWM") - before
    size = sum(p.numel() * p.element_size() for p in unet.parameters())
    assert size == family.components["unet"].num_bytes(wanted) > 30e6
    assert 0.8 * size < peak < 1.5 * size + (4 << 20)  # and what allocators keep
