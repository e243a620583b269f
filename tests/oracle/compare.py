"""How JAX results are compared with the oracle's."""

import numpy as np

IMPLEMENTATIONS = ("reference", "xla")


def assert_close(actual, expected, tolerance: float) -> None:
    """Same shape, same infinities and NaNs, and all else within `tolerance` of the largest expected magnitude."""
    actual, expected = np.asarray(actual, np.float64), np.asarray(expected, np.float64)
    assert actual.shape == expected.shape
    special = ~np.isfinite(expected)
    np.testing.assert_array_equal(actual[special], expected[special])
    if (~special).any():
        error = np.abs(actual[~special] - expected[~special]).max()
        scale = max(1.0, np.abs(expected[~special]).max())
        assert error <= tolerance * scale, f"largest error {error:.3g} at magnitude {scale:.3g}, allowed {tolerance:g}"
