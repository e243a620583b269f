"""What the documents tell a reader to run, works."""

import dataclasses
import re
import shlex
from pathlib import Path

import pytest
import tyro

from nosa_jax.export import Orbax, Safetensors
from nosa_jax.infer.__main__ import GenerateConfig
from nosa_jax.train import TrainConfig

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


def test_quickstart_of_the_readme(capsys):
    (code,) = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    exec(compile(code, "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "KV pages" in printed
    rates = [float(rate) for rate in re.findall(r"hit rate ([\d.]+)%, locality >= 0\.\d+", printed)]
    assert len(rates) == 2
    assert all(50 < rate <= 100 for rate in rates)


def test_printed_command_lines_parse():
    found = 0
    for page in PAGES:
        commands = re.findall(
            r"^    (?:\.venv/bin/)?(nosa-train|nosa-generate|nosa-export) (.*)$", page.read_text(), re.M
        )
        for name, rest in commands:
            args = shlex.split(rest, comments=True)
            if name == "nosa-export":
                parsed = tyro.extras.subcommand_cli_from_dict({"orbax": Orbax, "safetensors": Safetensors}, args=args)
            else:
                parsed = tyro.cli({"nosa-train": TrainConfig, "nosa-generate": GenerateConfig}[name], args=args)
            assert dataclasses.is_dataclass(parsed)
            found += 1
    assert found >= 5


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere(page):
    text = page.read_text()
    headings = {p: re.findall(r"^#+ (.*)$", p.read_text(), re.M) for p in PAGES}
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if target.startswith("https://"):
            continue
        path, _, anchor = target.partition("#")
        file = (page.parent / path).resolve() if path else page
        assert file.exists(), target
        if anchor:
            slugs = [re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings[file]]
            assert anchor in slugs, target


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_files_and_make_targets_that_are_named_exist(page):
    text = page.read_text()
    targets = set(re.findall(r"^([a-z-]+)(?: [a-z-]+)*:", (ROOT / "Makefile").read_text(), re.M)) | {"test-all"}
    assert set(re.findall(r"\bmake ([a-z-]+)\b", text)) <= targets
    for path in re.findall(r"`((?:[\w.-]+/)+[\w.-]+\.\w+)`", text):
        assert (ROOT / path).exists(), path
