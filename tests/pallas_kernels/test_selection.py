"""Which kernel runs what: the whole list of what falls back to the reference on a GPU, kept here with the
reasons."""

import dataclasses
import importlib.util
import re
from pathlib import Path
from typing import get_args

import jax.numpy as jnp
import numpy as np
import pytest

from bonsai_jax.network import architectures
from checkpoints import open_checkpoint
from checkpoints.synth import MODELS
from pallas_kernels import Rotation, attend, device, formats, matmul, quantize, refusals, selection
from pallas_kernels.problems import Attention, DeltaNet, Matmul, Sampling, Step
from pallas_kernels.selection import choose, explain, for_device, products
from pallas_kernels.step import experts_plan, int_layers_plan
from tests.pallas_kernels.stacks import drawn

PLATFORMS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
# Query heads, KV heads, head_dim of models that there is no synthetic one of.
OTHER_HEADS = {
    "SmolLM2-135M": (9, 3, 64),
    "Qwen2.5-0.5B": (14, 2, 64),
    "Qwen3-0.6B": (16, 8, 128),
    "Qwen3-14B": (40, 8, 128),
    "Llama-2-7B": (32, 32, 128),
    "Phi-3-mini": (32, 32, 96),
    "Gemma-2-2B": (8, 4, 256),
    "StarCoder": (48, 1, 128),
}
# When a kernel lands, its lines leave; when one is found to lack a shape, a line comes. The same on every
# platform of PLATFORMS.
WITHOUT_KERNEL = [name for name in formats.names() if formats.family(name) is None]
FALLS_BACK = {
    **{(name, format): f"no kernel for matmul of {format} in this version" for name in MODELS
       for format in WITHOUT_KERNEL},
    ("Phi-3-mini", ""): "head_dim is 96; the kernel has 64, 128 and 256",
}  # fmt: skip


@pytest.fixture(autouse=True)
def without_extras(monkeypatch):
    """What is chosen without the extra `triton`."""
    find = importlib.util.find_spec
    monkeypatch.setattr(
        refusals.importlib.util, "find_spec", lambda name: None if name == "jax_triton" else find(name)
    )


def problems(platform: str):
    """(model, format or "") and problem: each matrix of each synthetic model in every format, and all
    heads."""
    heads, turned, values = dict(OTHER_HEADS), {}, {}
    for name in MODELS:
        checkpoint = open_checkpoint(f"synth:{name}:f32")
        config = architectures.config_of(checkpoint)
        attention = config.attention
        heads[name] = (attention.num_heads, attention.num_kv_heads, attention.head_dim)
        turned[name] = None if attention.rope.dim == attention.head_dim else attention.rope.dim
        if config.groups("latent_attention"):
            values[name] = attention.kv_rank
        plain = [spec for spec in architectures.get(config.architecture).TENSORS if spec.plain]
        vectors = {spec.gguf.format(layer) for spec in plain for layer in spec.layers(config)}
        matrices = [t for t in checkpoint.tensors.values() if len(t.shape) > 1 and t.name not in vectors]
        for shape in {t.shape[-2:] for t in matrices}:
            for format in formats.names():
                yield (name, format), Matmul(platform, format, *shape)
    for name, shape in heads.items():
        rest = {"rotated": turned.get(name), "values": values.get(name)}
        yield (name, ""), Attention(platform, "decode", *shape, 64, "bfloat16", **rest)


def refusal(problem) -> str | None:
    """Where the reference runs it: the reason of the kernel that should."""
    verdicts = explain(problem)
    if next(v.kernel for v in verdicts if v.taken) != "reference":
        return None
    named = {v.kernel: v.reason for v in verdicts}
    return named["int_decode" if isinstance(problem, Matmul) else "decode"]


@pytest.mark.parametrize("platform", PLATFORMS)
def test_what_falls_back_on_a_gpu_and_why(platform):
    reasons = {key: reason for key, problem in problems(platform) if (reason := refusal(problem))}
    assert reasons == FALLS_BACK


def test_what_falls_back_on_a_cpu_and_why():
    reasons = {}
    for (_, format), problem in problems("cpu"):
        if isinstance(problem, Matmul) and choose(problem) == "reference":
            reasons[format] = next(v.reason for v in explain(problem) if v.kernel == "cpu")
    assert reasons == {"f32": "float32 weights are multiplied as fast by the reference"}


@pytest.mark.parametrize("platform", ["sm_75", "tpu"])
def test_elsewhere_everything_falls_back(platform):
    reasons = {refusal(problem) for _, problem in problems(platform)}
    assert reasons == {"needs an NVIDIA GPU of compute capability 8.0 or newer"}


def kernels(format: str, platform: str, n=4096, k=4096, **rest) -> dict[int, str]:
    chosen = products(Matmul(platform, format, n, k, **rest))
    return {rows: chosen.kernel(rows) for rows in (1, 3, 4, 8, 9, 16, 17, 64, 512)}


def test_the_table_of_kernels(monkeypatch):
    """Rows of activations, formats and GPUs: selection's page, as code."""
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    rows = (1, 3, 4, 8, 9, 16, 17, 64, 512)
    one_bit = ["bit_decode_b1"] + ["bit_decode_s8"] * 3
    for format, platform, want in (
        ("q1_0", "sm_90", one_bit + ["bit_prefill_sm90"] * 5),
        ("q1_0", "sm_80", one_bit + ["cublas"] * 5),
        ("q1_0", "sm_120", one_bit + ["cublas"] * 5),
        ("q4_k", "sm_90", ["int_decode"] * 4 + ["int_prefill_sm90"] * 5),
        ("q4_k", "sm_89", ["int_decode"] * 6 + ["cublas"] * 3),
        ("f16", "sm_90", ["reference"] * 4 + ["cublas"] * 5),
        ("f32", "sm_90", ["reference"] * 9),
        ("q4_k", "cpu", ["cpu"] * 9),
    ):
        assert kernels(format, platform) == dict(zip(rows, want, strict=True)), (format, platform)
    mixed = kernels("q4_k", "sm_90", mixed=True)
    assert [mixed[rows] for rows in (8, 64, 512)] == ["int_decode", "int_prefill_sm90", "cublas"]
    exact = kernels("q4_k", "sm_90", bits=16)
    assert [exact[rows] for rows in (16, 17, 512)] == ["int_decode"] + ["int_prefill_sm90"] * 2
    # Ternary weights whose inputs are rotated, in 8 bits.
    for format, rest, many in (
        ("pq2_0", {"folded": True}, ["bit_prefill_sm90"] * 2),
        ("tq1_0", {"folded": True, "mixed": True}, ["bit_prefill_sm90", "cublas"]),
        ("pq2_0", {"folded": True, "bits": 16}, ["int_prefill_sm90"] * 2),
        ("pq2_0", {"folded": True, "n": 4000}, ["int_prefill_sm90"] * 2),
        ("q4_k", {"folded": True}, ["int_prefill_sm90"] * 2),
        ("pq2_0", {}, ["int_prefill_sm90"] * 2),
    ):
        chosen = kernels(format, "sm_90", **rest)
        assert [chosen[8], chosen[64], chosen[512]] == ["int_decode", *many], (format, rest)
    assert kernels("pq2_0", "sm_89", folded=True)[9] == "int_decode"
    matrix = drawn("pq2_0", (64, 1024)).blocks
    rotation = Rotation.from_signs(np.ones(1024), 1024)
    for own, many in ((rotation, "bit_prefill_sm90"), (None, "int_prefill_sm90")):
        assert for_device(matrix.replace(rotation=own)).products.kernel(64) == many
    assert kernels("q1_0", "sm_90", n=4000)[9] == "cublas"  # no whole tiles of 64 outputs
    head = kernels("q1_0", "sm_90", n=151669)
    assert [head[rows] for rows in (1, 8, 9)] == ["bit_decode_ring"] * 2 + ["bit_prefill_sm90"]
    for rest in ({"bits": 16}, {"matrices": 2}, {"k": 12288}):  # of which none is for
        assert kernels("q1_0", "sm_90", **{"n": 151669, **rest})[1] == "bit_decode_b1"
    # Integers of 8 rows of so many columns are more than the shared memory of a block, which may have a part
    # of the columns of one matrix, but not of two.
    assert kernels("q1_0", "sm_90", k=32768)[8] == "bit_decode_s8"
    wide = kernels("q1_0", "sm_90", k=32768, matrices=2)
    assert wide[8] == wide[1] == "bit_decode_b1"


@pytest.mark.parametrize("format", formats.names("bit") + formats.names("int"))
def test_hopper_multiplies_many_rows_without_dequantizing_to_memory(format):
    assert kernels(format, "sm_90")[512].endswith("prefill_sm90")
    assert kernels(format, "sm_80")[512] == "cublas"


@pytest.mark.parametrize(
    ("platform", "cache", "page_size", "head_dim", "taken"),
    [
        ("sm_90", "bfloat16", 64, 128, "prefill_sm90"),
        ("sm_90", "bfloat16", 16, 128, "prefill_sm80"),
        ("sm_80", "bfloat16", 64, 128, "prefill_sm80"),
        ("sm_89", "bfloat16", 16, 128, "prefill_sm80"),
        ("sm_90", "float16", 64, 256, "prefill_sm90"),
        ("sm_90", "float16", 16, 256, "reference"),
        ("sm_80", "float16", 64, 256, "reference"),
        ("sm_80", "float32", 64, 128, "reference"),
        ("sm_75", "bfloat16", 64, 128, "reference"),
        ("cpu", "bfloat16", 64, 128, "cpu"),
        ("cpu", "bfloat16", 64, 40, "reference"),
    ],
)
def test_many_queries_attend_by_a_kernel_on_every_gpu_since_ampere(
    platform, cache, page_size, head_dim, taken
):
    assert choose(Attention(platform, "prefill", 32, 8, head_dim, page_size, cache)) == taken


@pytest.mark.parametrize(
    ("platform", "phase", "change", "taken"),
    [
        ("sm_90", "decode", {}, "delta_step"),
        ("sm_80", "decode", {"k_dim": 64, "v_dim": 64}, "delta_step"),
        ("sm_90", "decode", {"k_dim": 96}, "reference"),
        ("sm_90", "decode", {"conv": 3}, "reference"),
        ("sm_75", "decode", {}, "reference"),
        ("sm_90", "prefill", {}, "delta_chunks"),
        ("sm_90", "prefill", {"v_dim": 96}, "reference"),
        ("sm_80", "prefill", {"k_dim": 64, "v_dim": 64}, "delta_chunks"),
        ("sm_80", "prefill", {}, "reference"),  # shared memory
        ("cpu", "decode", {}, "reference"),
        ("cpu", "prefill", {}, "reference"),
    ],
)
def test_a_delta_net_runs_by_a_kernel_where_its_heads_fit(platform, phase, change, taken, monkeypatch):
    problem = dataclasses.replace(DeltaNet(platform, phase, 16, 48, 128, 128, 4), **change)
    if platform in device.GPUS:
        monkeypatch.setattr(device, "default", lambda: device.GPUS[platform])
    assert choose(problem) == taken and choose(problem, impl="reference") == "reference"


@pytest.mark.parametrize(("platform", "taken"), [("sm_80", "two_launches"), ("sm_120", "two_launches"),
                                                 ("sm_75", "reference"), ("cpu", "cpu")])  # fmt: skip
def test_tokens_are_drawn_by_a_kernel_on_cpus_and_every_gpu_since_ampere(platform, taken):
    problem = Sampling(platform, 151669)
    assert choose(problem) == taken and choose(problem, impl="reference") == "reference"
    if taken == "reference":
        with pytest.raises(
            NotImplementedError, match=r"cannot run sampling of 151669 tokens on .* needs an NVI"
        ):
            choose(problem, impl="pallas")


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_attention_of_other_widths_is_the_references(phase):
    llama = Attention("sm_90", phase, 32, 8, 128, 64, "bfloat16")
    assert choose(llama) != "reference"
    assert choose(dataclasses.replace(llama, window=512, scale=0.5, softcap=50.0, sinks=True)) == choose(
        llama
    )
    assert choose(dataclasses.replace(llama, head_dim=80)) == "reference"


@pytest.mark.parametrize("phase", ["decode", "prefill"])
def test_with_the_extra_triton_has_what_other_kernels_of_gpus_refuse(phase, monkeypatch):
    monkeypatch.setattr(refusals.importlib.util, "find_spec", lambda name: name)
    phi = Attention("sm_90", phase, 32, 32, 96, 64, "bfloat16")
    assert choose(phi) == "triton" and choose(phi, impl="reference") == "reference"
    assert choose(dataclasses.replace(phi, head_dim=128)) != "triton"
    reasons = {
        "needs an NVIDIA GPU of compute capability 8.0 or newer": {"platform": "cpu"},
        "the cache is int8; the kernel reads float16 and bfloat16": {"cache_dtype": "int8"},
        "head_dim is 288; the kernel has multiples of 8, to 256": {"head_dim": 288},
    }
    for reason, change in reasons.items():
        (verdict,) = (v for v in explain(dataclasses.replace(phi, **change)) if v.kernel == "triton")
        assert verdict.reason == reason
    monkeypatch.undo()
    monkeypatch.setattr(refusals.importlib.util, "find_spec", lambda name: None)
    (verdict,) = (v for v in explain(phi) if v.kernel == "triton")
    assert verdict.reason == "needs the package jax-triton: install the extra `triton`"


def layer_of(formats, hidden=4096, ffn=12288):
    sizes = (hidden + 2048, hidden, ffn, ffn, hidden)
    return tuple(((f, n),) for f, n in zip(formats, sizes, strict=True))


Q1_LAYERS = (layer_of(["q1_0"] * 5),) * 36
STEP = Step("sm_90", 1, 4096, 12288, Q1_LAYERS, Attention("sm_90", "decode", 32, 8, 128, 64, "bfloat16"))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attention": dataclasses.replace(STEP.attention, window=512)}, "the kernel knows no window"),
        ({"attention": dataclasses.replace(STEP.attention, scale=0.1)}, "scores are scaled by 0.1"),
        ({"attention": dataclasses.replace(STEP.attention, softcap=50.0)}, "scores are capped at 50.0"),
        ({"attention": dataclasses.replace(STEP.attention, rotated=0)}, "queries and keys are not rotated"),
        ({"attention": dataclasses.replace(STEP.attention, sinks=True)}, "softmax has a sink"),
        (
            {"layers": (*Q1_LAYERS, layer_of(["q1_0"] * 4 + ["q4_k"]))},
            "not all layers' weights are Q1_0, or not all of 2 to 8 bits, joined by layer: q4_k",
        ),
        ({"layers": None}, "not all layers' weights are Q1_0, or not all of 2 to 8 bits, joined by layer"),
        ({"split": True}, "devices that share weights must add their parts"),
        ({"plain": False}, "the kernel has plain attention, without gates, and weights that are not folded"),
        ({"folded": True}, "the kernel has plain attention, without gates, and weights that are not folded"),
        ({"post_norms": True}, "what attention or the feed-forward adds is normed first"),
        ({"rows": 25}, "25 rows are more than 24, whose activations of 8 bits a warp has registers for"),
        ({"rows": 13, "bits": 16}, "13 rows are more than 12, whose activations of 16 bits a warp has"),
        ({"hidden": 8192, "ffn": 28672}, "bytes of shared memory"),
        ({"platform": "sm_89"}, "needs bulk copies to shared memory"),
    ],
)
def test_a_step_that_the_launch_was_not_written_for_is_refused_by_construction(change, reason, monkeypatch):
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    assert choose(STEP) == "one_launch"
    problem = dataclasses.replace(STEP, **change)
    few = "layer_products" if problem.rows == 2 else "launches"
    assert choose(problem) == (few if problem.rows < 9 or problem.bits == 16 else "layer_gemms")
    with pytest.raises(
        NotImplementedError, match=f"schedule='one_launch' cannot run .*{reason}.*What can: la"
    ):
        choose(problem, impl="one_launch")


MIXED = ((("q4_k", 5120), ("q6_k", 1024)), *layer_of(["q4_k"] * 4 + ["q6_k"])[1:])
KQ_STEP = dataclasses.replace(STEP, layers=(layer_of(["q4_k"] * 5),) * 2 + (MIXED,))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": (layer_of(["q4_k"] * 4 + ["bf16"]),)}, "not all layers' weights have 1 to 8 bits: bf16"),
        ({"layers": None}, "q, k and v of a layer are not joined"),
        ({"layers": (layer_of(["q4_k"] * 3 + ["q5_k", "q4_k"]),)}, "gate and up have different formats"),
        ({"split": True}, "devices that share weights must add their parts"),
        ({"rows": 16}, "integers of 16 rows of 12288 activations leave no room"),
        ({"folded": True}, "blocks do not rotate 4096 inputs of q6_k, rows: 1"),
        ({"folded": True, "layers": Q1_LAYERS}, "blocks do not rotate 4096 inputs of q1_0, rows: 1"),
        ({"folded": True, "post_norms": True}, "which blocks that rotate activations do not have"),
        ({"platform": "sm_75"}, "compute capability 8.0 or newer"),
    ],
)
def test_products_between_attentions_that_do_not_fit_one_launch_are_refused(change, reason, monkeypatch):
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    assert choose(dataclasses.replace(KQ_STEP, rows=2, plain=False)) == "layer_products"
    problem = dataclasses.replace(KQ_STEP, **change)
    all_1_bit = problem.layers is Q1_LAYERS
    assert choose(problem) == ("launches" if problem.rows < 9 else "layer_gemms") or all_1_bit
    with pytest.raises(NotImplementedError, match=f"schedule='layer_products' cannot run .*{reason}"):
        choose(problem, impl="layer_products")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"bits": 16}, "products round for each other to 8 bits; 16 bits were asked for"),
        ({"experts": (8, 2)}, "is for layers without experts"),
        ({"layers": Q1_LAYERS}, "not all layers' weights have 2 to 8 bits: q1_0"),
        ({"layers": (layer_of(["q4_k"] * 3 + ["q5_k", "q4_k"]),)}, "gate and up have different formats"),
        ({"ffn": 12296}, "feed-forward is 12296 wide, no multiple of 16"),
        ({"ffn": 28672}, "integers of 28672 activations, rows: 5, leave no room for weights"),
        ({"plain": False}, "the kernel has plain attention, without gates"),
        ({"platform": "sm_75"}, "compute capability 8.0 or newer"),
    ],
)
def test_layers_that_int_launches_cannot_run_are_refused(change, reason, monkeypatch):
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    problem = dataclasses.replace(KQ_STEP, rows=5)
    assert choose(problem) == "int_launches"
    with pytest.raises(NotImplementedError, match=f"schedule='int_launches' cannot run .*{reason}"):
        choose(dataclasses.replace(problem, **change), impl="int_launches")


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layers": (layer_of(["q4_k"] * 3 + ["q5_k", "q4_k"]),)}, "gate and up have different formats"),
        ({"rows": 5}, "with weights of 2 to 8 bits it is for 4 rows at most; 5 were asked for"),
        ({"attention": dataclasses.replace(STEP.attention, window=512)}, "the kernel knows no window"),
        ({"attention": dataclasses.replace(STEP.attention, rotated=32)}, "turns multiples of 64"),
        ({"plain": False}, "the kernel has plain attention, without gates, and weights that are not folded"),
        ({"post_norms": True}, "what attention or the feed-forward adds is normed first"),
        ({"split": True}, "devices that share weights must add their parts"),
        ({"platform": "sm_75"}, "compute capability 8.0 or newer"),
    ],
)
def test_layers_of_integers_that_do_not_fit_one_launch_are_refused(change, reason, monkeypatch):
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    assert choose(KQ_STEP) == "one_launch"
    problem = dataclasses.replace(KQ_STEP, **change)
    assert choose(problem) != "one_launch"
    with pytest.raises(NotImplementedError, match=f"schedule='one_launch' cannot run .*{reason}"):
        choose(problem, impl="one_launch")


def test_layers_of_integers_whose_widths_are_no_multiples_of_256_are_one_launch(monkeypatch):
    """SmolLM2's."""
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    layer = tuple((("q4_1", n),) for n in (960, 576, 1536, 1536, 576))
    attention = dataclasses.replace(STEP.attention, heads=9, kv_heads=3, head_dim=64)
    problem = dataclasses.replace(STEP, hidden=576, ffn=1536, layers=(layer,) * 30, attention=attention)
    assert selection.schedules(problem)[0] == (4, "one_launch")


@pytest.mark.parametrize("sizes", [(2560, 9728, (32, 8, 128)), (4096, 12288, (32, 8, 128))], ids=["4B", "8B"])
def test_no_block_has_something_to_do_in_some_layers_alone(sizes, monkeypatch):
    """It would run ahead to a layer whose words have the tag of an earlier one's: 4B in Q4_K_M hung so."""
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    hidden, ffn, heads = sizes
    whole, mixed = layer_of(["q4_k"] * 5, hidden, ffn), layer_of(["q4_k"] * 4 + ["q6_k"], hidden, ffn)
    layers = ((("q4_k", 6144),), *whole[1:]), ((("q4_k", 5120), ("q6_k", 1024)), *mixed[1:])
    phases = int_layers_plan.phases_of(hidden, ffn, heads, layers)
    products = int_layers_plan.plan(
        phases, 1, int_layers_plan.attention_of(1, *heads).scratch, 8, 0.0
    ).products
    blocks = [[sum(part.blocks for part in p.plan.parts) for p in each] for each in products]
    assert max(map(max, blocks)) <= max(map(min, blocks))


MOE_STEP = dataclasses.replace(
    STEP,
    hidden=2048,
    ffn=768,
    experts=(128, 8),
    attention=dataclasses.replace(STEP.attention, kv_heads=4),
    layers=((((("q4_k", 4608), ("q6_k", 512)), *layer_of(["q4_k"] * 4 + ["q6_k"], 2048, 768)[1:]),) * 2),
)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": 9}, "with experts it is for 8 rows at most; 9 were asked for"),
        ({"rows": 8, "experts": (128, 17)}, "rows: 8, with 17 experts each, need more than 132 blocks"),
        ({"layers": None}, "q, k and v of a layer are not joined"),
        ({"layers": (layer_of(["q4_k"] * 3 + ["q5_k", "q4_k"], 2048, 768),)}, "gate and up, or those of"),
        ({"split": True}, "devices that share weights must add their parts"),
        ({"ffn": 704}, "feed-forward is 704 wide, no multiple of 256"),
        ({"experts": (256, 100)}, "100 experts of 768 activations, rows: 1, leave no room"),
        ({"hidden": 16384}, "hidden is 16384 wide; the router has room for 8192"),
        ({"platform": "sm_75"}, "compute capability 8.0 or newer"),
        ({"folded": True}, "plain attention, without gates, and weights that are not folded"),
        ({"plain": False}, "plain attention, without gates, and weights that are not folded"),
        ({"attention": dataclasses.replace(MOE_STEP.attention, rotated=0)}, "keys are not rotated"),
        (
            {"attention": dataclasses.replace(MOE_STEP.attention, rotated=32)},
            "rope turns 32 values of a head",
        ),
    ],
)
def test_layers_with_experts_that_do_not_fit_one_launch_are_refused(change, reason, monkeypatch):
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    assert choose(MOE_STEP) == choose(dataclasses.replace(MOE_STEP, rows=8)) == "one_launch"
    problem = dataclasses.replace(MOE_STEP, **change)
    assert choose(problem) == "launches"
    with pytest.raises(NotImplementedError, match=f"schedule='one_launch' cannot run .*{reason}"):
        choose(problem, impl="one_launch")
    without = dataclasses.replace(MOE_STEP, experts=None, rows=2, plain=False)
    assert choose(without) == "layer_products"
    with pytest.raises(NotImplementedError, match="is for layers without experts"):
        choose(MOE_STEP, impl="layer_products")


@pytest.mark.parametrize("multiprocessors", [132, 114, 78])
def test_one_row_s_o_and_down_have_the_same_outputs_in_the_same_blocks(multiprocessors, monkeypatch):
    """So that x stays where it is: experts_layers sends it to other blocks with several rows alone."""
    gpu = dataclasses.replace(device.GPUS["sm_90"], multiprocessors=multiprocessors)
    monkeypatch.setattr(device, "default", lambda: gpu)
    heads, experts = (32, 4, 128), experts_plan.Experts(128, 8, True)
    phases = int_layers_plan.phases_of(2048, 768, heads, MOE_STEP.layers)
    scratch = int_layers_plan.attention_of(1, *heads).scratch
    products = experts_plan.plan(phases, 1, experts, scratch, 8, 0.0).products
    each = [p.plan.parts for number in (int_layers_plan.OUT, int_layers_plan.DOWN) for p in products[number]]
    assert len({tuple((part.first_block, part.tiles, part.blocks) for part in parts) for parts in each}) == 1


def test_products_of_layers_with_norms_after_their_halves_fit_one_launch(monkeypatch):
    """Which no other has. Of a wide stream a block has room for one row."""
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    normed = dataclasses.replace(KQ_STEP, post_norms=True, plain=False)
    assert selection.schedules(normed) == ((2, "layer_products"),)
    wide = dataclasses.replace(normed, hidden=9216, layers=(layer_of(["q4_k"] * 5, 9216),), widths=(4096,))
    assert [choose(dataclasses.replace(wide, rows=rows)) for rows in (1, 2)] == ["layer_products", "launches"]
    with pytest.raises(NotImplementedError, match="2 rows of 12288 activations and 2 of the residual stream"):
        choose(dataclasses.replace(wide, rows=2), impl="layer_products")


def test_an_rtx_has_room_for_the_products_of_one_row_of_an_8b(monkeypatch):
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_89"])
    of_rows = [choose(dataclasses.replace(KQ_STEP, platform="sm_89", rows=rows)) for rows in (1, 2)]
    assert of_rows == ["layer_products", "launches"]
    with pytest.raises(NotImplementedError, match="integers of 12288 activations, rows: 1, leave no room"):
        choose(dataclasses.replace(KQ_STEP, platform="sm_89"), impl="one_launch")


def test_naming_what_cannot_run_is_an_error_with_the_reason():
    problem = Matmul("sm_90", "f32", 8, 8)
    assert all(v.reason for v in explain(problem))
    refused = (
        "impl='pallas' cannot run matmul f32 8 x 8 on sm_90: .*no kernel for matmul of f32.* by impl=.auto.$"
    )
    with pytest.raises(NotImplementedError, match=refused):
        choose(problem, impl="pallas")
    assert set(kernels("q1_0", "sm_90").values()) != {"reference"}
    assert products(Matmul("sm_90", "q1_0", 64, 256), "reference").kernels == ((None, "reference"),)


@pytest.mark.parametrize(
    ("format", "platform", "how"),
    [
        ("q4_k", "sm_80", "a kernel dequantizes a layer's matrix to float16"),
        ("q1_0", "sm_80", "XLA dequantizes a layer's matrix to float16"),
        ("f16", "sm_90", "float16 weights as they are"),
    ],
)
def test_it_is_explained_how_cublas_gets_at_the_weights(format, platform, how):
    (taken,) = (v for v in explain(Matmul(platform, format, 4096, 4096), rows=64) if v.taken)
    assert (taken.kernel, taken.reason) == ("cublas", f"{selection.FIRST}: {how}")


def test_the_table_names_every_candidate():
    """That of docs/kernels.md, with a kernel at the beginning of the last column: but for a step's
    fallback."""
    names = {c.name for op in get_args(selection.Problem) for c in selection.candidates(op)}
    page = (Path(__file__).parents[2] / "docs" / "kernels.md").read_text()
    table = re.findall(r"^\|.* \| `(\w+)`[^|]*\|$", page, re.MULTILINE)
    assert {*table} == names - {"launches"}


@pytest.mark.parametrize("op", [op for op in get_args(selection.Problem) if op.CALL])
def test_candidates_are_called_with_what_their_problem_lists(op):
    for candidate in selection.candidates(op):
        if candidate.name == "triton":
            continue  # needs its extra: test_triton.py
        assert isinstance(candidate.run, str)
        run = getattr(candidate.module, candidate.run.partition(":")[2])
        assert all(callable(getattr(candidate.module, name)) for name in candidate.offers)
        if not candidate.fused:
            selection._check_call(candidate.name, "run", run, op.CALL)


@pytest.fixture
def register():
    """selection.register, undone."""
    made = []

    def register(candidate, **rest):
        selection.register(candidate, **rest)
        made.append(candidate)

    yield register
    for candidate in made:
        selection.unregister(candidate)


def run_matmul(x, weights, part_layer, layer, gamma, eps, residual, activation):
    return jnp.full((*x.shape[:-1], weights[0].shape[0]), 7.0)


MINE = selection.Candidate("mine", Matmul, lambda problem: None, run_matmul, rows=(2, 4), pallas=False)


def test_a_registered_candidate_is_explained_chosen_and_called(register):
    w, x = quantize(jnp.ones((16, 256)), "q8_0"), jnp.ones((3, 256))
    register(MINE, before="cpu")
    verdicts = explain(Matmul("cpu", "q8_0", 16, 256), rows=3)
    assert [v.kernel for v in verdicts][-3:] == ["mine", "cpu", "reference"]
    assert [v.kernel for v in verdicts if v.taken] == ["mine"]
    assert explain(Matmul("cpu", "q8_0", 16, 256))[-3].reason == "is for 2 to 4 rows"
    chosen = for_device(w)
    assert [chosen.products.kernel(rows) == "mine" for rows in (1, 2, 4, 5)] == [False, True, True, False]
    assert not chosen.tiled and (matmul(x, chosen) == 7).all() and (matmul(x[0], chosen) != 7).all()
    assert "mine for 2 to 4 rows" in str(chosen.products)


def test_a_registered_candidate_attends(register):
    def attends(
        q, k_pages, v_pages, block_table, positions, layer, *, num_keys, window, scale, softcap, sinks
    ):  # fmt: skip
        return jnp.full(q.shape, 2.0) * (scale or 1.0)

    refuses = lambda problem: None if problem.head_dim == 80 else "is for heads of 80"  # noqa: E731
    register(selection.Candidate("mine", Attention, refuses, attends, pallas=False))
    assert choose(Attention("sm_90", "decode", 8, 4, 80, 16, "bfloat16")) == "mine"
    assert choose(Attention("sm_90", "decode", 8, 4, 96, 16, "bfloat16")) == "reference"
    pages = jnp.zeros((1, 2, 16, 1, 8))
    positions, turned = jnp.zeros((1, 1), jnp.int32), (jnp.ones((1, 1, 4)), jnp.zeros((1, 1, 4)))
    out, *_ = attend(
        jnp.ones((1, 1, 32)), pages, pages, jnp.zeros((1, 1), jnp.int32), positions, 0, rotation=turned,
        interleaved=False, norms=(None, None), eps=1e-6, num_keys=1, impl="mine", scale=3.0,
    )  # fmt: skip
    assert out.shape == (1, 1, 16) and (out == 6).all()


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"op": Step}, "'mine': op is .*Step'>; it must be one of Matmul, Attention, Sampling, DeltaNet"),
        ({"op": "matmul"}, "op is 'matmul'; it must be one of"),
        ({"name": "cublas"}, "'cublas': Matmul has one of that name"),
        ({"rows": (4, 2)}, r"rows are \(4, 2\)"),
        ({"run": lambda x, weights: x}, "run must be a function of .x, weights, part_layer.*too many posi"),
        ({"refuses": lambda: None}, "refuses must be a function of .problem."),
        ({"offers": ("rotates",)}, "fused and offers are for our own"),
    ],
)
def test_what_cannot_be_a_candidate_is_an_error_with_the_reason(change, error):
    before = selection.candidates(Matmul)
    with pytest.raises(ValueError, match=error):
        selection.register(dataclasses.replace(MINE, **change))
    with pytest.raises(ValueError, match="Matmul has no candidate 'theirs'; it has bit_decode_ring, "):
        selection.register(MINE, before="theirs")
    with pytest.raises(ValueError, match="candidate 'mine' is not registered"):
        selection.unregister(MINE)
    assert selection.candidates(Matmul) == before


def test_each_number_of_rows_of_a_step_has_a_schedule(monkeypatch):
    monkeypatch.setattr(device, "default", lambda: device.GPUS["sm_90"])
    assert selection.schedules(STEP) == ((24, "one_launch"), (256, "layer_gemms"))
    others = (8, "int_launches"), (256, "layer_gemms")
    assert selection.schedules(KQ_STEP) == ((4, "one_launch"), *others)
    in_16_bits = dataclasses.replace(KQ_STEP, bits=16)
    assert selection.schedules(in_16_bits) == ((4, "one_launch"),)
    assert selection.schedules(KQ_STEP, "int_launches") == ((4, "launches"), (8, "int_launches"))
    mixed = dataclasses.replace(KQ_STEP, plain=False)
    assert selection.schedules(mixed) == ((2, "layer_products"), (8, "launches"), (256, "layer_gemms"))
    mixed = dataclasses.replace(STEP, plain=False)  # 1 bit
    assert selection.schedules(mixed) == ((1, "launches"), (2, "layer_products"), (256, "layer_gemms"))
    assert selection.schedules(dataclasses.replace(mixed, folded=True)) == ()
    assert selection.schedules(STEP, "launches") == ()
    assert selection.schedules(STEP, "layer_gemms") == ((8, "launches"), (256, "layer_gemms"))
    two_rows = (1, "launches"), (2, "layer_products")  # of 1 bit
    assert selection.schedules(STEP, "layer_products") == two_rows
    assert selection.schedules(dataclasses.replace(STEP, plain=False))[:2] == two_rows
    with pytest.raises(NotImplementedError, match=r"schedule='one_launch' cannot run .*bulk copies"):
        selection.schedules(dataclasses.replace(STEP, platform="sm_80"), "one_launch")
