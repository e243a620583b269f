"""Repositories of the hub: local folders first, and a clear word where there is no network."""

import itertools
import os
import subprocess
import sys

import huggingface_hub
import pytest
from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError

from nosa_jax import NosaLM
from nosa_jax.errors import InputError
from nosa_jax.weights.hub import checkpoint_folder
from tests.oracle.weights import model_with, random_weights
from tests.weights.cases import SMALL, assert_same_bits, write_checkpoint


@pytest.fixture
def hub(monkeypatch):
    """The calls that reach the hub; each gives the answer that is set, or raises it."""

    class Hub:
        answer: object = None
        calls: list = []

        def __call__(self, repo_id, **options):
            self.calls.append((repo_id, options))
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    fake = Hub()
    fake.calls = []
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake)
    return fake


def test_repository_is_fetched_without_code_or_other_formats(hub, tmp_path) -> None:
    weights = random_weights(SMALL, 1)
    hub.answer = str(write_checkpoint(tmp_path / "cache", weights))
    assert_same_bits(NosaLM.from_pretrained("owner/NOSA-1B", revision="v2"), model_with(SMALL, weights))
    ((name, options),) = hub.calls
    assert (name, options["revision"]) == ("owner/NOSA-1B", "v2")
    patterns = options["allow_patterns"]
    assert "*.safetensors" in patterns
    assert options["ignore_patterns"] == ["*/*"]  # the same weights in other forms
    assert not any(p.endswith(ending) or p == "*" for p in patterns for ending in (".py", ".bin", ".pt"))


def test_folder_of_that_name_comes_first(hub, tmp_path, monkeypatch) -> None:
    write_checkpoint(tmp_path / "owner" / "model", random_weights(SMALL, 1))
    monkeypatch.chdir(tmp_path)
    assert checkpoint_folder("owner/model") == tmp_path / "owner" / "model"
    assert NosaLM.from_pretrained("owner/model").config == SMALL
    assert hub.calls == []


@pytest.mark.parametrize(
    "name", ["./model", "/no/model", "model", "a/b/c", "a\0b", "a" * 5000, "~/no-such-model", "owner/mo del"]
)
def test_what_is_no_repository_is_only_looked_for_as_a_folder(hub, name, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"there is no checkpoint folder .*owner/name"):
        checkpoint_folder(name)
    assert hub.calls == []


@pytest.mark.parametrize("name", ["", " "])
def test_empty_name_is_not_the_current_folder(hub, name, tmp_path, monkeypatch) -> None:
    """It is what a shell makes of a variable that is not set."""
    write_checkpoint(tmp_path, random_weights(SMALL, 1))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(InputError, match=r"the model's name is empty\. Give .*owner/name"):
        checkpoint_folder(name)
    assert hub.calls == []


def test_file_in_place_of_a_folder(tmp_path) -> None:
    (tmp_path / "model.safetensors").touch()
    with pytest.raises(InputError, match="is a file"):
        NosaLM.from_pretrained(tmp_path / "model.safetensors")


def _caused(error: Exception, *causes: Exception) -> Exception:
    for above, below in itertools.pairwise((error, *causes)):
        above.__cause__ = below
    return error


_LONG = "Got: ConnectError\nAn error happened while trying to locate the files on the Hub"


class _Response:
    status_code = 404
    headers: dict = {}
    request = None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (LocalEntryNotFoundError("no connection"), ["the hub cannot be reached (no connection). Get"]),
        (
            _caused(LocalEntryNotFoundError(_LONG), ValueError("[Errno -2] unknown"), OSError(-2, "unknown")),
            ["there is no folder 'owner/model', and the hub cannot be reached (unknown). Get"],
        ),
        (
            _caused(LocalEntryNotFoundError(_LONG), OfflineModeIsEnabled("long"), OSError("x")),
            ["cannot be reached (HF_HUB_OFFLINE is set). Get"],
        ),
        (OSError("disk full"), ["could not be fetched: disk full"]),
        (RepositoryNotFoundError("404", response=_Response()), ["neither a folder nor a repository 'owner/model'"]),
    ],
)
def test_what_cannot_be_fetched_names_the_folder_form(hub, error, words) -> None:
    hub.answer = error
    with pytest.raises(InputError) as caught:
        NosaLM.from_pretrained("owner/model")
    for word in (*words, "path of a folder that holds config.json and the safetensors files", "./model"):
        assert word in str(caught.value)


def test_without_a_network_the_real_library_gives_the_same_message(tmp_path) -> None:
    code = "from nosa_jax.weights.hub import checkpoint_folder; checkpoint_folder('owner/model')"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path), "JAX_PLATFORMS": "cpu"},
    )  # fmt: skip
    assert "there is no folder 'owner/model', and the hub cannot be reached (HF_HUB_OFFLINE is set)" in done.stderr
    assert "path of a folder that holds config.json" in done.stderr
