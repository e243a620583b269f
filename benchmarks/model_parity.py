"""A whole model with the GPU kernels against the same model through XLA: logits, and every selected block.

    python benchmarks/model_parity.py --out benchmarks/results

Layer by layer on equal inputs, the selections of both are compared block by block; where they differ, the scores of the
blocks in question are compared too: a difference is harmless if those are within rounding of each other. Then a prompt
is read and decoded with each implementation, teacher-forced, and the logits are compared. Random weights, with eviction
heads that matter.
"""

import json
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tyro

from nosa_jax import NosaConfig, NosaLM
from nosa_jax.eviction import ranking_scores
from nosa_jax.infer import Engine, FrozenModel, decode_step, freeze
from nosa_jax.infer.environment import environment
from nosa_jax.model import DecoderLayer
from nosa_jax.pallas_kernels import default_implementation, pooled_scores, sparse_attention
from nosa_jax.selection import block_ranking, pooled_keys, select

IMPLEMENTATIONS = ("xla", "mosaic_gpu")


@dataclass(frozen=True)
class Options:
    """Compare implementations on a model."""

    prompt: int = 8_192
    steps: int = 32
    out: Path = Path("benchmarks/results")


def models() -> dict[str, FrozenModel]:
    """A small model and four layers of the 8B width, in bfloat16."""
    configs = {
        "small": NosaConfig.tiny(head_dim=64, dtype="bfloat16", max_context=16_384),
        "4 layers of 8B": NosaConfig.nosa_8b(num_layers=4, param_dtype="bfloat16"),
    }

    def make(config: NosaConfig) -> FrozenModel:
        model = NosaLM.from_config(config)
        for index, layer in enumerate(model.layers):
            scale = jax.random.normal(jax.random.key(index), layer.attention.a_k.shape)
            layer.attention.a_k[...] = scale.astype(layer.attention.a_k.dtype)
        return freeze(model)

    return {name: jax.jit(partial(make, config))() for name, config in configs.items()}


def compare_layers(model: FrozenModel, tokens: jax.Array) -> list[dict[str, Any]]:
    """For every layer, on the inputs that XLA's layers before it computed: differing blocks and their scores' gaps."""
    config = model.config
    positions = jnp.arange(tokens.shape[1])[None]

    @partial(jax.jit, static_argnames="name")
    def run(layer: DecoderLayer, x: jax.Array, name: str) -> tuple[jax.Array, ...]:
        with default_implementation(name):  # type: ignore[arg-type]
            q, k, v, cis = layer.attention.project(layer.attention_norm(x), positions)
            keys = pooled_keys(k, config)
            rank = block_ranking(
                ranking_scores(cis, config.eviction), config, n_blocks=config.num_blocks(tokens.shape[1])
            )
            ids = select(q, keys, rank, positions, config=config, attention="nosa")
            heads = sparse_attention(q, k, v, cis, ids, block_size=config.block_size)
            scores = pooled_scores(
                q, keys, positions, n_blocks=rank.shape[-1], block_size=config.block_size, window=config.pool_window,
                stride=config.pool_stride, implementation="xla",
            )  # fmt: skip
            return ids, heads, scores, layer.finish(x, heads)

    modules = model.module()
    x = modules.embed(tokens)
    found = []
    for index, layer in enumerate(modules.layers):
        ids, heads, scores, after = run(layer, x, "xla")
        other_ids, other_heads, _, _ = run(layer, x, "mosaic_gpu")
        # On equal selections, so that a difference in attention is one of arithmetic.
        same = np.asarray((ids == other_ids).all(axis=(-1, -2)))
        error = np.linalg.norm(np.float32(heads - other_heads)[same]) / np.linalg.norm(np.float32(heads)[same])
        gaps = score_gaps(np.asarray(ids), np.asarray(other_ids), np.asarray(scores))
        found.append(
            {
                "layer": index,
                "blocks": int(np.sum(np.asarray(ids) >= 0)),
                "differing": len(gaps),
                "largest_score_gap": max(gaps, default=0.0),
                "attention_error": float(error),
            }
        )
        print(found[-1], flush=True)
        x = after
    return found


def score_gaps(ids: np.ndarray, other: np.ndarray, scores: np.ndarray) -> list[float]:
    """For every block that only one of them selected, how far its score is from that of the block taken instead.

    Relative to the larger of the two; blocks are paired from the worst score upwards.
    """
    gaps = []
    for place in np.argwhere((ids != other).any(axis=-1)):
        at = tuple(place)
        one, two = set(ids[at].tolist()) - {-1}, set(other[at].tolist()) - {-1}
        left, right = sorted(scores[at][list(one - two)]), sorted(scores[at][list(two - one)])
        for a, b in zip(left, right, strict=False):
            gaps.append(float(abs(a - b) / max(abs(a), abs(b), 1e-30)))
        gaps += [float("inf")] * abs(len(left) - len(right))
    return gaps


def decode(model: FrozenModel, tokens: np.ndarray, prompt: int, name: str) -> np.ndarray:
    """Logits [steps + 1, V] after the prompt and after each further token."""
    with (
        default_implementation(name),  # type: ignore[arg-type]
        Engine(model, max_batch=1, max_context=len(tokens) + 1) as engine,
    ):
        state = engine.prefill([tokens[:prompt]])
        logits = [np.asarray(state.logits[0])]
        for token in tokens[prompt:]:
            step_logits, state = decode_step(model, state, np.asarray([token]))
            logits.append(np.asarray(step_logits[0]))
        engine.check()
    return np.stack(logits)


def main() -> int:
    """Compare, print and write model_parity.json."""
    options = tyro.cli(Options, description=__doc__)
    report: dict[str, Any] = {"environment": environment(), "prompt": options.prompt, "models": {}}
    for name, model in models().items():
        print(name, flush=True)
        rng = np.random.default_rng(0)
        tokens = rng.integers(0, model.config.vocab_size, options.prompt + options.steps).astype(np.int32)
        layers = compare_layers(model, jnp.asarray(tokens[None, : options.prompt]))
        xla, mosaic = (decode(model, tokens, options.prompt, each) for each in IMPLEMENTATIONS)
        errors = np.linalg.norm(xla - mosaic, axis=1) / np.linalg.norm(xla, axis=1)
        result = {
            "layers": layers,
            "prefill_logits_error": float(errors[0]),
            "decode_logits_error": [float(errors[1:].min()), float(np.median(errors[1:])), float(errors[1:].max())],
            "same_greedy_token": float((xla.argmax(-1) == mosaic.argmax(-1)).mean()),
        }
        report["models"][name] = result
        print({key: value for key, value in result.items() if key != "layers"}, flush=True)
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "model_parity.json").write_text(json.dumps(report, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
