"""Choices that the device at hand decides."""

import jax
import pytest

from nosa_jax import NosaConfig
from nosa_jax.infer.compiling import MANY_ROWS, OVERLAPPED_PAIRS, overlap_pays, step_options
from nosa_jax.infer.plan import make_plan


def test_on_the_cpu_xla_keeps_its_defaults_and_nothing_overlaps():
    assert step_options(4 * MANY_ROWS) is None
    assert not overlap_pays(4 * OVERLAPPED_PAIRS)


@pytest.mark.parametrize(("rows", "many"), [(MANY_ROWS - 1, False), (MANY_ROWS, True)])
def test_on_a_gpu_kernels_run_side_by_side_and_many_rows_leave_products_to_cublas(monkeypatch, rows, many):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    scheduling = "xla_gpu_command_buffer_scheduling_mode"
    options = step_options(rows)
    assert options[scheduling] == "CONCURRENT"
    assert options.get("xla_gpu_enable_triton_gemm", True) is not many
    assert step_options(rows, replayed=True) == options | {scheduling: "SERIALIZE"}


def test_xla_knows_the_options(monkeypatch):
    """A later XLA that does not would fail on GPUs alone."""
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    options = [step_options(rows, replayed=replayed) for rows in (1, MANY_ROWS) for replayed in (False, True)]
    for each in options:
        assert jax.jit(lambda x: x + 1, compiler_options=each)(1) == 2
    with pytest.raises(jax.errors.JaxRuntimeError, match="NOT_AN_OPTION"):
        jax.jit(lambda x: x - 1, compiler_options={"xla_gpu_command_buffer_scheduling_mode": "NOT_AN_OPTION"})(1)


@pytest.mark.parametrize("built", [True, False])
def test_on_a_gpu_many_pairs_overlap_if_the_cuda_library_is_built(monkeypatch, built):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr("nosa_jax.infer.compiling.has_cuda", lambda: built)
    assert overlap_pays(OVERLAPPED_PAIRS) == built
    assert not overlap_pays(OVERLAPPED_PAIRS - 1)


@pytest.mark.parametrize(("given", "rows", "offload", "overlap"), [
    (None, OVERLAPPED_PAIRS // 2, True, True),
    (None, OVERLAPPED_PAIRS // 2 - 1, True, False),
    (None, OVERLAPPED_PAIRS, False, False),
    (False, OVERLAPPED_PAIRS, True, False),
    (True, 1, True, True),
])  # fmt: skip
def test_a_plan_overlaps_where_it_pays_unless_told(monkeypatch, given, rows, offload, overlap):
    """By pairs of a row and a KV head, of which the config has two a row."""
    monkeypatch.setattr("nosa_jax.infer.plan.overlap_pays", lambda pairs: pairs >= OVERLAPPED_PAIRS)
    config = NosaConfig.tiny()
    assert config.num_kv_heads == 2
    plan = make_plan(
        config, weight_bytes=0, attention="nosa", max_batch=rows, max_context=1024, offload=offload, overlap=given
    )
    assert plan.layout.overlap == overlap
