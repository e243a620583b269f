"""Names and layouts of a checkpoint's tensors, and the parameters that they become.

Names are those of the reference (https://github.com/thunlp/NOSA), which are Llama's with `delta` and `A` beside them.
Its matrices are stored [out, in]; here they are [in, out], with heads as a dimension of their own.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from nosa_jax.config import NosaConfig

# Checkpoint name within a layer -> (parameter name within a layer, whether [out, in] becomes [in, out]).
_LAYER = {
    "input_layernorm.weight": ("attention_norm.scale_d", False),
    "self_attn.q_proj.weight": ("attention.q_weight_dnh", True),
    "self_attn.k_proj.weight": ("attention.k_weight_dkh", True),
    "self_attn.v_proj.weight": ("attention.v_weight_dkh", True),
    "self_attn.o_proj.weight": ("attention.o_weight_nhd", True),
    "self_attn.delta.weight": ("attention.delta_weight_kkh", False),
    "self_attn.A": ("attention.a_k", False),
    "post_attention_layernorm.weight": ("ffn_norm.scale_d", False),
    "mlp.gate_proj.weight": ("ffn.gate_weight_df", True),
    "mlp.up_proj.weight": ("ffn.up_weight_df", True),
    "mlp.down_proj.weight": ("ffn.down_weight_fd", True),
}
_EVICTION = ("self_attn.delta.weight", "self_attn.A")
_EMBEDDING, _HEAD = "model.embed_tokens.weight", "lm_head.weight"
# Tables that old files hold beside the weights and that are computed here.
_COMPUTED = re.compile(r"model\.(layers\.\d+\.self_attn\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)")


@dataclass(frozen=True)
class Tensor:
    """A tensor of a checkpoint: its name and shape in the file, and the parameter that it becomes."""

    name: str
    shape: tuple[int, ...]
    parameter: str
    parameter_shape: tuple[int, ...]
    transposed: bool


def checkpoint_tensors(config: NosaConfig, *, eviction_head: bool = True) -> dict[str, Tensor]:
    """Every tensor of a config's checkpoint by its name, in the order of the layers."""
    c = config
    queries, keys = (c.num_heads, c.head_dim), (c.num_kv_heads, c.head_dim)
    shapes = {
        "attention_norm.scale_d": (c.embed_dim,),
        "attention.q_weight_dnh": (c.embed_dim, *queries),
        "attention.k_weight_dkh": (c.embed_dim, *keys),
        "attention.v_weight_dkh": (c.embed_dim, *keys),
        "attention.o_weight_nhd": (*queries, c.embed_dim),
        "attention.delta_weight_kkh": (c.num_kv_heads, *keys),
        "attention.a_k": (c.num_kv_heads,),
        "ffn_norm.scale_d": (c.embed_dim,),
        "ffn.gate_weight_df": (c.embed_dim, c.ffn_dim),
        "ffn.up_weight_df": (c.embed_dim, c.ffn_dim),
        "ffn.down_weight_fd": (c.ffn_dim, c.embed_dim),
    }
    tensors = [_tensor(_EMBEDDING, "embed_vd", (c.vocab_size, c.embed_dim), False)]
    for layer in range(c.num_layers):
        tensors += [
            _tensor(f"model.layers.{layer}.{name}", f"layers.{layer}.{parameter}", shapes[parameter], transposed)
            for name, (parameter, transposed) in _LAYER.items()
            if eviction_head or name not in _EVICTION
        ]
    tensors.append(_tensor("model.norm.weight", "final_norm.scale_d", (c.embed_dim,), False))
    if not c.tie_embeddings:
        tensors.append(_tensor(_HEAD, "lm_head_dv", (c.embed_dim, c.vocab_size), True))
    return {t.name: t for t in tensors}


def tied_head(config: NosaConfig) -> Tensor | None:
    """The output matrix that a checkpoint with tied embeddings may hold beside them: it must be the same."""
    shape = (config.vocab_size, config.embed_dim)
    return Tensor(_HEAD, shape, "embed_vd", shape, False) if config.tie_embeddings else None


def is_computed(name: str) -> bool:
    """Whether a tensor is a table that the model computes itself."""
    return _COMPUTED.fullmatch(name) is not None


def has_eviction_head(names: Iterable[str]) -> bool:
    """Whether any layer has `delta` or `A`."""
    return any(name.endswith(_EVICTION) for name in names)


def by_parameter(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors by the parameter that they become."""
    return {t.parameter: t for t in tensors.values()}


def _tensor(name: str, parameter: str, shape: tuple[int, ...], transposed: bool) -> Tensor:
    """The layout in the file: heads and their dimension side by side, [out, in] where transposed."""
    if parameter.endswith("_nhd"):  # (heads, H) are its inputs
        rows, columns = math.prod(shape[:-1]), shape[-1]
    else:
        rows, columns = shape[0], math.prod(shape[1:])
    stored = shape if len(shape) == 1 else (columns, rows) if transposed else (rows, columns)
    return Tensor(name, stored, parameter, shape, transposed)
