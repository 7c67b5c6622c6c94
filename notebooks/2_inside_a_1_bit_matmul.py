# %% [markdown]
# # Inside a 1-bit matmul
#
# A Q1_0 weight is one bit: plus or minus the scale of its block of 128. A GPU's binary tensor cores can
# multiply such weights without ever unpacking them, by AND and by counting bits. Here that product is done by
# hand, in numpy, and the library's `matmul` must agree; then comes the order in which a GPU wants the bits,
# and the speed, beside the most that memory allows.

# %%
import json
import math
import pathlib
import time

import jax
import jax.numpy as jnp
import numpy as np

from bonsai_jax import machine
from pallas_kernels import LayerStack, QTensor, device, for_device, formats, matmul, quantize
from pallas_kernels.qtensor import tile

try:
    import matplotlib.pyplot as plt  # uv run --group notebook ...
except ImportError:
    plt = None

rng = np.random.default_rng(0)
N, K, GROUP = 64, 512, 128  # outputs, inputs, weights that share a scale
dense = rng.normal(0, 0.02, (N, K)).astype(np.float32)
w = quantize(jnp.asarray(dense), "q1_0")
print({name: (field.shape, str(field.dtype)) for name, field in w.fields.items()})
print(f"{8 * w.nbytes / (N * K)} bits a weight, {w.nbytes:,} bytes where float32 has {dense.nbytes:,}")

# %% [markdown]
# ## The weights: a bit and a scale
#
# $w = d\,(2b - 1)$: bit $b$ of the weight, scale $d$ of its block. Sixteen bytes `qs` hold a block's bits. As
# four 32-bit words they are what the hardware takes.

# %%
d = np.asarray(w.fields["d"], np.float32)  # [N, K / 128]
words = np.asarray(w.fields["qs"]).view(np.uint32)  # [N, K / 128, 4]
bits = np.unpackbits(words.view(np.uint8), axis=-1, bitorder="little")  # [N, K / 128, 128]
by_hand = (d[..., None] * (2.0 * bits - 1)).reshape(N, K)
print("signs kept:", (np.sign(by_hand) == np.sign(dense)).mean(), " first word:", f"{words[0, 0, 0]:032b}")

# %% [markdown]
# ## The activations: eight bit-planes
#
# An activation becomes a whole number of 8 bits times the scale of its group: $x \approx s\,q$. In two's
# complement $q = -128\,b_7 + \sum_{p<7} 2^p\,b_p$, so the group is eight rows of bits: its *planes*.

# %%
x = rng.normal(0, 1, K).astype(np.float32)
groups = x.reshape(-1, GROUP)
s = np.abs(groups).max(axis=1, keepdims=True) / 127  # [K / 128, 1]
q = np.rint(groups / s).astype(np.int8)
x_rounded = (s * q).reshape(K).astype(np.float32)  # what the product will really see

planes = (q.view(np.uint8)[:, None, :] >> np.arange(8, dtype=np.uint8)[:, None]) & 1  # [K / 128, 8, 128]
plane_words = np.packbits(planes, axis=-1, bitorder="little").view(np.uint32)  # [K / 128, 8, 4]
value = np.array([1, 2, 4, 8, 16, 32, 64, -128])  # of each plane
assert ((planes * value[:, None]).sum(axis=1) == q).all()

# %%
if plt:
    figure, axes = plt.subplots(3, 1, figsize=(10, 6), height_ratios=[2, 3, 4], layout="constrained")
    axes[0].bar(np.arange(GROUP), q[0], width=1.0)
    axes[0].set(xlim=(-0.5, GROUP - 0.5), ylabel="q", title="one group of activations, as 8-bit numbers")
    axes[1].imshow(planes[0], aspect="auto", cmap="binary", interpolation="nearest")
    axes[1].set(yticks=range(8), yticklabels=value, ylabel="value of a plane", title="the same as bit-planes")
    axes[2].imshow(bits[:16, 0], aspect="auto", cmap="binary", interpolation="nearest")
    axes[2].set(xlabel="column", ylabel="output", title="the weights' bits of 16 outputs: black is +d")
    plt.show()

# %% [markdown]
# ## The product: AND, and count
#
# The dot product of two rows of bits is the number of ones in their AND. Planes are put together by their
# values, and $2b - 1$ costs one sum of $q$ that all outputs share:
#
# $$ y_n = \sum_{groups} d\,s\,\Bigl(
#          2 \sum_p \mathrm{value}_p\,\mathrm{popcount}(b \wedge b_p) - \sum_k q_k \Bigr) $$
#
# Nothing here unpacks a weight: 128 of them are four ANDs of words, for each plane.

# %%
together = words[:, :, None, :] & plane_words[None]  # [N, K / 128, 8, 4]
counts = np.bitwise_count(together).sum(axis=-1, dtype=np.int64)  # [N, K / 128, 8]
whole = 2 * (counts * value).sum(axis=-1) - q.sum(axis=-1, dtype=np.int64)  # [N, K / 128], exact integers
y = (d * s[:, 0] * whole).sum(axis=-1)

assert (whole == np.einsum("ngk,gk->ng", 2 * bits.astype(np.int64) - 1, q.astype(np.int64))).all()


def difference(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


theirs = np.asarray(matmul(jnp.asarray(x_rounded)[None], w))[0]
print(f"by hand against matmul, on the rounded activations: {difference(y, theirs):.1e}")
assert difference(y, theirs) < 1e-5

# %% [markdown]
# What was lost is the rounding to 8 bits, which a kernel does to any activations
# (`RunConfig(activation_bits=16)` makes sixteen planes). Each bit halves it:

# %%
exact = by_hand @ x.astype(np.float64)
losses = {}
for width in range(3, 17):
    scale = np.abs(groups).max(axis=1, keepdims=True) / (2 ** (width - 1) - 1)
    losses[width] = difference(by_hand @ (scale * np.rint(groups / scale)).reshape(K), exact)
print("  ".join(f"{width} bits: {losses[width]:.1e}" for width in (4, 8, 12, 16)))
assert losses[16] < losses[8] / 100 < 0.01 / 100
if plt:
    plt.figure(figsize=(5, 2.8), layout="constrained")
    plt.semilogy(list(losses), list(losses.values()), marker="o")
    plt.axvline(8, color="tab:gray", linestyle=":")
    plt.xlabel("bits of an activation")
    plt.ylabel("error of the product")
    plt.show()

# %% [markdown]
# ## The order of the bits on the device
#
# A tensor core's instruction (`mma.m16n8k128`, AND and popcount) takes 16 outputs against 8 columns of 128
# bits: and a group of activations *is* eight such columns, its planes. Each of the 32 lanes that issue it
# holds a share of the weights in its registers. So at load the blocks are reordered (`tile`): what a lane
# needs for two groups lies together, one load of 16 bytes, and nothing is shuffled afterwards.
#
# To see the order, number the words of a small matrix and let `tile` move the numbers.

# %%
numbers = np.arange(16 * 8, dtype=np.uint32).reshape(16, 2, 4)  # 16 outputs, 2 groups, 4 words each
named = QTensor(
    {"d": jnp.zeros((16, 2), jnp.float16), "qs": jnp.asarray(numbers.view(np.uint8))}, "q1_0", (16, 2 * GROUP)
)
moved = np.asarray(tile(named).fields["words"]).reshape(32, 4)  # lane, word of its 16 bytes
lane_of, place_of = np.empty((16, 8), int), np.empty((16, 8), int)
for lane in range(32):
    for place in range(4):
        output, word = divmod(int(moved[lane, place]), 8)
        lane_of[output, word], place_of[output, word] = lane, place
print("lane 0 holds (output, word):", [divmod(int(number), 8) for number in moved[0]])
# Lane 4 g + t: word t of each group, of outputs g and g + 8.
assert (lane_of == 4 * (np.arange(16)[:, None] % 8) + np.arange(8) % 4).all()

# %%
if plt:
    figure, axis = plt.subplots(figsize=(8, 4.2), layout="constrained")
    axis.imshow(lane_of, aspect="auto", cmap="turbo", alpha=0.55)
    for output in range(16):
        for word in range(8):
            label = f"lane {lane_of[output, word]} [{place_of[output, word]}]"
            axis.text(word, output, label, ha="center", va="center", fontsize=7)
    axis.axvline(3.5, color="black")
    axis.set(
        xticks=range(8), yticks=range(16), xlabel="word of 32 columns (left: group 0, right: group 1)",
        ylabel="output", title="who holds what of a tile: lane [word of its 16 bytes]",
    )  # fmt: skip
    plt.show()

# %% [markdown]
# ## Speed against the ceiling
#
# One token's product reads every weight once and does little with it, so memory sets the pace: bytes of the
# matrix over bytes a second is the least time it can take. Below, products of growing matrices in a chain,
# each waiting for the one before. On a CPU the *reference* runs, which dequantizes all weights to float32 for
# every product: it says what is right, not what is fast, and shows why kernels exist.

# %%
ON_GPU = device.platform().startswith("sm_")


def chain_of(n, k, layers):
    """Random Q1_0 matrices [layers, n, k], as this device wants them."""
    fields = formats.random_fields("q1_0", jax.random.key(0), (layers, n, k // GROUP), 0.0, k**-0.5)
    stack = QTensor(fields, "q1_0", (n, k))
    return LayerStack((jax.jit(for_device)(stack),), tuple((0, i) for i in range(layers)))


@jax.jit
def products(y, x, stack):
    for layer in range(len(stack.where)):
        y = matmul(x, stack, layer, residual=y)  # waits for the y before it
    return y


def microseconds(n, k, layers, calls=5):
    """Of one product; the best of some calls."""
    stack, y, x = chain_of(n, k, layers), jnp.zeros((1, n)), jnp.asarray(rng.normal(size=(1, k)), jnp.float32)
    times = []
    for _ in range(calls + 3):  # the first compile and, on a GPU, make its graph
        began = time.perf_counter()
        y = jax.block_until_ready(products(y, x, stack))
        times.append(time.perf_counter() - began)
    return 1e6 * min(times[3:]) / layers


sizes = [2048, 4096, 8192, 16384, 32768] if ON_GPU else [256, 512, 1024]
columns = 4096 if ON_GPU else 512
measured = []
for n in sizes:
    held = n * columns * 9 // 64  # bytes: 1.125 bits a weight
    layers = min(64, max(8, math.ceil(160e6 / held))) if ON_GPU else 4  # more than a GPU's cache can keep
    measured.append((held, microseconds(n, columns, layers)))
peak = machine.bandwidth()
print(f"{machine.device_name()}: {peak / 1e9:,.0f} GB/s")
for n, (held, us) in zip(sizes, measured, strict=True):
    floor = 1e6 * held / peak
    print(f"{n:6} x {columns}: {us:8.2f} us; its {held / 1e6:6.3f} MB need {floor:6.2f} us: {floor / us:.1%}")

# %% [markdown]
# Whole models on a GPU, from the rows that this repository keeps (`benchmarks/results`): tokens a second of
# one stream, the reference and the kernels, each beside what its bytes would allow. These were *not*
# measured by this notebook; `bonsai-jax bench -m synth:bonsai-8b:q1_0` makes such rows.

# %%
beside = [pathlib.Path(p) for p in ("benchmarks/results", "../benchmarks/results")]
kept = next((p / "nvidia-h200.jsonl" for p in beside if (p / "nvidia-h200.jsonl").exists()), None)
rows = [json.loads(line) for line in kept.read_text().splitlines()] if kept else []
best = {}  # (model, reference or kernels) -> its fastest row of tg128
for row in rows:
    if row.get("test") == "tg128" and ":q1_0" in row["model"] and row.get("data_parallel", 1) == 1:
        key = row["model"].split(":")[1], "reference" if row["impl"] in ("xla", "reference") else "kernels"
        best[key] = max(row, best.get(key, row), key=lambda r: r["tok_s"])
for (model, by), row in sorted(best.items()):
    ceiling = row["tok_s"] / row["ceiling_share"]
    print(f"{row['device']}, commit {row['commit']}: {model:12} {by:10} {row['tok_s']:6,.0f} tok/s "
          f"of {ceiling:6,.0f}: {row['ceiling_share']:.0%}")  # fmt: skip

# %%
if plt:
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 3.4), layout="constrained")
    held, us = np.array(measured).T
    left.loglog(held / 1e3, us, marker="o", label="measured here")
    left.loglog(held / 1e3, 1e6 * held / peak, linestyle="--", label="bytes over bandwidth")
    left.set_xticks(held / 1e3, [f"{kilobytes:,.0f}" for kilobytes in held / 1e3])
    left.minorticks_off()
    left.set(
        xlabel="kB of the matrix", ylabel="us a product", title=f"{machine.device_name()}, measured here"
    )
    left.legend()
    labels = [f"{model}\n{by}" for model, by in sorted(best)]
    shares = [best[key]["ceiling_share"] for key in sorted(best)]
    right.bar(labels, shares, color=["tab:green" if "kernels" in label else "tab:gray" for label in labels])
    right.set(
        ylim=(0, 1), ylabel="share of the ceiling", title="NVIDIA H200, rows kept in benchmarks/results"
    )
    right.tick_params(axis="x", labelsize=8)
    plt.show()
