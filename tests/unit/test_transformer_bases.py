"""Bases of every diffusion-transformer family, in every layout people have: loaded with the right weights, kept as stored."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers import bases
from helpers.bases import KINDED, LOSSY, NAMES, STORED, weights, written
from safetensors.torch import load_file, save_file

from lora_trainer.config.schema import DataConfig, ModelConfig, TrainingConfig
from lora_trainer.diffusion.transformer import TransformerFamily
from lora_trainer.engine.tracker import MemoryTracker
from lora_trainer.errors import ConfigError, SourceError
from lora_trainer.families import resolve
from lora_trainer.files.kinds import signatures

CPU = torch.device("cpu")


def opened(options: dict[str, str], **more: Any) -> TransformerFamily:
    family = resolve(ModelConfig(**{**options, **more}), DataConfig())
    assert isinstance(family, TransformerFamily)
    return family


@pytest.mark.parametrize(("name", "kind"), [*KINDED, *((name, "folder") for name in NAMES)])
def test_every_layout_gives_its_weights(name, kind):
    options, modules = written(name, kind)
    family = opened(options)
    assert family.name == name
    model, encoders = family.load_model(CPU, torch.float32), family.load_text_encoders(CPU, torch.float32)
    loaded = {**dict(model.items()), **dict(encoders.items()), "vae": family.load_vae(CPU, torch.float32)}
    assert {"transformer", "vae", *family.text_parts} == loaded.keys()
    for part, module in loaded.items():
        ours = weights(module)
        assert ours
        own = modules[part].state_dict()
        missing = ours.keys() - own.keys()
        assert not missing, f"{part}: {sorted(missing)[:4]}"
        for key, value in ours.items():
            if value.is_floating_point():
                error = (value - own[key]).abs().max() / own[key].abs().max().clamp(min=1e-9)
                assert error <= LOSSY.get(kind, 0.0), f"{part}.{key}: {error}"


@pytest.mark.parametrize(("name", "kind"), STORED)
def test_what_is_stored_in_few_bits_stays_so(name, kind):
    options, _ = written(name, kind)
    family = opened(options)
    model = family.load_model(CPU, torch.bfloat16)
    packed = [m for m in model["transformer"].modules() if hasattr(m, "packed")]
    plain = [m for m in model["transformer"].modules() if isinstance(m, torch.nn.Linear) and not hasattr(m, "packed")]
    stored = sum(t.nbytes for layer in packed for t in layer.packed())
    count = sum(layer.weight_shape.numel() for layer in packed)
    assert count > 4 * sum(layer.weight.numel() for layer in plain)
    assert stored < 1.2 * count, "about a byte a weight"
    assert "fica como está no arquivo" in "".join(family.notices)


@pytest.mark.parametrize("name", NAMES)
def test_missing_parts_are_asked_for_together(name):
    options = bases.plain(name)
    with pytest.raises(SourceError) as error:
        opened({key: value for key, value in options.items() if key in ("base_model", "tokenizer")})
    assert "só traz parte do modelo" in str(error.value)
    assert "modelo.vae" in str(error.value)


@pytest.mark.parametrize("name", NAMES)
def test_a_file_in_the_wrong_slot_is_refused(name):
    options = bases.plain(name)
    for slot, given in (("vae", "text_encoder"), ("text_encoder", "vae"), ("vae", "base_model")):
        with pytest.raises(SourceError, match=r"parece"):
            opened({**options, slot: options[given]})


@pytest.mark.parametrize("name", NAMES)
def test_a_text_encoder_in_the_base_slot_is_told_its_place(name):
    with pytest.raises(SourceError):
        opened({"base_model": bases.plain(name)["vae"]})


@pytest.mark.parametrize("name", NAMES)
def test_options_of_other_families_are_refused(name):
    for option in ({"train_text_encoder": True}, {"prediction_type": "epsilon"}, {"clip_skip": 2}):
        with pytest.raises(ConfigError, match="não se aplica a"):
            opened(bases.plain(name), **option)
    with pytest.raises(ConfigError, match="maximo_tokens"):
        resolve(ModelConfig(**bases.plain(name)), DataConfig(max_caption_tokens=75))
    for tokens in signatures()[name].caption_tokens:  # all that the message offers can be written
        assert DataConfig(max_caption_tokens=tokens).max_caption_tokens == tokens


@pytest.mark.parametrize("name", NAMES)
def test_captions_encoded_while_training(name):
    """`cache_codificador_texto: nao`: the encoders are part of the model, and nothing else changes."""
    family = opened(bases.plain(name))
    family.configure(TrainingConfig(), DataConfig())
    model = family.load_model(CPU, torch.float32, with_text=True)
    batch = family.example_batch(1, (64, 64))
    batch = {key: batch[key] for key in ("latents", "seeds", "weight")}
    batch["latents"] = torch.randn(batch["latents"].shape)
    [ids], [embeds] = family.tokenize(["a cat"]), family.encode_text(model, ["a cat"])
    losses = [family.loss(model, {**batch, **{k: v[None] for k, v in text.items()}}).item() for text in (ids, embeds)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


@pytest.mark.parametrize("name", NAMES)
@torch.no_grad()
def test_the_proof_of_a_file_needs_no_more_than_a_step_on_a_short_caption(name):
    family = opened(bases.plain(name))
    family.configure(TrainingConfig(), DataConfig())
    model = family.load_model(torch.device("cpu"), torch.float32)
    batch = family.example_batch(1, (128, 128))
    batch["prompt_embeds"] = batch["prompt_embeds"][:, :96]
    peaks = []
    for forward in (lambda: family.probe(model), lambda: family.loss(model, batch)):
        with MemoryTracker(record=False) as tracker:
            forward()
        peaks.append(tracker.peak)
    assert peaks[0] <= 1.1 * peaks[1]


@pytest.mark.parametrize("name", NAMES)
def test_captions_of_unlike_lengths_in_one_batch(name):
    """Each example's loss is what it is alone."""
    family = opened(bases.plain(name))
    family.configure(TrainingConfig(), DataConfig())
    model, encoders = family.load_model(CPU, torch.float32), family.load_text_encoders(CPU, torch.float32)
    texts = family.encode_text(encoders, ["a cat", "a photo of a cat on red, a photo of a red cat on a cat on a photo"])
    latents = torch.randn(family.latents_shape(2, (64, 32)))
    examples = [{**text, "latents": latents[i]} for i, text in enumerate(texts)]

    def loss(rows: list[int]) -> float:
        batch = family.collate([examples[row] for row in rows])
        return family.loss(model, {**batch, "seeds": torch.tensor(rows), "weight": torch.ones(len(rows))}).item()

    assert loss([0, 1]) == pytest.approx(loss([0]) + loss([1]), rel=1e-4)


def _resaved(name: str, path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> dict[str, str]:
    """The base's options with a transformer whose tensors were changed."""
    options = bases.plain(name)
    save_file(change(load_file(options["base_model"])), path)
    return {**options, "base_model": str(path)}


ENCODERS = [(name, option) for name in NAMES for option in bases.plain(name) if option.startswith("text_encoder")]


@pytest.mark.parametrize("start", ["model.", "net.", "model.diffusion_model."])
@pytest.mark.parametrize("name", [name for name in NAMES if name != "qwen_image_21"])
def test_names_may_begin_with_anything(name, start, tmp_path):
    options = _resaved(name, tmp_path / "base.safetensors", lambda state: {start + key: state[key] for key in state})
    model, plain = (opened(each).load_model(CPU, torch.float32) for each in (options, bases.plain(name)))
    own = plain.state_dict()
    assert all(torch.equal(value, own[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_lacks_any_tensor_is_refused(name, tmp_path):
    """Whichever it is: those that the sizes are read from too."""
    state = load_file(bases.plain(name)["base_model"])
    for missing in state:
        few = {key: tensor for key, tensor in state.items() if key != missing}
        options = _resaved(name, tmp_path / "base.safetensors", lambda _, few=few: few)
        if missing in OPTIONAL.get(name, ()):
            continue
        with pytest.raises(SourceError) as error:
            opened(options)
        assert error.value.hint, missing


OPTIONAL = {"flux": ("guidance_in.in_layer.weight",), "sd3": ("joint_blocks.0.x_block.attn.ln_q.weight",)}
"""Tensors that tell releases apart: without them the file is another release's (schnell, SD3 medium)."""


@pytest.mark.parametrize(("name", "option"), ENCODERS)
def test_an_encoder_with_a_gap_is_refused(name, option, tmp_path):
    """A layer that lost a tensor does not end the network before its time."""
    options = bases.plain(name)
    state = load_file(options[option])
    norms = ("layers.1.input_layernorm.weight", "layers.1.layer_norm1.weight", "block.1.layer.0.layer_norm.weight")
    lost = [key for key in state if key.endswith(norms) and "visual" not in key]
    assert len(lost) == 1
    save_file({key: tensor for key, tensor in state.items() if key not in lost}, tmp_path / "x.safetensors")
    with pytest.raises(SourceError, match=r"incompleto|de outra arquitetura"):
        opened({**options, option: str(tmp_path / "x.safetensors")})


@pytest.mark.parametrize("name", NAMES)
def test_a_config_that_makes_no_network_is_refused(name, tmp_path):
    folder = tmp_path / "base"
    shutil.copytree(written(name, "folder")[0]["base_model"], folder)
    path = folder / "transformer" / "config.json"
    config = json.loads(path.read_text())
    for heads in ("num_attention_heads", "n_heads"):
        config |= {heads: 0} if heads in config else {}
    path.write_text(json.dumps(config))
    with pytest.raises(SourceError):
        opened({"base_model": str(folder)})
