"""Which folder may import which (docs/01), read from the sources without running them."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAY_IMPORT = {
    "pallas_kernels": set(),
    "ffi": set(),
    "nosa_jax": {"pallas_kernels"},
    "offload": {"ffi", "nosa_jax", "pallas_kernels"},
    "infer": {"ffi", "nosa_jax", "offload", "pallas_kernels"},
    "train": {"nosa_jax", "pallas_kernels"},
}


def imported_modules(path: Path) -> Iterator[str]:
    """Every module that a file may import, in functions too; of `from a import b` both a and a.b."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{'.' * node.level}{node.module or ''}.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("folder", MAY_IMPORT)
def test_folder_imports_only_what_lies_below_it(folder):
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    for path in files:
        for module in imported_modules(path):
            assert not module.startswith("."), f"{path}: write {module} in full"
            package, _, rest = module.partition(".")
            if package == "nosa_jax":
                first = rest.split(".")[0]
                room = first if first in MAY_IMPORT and first != "nosa_jax" else "nosa_jax"
                assert room in MAY_IMPORT[folder] | {folder}, f"{path} imports {module}"


def test_nothing_imports_private_parts_of_jax():
    folders = [*MAY_IMPORT, "scripts", "benchmarks", "tests", "notebooks"]
    for path in (p for folder in folders for p in sorted((ROOT / folder).rglob("*.py"))):
        private = [m for m in imported_modules(path) if m == "jax._src" or m.startswith("jax._src.")]
        assert not private, f"{path} imports {private}"
