"""SD3 bases: names against diffusers' converter, what headers tell, T5 left out, wrong files refused by name, kohya files."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers
from helpers.bases import of, write_gguf
from safetensors.torch import load_file, save_file

from lora_trainer.adapters import inject
from lora_trainer.bases import architecture, tokenizers
from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.diffusion import clip_text
from lora_trainer.engine.tracker import MemoryTracker, hold
from lora_trainer.errors import ConfigError, SourceError
from lora_trainer.export.verify import verify
from lora_trainer.export.write import save_adapter
from lora_trainer.families import resolve
from lora_trainer.families.sd3 import names as sd3_names
from lora_trainer.families.sd3.family import SD3
from lora_trainer.families.sd3.network import build
from lora_trainer.files.headers import TensorInfo
from lora_trainer.layouts import fused
from lora_trainer.layouts.lora import LoraModule

CPU = torch.device("cpu")
BASE, MEDIUM = of("sd3"), of("sd3", "medium")
LAYERS = 4


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, str], dict[str, Any]]:
    return BASE.write_files(tmp_path_factory.mktemp("sd3"))


def opened(options: dict[str, str], **more: Any) -> SD3:
    family = resolve(ModelConfig(**{**options, **more}), DataConfig())
    assert isinstance(family, SD3)
    return family


@pytest.mark.parametrize("made", [BASE, MEDIUM], ids=["3.5", "3"])
def test_our_names_are_the_converters(made):
    transformer = made.modules()["transformer"]
    own = transformer.state_dict()
    theirs = convert_sd3_transformer_checkpoint_to_diffusers(made.stored_transformer(transformer))
    assert theirs.keys() == own.keys()
    assert all(torch.equal(theirs[key], own[key]) for key in own)


@pytest.mark.parametrize("made", [BASE, MEDIUM], ids=["3.5", "3"])
@pytest.mark.parametrize("prefix", ["", "model.diffusion_model."])
def test_the_architecture_is_read_off_the_header(tmp_path, made, prefix):
    modules = made.modules()
    wanted = dict(modules["transformer"].config)
    for state in (made.stored_transformer(modules["transformer"]), modules["transformer"].state_dict()):
        header = {f"{prefix}{key}": TensorInfo("F32", tuple(value.shape), 0, 0) for key, value in state.items()}
        config, locate = sd3_names.derive(header, architecture.shipped("sd3", "transformer"))
        assert {key: wanted[key] for key in config if key != "_class_name"} == {
            key: tuple(value) if key == "dual_attention_layers" and wanted[key] == () else value
            for key, value in config.items() if key != "_class_name"
        }  # fmt: skip
        assert all(locate(key)[0].key in header for key in modules["transformer"].state_dict())


def test_the_shipped_shapes_are_the_releases():
    """diffusers tells 3 from 3.5-medium by 36,864 and 147,456 rows of positions, and 3.5-large by its block 37."""
    counted = {}
    for release in ("sd3", "sd3_medium", "sd3_large"):
        with torch.device("meta"):
            model: Any = build(architecture.shipped(release, "transformer"))
        counted[release] = (model.pos_embed.pos_embed.shape[1], len(model.transformer_blocks), model.inner_dim)
    assert counted == {"sd3": (147456, 24, 1536), "sd3_medium": (36864, 24, 1536), "sd3_large": (36864, 38, 2432)}


# -- T5 is optional


@pytest.mark.parametrize("kind", ["fp32", "all_in_one", "folder"])
def test_without_t5(tmp_path, kind):
    made = BASE.without("text_encoder_3")
    if kind == "folder":
        made.write_folder(tmp_path / "sd3")
        options = {"base_model": str(tmp_path / "sd3")}
    else:
        options, _ = made.write_files(tmp_path, kind)
    family = opened(options)
    assert any("codificador_texto_3" in notice for notice in family.notices)
    assert list(family.load_text_encoders(CPU, torch.float32)) == ["text_encoder", "text_encoder_2"]
    assert family.count_tokens("a photo of a cat") == 5
    assert family.token_limit == 75


def test_t5_is_read_where_it_is(base):
    family = opened(base[0])
    assert not any("codificador_texto_3" in notice for notice in family.notices)
    assert family.token_limit == 255
    assert family.text_fingerprint() != opened({k: v for k, v in base[0].items() if k != "text_encoder_3"}).text_fingerprint()


def test_the_original_release_brings_transformer_and_vae(tmp_path):
    """sd3.5_medium.safetensors; the encoders are files of their own."""
    options, modules = BASE.write_files(tmp_path / "parts")
    BASE.write_files(tmp_path / "whole", "all_in_one")
    tensors = load_file(tmp_path / "whole" / "sd3.safetensors")
    path = tmp_path / "sd3.5_medium.safetensors"
    save_file({key: value for key, value in tensors.items() if not key.startswith("text_encoders.")}, path)
    with pytest.raises(SourceError) as error:
        opened({"base_model": str(path), "tokenizer": options["tokenizer"]})
    text = str(error.value)
    assert "clip_l.safetensors" in text
    assert "clip_g.safetensors" in text
    assert "t5xxl" not in text
    assert "vae" not in text.replace("modelo.", "")
    parts = {name: options[name] for name in ("text_encoder", "text_encoder_2", "text_encoder_3", "tokenizer")}
    vae = opened({"base_model": str(path), **parts}).load_vae(CPU, torch.float32)
    assert torch.equal(vae.decoder.conv_in.weight, modules["vae"].decoder.conv_in.weight)


# -- files in the wrong slot


@pytest.mark.parametrize(
    ("slot", "given", "said", "place"),
    [
        ("text_encoder", "text_encoder_2", "CLIP-G", "codificador_texto_2"),
        ("text_encoder_2", "text_encoder", "CLIP", "codificador_texto"),
        ("text_encoder_2", "text_encoder_3", "T5", "codificador_texto_3"),
        ("text_encoder_3", "text_encoder_2", "CLIP-G", "codificador_texto_2"),
        ("vae", "text_encoder_3", "T5", "codificador_texto_3"),
        ("vae", "base_model", "Stable Diffusion 3", ""),
    ],
)
def test_a_file_in_the_wrong_slot_is_refused_by_name(base, slot, given, said, place):
    with pytest.raises(SourceError) as error:
        opened({**base[0], slot: base[0][given]})
    text = str(error.value)
    assert Path(base[0][given]).name in text
    assert f"parece um {said}" in text or f"parece um codificador de texto {said}" in text
    assert f"este arquivo cabe em modelo.{place}" in text or not place


def test_the_vae_of_flux_is_refused_where_its_config_tells(base, tmp_path):
    vae = base[1]["vae"]
    vae.register_to_config(scaling_factor=0.3611, shift_factor=0.1159)
    vae.save_pretrained(tmp_path / "vae")
    vae.register_to_config(scaling_factor=1.5305, shift_factor=0.0609)
    with pytest.raises(SourceError, match="FLUX"):
        opened({**base[0], "vae": str(tmp_path / "vae")})


def test_parts_of_another_model_are_refused_by_their_width(base, tmp_path):
    configs = BASE.configs()
    configs["text_encoder_3"]["d_model"] = 64
    t5 = BASE.modules({"text_encoder_3": configs["text_encoder_3"]})["text_encoder_3"]
    save_file({key: value.clone() for key, value in t5.state_dict().items()}, tmp_path / "t5.safetensors")
    with pytest.raises(SourceError, match="largura 64"):
        opened({**base[0], "text_encoder_3": str(tmp_path / "t5.safetensors")})


def test_pictures_larger_than_the_table_of_positions_are_refused(base):
    family = opened(base[0])
    assert family.example_batch(1, (384, 64))["latents"].shape == (1, 16, 8, 48)
    with pytest.raises(ConfigError, match="384"):
        family.example_batch(1, (400, 64))


def test_other_models_with_such_a_table_are_not_taken_for_sd3(tmp_path):
    for extra in ("joint_transformer_blocks.0.attn.to_q.weight", "controlnet_blocks.0.weight"):
        path = tmp_path / f"{extra}.safetensors"
        save_file({"pos_embed.pos_embed": torch.zeros(1, 4, 8), "context_embedder.weight": torch.zeros(8, 8),
                   extra: torch.zeros(1)}, path)  # fmt: skip
        with pytest.raises(SourceError):
            opened({"base_model": str(path)})


# -- what it costs


def test_the_table_of_positions_stays_in_host_memory(base):
    family = opened(base[0])
    with MemoryTracker() as tracker:
        model = family.load_model(CPU, torch.float32)
        hold(model)
        held = tracker.now
    transformer: Any = model["transformer"]
    sizes = {key: -(-value.nbytes // 512) * 512 for key, value in transformer.state_dict().items()}
    table = sizes.pop("pos_embed.pos_embed")
    assert held == sum(sizes.values())
    assert table == 24 * 24 * 64 * 4
    with MemoryTracker() as tracker, torch.no_grad():
        crop = transformer.pos_embed.cropped_pos_embed(8, 16)
        assert tracker.now == tracker.transferred == crop.nbytes == 4 * 8 * 64 * 4, "of which a picture takes a crop to the card"


# -- kohya files, which ComfyUI and Forge read


def test_kohya_files_spell_the_original(base):
    """A LoRA of the original's matrices, made from the file as its readers do, changes them as ours changes diffusers'."""
    family, transformer = opened(base[0]), base[1]["transformer"]
    names = [name.removesuffix(".weight") for name, p in transformer.named_parameters() if p.ndim == 2 and "_blocks." in name]
    generator = torch.Generator().manual_seed(0)
    layers = {name: transformer.get_submodule(name) for name in names}
    lora = {
        f"transformer.{name}": LoraModule(
            torch.randn(2, layer.in_features, generator=generator), torch.randn(layer.out_features, 2, generator=generator), 0.5
        )
        for name, layer in layers.items()
    }
    slots = family.kohya_slots
    assert slots is not None
    tensors = fused.pack(lora, slots)
    original = BASE.stored_transformer(transformer)
    touched = {}
    for key in [key for key in original if f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}.alpha" in tensors]:
        name = f"lora_unet_{key.removesuffix('.weight').replace('.', '_')}"
        down, up = tensors[f"{name}.lora_down.weight"], tensors[f"{name}.lora_up.weight"]
        touched[key] = original[key] + tensors[f"{name}.alpha"] / len(down) * (up @ down)
    assert len(touched) * 3 == len(tensors)
    merged = convert_sd3_transformer_checkpoint_to_diffusers({**original, **touched})
    for name, layer in layers.items():
        assert torch.allclose(merged[f"{name}.weight"], layer.weight + lora[f"transformer.{name}"].delta(), atol=1e-5), name
    read, strangers = fused.unpack(tensors, lora, slots)
    assert not strangers
    assert all(torch.allclose(read[path].delta(), module.delta(), atol=1e-6) for path, module in lora.items())


def test_who_reread_a_kohya_file_is_told(base, tmp_path):
    settings = ModelConfig(**base[0], lora_rank=2, lora_targets="attention")
    family = opened(base[0])
    family.configure(TrainingConfig(), DataConfig())
    model = family.load_model(CPU, torch.float32)
    adapter = inject(model, family, settings, 0, ("diffusers", "kohya"))
    for key, parameter in adapter.named_parameters().items():
        torch.nn.init.constant_(parameter, 0.1) if "lora_B" in key else None
    readers = {}
    for layout in ("diffusers", "kohya"):
        path = save_adapter(adapter, family, tmp_path / f"{layout}.safetensors", layout, "fp32", {})
        found = verify(model, adapter, family, path, family.probe)
        assert found.output_difference < 1e-4
        assert found.effect > 1e-3
        readers[layout] = found.reader
    assert readers["diffusers"].startswith("diffusers ")
    assert "o diffusers não lê este arquivo" in readers["kohya"]


def test_the_last_blocks_text_modulation_is_exchanged_in_the_file(base):
    slots = opened(base[0]).kohya_slots
    assert slots is not None
    swapped = [slots(f"transformer.transformer_blocks.{i}.norm1_context.linear") for i in range(LAYERS)]
    assert [slot.swapped for slot in swapped if slot] == [False] * (LAYERS - 1) + [True]


def test_gguf_with_a_flat_table_of_positions(base, tmp_path):
    """As programs write it that drop leading ones."""
    state = BASE.stored_transformer(base[1]["transformer"])
    state["pos_embed"] = state["pos_embed"][0]
    write_gguf(tmp_path / "sd3.gguf", state, arch="sd3")
    family = opened({**base[0], "base_model": str(tmp_path / "sd3.gguf")})
    loaded = family.load_model(CPU, torch.float32)["transformer"].pos_embed.pos_embed
    assert torch.equal(loaded, base[1]["transformer"].pos_embed.pos_embed)


@pytest.mark.skipif(tokenizers._packaged() is None, reason="neither openai-clip nor open_clip is installed")
@pytest.mark.parametrize(("name", "padding"), [("tokenizer", 49407), ("tokenizer_2", 0)])
def test_real_words_end_in_each_clips_own_padding(base, name, padding):
    """Against the published ids; what stands after the end mark reaches SD3 through the last but one layer."""
    source = resolve(ModelConfig(**base[0]), DataConfig()).source
    tokenizer = tokenizers.find_tokenizer(source, None, name, architecture.shipped("sd3", name))
    chunks = clip_text.make_chunks(tokenizer, None, 49408, "")
    assert chunks.ids("a photo of a cat").tolist() == [[49406, 320, 1125, 539, 320, 2368, 49407, *[padding] * 70]]


@pytest.mark.parametrize("lost", ["x_embedder", "pos_embed", "joint_blocks.1", "final_layer", "y_embedder", "context_embedder"])
def test_a_file_with_holes_is_refused(base, tmp_path, lost):
    state = {key: value for key, value in load_file(base[0]["base_model"]).items() if not key.startswith(lost)}
    save_file(state, tmp_path / "sd3.safetensors")
    with pytest.raises(SourceError, match="está incompleto"):
        opened({**base[0], "base_model": str(tmp_path / "sd3.safetensors")})
