"""The public workloads as data: what to build, at which size, on which inputs. Imports nothing.

A spec names a Hugging Face config class with every number that is not the library's default, the inputs, and the
modules that have no data dependence between them in the forward pass. `workloads.py` turns it into a model.

An input is a dict with a `kind`:

    image    float32, normal(0, 1), of `shape`
    ids      int64, uniform in [low, high), of `shape`; then `columns` ((column, token), ...) are set in every row,
             and `spans` ((first, last exclusive, token), ...) likewise
    ones     int64 ones of `shape`
    labels   the input named `of`, with every position that holds one of `ignore` set to -100

or a plain value, which is passed as it is. The first number of every shape is the batch size.
"""

from __future__ import annotations

from typing import Any

Spec = dict[str, Any]


def _image(*shape: int) -> Spec:
    return {"kind": "image", "shape": shape}


def _ids(*shape: int, low: int = 3, high: int, **patches: Any) -> Spec:
    return {"kind": "ids", "shape": shape, "low": low, "high": high, **patches}


def _ones(*shape: int) -> Spec:
    return {"kind": "ones", "shape": shape}


def _encoder(width: int, hidden: int, layers: int, heads: int, **rest: Any) -> Spec:
    return {
        "hidden_size": width,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        **rest,
    }


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
                    "text_config": _encoder(
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
                    "vision_config": _encoder(64, 128, 2, 2, image_size=64, patch_size=16, projection_dim=64),
                },
                "inputs": {
                    "input_ids": _ids(4, 16, high=990, columns=((15, 999),)),
                    "attention_mask": _ones(4, 16),
                    "pixel_values": _image(4, 3, 64, 64),
                    "return_loss": True,
                },
            },
            "small": {
                "config": {
                    "projection_dim": 256,
                    "text_config": _encoder(
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
                    "vision_config": _encoder(256, 1024, 6, 4, image_size=128, patch_size=16, projection_dim=256),
                },
                "inputs": {
                    "input_ids": _ids(8, 77, high=8000, columns=((76, 8191),)),
                    "attention_mask": _ones(8, 77),
                    "pixel_values": _image(8, 3, 128, 128),
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
                    "image_config": _encoder(64, 128, 2, 2, image_size=64, patch_size=16, mask_token=False),
                    "text_config": _encoder(64, 128, 2, 2, vocab_size=1000, max_position_embeddings=32),
                    "multimodal_config": _encoder(64, 128, 2, 2),
                },
                "inputs": {
                    "input_ids": _ids(4, 16, high=990),
                    "attention_mask": _ones(4, 16),
                    "pixel_values": _image(4, 3, 64, 64),
                },
            },
            "small": {
                "config": {
                    "hidden_size": 256,
                    "projection_dim": 256,
                    "init_codebook": False,
                    "image_config": _encoder(256, 1024, 4, 4, image_size=128, patch_size=16, mask_token=False),
                    "text_config": _encoder(256, 1024, 4, 4, vocab_size=8192, max_position_embeddings=128),
                    "multimodal_config": _encoder(256, 1024, 2, 4),
                },
                "inputs": {
                    "input_ids": _ids(8, 64, high=8000),
                    "attention_mask": _ones(8, 64),
                    "pixel_values": _image(8, 3, 128, 128),
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
                    "text_config": _encoder(
                        64, 128, 2, 2, vocab_size=1000, max_position_embeddings=40, projection_dim=64
                    ),
                },
                "inputs": {
                    "input_ids": _ids(4, 16, high=990),
                    "attention_mask": _ones(4, 16),
                    "input_features": _image(4, 1, 256, 16),
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
                    "text_config": _encoder(
                        256, 1024, 4, 4, vocab_size=8192, max_position_embeddings=130, projection_dim=256
                    ),
                },
                "inputs": {
                    "input_ids": _ids(4, 64, high=8000),
                    "attention_mask": _ones(4, 64),
                    "input_features": _image(4, 1, 512, 32),
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
                    "vision_config": _encoder(
                        64, 128, 3, 2, model_type="clip_vision_model", image_size=64, patch_size=16, projection_dim=64
                    ),
                    "text_config": _encoder(
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
                    "input_ids": _ids(2, 32, high=990, spans=((2, 18, 999),)),
                    "attention_mask": _ones(2, 32),
                    "pixel_values": _image(2, 3, 64, 64),
                    "labels": {"kind": "labels", "of": "input_ids", "ignore": (999,)},
                },
            },
            "small": {
                "config": {
                    "image_token_index": 8191,
                    "image_seq_length": 64,
                    "vision_config": _encoder(
                        256,
                        1024,
                        6,
                        4,
                        model_type="clip_vision_model",
                        image_size=128,
                        patch_size=16,
                        projection_dim=256,
                    ),
                    "text_config": _encoder(
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
                    "input_ids": _ids(4, 128, high=8000, spans=((2, 66, 8191),)),
                    "attention_mask": _ones(4, 128),
                    "pixel_values": _image(4, 3, 128, 128),
                    "labels": {"kind": "labels", "of": "input_ids", "ignore": (8191,)},
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
                "inputs": {"input_features": _image(2, 16, 128), "labels": _ids(2, 16, high=990)},
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
                "inputs": {"input_features": _image(2, 80, 500), "labels": _ids(2, 64, high=8000)},
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
                "config": _encoder(64, 128, 2, 2, image_size=64, patch_size=16, num_labels=10),
                "inputs": {"pixel_values": _image(4, 3, 64, 64), "labels": _ids(4, low=0, high=10)},
            },
            "small": {
                "config": _encoder(256, 1024, 6, 4, image_size=128, patch_size=16, num_labels=100),
                "inputs": {"pixel_values": _image(8, 3, 128, 128), "labels": _ids(8, low=0, high=100)},
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
                "inputs": {"image": _image(4, 10, 32), "text": _image(4, 6, 32)},
            },
            "small": {
                "config": {"width": 256, "hidden": 1024, "layers": 4, "heads": 4, "tokens": (50, 32)},
                "inputs": {"image": _image(4, 50, 256), "text": _image(4, 32, 256)},
            },
        },
    },
}
