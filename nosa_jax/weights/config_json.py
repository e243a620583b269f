"""`config.json` of a released checkpoint to NosaConfig and back.

Field names are those of Llama and MiniCPM configs. The selection's numbers stand in the table `sparse_config` under the
names of the authors' attention module (https://github.com/thunlp/NOSA), which fixes them in its code: a config
without the table gets the values that are fixed there.
"""

from collections.abc import Mapping
from typing import Any, get_args

from nosa_jax.config import AttentionKind, ComputeDtype, EvictionVariant, NosaConfig
from nosa_jax.errors import InputError
from nosa_jax.weights.rope_scaling import is_positive, longrope_scaling, rope_fields

CONFIG_FILE = "config.json"
_MODEL_TYPES = ("llama", "minicpm")
_MINICPM_SCALES = ("scale_emb", "scale_depth", "dim_model_base")

# Keys that change what is computed, and the values under which nothing is changed.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention_bias": (False, None),
    "mlp_bias": (False, None),
    "qkv_bias": (False, None),
    "hidden_act": ("silu", None),
    "quantization_config": (None,),
    "partial_rotary_factor": (1, None),
    "sliding_window": (None,),
    "layer_types": (None,),
    "clip_qkv": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "embedding_multiplier": (1, None),
    "residual_multiplier": (1, None),
    "attention_multiplier": (None,),
    "logits_scaling": (1, None),
    "logit_scale": (1, None),
    "use_qk_norm": (False, None),
    "qk_layernorm": (False, None),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
    "n_routed_experts": (None, 0),
    "kv_lora_rank": (None, 0),
    "q_lora_rank": (None, 0),
}

# sparse_config: the name there and its value in the authors' code.
_SPARSE_DEFAULTS = {
    "kernel_size": 32,  # pooling window, tokens
    "kernel_stride": 16,
    "block_size": 64,
    "init_blocks": 1,
    "window_size": 1024,  # tokens before the current block that are always selected
    "select_blocks": 16,  # query-aware picks, of which the current block takes one
    "topk": 64,  # all blocks
    "dense_len": 0,
    "use_nope": False,
    "attention": None,
    "eviction": "ed_dma",
}


def config_from_json(values: Mapping[str, Any], *, has_eviction_head: bool = True, **changes: Any) -> NosaConfig:
    """The NosaConfig of a config.json.

    Args:
      has_eviction_head: whether the checkpoint holds `delta` and `A`. One without was trained with full attention: it
        is "dense" until the caller or `sparse_config.attention` says otherwise.
      changes: fields of NosaConfig that the caller sets.

    Raises:
      InputError: a key is missing, has no usable value, or asks for something that is not supported; names it.
    """
    kind = values.get("model_type", "llama")
    if kind not in _MODEL_TYPES:
        raise InputError(
            f"model_type={kind!r} is not supported; {' and '.join(map(repr, _MODEL_TYPES))} are. Give a checkpoint of "
            "NOSA, Llama or MiniCPM."
        )
    for key, neutral in _NEUTRAL.items():
        if values.get(key) not in neutral and not _all_full_attention(key, values.get(key)):
            raise InputError(
                f"{key}={values[key]!r} is not supported (only {' or '.join(map(str, neutral))}). Give a checkpoint "
                "that was trained without it."
            )
    heads = _integer(values, "num_attention_heads")
    fields: dict[str, Any] = dict(
        vocab_size=_integer(values, "vocab_size"),
        embed_dim=_integer(values, "hidden_size"),
        ffn_dim=_integer(values, "intermediate_size"),
        num_layers=_integer(values, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=_integer(values, "num_key_value_heads", heads),
        head_dim=_head_dim(values, heads),
        rms_norm_eps=_positive(values, "rms_norm_eps", 1e-6),
        tie_embeddings=_flag(values, "tie_word_embeddings", kind == "minicpm"),
        max_context=_integer(values, "max_position_embeddings", NosaConfig.max_context),
        attention="nosa" if has_eviction_head else "dense",
    )
    fields |= _scales(values, kind) | _sparse_fields(values, kind) | _dtypes(values) | changes
    fields |= rope_fields(values, fields["head_dim"], fields["max_context"]) | changes
    try:
        return NosaConfig(**fields)
    except (ValueError, TypeError) as error:
        raise InputError(f"this config.json cannot be used: {error}") from error


def config_to_json(config: NosaConfig) -> dict[str, Any]:
    """The config.json of a model; `config_from_json` gives the same config back."""
    scaled = any(getattr(config, key) != getattr(NosaConfig, key) for key in _MINICPM_SCALES)
    kind, name = ("minicpm", "MiniCPMForCausalLM") if scaled else ("llama", "LlamaForCausalLM")
    values: dict[str, Any] = {
        "architectures": [name],
        "model_type": kind,
        "vocab_size": config.vocab_size,
        "hidden_size": config.embed_dim,
        "intermediate_size": config.ffn_dim,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": None,
        "max_position_embeddings": config.max_context,
        "tie_word_embeddings": config.tie_embeddings,
        "torch_dtype": config.param_dtype,
        "compute_dtype": config.dtype,
        "sparse_config": {
            "kernel_size": config.pool_window,
            "kernel_stride": config.pool_stride,
            "block_size": config.block_size,
            "init_blocks": config.sink_blocks,
            "window_size": (config.local_blocks - 1) * config.block_size,
            "select_blocks": config.query_blocks + 1,
            "topk": config.sink_blocks + config.local_blocks + config.query_blocks + config.evict_blocks,
            "dense_len": 0,
            "use_nope": False,
            "attention": config.attention,
            "eviction": config.eviction,
        },
    }
    if config.rope_factors is not None or config.rope_attention_factor != 1.0:
        factors = config.rope_factors or (1.0,) * (config.head_dim // 2)
        values["rope_scaling"] = longrope_scaling(factors, config.rope_attention_factor, config.max_context)
    if scaled:
        # Without a scale the one that changes nothing: MiniCPM configs must have all three.
        depth = config.num_layers**0.5 if config.scale_depth is None else config.scale_depth
        base = config.embed_dim if config.dim_model_base is None else config.dim_model_base
        values |= {"scale_emb": config.scale_emb, "scale_depth": depth, "dim_model_base": base}
    return values


def _integer(values: Mapping[str, Any], key: str, default: int | None = None) -> int:
    found = values.get(key)
    found = default if found is None else found
    if isinstance(found, bool) or not isinstance(found, int) or not 1 <= found < 2**31:
        what = "is missing" if found is None else f"is {found!r:.40}"
        raise InputError(f"{key} {what} in config.json; it must be an integer of at least 1 and below 2**31.")
    return found


def _positive(values: Mapping[str, Any], key: str, default: float | None = None) -> float:
    found = values.get(key)
    found = default if found is None else found
    if not is_positive(found):
        what = "is missing" if found is None else f"is {found!r:.40}"
        raise InputError(f"{key} {what} in config.json; it must be a positive number.")
    return float(found)


def _flag(values: Mapping[str, Any], key: str, default: bool) -> bool:
    found = values.get(key)
    if found is not None and not isinstance(found, bool):
        raise InputError(f"{key} is {found!r} in config.json; it must be true or false.")
    return default if found is None else found


def _head_dim(values: Mapping[str, Any], heads: int) -> int:
    """One size for queries, keys and values."""
    width = _integer(values, "hidden_size")
    if values.get("head_dim") is None and width % heads:
        raise InputError(f"head_dim is missing and hidden_size={width} is no multiple of num_attention_heads={heads}.")
    size = _integer(values, "head_dim", max(1, width // heads))
    for key in ("v_head_dim", "qk_head_dim", "kv_channels"):
        if values.get(key) not in (None, size):
            raise InputError(
                f"{key}={values[key]!r} differs from head_dim={size}; heads of unequal sizes are not supported."
            )
    return size


def _all_full_attention(key: str, value: Any) -> bool:
    return key == "layer_types" and isinstance(value, list) and all(v == "full_attention" for v in value)


def _scales(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """MiniCPM's three scalings; a Llama config must not have any that would change something."""
    if kind == "minicpm":
        return {key: _positive(values, key) for key in _MINICPM_SCALES}
    given = {key: values.get(key) for key in _MINICPM_SCALES}
    for key, value in given.items():
        if value is not None:
            raise InputError(
                f"{key}={value!r} is not supported with model_type={kind!r}, whose models are not scaled. Remove it, "
                "or set model_type to 'minicpm' if the model was trained as one."
            )
    return {}


def _sparse_fields(values: Mapping[str, Any], kind: str) -> dict[str, Any]:
    """Block sizes and budgets."""
    table = values.get("sparse_config")
    if table is None:
        table = {}
    if not isinstance(table, Mapping):
        raise InputError(f"sparse_config={table!r} must be a table.")
    if unknown := sorted(set(table) - set(_SPARSE_DEFAULTS)):
        raise InputError(f"sparse_config.{unknown[0]} is not known; known are {', '.join(_SPARSE_DEFAULTS)}.")
    if kind == "minicpm" and table and "select_blocks" not in table:
        raise InputError(
            "sparse_config without select_blocks is that of InfLLM-V2 in MiniCPM, which counts topk otherwise and is "
            "dense below dense_len. Remove sparse_config to load the model with full attention."
        )
    merged = {**_SPARSE_DEFAULTS, **table}
    for key in ("dense_len", "use_nope"):
        if merged[key]:
            raise InputError(f"sparse_config.{key}={merged[key]!r} is not supported; only {_SPARSE_DEFAULTS[key]} is.")
    sizes = {key: merged[key] for key in _SPARSE_DEFAULTS if isinstance(_SPARSE_DEFAULTS[key], int)}
    for key, value in sizes.items():
        if (isinstance(value, bool) and key != "use_nope") or not isinstance(value, int) or value < 0:
            raise InputError(f"sparse_config.{key}={value!r} must be an integer of at least 0.")
    if not merged["block_size"] or merged["window_size"] % merged["block_size"]:
        raise InputError(
            f"sparse_config.window_size={merged['window_size']} must be a multiple of "
            f"block_size={merged['block_size']}."
        )
    local = merged["window_size"] // merged["block_size"] + 1  # with the current block
    query = merged["select_blocks"] - 1  # the authors count the current block among these picks
    evict = merged["topk"] - merged["init_blocks"] - local - query
    if query < 0 or evict < 0:
        raise InputError(
            f"sparse_config.topk={merged['topk']} is less than init_blocks={merged['init_blocks']}, the {local} blocks "
            f"of window_size and the current one, and select_blocks={merged['select_blocks']} (at least 1) need."
        )
    for key, kinds in (("attention", (None, *get_args(AttentionKind))), ("eviction", get_args(EvictionVariant))):
        if merged[key] not in kinds:
            raise InputError(f"sparse_config.{key}={merged[key]!r} must be one of {', '.join(k for k in kinds if k)}.")
    fields = dict(
        pool_window=merged["kernel_size"], pool_stride=merged["kernel_stride"], block_size=merged["block_size"],
        sink_blocks=merged["init_blocks"], local_blocks=local, query_blocks=query, evict_blocks=evict,
        eviction=merged["eviction"],
    )  # fmt: skip
    return fields if merged["attention"] is None else fields | {"attention": merged["attention"]}


def stored_dtype(values: Mapping[str, Any]) -> Any:
    """The dtype of the weights, as a config.json names it; None where it does not. Newer files call it `dtype`."""
    return values.get("dtype") if values.get("torch_dtype") is None else values["torch_dtype"]


def _dtypes(values: Mapping[str, Any]) -> dict[str, Any]:
    """Of the activations; parameters keep what their files hold."""
    stored = stored_dtype(values)
    given = {"param_dtype": stored, "dtype": values.get("compute_dtype", stored)}
    names = {key: str(value).removeprefix("torch.") for key, value in given.items() if value is not None}
    for name in names.values():
        if name not in get_args(ComputeDtype):
            raise InputError(f"torch_dtype={name!r} must be one of {', '.join(get_args(ComputeDtype))}.")
    return names
