"""How much host memory is available, read from trees like /proc and /sys/fs/cgroup."""

from pathlib import Path

import psutil
import pytest

from nosa_jax.ffi import _cpu

GIB = 2**30


def available(root: Path, groups: str, files: dict[str, str], meminfo: str = "") -> int:
    """Bytes available where /proc/self/cgroup is `groups` and the control groups' folder holds `files`."""
    files = {f"cgroup/{name}": text for name, text in files.items()}
    files["proc/self/cgroup"] = groups
    files["proc/meminfo"] = "MemTotal:  209715200 kB\nMemFree: 1 kB\n" + (meminfo or "MemAvailable:  104857600 kB\n")
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return _cpu.available_bytes(str(root / "proc"), str(root / "cgroup"))


def test_without_limits_it_is_what_the_kernel_says(tmp_path):
    assert available(tmp_path, "0::/\n", {}) == 100 * GIB


def test_the_least_room_of_all_groups_above_counts(tmp_path):
    """A leaf without a limit in a limited group; the root has no files. Cache that can be dropped counts as room."""
    files = {
        "api/memory.max": f"{64 * GIB}\n",
        "api/memory.current": f"{5 * GIB}\n",
        "api/memory.stat": f"anon {GIB}\nfile 7\ninactive_file_other 9\ninactive_file {2 * GIB}\n",
        "api/leaf/memory.max": "max\n",
        "api/leaf/memory.current": f"{3 * GIB}\n",
    }
    assert available(tmp_path, "0::/api/leaf\n", files) == (64 - 5 + 2) * GIB


@pytest.mark.parametrize("limit", ["max\n", "", "\n", "0\n", "12x\n", "-1\n", f"{2**64}\n", "0x40\n"])
def test_what_is_no_number_is_no_limit(tmp_path, limit):
    assert available(tmp_path, "0::/a\n", {"a/memory.max": limit, "a/memory.current": "4096\n"}) == 100 * GIB


def test_a_limit_that_is_used_up_leaves_nothing(tmp_path):
    assert available(tmp_path, "0::/a\n", {"a/memory.max": "4096\n", "a/memory.current": "8192\n"}) == 0


def test_a_limit_without_usage_is_not_guessed_at(tmp_path):
    assert available(tmp_path, "0::/a\n", {"a/memory.max": "4096\n"}) == 100 * GIB


def test_a_group_outside_of_the_namespace_falls_back_to_its_root(tmp_path):
    files = {"memory.max": f"{8 * GIB}\n", "memory.current": f"{GIB}\n"}
    assert available(tmp_path, "0::/../../b\n", files) == 7 * GIB


def test_version_1_hierarchies(tmp_path):
    files = {
        "memory/job/memory.limit_in_bytes": f"{32 * GIB}\n",
        "memory/job/memory.usage_in_bytes": f"{3 * GIB}\n",
        "memory/job/memory.stat": f"inactive_file 5\ntotal_inactive_file {GIB}\n",
    }
    groups = "9:cpu,cpuacct:/job\n4:hugetlb,memory:/job\n\nnonsense\n0::/job\n"
    assert available(tmp_path, groups, files) == 30 * GIB


def test_the_field_must_match_whole(tmp_path):
    meminfo = f"MemAvailableToo: 7 kB\nMemAvailable:\t{3 * 2**20} kB\n"
    assert available(tmp_path, "0::/\n", {}, meminfo) == 3 * GIB


def test_here_it_is_more_than_nothing_and_at_most_the_machine():
    assert 0 < _cpu.available_bytes() <= psutil.virtual_memory().total
