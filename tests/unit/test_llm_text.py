"""Language models as text encoders: the states transformers gives, from every layout, without layers nobody asked for."""

from pathlib import Path
from typing import Any, cast

import pytest
import torch
from helpers.llm_files import (
    body_of,
    comfy_state,
    tiny_text_config,
    to_comfy_fp8,
    whole_model,
    write_llm_gguf,
    write_qwen_tokenizer,
)
from safetensors.torch import save_file
from torch import nn

from lora_trainer.bases import architecture, parts
from lora_trainer.bases.component import Component, load_all
from lora_trainer.bases.llm_tokenizers import QWEN3_PLACES, find_llm_tokenizer
from lora_trainer.config.schema import ModelConfig
from lora_trainer.diffusion.llm_text import MODELS, build, cut_padding, hidden_states, language_slot, padded
from lora_trainer.errors import SourceError
from lora_trainer.files.headers import TensorInfo
from lora_trainer.files.kinds import Part
from lora_trainer.files.sources import Source, open_source

CPU = torch.device("cpu")
LAYERS = (0, 2, -2, -1)
VOCABULARY = 100
IDS = torch.randint(0, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(3))


def write(folder: Path, model: str, layout: str, whole: nn.Module) -> Path:
    if layout == "folder":
        whole.save_pretrained(folder, max_shard_size="20KB")
        return folder
    folder.mkdir(exist_ok=True)
    if layout == "gguf":
        write_llm_gguf(folder / "x.gguf", model, whole, "F32")
        return folder / "x.gguf"
    state = comfy_state(whole)
    if layout == "bare":
        state = {name.removeprefix("model."): value for name, value in state.items() if name.startswith("model.")}
    state = to_comfy_fp8(state) if layout == "fp8" else state
    save_file({name: value.detach().contiguous().clone() for name, value in state.items()}, folder / "x.safetensors")
    return folder / "x.safetensors"


def component(path: Path, model: str, layers: tuple[int, ...] = LAYERS, *, normed: bool = True, **text: Any) -> Component:
    """As `open_parts` makes it of `modelo.codificador_texto`."""
    slot = language_slot("text_encoder", model, f"o {model}", layers, normed=normed)
    settings = ModelConfig(text_encoder=str(path))
    opener = parts._Opener(Source(path, "folder", "x"), settings, "", (slot,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(parts.architecture, "shipped", lambda *_: tiny_text_config(model, VOCABULARY, width=64) | text)
        found = opener.slot(slot)
    assert found is not None
    return found


def load(found: Component, dtype: torch.dtype = torch.float32) -> nn.Module:
    found.used_keys()
    return load_all({"text_encoder": found}, ["text_encoder"], CPU, dtype)["text_encoder"]


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("layout", ["folder", "comfy", "bare", "gguf"])
@torch.no_grad()
def test_states_are_those_of_transformers(tmp_path, model, layout):
    whole: Any = whole_model(model, tiny_text_config(model, VOCABULARY, layers=4))
    encoder = load(component(write(tmp_path / "x", model, layout, whole), model))
    for mask in (torch.arange(9) < torch.tensor([[9], [5]]), torch.arange(9) >= torch.tensor([[3], [0]])):
        theirs = whole(input_ids=IDS, attention_mask=mask.long(), output_hidden_states=True).hidden_states
        ours = hidden_states(encoder, IDS, mask, LAYERS)
        for index, state in zip(LAYERS, ours, strict=True):
            assert torch.allclose(state[mask], theirs[index][mask], atol=1e-5), index


@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_layers_after_the_last_that_is_wanted_are_not_even_built(tmp_path, model):
    whole: Any = whole_model(model, tiny_text_config(model, VOCABULARY, layers=4))
    mask = torch.arange(9) < torch.tensor([[9], [5]])
    theirs = whole(input_ids=IDS, attention_mask=mask.long(), output_hidden_states=True).hidden_states
    path = write(tmp_path / "x", model, "comfy", whole)
    for layers in ((1, 2, 3), (-2,)):
        found = component(path, model, layers)
        assert not any("layers.3." in key or ("norm" in key and "layers" not in key) for key in found.used_keys())
        ours = hidden_states(load(found), IDS, mask, layers)
        assert len(ours) == len(layers)
        assert all(torch.allclose(state, theirs[index], atol=1e-5) for index, state in zip(layers, ours, strict=True))


@pytest.mark.parametrize("model", MODELS)
@torch.no_grad()
def test_padding_is_seen_as_transformers_sees_it(tmp_path, model):
    """FLUX.2 attends to the states of padding, so they count."""
    whole: Any = whole_model(model, tiny_text_config(model, VOCABULARY))
    encoder = load(component(write(tmp_path / "x", model, "comfy", whole), model, (1, -1)))
    mask = torch.arange(9) < torch.tensor([[9], [4]])
    theirs = whole(input_ids=IDS, attention_mask=mask.long(), output_hidden_states=True).hidden_states
    ours = hidden_states(encoder, IDS, mask, (1, -1))
    assert torch.allclose(ours[0], theirs[1], atol=1e-5)
    assert torch.allclose(ours[1], theirs[-1], atol=1e-5)


@pytest.mark.parametrize(("layout", "packing"), [("fp8", "fp8"), ("gguf", "q8_0")])
@torch.no_grad()
def test_few_bits_stay_few(tmp_path, layout, packing):
    whole: Any = whole_model("qwen3", tiny_text_config("qwen3", VOCABULARY))
    path = tmp_path / "x.gguf"
    path = write(tmp_path / "y", "qwen3", "fp8", whole) if layout == "fp8" else path
    if layout == "gguf":
        write_llm_gguf(path, "qwen3", whole)
    encoder: Any = load(component(path, "qwen3"), torch.bfloat16)
    assert encoder.layers[1].mlp.down_proj.packing.title == packing
    mask = torch.ones(2, 9, dtype=torch.bool)
    [ours] = hidden_states(encoder, IDS, mask, (-1,))
    theirs = whole(input_ids=IDS, output_hidden_states=True).hidden_states[-1]
    assert (ours.float() - theirs).norm() < 0.1 * theirs.norm()


def test_rows_that_rotate_together_are_found_in_packed_ggufs(tmp_path):
    whole: Any = whole_model("mistral", tiny_text_config("mistral", VOCABULARY))
    write_llm_gguf(tmp_path / "x.gguf", "mistral", whole)
    encoder: Any = load(component(tmp_path / "x.gguf", "mistral"), torch.bfloat16)
    ours = encoder.layers[0].self_attn.q_proj
    assert ours.packing.title == "q8_0"
    theirs = body_of(whole).layers[0].self_attn.q_proj.weight
    assert (ours.unpacked(torch.float32) - theirs).abs().max() < 0.01 * theirs.abs().max()


@torch.no_grad()
def test_streamed_and_quantised_encoders(tmp_path):
    from lora_trainer.planner.encoders import encoder_groups, stream_encoders
    from lora_trainer.techniques.block_streaming import BlockStreaming

    whole: Any = whole_model("qwen3", tiny_text_config("qwen3", VOCABULARY, layers=4))
    found = component(write(tmp_path / "x", "qwen3", "comfy", whole), "qwen3", (2, 3))
    mask = torch.ones(2, 9, dtype=torch.bool)
    plain = hidden_states(load(found), IDS, mask, (2, 3))
    encoders = load_all(
        {"text_encoder": found}, ["text_encoder"], CPU, torch.float32, lambda m: BlockStreaming().convert(m, encoder_groups(m))
    )
    assert [len(group.blocks) for group in encoder_groups(encoders)] == [3]
    stream_encoders(encoders)
    streamed = hidden_states(encoders["text_encoder"], IDS, mask, (2, 3))
    assert all(torch.equal(a, b) for a, b in zip(plain, streamed, strict=True))


@torch.no_grad()
def test_fp16_does_not_overflow(tmp_path):
    """States pass 65504 though no layer's answer does."""
    whole: Any = whole_model("qwen3", tiny_text_config("qwen3", VOCABULARY, layers=4))
    whole.model.embed_tokens.weight.mul_(6e4 / whole.model.embed_tokens.weight.abs().max())
    for layer in whole.model.layers:
        layer.mlp.down_proj.weight.mul_(8e4)
    path, mask = write(tmp_path / "x", "qwen3", "comfy", whole), torch.ones(2, 9, dtype=torch.bool)
    layers = (1, 2, 3, -1)
    found = component(path, "qwen3", layers)
    half, full = (hidden_states(load(found, dtype), IDS, mask, layers) for dtype in (torch.float16, torch.float32))
    assert max(state.abs().max() for state in full) > 65504
    assert all(bool(state.isfinite().all()) for state in half)
    assert all((a - b).norm() < 0.02 * b.norm() for a, b in zip(half, full, strict=True))


def test_positions_are_not_rounded_with_the_weights(tmp_path):
    whole: Any = whole_model("qwen3", tiny_text_config("qwen3", VOCABULARY))
    path = write(tmp_path / "x", "qwen3", "comfy", whole)
    half, full = (cast(Any, load(component(path, "qwen3"), dtype)) for dtype in (torch.bfloat16, torch.float32))
    positions = torch.arange(4000)[None]
    x = torch.zeros(1, 1, 1)
    assert all(torch.equal(a, b) for a, b in zip(half.rotary_emb(x, positions), full.rotary_emb(x, positions), strict=True))


STRANGERS = [("qwen3", "qwen2_5_vl"), ("qwen2_5_vl", "mistral"), ("mistral", "qwen3"), ("mistral", "qwen3_vl")]


@pytest.mark.parametrize(("has", "wants"), STRANGERS)
@pytest.mark.parametrize("layout", ["comfy", "gguf", "folder"])
def test_another_language_model_is_refused_by_name(tmp_path, has, wants, layout):
    path = write(tmp_path / "x", has, layout, whole_model(has, tiny_text_config(has, VOCABULARY)))
    with pytest.raises(SourceError, match=f"{MODELS[has].title}|{has}") as error:
        component(path, wants).used_keys()
    assert f"o {wants}" in str(error.value) or MODELS[wants].title in str(error.value)


@torch.no_grad()
def test_the_last_state_before_the_final_norm(tmp_path):
    """Which Qwen-Image 2.1 was trained on; the norm is not even read."""
    whole: Any = whole_model("qwen3_vl", tiny_text_config("qwen3_vl", VOCABULARY))
    found = component(write(tmp_path / "x", "qwen3_vl", "comfy", whole), "qwen3_vl", (-1,), normed=False)
    assert not any(key.endswith("model.norm.weight") for key in found.used_keys())
    [ours] = hidden_states(load(found), IDS, torch.ones(2, 9, dtype=torch.bool), (-1,))
    states: list[Any] = []
    whole.model.language_model.norm.register_forward_pre_hook(lambda _, inputs: states.append(inputs[0]))
    whole(input_ids=IDS)
    assert torch.allclose(ours, states[0], atol=1e-5)


def test_a_qwen3_with_a_vision_tower_is_no_plain_qwen3(tmp_path):
    path = write(tmp_path / "x", "qwen3_vl", "comfy", whole_model("qwen3_vl", tiny_text_config("qwen3_vl", VOCABULARY)))
    with pytest.raises(SourceError, match="modelo de linguagem Qwen3-VL"):
        component(path, "qwen3").used_keys()


def test_an_encoder_with_too_few_layers_is_refused(tmp_path):
    path = write(tmp_path / "x", "qwen3", "comfy", whole_model("qwen3", tiny_text_config("qwen3", VOCABULARY)))
    with pytest.raises(SourceError, match="tem 2 camadas, e são precisas 27"):
        component(path, "qwen3", (9, 18, 27)).used_keys()


def test_kinds(tmp_path):
    seeing = "vision_language"
    for model, kind in (("qwen3", "language_model"), ("qwen3_vl", seeing), ("qwen2_5_vl", seeing)):
        whole = whole_model(model, tiny_text_config(model, VOCABULARY))
        for layout in ("comfy", "folder", "fp8"):
            assert open_source(str(write(tmp_path / f"{model}{layout}", model, layout, whole))).looks_like().name == kind
    assert open_source(str(write(tmp_path / "gguf", "qwen2_5_vl", "gguf", whole))).looks_like().name == "language_model"


def test_padding():
    example = padded([5, 6, 7], 5, 9)
    assert example["input_ids"].tolist() == [5, 6, 7, 9, 9]
    assert example["attention_mask"].tolist() == [True] * 3 + [False] * 2
    assert padded(range(9), 4, 0)["input_ids"].tolist() == [0, 1, 2, 3]
    ids, mask = cut_padding(example["input_ids"][None], example["attention_mask"][None])
    assert ids.tolist() == [[5, 6, 7]]
    assert mask.all()


def test_the_tokenizer_is_found_and_tried(tmp_path):
    write_qwen_tokenizer(tmp_path / "words" / "tokenizer")
    base = Source(tmp_path / "x.safetensors", "file", "modelo_base")
    for folder in (tmp_path / "words", tmp_path / "words" / "tokenizer"):
        tokenizer = find_llm_tokenizer(base, str(folder), "tokenizer", QWEN3_PLACES, "Qwen3")
        assert len(tokenizer("<|im_start|>user\na cat").input_ids) == 5
    (tmp_path / "bare").mkdir()
    (tmp_path / "words" / "tokenizer" / "tokenizer.json").rename(tmp_path / "bare" / "tokenizer.json")
    tokenizer = find_llm_tokenizer(base, str(tmp_path / "bare"), "tokenizer", QWEN3_PLACES, "Qwen3")
    assert len(tokenizer("<|im_start|>user\na cat").input_ids) == 5
    (tmp_path / "bare" / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(SourceError, match="não serve"):
        find_llm_tokenizer(base, str(tmp_path / "bare"), "tokenizer", QWEN3_PLACES, "Qwen3")


def test_a_tokenizer_folder_without_one_is_refused(tmp_path):
    """Not looked for elsewhere: neither in the base's folder nor, for half a minute, on the network."""
    write_qwen_tokenizer(tmp_path / "base" / "tokenizer")
    base = Source(tmp_path / "base", "folder", "modelo_base")
    with pytest.raises(SourceError, match=r"não tem tokenizer\.json"):
        find_llm_tokenizer(base, str(tmp_path), "tokenizer", QWEN3_PLACES, "Qwen3")


def test_without_a_tokenizer_one_message_says_what_to_do(tmp_path):
    base = Source(tmp_path / "x.safetensors", "file", "modelo_base")
    with pytest.raises(SourceError, match="vocabulário do Qwen3") as error:
        find_llm_tokenizer(base, None, "tokenizer", QWEN3_PLACES, "Qwen3")
    assert "Qwen/Qwen3-4B" in str(error.value)
    planned = Source(tmp_path, "folder", "modelo_base", planning=True)
    assert find_llm_tokenizer(planned, None, "tokenizer", QWEN3_PLACES, "Qwen3")("a").input_ids == []


def test_a_shard_does_not_pass_for_the_whole_encoder():
    """Z-Image counts from the end: the first third of Qwen3-4B, which ends after a whole layer, would be read as all of it."""
    standard = architecture.shipped("z_image", "text_encoder")
    with torch.device("meta"):
        whole: Any = build(standard, "qwen3", (-2,), "x")
    names = {"embed_tokens.weight": whole.embed_tokens.weight, **dict(whole.layers.named_parameters(prefix="layers"))}

    def header(layers: int) -> dict[str, TensorInfo]:
        kept = {n: v for n, v in names.items() if not n.startswith("layers.") or int(n.split(".")[1]) < layers}
        return {f"model.{name}": TensorInfo("BF16", tuple(value.shape), 0, 0) for name, value in kept.items()}

    describe = language_slot("text_encoder", "qwen3", "Qwen3-4B", (-2,)).describe
    config, _ = describe(Part(header(35), ""), standard)
    assert config["num_hidden_layers"] == 36
    with pytest.raises(SourceError, match="tem 13 camadas, e são precisas 36"):
        describe(Part(header(12), ""), standard)
