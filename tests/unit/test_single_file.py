"""Original single files load bit for bit as diffusers loads them, whatever their dtype or wrapping (G06 G09 G11)."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import AutoencoderKL, StableDiffusionPipeline, StableDiffusionXLPipeline
from helpers.original_checkpoint import tiny_configs, write_folder, write_single_file
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from lora_trainer.bases import architecture, components
from lora_trainer.config.schema import DataConfig, ModelConfig
from lora_trainer.errors import SourceError
from lora_trainer.families import resolve
from lora_trainer.seam.family import Family

CPU = torch.device("cpu")
RELEASES = ("sd1", "sd2", "sdxl")


def opened(path: Path, **settings: Any) -> Any:
    words = path.parent / "words"
    if path.is_file():
        settings.setdefault("tokenizer", str(words))
    settings.setdefault("prediction_type", "epsilon")
    family: Family = resolve(ModelConfig(base_model=str(path), **settings), DataConfig())
    return family


def assert_equal(module: nn.Module, expected: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    own, other = module.state_dict(), expected.state_dict()
    bare = {name.removeprefix("text_model."): value for name, value in other.items()}
    assert {name.removeprefix("text_model.") for name in own} == bare.keys()
    for name, value in own.items():
        assert value.dtype is dtype
        assert torch.equal(value, bare[name.removeprefix("text_model.")].to(dtype)), name


def all_parts(family: Any, dtype: torch.dtype = torch.float32) -> dict[str, nn.Module]:
    return {name: component.load(CPU, dtype) for name, component in family.components.items()}


# -- diffusers as the oracle


@pytest.mark.parametrize("release", RELEASES)
def test_weights_are_those_of_diffusers_loader(tmp_path: Path, release: str) -> None:
    write_folder(tmp_path / "configs", release)
    write_single_file(tmp_path / "m.safetensors", release)
    pipeline = StableDiffusionXLPipeline if release == "sdxl" else StableDiffusionPipeline
    oracle = pipeline.from_single_file(
        str(tmp_path / "m.safetensors"),
        config=str(tmp_path / "configs"),
        local_files_only=True,
        torch_dtype=torch.float32,
    )
    for name, module in all_parts(opened(tmp_path / "m.safetensors")).items():
        assert_equal(module, getattr(oracle, name))


@pytest.mark.parametrize("release", RELEASES)
def test_a_folder_and_its_variants(tmp_path: Path, release: str) -> None:
    made = write_folder(tmp_path / "plain", release)
    for name, module in all_parts(opened(tmp_path / "plain")).items():
        assert_equal(module, made[name])
    half = write_folder(tmp_path / "half", release, variant="fp16", dtype=torch.float16)
    for name, module in all_parts(opened(tmp_path / "half"), torch.bfloat16).items():
        assert_equal(module, half[name], torch.bfloat16)


def test_sharded_folder(tmp_path: Path) -> None:
    made = write_folder(tmp_path / "m", "sd1")
    (tmp_path / "m" / "unet" / "diffusion_pytorch_model.safetensors").unlink()
    made["unet"].save_pretrained(tmp_path / "m" / "unet", max_shard_size="200KB")
    assert len(list((tmp_path / "m" / "unet").glob("*.safetensors"))) > 2
    assert_equal(all_parts(opened(tmp_path / "m"))["unet"], made["unet"])


# -- the shapes that files come in


@pytest.mark.parametrize("stored", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("wanted", [torch.float16, torch.bfloat16, torch.float32])
def test_any_stored_dtype_becomes_the_wanted_one(tmp_path: Path, stored: torch.dtype, wanted: torch.dtype) -> None:
    made = write_single_file(tmp_path / "m.safetensors", "sd1", dtype=stored)
    expected = made["unet"].to(stored)
    assert_equal(opened(tmp_path / "m.safetensors").load_model(CPU, wanted)["unet"], expected, wanted)


def test_fp8_with_scales_is_read_with_them(tmp_path: Path) -> None:
    made = write_single_file(tmp_path / "m.safetensors", "sdxl")
    state = load_file(tmp_path / "m.safetensors")
    scaled: dict[str, Tensor] = {"scaled_fp8": torch.zeros(2).to(torch.float8_e4m3fn)}
    for index, (key, value) in enumerate(state.items()):
        if key.startswith("model.diffusion_model.") and value.ndim == 2:
            rows = index % 2 and not key.endswith("in_proj_weight")  # one scale, or one for each row
            scale = value.abs().amax(1, keepdim=True) / 448 if rows else (value.abs().max() / 448)
            scaled[key] = (value / scale).to(torch.float8_e4m3fn)
            scaled[key.removesuffix("weight") + "scale_weight"] = scale
            scaled[key.removesuffix("weight") + "scale_input"] = torch.tensor(1.0)
        else:
            scaled[key] = value
    save_file(scaled, tmp_path / "m.safetensors")
    family = opened(tmp_path / "m.safetensors")
    unet = family.load_model(CPU, torch.float32)["unet"]
    for name, value in made["unet"].state_dict().items():
        got = unet.state_dict()[name]
        assert (got - value).abs().max() <= 0.0725 * value.abs().max()  # e4m3 rounds to 1/16, scaled to the largest
    assert not any("não são usados" in notice for notice in family.notices)


def test_fp8_without_scales_is_a_plain_cast(tmp_path: Path) -> None:
    made = write_single_file(tmp_path / "m.safetensors", "sd1", dtype=torch.float8_e4m3fn)
    expected = made["unet"].to(torch.float8_e4m3fn).to(torch.float16)
    assert_equal(opened(tmp_path / "m.safetensors").load_model(CPU, torch.float16)["unet"], expected, torch.float16)


def test_the_trained_weights_win_over_the_average(tmp_path: Path) -> None:
    def squash(key: str) -> str:
        return "model_ema." + key.removeprefix("model.").replace(".", "")

    made = write_single_file(tmp_path / "m.safetensors", "sd1")
    state = load_file(tmp_path / "m.safetensors")
    unet = [key for key in state if key.startswith("model.diffusion_model.")]
    save_file(state | {squash(key): state[key] + 1 for key in unet}, tmp_path / "m.safetensors")
    family = opened(tmp_path / "m.safetensors")
    assert_equal(family.load_model(CPU, torch.float32)["unet"], made["unet"])
    assert not any("não são usados" in notice for notice in family.notices)
    # and where there is only the average, it is what is loaded
    save_file({squash(key) if key in unet else key: value for key, value in state.items()}, tmp_path / "m.safetensors")
    assert_equal(opened(tmp_path / "m.safetensors").load_model(CPU, torch.float32)["unet"], made["unet"])


def test_a_lightning_checkpoint_with_its_ballast(tmp_path: Path) -> None:
    ballast = {
        "state_dict.alphas_cumprod": torch.zeros(4), "state_dict.sqrt_one_minus_alphas_cumprod": torch.zeros(4),
        "state_dict.betas": torch.zeros(4), "state_dict.posterior_variance": torch.zeros(4),
        "global_step": torch.zeros(1),
        "state_dict.cond_stage_model.transformer.text_model.embeddings.position_ids": torch.arange(77)[None],
        "state_dict.first_stage_model.loss.logvar": torch.zeros(1), "state_dict.model_ema.decay": torch.zeros(1),
    }  # fmt: skip
    path = tmp_path / "m.safetensors"
    made = write_single_file(path, "sd1", rename=lambda key: f"state_dict.{key}", extra=ballast)
    family = opened(path)
    for name, module in all_parts(family).items():
        assert_equal(module, made[name])
    assert not any("não são usados" in notice for notice in family.notices)


@pytest.mark.parametrize(
    "rename",
    [
        lambda key: key.replace("transformer.text_model.", "transformer."),
        lambda key: key,
    ],
)
def test_both_spellings_of_the_text_encoder(tmp_path: Path, rename: Callable[[str], str]) -> None:
    made = write_single_file(tmp_path / "m.safetensors", "sd1", rename=rename)
    assert_equal(all_parts(opened(tmp_path / "m.safetensors"))["text_encoder"], made["text_encoder"])


def test_sd2s_last_unused_layer_is_left_out(tmp_path: Path) -> None:
    def deep(configs: dict[str, dict[str, Any]]) -> None:
        configs["text_encoder"]["num_hidden_layers"] = 24

    write_single_file(tmp_path / "m.safetensors", "sd2", change=deep)
    family = opened(tmp_path / "m.safetensors")
    assert family.components["text_encoder"].config["num_hidden_layers"] == 23
    assert not any("não são usados" in notice for notice in family.notices)


def test_two_text_encoders_of_one_width_keep_their_weights(tmp_path: Path) -> None:
    """diffusers' loader tells them apart by width, and mixes these up."""

    def same(configs: dict[str, dict[str, Any]]) -> None:
        configs["text_encoder_2"].update(
            {k: configs["text_encoder"][k] for k in ("hidden_size", "intermediate_size", "num_hidden_layers")}
        )
        configs["unet"]["cross_attention_dim"] = 64

    made = write_single_file(tmp_path / "m.safetensors", "sdxl", change=same)
    parts = all_parts(opened(tmp_path / "m.safetensors"))
    assert_equal(parts["text_encoder"], made["text_encoder"])
    assert_equal(parts["text_encoder_2"], made["text_encoder_2"])


def shrunk(configs: dict[str, dict[str, Any]]) -> None:
    """As SSD-1B: depths that differ within a level and from down to up, nothing but a residual block in the middle."""
    configs["unet"] |= {
        "block_out_channels": [32, 32, 64], "layers_per_block": 2, "attention_head_dim": [1, 1, 1],
        "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"],
        "up_block_types": ["CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"],
        "transformer_layers_per_block": [1, [1, 2], [2, 2]],
        "reverse_transformer_layers_per_block": [[2, 2, 3], [2, 1, 1], 1], "mid_block_type": "UNetMidBlock2D",
    }  # fmt: skip


def one_transformer_in_the_middle(configs: dict[str, dict[str, Any]]) -> None:
    configs["unet"] |= {"transformer_layers_per_block": [1, 3]}


@pytest.mark.parametrize("change", [shrunk, one_transformer_in_the_middle])
def test_shrunk_sdxl_is_derived_from_its_tensors(tmp_path: Path, change: Callable[[Any], None]) -> None:
    made = write_single_file(tmp_path / "m.safetensors", "sdxl", change=change)
    family = opened(tmp_path / "m.safetensors")
    unet = family.load_model(CPU, torch.float32)["unet"]
    assert_equal(unet, made["unet"])
    x, t = torch.randn(1, 4, 8, 8), torch.tensor([10])
    condition = {"text_embeds": torch.randn(1, 40), "time_ids": torch.zeros(1, 6)}
    words = torch.randn(1, 77, 96)
    outputs = [m(x, t, words, added_cond_kwargs=condition).sample for m in (unet, made["unet"])]
    assert torch.equal(*outputs)


# -- what a header cannot tell


def test_unusual_widths_are_said_once_and_the_folder_overrides(tmp_path: Path) -> None:
    def groups(configs: dict[str, dict[str, Any]]) -> None:
        configs["unet"]["norm_num_groups"] = 8

    made = write_single_file(tmp_path / "m.safetensors", "sd1", change=groups)
    (notice,) = opened(tmp_path / "m.safetensors").notices
    assert "unet: 32 grupos de normalização" in notice
    assert "modelo.arquitetura" in notice
    (tmp_path / "arch" / "unet").mkdir(parents=True)
    (tmp_path / "arch" / "unet" / "config.json").write_text(json.dumps(dict(made["unet"].config)))
    family = opened(tmp_path / "m.safetensors", architecture=str(tmp_path / "arch"))
    unet = family.load_model(CPU, torch.float32)["unet"]
    assert unet.config.norm_num_groups == 8
    assert "unet" not in family.notices[0]


def test_a_wrong_architecture_folder_is_refused_before_weights_are_read(tmp_path: Path) -> None:
    made = write_single_file(tmp_path / "m.safetensors", "sd1")
    (tmp_path / "arch" / "unet").mkdir(parents=True)
    wrong = dict(made["unet"].config) | {"cross_attention_dim": 48}
    (tmp_path / "arch" / "unet" / "config.json").write_text(json.dumps(wrong))
    with pytest.raises(SourceError, match="têm outro formato") as caught:
        opened(tmp_path / "m.safetensors", architecture=str(tmp_path / "arch"))
    assert len(str(caught.value)) < 800  # never a thousand-line list


@pytest.mark.parametrize("release", RELEASES)
def test_missing_tensors_are_named(tmp_path: Path, release: str) -> None:
    def drop(key: str) -> str | None:
        return None if "middle_block.0" in key else key

    write_single_file(tmp_path / "m.safetensors", release, rename=drop)
    with pytest.raises(SourceError, match="unet: faltam 10 tensores") as caught:
        opened(tmp_path / "m.safetensors")
    assert "middle_block.0.emb_layers.1.bias" in caught.value.problem


def test_unknown_tensors_of_the_unet_are_refused_others_are_said(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_single_file(path, "sd1", extra={"model.diffusion_model.extra.weight": torch.zeros(1)})
    with pytest.raises(SourceError, match=r"model\.diffusion_model\.extra\.weight"):
        opened(path)
    write_single_file(path, "sd1", extra={"safety.weight": torch.zeros(1)})
    assert any("safety.weight" in notice for notice in opened(path).notices)


def test_integer_quantised_weights_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_single_file(path, "sd1", dtype=torch.int8)
    with pytest.raises(SourceError, match="estão quantizados"):
        opened(path)


# -- a VAE of its own


def vae_file(path: Path, names: str) -> AutoencoderKL:
    configs = tiny_configs("sd1", 600)
    torch.manual_seed(7)
    vae: AutoencoderKL = components.BUILDERS["vae"](configs["vae"])  # type: ignore[assignment]
    if names == "folder":
        vae.save_pretrained(path)
        return vae
    state = vae.state_dict()
    if names == "old diffusers":
        old = {"to_q": "query", "to_k": "key", "to_v": "value", "to_out.0": "proj_attn"}
        for new_name, old_name in old.items():
            state = {key.replace(f"attentions.0.{new_name}", f"attentions.0.{old_name}"): v for key, v in state.items()}
    if names == "ldm":
        from lora_trainer.bases.single_file import locate_vae
        from lora_trainer.files.kinds import Part

        locate = locate_vae(Part({}, ""), configs["vae"])
        state = {locate(key)[0].key: value for key, value in state.items()}
    save_file(state, path)
    return vae


@pytest.mark.parametrize("names", ["ldm", "diffusers", "old diffusers", "folder"])
def test_a_separate_vae(tmp_path: Path, names: str) -> None:
    write_single_file(tmp_path / "m.safetensors", "sd1")
    expected = vae_file(tmp_path / "vae.safetensors", names)
    family = opened(tmp_path / "m.safetensors", vae=str(tmp_path / "vae.safetensors"))
    assert_equal(family.load_vae(CPU, torch.float32), expected)
    assert family.image_fingerprint() != opened(tmp_path / "m.safetensors").image_fingerprint()


def test_a_checkpoint_without_vae_asks_for_one(tmp_path: Path) -> None:
    path = tmp_path / "m.safetensors"
    write_single_file(path, "sd1", rename=lambda key: None if key.startswith("first_stage_model.") else key)
    with pytest.raises(SourceError, match="não traz o VAE"):
        opened(path)
    vae_file(tmp_path / "vae.safetensors", "ldm")
    assert opened(path, vae=str(tmp_path / "vae.safetensors"))


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("encoder.block.0.layer.0.SelfAttention.q.weight", "um codificador de texto T5"),
        ("text_model.embeddings.token_embedding.weight", "um codificador de texto CLIP"),
        ("lora_unet_x.lora_down.weight", "um LoRA"),
        ("double_blocks.0.img_attn.qkv.weight", "um FLUX.1"),
    ],
)
def test_a_wrong_file_in_the_vae_slot_is_named(tmp_path: Path, name: str, like: str) -> None:
    write_single_file(tmp_path / "m.safetensors", "sd1")
    save_file({name: torch.zeros(2, 2)}, tmp_path / "other.safetensors")
    with pytest.raises(SourceError) as caught:
        opened(tmp_path / "m.safetensors", vae=str(tmp_path / "other.safetensors"))
    assert caught.value.where == "modelo.vae"
    assert f"este arquivo parece {like}" in caught.value.problem


def test_a_vae_with_other_channels_is_refused(tmp_path: Path) -> None:
    write_single_file(tmp_path / "m.safetensors", "sd1")
    vae = components.BUILDERS["vae"](tiny_configs("sd1", 600)["vae"] | {"latent_channels": 16})
    save_file(vae.state_dict(), tmp_path / "vae.safetensors")
    with pytest.raises(SourceError, match="o VAE tem 16 canais e o modelo espera 4"):
        opened(tmp_path / "m.safetensors", vae=str(tmp_path / "vae.safetensors"))


@pytest.mark.parametrize(("base", "other"), [("sd1", "sdxl"), ("sdxl", "sd1"), ("sdxl", "sd2")])
@pytest.mark.parametrize("kind", ["checkpoint", "folder", "vae folder", "marked file"])
def test_a_vae_of_another_family_is_refused_where_it_tells(tmp_path: Path, base: str, other: str, kind: str) -> None:
    """The shapes are the same, so nothing else would notice."""
    write_single_file(tmp_path / "m.safetensors", base)
    path = tmp_path / "other"
    if kind == "checkpoint":
        path = tmp_path / "other.safetensors"
        write_single_file(path, other)
    elif kind == "folder":
        write_folder(path, other)
    else:
        factor = 0.13025 if other == "sdxl" else 0.18215
        vae = components.BUILDERS["vae"](tiny_configs(other, 600)["vae"] | {"scaling_factor": factor})
        mark = {"sd1": "v1", "sd2": "v2-512", "sdxl": "xl-v1-base"}[other]
        if kind == "vae folder":
            vae.save_pretrained(path)  # type: ignore[operator]
        else:
            path = tmp_path / "other.safetensors"
            save_file(vae.state_dict(), path, {"modelspec.architecture": f"stable-diffusion-{mark}"})
    with pytest.raises(SourceError, match=r"traz o VAE de .+, e o modelo base é") as caught:
        opened(tmp_path / "m.safetensors", vae=str(path))
    assert caught.value.where == "modelo.vae"


def test_a_checkpoint_of_the_same_latents_may_lend_its_vae(tmp_path: Path) -> None:
    write_single_file(tmp_path / "m.safetensors", "sd1")
    write_single_file(tmp_path / "other.safetensors", "sd2")
    assert opened(tmp_path / "m.safetensors", vae=str(tmp_path / "other.safetensors"))


# -- the released models


@pytest.mark.parametrize(
    ("release", "component", "parameters"),
    [
        ("sd1", "unet", 859_520_964), ("sd2", "unet", 865_910_724), ("sdxl", "unet", 2_567_463_684),
        ("sd1", "vae", 83_653_863), ("sdxl", "vae", 83_653_863), ("sd1", "text_encoder", 123_060_480),
        ("sd2", "text_encoder", 340_387_840), ("sdxl", "text_encoder_2", 694_659_840),
    ],
)  # fmt: skip
def test_shipped_architectures_have_the_published_sizes(release: str, component: str, parameters: int) -> None:
    with torch.device("meta"):
        module = components.BUILDERS[component](architecture.shipped(release, component))
    assert sum(parameter.numel() for parameter in module.parameters()) == parameters


@pytest.mark.parametrize("release", RELEASES)
def test_the_released_config_is_derived_from_its_own_tensors(release: str) -> None:
    """The shapes of a full-size file, without the file: derivation gives back what is shipped, and says nothing."""
    from helpers.original_checkpoint import original_names

    from lora_trainer.files.headers import TensorInfo
    from lora_trainer.files.sources import Source

    configs = {name: architecture.shipped(release, name) for name in tiny_configs(release, 600)}
    with torch.device("meta"):
        modules = {name: components.BUILDERS[name](config) for name, config in configs.items()}
        state = original_names(release, modules, configs)
    header = {key: TensorInfo("F16", tuple(value.shape), value.numel() * 2) for key, value in state.items()}
    source = Source(Path("full.safetensors"), "file", "modelo_base", header)
    networks = components.open_networks(source, ModelConfig(), release)
    assert networks.notices == []
    for name, config in configs.items():
        derived = networks.components[name].config
        assert {key: derived[key] for key in config} == config, name


def test_meta_builds_the_same_modules_without_weights(tmp_path: Path) -> None:
    write_single_file(tmp_path / "m.safetensors", "sdxl")
    family = opened(tmp_path / "m.safetensors")
    empty = family.load_model(torch.device("meta"), torch.float16, with_text=True)
    full = family.load_model(CPU, torch.float16, with_text=True)
    shapes = [{name: (p.shape, p.dtype) for name, p in model.named_parameters()} for model in (empty, full)]
    assert shapes[0] == shapes[1]
    assert all(p.is_meta for p in empty.parameters())
    assert not any(p.requires_grad or p.is_meta for p in full.parameters())
    assert not full.training
