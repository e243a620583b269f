# ---
# jupyter:
#   jupytext:
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Decoding by hand
#
# `Engine.generate` hides a small loop: read the prompts into a state, then give that state to `decode_step` again and
# again. Here the loop is written out, and the counters of every step are kept, to see what the two memories do.
#
# Open it with `jupytext --to ipynb notebooks/decode_by_hand.py`, or run it as a script. Where `make demo` has left its
# trained model in `demo_output/model`, that is used; otherwise random weights, for which every guarantee holds too.

# %%
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from nosa_jax import NosaConfig, NosaLM
from nosa_jax.checkpoint import load_model, split_model
from nosa_jax.infer import Engine, decode_step, freeze
from nosa_jax.tokenizer import ByteTokenizer

PROMPT_TOKENS, STEPS = 1024, 128

trained = next((p for p in (Path("demo_output/model"), Path("../demo_output/model")) if p.is_dir()), None)
if trained:
    model, tokenizer, _ = load_model(trained)
else:
    tokenizer = ByteTokenizer()
    skeleton, params = split_model(NosaLM.from_config(NosaConfig.tiny(), seed=0))
    for name in params:  # a fresh model has A = 0, so that no block ranks before another; give the heads opinions
        if name.endswith("a_k"):
            params[name] = jnp.array([2.0, -1.0])
    model = skeleton.merge(params)
config, budget = model.config, model.config.budget
frozen = freeze(model)  # split from its modules once, instead of in every step
print("trained weights" if trained else "random weights", "-", config.num_layers, "layers,", budget)

# %% [markdown]
# ## Where every byte goes
#
# An engine plans before it allocates. With offloading the device holds `slots` blocks for each row and KV head; all
# full blocks live on pages of host memory. A step selects C blocks, so C slots are the fewest that work.


# %%
def make_engine(**options) -> Engine:
    return Engine(frozen, max_batch=1, max_context=PROMPT_TOKENS + STEPS, tokenizer=tokenizer, **options)


engines = {
    "all on the device": make_engine(offload=False),
    f"{budget.total} slots": make_engine(slots=budget.total),
    f"{2 * budget.total} slots": make_engine(slots=2 * budget.total),
}
print(engines[f"{budget.total} slots"].plan)

# %% [markdown]
# ## The loop
#
# `prefill` returns a state whose `logits` are those of the next token. `decode_step` takes the state, donated, and the
# chosen tokens, and returns new logits and the new state. Nothing in between: blocks that a layer selects and has in no
# slot are copied from host memory inside the compiled step.

# %%
source = Path(jax.__file__).with_name("version.py").read_text() + Path(np.__file__).read_text()
prompt = tokenizer.encode(source, bos=True)[:PROMPT_TOKENS]


def decode(engine: Engine) -> dict[str, np.ndarray]:
    """Greedy decoding; counters of every step by layer and KV head."""
    state = engine.prefill([prompt])
    logits, tokens, all_logits, locality, misses = state.logits, [], [], [], []
    start = time.perf_counter()
    for step in range(STEPS):
        token = logits.argmax(axis=-1)
        logits, state = decode_step(frozen, state, token)
        if step == 0:
            logits.block_until_ready()
            start = time.perf_counter()  # the first step compiles
        stats = state.stats()
        tokens.append(int(token[0]))
        all_logits.append(np.asarray(logits[0]))
        locality.append(stats.locality_last[:, 0])
        misses.append(stats.last.misses[:, 0])
    print(f"{(STEPS - 1) / (time.perf_counter() - start):6.0f} steps/s, hit rate {stats.hit_rate:.2%}")
    return {
        "tokens": np.array(tokens),
        "logits": np.array(all_logits),
        "locality": np.array(locality),  # [steps, L, K]
        "misses": np.array(misses),  # [steps, L, K]
    }


runs = {name: decode(engine) for name, engine in engines.items()}

# %% [markdown]
# ## Offloaded is resident, bit for bit
#
# The same kernel reads the same bytes, wherever they came from. So the logits are not merely close.

# %%
resident = runs["all on the device"]
for name, run in runs.items():
    print(f"{name:18} equal tokens and logits:", np.array_equal(run["logits"], resident["logits"]))
    assert np.array_equal(run["tokens"], resident["tokens"])
    assert np.array_equal(run["logits"], resident["logits"])
print(repr(tokenizer.decode(resident["tokens"])))

# %% [markdown]
# ## Locality by layer
#
# The share of a step's selected blocks that the step before had selected too. The dashed line is no average but a
# theorem: at most `query` blocks are new by choice, and one because it did not exist before.

# %%
fig, axes = plt.subplots(config.num_layers, 1, figsize=(9, 1.7 * config.num_layers), sharex=True, sharey=True)
for layer, axis in enumerate(np.atleast_1d(axes)):
    for head in range(config.num_kv_heads):
        axis.plot(resident["locality"][:, layer, head], lw=0.9, label=f"KV head {head}")
    axis.axhline(budget.locality_bound, color="black", ls="--", lw=1)
    axis.set(ylabel=f"layer {layer}", ylim=(budget.locality_bound - 0.06, 1.03))
np.atleast_1d(axes)[0].legend(fontsize=8, ncols=2)
np.atleast_1d(axes)[0].set_title(f"locality; guaranteed: {budget.locality_bound:.4g} (dashed)")
np.atleast_1d(axes)[-1].set_xlabel("decode step")
fig.tight_layout()
plt.show()
assert resident["locality"].min() >= budget.locality_bound

# %% [markdown]
# ## What more slots buy
#
# With exactly C slots every block that leaves the selection leaves the device. Twice as many keep it for a while, in
# case it comes back.

# %%
names = [f"{budget.total} slots", f"{2 * budget.total} slots"]
fig, axis = plt.subplots(figsize=(9, 3))
for name in names:
    axis.plot(runs[name]["misses"].sum(axis=(1, 2)), lw=0.9, label=name)
axis.axhline(budget.max_fetched * config.num_layers * config.num_kv_heads, color="black", ls="--", lw=1)
axis.set(xlabel="decode step", ylabel="blocks fetched", title="all layers and KV heads; dashed: the most there can be")
axis.legend(fontsize=8)
fig.tight_layout()
plt.show()

for name in names:
    fetched = runs[name]["misses"]
    wanted = budget.total * config.num_layers * config.num_kv_heads
    print(
        f"{name:10} {fetched.sum(axis=(1, 2)).mean():5.1f} of {wanted} blocks fetched per step, "
        f"most by one KV head {fetched.max()} (allowed {budget.max_fetched})"
    )
    assert fetched.max() <= budget.max_fetched
for engine in engines.values():
    engine.close()
