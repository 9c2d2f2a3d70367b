"""The multimodal models of today in the correctness sweep, as data: vision-language models, and a policy of a robot.

They see inputs as from their processors: several pictures of unequal sizes in one sample, packed patches with the sizes
beside them (`image_grid_thw`, `spatial_shapes`), and the kind of every token (`mm_token_type_ids`, `token_type_ids`).
That is where graphs break: sizes that are read from tensors become Python numbers.

A picture stands in the tokens as so many placeholders (`_PLACEHOLDER`) as it has features.
"""

from __future__ import annotations

from typing import Any

from benchmarks.workloads.specs import Spec, encoder, ids, image, ones, rows
from benchmarks.workloads.sweep_cases import CAUSAL, LABELS, PICTURE, TEXT_CONFIG, VISION_CONFIG, tiny

_PLACEHOLDER = 99
_LENGTH = 16
_MASK = ones(2, _LENGTH)
_FINE = {**VISION_CONFIG, "patch_size": 8}
_GROUPED = {**CAUSAL, "num_key_value_heads": 1}
_WIDE_HEADS = {**_GROUPED, "head_dim": 16}

_TWO_SEEN = {
    "image_token_id": _PLACEHOLDER,
    "use_cache": False,
    "text_config": {**_GROUPED, "model_type": "llama"},
    "vision_config": _FINE,
}
_SIGLIP = {**VISION_CONFIG, "model_type": "siglip_vision_model", "vision_use_head": False}
_PALIGEMMA = {
    "image_token_index": _PLACEHOLDER,
    "projection_dim": 32,
    "hidden_size": 32,
    "vocab_size": 100,
    "text_config": {**_WIDE_HEADS, "model_type": "gemma"},
    "vision_config": _SIGLIP,
}

_QWEN_PATCH = 3 * 2 * 8 * 8
"""Numbers of a patch: channels, frames, height, width."""
_QWEN_TOKENS = {
    "image_token_id": _PLACEHOLDER,
    "video_token_id": 98,
    "vision_start_token_id": 97,
    "vision_end_token_id": 96,
}
_QWEN_POSITIONS = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
_QWEN_TEXT = {**_GROUPED, "rope_parameters": _QWEN_POSITIONS}
_QWEN_EYE = {"depth": 2, "num_heads": 2, "patch_size": 8, "temporal_patch_size": 2, "spatial_merge_size": 2}
_QWEN_WIDTHS = {"hidden_size": 32, "intermediate_size": 64, "out_hidden_size": 32}
_QWEN_INPUTS = {
    "input_ids": ids(
        2,
        _LENGTH,
        high=90,
        spans=((1, 2, 97), (2, 6, _PLACEHOLDER), (6, 7, 96), (7, 8, 97), (8, 10, _PLACEHOLDER), (10, 11, 96)),
    ),
    "attention_mask": _MASK,
    "mm_token_type_ids": ids(2, _LENGTH, low=0, high=1, spans=((2, 6, 1), (8, 10, 1))),
    "pixel_values": image(2, 24, _QWEN_PATCH, packed=True),
    "image_grid_thw": rows(2, (1, 4, 4), (1, 2, 4)),
    "labels": {**LABELS, "ignore": (_PLACEHOLDER, 98, 97, 96)},
}
"""Two pictures in each sample, of 4 by 4 and of 2 by 4 patches; four patches make a token."""


def _seeing(*spans: tuple[int, int], kinds: str = "", length: int = _LENGTH, **others: Any) -> dict[str, Any]:
    """Return tokens with placeholders in `spans`, mask and labels; `kinds` names an input that marks the spans."""
    inputs: dict[str, Any] = {
        "input_ids": ids(2, length, high=90, spans=tuple((*span, _PLACEHOLDER) for span in spans)),
        "attention_mask": ones(2, length),
        "labels": LABELS,
        **others,
    }
    if kinds:
        inputs[kinds] = ids(2, length, low=0, high=1, spans=tuple((*span, 1) for span in spans))
    return inputs


TODAY: dict[str, Spec] = {
    "qwen2_vl": tiny(
        "Qwen2VLForConditionalGeneration",
        {
            **_QWEN_TOKENS,
            "text_config": _QWEN_TEXT,
            "vision_config": {**_QWEN_EYE, "embed_dim": 32, "hidden_size": 32, "mlp_ratio": 2},
        },
        **_QWEN_INPUTS,
    ),
    "qwen2_5_vl": tiny(
        "Qwen2_5_VLForConditionalGeneration",
        {
            **_QWEN_TOKENS,
            "text_config": _QWEN_TEXT,
            "vision_config": {**_QWEN_EYE, **_QWEN_WIDTHS, "window_size": 32, "fullatt_block_indexes": [1]},
        },
        **_QWEN_INPUTS,
    ),
    "qwen3_vl": tiny(
        "Qwen3VLForConditionalGeneration",
        {
            **_QWEN_TOKENS,
            "text_config": {**_WIDE_HEADS, "rope_parameters": {**_QWEN_POSITIONS, "mrope_interleaved": True}},
            "vision_config": {
                **_QWEN_EYE,
                **_QWEN_WIDTHS,
                "num_position_embeddings": 16,
                "deepstack_visual_indexes": [0],
            },
        },
        **_QWEN_INPUTS,
    ),
    "idefics3": tiny(
        "Idefics3ForConditionalGeneration", _TWO_SEEN, **_seeing((1, 5), (6, 10), pixel_values=image(2, 2, 3, 32, 32))
    ),
    "smolvlm": tiny(
        "SmolVLMForConditionalGeneration", _TWO_SEEN, **_seeing((1, 5), (6, 10), pixel_values=image(2, 2, 3, 32, 32))
    ),
    # A picture of one by two tiles and its thumbnail: 4 features, and two rows of 4 with a line break behind each.
    "llava_onevision": tiny(
        "LlavaOnevisionForConditionalGeneration",
        {
            "image_token_index": _PLACEHOLDER,
            "video_token_index": 98,
            "image_grid_pinpoints": [[32, 32], [32, 64], [64, 32]],
            "text_config": {**_GROUPED, "model_type": "qwen2"},
            "vision_config": _SIGLIP,
        },
        **_seeing((1, 15), length=20, pixel_values=image(2, 3, 3, 32, 32), image_sizes=rows(2, (32, 64))),
    ),
    "gemma3": tiny(
        "Gemma3ForConditionalGeneration",
        {
            "image_token_index": _PLACEHOLDER,
            "boi_token_index": 97,
            "eoi_token_index": 96,
            "mm_tokens_per_image": 4,
            "text_config": {
                **_WIDE_HEADS,
                "query_pre_attn_scalar": 16,
                "sliding_window": 8,
                "layer_types": ["sliding_attention", "full_attention"],
            },
            "vision_config": {**_FINE, "model_type": "siglip_vision_model", "vision_use_head": False},
        },
        **_seeing((1, 5), kinds="token_type_ids", pixel_values=PICTURE),
    ),
    "siglip2": tiny(
        "Siglip2Model",
        {"text_config": TEXT_CONFIG, "vision_config": {**encoder(32, 64, 2, 2), "patch_size": 8, "num_patches": 16}},
        input_ids=ids(2, 8, high=90),
        pixel_values=image(2, 16, 3 * 8 * 8),
        pixel_attention_mask=ones(2, 16),
        spatial_shapes=rows(2, (2, 8)),
        return_loss=True,
    ),
    "paligemma": tiny(
        "PaliGemmaForConditionalGeneration", _PALIGEMMA, **_seeing((1, 5), kinds="token_type_ids", pixel_values=PICTURE)
    ),
    "internvl": tiny(
        "InternVLForConditionalGeneration",
        {
            "image_token_id": _PLACEHOLDER,
            "image_seq_length": 4,
            "text_config": {**_GROUPED, "model_type": "qwen2"},
            "vision_config": _FINE,
        },
        **_seeing((1, 5), pixel_values=PICTURE),
    ),
    # Two cameras and a prompt go through PaliGemma; the expert for actions attends to its keys and values.
    "pi0": tiny(
        "PI0ForConditionalGeneration",
        {
            "chunk_size": 4,
            "max_state_dim": 8,
            "max_action_dim": 8,
            "vlm_config": {
                **_PALIGEMMA,
                "model_type": "paligemma",
                "text_config": {**_WIDE_HEADS, "model_type": "gemma", "use_cache": True},
            },
            "dit_config": {**_WIDE_HEADS, "model_type": "gemma", "use_cache": True},
        },
        state=image(2, 8),
        actions=image(2, 4, 8),
        input_ids=ids(2, _LENGTH, high=90, spans=((0, 8, _PLACEHOLDER),)),
        attention_mask=_MASK,
        pixel_values=image(2, 2, 3, 32, 32),
        pixel_attention_mask=ones(2, 2),
    ),
}
