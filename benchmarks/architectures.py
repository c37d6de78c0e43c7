"""The architectures of the zoo: tiny configurations, random weights, and batches for them."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]

VOCABULARY, LENGTH, BATCH, CLASSES = 128, 32, 2, 4

SIZES: Mapping[str, int] = {
    **dict.fromkeys(("hidden_size", "d_model", "n_embd", "dim", "emb_dim", "embedding_size"), 64),
    **dict.fromkeys(("num_hidden_layers", "num_layers", "n_layer", "n_layers"), 2),
    **dict.fromkeys(("encoder_layers", "decoder_layers", "num_decoder_layers"), 2),
    **dict.fromkeys(("num_encoder_layers", "encoder_num_hidden_layers"), 2),
    **dict.fromkeys(("decoder_num_hidden_layers", "num_encoder_sparse_layers"), 2),
    **dict.fromkeys(("num_attention_heads", "num_heads", "n_head", "n_heads"), 4),
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 4),
    **dict.fromkeys(("encoder_num_attention_heads", "decoder_num_attention_heads"), 4),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "multi_query_group_num"), 2),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim", "hidden_dim", "d_ff"), 128),
    **dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim", "dff", "ffn_hidden_size"), 128),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 64),
    **dict.fromkeys(("moe_shared_expert_intermediate_size", "shared_intermediate_size"), 64),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts"), 4),
    **dict.fromkeys(("moe_num_experts", "expert_capacity"), 4),
    **dict.fromkeys(("num_experts_per_tok", "moe_k"), 2),
    **dict.fromkeys(("head_dim", "d_kv", "kv_channels", "attention_head_size"), 16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank", "v_head_dim", "qk_nope_head_dim"), 16),
    **dict.fromkeys(("qk_rope_head_dim", "mamba_d_head", "projection_dim"), 16),
    **dict.fromkeys(("vocab_size", "src_vocab_size", "tgt_vocab_size"), VOCABULARY),
    **dict.fromkeys(("entity_vocab_size", "shape_vocab_size"), VOCABULARY),
    **dict.fromkeys(("pronunciation_vocab_size",), VOCABULARY),
    **dict.fromkeys(("n_positions", "max_position_embeddings"), VOCABULARY),
    "rotary_dim": 8,
    **dict.fromkeys(("max_source_positions", "max_target_positions"), VOCABULARY),
    "image_size": 32,
    "patch_size": 8,
}
"""What makes a configuration small: its whole numbers of these names, where they are larger."""


@dataclass(frozen=True)
class Architecture:
    """One row of the zoo.

    Attributes:
        name: A class of transformers, or a model of timm; after a space what is different in it.
        family: Which batches it gets.
        options: Of its configuration, beside those that make it small.
        inputs: Makes what its batches have beside those of the family.
    """

    name: str
    family: str
    options: Mapping[str, Any] = field(default_factory=dict)
    inputs: Callable[[Any], Batch] | None = None

    def build(self, *, host_draws_alone: bool = False) -> nn.Module:
        """The model, which returns its loss from a batch.

        Args:
            host_draws_alone: Without dropout where its code also draws on the host.
        """
        if self.family == "timm":
            return Timm(self.name, self.options)
        model_class = getattr(importlib.import_module("transformers"), self.name.split()[0])
        options = dict(self.options)
        config = tiny(model_class.config_class, options)
        if host_draws_alone and any("layerdrop" in name for name in config.to_dict()):
            config = tiny(model_class.config_class, options | without_dropout(config))
        always = {"return_loss": True} if self.family == "two towers" else {}
        return Transformer(model_class(config).train(), always)

    def batch(self, net: nn.Module) -> Batch:
        """A random batch."""
        config = getattr(net, "config", None)
        made = FAMILIES[self.family](config, net)
        return made if self.inputs is None else {**made, **self.inputs(config)}


class Transformer(nn.Module):
    """A model of transformers that returns its loss alone."""

    def __init__(self, model: nn.Module, always: Mapping[str, Any]) -> None:
        super().__init__()
        self.model = model
        self.always = always

    @property
    def config(self) -> Any:
        return self.model.config

    def forward(self, **batch: Tensor) -> Tensor:
        loss: Tensor = self.model(**batch, **self.always).loss
        return loss


class Timm(nn.Module):
    """A model of timm with the loss of a classification."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        super().__init__()
        timm = importlib.import_module("timm")
        options = dict(options)
        self.image_size = options.pop("size", options.get("img_size", 0))
        self.model = timm.create_model(name, num_classes=CLASSES, **options).train()
        self.image_size = self.image_size or self.model.default_cfg["input_size"][-1]

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.model(x).float(), labels)


# ---------------------------------------------------------------------- tiny configurations


def tiny(config_class: Any, options: Mapping[str, Any]) -> Any:
    """A small configuration: of what it consists of, too.

    Args:
        config_class: A configuration of transformers.
        options: What is set beside that; a mapping for a configuration within this one.
    """
    default = config_class()
    chosen: dict[str, Any] = {}
    fields = default.to_dict()
    for name, size in SIZES.items():
        value = fields.get(name)
        if isinstance(value, int) and not isinstance(value, bool) and value > size:
            chosen[name] = size
    vocabulary = chosen.get("vocab_size", VOCABULARY)
    for name, value in fields.items():
        if name.endswith("_token_id") and isinstance(value, int) and value >= vocabulary:
            chosen[name] = vocabulary - 1 - len(chosen) % 8
    options = dict(options)
    for name in getattr(default, "sub_configs", {}):
        inner = getattr(default, name, None)
        if inner is not None and not isinstance(options.get(name, {}), type(inner)):
            chosen[name] = tiny(type(inner), options.pop(name, {})).to_dict()
    return config_class(**{**chosen, **options})


def without_dropout(config: Any) -> dict[str, float]:
    """Options that switch off dropout, and nothing else that is drawn."""
    rates = (name for name, value in config.to_dict().items() if isinstance(value, float))
    return {name: 0.0 for name in rates if "drop" in name and "layerdrop" not in name}


# ---------------------------------------------------------------------- batches


def tokens(vocabulary: int = VOCABULARY, length: int = LENGTH) -> Tensor:
    """Of the middle of the vocabulary: the first and the last ones often mean something."""
    return torch.randint(8, min(vocabulary, VOCABULARY) - 8, (BATCH, length))


def padding() -> Tensor:
    """A mask as a tokenizer makes it; texts of a batch differ in length."""
    mask = torch.ones(BATCH, LENGTH, dtype=torch.long)
    mask[-1, LENGTH - int(torch.randint(2, LENGTH // 2, ())) :] = 0
    return mask


def full(length: int = LENGTH) -> Tensor:
    """A mask of texts of the same length."""
    return torch.ones(BATCH, length, dtype=torch.long)


def classes(config: Any = None) -> Tensor:
    return torch.randint(0, getattr(config, "num_labels", None) or CLASSES, (BATCH,))


def text(config: Any, net: Any) -> Batch:
    ids = tokens()
    return {"input_ids": ids, "attention_mask": padding(), "labels": classes(config)}


def language(config: Any, net: Any) -> Batch:
    ids = tokens()
    return {"input_ids": ids, "labels": ids.clone()}


def translation(config: Any, net: Any) -> Batch:
    return {"input_ids": tokens(), "attention_mask": padding(), "labels": tokens(length=16)}


def image_of(config: Any) -> Tensor:
    config = getattr(config, "vision_config", config)
    size = getattr(config, "image_size", 64)
    height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return torch.randn(BATCH, getattr(config, "num_channels", 3), height, width)


def vision(config: Any, net: Any) -> Batch:
    return {"pixel_values": image_of(config), "labels": classes(config)}


def speech(config: Any, net: Any) -> Batch:
    return {"input_values": torch.randn(BATCH, 8000), "labels": tokens(32 + 8, 4)}


def sounds(config: Any, net: Any) -> Batch:
    return {"input_values": torch.randn(BATCH, 8000), "labels": classes(config)}


def spectrum(config: Any, net: Any) -> Batch:
    features = torch.randn(BATCH, config.num_mel_bins, 2 * config.max_source_positions)
    return {"input_features": features, "labels": tokens()}


def pairs(config: Any, net: Any) -> Batch:
    images = image_of(config)
    return {"input_ids": tokens(), "attention_mask": padding(), "pixel_values": images}


def pictures(config: Any, net: Any) -> Batch:
    size = net.image_size
    return {"x": torch.randn(BATCH, 3, size, size), "labels": classes()}


FAMILIES: Mapping[str, Callable[[Any, Any], Batch]] = {
    "text encoders": text,
    "causal language models": language,
    "encoder-decoders": translation,
    "vision": vision,
    "speech": speech,
    "sounds": sounds,
    "speech to text": spectrum,
    "two towers": pairs,
    "timm": pictures,
}


# ---------------------------------------------------------------------- the rows

TEXT_ENCODERS = """
    Albert Bert BigBird Camembert Canine ConvBert Data2VecText Deberta DebertaV2 DistilBert Electra
    Ernie Esm EuroBert Flaubert FNet Funnel IBert LayoutLM Lilt Longformer Luke MarkupLM
    MegatronBert MobileBert ModernBert MPNet Nystromformer RemBert RoCBert RoFormer Roberta
    RobertaPreLayerNorm SqueezeBert XLM XLMRoberta XLMRobertaXL XLNet Xmod Yoso
"""
LANGUAGE_MODELS = """
    Apertus Arcee Bamba BioGpt BitNet Bloom CodeGen Cohere Cohere2 DeepseekV2 DeepseekV3 DiffLlama
    Doge Dots1 Ernie4_5 Ernie4_5_Moe Exaone4 Falcon FalconH1 FalconMamba FlexOlmo Gemma Gemma2
    Gemma3 Glm Glm4 Glm4Moe GPTBigCode GPTJ GPTNeo GPTNeoX GPTNeoXJapanese GptOss Granite
    GraniteMoe GraniteMoeHybrid GraniteMoeShared Helium HunYuanDenseV1 Jamba JetMoe Lfm2 Llama
    Mamba Mamba2 MiniMax Ministral Mistral Mixtral ModernBertDecoder Mpt Nemotron Olmo Olmo2 Olmo3
    Olmoe OPT Persimmon Phi Phi3 Phimoe Qwen2 Qwen2Moe Qwen3 Qwen3Moe Qwen3Next RecurrentGemma
    SeedOss SmolLM3 StableLm Starcoder2 VaultGemma XGLM
"""
ENCODER_DECODERS = """
    Bart BigBirdPegasus Blenderbot BlenderbotSmall FSMT LED LongT5 M2M100 MBart MT5 Mvp NllbMoe
    Pegasus PegasusX PLBart ProphetNet SwitchTransformers T5 T5Gemma UMT5
"""
VISION = """
    Beit Bit ConvNext ConvNextV2 Cvt Data2VecVision DeiT Dinov2 Dinov2WithRegisters DonutSwin
    EfficientNet FocalNet HGNetV2 Hiera IJepa Levit MobileNetV1 MobileNetV2 MobileViT
    MobileViTV2 PoolFormer Pvt PvtV2 RegNet ResNet Segformer Siglip SwiftFormer Swin Swinv2
    TextNet TimmWrapper ViT ViTMSN
"""
SPEECH = """
    Data2VecAudio Hubert SEW SEWD UniSpeech UniSpeechSat Wav2Vec2 Wav2Vec2Conformer WavLM
"""
SOUNDS = "Hubert Wav2Vec2 WavLM"
TIMM = """
    botnet26t_256 cait_xxs24_224 coat_tiny coatnet_pico_rw_224 convit_tiny crossvit_tiny_240
    deit_tiny_patch16_224 eca_botnext26ts_256 edgenext_xx_small efficientformer_l1 fastvit_t8
    gcvit_xxtiny gmlp_s16_224 halonet26t hiera_tiny_224 lambda_resnet26t levit_128s
    maxvit_rmlp_pico_rw_256 mixer_s32_224 mobilevit_xxs mobilevitv2_050 nest_tiny poolformer_s12
    resmlp_12_224 samvit_base_patch16_224 swin_tiny_patch4_window7_224 visformer_tiny
    vit_tiny_patch16_224 volo_d1_224 xcit_nano_12_p16_224
"""
CONVOLUTIONS = """
    cs3darknet_s densenet121 dla34 efficientnet_b0 ghostnet_100 hardcorenas_a inception_v3
    mobilenetv3_small_050 nfnet_l0 regnetx_002 repvgg_a0 res2net50_26w_4s resnest14d resnet18
    rexnet_100 skresnet18 starnet_s1 tinynet_e xception41
"""
FULL = (
    "BertForSequenceClassification",
    "CLIPModel",
    "LlamaForCausalLM",
    "MistralForCausalLM",
    "T5ForConditionalGeneration",
)
TWO_TOWERS = "AltCLIPModel BlipModel ChineseCLIPModel CLIPModel GroupViTModel SiglipModel"

_START = {"decoder_start_token_id": 0}
_WINDOWS = {"window_size": 4, "depths": [1, 1], "num_heads": [2, 4], "embed_dim": 32}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "mamba_chunk_size": 16}
_SOUND = {"conv_dim": (32,) * 7, "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4}
_STAGES = {"hidden_sizes": [16, 24, 32, 48], "depths": [1, 1, 1, 1]}

OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "BambaForCausalLM": {**_MAMBA, "attn_layer_indices": [1]},
    "ConvNextForImageClassification": _STAGES,
    "ConvNextV2ForImageClassification": _STAGES,
    "DeepseekV2ForCausalLM": {"num_key_value_heads": 4, "num_experts_per_tok": 2},
    "DeepseekV3ForCausalLM": {"num_key_value_heads": 4, "n_group": 2, "topk_group": 1},
    "DonutSwinForImageClassification": _WINDOWS,
    "Dots1ForCausalLM": {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1},
    "EfficientNetForImageClassification": {"width_coefficient": 0.5, "hidden_dim": 640},
    "EsmForSequenceClassification": {"vocab_size": VOCABULARY, "pad_token_id": 1},
    "FalconH1ForCausalLM": {**_MAMBA, "mamba_d_ssm": 128},
    "FunnelForSequenceClassification": {"block_sizes": [1, 1]},
    "GPTNeoForCausalLM": {"attention_types": [[["global", "local"], 1]], "window_size": 8},
    "GraniteMoeHybridForCausalLM": {**_MAMBA, "layer_types": ["mamba", "attention"]},
    "HieraForImageClassification": {
        "image_size": [64, 64],
        "embed_dim": 16,
        "depths": [1, 1, 1, 1],
    },
    "HunYuanDenseV1ForCausalLM": {"head_dim": 16},
    "JambaForCausalLM": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "LEDForConditionalGeneration": {"attention_window": 8},
    "LevitForImageClassification": {"image_size": 128, "patch_size": 16},
    "LiltForSequenceClassification": {"hidden_size": 96},
    "LongformerForSequenceClassification": {"attention_window": 8},
    "LongT5ForConditionalGeneration": {**_START, "local_radius": 4, "global_block_size": 4},
    "Mamba2ForCausalLM": {"num_heads": 8, "chunk_size": 16, "state_size": 16, "n_groups": 2},
    "MinistralForCausalLM": {"head_dim": 16},
    "MobileViTForImageClassification": {"image_size": 128},
    "MobileViTV2ForImageClassification": {"image_size": 128},
    "NemotronForCausalLM": {"head_dim": 16, "num_key_value_heads": 2},
    "Qwen3NextForCausalLM": {
        "num_hidden_layers": 4,
        **{"linear_num_key_heads": 2, "linear_num_value_heads": 4},
        **{"linear_key_head_dim": 16, "linear_value_head_dim": 16},
    },
    "RecurrentGemmaForCausalLM": {"num_hidden_layers": 3},
    "SEWForCTC": {"conv_dim": (32,) * 13},
    "SEWDForCTC": {"conv_dim": (32,) * 13},
    "ResNetForImageClassification": {**_STAGES, "embedding_size": 16},
    "SwinForImageClassification": _WINDOWS,
    "Swinv2ForImageClassification": _WINDOWS,
    "SwitchTransformersForConditionalGeneration": _START,
    "T5ForConditionalGeneration": _START,
    "TextNetForImageClassification": {"image_size": [64, 64]},
    "Wav2Vec2ConformerForCTC": {"vocab_size": 32},
    "XmodForSequenceClassification": {"default_language": "en_XX"},
    "samvit_base_patch16_224": {
        **{"img_size": 64, "embed_dim": 64, "depth": 2, "num_heads": 4},
        **{"window_size": 2, "global_attn_indexes": (1,)},
    },
}
"""What else a configuration needs to be small, and to be one that its model takes."""

INPUTS: Mapping[str, Callable[[Any], Batch]] = {
    "FSMTForConditionalGeneration": lambda config: {"decoder_input_ids": tokens(length=16)},
}
"""What else a model takes."""


def _named(family: str, names: str, suffix: str = "") -> list[Architecture]:
    shared = _SOUND if family in ("speech", "sounds") else {}
    if names is CONVOLUTIONS:
        shared = {"size": 96}
    full = [name + suffix for name in names.split()]
    return [
        Architecture(name, family, {**shared, **OPTIONS.get(name, {})}, INPUTS.get(name))
        for name in full
    ]


_PLAIN = {
    one.name: one
    for one in (
        *_named("text encoders", TEXT_ENCODERS, "ForSequenceClassification"),
        *_named("causal language models", LANGUAGE_MODELS, "ForCausalLM"),
        *_named("causal language models", "CTRLLMHeadModel GPT2LMHeadModel OpenAIGPTLMHeadModel"),
        *_named("encoder-decoders", ENCODER_DECODERS, "ForConditionalGeneration"),
        *_named("encoder-decoders", "MarianMTModel"),
        *_named("vision", VISION, "ForImageClassification"),
        *_named("speech", SPEECH, "ForCTC"),
        *_named("sounds", SOUNDS, "ForSequenceClassification"),
        *_named("speech to text", "WhisperForConditionalGeneration"),
        *_named("two towers", TWO_TOWERS),
        *_named("timm", TIMM),
        *_named("timm", CONVOLUTIONS),
    )
}


def _variant(name: str, what: str, inputs: Any = None, **options: Any) -> Architecture:
    row = _PLAIN[name]
    inputs, options = inputs or row.inputs, {**row.options, **options}
    return replace(row, name=f"{name} {what}", inputs=inputs, options=options)


def _mask(mask: Callable[[], Tensor]) -> Callable[[Any], Batch]:
    return lambda config: {"attention_mask": mask()}


ARCHITECTURES: Mapping[str, Architecture] = _PLAIN | {
    one.name: one
    for one in (
        _variant("LlamaForCausalLM", "with padding", _mask(padding)),
        *(_variant(name, "with a full mask", _mask(full)) for name in FULL),
        _variant("OPTForCausalLM", "with layerdrop", layerdrop=0.1),
        _variant(
            "WhisperForConditionalGeneration",
            "with layerdrop",
            encoder_layerdrop=0.1,
            decoder_layerdrop=0.1,
        ),
        # These are drawn by numpy.
        _variant("Wav2Vec2ForSequenceClassification", "without masks", mask_time_prob=0.0),
        _variant("WavLMForSequenceClassification", "without masks", mask_time_prob=0.0),
        _variant("WavLMForCTC", "without masks", mask_time_prob=0.0),
        _variant("HubertForCTC", "without masks", mask_time_prob=0.0),
    )
}
"""All rows by their names."""
