"""FLUX.2's own: names as diffusers' converter has them, its VAE's files, which release a base is, refusals by name, notices."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.lora_conversion_utils import _convert_kohya_flux2_lora_to_diffusers
from diffusers.loaders.single_file_utils import convert_flux2_transformer_checkpoint_to_diffusers
from helpers.bases import of, weights, written
from helpers.llm_files import comfy_state, tiny_text_config, whole_model
from safetensors.torch import load_file, save_file

from lora_trainer import adapters
from lora_trainer.bases import four_bit
from lora_trainer.bases.architecture import shipped_folder
from lora_trainer.config.schema import DataConfig, ModelConfig
from lora_trainer.errors import SourceError
from lora_trainer.families import resolve
from lora_trainer.families.flux2.family import Flux2
from lora_trainer.files.sources import open_source
from lora_trainer.layouts import fused
from lora_trainer.layouts.lora import LoraModule

CPU = torch.device("cpu")
DEPTH = 4
KLEIN, DEV = of("flux2"), of("flux2", "dev")


def opened(options: dict[str, str], *, planning: bool = False, **more: Any) -> Flux2:
    family = resolve(ModelConfig(**{**options, **more}), DataConfig(), planning=planning)
    assert isinstance(family, Flux2)
    return family


def files(kind: str = "fp32") -> dict[str, str]:
    return written("flux2", kind)[0]


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], Any]:
    return DEV.write_files(tmp_path_factory.mktemp("dev"))


def save(path: Path, state: dict[str, torch.Tensor]) -> str:
    save_file({key: value.detach().contiguous().clone() for key, value in state.items()}, path)
    return str(path)


@pytest.mark.parametrize("base", [KLEIN, DEV], ids=["qwen3", "mistral"])
def test_our_names_are_the_converters(base):
    transformer = base.modules()["transformer"]
    state, own = base.stored_transformer(transformer), transformer.state_dict()
    theirs = convert_flux2_transformer_checkpoint_to_diffusers(dict(state))
    assert theirs.keys() == own.keys()
    assert all(torch.equal(theirs[key], own[key]) for key in own)
    assert ("guidance_in.in_layer.weight" in state) == (base is DEV)


def test_norms_may_be_spelled_weight(tmp_path):
    """As ComfyUI's own newer files have them."""
    options, modules = written("flux2", "fp32")
    state = {key.replace("_norm.scale", "_norm.weight"): value for key, value in load_file(options["base_model"]).items()}
    family = opened({**options, "base_model": save(tmp_path / "x.safetensors", state)})
    ours = family.load_model(CPU, torch.float32)["transformer"].state_dict()
    assert all(torch.equal(ours[key], value) for key, value in modules["transformer"].state_dict().items())


def test_a_transformer_under_diffusers_names_in_one_file(tmp_path):
    options, modules = written("flux2", "fp32")
    own = modules["transformer"].state_dict()
    family = opened({**options, "base_model": save(tmp_path / "diffusion_pytorch_model.safetensors", own)})
    ours = family.load_model(CPU, torch.float32)["transformer"].state_dict()
    assert all(torch.equal(ours[key], value) for key, value in own.items())


# -- the VAE


def test_the_vaes_file_is_black_forest_labs():
    """As diffusers' scripts/convert_flux2_to_diffusers.py reads it."""
    names = KLEIN.stored_vae(KLEIN.modules()["vae"])
    assert {
        "bn.running_mean", "bn.running_var", "encoder.quant_conv.weight", "decoder.post_quant_conv.bias",
        "encoder.down.3.block.0.conv1.weight", "decoder.up.0.block.0.conv1.weight", "encoder.mid.attn_1.q.weight",
    } <= names.keys()  # fmt: skip
    assert not any(name.startswith(("quant_conv", "post_quant_conv")) for name in names)


def test_a_vae_with_diffusers_names_and_a_narrower_decoder(tmp_path):
    """FLUX.2-small-decoder."""
    configs = KLEIN.configs()
    configs["vae"]["decoder_block_out_channels"] = [32, 32, 64, 64]
    vae = KLEIN.modules(configs)["vae"]
    own = {key: value for key, value in vae.state_dict().items() if key != "bn.num_batches_tracked"}
    for name, state in (("diffusers", own), ("original", KLEIN.stored_vae(vae))):
        family = opened({**files(), "vae": save(tmp_path / f"{name}.safetensors", state)})
        ours = family.load_vae(CPU, torch.float32).state_dict()
        assert ours.keys() == own.keys()
        assert all(torch.equal(ours[key], value) for key, value in own.items()), name


def test_a_folder_with_nothing_but_the_vae():
    options, modules = written("flux2", "folder")
    folder = f"{options['base_model']}/vae"
    ours = opened({**files(), "vae": folder}).load_vae(CPU, torch.float32).state_dict()
    assert all(torch.equal(value, modules["vae"].state_dict()[key]) for key, value in ours.items())


def test_the_vae_of_flux_1_is_refused():
    with pytest.raises(SourceError, match=r"não é o do FLUX\.2"):
        opened({**files(), "vae": written("flux", "fp32")[0]["vae"]})


# -- which release


@pytest.mark.parametrize(
    ("arch", "variant", "size"), [("flux2", "klein-4b", 3.88), ("flux2_klein_9b", "klein-9b", 9.08), ("flux2_dev", "dev", 32.2)]
)
def test_shipped_architectures(arch, variant, size):
    """Whole and consistent; parameters as the releases have them."""
    family = opened({"architecture": str(shipped_folder(arch))}, planning=True)
    assert family.release.variant == variant
    assert family.distilled == family.guided == (variant == "dev")
    assert family.latents_shape(1, (1024, 512)) == (1, 128, 32, 64)
    transformer = family.load_model(torch.device("meta"), torch.bfloat16)["transformer"]
    billions = sum(p.numel() for p in transformer.parameters()) / 1e9
    assert billions == pytest.approx(size, rel=0.01)
    assert family.metadata()["modelspec.architecture"] == f"flux-2-{variant}/lora"


def test_architectures_by_name(tmp_path):
    from lora_trainer.config.loading import load

    config = tmp_path / "x.yaml"
    config.write_text(f"modelo: {{familia: flux2, modelo_base: x/y}}\ndados: {{diretorio_dados: {tmp_path}}}\n", encoding="utf-8")
    assert load(config, ["modelo.arquitetura=flux2_dev"]).config.model.architecture == str(shipped_folder("flux2_dev"))


def test_dev_from_separate_files(dev):
    options, modules = dev
    family = opened(options)
    assert family.release.variant == "dev"
    assert family.guided
    assert not any("destila" in notice for notice in family.notices)
    ours = weights(family.load_text_encoders(CPU, torch.float32)["text_encoder"])
    assert all(torch.equal(ours[key], value) for key, value in modules["text_encoder"].state_dict().items() if key in ours)
    [example] = family.tokenize(["a cat"])
    assert example["attention_mask"][-1]
    assert not example["attention_mask"][0]


def test_a_mistral_without_the_layers_that_nobody_asks_for(dev, tmp_path):
    """As ComfyUI cuts it: 30 layers and no final norm; its last state is the thirtieth layer's."""
    options, _ = dev
    whole = load_file(options["text_encoder"])
    cut = {k: v for k, v in whole.items() if not k.startswith(("model.layers.30.", "model.norm.", "lm_head."))}
    assert len(cut) < len(whole)
    both = [opened({**options, "text_encoder": path}) for path in (options["text_encoder"], save(tmp_path / "x.safetensors", cut))]
    states = [f.encode_text(f.load_text_encoders(CPU, torch.float32), ["a cat"])[0]["prompt_embeds"] for f in both]
    assert torch.equal(*states)


def test_a_distilled_klein_is_told(tmp_path):
    of("flux2", "distilled").write_folder(tmp_path / "x")
    family = opened({"base_model": str(tmp_path / "x")})
    assert any("destilado para 4 passos" in notice for notice in family.notices)
    assert (family.distilled, family.usual_steps) == (True, 4)
    index = tmp_path / "x" / "model_index.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | {"is_distilled": False}))
    family = opened({"base_model": str(tmp_path / "x")})
    assert not any("destilado" in notice for notice in family.notices)
    assert (family.distilled, family.usual_steps) == (False, 25)


def test_a_single_file_does_not_tell_base_from_distilled(tmp_path):
    options = files()
    family = opened(options)
    assert any("não diz se é" in notice and "amostras.orientacao" in notice for notice in family.notices)
    assert not family.distilled
    named = tmp_path / "flux-2-klein-base-4b.safetensors"
    named.symlink_to(options["base_model"])
    assert not any("não diz se é" in notice for notice in opened({**options, "base_model": str(named)}).notices)


# -- refusals


def test_a_language_model_of_another_size_or_kind(tmp_path, dev):
    wide = comfy_state(whole_model("qwen3", tiny_text_config("qwen3", 600, width=64, layers=28)))
    with pytest.raises(SourceError, match="largura 192"):
        opened({**files(), "text_encoder": save(tmp_path / "qwen_3_8b.safetensors", wide)})
    with pytest.raises(SourceError, match="Mistral"):
        opened({**files(), "text_encoder": dev[0]["text_encoder"]})
    shallow = comfy_state(whole_model("qwen3", tiny_text_config("qwen3", 600, layers=DEPTH)))
    with pytest.raises(SourceError, match="4 camadas"):
        opened({**files(), "text_encoder": save(tmp_path / "small.safetensors", shallow)})


def test_missing_parts_are_named_by_their_files(dev):
    for options, file in ((files(), "qwen_3_4b.safetensors"), (dev[0], "mistral_3_small_flux2_bf16.safetensors")):
        with pytest.raises(SourceError, match=r"flux2-vae\.safetensors") as error:
            opened({name: options[name] for name in ("base_model", "tokenizer")})
        assert file in str(error.value)


def test_another_vocabulary_is_refused(dev):
    with pytest.raises(SourceError, match=r"não é o do Qwen3: falta <\|im_start\|>"):
        opened({**files(), "tokenizer": dev[0]["tokenizer"]})


def test_a_4_bit_folder_is_read_bit_for_bit(tmp_path):
    """As `save_pretrained` writes a transformer under BitsAndBytesConfig(load_in_4bit=True); nothing outside has a bias."""
    import bitsandbytes as bnb

    modules = KLEIN.write_folder(tmp_path / "x")
    state, expected = {}, {}
    for key, value in modules["transformer"].state_dict().items():
        if value.ndim == 2:
            packed, quant = bnb.functional.quantize_4bit(value, quant_type="nf4", compress_statistics=True)
            state |= {key: packed, **{f"{key}.{name}": part for name, part in quant.as_dict(packed=True).items()}}
            quant.shape = torch.Size((value.numel() // 64, 64))  # bitsandbytes' own shapes go wrong where rows end in a block
            expected[key] = bnb.functional.dequantize_4bit(packed, quant).reshape(value.shape)
        else:
            state[key] = expected[key] = value
    save(tmp_path / "x" / "transformer" / "diffusion_pytorch_model.safetensors", state)
    family = opened({"base_model": str(tmp_path / "x")})
    ours = weights(family.load_model(CPU, torch.float32)["transformer"])
    assert all(torch.allclose(ours[key], value, atol=1e-6) for key, value in expected.items())
    assert "nf4" in family.notices[0]
    read = four_bit.unpack(family.components["transformer"].weights, "context_embedder.weight")
    assert torch.allclose(read, expected["context_embedder.weight"], atol=1e-6)


def test_flux_1_is_not_taken_for_flux_2():
    assert open_source(written("flux", "fp32")[0]["base_model"]).looks_like().name == "flux"
    assert open_source(files("gguf")["base_model"]).looks_like().name == "flux2"


# -- LoRA files


def test_the_fused_layout_is_what_diffusers_reads():
    """Every adapted module comes back from its own converter, as it was."""
    family = opened(files())
    model = family.load_model(torch.device("meta"), torch.float32)
    paths = adapters.find_targets(model, family, ModelConfig(lora_targets="all"), family.formats)
    assert len(paths) == 2 * 12 + 2 * 2
    rng = torch.Generator().manual_seed(0)
    lora = {}
    for path in paths:
        rows, columns = model.get_submodule(path).weight.shape
        lora[path] = LoraModule(torch.randn(4, columns, generator=rng), torch.randn(rows, 4, generator=rng), 0.5)
    stored = fused.pack(lora, family.kohya_slots)
    assert {"lora_unet_double_blocks_0_img_attn_qkv.alpha", "lora_unet_single_blocks_1_linear1.lora_up.weight"} <= stored.keys()
    theirs = _convert_kohya_flux2_lora_to_diffusers(dict(stored))
    assert theirs.keys() == {f"{path}.lora_{side}.weight" for path in paths for side in "AB"}
    for path, module in lora.items():
        delta = theirs[f"{path}.lora_B.weight"] @ theirs[f"{path}.lora_A.weight"]
        assert torch.allclose(delta, module.delta(), atol=1e-5), path


def test_what_the_reader_drops_has_no_place_in_the_fused_layout():
    family = opened(files())
    assert family.kohya_slots is not None
    for layer in ("double_stream_modulation_img.linear", "norm_out.linear", "x_embedder"):
        assert family.kohya_slots(f"transformer.{layer}") is None


def test_attention_is_what_the_training_script_adapts():
    """Its default: to_k, to_q, to_v, to_out.0, and of single blocks to_qkv_mlp_proj and to_out; here the text's side too."""
    family = opened(files())
    model = family.load_model(torch.device("meta"), torch.float32)
    found = {p.removeprefix("transformer.") for p in adapters.find_targets(model, family, ModelConfig(), family.formats)}
    script = {f"transformer_blocks.{i}.attn.{name}" for i in range(2) for name in ("to_q", "to_k", "to_v", "to_out.0")}
    script |= {f"single_transformer_blocks.{i}.attn.{name}" for i in range(2) for name in ("to_qkv_mlp_proj", "to_out")}
    text = {f"transformer_blocks.{i}.attn.{n}" for i in range(2) for n in ("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")}
    assert found == script | text
