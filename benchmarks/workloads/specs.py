"""The public workloads as data: models, sizes and inputs. Imports nothing.

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

from typing import Any

Spec = dict[str, Any]


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


def _diffusion(batch: int, picture: int, steps: int) -> dict[str, Spec]:
    """Return inputs of a diffusion policy: two observations, and a chunk of actions with its noise."""
    cameras = {name: image(batch, 2, 3, picture, picture) for name in ("front", "wrist")}
    chunks = {name: image(batch, steps, 14) for name in ("actions", "noise")}
    return {**cameras, "state": image(batch, 2, 14), **chunks, "timesteps": ids(batch, low=0, high=100)}


def _flow(batch: int, picture: int, steps: int) -> dict[str, Spec]:
    """Return inputs of a vision-language-action model: an observation, and a chunk of actions with its noise."""
    cameras = {name: image(batch, 3, picture, picture) for name in ("front", "wrist")}
    chunks = {name: image(batch, steps, 32) for name in ("actions", "noise")}
    return {**cameras, "state": image(batch, 32), **chunks, "time": image(batch, 1)}


def _expert(width: int, layers: int, heads: int, hidden: int) -> dict[str, int]:
    return {"expert": width, "expert_layers": layers, "expert_heads": heads, "expert_hidden": hidden}


SPECS: dict[str, Spec] = {
    # Two towers that meet in one matrix of logits.
    "clip": {
        "model": "CLIPModel",
        "config": "CLIPConfig",
        "loss": "returned",
        "branches": ("vision_model", "text_model"),
        "sizes": {
            "tiny": {
                "config": {
                    "projection_dim": 64,
                    "text_config": encoder(
                        64,
                        128,
                        2,
                        2,
                        vocab_size=1000,
                        max_position_embeddings=32,
                        eos_token_id=999,
                        bos_token_id=998,
                        pad_token_id=1,
                        projection_dim=64,
                    ),
                    "vision_config": encoder(64, 128, 2, 2, image_size=64, patch_size=16, projection_dim=64),
                },
                "inputs": {
                    "input_ids": ids(4, 16, high=990, columns=((15, 999),)),
                    "attention_mask": ones(4, 16),
                    "pixel_values": image(4, 3, 64, 64),
                    "return_loss": True,
                },
            },
            "small": {
                "config": {
                    "projection_dim": 256,
                    "text_config": encoder(
                        256,
                        1024,
                        6,
                        4,
                        vocab_size=8192,
                        max_position_embeddings=77,
                        eos_token_id=8191,
                        bos_token_id=8190,
                        pad_token_id=1,
                        projection_dim=256,
                    ),
                    "vision_config": encoder(256, 1024, 6, 4, image_size=128, patch_size=16, projection_dim=256),
                },
                "inputs": {
                    "input_ids": ids(8, 77, high=8000, columns=((76, 8191),)),
                    "attention_mask": ones(8, 77),
                    "pixel_values": image(8, 3, 128, 128),
                    "return_loss": True,
                },
            },
            "base": {
                "config": {
                    "projection_dim": 512,
                    "text_config": encoder(
                        512,
                        2048,
                        12,
                        8,
                        vocab_size=49408,
                        max_position_embeddings=77,
                        eos_token_id=49407,
                        bos_token_id=49406,
                        pad_token_id=1,
                        projection_dim=512,
                    ),
                    "vision_config": encoder(768, 3072, 12, 12, image_size=224, patch_size=32, projection_dim=512),
                },
                "inputs": {
                    "input_ids": ids(64, 77, high=49000, columns=((76, 49407),)),
                    "attention_mask": ones(64, 77),
                    "pixel_values": image(64, 3, 224, 224),
                    "return_loss": True,
                },
            },
        },
    },
    # Two encoders, then a third on the outputs of both.
    "flava": {
        "model": "FlavaModel",
        "config": "FlavaConfig",
        "loss": "flava",
        "branches": ("image_model", "text_model"),
        "sizes": {
            "tiny": {
                "config": {
                    "hidden_size": 64,
                    "projection_dim": 64,
                    "init_codebook": False,
                    "image_config": encoder(64, 128, 2, 2, image_size=64, patch_size=16, mask_token=False),
                    "text_config": encoder(64, 128, 2, 2, vocab_size=1000, max_position_embeddings=32),
                    "multimodal_config": encoder(64, 128, 2, 2),
                },
                "inputs": {
                    "input_ids": ids(4, 16, high=990),
                    "attention_mask": ones(4, 16),
                    "pixel_values": image(4, 3, 64, 64),
                },
            },
            "small": {
                "config": {
                    "hidden_size": 256,
                    "projection_dim": 256,
                    "init_codebook": False,
                    "image_config": encoder(256, 1024, 4, 4, image_size=128, patch_size=16, mask_token=False),
                    "text_config": encoder(256, 1024, 4, 4, vocab_size=8192, max_position_embeddings=128),
                    "multimodal_config": encoder(256, 1024, 2, 4),
                },
                "inputs": {
                    "input_ids": ids(8, 64, high=8000),
                    "attention_mask": ones(8, 64),
                    "pixel_values": image(8, 3, 128, 128),
                },
            },
            "base": {
                "config": {
                    "hidden_size": 768,
                    "projection_dim": 768,
                    "init_codebook": False,
                    "image_config": encoder(768, 3072, 12, 12, image_size=224, patch_size=16, mask_token=False),
                    "text_config": encoder(768, 3072, 12, 12, vocab_size=30522, max_position_embeddings=512),
                    "multimodal_config": encoder(768, 3072, 6, 12),
                },
                "inputs": {
                    "input_ids": ids(32, 77, high=30000),
                    "attention_mask": ones(32, 77),
                    "pixel_values": image(32, 3, 224, 224),
                },
            },
        },
    },
    # Audio (Swin, with BatchNorm buffers) and text.
    "clap": {
        "model": "ClapModel",
        "config": "ClapConfig",
        "loss": "returned",
        "branches": ("audio_model", "text_model"),
        "sizes": {
            "tiny": {
                "config": {
                    "projection_dim": 64,
                    "audio_config": {
                        "hidden_size": 128,
                        "patch_embeds_hidden_size": 32,
                        "depths": [1, 1, 1],
                        "num_attention_heads": [2, 2, 2],
                        "num_hidden_layers": 3,
                        "spec_size": 64,
                        "num_mel_bins": 16,
                        "window_size": 4,
                        "patch_size": 4,
                        "patch_stride": [4, 4],
                        "enable_fusion": False,
                        "projection_dim": 64,
                    },
                    "text_config": encoder(
                        64, 128, 2, 2, vocab_size=1000, max_position_embeddings=40, projection_dim=64
                    ),
                },
                "inputs": {
                    "input_ids": ids(4, 16, high=990),
                    "attention_mask": ones(4, 16),
                    "input_features": image(4, 1, 256, 16),
                    "return_loss": True,
                },
            },
            "small": {
                "config": {
                    "projection_dim": 256,
                    "audio_config": {
                        "hidden_size": 384,
                        "patch_embeds_hidden_size": 96,
                        "depths": [2, 2, 2],
                        "num_attention_heads": [4, 8, 16],
                        "num_hidden_layers": 3,
                        "spec_size": 128,
                        "num_mel_bins": 32,
                        "window_size": 8,
                        "patch_size": 4,
                        "patch_stride": [4, 4],
                        "enable_fusion": False,
                        "projection_dim": 256,
                    },
                    "text_config": encoder(
                        256, 1024, 4, 4, vocab_size=8192, max_position_embeddings=130, projection_dim=256
                    ),
                },
                "inputs": {
                    "input_ids": ids(4, 64, high=8000),
                    "attention_mask": ones(4, 64),
                    "input_features": image(4, 1, 512, 32),
                    "return_loss": True,
                },
            },
            "base": {
                "config": {
                    "projection_dim": 512,
                    "audio_config": {
                        "hidden_size": 768,
                        "patch_embeds_hidden_size": 96,
                        "depths": [2, 2, 6, 2],
                        "num_attention_heads": [4, 8, 16, 32],
                        "num_hidden_layers": 4,
                        "spec_size": 256,
                        "num_mel_bins": 64,
                        "window_size": 8,
                        "patch_size": 4,
                        "patch_stride": [4, 4],
                        "enable_fusion": False,
                        "projection_dim": 512,
                    },
                    "text_config": encoder(
                        768, 3072, 12, 12, vocab_size=50265, max_position_embeddings=514, projection_dim=512
                    ),
                },
                "inputs": {
                    "input_ids": ids(32, 77, high=50000),
                    "attention_mask": ones(32, 77),
                    "input_features": image(32, 1, 1001, 64),
                    "return_loss": True,
                },
            },
        },
    },
    # Vision encoder, projector, masked_scatter, causal language model: a chain.
    "llava": {
        "model": "LlavaForConditionalGeneration",
        "config": "LlavaConfig",
        "loss": "returned",
        "branches": (),
        "sizes": {
            "tiny": {
                "config": {
                    "image_token_index": 999,
                    "image_seq_length": 16,
                    "vision_config": encoder(
                        64, 128, 3, 2, model_type="clip_vision_model", image_size=64, patch_size=16, projection_dim=64
                    ),
                    "text_config": encoder(
                        64,
                        160,
                        2,
                        4,
                        model_type="llama",
                        vocab_size=1000,
                        num_key_value_heads=2,
                        max_position_embeddings=128,
                        use_cache=False,
                    ),
                },
                "inputs": {
                    "input_ids": ids(2, 32, high=990, spans=((2, 18, 999),)),
                    "attention_mask": ones(2, 32),
                    "pixel_values": image(2, 3, 64, 64),
                    "labels": {"kind": "labels", "of": "input_ids", "ignore": (999,)},
                },
            },
            "small": {
                "config": {
                    "image_token_index": 8191,
                    "image_seq_length": 64,
                    "vision_config": encoder(
                        256,
                        1024,
                        6,
                        4,
                        model_type="clip_vision_model",
                        image_size=128,
                        patch_size=16,
                        projection_dim=256,
                    ),
                    "text_config": encoder(
                        256,
                        688,
                        6,
                        8,
                        model_type="llama",
                        vocab_size=8192,
                        num_key_value_heads=4,
                        max_position_embeddings=256,
                        use_cache=False,
                    ),
                },
                "inputs": {
                    "input_ids": ids(4, 128, high=8000, spans=((2, 66, 8191),)),
                    "attention_mask": ones(4, 128),
                    "pixel_values": image(4, 3, 128, 128),
                    "labels": {"kind": "labels", "of": "input_ids", "ignore": (8191,)},
                },
            },
            "base": {
                "config": {
                    "image_token_index": 32000,
                    "image_seq_length": 576,
                    "vision_config": encoder(
                        1024,
                        4096,
                        24,
                        16,
                        model_type="clip_vision_model",
                        image_size=336,
                        patch_size=14,
                        projection_dim=768,
                    ),
                    "text_config": encoder(
                        2048,
                        5632,
                        22,
                        32,
                        model_type="llama",
                        vocab_size=32064,
                        num_key_value_heads=4,
                        max_position_embeddings=2048,
                        use_cache=False,
                    ),
                },
                "inputs": {
                    "input_ids": ids(2, 1024, high=31999, spans=((2, 578, 32000),)),
                    "attention_mask": ones(2, 1024),
                    "pixel_values": image(2, 3, 336, 336),
                    "labels": {"kind": "labels", "of": "input_ids", "ignore": (32000,)},
                },
            },
        },
    },
    # Encoder and decoder: a chain, but for the decoder's first self-attention.
    "whisper": {
        "model": "WhisperForConditionalGeneration",
        "config": "WhisperConfig",
        "loss": "returned",
        "branches": ("encoder", "decoder"),
        "sizes": {
            "tiny": {
                "config": {
                    "vocab_size": 1000,
                    "num_mel_bins": 16,
                    "d_model": 64,
                    "encoder_layers": 2,
                    "decoder_layers": 2,
                    "encoder_attention_heads": 2,
                    "decoder_attention_heads": 2,
                    "encoder_ffn_dim": 128,
                    "decoder_ffn_dim": 128,
                    "max_source_positions": 64,
                    "max_target_positions": 32,
                    "pad_token_id": 1,
                    "bos_token_id": 2,
                    "eos_token_id": 2,
                    "decoder_start_token_id": 2,
                    "suppress_tokens": None,
                    "begin_suppress_tokens": None,
                    "use_cache": False,
                },
                "inputs": {"input_features": image(2, 16, 128), "labels": ids(2, 16, high=990)},
            },
            "small": {
                "config": {
                    "vocab_size": 8192,
                    "num_mel_bins": 80,
                    "d_model": 256,
                    "encoder_layers": 4,
                    "decoder_layers": 4,
                    "encoder_attention_heads": 4,
                    "decoder_attention_heads": 4,
                    "encoder_ffn_dim": 1024,
                    "decoder_ffn_dim": 1024,
                    "max_source_positions": 250,
                    "max_target_positions": 64,
                    "pad_token_id": 1,
                    "bos_token_id": 2,
                    "eos_token_id": 2,
                    "decoder_start_token_id": 2,
                    "suppress_tokens": None,
                    "begin_suppress_tokens": None,
                    "use_cache": False,
                },
                "inputs": {"input_features": image(2, 80, 500), "labels": ids(2, 64, high=8000)},
            },
            "base": {
                "config": {
                    "vocab_size": 51865,
                    "num_mel_bins": 80,
                    "d_model": 768,
                    "encoder_layers": 12,
                    "decoder_layers": 12,
                    "encoder_attention_heads": 12,
                    "decoder_attention_heads": 12,
                    "encoder_ffn_dim": 3072,
                    "decoder_ffn_dim": 3072,
                    "max_source_positions": 1500,
                    "max_target_positions": 448,
                    "pad_token_id": 50257,
                    "bos_token_id": 50257,
                    "eos_token_id": 50257,
                    "decoder_start_token_id": 50258,
                    "suppress_tokens": None,
                    "begin_suppress_tokens": None,
                    "use_cache": False,
                },
                "inputs": {"input_features": image(8, 80, 3000), "labels": ids(8, 448, high=50000)},
            },
        },
    },
    # The control: one chain, nothing to overlap in the forward pass.
    "vit_control": {
        "model": "ViTForImageClassification",
        "config": "ViTConfig",
        "loss": "returned",
        "branches": (),
        "sizes": {
            "tiny": {
                "config": encoder(64, 128, 2, 2, image_size=64, patch_size=16, num_labels=10),
                "inputs": {"pixel_values": image(4, 3, 64, 64), "labels": ids(4, low=0, high=10)},
            },
            "small": {
                "config": encoder(256, 1024, 6, 4, image_size=128, patch_size=16, num_labels=100),
                "inputs": {"pixel_values": image(8, 3, 128, 128), "labels": ids(8, low=0, high=100)},
            },
            "base": {
                "config": encoder(768, 3072, 12, 12, image_size=224, patch_size=16, num_labels=1000),
                "inputs": {"pixel_values": image(64, 3, 224, 224), "labels": ids(64, low=0, high=1000)},
            },
        },
    },
    # Two plain torch encoders of unequal length; the numbers of the spike in the notes are the small size.
    "two_tower": {
        "model": "TwoTower",
        "config": None,
        "loss": "returned",
        "branches": ("image", "text"),
        "sizes": {
            "tiny": {
                "config": {"width": 32, "hidden": 64, "layers": 2, "heads": 2, "tokens": (10, 6)},
                "inputs": {"image": image(4, 10, 32), "text": image(4, 6, 32)},
            },
            "small": {
                "config": {"width": 256, "hidden": 1024, "layers": 4, "heads": 4, "tokens": (50, 32)},
                "inputs": {"image": image(4, 50, 256), "text": image(4, 32, 256)},
            },
        },
    },
    # One ResNet-18 for two cameras, then a transformer.
    "act": {
        "model": "Act",
        "config": None,
        "loss": "returned",
        "branches": ("backbone", "vae"),
        "sizes": {
            "tiny": {
                "config": {
                    "backbone": 8,
                    "stages": (1, 1),
                    "width": 16,
                    "hidden": 32,
                    "layers": 1,
                    "heads": 2,
                    "chunk": 10,
                },
                "inputs": {
                    "front": image(2, 3, 32, 32),
                    "wrist": image(2, 3, 32, 32),
                    "state": image(2, 14),
                    "actions": image(2, 10, 14),
                },
            },
            "small": {
                "config": {
                    "backbone": 64,
                    "stages": (2, 2, 2, 2),
                    "width": 512,
                    "hidden": 3200,
                    "layers": 4,
                    "heads": 8,
                    "chunk": 100,
                },
                "inputs": {
                    "front": image(8, 3, 96, 96),
                    "wrist": image(8, 3, 96, 96),
                    "state": image(8, 14),
                    "actions": image(8, 100, 14),
                },
            },
            "base": {
                "config": {
                    "backbone": 64,
                    "stages": (2, 2, 2, 2),
                    "width": 512,
                    "hidden": 3200,
                    "layers": 4,
                    "heads": 8,
                    "chunk": 100,
                },
                "inputs": {
                    "front": image(8, 3, 480, 640),
                    "wrist": image(8, 3, 480, 640),
                    "state": image(8, 14),
                    "actions": image(8, 100, 14),
                },
            },
        },
    },
    # A ResNet-18 for each of two cameras, then a U-Net over time.
    "diffusion_policy": {
        "model": "DiffusionPolicy",
        "config": None,
        "loss": "returned",
        "branches": ("front", "wrist"),
        "sizes": {
            "tiny": {
                "config": {"backbone": 8, "stages": (1, 1), "widths": (16, 32), "keypoints": 4, "time_width": 8},
                "inputs": _diffusion(2, picture=16, steps=4),
            },
            "small": {
                "config": {"backbone": 32, "stages": (2, 2, 2, 2), "widths": (64, 128, 256)},
                "inputs": _diffusion(8, picture=84, steps=16),
            },
            "base": {
                "config": {"backbone": 64, "stages": (2, 2, 2, 2), "widths": (512, 1024, 2048)},
                "inputs": _diffusion(64, picture=84, steps=16),
            },
        },
    },
    # A frozen vision transformer over two cameras, and an expert that attends to each of its layers.
    "vla": {
        "model": "Vla",
        "config": None,
        "loss": "returned",
        "branches": ("vision", "expert"),
        "sizes": {
            "tiny": {
                "config": {"width": 16, "layers": 2, "heads": 2, "picture": 16, "patch": 8, **_expert(16, 2, 2, 32)},
                "inputs": _flow(2, 16, 3),
            },
            "small": {
                "config": {
                    "width": 192,
                    "layers": 6,
                    "heads": 3,
                    "picture": 96,
                    "patch": 16,
                    **_expert(180, 8, 4, 512),
                },
                "inputs": _flow(8, 96, 20),
            },
            "base": {
                "config": {
                    "width": 768,
                    "layers": 12,
                    "heads": 12,
                    "picture": 224,
                    "patch": 16,
                    **_expert(720, 16, 15, 2048),
                },
                "inputs": _flow(8, 224, 50),
            },
        },
    },
}
