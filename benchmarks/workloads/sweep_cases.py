"""The Hugging Face models of the correctness sweep as data, each as small as it gets. Imports nothing but `Spec`s.

A spec has the form that `specs.py` describes, with the one size `tiny`. Losses: `returned` is the model's own;
`waves` weighs every floating-point output with a fixed pattern, for models that return none.
"""

from __future__ import annotations

from typing import Any

from benchmarks.workloads.specs import Spec, both_sides, config_of, encoder, ids, image, ones

TOKENS = ids(2, 8, high=90)
_MASK = ones(2, 8)
PICTURE = image(2, 3, 32, 32)
_SOUND = image(2, 400)
LABELS = {"kind": "labels", "of": "input_ids", "ignore": (99,)}
_CLASSES = ids(2, low=0, high=4)
CAPTIONED = {"input_ids": TOKENS, "attention_mask": _MASK, "pixel_values": PICTURE}
_PAIRED = {**CAPTIONED, "return_loss": True}
_SPOKEN = {"input_values": _SOUND, "labels": ids(2, 4, low=1, high=30)}

VOCABULARY = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
TEXT_CONFIG = encoder(32, 64, 2, 2, **VOCABULARY, max_position_embeddings=24)
CAUSAL = {**TEXT_CONFIG, "use_cache": False}
VISION_CONFIG = encoder(32, 64, 2, 2, image_size=32, patch_size=16)
_CLASSIFIED = {"pixel_values": PICTURE, "labels": _CLASSES}
_SEQUENCE_TO_SEQUENCE = {
    **VOCABULARY,
    "d_model": 32,
    **both_sides(64, 2, 2),
    "max_position_embeddings": 24,
    "decoder_start_token_id": 2,
    "use_cache": False,
}
_PAIR = {"projection_dim": 32, "text_config": TEXT_CONFIG, "vision_config": VISION_CONFIG}
_T5 = {**VOCABULARY, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2, "use_cache": False}
_CONVOLVED = {
    **TEXT_CONFIG,
    "vocab_size": 32,
    "conv_dim": [32, 32],
    "conv_stride": [5, 2],
    "conv_kernel": [10, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 2,
}


def tiny(model: str, numbers: dict[str, Any], *, config: str = "", loss: str = "returned", **inputs: Any) -> Spec:
    """Return a spec with one size: a class, the numbers of its config, and the inputs.

    `config` is the class of the config, if its name does not follow from the model's.
    """
    size = {"config": numbers, "inputs": inputs}
    return {"model": model, "config": config or config_of(model), "loss": loss, "branches": (), "sizes": {"tiny": size}}


def _masked(family: str, **numbers: Any) -> Spec:
    return tiny(f"{family}ForMaskedLM", {**TEXT_CONFIG, **numbers}, input_ids=TOKENS, labels=LABELS)


def _causal(family: str, model: str = "{}ForCausalLM", **numbers: Any) -> Spec:
    sized = {**CAUSAL, **numbers}
    return tiny(model.format(family), sized, config=f"{family}Config", input_ids=TOKENS, labels=LABELS)


def _classifier(family: str, **numbers: Any) -> Spec:
    return tiny(f"{family}ForImageClassification", {**VISION_CONFIG, "num_labels": 4, **numbers}, **_CLASSIFIED)


MULTIMODAL: dict[str, Spec] = {
    "altclip": tiny(
        "AltCLIPModel",
        {
            "projection_dim": 32,
            "text_config": {**TEXT_CONFIG, "project_dim": 32},
            "vision_config": {**VISION_CONFIG, "projection_dim": 32},
        },
        **_PAIRED,
    ),
    "blip": tiny(
        "BlipForConditionalGeneration",
        {
            "projection_dim": 32,
            "image_text_hidden_size": 32,
            "text_config": {**CAUSAL, "encoder_hidden_size": 32, "projection_dim": 32, "sep_token_id": 2},
            "vision_config": VISION_CONFIG,
        },
        **CAPTIONED,
        labels=LABELS,
    ),
    "blip2": tiny(
        "Blip2ForConditionalGeneration",
        {
            "num_query_tokens": 4,
            "image_token_index": 99,
            "vision_config": VISION_CONFIG,
            "qformer_config": {**TEXT_CONFIG, "encoder_hidden_size": 32},
            "text_config": {**CAUSAL, "model_type": "opt", "ffn_dim": 64, "word_embed_proj_dim": 32},
        },
        input_ids=ids(2, 12, high=90, spans=((0, 4, 99),)),
        attention_mask=ones(2, 12),
        pixel_values=PICTURE,
        labels=LABELS,
    ),
    "bridgetower": tiny(
        "BridgeTowerModel",
        {
            **encoder(64, 64, 2, 2),
            "text_config": {**TEXT_CONFIG, "hidden_size": 64},
            "vision_config": {**VISION_CONFIG, "hidden_size": 64},
        },
        loss="waves",
        **CAPTIONED,
    ),
    "chinese_clip": tiny("ChineseCLIPModel", _PAIR, **_PAIRED),
    "clipseg": tiny(
        "CLIPSegForImageSegmentation",
        {
            **_PAIR,
            "reduce_dim": 16,
            "extract_layers": [0, 1],
            "decoder_num_attention_heads": 2,
            "decoder_intermediate_size": 32,
            "text_config": {**TEXT_CONFIG, "projection_dim": 32},
        },
        **CAPTIONED,
        labels={"kind": "ids", "low": 0, "high": 2, "shape": (2, 32, 32), "floating": True},
    ),
    "git": tiny("GitForCausalLM", {**CAUSAL, "vision_config": VISION_CONFIG}, **CAPTIONED, labels=LABELS),
    "groupvit": tiny(
        "GroupViTModel",
        {
            **_PAIR,
            "projection_intermediate_dim": 64,
            "vision_config": {
                **VISION_CONFIG,
                "image_size": 32,
                "patch_size": 8,
                "depths": [1, 1, 1],
                "num_group_tokens": [4, 2, 0],
                "num_output_groups": [4, 2, 0],
            },
        },
        loss="waves",
        **CAPTIONED,
    ),
    "kosmos2": tiny(
        "Kosmos2ForConditionalGeneration",
        {
            "latent_query_num": 4,
            "text_config": {
                **VOCABULARY,
                "embed_dim": 32,
                "layers": 2,
                "ffn_dim": 64,
                "attention_heads": 2,
                "max_position_embeddings": 24,
                "use_cache": False,
            },
            "vision_config": VISION_CONFIG,
        },
        input_ids=TOKENS,
        pixel_values=PICTURE,
        image_embeds_position_mask=ids(2, 8, low=0, high=1, spans=((1, 5, 1),)),
        labels=LABELS,
    ),
    "layoutlmv3": tiny(
        "LayoutLMv3ForTokenClassification",
        {
            **TEXT_CONFIG,
            "num_labels": 4,
            "input_size": 32,
            "patch_size": 16,
            "coordinate_size": 5,
            "shape_size": 6,
            "max_2d_position_embeddings": 64,
            "rel_pos_bins": 8,
            "rel_2d_pos_bins": 8,
            "has_relative_attention_bias": True,
            "has_spatial_attention_bias": True,
        },
        **CAPTIONED,
        bbox=ids(2, 8, 4, low=0, high=60),
        labels=ids(2, 8, low=0, high=4),
    ),
    "lxmert": tiny(
        "LxmertModel",
        {
            **TEXT_CONFIG,
            "l_layers": 1,
            "x_layers": 1,
            "r_layers": 1,
            "visual_feat_dim": 16,
            "num_hidden_layers": {"vision": 1, "cross_encoder": 1, "language": 1},
        },
        loss="waves",
        input_ids=TOKENS,
        visual_feats=image(2, 4, 16),
        visual_pos=image(2, 4, 4),
    ),
    "owlvit": tiny("OwlViTModel", {**_PAIR, "text_config": {**TEXT_CONFIG, "max_position_embeddings": 8}}, **_PAIRED),
    "pix2struct": tiny(
        "Pix2StructForConditionalGeneration",
        {
            "text_config": {**_T5, "hidden_size": 32, "decoder_start_token_id": 0},
            "vision_config": {
                "hidden_size": 32,
                "patch_embed_hidden_size": 32,
                "d_ff": 64,
                "d_kv": 16,
                "num_hidden_layers": 2,
                "num_attention_heads": 2,
                "seq_len": 6,
            },
        },
        flattened_patches=ids(2, 6, 34, low=0, high=5, floating=True),
        attention_mask=ones(2, 6),
        labels=TOKENS,
    ),
    "siglip": tiny("SiglipModel", {"text_config": TEXT_CONFIG, "vision_config": VISION_CONFIG}, **_PAIRED),
    "vilt": tiny(
        "ViltForQuestionAnswering",
        {**TEXT_CONFIG, **VISION_CONFIG, "num_labels": 4, "max_image_length": -1},
        **CAPTIONED,
        labels=image(2, 4),
    ),
    "vision_encoder_decoder": tiny(
        "VisionEncoderDecoderModel",
        {
            "encoder": {**VISION_CONFIG, "model_type": "vit"},
            "decoder": {**CAUSAL, "model_type": "bert", "is_decoder": True, "add_cross_attention": True},
            "decoder_start_token_id": 1,
            "pad_token_id": 0,
        },
        pixel_values=PICTURE,
        labels=TOKENS,
    ),
    "vision_text_dual_encoder": tiny(
        "VisionTextDualEncoderModel",
        {
            "projection_dim": 32,
            "vision_config": {**VISION_CONFIG, "model_type": "vit"},
            "text_config": {**TEXT_CONFIG, "model_type": "bert"},
        },
        **_PAIRED,
    ),
    "visual_bert": tiny(
        "VisualBertForPreTraining",
        {**TEXT_CONFIG, "visual_embedding_dim": 16},
        input_ids=TOKENS,
        attention_mask=_MASK,
        visual_embeds=image(2, 4, 16),
        visual_attention_mask=ones(2, 4),
        visual_token_type_ids=ones(2, 4),
        labels=ids(2, 12, low=0, high=90),
        sentence_image_labels=ids(2, low=0, high=2),
    ),
    "xclip": tiny(
        "XCLIPModel",
        {
            **_PAIR,
            "prompt_layers": 1,
            "prompt_attention_dropout": 0.0,
            "prompt_num_attention_heads": 2,
            "vision_config": {
                **VISION_CONFIG,
                "mit_hidden_size": 32,
                "mit_intermediate_size": 64,
                "mit_num_hidden_layers": 1,
                "mit_num_attention_heads": 2,
                "num_frames": 2,
            },
        },
        input_ids=TOKENS,
        attention_mask=_MASK,
        pixel_values=image(2, 2, 3, 32, 32),
        return_loss=True,
    ),
}

TEXT: dict[str, Spec] = {
    "albert": _masked("Albert", embedding_size=16),
    "bert": _masked("Bert"),
    "data2vec_text": _masked("Data2VecText"),
    "deberta_v2": _masked("DebertaV2", relative_attention=True, pos_att_type=["p2c", "c2p"]),
    "distilbert": _masked("DistilBert", dim=32, n_layers=2, n_heads=2, hidden_dim=64),
    "electra": _masked("Electra", embedding_size=16),
    "fnet": _masked("FNet"),
    "roberta": _masked("Roberta"),
    "bloom": _causal("Bloom"),
    "falcon": _causal("Falcon"),
    "gemma2": _causal("Gemma2", num_key_value_heads=1, head_dim=16, query_pre_attn_scalar=16, sliding_window=4),
    "gpt2": _causal("GPT2", "{}LMHeadModel", n_embd=32, n_layer=2, n_head=2, n_positions=24),
    "llama": _causal("Llama", num_key_value_heads=1),
    "mamba": _causal("Mamba", state_size=4),
    "mixtral": _causal("Mixtral", num_key_value_heads=1, num_local_experts=4, output_router_logits=True),
    "opt": _causal("OPT", ffn_dim=64, word_embed_proj_dim=32),
    "qwen3": _causal("Qwen3", num_key_value_heads=1, head_dim=16),
    "xlnet": tiny(
        "XLNetLMHeadModel",
        {"vocab_size": 100, "d_model": 32, "n_layer": 2, "n_head": 2, "d_inner": 64, "use_mems_train": False},
        config="XLNetConfig",
        input_ids=TOKENS,
        labels=LABELS,
    ),
    "bart": tiny("BartForConditionalGeneration", _SEQUENCE_TO_SEQUENCE, input_ids=TOKENS, labels=LABELS),
    "t5": tiny(
        "T5ForConditionalGeneration",
        {**_T5, "d_model": 32, "decoder_start_token_id": 0},
        input_ids=TOKENS,
        labels=LABELS,
    ),
}

VISION: dict[str, Spec] = {
    "beit": _classifier("Beit", use_relative_position_bias=True),
    "convnext": _classifier("ConvNext", depths=[1, 1], hidden_sizes=[16, 32], num_stages=2),
    "data2vec_vision": _classifier("Data2VecVision"),
    "dinov2": _classifier("Dinov2"),
    "efficientnet": _classifier(
        "EfficientNet",
        width_coefficient=0.25,
        depth_coefficient=0.1,
        kernel_sizes=[3, 5],
        in_channels=[32, 16],
        out_channels=[16, 24],
        strides=[1, 2],
        num_block_repeats=[1, 1],
        expand_ratios=[1, 6],
        depthwise_padding=[],
        hidden_dim=320,
    ),
    "imagegpt": tiny(
        "ImageGPTForImageClassification",
        {
            "vocab_size": 100,
            "n_embd": 32,
            "n_layer": 2,
            "n_head": 2,
            "n_positions": 24,
            "num_labels": 4,
            "use_cache": False,
        },
        input_ids=TOKENS,
        labels=_CLASSES,
    ),
    "mobilenet_v2": _classifier("MobileNetV2", depth_multiplier=0.25, depth_divisible_by=8, min_depth=8),
    "poolformer": _classifier(
        "PoolFormer", depths=[1, 1, 1, 1], hidden_sizes=[8, 16, 24, 32], patch_sizes=[7, 3, 3, 3], strides=[4, 2, 2, 2]
    ),
    "resnet": _classifier(
        "ResNet", embedding_size=16, hidden_sizes=[16, 32], depths=[1, 2], layer_type="basic", num_stages=2
    ),
    "segformer": tiny(
        "SegformerForSemanticSegmentation",
        {
            "num_labels": 4,
            "num_encoder_blocks": 2,
            "depths": [1, 1],
            "sr_ratios": [4, 1],
            "hidden_sizes": [16, 32],
            "patch_sizes": [7, 3],
            "strides": [4, 2],
            "num_attention_heads": [1, 2],
            "mlp_ratios": [2, 2],
            "decoder_hidden_size": 32,
        },
        pixel_values=PICTURE,
        labels=ids(2, 32, 32, low=0, high=4),
    ),
    "swin": _classifier("Swin", embed_dim=16, depths=[1, 2], num_attention_heads=[2, 2], window_size=4, patch_size=2),
    "swinv2": _classifier(
        "Swinv2", embed_dim=16, depths=[1, 2], num_attention_heads=[2, 2], window_size=4, patch_size=2
    ),
    "vit_mae": tiny(
        "ViTMAEForPreTraining",
        {
            **VISION_CONFIG,
            "patch_size": 8,
            "decoder_hidden_size": 32,
            "decoder_intermediate_size": 64,
            "decoder_num_hidden_layers": 1,
            "decoder_num_attention_heads": 2,
        },
        pixel_values=PICTURE,
        noise=image(2, 16),
    ),
    "yolos": tiny("YolosModel", {**VISION_CONFIG, "image_size": [32, 32]}, loss="waves", pixel_values=PICTURE),
}

SOUND: dict[str, Spec] = {
    "ast": tiny(
        "ASTForAudioClassification",
        {
            **encoder(32, 64, 2, 2),
            "num_labels": 4,
            "max_length": 32,
            "num_mel_bins": 16,
            "patch_size": 8,
            "frequency_stride": 8,
            "time_stride": 8,
        },
        input_values=image(2, 32, 16),
        labels=_CLASSES,
    ),
    "data2vec_audio": tiny(
        "Data2VecAudioForCTC", {**_CONVOLVED, "conv_pos_kernel_size": 3, "num_conv_pos_embeddings": 2}, **_SPOKEN
    ),
    "hubert": tiny("HubertForCTC", _CONVOLVED, **_SPOKEN),
    "speecht5": tiny(
        "SpeechT5ForTextToSpeech",
        {
            **VOCABULARY,
            "hidden_size": 32,
            **both_sides(64, 2, 2),
            "speech_decoder_prenet_units": 16,
            "speech_decoder_postnet_units": 16,
            "speech_decoder_postnet_layers": 2,
            "speaker_embedding_dim": 8,
            "num_mel_bins": 8,
            "max_text_positions": 24,
            "max_speech_positions": 24,
            "use_guided_attention_loss": False,
            "use_cache": False,
        },
        input_ids=TOKENS,
        labels=image(2, 8, 8),
        speaker_embeddings=image(2, 8),
    ),
    "wav2vec2": tiny("Wav2Vec2ForCTC", _CONVOLVED, **_SPOKEN),
    "wavlm": tiny("WavLMForCTC", {**_CONVOLVED, "num_buckets": 8, "max_bucket_distance": 16}, **_SPOKEN),
}
