"""Layers that keep their GGUF blocks: bytes as in the file, weights unpacked where they are used, and what is refused."""

import re
from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize as reference
from helpers.counts import packed_weights, streamable_bytes
from helpers.gguf_files import probe_ids, tiny_model, write_model
from helpers.gguf_lm import GgufLM
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lora_trainer.bases.gguf import GgufWeights
from lora_trainer.bases.weights import Piece
from lora_trainer.engine.packed import PackedLinear
from lora_trainer.engine.packed_gguf import (
    GgufBlocks,
    PackedEmbedding,
)
from lora_trainer.engine.tracker import MemoryTracker
from lora_trainer.errors import SourceError
from lora_trainer.families.causal_lm.family import PART
from lora_trainer.files.gguf_reader import GgufFile, GgufTensor
from lora_trainer.planner.simulate import make_fake
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.block_streaming import BlockStreaming
from lora_trainer.techniques.quantize_4bit import Quantize4bit

CPU = torch.device("cpu")
WIDE = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}


def held(model: nn.Module) -> int:
    tensors = {id(x): x for x in (*model.parameters(), *model.buffers())}
    return sum(x.nbytes for x in tensors.values())


@pytest.fixture(scope="module")
def q4_k(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    return write_model(path, tiny_model("llama", **WIDE), "llama", "Q4_K", token_embd="Q6_K")


def test_the_base_takes_what_the_file_takes(q4_k):
    family = GgufLM(q4_k)
    model = family.load_model(CPU, torch.bfloat16)
    assert held(model) == pytest.approx(family.file.data_bytes, rel=0.03)
    assert isinstance(model[PART].model.embed_tokens, PackedEmbedding)
    assert isinstance(model[PART].model.layers[1].mlp.down_proj, PackedLinear)
    assert packed_weights(model).keys() == {"q4_k", "q6_k"}


def test_weights_are_those_of_the_gguf_package(q4_k):
    family = GgufLM(q4_k)
    layer = family.load_model(CPU, torch.float32)[PART].model.layers[0]
    raw = family.file.raw("blk.0.ffn_up.weight").numpy()
    assert torch.equal(layer.mlp.up_proj.unpacked(), torch.from_numpy(reference(raw, GGMLQuantizationType.Q4_K)))
    stored = torch.from_numpy(reference(family.file.raw("blk.0.attn_q.weight").numpy(), GGMLQuantizationType.Q4_K))
    found = layer.self_attn.q_proj.unpacked()
    assert not torch.equal(found, stored)
    back = found.reshape(8, 2, 16, 256).swapaxes(1, 2).reshape(256, 256)  # the converter's `permute`
    assert torch.equal(back, stored)


@torch.no_grad()
def test_embeddings_unpack_what_is_looked_up(q4_k):
    packed = GgufLM(q4_k).load_model(CPU, torch.float32)[PART]
    plain = GgufLM(q4_k, packed=False).load_model(CPU, torch.float32)[PART]
    assert type(plain.model.embed_tokens) is nn.Embedding
    ids = torch.tensor([[5, 7, 5], [0, 95, 1]])
    assert torch.equal(packed.model.embed_tokens(ids), plain.model.embed_tokens(ids))
    assert torch.equal(packed.lm_head.weight.detach(), plain.lm_head.weight)
    with MemoryTracker() as tracker:
        packed.model.embed_tokens(torch.tensor([[3]]))
    assert tracker.peak < 96 * 256


@torch.no_grad()
def test_gemmas_embeddings_are_scaled_in_the_weights_dtype(tmp_path):
    model = tiny_model("gemma3", **WIDE)
    path = write_model(tmp_path / "m.gguf", model, "gemma3", "Q8_0")
    for dtype in (torch.float32, torch.bfloat16):
        packed = GgufLM(path).load_model(CPU, dtype)[PART].model.embed_tokens
        plain = GgufLM(path, packed=False).load_model(CPU, dtype)[PART].model.embed_tokens
        assert isinstance(packed, PackedEmbedding)
        assert torch.equal(packed(probe_ids()), plain(probe_ids()))


def test_plain_numbers_stay_packed_only_where_that_saves(tmp_path):
    path = write_model(tmp_path / "m.gguf", tiny_model("qwen3"), "qwen3", "F16")
    kinds = {}
    for dtype in (torch.float32, torch.bfloat16):
        kinds[dtype] = type(GgufLM(path).load_model(CPU, dtype)[PART].model.layers[0].mlp.up_proj)
    assert kinds == {torch.float32: PackedLinear, torch.bfloat16: nn.Linear}


def test_experts_are_packed_one_by_one(tmp_path):
    small = {"hidden_size": 256, "moe_intermediate_size": 256, "num_attention_heads": 8, "head_dim": 32}
    path = write_model(tmp_path / "m.gguf", tiny_model("qwen3moe", **small), "qwen3moe", "Q6_K")
    family = GgufLM(path)
    model = family.load_model(CPU, torch.bfloat16)
    stack = reference(family.file.raw("blk.1.ffn_down_exps.weight").numpy(), GGMLQuantizationType.Q6_K).reshape(4, 256, 256)
    expert = model.get_submodule(f"{PART}.model.layers.1.mlp.experts.2.down_proj")
    assert torch.equal(expert.unpacked(torch.float32), torch.from_numpy(stack[2]))
    assert held(model) == pytest.approx(family.file.data_bytes, rel=0.03)


def test_loading_holds_one_tensor_more(q4_k):
    family = GgufLM(q4_k)
    with MemoryTracker() as tracker:
        model = family.load_model(CPU, torch.bfloat16)
    largest = max(info.nbytes for info in family.file.tensors.values())
    assert tracker.peak + tracker.host_peak <= held(model) + 3 * largest


# -- where no weights are


def test_blocks_are_not_made_from_weights():
    packing = GgufBlocks("Q4_K")
    with pytest.raises(AssertionError, match="read, not made"):
        packing.pack(torch.zeros(4, 256))
    assert packing.fits(nn.Linear(256, 4))
    assert not packing.fits(nn.Linear(128, 4))
    assert not packing.fits(nn.Conv2d(4, 4, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fake_base_takes_the_same_bytes_and_runs(q4_k, dtype):
    family = GgufLM(q4_k)
    real = family.load_model(CPU, dtype)
    model = family.load_model(torch.device("meta"), dtype)
    with FakeTensorMode(allow_non_fake_inputs=True), MemoryTracker() as tracker:
        make_fake(model, CPU, tracker)
        assert held(model) == held(real)
        batch = {name: torch.empty_like(value) for name, value in family.example_batch(1, (24, 1)).items()}
        loss = family.loss(model, batch)
    assert loss.shape == ()


def test_streaming_counts_packed_bytes(q4_k):
    family = GgufLM(q4_k)
    plan = MemoryPlan((BlockStreaming(),))
    model = family.load_model(CPU, torch.bfloat16, prepare=lambda m: plan.convert(m, family.blocks(m)))
    in_file = sum(info.nbytes for name, info in family.file.tensors.items() if name.startswith("blk."))
    assert streamable_bytes(family.blocks(model)) == pytest.approx(in_file, rel=0.02)


# -- the way out


def with_kind(file: GgufFile, tensor: str, kind: str) -> GgufFile:
    old = file.tensors[tensor]
    info = GgufTensor(kind, old.shape, old.nbytes, old.offset, old.path)
    return GgufFile(file.path, file.version, file.metadata, {**file.tensors, tensor: info})


def test_unsupported_kinds_are_named_together(q4_k):
    family = GgufLM(q4_k)
    for tensor, kind in (("blk.0.ffn_up.weight", "IQ4_XS"), ("blk.1.ffn_up.weight", "TQ2_0")):
        family.file = with_kind(family.file, tensor, kind)
    weights = GgufWeights(family.file)
    assert weights.unpacked_kinds() == ["IQ4_XS", "TQ2_0"]
    assert re.search(r"IQ4_XS, TQ2_0.*GiB em vez de", weights.unpacked_notice())


def test_other_kinds_are_unpacked_by_the_gguf_package(tmp_path):
    import numpy as np
    from gguf import GGUFWriter

    from lora_trainer.files.gguf_reader import open_gguf

    raw = np.random.default_rng(0).integers(0, 60, (4, 136), dtype=np.uint8)
    writer = GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_tensor("t", raw, raw_dtype=GGMLQuantizationType.IQ4_XS)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    values = GgufWeights(open_gguf(tmp_path / "m.gguf")).part(Piece("t", pairs=1, shift=1.0))
    assert torch.equal(values, torch.from_numpy(reference(raw, GGMLQuantizationType.IQ4_XS))[[0, 2, 1, 3]] + 1)


@pytest.mark.parametrize("kind", ["#999", "I8"])
def test_kinds_that_nobody_unpacks_are_refused(q4_k, kind):
    family = GgufLM(q4_k, packed=False)
    family.file = with_kind(family.file, "blk.0.ffn_up.weight", kind)
    with pytest.raises(SourceError, match=r"blk\.0\.ffn_up\.weight"):
        family.load_model(CPU, torch.bfloat16)


def test_a_gguf_base_can_be_nf4_instead(q4_k):
    family = GgufLM(q4_k, packed=False)
    plan = MemoryPlan((Quantize4bit(),))
    model = family.load_model(CPU, torch.float32, prepare=lambda m: plan.convert(m, family.blocks(m)))
    assert packed_weights(model).keys() == {"nf4"}
    plain: Tensor = GgufLM(q4_k, packed=False).load_model(CPU, torch.float32)[PART].model.layers[0].mlp.up_proj.weight
    found = model[PART].model.layers[0].mlp.up_proj.unpacked()
    assert 0.01 < float((found - plain).norm() / plain.norm()) < 0.2


def test_quantisers_leave_packed_layers_alone(q4_k):
    family = GgufLM(q4_k)
    plan = MemoryPlan((Quantize4bit(),))
    model = family.load_model(CPU, torch.float32, prepare=lambda m: plan.convert(m, family.blocks(m)))
    assert packed_weights(model).keys() == {"q4_k", "q6_k"}
