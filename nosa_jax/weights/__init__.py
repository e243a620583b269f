"""Released checkpoints in and out: `config.json`, safetensors files, and the names that both use (docs/08)."""

from nosa_jax.weights.source import ModelSource, find_model
from nosa_jax.weights.writer import save_pretrained

__all__ = ["ModelSource", "find_model", "save_pretrained"]
