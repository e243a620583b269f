"""The splits of decode attention made into one, as a Mosaic GPU kernel: `merge.merge_partials` where XLA needs two."""

import math
from functools import partial, reduce

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from nosa_jax.pallas_kernels.decode_attention.plan import FLOOR

WARPGROUP = 128  # threads


@partial(jax.jit, static_argnames=("splits", "dtype", "interpret"))
def merge_splits(
    out: jax.Array,
    lse: jax.Array,
    splits: int,
    dtype: jax.typing.DTypeLike,
    interpret: plgpu.InterpretGPUParams | None,
) -> jax.Array:
    """Merge out [B*K*splits*rows, H] and lse [B*K*splits, rows], float32, over the splits: [B*K*rows*H] in `dtype`.

    A program takes as few query heads as give each of its threads an element. All loads are unrolled, so that they
    are in flight together: the kernel takes little longer than one of them.
    """
    head_dim, (programs, rows) = out.shape[1], lse.shape
    heads = WARPGROUP // math.gcd(head_dim, WARPGROUP)  # of one program, so that each thread has elements
    size = heads * head_dim
    layout = plgpu.Layout.WG_STRIDED((size,), vec_size=math.gcd(size // WARPGROUP, 4))

    def decode_attention_merge(part_ref, lse_ref, out_ref):
        pair, row = lax.axis_index("pair"), lax.axis_index("rows") * heads

        def of_head(values):
            """One scalar per head, at every element of the head."""
            element = plgpu.broadcasted_iota(jnp.int32, (size,), 0, layout=layout)
            result = jnp.broadcast_to(values[0], (size,))
            for i, value in enumerate(values[1:], start=1):
                result = jnp.where(element >= i * head_dim, value, result)
            return result

        lses = [[lse_ref[(pair * splits + s) * rows + row + i] for i in range(heads)] for s in range(splits)]
        parts = [
            plgpu.load(part_ref.at[pl.ds(((pair * splits + s) * rows + row) * head_dim, size)], layout=layout)
            for s in range(splits)
        ]
        tops = [reduce(jnp.maximum, [lses[s][i] for s in range(splits)], jnp.float32(FLOOR)) for i in range(heads)]
        weights = [[jnp.exp(lse - top) for lse, top in zip(split, tops, strict=True)] for split in lses]
        totals = [reduce(jnp.add, [weights[s][i] for s in range(splits)]) for i in range(heads)]
        scales = [1.0 / jnp.where(total == 0, 1.0, total) for total in totals]
        merged = reduce(jnp.add, [part * of_head(weight) for part, weight in zip(parts, weights, strict=True)])
        out_ref[pl.ds((pair * rows + row) * head_dim, size)] = (merged * of_head(scales)).astype(dtype)

    return plgpu.kernel(
        decode_attention_merge,
        out_type=jax.ShapeDtypeStruct((programs // splits * rows * head_dim,), dtype),
        grid=(programs // splits, rows // heads),
        grid_names=("pair", "rows"),
        compiler_params=plgpu.CompilerParams(approx_math=True),
        interpret=interpret,
    )(out.reshape(-1), lse.reshape(-1))
