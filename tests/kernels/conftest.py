"""Shared by the kernels' tests."""

import pytest

# Interpreting a kernel takes seconds a case. The fast suite runs one case of each kind; these run with the slow tests.
SLOW_CASES = {
    "test_b4_logits_of_any_size[prefill-cpu]",
    "test_parts_of_the_blocks_merge_into_the_whole[xla-cpu]",
    "test_a_block_of_more_visits_than_stages[cpu]",
    "test_a_constant_added_to_all_logits_changes_nothing[-100000.0-cpu]",
    "test_a_constant_added_to_all_logits_changes_nothing[1000.0-cpu]",
    "test_b3_padding_touches_nothing[2147483647-cpu]",
    "test_b3_padding_touches_nothing[3-cpu]",
    "test_b4_constant_shift_of_logits_changes_little[100000.0-cpu]",
    "test_blocks_of_80_keys_take_several_steps[cpu]",
    "test_budgets_with_empty_parts_and_more_than_64_slots[Budget(sink=3, local=2, query=0, evict=4)-cpu]",
    "test_decode_matches_float32[group of 8, head dim 256-cpu]",
    "test_decode_matches_float32[one head, head dim 192-cpu]",
    "test_decode_matches_float32[two queries of a row-cpu]",
    "test_every_length_around_a_block_boundary[cpu]",
    "test_matches_float32[blocks of 16-cpu]",
    "test_matches_float32[blocks of 48-cpu]",
    "test_matches_float32[head dim 192-cpu]",
    "test_matches_float32[head dim 256-cpu]",
    "test_matches_float32[one query head-cpu]",
    "test_more_tiles_than_stages[7-6-cpu]",
    "test_one_nan_key_reaches_every_score_of_its_head_s1[decode-cpu]",
    "test_other_tunings_of_prefill[(1, 1)-cpu]",
    "test_parts_of_the_blocks_merge_into_the_whole[mosaic_gpu-cpu]",
    "test_prefill_matches_float32[8B-cpu]",
    "test_prefill_matches_float32[group of 3-cpu]",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the cases above."""
    for item in items:
        if item.name in SLOW_CASES:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True)
def no_races(capsys):
    """The interpreter of GPU kernels reports a race by printing it, and goes on."""
    yield
    printed = capsys.readouterr().out
    assert "RACE" not in printed, printed
