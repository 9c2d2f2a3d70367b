"""The public workloads as data: models, sizes and inputs. Imports no model.

A spec names a Hugging Face config class with every number that is not the library's default, the inputs, and the
modules that have no data dependence between them in the forward pass. `build.py` turns it into a model.

An input is a dict with a `kind`:

    image    float32, normal(0, 1), of `shape`
    ids      int64, uniform in [low, high), of `shape`; then `columns` ((column, token), ...) are set in every row,
             and `spans` ((first, last exclusive, token), ...) likewise; float32 if `floating`
    ones     int64 ones of `shape`
    rows     int64, the `rows` of every sample one below the other; `shape` is the batch size alone
    labels   the input named `of`, with every position that holds one of `ignore` set to -100

or a plain value, which is passed as it is. The first number of every shape is the batch size; an input that is `packed`
has its first two dimensions joined afterwards, as the patches of pictures of several sizes are.

Sizes: `tiny` is for tests, `small` for measurements on a few cores. `base` are published models at batch sizes worth
planning on a large device (CLIP ViT-B/32, FLAVA, CLAP with HTSAT and RoBERTa, LLaVA of ViT-L/14-336 and a Llama of
1.1 billion parameters, Whisper small, ViT-B/16); `graphs.py` traces them without executing anything.
"""

from __future__ import annotations

import re
from typing import Any

Spec = dict[str, Any]

Numbers = tuple[int, ...]
"""Of an encoder: width, hidden width, layers and heads; those of one for pictures end in their size.

`words` are the size of a vocabulary and the end of what is drawn from it, `tokens` are positions of a model and of an
input.
"""


def image(*shape: int, packed: bool = False) -> Spec:
    """Return a spec of a float32 input; shapes begin with the batch size."""
    return {"kind": "image", "shape": shape, "packed": packed}


def ids(*shape: int, low: int = 3, high: int, **patches: Any) -> Spec:
    """Return a spec of tokens."""
    return {"kind": "ids", "shape": shape, "low": low, "high": high, **patches}


def ones(*shape: int) -> Spec:
    """Return a spec of a mask that hides nothing."""
    return {"kind": "ones", "shape": shape}


def rows(batch: int, *of_a_sample: tuple[int, ...]) -> Spec:
    """Return a spec of numbers that every sample has in as many rows, such as the sizes of its pictures."""
    return {"kind": "rows", "shape": (batch,), "rows": of_a_sample}


def encoder(width: int, hidden: int, layers: int, heads: int, **rest: Any) -> Spec:
    """Return the numbers of a transformer encoder, as most configs name them."""
    return {
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **rest,
    }


def both_sides(hidden: int, layers: int, heads: int) -> Spec:
    """Return the numbers of an encoder and of a decoder that are alike, as some configs name them."""
    named = {"ffn_dim": hidden, "layers": layers, "attention_heads": heads}
    return {f"{side}_{name}": number for side in ("encoder", "decoder") for name, number in named.items()}


def _captioned(batch: int, tokens: int, high: int, picture: int, **more: Any) -> dict[str, Spec]:
    """Return a text and its mask, and a picture; `more` is said of the text."""
    text = {"input_ids": ids(batch, tokens, high=high, **more), "attention_mask": ones(batch, tokens)}
    return {**text, "pixel_values": image(batch, 3, picture, picture)}


def _clip(batch: int, joint: int, text: Numbers, vision: Numbers, patch: int, words: Numbers, tokens: Numbers) -> Spec:
    """Return a CLIP; the last two words begin and end a text."""
    last, (*eye, picture) = words[0] - 1, vision
    special = {"eos_token_id": last, "bos_token_id": last - 1, "pad_token_id": 1, "projection_dim": joint}
    return {
        "config": {
            "projection_dim": joint,
            "text_config": encoder(*text, vocab_size=words[0], max_position_embeddings=tokens[0], **special),
            "vision_config": encoder(*eye, image_size=picture, patch_size=patch, projection_dim=joint),
        },
        "inputs": {
            **_captioned(batch, tokens[1], words[1], picture, columns=((tokens[1] - 1, last),)),
            "return_loss": True,
        },
    }


def _flava(batch: int, each: Numbers, both: Numbers, picture: int, words: Numbers, tokens: Numbers) -> Spec:
    return {
        "config": {
            **dict.fromkeys(("hidden_size", "projection_dim"), each[0]),
            "init_codebook": False,
            "image_config": encoder(*each, image_size=picture, patch_size=16, mask_token=False),
            "text_config": encoder(*each, vocab_size=words[0], max_position_embeddings=tokens[0]),
            "multimodal_config": encoder(*both),
        },
        "inputs": _captioned(batch, tokens[1], words[1], picture),
    }


def _clap(batch: int, joint: int, audio: Spec, text: Numbers, words: Numbers, tokens: Numbers, frames: int) -> Spec:
    common = {"patch_size": 4, "patch_stride": [4, 4], "enable_fusion": False, "projection_dim": joint}
    places = {"max_position_embeddings": tokens[0], "projection_dim": joint}
    return {
        "config": {
            "projection_dim": joint,
            "audio_config": {**audio, "num_hidden_layers": len(audio["depths"]), **common},
            "text_config": encoder(*text, vocab_size=words[0], **places),
        },
        "inputs": {
            "input_ids": ids(batch, tokens[1], high=words[1]),
            "attention_mask": ones(batch, tokens[1]),
            "input_features": image(batch, 1, frames, audio["num_mel_bins"]),
            "return_loss": True,
        },
    }


def _swin(widths: Numbers, depths: list[int], heads: list[int], size: int, bins: int, window: int) -> Spec:
    """Return the numbers of a Swin for sound; `widths` are those of the last stage and of a patch."""
    return {
        "hidden_size": widths[0],
        "patch_embeds_hidden_size": widths[1],
        "depths": depths,
        "num_attention_heads": heads,
        "spec_size": size,
        "num_mel_bins": bins,
        "window_size": window,
    }


def _llava(
    batch: int, joint: int, vision: Numbers, patch: int, text: Numbers, groups: int, words: Numbers, tokens: Numbers
) -> Spec:
    """Return a LLaVA; of `words` the last stands for a patch of the picture."""
    (size, high, patched), (*eye, picture) = words, vision
    patches = (picture // patch) ** 2
    seen = {"image_size": picture, "patch_size": patch, "projection_dim": joint}
    said = {"vocab_size": size, "num_key_value_heads": groups, "max_position_embeddings": tokens[0]}
    return {
        "config": {
            "image_token_index": patched,
            "image_seq_length": patches,
            "vision_config": encoder(*eye, model_type="clip_vision_model", **seen),
            "text_config": encoder(*text, model_type="llama", **said, use_cache=False),
        },
        "inputs": {
            **_captioned(batch, tokens[1], high, picture, spans=((2, 2 + patches, patched),)),
            "labels": {"kind": "labels", "of": "input_ids", "ignore": (patched,)},
        },
    }


def _whisper(
    batch: int, bins: int, each: Numbers, places: Numbers, words: Numbers, tokens: int, special: Numbers
) -> Spec:
    """Return a Whisper; `special` are the tokens of padding, of the end and of the start of a decoder."""
    return {
        "config": {
            "vocab_size": words[0],
            "num_mel_bins": bins,
            "d_model": each[0],
            **both_sides(*each[1:]),
            "max_source_positions": places[0],
            "max_target_positions": places[1],
            "pad_token_id": special[0],
            **dict.fromkeys(("bos_token_id", "eos_token_id"), special[1]),
            "decoder_start_token_id": special[2],
            **dict.fromkeys(("suppress_tokens", "begin_suppress_tokens")),
            "use_cache": False,
        },
        "inputs": {"input_features": image(batch, bins, 2 * places[0]), "labels": ids(batch, tokens, high=words[1])},
    }


def _vit(batch: int, each: Numbers, classes: int) -> Spec:
    *numbers, picture = each
    return {
        "config": encoder(*numbers, image_size=picture, patch_size=16, num_labels=classes),
        "inputs": {"pixel_values": image(batch, 3, picture, picture), "labels": ids(batch, low=0, high=classes)},
    }


def _two_tower(batch: int, each: Numbers, tokens: Numbers) -> Spec:
    numbers = dict(zip(("width", "hidden", "layers", "heads"), each, strict=True))
    inputs = {name: image(batch, count, each[0]) for name, count in zip(("image", "text"), tokens, strict=True)}
    return {"config": {**numbers, "tokens": tokens}, "inputs": inputs}


def _chain(batch: int, width: int, layers: Numbers, heads: int, patches: int, tokens: int, words: int) -> Spec:
    numbers = {"width": width, "heads": heads, "patches": patches, "tokens": tokens, "words": words}
    inputs = {"patches": image(batch, patches, width), "tokens": ids(batch, tokens, low=0, high=words)}
    return {"config": {**numbers, "layers": layers}, "inputs": inputs}


def _cameras(*shape: int) -> dict[str, Spec]:
    """Return a picture of each of two cameras."""
    return {name: image(*shape) for name in ("front", "wrist")}


def _act(batch: int, backbone: Spec, each: Numbers, chunk: int, pictures: Numbers) -> Spec:
    numbers = dict(zip(("width", "hidden", "layers", "heads"), each, strict=True))
    robot = {"state": image(batch, 14), "actions": image(batch, chunk, 14)}
    return {"config": {**backbone, **numbers, "chunk": chunk}, "inputs": {**_cameras(batch, 3, *pictures), **robot}}


def _diffusion(batch: int, config: Spec, picture: int, steps: int) -> Spec:
    """Return a diffusion policy on two observations, a chunk of actions and its noise."""
    chunks = {name: image(batch, steps, 14) for name in ("actions", "noise")}
    robot = {"state": image(batch, 2, 14), **chunks, "timesteps": ids(batch, low=0, high=100)}
    return {"config": config, "inputs": {**_cameras(batch, 2, 3, picture, picture), **robot}}


def _vla(batch: int, vision: Numbers, patch: int, expert: Numbers, steps: int) -> Spec:
    """Return a vision-language-action model on an observation, a chunk of actions and its noise."""
    of_vision, of_expert = ("width", "layers", "heads", "picture"), ("", "_hidden", "_layers", "_heads")
    config = dict(zip(of_vision, vision, strict=True)) | {"patch": patch}
    config |= {f"expert{name}": number for name, number in zip(of_expert, expert, strict=True)}
    chunks = {name: image(batch, steps, 32) for name in ("actions", "noise")}
    robot = {"state": image(batch, 32), **chunks, "time": image(batch, 1)}
    return {"config": config, "inputs": {**_cameras(batch, 3, vision[3], vision[3]), **robot}}


def config_of(model: str) -> str | None:
    """Return the class of a Hugging Face model's config; None of a model in plain torch."""
    found = re.match("(.+?)(For[A-Z]|Model)", model)
    return f"{found[1]}Config" if found else None


def _spec(model: str, *, branches: tuple[str, ...] = (), loss: str = "returned", **sizes: Spec) -> Spec:
    return {"model": model, "config": config_of(model), "loss": loss, "branches": branches, "sizes": sizes}


_RESNET18 = {"backbone": 64, "stages": (2, 2, 2, 2)}
_SMALL_RESNET = {"backbone": 8, "stages": (1, 1)}

SPECS: dict[str, Spec] = {
    # Two towers that meet in one matrix of logits.
    "clip": _spec(
        "CLIPModel",
        branches=("vision_model", "text_model"),
        tiny=_clip(4, 64, (64, 128, 2, 2), (64, 128, 2, 2, 64), 16, (1000, 990), (32, 16)),
        small=_clip(8, 256, (256, 1024, 6, 4), (256, 1024, 6, 4, 128), 16, (8192, 8000), (77, 77)),
        base=_clip(64, 512, (512, 2048, 12, 8), (768, 3072, 12, 12, 224), 32, (49408, 49000), (77, 77)),
    ),
    # Two encoders, then a third on the outputs of both.
    "flava": _spec(
        "FlavaModel",
        branches=("image_model", "text_model"),
        loss="flava",
        tiny=_flava(4, (64, 128, 2, 2), (64, 128, 2, 2), 64, (1000, 990), (32, 16)),
        small=_flava(8, (256, 1024, 4, 4), (256, 1024, 2, 4), 128, (8192, 8000), (128, 64)),
        base=_flava(32, (768, 3072, 12, 12), (768, 3072, 6, 12), 224, (30522, 30000), (512, 77)),
    ),
    # Audio (Swin, with BatchNorm buffers) and text.
    "clap": _spec(
        "ClapModel",
        branches=("audio_model", "text_model"),
        tiny=_clap(
            4, 64, _swin((128, 32), [1, 1, 1], [2, 2, 2], 64, 16, 4), (64, 128, 2, 2), (1000, 990), (40, 16), 256
        ),
        small=_clap(
            4, 256, _swin((384, 96), [2, 2, 2], [4, 8, 16], 128, 32, 8), (256, 1024, 4, 4), (8192, 8000), (130, 64), 512
        ),
        base=_clap(
            32,
            512,
            _swin((768, 96), [2, 2, 6, 2], [4, 8, 16, 32], 256, 64, 8),
            (768, 3072, 12, 12),
            (50265, 50000),
            (514, 77),
            1001,
        ),
    ),
    # Vision encoder, projector, masked_scatter, causal language model: a chain.
    "llava": _spec(
        "LlavaForConditionalGeneration",
        tiny=_llava(2, 64, (64, 128, 3, 2, 64), 16, (64, 160, 2, 4), 2, (1000, 990, 999), (128, 32)),
        small=_llava(4, 256, (256, 1024, 6, 4, 128), 16, (256, 688, 6, 8), 4, (8192, 8000, 8191), (256, 128)),
        base=_llava(
            2, 768, (1024, 4096, 24, 16, 336), 14, (2048, 5632, 22, 32), 4, (32064, 31999, 32000), (2048, 1024)
        ),
    ),
    # Encoder and decoder: a chain, but for the decoder's first self-attention.
    "whisper": _spec(
        "WhisperForConditionalGeneration",
        branches=("encoder", "decoder"),
        tiny=_whisper(2, 16, (64, 128, 2, 2), (64, 32), (1000, 990), 16, (1, 2, 2)),
        small=_whisper(2, 80, (256, 1024, 4, 4), (250, 64), (8192, 8000), 64, (1, 2, 2)),
        base=_whisper(8, 80, (768, 3072, 12, 12), (1500, 448), (51865, 50000), 448, (50257, 50257, 50258)),
    ),
    # The control: one chain, nothing to overlap in the forward pass.
    "vit_control": _spec(
        "ViTForImageClassification",
        tiny=_vit(4, (64, 128, 2, 2, 64), 10),
        small=_vit(8, (256, 1024, 6, 4, 128), 100),
        base=_vit(64, (768, 3072, 12, 12, 224), 1000),
    ),
    # Two plain torch encoders of unequal length; the numbers of the spike in the notes are the small size.
    "two_tower": _spec(
        "TwoTower",
        branches=("image", "text"),
        tiny=_two_tower(4, (32, 64, 2, 2), (10, 6)),
        small=_two_tower(4, (256, 1024, 4, 4), (50, 32)),
    ),
    # An encoder of images that feeds a language model: inside one micro-batch nothing overlaps.
    "chain": _spec("Chain", tiny=_chain(4, 32, (1, 1), 2, 9, 8, 50), small=_chain(4, 192, (3, 4), 4, 64, 64, 1000)),
    # One ResNet-18 for two cameras, then a transformer.
    "act": _spec(
        "Act",
        branches=("backbone", "vae"),
        tiny=_act(2, _SMALL_RESNET, (16, 32, 1, 2), 10, (32, 32)),
        small=_act(8, _RESNET18, (512, 3200, 4, 8), 100, (96, 96)),
        base=_act(8, _RESNET18, (512, 3200, 4, 8), 100, (480, 640)),
    ),
    # A ResNet-18 for each of two cameras, then a U-Net over time.
    "diffusion_policy": _spec(
        "DiffusionPolicy",
        branches=("front", "wrist"),
        tiny=_diffusion(2, {**_SMALL_RESNET, "widths": (16, 32), "keypoints": 4, "time_width": 8}, 16, 4),
        small=_diffusion(8, {**_RESNET18, "backbone": 32, "widths": (64, 128, 256)}, 84, 16),
        base=_diffusion(64, {**_RESNET18, "widths": (512, 1024, 2048)}, 84, 16),
    ),
    # A frozen vision transformer over two cameras, and an expert that attends to each of its layers.
    "vla": _spec(
        "Vla",
        branches=("vision", "expert"),
        tiny=_vla(2, (16, 2, 2, 16), 8, (16, 32, 2, 2), 3),
        small=_vla(8, (192, 6, 3, 96), 16, (180, 512, 8, 4), 20),
        base=_vla(8, (768, 12, 12, 224), 16, (720, 2048, 16, 15), 50),
    ),
}
