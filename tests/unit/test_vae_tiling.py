"""Tiles and slices of the VAE, and attention in chunks of queries."""

import pytest
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, UNet2DConditionModel
from make_demo.vae_start import start_as_pooling
from tiny_unets import UNETS, TinyFamily, make_batch, make_model, trainable
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lora_trainer.engine.attention import chunked_attention, fuses, slice_attention
from lora_trainer.engine.tracker import MemoryTracker
from lora_trainer.engine.vae_tiling import OVERLAP, TILE_PIXELS, tiled
from lora_trainer.techniques import MemoryPlan
from lora_trainer.techniques.attention_slicing import AttentionSlicing


@pytest.fixture(scope="module")
def vae() -> AutoencoderKL:
    """A VAE that carries a picture: each latent is the mean colour of 4x4 pixels."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        made = AutoencoderKL(
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            block_out_channels=(24, 48, 64),
            norm_num_groups=4,
            latent_channels=4,
            sample_size=1024,
        )
        start_as_pooling(made)
    return made.eval().requires_grad_(False)


def picture(size: int = 256, batch: int = 1) -> Tensor:
    """Soft blobs of colour, (B, 3, size, size) in [-1, 1]."""
    coarse = torch.randn(batch, 3, 8, 8, generator=torch.Generator().manual_seed(1))
    return F.interpolate(coarse, size=size, mode="bicubic").clamp(-1, 1)


def difference(one: Tensor, other: Tensor) -> float:
    return float((one - other).norm() / other.norm())


@pytest.mark.parametrize("tile", [64, 128])
def test_tiles_stay_near_the_whole(vae, tile):
    image = picture()
    latents = vae.encode(image).latent_dist.mean
    pixels = vae.decode(latents).sample
    with tiled(vae, tile_pixels=tile):
        tiled_latents, tiled_pixels = vae.encode(image).latent_dist.mean, vae.decode(latents).sample
    assert tiled_latents.shape == latents.shape
    assert 1e-6 < difference(tiled_latents, latents) < 0.02
    assert 1e-6 < difference(tiled_pixels, pixels) < 0.02


def test_tiles_bound_the_peak(vae):
    latents = torch.zeros(1, 4, 64, 64)
    peaks = []
    for on in (False, True):
        with MemoryTracker() as tracker, tiled(vae, on, tile_pixels=64):
            vae.decode(latents)
        peaks.append(tracker.peak)
    assert peaks[1] < 0.2 * peaks[0]


def test_tiles_are_512_pixels_whatever_the_config_says(vae):
    before = dict(vars(vae))
    with tiled(vae):
        assert (vae.tile_sample_min_size, vae.tile_latent_min_size) == (TILE_PIXELS, TILE_PIXELS // 4)
        assert (vae.use_tiling, vae.use_slicing, vae.tile_overlap_factor) == (True, True, OVERLAP)
    with pytest.raises(KeyError), tiled(vae):
        raise KeyError
    with tiled(vae, False):
        assert not vae.use_tiling
    assert vars(vae) == before


def test_slices_are_exact(vae):
    """Of images no larger than a tile."""
    images = picture(64, batch=3)
    latents = vae.encode(images).latent_dist.mean
    pixels = vae.decode(latents).sample
    with MemoryTracker() as tracker:
        vae.decode(latents)
    with tiled(vae), MemoryTracker() as sliced_tracker:
        assert torch.allclose(vae.encode(images).latent_dist.mean, latents, atol=1e-5)
        assert torch.allclose(vae.decode(latents).sample, pixels, atol=1e-5)
    assert not vae.use_slicing
    assert sliced_tracker.peak < 0.5 * tracker.peak


def test_tiling_runs_on_fake_tensors(vae):
    with torch.device("meta"):
        fake = AutoencoderKL(**vae.config)
    with FakeTensorMode():
        for module in fake.modules():
            for name, value in module._parameters.items():
                if value is not None:
                    module._parameters[name] = nn.Parameter(torch.empty(value.shape), requires_grad=False)
        slice_attention(fake, score_bytes=1 << 12)
        with tiled(fake, tile_pixels=64):
            assert fake.decode(torch.empty(1, 4, 64, 64)).sample.shape == (1, 3, 256, 256)


# -- attention in chunks


def inputs(queries: int = 50, keys: int = 40) -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [torch.randn(2, 3, length, 8, generator=rng) for length in (queries, keys, keys)]


@pytest.mark.parametrize("mask", [None, (2, 3, 50, 40), (2, 1, 1, 40)], ids=str)
@pytest.mark.parametrize("score_bytes", [1, 7000, 1 << 30])
def test_chunks_are_exact(score_bytes, mask):
    query, key, value = inputs()
    bias = None if mask is None else torch.randn(mask, generator=torch.Generator().manual_seed(1))
    whole = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    chunks = chunked_attention(query, key, value, bias, score_bytes=score_bytes)
    assert torch.allclose(chunks, whole, atol=1e-6)


def test_chunks_have_exact_gradients():
    results = []
    for attend in (F.scaled_dot_product_attention, lambda *qkv: chunked_attention(*qkv, score_bytes=7000)):
        tensors = [tensor.requires_grad_() for tensor in inputs()]
        attend(*tensors).square().sum().backward()
        results.append([tensor.grad for tensor in tensors])
    for one, other in zip(*results, strict=True):
        assert torch.allclose(one, other, atol=1e-5)


def peak(score_bytes: int, gradients: bool) -> int:
    query, key, value = (tensor.requires_grad_(gradients) for tensor in inputs(512, 512))
    kernel = torch.nn.attention.SDPBackend.MATH
    with MemoryTracker() as tracker, torch.nn.attention.sdpa_kernel(kernel):
        out = chunked_attention(query, key, value, score_bytes=score_bytes)
        if gradients:
            out.sum().backward()
    return tracker.peak


@pytest.mark.parametrize("gradients", [False, True])
def test_chunks_bound_the_scores_where_nothing_fuses(gradients):
    scores = 2 * 3 * 512 * 512 * 4
    assert peak(1 << 40, gradients) > 1.9 * scores
    assert peak(scores // 16, gradients) < 0.6 * scores


def test_the_vae_in_chunks(vae):
    latents = torch.randn(2, 4, 16, 16, generator=torch.Generator().manual_seed(2))
    made = AutoencoderKL(**vae.config).eval()
    with torch.no_grad():
        image = made.decode(latents).sample
        assert slice_attention(made, score_bytes=1 << 14) == 2
        assert torch.allclose(made.decode(latents).sample, image, atol=1e-4 * float(image.abs().max()))


@pytest.mark.parametrize("kind", ["sd15", "sdxl"])
def test_a_unet_in_chunks(kind):
    """Losses and gradients of the plain run, self- and cross-attention."""
    family, grads = TinyFamily(kind), []
    for techniques in ((), (AttentionSlicing(score_bytes=1 << 10),)):
        model = make_model(kind)
        MemoryPlan(techniques).wrap(model, family.blocks(model))
        loss = family.loss(model, make_batch(2))
        loss.backward()
        grads.append([loss, *(p.grad for p in trainable(model).values())])
    for one, other in zip(*grads, strict=True):
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-6)


def test_only_plain_attention_is_changed():
    unet = UNet2DConditionModel(**UNETS["sd15"])
    count = slice_attention(unet)
    attention = [module for module in unet.modules() if type(module).__name__ == "Attention"]
    assert count == len(attention) > 2
    attention[0].spatial_norm = nn.Identity()
    assert slice_attention(unet) == count - 1


def test_the_cpu_fuses_any_head():
    assert fuses(1, 512, torch.device("cpu"), torch.float32)
