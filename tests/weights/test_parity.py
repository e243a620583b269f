"""A checkpoint of the authors' weights, read by the loader, computes what the authors' code computed with it.

Tolerances are relative errors over all sampled rows. The authors computed in bfloat16, so float32 differs from them by
their rounding, and bfloat16 by that of both. Selections are compared as sets; where they differ, the scores do so by
less than bfloat16 keeps.

Two things in the authors' decoding differ from their own prefill: how many windows a query sees, by one token, and the
scaling of the bias in their fast kernel. Training and prefill agree with each other, so decoding here follows them: it
is compared with the authors' *prefill* at the same positions, which must be met as closely as by a forward pass.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from nosa_jax import NosaConfig, NosaLM
from nosa_jax.attention import sequence_attention
from nosa_jax.infer import Engine, decode_step
from nosa_jax.pallas_kernels import pooled_scores
from nosa_jax.selection import block_ranking, pooled_keys
from tests.oracle import golden
from tests.oracle.golden import relative_error
from tests.oracle.weights import checkpoint_shapes
from tests.weights.cases import write_checkpoint

SHAPE = dict(
    hidden_size=512, intermediate_size=1024, num_attention_heads=32, num_key_value_heads=2, head_dim=128,
    vocab_size=512, max_position_embeddings=32_768, torch_dtype="bfloat16", sparse_config=...,
)  # fmt: skip
CASES = {
    "L100": ("prefill_L100_L1024", "L100/"),
    "L1024": ("prefill_L100_L1024", "L1024/"),
    "L4133": ("prefill_L4133", ""),
}
# Largest relative error in layer 0 and in layer 1, which inherits what layer 0 rounds; "ids": the part of the selected
# blocks that differs.
LIMITS = {
    "float32": {
        "cis": (0.004, 0.007), "q": (0.005, 0.009), "pooled_k": (0.004, 0.006), "stage1": (0.003, 0.0045),
        "pooled_q": (0.006, 0.010), "pooled_cis": (0.004, 0.004), "attention": (0.011, 0.019), "hidden": (0.008, 0.012),
        "ids": (0.0, 0.0), "logits": 0.012, "decoded logits": 0.016,
    },
    "bfloat16": {
        "cis": (0.004, 0.0095), "q": (0.006, 0.0105), "pooled_k": (0.005, 0.007), "stage1": (0.0035, 0.0055),
        "pooled_q": (0.0075, 0.012), "pooled_cis": (0.004, 0.004), "attention": (0.013, 0.023),
        "hidden": (0.0095, 0.015), "ids": (0.0003, 0.0003), "logits": 0.015, "decoded logits": 0.018,
    },
}  # fmt: skip


class Layer(NamedTuple):
    """What one layer computes for a prompt."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    cis: jax.Array
    heads: jax.Array
    ids: jax.Array
    hidden: jax.Array


@pytest.fixture(scope="module")
def folder(request, tmp_path_factory):
    """The authors' weights as they would publish them: bfloat16, two files, a config without `sparse_config`."""
    path = request.config.getoption("--golden")
    if path is None:
        pytest.skip("needs --golden FOLDER with the authors' weights")
    weights = {}
    for i in (0, 1):
        weights |= golden.read(path / f"weights_l{i}.npz")
    return write_checkpoint(tmp_path_factory.mktemp("authors") / "model", weights, files=2, dtype="bfloat16", **SHAPE)


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def model(request, folder) -> NosaLM:
    """The loaded model; as stored, or converted."""
    loaded = NosaLM.from_pretrained(folder, dtype=request.param)
    assert loaded.config.budget.total == 64
    return loaded


@nnx.jit
def trace(model: NosaLM, tokens: jax.Array) -> tuple[list[Layer], jax.Array]:
    x, layers = model.embed(tokens), []
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1], dtype=jnp.int32), tokens.shape)
    for layer in model.layers:
        q, k, v, cis = layer.attention.project(layer.attention_norm(x), positions)
        heads, ids = sequence_attention(q, k, v, cis, config=model.config, attention="nosa")
        x = layer.finish(x, heads)
        layers.append(Layer(q, k, v, cis, heads, ids, x))
    normed = model.final_norm(x)
    layers[-1] = layers[-1]._replace(hidden=normed)  # the authors' last hidden state is the normed one
    return layers, model.unembed(normed)


def stage1(q: jax.Array, pooled_k: jax.Array, rows: np.ndarray) -> np.ndarray:
    """Softmax over the visible windows, summed over the query heads of a KV head: [K, rows, W]."""
    out = np.zeros((2, len(rows), pooled_k.shape[2]))
    for head in (0, 1):
        logits = np.asarray(q, np.float64)[0, rows, 16 * head :][:, :16] @ np.asarray(pooled_k[0, head], np.float64).T
        last = 16 * np.arange(pooled_k.shape[2]) + 31
        logits = np.where(last <= rows[:, None, None], logits / np.sqrt(128), -np.inf)
        some = rows >= 31
        weights = np.exp(logits[some] - logits[some].max(-1, keepdims=True))
        out[head, some] = (weights / weights.sum(-1, keepdims=True)).sum(1)
    return out


def as_sets(ids: np.ndarray, n_blocks: int) -> np.ndarray:
    return (np.asarray(ids)[..., None] == np.arange(n_blocks)).any(-2)


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_prefill_matches_the_authors(model, golden_folder, name) -> None:
    """Stage-1 scores, block scores, ids, attention outputs, hidden states and logits of both layers."""
    file, prefix = CASES[name]
    data = golden.read(golden_folder / f"{file}.npz")
    data = {k.removeprefix(prefix): v for k, v in data.items() if k.startswith(prefix)}
    tokens = jnp.asarray(data["input_ids"][None], jnp.int32)
    layers, logits = trace(model, tokens)
    config, limits = model.config, LIMITS[model.config.dtype]
    n_blocks = config.num_blocks(tokens.shape[1])
    rows, score_rows = data["logits_positions"], data["sample_positions"]
    for i, layer in enumerate(layers):
        theirs = {k.removeprefix(f"l{i}."): v for k, v in data.items() if k.startswith(f"l{i}.")}
        errors = {
            "cis": relative_error(layer.cis[0], theirs["cis_bf16"]),
            "q": relative_error(layer.q[0, rows], theirs["q_rope_bf16"]),
            "pooled_k": relative_error(pooled_keys(layer.k, config)[0].swapaxes(0, 1), theirs["compressed_k_bf16"]),
            "attention": relative_error(layer.heads[0, rows], theirs["attn_out_bf16"]),
            "hidden": relative_error(layer.hidden[0, rows], data[f"hidden{i + 1}_bf16"]),
        }
        scores = stage1(layer.q, pooled_keys(layer.k, config), score_rows)
        errors["stage1"] = relative_error(scores, np.nan_to_num(theirs["stage1_score_bf16"], neginf=0))
        block_q = pooled_scores(
            layer.q[:, score_rows], pooled_keys(layer.k, config), jnp.asarray(score_rows[None], jnp.int32),
            n_blocks=n_blocks, block_size=64, window=32, stride=16,
        )[0].swapaxes(0, 1)  # fmt: skip
        block_cis = block_ranking(layer.cis, config, n_blocks=n_blocks)[0]
        for key, ours in (("pooled_q", block_q), ("pooled_cis", jnp.broadcast_to(block_cis[:, None], block_q.shape))):
            wanted = theirs[f"{key}_bf16"]
            # Forced blocks hold +inf, blocks to come -inf; a future block's cis is not masked in the file.
            past = np.isfinite(wanted) & (np.arange(n_blocks) < score_rows[:, None] // 64)
            if past.any():
                errors[key] = relative_error(np.asarray(ours)[past], wanted[past])
        ours, wanted = as_sets(layer.ids[0], n_blocks), as_sets(theirs["topk_idx_all"].swapaxes(0, 1), n_blocks)
        assert ours.sum() == wanted.sum()
        errors["ids"] = (ours & ~wanted).sum() / ours.sum()
        for key, error in errors.items():
            assert error <= limits[key][i], f"{key} of layer {i}: {error}"
    assert relative_error(logits[0, rows], data["logits_f32"]) < limits["logits"]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "start"), [("L1024", 1001), ("L4133", 4085)])
def test_decoding_on_matches_the_authors_prefill(model, golden_folder, name, start) -> None:
    """Step after step from the middle of a prompt, with swaps: ids at every position, logits where they were kept."""
    file, prefix = CASES[name]
    data = golden.read(golden_folder / f"{file}.npz")
    tokens = data[prefix + "input_ids"].astype(np.int32)
    rows = data[prefix + "logits_positions"]
    n_blocks = model.config.num_blocks(len(tokens))
    differing = selected = 0
    errors = []
    with Engine(model, max_batch=1, max_context=len(tokens) + 1, slots=64) as engine:
        state = engine.prefill([tokens[:start]])
        for position in range(start, len(tokens)):
            logits, state = decode_step(engine.model, state, jnp.asarray(tokens[position : position + 1]))
            for i, layer in enumerate(state.layers):
                ours = as_sets(layer.selected[0], n_blocks)
                wanted = as_sets(data[f"{prefix}l{i}.topk_idx_all"][:, position], n_blocks)
                differing, selected = differing + (ours & ~wanted).sum(), selected + ours.sum()
            if position in rows:
                errors.append(relative_error(logits[0], data[prefix + "logits_f32"][list(rows).index(position)]))
    limits = LIMITS[model.config.dtype]
    assert len(errors) >= 2
    assert max(errors) < limits["decoded logits"]
    assert differing <= limits["ids"][1] * selected


@pytest.mark.slow
def test_decoding_after_a_long_prompt_stays_close_to_the_authors_decoding(model, golden_folder) -> None:
    """Eight steps after 8197 tokens. The authors' decode may see a window more or less than their prefill does.

    Ours sees those of prefill, so at a step up to 2 of the 128 blocks of a layer may differ, and then the logits
    do; where the same blocks are selected in both layers, logits agree as closely as in prefill.
    """
    data = golden.read(golden_folder / "decode_L8197.npz")
    tokens = data["input_ids"].astype(np.int32)
    alike = 0
    with Engine(model, max_batch=1, max_context=len(tokens) + 9, slots=64) as engine:
        state = engine.prefill([tokens])
        for step, token in enumerate(data["decode_input_tokens"]):
            logits, state = decode_step(engine.model, state, jnp.asarray([token], jnp.int32))
            error, differing = relative_error(logits[0], data[f"dec{step}.logits_f32"]), 0
            for i, layer in enumerate(state.layers):
                ours = as_sets(layer.selected[0], 129)
                wanted = as_sets(data[f"dec{step}.l{i}.topk_idx_all"][:, 0], 129)
                assert (ours & ~wanted).sum() <= 2
                differing += (ours & ~wanted).sum()
            alike += differing == 0
            assert error < (LIMITS[model.config.dtype]["decoded logits"] if differing == 0 else 0.15)
    assert alike >= 3


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["L100", "L1024", "L4133"])
def test_loaded_layer_matches_the_kept_vectors(tmp_path, name, dtype) -> None:
    """The tensors that the repository keeps, in a checkpoint whose others are zero: cis and pooled keys of layer 0."""
    kept = golden.kept()
    shape = NosaConfig(
        vocab_size=512, embed_dim=512, ffn_dim=8, num_layers=1, num_heads=32, num_kv_heads=2, dtype="float32"
    )
    weights = {n: np.zeros(s) for n, s in checkpoint_shapes(shape).items()}
    weights |= {n: kept[n] for n in weights if n in kept}
    changes = SHAPE | {"intermediate_size": 8, "num_hidden_layers": 1}
    model = NosaLM.from_pretrained(write_checkpoint(tmp_path, weights, dtype="bfloat16", **changes), dtype=dtype)
    tokens = jnp.asarray(kept[f"{name}.input_ids"][None].astype(np.int32))

    @nnx.jit
    def project(model: NosaLM, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        layer = model.layers[0]
        positions = jnp.arange(tokens.shape[1], dtype=jnp.int32)[None]
        _, k, _, cis = layer.attention.project(layer.attention_norm(model.embed(tokens)), positions)
        return cis, pooled_keys(k, model.config)

    cis, pooled_k = project(model, tokens)
    every = 1 if tokens.shape[1] < 2000 else 8
    limits = LIMITS[dtype]
    assert model.config.dtype == dtype
    assert relative_error(cis[0, ::every], kept[f"{name}.cis_bf16"]) < limits["cis"][0]
    assert (
        relative_error(pooled_k[0].swapaxes(0, 1)[::every], kept[f"{name}.compressed_k_bf16"]) < limits["pooled_k"][0]
    )
