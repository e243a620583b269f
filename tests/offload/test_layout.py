"""The bytes of a cache: planned, as documented, and as allocated."""

import jax
import jax.numpy as jnp
import pytest

from nosa_jax.config import NosaConfig
from nosa_jax.offload import CacheLayout, init_state
from tests.infer.cases import SMALL, C, cache_leaves

LAYOUTS = {
    "offloaded": CacheLayout(SMALL, "nosa", 3, 233, True, C + 3),
    "resident": CacheLayout(SMALL, "nosa", 3, 233, False, C),
    "dense": CacheLayout(SMALL, "dense", 1, 50, False, C),
    "bfloat16": CacheLayout(SMALL.replace(dtype="bfloat16", num_layers=1), "dma", 2, 61, True, C),
}


def abstract_bytes(layout: CacheLayout) -> int:
    """Bytes of the state of a layout; nothing is allocated."""
    leaves = jax.eval_shape(lambda: jax.tree.leaves(init_state(layout)))
    return sum(x.size * x.dtype.itemsize for x in leaves)


@pytest.mark.parametrize("name", LAYOUTS)
def test_planned_bytes_are_the_bytes_of_the_state(name):
    layout = LAYOUTS[name]
    assert cache_leaves(init_state(layout)) == layout.device_bytes() == sum(i.nbytes for i in layout.device_items())
    assert abstract_bytes(layout) == layout.device_bytes()


@pytest.mark.parametrize("offload", [True, False])
@pytest.mark.parametrize("config", [NosaConfig.nosa_1b(), NosaConfig.nosa_8b(), NosaConfig.tiny(max_context=2**17)],
                         ids=["1b", "8b", "tiny"])  # fmt: skip
def test_o7_bytes_per_token_are_the_documented_ones(config, offload):
    """O7: from 32K to 64K to 128K tokens, per row; offloaded they are far below the KV bytes of a token."""
    rows = 2
    sizes = {
        n: abstract_bytes(CacheLayout(config, "nosa", rows, n, offload, 2 * config.budget.total))
        for n in (2**15, 2**16, 2**17)
    }
    layout = CacheLayout(config, "nosa", rows, 2**15, offload, 2 * config.budget.total)
    kv_per_token = 2 * config.num_layers * config.num_kv_heads * config.head_dim * jnp.dtype(config.dtype).itemsize
    for short, long in ((2**15, 2**16), (2**16, 2**17)):
        slope = (sizes[long] - sizes[short]) / rows / (long - short)
        assert layout.bytes_per_token() - 1 < slope <= layout.bytes_per_token()
        if offload:
            assert slope < kv_per_token / (20 if config.head_dim == 128 else 4)
        else:
            assert slope > kv_per_token


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(max_batch=0), "max_batch=0 must be at least 1"),
        (dict(max_context=0), "max_context=0 must lie in 1 .. 131072"),
        (dict(max_context=131_073), "max_context=131073 must lie in"),
        (
            dict(offload=False, overlap=True),
            "overlap=True hides the fetching of blocks; with offload=False there is none",
        ),
        (dict(slots=C - 1), f"slots={C - 1} cannot hold the {C} blocks"),
        (dict(attention="dense"), "attention='dense' reads every block.*offload=False"),
    ],
    ids=str,
)
def test_sizes_that_do_not_fit_together(change, message):
    with pytest.raises(ValueError, match=message):
        CacheLayout(
            **(dict(config=SMALL, attention="nosa", max_batch=1, max_context=64, offload=True, slots=C) | change)
        )


@pytest.mark.parametrize(("attention", "reads"), [("nosa", True), ("infllmv2", True), ("dma", False), ("dense", False)])
def test_which_systems_read_pooled_keys(attention, reads):
    """Those that select by the query; for the others, no step's floor counts them."""
    assert CacheLayout(SMALL, attention, 1, 64, False, C).reads_pooled_keys is reads
