"""Random weights in the checkpoint layout, and a JAX model that holds them."""

import jax.numpy as jnp
import numpy as np

from nosa_jax.checkpoint import abstract_model
from nosa_jax.config import NosaConfig
from nosa_jax.model import NosaLM

# Checkpoint name -> (parameter name, whether a matrix [out, in] becomes [in, out]).
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


def names_of(config: NosaConfig) -> dict[str, tuple[str, bool]]:
    """Checkpoint name -> (parameter name, whether the matrix is transposed)."""
    names = {
        "model.embed_tokens.weight": ("embed_vd", False),
        "model.norm.weight": ("final_norm.scale_d", False),
    }
    if not config.tie_embeddings:
        names["lm_head.weight"] = ("lm_head_dv", True)
    for i in range(config.num_layers):
        for name, (parameter, transposed) in _LAYER.items():
            names[f"model.layers.{i}.{name}"] = (f"layers.{i}.{parameter}", transposed)
    return names


def to_checkpoint(config: NosaConfig, params: dict) -> dict[str, np.ndarray]:
    """Parameters by name (or anything shaped like them, such as gradients) in the checkpoint layout, float64."""
    shapes = checkpoint_shapes(config)
    out = {}
    for name, (parameter, transposed) in names_of(config).items():
        array = np.asarray(params[parameter], np.float64)
        out[name] = array.reshape(shapes[name][::-1]).T if transposed else array.reshape(shapes[name])
    return out


def checkpoint_shapes(config: NosaConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every array of a checkpoint."""
    c = config
    queries, keys = c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim
    layer = {
        "input_layernorm.weight": (c.embed_dim,),
        "self_attn.q_proj.weight": (queries, c.embed_dim),
        "self_attn.k_proj.weight": (keys, c.embed_dim),
        "self_attn.v_proj.weight": (keys, c.embed_dim),
        "self_attn.o_proj.weight": (c.embed_dim, queries),
        "self_attn.delta.weight": (c.num_kv_heads, keys),
        "self_attn.A": (c.num_kv_heads,),
        "post_attention_layernorm.weight": (c.embed_dim,),
        "mlp.gate_proj.weight": (c.ffn_dim, c.embed_dim),
        "mlp.up_proj.weight": (c.ffn_dim, c.embed_dim),
        "mlp.down_proj.weight": (c.embed_dim, c.ffn_dim),
    }
    shapes = {f"model.layers.{i}.{name}": shape for i in range(c.num_layers) for name, shape in layer.items()}
    shapes |= {"model.embed_tokens.weight": (c.vocab_size, c.embed_dim), "model.norm.weight": (c.embed_dim,)}
    return shapes if c.tie_embeddings else shapes | {"lm_head.weight": (c.vocab_size, c.embed_dim)}


def random_weights(config: NosaConfig, seed: int, scale: float = 1.0) -> dict[str, np.ndarray]:
    """Gaussian matrices that keep activations near unit size times `scale`; A has both signs."""
    rng = np.random.default_rng(seed)
    out = {}
    for name, shape in checkpoint_shapes(config).items():
        x = rng.normal(size=shape)
        if name.endswith("norm.weight"):
            x = 1 + 0.2 * x
        elif len(shape) == 2 and "embed" not in name:
            x *= scale / np.sqrt(shape[1])
        out[name] = x.astype(np.float32)
    return out


def model_with(config: NosaConfig, weights: dict[str, np.ndarray]) -> NosaLM:
    """The JAX model that holds a checkpoint."""
    skeleton, shapes = abstract_model(config)
    params = {}
    for name, (parameter, transposed) in names_of(config).items():
        array = weights[name].T if transposed else weights[name]
        params[parameter] = jnp.asarray(array.reshape(shapes[parameter].shape), config.param_dtype)
    return skeleton.merge(params)
