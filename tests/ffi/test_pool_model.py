"""A state machine: pools and handlers against dictionaries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from nosa_jax import ffi
from tests.ffi.oracle import Shape, as_bytes, transfer

SHAPE = Shape(rows=2, heads=2, slots=3, block=2, dim=4, blocks=4, layers=2, dtype="bfloat16")
LIST = 3  # entries per row and KV head

steps = {
    name: jax.jit(
        lambda handle, cache, entries, table, layer, function=function: jax.lax.switch(
            layer,
            [
                lambda cache, i=i: function(handle, cache, entries, table, layer=i, n_layers=SHAPE.layers)
                for i in range(SHAPE.layers)
            ],
            cache,
        )
    )
    for name, function in (("swap_in", ffi.swap_in), ("write_pages", ffi.write_pages))
}

heads = st.tuples(st.integers(0, SHAPE.rows - 1), st.integers(0, SHAPE.heads - 1))
pairs = st.lists(
    st.tuples(st.integers(0, SHAPE.blocks - 1), st.integers(0, SHAPE.slots - 1)),
    max_size=LIST,
    unique_by=(lambda p: p[0], lambda p: p[1]),
)
moves = st.dictionaries(heads, pairs, max_size=4)
layers = st.integers(0, SHAPE.layers - 1)


class Model:
    """A pool and what its pages must hold, by (row, block, layer, KV head)."""

    def __init__(self, seed: int, device: jax.Device) -> None:
        self.pool = ffi.HostPool(SHAPE.n_pages, SHAPE.page_bytes, device=device)
        self.table = np.asarray(SHAPE.page_table(seed))
        self.pages: dict[tuple[int, int, int, int], bytes] = {}
        self.moved = {"swap_in": 0, "write_pages": 0}

    def page(self, key: tuple[int, int, int, int]) -> bytes:
        return self.pages.get(key, bytes(SHAPE.page_bytes))


class PoolMachine(RuleBasedStateMachine):
    """Caches of two layers over any number of pools, in any order of writes, swaps, openings and closings."""

    platform = "cpu"
    pools = Bundle("pools")
    closed = Bundle("closed")

    @initialize()
    def begin(self) -> None:
        if self.platform == "cuda" and not ffi.has_cuda():
            pytest.skip(ffi.status())
        try:
            self.device = jax.devices(self.platform)[0]
        except RuntimeError as error:
            pytest.skip(str(error))
        self.caches = [self.random_cache(layer) for layer in range(SHAPE.layers)]
        self.model = [as_bytes(cache).copy() for cache in self.caches]
        self.open: list[Model] = []

    @rule(target=pools, seed=st.integers(0, 9))
    def open_pool(self, seed: int) -> Model:
        self.open.append(Model(seed, self.device))
        return self.open[-1]

    @rule(target=closed, model=consumes(pools))
    def close_pool(self, model: Model) -> Model:
        model.pool.close()
        self.open.remove(model)
        return model

    @rule(model=pools)
    def renew(self, model: Model) -> None:
        old = model.pool.handle
        model.pool.renew()
        with pytest.raises(RuntimeError, match="renewed"):
            self._run("swap_in", model, 0, {(0, 0): [(0, 0)]}, old)

    @rule(layer=layers, seed=st.integers(0, 2**16))
    def compute(self, layer: int, seed: int) -> None:
        self.caches[layer] = self.random_cache(seed)
        self.model[layer] = as_bytes(self.caches[layer]).copy()

    @rule(model=pools, layer=layers, moves=moves)
    def write(self, model: Model, layer: int, moves: dict) -> None:
        self._run("write_pages", model, layer, moves)
        for (row, head), entries in moves.items():
            for block, slot in entries:
                model.pages[row, block, layer, head] = self.model[layer][row, head, slot].tobytes()

    @rule(model=pools, layer=layers, moves=moves)
    def swap(self, model: Model, layer: int, moves: dict) -> None:
        self._run("swap_in", model, layer, moves)
        for (row, head), entries in moves.items():
            for block, slot in entries:
                page = np.frombuffer(model.page((row, block, layer, head)), np.uint8)
                self.model[layer][row, head, slot] = page.reshape(self.model[layer].shape[3:])

    @rule(model=closed, layer=layers, moves=moves)
    def use_after_close(self, model: Model, layer: int, moves: dict) -> None:
        """The cache comes out as it was; the error is raised by the handler or found by `check`."""
        with pytest.raises(RuntimeError, match="closed"):
            self._run("swap_in", model, layer, moves)

    @rule(model=pools, row=st.integers(0, 1), block=st.integers(0, 3), layer=layers, head=st.integers(0, 1))
    def look(self, model: Model, row: int, block: int, layer: int, head: int) -> None:
        page = (int(model.table[row, block]) * SHAPE.layers + layer) * SHAPE.heads + head
        assert model.pool.read_page(page).tobytes() == model.page((row, block, layer, head))

    @invariant()
    def caches_and_counts_agree(self) -> None:
        if not hasattr(self, "caches"):
            return
        for cache, expected in zip(self.caches, self.model, strict=True):
            assert as_bytes(cache).tobytes() == expected.tobytes()
        for model in self.open:
            stats = model.pool.stats()
            assert (stats.pages_read, stats.pages_written) == (model.moved["swap_in"], model.moved["write_pages"])

    def random_cache(self, seed: int) -> jax.Array:
        return jax.device_put(SHAPE.random_cache(seed), self.device)

    def _run(self, name: str, model: Model, layer: int, moves: dict, handle: np.ndarray | None = None) -> None:
        with jax.default_device(self.device):
            entries = transfer(moves, SHAPE, LIST)
            handle = model.pool.handle if handle is None else handle
            out = steps[name](handle, self.caches[layer], entries, model.table, jnp.int32(layer))
        self.caches[layer] = jax.block_until_ready(out)
        model.pool.check()
        model.moved[name] += sum(len(entries) for entries in moves.values())

    def teardown(self) -> None:
        for model in getattr(self, "open", []):
            model.pool.close()


class CudaPoolMachine(PoolMachine):
    """The same on a GPU."""

    platform = "cuda"


TestPoolMachine = PoolMachine.TestCase
TestCudaPoolMachine = pytest.mark.gpu(CudaPoolMachine.TestCase)
TestPoolMachine.settings = TestCudaPoolMachine.settings = settings(
    max_examples=25, stateful_step_count=25, deadline=None
)
