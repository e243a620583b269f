"""How commands begin."""

import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points

import pytest

COMMANDS = {
    "nosa-train": "nosa_jax.train.__main__",
    "nosa-generate": "nosa_jax.infer.__main__",
    "nosa-export": "nosa_jax.export",
    "nosa-bench": "nosa_jax.infer.bench",
}


@pytest.mark.parametrize("name", COMMANDS)
def test_a_command_runs_its_program_and_leaves_interrupts_as_they_were(name, monkeypatch):
    (entry,) = entry_points(group="console_scripts", name=name)
    assert entry.module == "nosa_jax.commands"
    before = signal.getsignal(signal.SIGINT)
    monkeypatch.setattr(f"{COMMANDS[name]}.main", lambda: 17)
    assert entry.load()() == 17
    assert signal.getsignal(signal.SIGINT) is before


SLOW_START = """
import sys, time
from nosa_jax import commands
class Slow:
    def find_spec(self, name, *_):
        if name == "very_slow":
            print("importing", flush=True)
            time.sleep(60)
sys.meta_path.insert(0, Slow())
commands._run("very_slow")
"""


def test_ctrl_c_while_a_command_is_imported_ends_it_without_a_word():
    child = subprocess.Popen([sys.executable, "-c", SLOW_START], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert child.stdout.readline() == b"importing\n"
    start = time.monotonic()
    child.send_signal(signal.SIGINT)
    _, said = child.communicate(timeout=30)
    assert (child.returncode, said) == (-signal.SIGINT, b"")
    assert time.monotonic() - start < 10


def test_importing_the_package_imports_nothing_large():
    code = "import sys, nosa_jax; print(sorted({'jax', 'flax', 'numpy'} & set(sys.modules)))"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"
