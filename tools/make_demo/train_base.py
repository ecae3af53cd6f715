"""Train the demo base: a Stable Diffusion of a few million parameters that draws coloured shapes.

The idea: real classes at tiny size. An `AutoencoderKL` (factor 4), a `CLIPTextModel` with a tokenizer of its own and a
`UNet2DConditionModel` are trained on procedural drawings (`draw.py`) in under an hour on two CPU cores, and saved as a
`StableDiffusionPipeline` folder that every tool reads as it reads Stable Diffusion 1.5: epsilon prediction, the same
noise schedule, latents scaled by 0.18215. Training lasts a given time rather than a number of steps, since machines
differ, and goes on from the last state in `--work`. The weights kept are an exponential moving average.

    OMP_WAIT_POLICY=PASSIVE python -m lora_trainer.demo.train_base --out lora_trainer/demo/base

Left out: training the encoder (`vae_start.py` sets it), a perceptual or adversarial loss for the decoder (flat drawings
do not need it), data loading (all latents fit in memory).
"""

from __future__ import annotations

import argparse
import copy
import time
from pathlib import Path
from random import Random

import numpy as np
import torch
from diffusers import AutoencoderKL, DDIMScheduler, StableDiffusionPipeline, UNet2DConditionModel
from diffusers.models.attention_processor import AttnProcessor
from PIL import Image
from torch import Tensor, nn
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from . import draw
from .tokenizer import MAX_LENGTH, write_tokenizer
from .vae_start import pooled, start_as_pooling

SCALING_FACTOR = 0.18215  # Stable Diffusion's; `whiten` makes it true of our VAE
DEVIATIONS = torch.tensor([1.1, 1.1, 1.1, 0.6])  # of the scaled latents: 1 together; less for the long-tailed fourth
TEXT_WIDTH = 96
MIN_SNR_GAMMA = 5.0  # Hang et al. 2023, "Efficient Diffusion Training via Min-SNR Weighting Strategy"
GRID_PROMPTS = (
    "a red circle on a blue background",
    "a yellow star on a black background",
    "a green heart on a pink background",
    "a purple square on a white background",
    "an orange triangle on a cyan background",
    "a white crescent on a green background",
    "a small black ring on a yellow background",
    "a large cyan cross on a gray background",
    "a pink diamond on a striped blue background",
    "a red circle and a blue star on a white background",
)


def to_tensor(images: list[Image.Image]) -> Tensor:
    """Images to a uint8 tensor (B, 3, H, W)."""
    return torch.from_numpy(np.stack([np.asarray(i) for i in images])).permute(0, 3, 1, 2).contiguous()


def scaled(pixels: Tensor) -> Tensor:
    """uint8 to float in [-1, 1], same shape."""
    return pixels.float() / 127.5 - 1


def build_vae() -> AutoencoderKL:
    """A VAE that averages 4x4 patches; the decoder is yet to be trained."""
    vae = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 3,
        up_block_types=("UpDecoderBlock2D",) * 3,
        block_out_channels=(24, 48, 64),
        norm_num_groups=4,
        latent_channels=4,
        sample_size=draw.SIZE,
        scaling_factor=SCALING_FACTOR,
    )
    start_as_pooling(vae)
    return vae.eval()


def build_unet() -> UNet2DConditionModel:
    return UNet2DConditionModel(
        sample_size=draw.SIZE // 4,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        block_out_channels=(64, 128, 128),
        layers_per_block=1,
        norm_num_groups=16,
        attention_head_dim=4,  # read as the number of heads, as in SD 1.5
        cross_attention_dim=TEXT_WIDTH,
    )


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModel:
    config = CLIPTextConfig(
        vocab_size=len(tokenizer),
        hidden_size=TEXT_WIDTH,
        intermediate_size=4 * TEXT_WIDTH,
        projection_dim=TEXT_WIDTH,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=MAX_LENGTH,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    encoder = CLIPTextModel(config)
    # Wide enough that words which training never shows, such as a LoRA's trigger, are told apart.
    nn.init.normal_(encoder.get_input_embeddings().weight, std=0.3)
    return encoder


def learning_rate(progress: float, peak: float, warmup: float = 0.03, decay: float = 0.35) -> float:
    """Warm up, stay, and fall to zero over the last part of the training time (progress from 0 to 1)."""
    return peak * max(0.0, min(1.0, progress / warmup, (1 - progress) / decay))


class Clock:
    """Share of a time budget that has passed, and whether something that happens every so often is due."""

    def __init__(self, minutes: float, every: float = 4.0) -> None:
        self.start, self.budget, self.every, self.last = time.monotonic(), minutes * 60, every * 60, time.monotonic()

    def progress(self) -> float:
        return (time.monotonic() - self.start) / self.budget

    def due(self) -> bool:
        if time.monotonic() - self.last < self.every:
            return False
        self.last = time.monotonic()
        return True


def train_decoder(vae: AutoencoderKL, pixels: Tensor, minutes: float) -> None:
    """L1 and squared reconstruction error from latents of the fixed encoder; `pixels` (N, 3, H, W) uint8."""
    latents = encode(vae, pixels)
    noise = 0.02 / SCALING_FACTOR  # so that the decoder forgives a UNet that is not exact
    parts = nn.ModuleList([vae.post_quant_conv, vae.decoder])
    optimizer = torch.optim.AdamW(parts.parameters(), lr=0.0, weight_decay=0.0, betas=(0.9, 0.99))
    clock, step, total = Clock(minutes), 0, 0.0
    while (progress := clock.progress()) < 1:
        optimizer.param_groups[0]["lr"] = learning_rate(progress, 5e-4)
        chosen = torch.randint(len(pixels), (8,))
        z = latents[chosen] + noise * torch.randn(8, *latents.shape[1:])
        with torch.autocast("cpu", torch.bfloat16):
            decoded = vae.decode(z).sample
        difference = decoded.float() - scaled(pixels[chosen])
        error = difference.abs().mean()
        loss = error + 2 * difference.square().mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(parts.parameters(), 1.0)
        optimizer.step()
        step, total = step + 1, total + error.item()
        if step % 50 == 0:
            print(f"decoder step {step} {progress:.0%} error {total / 50:.4f}", flush=True)
            total = 0.0


@torch.no_grad()
def encode(vae: AutoencoderKL, pixels: Tensor) -> Tensor:
    """Unscaled posterior means (N, 4, h, w) of uint8 pixels (N, 3, H, W), nearly."""
    return torch.cat([pooled(vae, scaled(p)) for p in pixels.split(64)])


@torch.no_grad()
def whiten(vae: AutoencoderKL, pixels: Tensor) -> None:
    """Fold a scale and an offset into the VAE's 1x1 convolutions, so that scaled latents have mean 0 and deviation 1.

    With m the mean of a channel and s its wanted deviation over the present one, z becomes (z - m) s.
    """
    latents = encode(vae, pixels)
    mean = latents.mean((0, 2, 3))
    scale = DEVIATIONS / SCALING_FACTOR / latents.std((0, 2, 3))
    before, after = vae.quant_conv, vae.post_quant_conv
    before.weight[:4] *= scale[:, None, None, None]
    before.bias[:4] = (before.bias[:4] - mean) * scale
    before.bias[4:] += 2 * scale.log()  # the log variance
    after.bias += after.weight[:, :, 0, 0] @ mean
    after.weight /= scale[None, :, None, None]


def snr_weights(alphas_cumprod: Tensor, timesteps: Tensor) -> Tensor:
    """min(SNR, gamma) / SNR for each timestep (B,): the min-SNR weight of an epsilon loss."""
    snr = alphas_cumprod[timesteps] / (1 - alphas_cumprod[timesteps])
    return snr.clamp(max=MIN_SNR_GAMMA) / snr


class Average:
    """Exponential moving average of modules' parameters, with a horizon that grows with the number of steps."""

    def __init__(self, modules: nn.ModuleList, decay: float = 0.995) -> None:
        self.modules, self.decay, self.steps = copy.deepcopy(modules), decay, 0

    @torch.no_grad()
    def update(self, modules: nn.ModuleList) -> None:
        self.steps += 1
        decay = min(self.decay, (1 + self.steps) / (10 + self.steps))
        torch._foreach_lerp_(list(self.modules.parameters()), list(modules.parameters()), 1 - decay)


def scheduler() -> DDIMScheduler:
    return DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )


def assemble(
    vae: AutoencoderKL, unet: UNet2DConditionModel, text_encoder: CLIPTextModel, tokenizer: CLIPTokenizer
) -> StableDiffusionPipeline:
    return StableDiffusionPipeline(
        vae=vae,
        text_encoder=text_encoder,
        tokenizer=tokenizer,
        unet=unet,
        scheduler=scheduler(),
        safety_checker=None,
        feature_extractor=None,
        requires_safety_checker=False,
    )


def save(pipe: StableDiffusionPipeline, folder: Path) -> None:
    """Write a half-precision copy, of the pipeline."""
    half = assemble(
        copy.deepcopy(pipe.vae).half(),
        copy.deepcopy(pipe.unet).to(torch.float16, memory_format=torch.contiguous_format),
        copy.deepcopy(pipe.text_encoder).half(),
        pipe.tokenizer,
    )
    half.save_pretrained(folder, safe_serialization=True)


def grid(pipe: StableDiffusionPipeline, path: Path, prompts: tuple[str, ...] = GRID_PROMPTS) -> None:
    """Two drawings of each prompt, side by side: 25 DDIM steps at guidance 4."""
    pipe.set_progress_bar_config(disable=True)
    rows = [
        pipe(
            list(prompts), num_inference_steps=25, guidance_scale=4.0, generator=torch.Generator().manual_seed(seed)
        ).images
        for seed in (0, 1)
    ]
    sheet = Image.new("RGB", (draw.SIZE * len(prompts), draw.SIZE * len(rows)))
    for row, images in enumerate(rows):
        for column, image in enumerate(images):
            sheet.paste(image, (column * draw.SIZE, row * draw.SIZE))
    sheet.resize((sheet.width * 2, sheet.height * 2)).save(path)


def train_unet(
    pipe: StableDiffusionPipeline, latents: Tensor, captions: list[str], minutes: float, work: Path, batch: int = 32
) -> None:
    """Epsilon prediction, UNet and text encoder together; `latents` (N, 4, h, w) are scaled.

    Leaves the averaged weights in `pipe`.
    """
    ids = pipe.tokenizer(captions, padding="max_length", max_length=MAX_LENGTH, truncation=True, return_tensors="pt")
    ids = ids.input_ids  # (N, 77)
    pipe.unet.to(memory_format=torch.channels_last)  # this and the plain attention make a step a third faster here
    pipe.unet.set_attn_processor(AttnProcessor())
    modules = nn.ModuleList([pipe.unet, pipe.text_encoder]).train()
    average = Average(modules)
    optimizer = torch.optim.AdamW(modules.parameters(), lr=0.0, weight_decay=0.0, betas=(0.9, 0.99), fused=True)
    noise_schedule = pipe.scheduler
    state_file = work / "state.pt"
    if state_file.exists():  # go on with an earlier run
        live, averaged, moments = torch.load(state_file)
        modules.load_state_dict(live)
        average.modules.load_state_dict(averaged)
        optimizer.load_state_dict(moments)
        average.steps = 10**6
    clock, step, total = Clock(minutes), 0, 0.0
    while (progress := clock.progress()) < 1:
        optimizer.param_groups[0]["lr"] = learning_rate(progress, 1e-3)
        chosen = torch.randint(len(latents), (batch,))
        x = latents[chosen].contiguous(memory_format=torch.channels_last)
        noise = torch.randn_like(x)
        t = (1000 * torch.rand(batch).sqrt()).long()  # more of the noisy steps, where the words decide
        with torch.autocast("cpu", torch.bfloat16):
            embeds = pipe.text_encoder(ids[chosen]).last_hidden_state  # (B, 77, width)
            predicted = pipe.unet(noise_schedule.add_noise(x, noise, t), t, embeds).sample
        error = (predicted.float() - noise).square().mean((1, 2, 3))
        loss = (error * snr_weights(noise_schedule.alphas_cumprod, t) * (1 + 3 * (t / 1000) ** 2)).mean()
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(modules.parameters(), 1.0)
        optimizer.step()
        average.update(modules)
        step, total = step + 1, total + error.mean().item()
        if step % 50 == 0:
            print(f"unet step {step} {progress:.0%} error {total / 50:.4f}", flush=True)
            total = 0.0
        if clock.due():
            snapshot(pipe, average, work, step)
            fresh = state_file.with_suffix(".new")
            torch.save([part.state_dict() for part in (modules, average.modules, optimizer)], fresh)
            fresh.replace(state_file)  # at once, so that a kill leaves a whole file
    snapshot(pipe, average, work, step)
    modules.load_state_dict(average.modules.state_dict())


def snapshot(pipe: StableDiffusionPipeline, average: Average, work: Path, step: int) -> None:
    """Write the averaged weights as a pipeline and a grid of drawings."""
    unet, text_encoder = average.modules
    averaged = assemble(pipe.vae, unet.eval(), text_encoder.eval(), pipe.tokenizer)
    save(averaged, work / "snapshot")
    grid(averaged, work / f"grid_{step:05d}.png")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("train_base"), help="snapshots, grids and the trained VAE")
    parser.add_argument("--minutes", type=float, default=50.0, help="for the UNet and the text encoder")
    parser.add_argument("--vae-minutes", type=float, default=7.0)
    parser.add_argument("--examples", type=int, default=16000)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(0)
    args.work.mkdir(parents=True, exist_ok=True)
    rng = Random(0)
    images, captions = map(list, zip(*(draw.example(rng) for _ in range(args.examples)), strict=True))
    pixels = to_tensor(images)

    vae_folder = args.work / "vae"
    if vae_folder.exists():
        vae = AutoencoderKL.from_pretrained(vae_folder)
    else:
        vae = build_vae()
        whiten(vae, pixels[:2000])
        collages = to_tensor([draw.collage(rng) for _ in range(args.examples // 2)])
        train_decoder(vae, torch.cat([pixels, collages]), args.vae_minutes)
        vae.save_pretrained(vae_folder)
    vae.eval().requires_grad_(False)

    write_tokenizer(captions, args.out / "tokenizer")
    tokenizer = CLIPTokenizer.from_pretrained(args.out / "tokenizer")
    pipe = assemble(vae, build_unet(), build_text_encoder(tokenizer), tokenizer)
    print({name: sum(p.numel() for p in getattr(pipe, name).parameters()) for name in ("vae", "text_encoder", "unet")})
    latents = encode(vae, pixels) * SCALING_FACTOR
    train_unet(pipe, latents, captions, args.minutes, args.work)
    save(pipe, args.out)


if __name__ == "__main__":
    main()
