"""Where a figure comes from: the part that every result file has."""

import platform
import subprocess
from pathlib import Path

import jax


def environment() -> dict[str, str]:
    """Device, versions and commit ("unknown" outside a git checkout)."""
    root = Path(__file__).parent
    found = subprocess.run(["git", "-C", root, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    device = jax.devices()[0]
    return {
        "device": device.device_kind if device.platform != "cpu" else f"CPU ({platform.machine()})",
        "jax": jax.__version__,
        "python": platform.python_version(),
        "commit": found.stdout.strip() if found.returncode == 0 else "unknown",
    }
