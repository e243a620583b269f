"""Rows to measure as text, and the targets that measured rows show."""

from typing import get_args

import pytest

from nosa_jax import NosaConfig
from nosa_jax.config import AttentionKind
from nosa_jax.errors import InputError
from nosa_jax.infer.bench_cases import Case, largest_batch, target_cases, targets
from nosa_jax.infer.systems import SYSTEMS
from nosa_jax.infer.throughput import Measurement, Timing, beside_weights


def test_a_row_is_read_with_its_options():
    assert Case.parse("nosa:1K:2,overlap=on").overlap
    assert Case.parse("nosa:1K:2,overlap=off").overlap is False
    case = Case.parse("dense:96K:max,budget=24GiB,steps=4,locality=weights")
    assert (case.system, case.context, case.rows) == (SYSTEMS["dense"], 98_304, 0)
    assert (case.budget, case.steps_per_dispatch, case.locality) == ("24GiB", 4, "weights")
    assert str(case) == "dense, 98304 tokens, as many rows as fit, 24GiB"
    assert Case.parse("nosa:1000:7").context == 1000
    assert Case.parse("nosa:1M:7").context == 1024 * 1024


@pytest.mark.parametrize("attention", [kind for kind in get_args(AttentionKind) if kind != "dense"])
def test_every_policy_that_selects_has_a_system_of_c_and_2c_slots_and_a_resident_one(attention):
    """Layouts differ in that alone; a budget's C is the same for all policies."""
    config = NosaConfig.tiny()
    total = config.budget_for(attention).total
    for name, slots in ((f"{attention}-c", total), (attention, 2 * total), (f"{attention}-resident", 64)):
        layout = Case.parse(f"{name}:1K:2").layout(config)
        assert (layout.attention, layout.offload) == (attention, not name.endswith("resident"))
        assert (layout.n_selected, layout.n_slots, layout.n_blocks) == (total, slots, 64)
    assert {system.attention for system in SYSTEMS.values()} == set(get_args(AttentionKind))


def test_a_budget_decides_how_many_rows_fit():
    config = NosaConfig.tiny()
    system, budget = SYSTEMS["nosa"], 40 * 2**20
    rows = largest_batch(system, config, 4096, budget, most=4096)
    assert beside_weights(system.layout(config, rows, 4096)) <= budget
    assert beside_weights(system.layout(config, rows + 1, 4096)) > budget
    assert rows > largest_batch(SYSTEMS["dense"], config, 4096, budget, most=4096)
    assert Case(system, 4096, 0, "40MiB").fit(config, 4096) == Case(system, 4096, rows, "40MiB")
    assert Case(system, 4096, rows + 1, "40MiB").fit(config, 4096) is None
    assert Case(system, 4096, 0, "1KiB").fit(config, 4096) is None


def test_the_targets_rows_fit_an_8b_model_and_its_positions():
    """Every row of the suite has at least one row of requests, and contexts within what the model was made for."""
    config = NosaConfig.nosa_8b()
    for case in target_cases():
        fitted = case.fit(config, 4096)
        assert fitted is not None
        assert fitted.rows >= 1
        assert Timing(steps_per_dispatch=fitted.steps_per_dispatch or 8).total_steps < fitted.context
        layout = fitted.layout(config)
        assert layout.device_bytes() < 100 * 2**30


def test_steps_are_counted_for_every_dispatch():
    for n in (1, 3, 8, 64):
        timing = Timing(steps=32, rounds=5, steps_per_dispatch=n)
        assert timing.total_steps == n * (timing.warm_up_dispatches + 5 * timing.dispatches + 5)
        assert timing.warm_up_dispatches * n >= 64


@pytest.mark.parametrize("wrong", ["nosa:64K:1", "nosa:1K:1,locality=inf", "nosa:1K:1,locality=0"])
def test_rows_that_cannot_be_measured_are_refused(wrong):
    """A context beyond the config's, misses that are no number."""
    with pytest.raises(InputError, match=r"max_context=65536|locality="):
        Case.parse(wrong).layout(NosaConfig.tiny())


def row(system: str, context: int, batch: int, step_ms: float, **changes) -> Measurement:
    values = dict(
        system=system, context=context, batch=batch, slots=128, device_budget=None, steps_per_dispatch=8, overlap=False,
        step_seconds=step_ms / 1e3, round_seconds=(), host_seconds=0.0, misses=0.0, fetched_bytes=0.0, read_bytes=0.0,
        floor_seconds=4e-3, locality="a trace", planned_bytes={}, program_bytes=0, allocator=None, shared_pages=1.0,
        trace_seconds=0.0, compile_seconds=0.0, fill_seconds=0.0,
    )  # fmt: skip
    return Measurement(**(values | changes))


def test_targets_compare_rows_that_differ_in_one_thing():
    """Each at its best batch for the first; the fastest of several dispatch lengths; nothing without its rows."""
    budget = dict(device_budget="24GiB")
    rows = [
        row("dense", 98_304, 7, 10, **budget), row("dense", 98_304, 4, 10, **budget),
        row("nosa", 98_304, 60, 12, **budget),
        row("nosa-c", 16_384, 16, 6), row("infllmv2-c", 16_384, 16, 9, locality="one"),
        row("infllmv2-c", 16_384, 16, 12, locality="two"),
        row("nosa", 65_536, 16, 5.2), row("nosa", 65_536, 16, 6, steps_per_dispatch=1), row("nosa-c", 65_536, 16, 9),
        row("nosa-c", 65_536, 16, 4, overlap=True),
        row("nosa", 65_536, 64, 8), row("nosa", 32_768, 16, 5), row("nosa-resident", 32_768, 16, 4.5),
    ]  # fmt: skip
    found = {target.name: (target.value, target.reached) for target in targets(rows)}
    assert found == {
        "tokens/s of NOSA over dense, 96K, 24GiB": (pytest.approx(60 / 12 / (7 / 10)), True),
        "tokens/s of NOSA over InfLLMv2 (one), C slots, 16K, 16 rows": (pytest.approx(1.5), True),
        "tokens/s of NOSA over InfLLMv2 (two), C slots, 16K, 16 rows": (pytest.approx(2.0), True),
        "tokens/s of NOSA over its authors' setting, 64K, 16 rows": (pytest.approx(9 / 5.2), True),
        "step over its floor, 64K, 16 rows": (pytest.approx(1.3), True),
        "step over its floor, 64K, 64 rows": (pytest.approx(2.0), False),
        "time lost to offloading, 32K, 16 rows": (pytest.approx(5 / 4.5 - 1), True),
    }
    assert targets([]) == []
    assert targets([row("nosa", 16_384, 16, 3)]) == []
    assert str(targets([row("nosa", 65_536, 32, 8)])[0]).endswith("2.00 (target <= 1.35, missed)")
