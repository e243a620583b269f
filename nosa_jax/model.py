"""The decoder-only language model: Flax NNX modules that hold parameters around pure functions."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from nosa_jax.attention import BLOCK_IDS, sequence_attention
from nosa_jax.config import AttentionKind, NosaConfig
from nosa_jax.eviction import token_scores
from nosa_jax.rope import rope_tables, rotate

if TYPE_CHECKING:
    from nosa_jax.checkpoint import Placement
    from nosa_jax.tokenizer import Tokenizer

Initializer = jax.nn.initializers.Initializer


def product(equation: str, x: jax.Array, weight: nnx.Param, config: NosaConfig) -> jax.Array:
    """A matrix product in the compute dtype; float32 products keep all their bits on every device."""
    dtype = jnp.dtype(config.dtype)
    precision = lax.Precision.HIGHEST if dtype == jnp.float32 else None
    return jnp.einsum(equation, x.astype(dtype), weight[...].astype(dtype), precision=precision)


def _scaled(x: jax.Array, factor: float) -> jax.Array:
    """x * factor, rounded once; 1 leaves x as it is."""
    return x if factor == 1.0 else (x.astype(jnp.float32) * factor).astype(x.dtype)


def _fan_in(*in_axes: int, out_axes: tuple[int, ...], scale: float = 1.0) -> Initializer:
    return jax.nn.initializers.variance_scaling(scale, "fan_in", "truncated_normal", in_axis=in_axes, out_axis=out_axes)


DELTA_INITIALIZER = _fan_in(1, 2, out_axes=(0,))
"""Of the eviction head's `delta` [K, K, H]."""


class RMSNorm(nnx.Module):
    """x / rms(x) * scale over the last axis, computed in float32 and returned in the compute dtype."""

    def __init__(self, config: NosaConfig) -> None:
        self.config = config
        self.scale_d = nnx.Param(jnp.ones(config.embed_dim, config.param_dtype))

    def __call__(self, x: Float[Array, "*lead D"]) -> Float[Array, "*lead D"]:
        x = x.astype(jnp.float32)
        normed = x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + self.config.rms_norm_eps)
        return (normed * self.scale_d[...].astype(jnp.float32)).astype(self.config.dtype)


class Attention(nnx.Module):
    """Grouped-query attention with RoPE and an eviction head."""

    def __init__(self, config: NosaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        width, heads, kv_heads, head_dim = config.embed_dim, config.num_heads, config.num_kv_heads, config.head_dim
        dtype = config.param_dtype
        inner = _fan_in(0, out_axes=(1, 2))
        self.q_weight_dnh = nnx.Param(inner(rngs.params(), (width, heads, head_dim), dtype))
        self.k_weight_dkh = nnx.Param(inner(rngs.params(), (width, kv_heads, head_dim), dtype))
        self.v_weight_dkh = nnx.Param(inner(rngs.params(), (width, kv_heads, head_dim), dtype))
        outer = _fan_in(0, 1, out_axes=(2,), scale=1 / (2 * config.num_layers))
        self.o_weight_nhd = nnx.Param(outer(rngs.params(), (heads, head_dim, width), dtype))
        self.delta_weight_kkh = nnx.Param(DELTA_INITIALIZER(rngs.params(), (kv_heads, kv_heads, head_dim), dtype))
        self.a_k = nnx.Param(jnp.zeros(kv_heads, dtype))  # zero: training starts as plain sparse attention

    def projections(
        self, x: Float[Array, "B T D"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"]]:
        """Queries, keys and values of normalised hidden states, not rotated."""
        q = product("btd,dnh->btnh", x, self.q_weight_dnh, self.config)
        k = product("btd,dkh->btkh", x, self.k_weight_dkh, self.config)
        return q, k, product("btd,dkh->btkh", x, self.v_weight_dkh, self.config)

    def project(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"]
    ) -> tuple[Float[Array, "B T N H"], Float[Array, "B T K H"], Float[Array, "B T K H"], Float[Array, "B T K"]]:
        """Rotated queries, rotated keys, values and cis of normalised hidden states.

        cis is float32 and zero where the config has no eviction head.
        """
        q, k, v = self.projections(x)
        cos, sin = rope_tables(positions, self.config)
        return rotate(q, cos, sin), rotate(k, cos, sin), v, self.score(v)

    def score(self, v: Float[Array, "B T K H"]) -> Float[Array, "B T K"]:
        """cis of tokens with these values, float32; zero where the config has no eviction head."""
        return token_scores(v, self.delta_weight_kkh[...], self.a_k[...], self.config.eviction)

    def output(self, heads: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """Project the heads' outputs back to the model width."""
        return product("btnh,nhd->btd", heads, self.o_weight_nhd, self.config)


class FeedForward(nnx.Module):
    """SwiGLU."""

    def __init__(self, config: NosaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        width, hidden, dtype = config.embed_dim, config.ffn_dim, config.param_dtype
        self.gate_weight_df = nnx.Param(_fan_in(0, out_axes=(1,))(rngs.params(), (width, hidden), dtype))
        self.up_weight_df = nnx.Param(_fan_in(0, out_axes=(1,))(rngs.params(), (width, hidden), dtype))
        outer = _fan_in(0, out_axes=(1,), scale=1 / (2 * config.num_layers))
        self.down_weight_fd = nnx.Param(outer(rngs.params(), (hidden, width), dtype))

    def __call__(self, x: Float[Array, "B T D"]) -> Float[Array, "B T D"]:
        gate = jax.nn.silu(product("btd,df->btf", x, self.gate_weight_df, self.config))
        up = product("btd,df->btf", x, self.up_weight_df, self.config)
        return product("btf,fd->btd", gate * up, self.down_weight_fd, self.config)


class DecoderLayer(nnx.Module):
    """Pre-norm attention and feed-forward, each added to the hidden states times the config's residual scale."""

    def __init__(self, config: NosaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        self.attention_norm = RMSNorm(config)
        self.attention = Attention(config, rngs=rngs)
        self.ffn_norm = RMSNorm(config)
        self.ffn = FeedForward(config, rngs=rngs)

    def __call__(
        self, x: Float[Array, "B T D"], positions: Int[Array, "B T"], attention: AttentionKind
    ) -> tuple[Float[Array, "B T D"], Int[Array, "B T K C"] | None]:
        """Hidden states after the layer, and the selected block ids (None for "dense")."""
        q, k, v, cis = self.attention.project(self.attention_norm(x), positions)
        heads, block_ids = sequence_attention(q, k, v, cis, config=self.config, attention=attention)
        return self.finish(x, heads), block_ids

    def finish(self, x: Float[Array, "B T D"], heads: Float[Array, "B T N H"]) -> Float[Array, "B T D"]:
        """The part of the layer after attention."""
        x = x + _scaled(self.attention.output(heads), self.config.residual_scale)
        return x + _scaled(self.ffn(self.ffn_norm(x)), self.config.residual_scale)


class NosaLM(nnx.Module):
    """A Llama-style decoder whose attention is dense or one of the compared sparse systems, over one set of weights.

    Source: arXiv 2510.13602; docs/02 states the formulas.

    Args:
      config: dimensions, budgets and number formats.
      rngs: `nnx.Rngs(seed)`; only its "params" stream is used.
    """

    def __init__(self, config: NosaConfig, *, rngs: nnx.Rngs) -> None:
        self.config = config
        vocab, width, dtype = config.vocab_size, config.embed_dim, config.param_dtype
        self.embed_vd = nnx.Param(jax.nn.initializers.normal(1.0)(rngs.params(), (vocab, width), dtype))
        self.layers = nnx.List([DecoderLayer(config, rngs=rngs) for _ in range(config.num_layers)])
        self.final_norm = RMSNorm(config)
        if not config.tie_embeddings:
            self.lm_head_dv = nnx.Param(_fan_in(0, out_axes=(1,))(rngs.params(), (width, vocab), dtype))

    @classmethod
    def from_pretrained(
        cls,
        path_or_id: str | Path,
        *,
        dtype: DTypeLike | None = None,
        place: "Placement | None" = None,
        revision: str | None = None,
        seed: int = 0,
        **changes: Any,
    ) -> "NosaLM":
        """Read a released checkpoint, one of `save_pretrained`, or one of this package's own (docs/08).

        The weights are read tensor by tensor, each into the dtype and sharding it is to have.

        Args:
          path_or_id: a folder, or the id of a repository on the Hugging Face Hub ("owner/name").
          dtype: float32, bfloat16 or float16, to convert parameters and activations to; None keeps what is stored,
            tensor by tensor.
          place: gives each parameter's sharding from its name and shape; None puts all on the first device.
          revision: branch, tag or commit of a repository.
          seed: of the eviction head's start where the checkpoint has none (a warning says so).
          changes: fields of the config to set otherwise than stored, like attention="nosa" or max_context=32_768;
            none that changes a parameter's shape.

        Raises:
          InputError: nothing readable is there, or the config or a tensor is not what this model can hold. Names the
            key, the value and the way out. Raised before any weight is read, except for damage within a file.
        """
        from nosa_jax.weights.source import find_model  # they build on this module

        return find_model(path_or_id, revision=revision).load(dtype=dtype, place=place, seed=seed, **changes)

    def save_pretrained(
        self, folder: str | Path, tokenizer: "Tokenizer | None" = None, *, max_shard_size: int | str = "5GB"
    ) -> Path:
        """Write config.json, safetensors files under the reference's names, and the tokenizer's files (docs/08).

        The folder appears whole or not at all. `from_pretrained` gives the same bits back.

        Raises:
          InputError: `folder` already holds something, or `max_shard_size` is no size.
          OSError: it cannot be written.
        """
        from nosa_jax.weights.writer import save_pretrained  # it builds on this module

        return save_pretrained(self, folder, tokenizer, max_shard_size=max_shard_size)

    @classmethod
    def from_config(cls, config: NosaConfig, seed: int = 0) -> "NosaLM":
        """A model with freshly initialised parameters."""
        return cls(config, rngs=nnx.Rngs(seed))

    def __call__(self, tokens: Int[Array, "B T"], attention: AttentionKind | None = None) -> Float[Array, "B T V"]:
        """Next-token logits of sequences that start at position 0, float32.

        Args:
          tokens: ids in 0 .. V-1. Rows may be padded at the end with any ids: attention is causal.
          attention: which system attends; None for the config's.

        Raises:
          ValueError: T exceeds the config's max_context.
        """
        return self.unembed(self.hidden_states(tokens, attention))

    def hidden_states(
        self, tokens: Int[Array, "B T"], attention: AttentionKind | None = None, *, remat: bool = False
    ) -> Float[Array, "B T D"]:
        """Hidden states after the final norm; arguments as for calling the model.

        remat: keep only each layer's input and selected block ids for the backward pass and recompute the rest.
        """
        return self.hidden_states_and_blocks(tokens, attention, remat=remat)[0]

    def hidden_states_and_blocks(
        self, tokens: Int[Array, "B T"], attention: AttentionKind | None = None, *, remat: bool = False
    ) -> tuple[Float[Array, "B T D"], list[Any]]:
        """`hidden_states`, and for each layer the selected block ids [B, T, K, C] (None for "dense")."""
        if tokens.shape[1] > self.config.max_context:
            raise ValueError(
                f"{tokens.shape[1]} tokens exceed max_context={self.config.max_context}; shorten the sequence "
                "or set max_context in the config"
            )
        kind = attention or self.config.attention
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)

        def run(
            layer: DecoderLayer, x: jax.Array, positions: jax.Array
        ) -> tuple[jax.Array, Int[Array, "B T K C"] | None]:
            return layer(x, positions, kind)

        if remat:
            run = nnx.remat(run, policy=jax.checkpoint_policies.save_only_these_names(BLOCK_IDS))
        x = self.embed(tokens)
        blocks = []
        for layer in self.layers:
            x, block_ids = run(layer, x, positions)
            blocks.append(block_ids)
        return self.final_norm(x), blocks

    def embed(self, tokens: Int[Array, "B T"]) -> Float[Array, "B T D"]:
        """Token embeddings in the compute dtype."""
        return _scaled(self.embed_vd[...].astype(self.config.dtype)[tokens], self.config.scale_emb)

    def unembed(self, hidden: Float[Array, "*lead D"]) -> Float[Array, "*lead V"]:
        """Float32 logits of hidden states after the final norm."""
        dtype = jnp.dtype(self.config.dtype)
        hidden = _scaled(hidden, 1 / self.config.logit_divisor)
        head = self.embed_vd[...].T if self.config.tie_embeddings else self.lm_head_dv[...]
        return jnp.einsum(
            "...d,dv->...v",
            hidden.astype(dtype),
            head.astype(dtype),
            preferred_element_type=jnp.float32,
            precision=lax.Precision.HIGHEST if dtype == jnp.float32 else None,
        )
