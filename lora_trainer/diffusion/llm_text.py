"""Language models as text encoders: Qwen2.5-VL's and Qwen3-VL's text parts (Qwen-Image, 2.1), Qwen3 (Z-Image, FLUX.2 klein),
Mistral (FLUX.2 dev).

What families use:

    ENCODER = language_slot("text_encoder", "qwen3", "Qwen3-4B (qwen_3_4b.safetensors)", layers=(-2,), prefixes=(...))
        A Slot for `open_parts`. `layers`: the hidden states that will be asked for, counted as transformers counts them
        (0 is the embeddings, -1 the last, after the final norm unless `normed` is false). Layers after the last of them
        are neither read nor built.
        `prefixes`: where it lies in all-in-one files ("text_encoders.qwen3_4b.transformer.").
        arch/<release>/text_encoder/config.json is the text part's own config (flat), or a whole one with `text_config`.
    hidden_states(encoder, input_ids, attention_mask, layers) -> [(B, L, D), ...] in the order of `layers`
        Works on encoders streamed, quantised or fake. True in `attention_mask` (B, L) is a token; padding on either side.
    padded(ids, length, pad_id) -> {"input_ids": (L,), "attention_mask": (L,) bool}    what `tokenize` returns
    cut_padding(input_ids, attention_mask) -> the same without columns that are padding in every row; fakes stay whole
    llm_tokenizers.find_llm_tokenizer(source, settings.tokenizer, "tokenizer", QWEN3_PLACES, "Qwen3") -> a tokenizer

Only the body is ever built, of transformers' own layers: no logits, no vision tower, no second copy of the embeddings. Files
are ComfyUI's (fp8 with any companions), transformers folders and llama.cpp's GGUF. Left out: nvfp4 files.
"""

import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import gcd
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..bases.parts import NOT_OURS, Config, Slot
from ..bases.weights import Locate, Piece, Spelled
from ..config.names import shown
from ..engine.host import is_fake
from ..errors import SourceError
from ..files.gguf_names import tensor_name
from ..files.kinds import LANGUAGE_MODEL, VISION_LANGUAGE, Part
from ..seam.family import Example

STARTS = ("model.", "model.language_model.", "language_model.model.", "language_model.", "")
"""What may stand before `layers.0.…`."""
_LAYER = "layers.{}.input_layernorm.weight"
_NOT_TEXT = ("architectures", "dtype", "torch_dtype", "model_type", "vision_config", "text_config", "auto_map", *NOT_OURS)


@dataclass(frozen=True)
class _Model:
    title: str
    kind: str
    """Prefix of transformers' class names: <kind>Model, <kind>Config."""
    types: tuple[str, ...]
    """`model_type` of configs that hold such a text part."""
    pairs: bool = False
    """llama.cpp keeps rows that rotate together side by side."""
    like: str = ""
    """Another model whose tensors are the same, but for the vision tower, which files may lack."""


MODELS = {
    "qwen2_5_vl": _Model("Qwen2.5-VL", "Qwen2_5_VLText", ("qwen2_5_vl", "qwen2_5_vl_text")),
    "qwen3_vl": _Model("Qwen3-VL", "Qwen3VLText", ("qwen3_vl", "qwen3_vl_text"), like="qwen3"),
    "qwen3": _Model("Qwen3", "Qwen3", ("qwen3",)),
    "mistral": _Model("Mistral", "Mistral", ("mistral", "mistral3"), pairs=True),
}


def language_slot(
    part: str, model: str, title: str, layers: Sequence[int], prefixes: tuple[str, ...] = (), *, normed: bool = True
) -> Slot:
    """`model`: a key of MODELS; `part`: the option of `modelo` that gives its file."""
    what = shown("model", part)

    def describe(tensors: Part, standard: Config) -> tuple[Config, Locate]:
        _check_kind(tensors, model, title, what)
        config = _derive(tensors, standard)
        _check_whole(tensors, config, standard, layers, what)
        return config, locate(model, tensors, standard)

    return Slot(
        part, LANGUAGE_MODEL, title, prefixes, lambda config: build(config, model, layers, what, normed), describe,
        locate(model), also=(VISION_LANGUAGE,),
    )  # fmt: skip


# -- building


class Rotary(nn.Module):
    """Rotary positions made when they are wanted: its frequencies are neither cast with the model nor left on meta."""

    def __init__(self, frequencies: Tensor, scaling: float) -> None:
        super().__init__()
        self.frequencies, self.scaling = tuple(frequencies.tolist()), scaling

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines (1, L, head) of positions (1, L), in x's dtype."""
        frequencies = torch.tensor(self.frequencies, device=x.device, dtype=torch.float32)
        angles = position_ids[..., None].float() * frequencies
        angles = torch.cat([angles, angles], -1)
        return (angles.cos() * self.scaling).to(x.dtype), (angles.sin() * self.scaling).to(x.dtype)


def build(config: Mapping[str, Any], model: str, layers: Sequence[int], what: str, normed: bool = True) -> nn.Module:
    """The body with as many layers as `layers` need; its `whole_layers` says how many there are in all."""
    import transformers

    known = text_config(config)
    kind = str(config.get("model_type") or known.get("model_type") or "")
    if kind and kind not in MODELS[model].types:
        raise another(kind, MODELS[model].title, what)
    known = {name: value for name, value in known.items() if name not in _NOT_TEXT}
    config_class = getattr(transformers, f"{MODELS[model].kind}Config")
    whole = int(known.get("num_hidden_layers") or config_class().num_hidden_layers)
    depth = max(_place(index, whole) for index in layers)
    if depth > whole:
        raise _too_shallow(whole, depth, what)
    cut = {"layer_types": known["layer_types"][:depth]} if known.get("layer_types") else {}
    no_marks = dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"))  # nothing is generated
    made = config_class(**known | {"num_hidden_layers": depth, **cut, **no_marks})
    made._attn_implementation = "sdpa"
    body = getattr(transformers, f"{MODELS[model].kind}Model")(made)
    with torch.device("cpu"):
        rotary = type(body.rotary_emb)(config=made)
    body.rotary_emb = Rotary(rotary.inv_freq, float(rotary.attention_scaling))
    body.whole_layers = whole
    if depth < whole or not normed:
        body.norm = nn.Identity()
    return cast(nn.Module, body)


def text_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Of the text part. Some folders hold it twice, flat and nested."""
    return dict(config.get("text_config") or config)


def _place(index: int, whole: int) -> int:
    return index if index >= 0 else whole + 1 + index


# -- reading


def locate(model: str, part: Part | None = None, standard: Config | None = None) -> Locate:
    """Places of a parameter, in safetensors of whatever nesting and in GGUF."""
    prefix = part.prefix if part else ""
    head = _head_dim(part, standard) if part and standard and MODELS[model].pairs else 0

    def pieces(name: str) -> list[Piece]:
        key = prefix + gguf_key(name)
        rows = part.shape(gguf_key(name)) if part and head else None
        turned = rows is not None and key.rpartition(".")[0].endswith((".attn_q", ".attn_k"))
        return [
            *(Piece(prefix + start + name) for start in STARTS),
            Piece(key, pairs=rows[0] // head if rows and turned else 0),
        ]

    return pieces


def gguf_key(name: str) -> str:
    """llama.cpp's name for a parameter of the body. Qwen3's has all layers that any of MODELS has."""
    found = tensor_name(f"model.{name}", "qwen3")
    assert found is not None, f"no key for {name}"
    return found


def _spelled(part: Part) -> Spelled:
    return Spelled(part.header, locate("qwen3", part))


def _head_dim(part: Part, standard: Config) -> int:
    """Of the per-head norms; else the released model's, or what queries and keys have in common where that is less."""
    file = _spelled(part)
    if norm := file.shape("layers.0.self_attn.q_norm.weight"):
        return norm[0]
    usual = text_config(standard)
    head = int(usual.get("head_dim") or usual["hidden_size"] // usual["num_attention_heads"])
    rows = [(file.shape(f"layers.0.self_attn.{name}_proj.weight") or (head,))[0] for name in "qk"]
    return gcd(*rows, head)


def _derive(part: Part, standard: Config) -> Config:
    """All sizes can be read off the tensors."""
    file, head, attention = _spelled(part), _head_dim(part, standard), "layers.0.self_attn"
    vocabulary, width = file.sides("embed_tokens")
    layers = file.count(_LAYER) + ("norm.weight" not in file)  # cut off after the last state that is used (Mistral for FLUX.2)
    config = text_config(standard)
    config.pop("layer_types", None)
    return config | {
        "vocab_size": vocabulary, "hidden_size": width, "num_hidden_layers": layers, "head_dim": head,
        "num_attention_heads": file.sides(f"{attention}.q_proj")[0] // head,
        "num_key_value_heads": max(1, file.sides(f"{attention}.k_proj")[0] // head),
        "intermediate_size": file.sides("layers.0.mlp.gate_proj")[0],
    }  # fmt: skip


def _check_whole(part: Part, config: Config, standard: Config, layers: Sequence[int], what: str) -> None:
    """Layers counted from the end would be others in a file that has a gap, or is the first of several shards."""
    counted, usual = _spelled(part).count(_LAYER), text_config(standard)
    starts = "|".join(re.escape(part.prefix + start) for start in STARTS)
    number = re.compile(rf"(?:{starts})layers\.(\d+)\.|{re.escape(part.prefix)}blk\.(\d+)\.")
    last = max((int(found[1] or found[2]) for key in part.header if (found := number.match(key))), default=-1)
    if last >= counted:
        raise _too_shallow(counted, last + 1, what)
    few = config["hidden_size"] == usual["hidden_size"] and config["num_hidden_layers"] < usual["num_hidden_layers"]
    if min(layers) < 0 and few:
        raise _too_shallow(config["num_hidden_layers"], usual["num_hidden_layers"], what)


def _check_kind(part: Part, wanted: str, title: str, what: str) -> None:
    """Qwen3 alone has a norm in each head, Qwen2.5 alone has biases; Mistral has neither."""
    file, attention = _spelled(part), "layers.0.self_attn"
    if f"{attention}.q_norm.weight" in file:
        found = "qwen3_vl" if any("visual." in key for key in part.header) else "qwen3"
    elif f"{attention}.q_proj.bias" in file:
        found = "qwen2_5_vl"
    else:
        found = "mistral"
    if found not in (wanted, MODELS[wanted].like):
        raise another(MODELS[found].title, title, what)


def another(has: str, wants: str, what: str) -> SourceError:
    """The error for a language model in another's place."""
    return SourceError.said(
        pt=f"é um modelo de linguagem {has}, não o {wants}",
        en=f"this is a {has} language model, not {wants}",
        hint_pt=f"dê aqui o {wants}",
        hint_en=f"give {wants} here",
        where=what,
    )


def _too_shallow(has: int, wants: int, what: str) -> SourceError:
    return SourceError.said(
        pt=f"o codificador de texto tem {has} camadas, e são precisas {wants}",
        en=f"the text encoder has {has} layers, {wants} are needed",
        hint_pt="o arquivo está incompleto ou é de um modelo menor",
        hint_en="the file is incomplete or of a smaller model",
        where=what,
    )


# -- running


def hidden_states(encoder: nn.Module, input_ids: Tensor, attention_mask: Tensor, layers: Sequence[int]) -> list[Tensor]:
    """(B, L, D) of each of `layers`; ids (B, L) and mask (B, L), true where there is a token."""
    body: Any = encoder
    wanted = [_place(index, body.whole_layers) for index in layers]
    x, found = body.embed_tokens(input_ids), {}
    positions = torch.arange(input_ids.shape[1], device=x.device)[None]
    rotary, mask = body.rotary_emb(x, positions), causal_mask(attention_mask.to(x.device))
    with _summed_in_float32(x):
        x = x.float() if x.dtype is torch.float16 else x
        for number, layer in enumerate([*body.layers, None]):
            if number in wanted:
                found[number] = body.norm(x) if number == body.whole_layers else x
            if layer is None or number == max(wanted):
                break
            x = layer(x, attention_mask=mask, position_ids=positions, position_embeddings=rotary)
            x = x if isinstance(x, Tensor) else x[0]  # transformers before 5
    return [found[number] for number in wanted]


def _summed_in_float32(x: Tensor) -> AbstractContextManager[Any]:
    """Of fp16: single tokens of these models grow beyond it from layer to layer, though no layer's own answer does."""
    return torch.autocast(x.device.type, dtype=torch.float16) if x.dtype is torch.float16 else nullcontext()


def causal_mask(attention_mask: Tensor) -> Tensor:
    """(B, L) -> (B, 1, L, L), true where a query (row) may look: at tokens, not after itself."""
    length = attention_mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=attention_mask.device).tril()
    return causal[None, None] & attention_mask.bool()[:, None, None, :]


def padded(ids: Sequence[int], length: int, pad_id: int) -> Example:
    """Cut to `length`, or padded at its end."""
    ids = list(ids[:length])
    places = torch.arange(length)
    return {
        "input_ids": torch.tensor([*ids, *[pad_id] * (length - len(ids))], dtype=torch.int64),
        "attention_mask": places < len(ids),
    }


def cut_padding(input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
    """(B, L) both. Since attention looks back only, tokens before the padding do not notice."""
    if is_fake(input_ids):  # the longest caption, for the plan
        return input_ids, attention_mask
    longest = max(1, int(attention_mask.sum(1).max()))
    return input_ids[:, :longest], attention_mask[:, :longest]
