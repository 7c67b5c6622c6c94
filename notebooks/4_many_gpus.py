# %% [markdown]
# # Many GPUs
#
# A generation is a function of arrays, so running it on many devices is a question of where the arrays lie.
# Three ways, and the same tokens from each: `jax.pmap` over the pure function as it is; `bj.load(mesh=...)`
# with rows over devices (data parallel); and with each matrix over devices (tensor parallel).
#
# On a machine with GPUs this runs on them. Elsewhere the CPU pretends to be eight devices: they share its
# cores, so they show that the tokens are right and where the bytes go, and nothing about speed.

# %%
import jax

jax.config.update("jax_num_cpu_devices", 8)  # before JAX first looks for devices; GPUs do not mind it

import functools
import json
import os
import pathlib
import time

import jax.numpy as jnp
import numpy as np

import bonsai_jax as bj

try:
    import matplotlib.pyplot as plt  # uv run --group notebook ...
except ImportError:
    plt = None

# "demo" is SmolLM2; on GPUs, a large one: "user/repo:Q1_0", "synth:bonsai-8b:q1_0". Tests put a tiny model
# here.
SOURCE = os.environ.get("NOTEBOOK_MODEL", "demo")
FAKE = jax.default_backend() == "cpu"
# Devices that split a matrix add its parts in another order than one device does. Rounding activations to 8
# bits makes more of such a difference, up to another token near a tie; to show that the tokens are the same,
# a CPU has 16 bits here.
PACKED = bj.RunConfig(weights="packed", page_size=16, activation_bits=16 if FAKE else 8)
print(len(jax.devices()), "devices:", jax.devices()[0].device_kind, "(one CPU, pretending)" if FAKE else "")
assert len(jax.devices()) > 1, "this notebook is about several devices, and there is one"

DEVICES = min(8, 1 << (len(jax.devices()).bit_length() - 1))  # the largest power of two of them, at most 8

# %% [markdown]
# ## One device, to compare with
#
# Eight prompts; row by row greedy and seeded sampling in turn.

# %%
model = bj.load(SOURCE, PACKED)
# Matrices are split between heads: over as many devices, at most 4, as the KV heads divide into.
PARTS = max(n for n in range(1, min(4, DEVICES) + 1) if model.config.attention.num_kv_heads % n == 0)
ROWS, NEW = 8, 12
prompts = [model.tokenizer.encode(f"Row {row}: once upon a time") for row in range(ROWS)]
sampling = [bj.SamplingParams(temperature=float(row % 2), seed=row) for row in range(ROWS)]


def tokens_of(model):
    outputs = bj.generate(model, prompts, max_new_tokens=NEW, sampling=sampling, ignore_eos=True)
    return np.array([output.tokens for output in outputs])


alone = tokens_of(model)
for row in (0, 1):
    print("greedy:" if row % 2 == 0 else "seeded:", alone[row])

# %% [markdown]
# ## pmap, over seeds
#
# `generate_tokens` knows nothing of devices. Stack a state for each of them, and map: every device has all of
# the weights and its own seeds. This is the whole of it.

# %%
each = ROWS // DEVICES  # rows of a device


def state_of(rows):
    own = [sampling[row] for row in rows]
    return bj.new_state(model, len(rows), 64, own, NEW, ignore_eos=True)


per_device = [range(each * device, each * (device + 1)) for device in range(DEVICES)]
states = jax.tree.map(lambda *leaves: jnp.stack(leaves), *map(state_of, per_device))
padded = np.zeros((ROWS, 32), np.int32)
for row, prompt in enumerate(prompts):
    padded[row, : len(prompt)] = prompt
lengths = np.array([len(prompt) for prompt in prompts])

run = functools.partial(bj.generate_tokens, config=model.config, size=NEW)
_, drawn, _ = jax.pmap(run, in_axes=(None, 0, 0, 0))(
    model.params, states, padded.reshape(DEVICES, each, -1), lengths.reshape(DEVICES, each)
)
print("tokens, by device:", drawn.shape)
assert (np.asarray(drawn).reshape(ROWS, NEW) == alone).all()

# %% [markdown]
# ## A mesh: data parallel, tensor parallel, both
#
# `bj.load(..., mesh=...)` puts the weights on a mesh of devices, and `generate`, `stream` and `logits` follow
# by `jax.shard_map`. Along `data` the rows are split and the weights copied; along `model` every matrix is
# split, and the devices add up their parts twice a layer.

# %%
layouts = {
    "one device": None,
    f"data {DEVICES}": bj.make_mesh(data=DEVICES),
    f"tensor {PARTS}": bj.make_mesh(model=PARTS),
}
if DEVICES >= 2 * PARTS:
    layouts[f"data 2 x tensor {PARTS}"] = bj.make_mesh(data=2, model=PARTS)
models = {name: bj.load(SOURCE, PACKED, mesh=mesh) for name, mesh in layouts.items()}
answers = {"pmap": np.asarray(drawn).reshape(ROWS, NEW)}
answers |= {name: tokens_of(sharded) for name, sharded in models.items()}

print("a seeded row, by every way:")
for name, tokens in answers.items():
    print(f"  {name:18}", *tokens[1])
    # On GPUs a sum over devices rounds in another order, and 8 bits of activations can make a tie of that.
    assert (tokens == alone).all() if FAKE else (tokens == alone).mean() > 0.9, name

# %% [markdown]
# ## What a device holds
#
# A split matrix lies in shards. Of every layer's `up`, each of the tensor parallel devices has its rows:

# %%
(mlp,) = models[f"tensor {PARTS}"].params.layers["mlp"]
up = mlp.up.parts[0].fields["qs"]
print("up, [layers, outputs, blocks, codes]:", up.shape)
for piece in up.addressable_shards:
    rows = piece.index[1]
    print(f"  {piece.device}: outputs {rows.start or 0} to {rows.stop or up.shape[1]}")


def bytes_by_device(tree):
    """{device: bytes of the shards that lie on it}"""
    held = {}
    for leaf in jax.tree.leaves(tree):
        for piece in leaf.addressable_shards:
            held[piece.device] = held.get(piece.device, 0) + piece.data.nbytes
    return held


# %% [markdown]
# Weights and the cache of eight rows. Data parallel devices split the cache alone, tensor parallel ones both
# (what is small, the norms, everyone has; and where there are more devices than KV heads, some have the same
# head).

# %%
weights, caches = {}, {}
for name, sharded in models.items():
    state = bj.new_state(sharded, ROWS, 256, bj.SamplingParams(), NEW)
    weights[name] = max(bytes_by_device(sharded.params).values()) / 1e6
    caches[name] = max(bytes_by_device(state.cache.states["attention"]).values()) / 1e6
    print(f"{name:18} weights {weights[name]:7.2f} MB, cache {caches[name]:6.2f} MB on the fullest device")
assert weights[f"tensor {PARTS}"] < 1.25 * weights["one device"] / PARTS
assert caches[f"data {DEVICES}"] == caches["one device"] / DEVICES

# %%
if plt:
    figure, axis = plt.subplots(figsize=(8, 2.8), layout="constrained")
    names = list(weights)
    axis.barh(names, list(weights.values()), label="weights")
    axis.barh(names, list(caches.values()), left=list(weights.values()), label="KV cache of 8 rows")
    axis.invert_yaxis()
    axis.set(xlabel="MB on the fullest device")
    axis.legend()
    plt.show()

# %% [markdown]
# ## Scaling
#
# Data parallel: eight rows on every device, so tokens a second should grow with the devices. Tensor parallel:
# eight rows in all, each device reads its part of the weights, and pays two sums a layer for it. On fake
# devices all of it happens on the same cores, and the rows stay eight: there the curves cannot rise, and only
# show that it runs.


# %%
def tokens_per_second(sharded, rows):
    """Of `rows` rows in all; the better of two runs, behind one that compiles."""
    best, batch = 0.0, [prompts[row % ROWS] for row in range(rows)]
    settings = [sampling[row % ROWS] for row in range(rows)]
    for _ in range(3):
        began = time.perf_counter()
        bj.generate(sharded, batch, max_new_tokens=NEW, sampling=settings, ignore_eos=True)
        best = max(best, rows * NEW / (time.perf_counter() - began))
    return best


def on(axis, count):
    """The model on `count` devices along one axis of a mesh, loaded once."""
    name = "one device" if count == 1 else f"{axis} {count}"
    if name not in models:
        size = {"data" if axis == "data" else "model": count}
        models[name] = bj.load(SOURCE, PACKED, mesh=bj.make_mesh(**size))
    return models[name]


powers = [1 << i for i in range(DEVICES.bit_length())]
data = {n: tokens_per_second(on("data", n), ROWS if FAKE else ROWS * n)
        for n in ([1, DEVICES] if FAKE else powers)}  # fmt: skip
tensor = {n: tokens_per_second(on("tensor", n), ROWS) for n in ([1, PARTS] if FAKE else powers) if n <= PARTS}
for name, speeds in (("data", data), ("tensor", tensor)):
    print(f"{name:7}", "  ".join(f"{n}: {speed:,.0f} tok/s" for n, speed in speeds.items()))
if FAKE:
    print("(fake devices: correctness, not speed)")

# %% [markdown]
# What several GPUs did is kept in `benchmarks/results` (`benchmarks/devices.py` makes such rows): a row says
# over how many devices rows and matrices were split. Those of this checkout are drawn beside what was
# measured here; they were *not* measured by this notebook.

# %%
beside = [pathlib.Path(p) for p in ("benchmarks/results", "../benchmarks/results")]
files = [file for folder in beside for file in sorted(folder.glob("*.jsonl"))]
rows = [json.loads(line) for file in files for line in file.read_text().splitlines()]
kept = {}  # (device, model, test, how) -> {devices: tokens a second}
for row in rows:
    if "tensor_parallel" in row and "tok_s" in row:
        over = {"data": row["data_parallel"], "tensor": row["tensor_parallel"]}
        for how in over:
            if over[how] == over["data"] * over["tensor"]:  # the other is 1
                speeds = kept.setdefault((row["device"], row["model"], row["test"], how), {})
                speeds[over[how]] = max(row["tok_s"], speeds.get(over[how], 0.0))
kept = {key: speeds for key, speeds in kept.items() if 1 in speeds and len(speeds) > 1}
for (device, name, test, how), speeds in kept.items():
    figures = ", ".join(f"{n}: {speeds[n]:,.0f} ({speeds[n] / speeds[1]:.2f} x)" for n in sorted(speeds))
    print(f"{device}, {name}, {test}, tok/s on {how} parallel devices: {figures}")
if not kept:
    print("no rows of several GPUs in this checkout")

# %%
if plt:
    # The speed of the most devices beside one device's: as many times as there are devices would be all.
    here = (
        {}
        if FAKE
        else {("here", SOURCE, "generate", "data"): data, ("here", SOURCE, "generate", "tensor"): tensor}
    )
    bars = []
    for (device, name, test, how), speeds in (kept | here).items():
        count = max(speeds)
        label = f"{name.removeprefix('synth:')}, {test}, {how} parallel, {device}"
        bars.append((speeds[count] / speeds[1] / count, count, label))
    bars.sort()
    figure, axis = plt.subplots(figsize=(10, 1 + 0.4 * len(bars)), layout="constrained")
    shares, counts, labels = zip(*bars, strict=True) if bars else ((), (), ())
    drawn = axis.barh(range(len(bars)), shares)
    axis.set_yticks(range(len(bars)), labels)
    speedups = [f"{share * count:.2f} x on {count}" for share, count in zip(shares, counts, strict=True)]
    axis.bar_label(drawn, speedups, label_type="center", color="white")
    axis.axvline(1, color="black", linestyle=":")
    axis.set(xlim=(0, 1.05), xlabel="speedup / devices", title="several GPUs beside one")
    plt.show()
