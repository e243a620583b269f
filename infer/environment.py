"""Where a figure comes from: the part that every file of results has."""

import platform
import subprocess
from pathlib import Path

import jax


def environment() -> dict[str, str]:
    """Device, versions and commit ("unknown" outside a git checkout), for the file of a result."""
    root = Path(__file__).resolve().parent
    command = ["git", "-C", str(root), "describe", "--always", "--abbrev=40", "--dirty", "--exclude=*"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=False)
        commit = found.stdout.strip() if found.returncode == 0 else "unknown"
    except OSError:  # no git
        commit = "unknown"
    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else f"CPU ({platform.machine()})",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": commit,
    }
