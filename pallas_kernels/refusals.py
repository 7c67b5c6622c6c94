"""Why a kernel cannot run a problem: for each kernel a function that gives the reason, or None where it can.

Candidates ask them (selection.py); the numbers of rows that a kernel is for stand there.
"""

import importlib
import importlib.util

from pallas_kernels import cache_layouts, device, formats
from pallas_kernels.problems import (
    Attention,
    DeltaNet,
    Experts,
    Matmul,
    Parts,
    Problem,
    Route,
    RouterLogits,
    Sampling,
    Step,
)
from pallas_kernels.tiles import TILE_COLUMNS

NEEDS_LLVM = "needs the package llvmlite: install the extra `cpu`"
NEEDS_TRITON = "needs the package jax-triton: install the extra `triton`"
NEEDS_HOPPER = "needs Hopper's tensor core instructions (compute capability 9.0)"
NORMED_FIRST = "what attention or the feed-forward adds is normed first, which the kernel does not do"
NEEDS_AMPERE = "needs an NVIDIA GPU of compute capability 8.0 or newer"


def no_reason(problem: Problem) -> None:
    """For fallbacks: never refuses."""
    return None


# Matmul


def bit_decode_ring(problem: Matmul) -> str | None:
    return _on_hopper(problem) or _bit_decode("decode_ring", problem)


def bit_decode_s8(problem: Matmul) -> str | None:
    return _bit_decode("decode_s8", problem)


def bit_decode_b1(problem: Matmul) -> str | None:
    return _family("bit", problem)


def _bit_decode(kernel: str, problem: Matmul) -> str | None:
    """With the kernel's own reasons; only GPUs need to import it."""
    if reason := _family("bit", problem):
        return reason
    module = importlib.import_module(f"pallas_kernels.matmul.bit_mma.{kernel}")
    return module.refuses(problem.n, problem.k, problem.matrices, problem.bits)


def bit_prefill_sm90(problem: Matmul) -> str | None:
    ternary = formats.is_ternary(problem.format)
    if reason := _on_hopper(problem) or _family("int" if ternary else "bit", problem):
        return reason
    if ternary and problem.bits != 8:
        return f"multiplies ternary weights by 8 bits; {problem.bits} were asked for"
    if ternary and not problem.folded:  # twice the KL of what llama.cpp rounds to, for 6 % (LOG.md)
        return "rounds inputs to 8 bits with one scale for 128 columns: accurate only where they are rotated"
    return "its tiles are 64 outputs" if -(-problem.n // 16) % 4 else None


def int_decode(problem: Matmul) -> str | None:
    return _family("int", problem)


def int_prefill_sm90(problem: Matmul) -> str | None:
    return _on_hopper(problem) or _family("int", problem)


def cublas(problem: Matmul) -> str | None:
    if not problem.platform.startswith("sm_"):
        return "needs an NVIDIA GPU: elsewhere float16 is no faster than the reference"
    return "float32 weights were asked for, and it rounds them" if problem.format == "f32" else None


def cpu_matmul(problem: Matmul) -> str | None:
    if problem.platform != "cpu":
        return "is for CPUs"
    if not hasattr(formats.get(problem.format), "CPU"):
        if problem.format == "f32":
            return "float32 weights are multiplied as fast by the reference"
        return f"no kernel for matmul of {problem.format} on CPUs in this version"
    return _needs_llvm()


def _family(family: str, problem: Matmul) -> str | None:
    if reason := _since_ampere(problem):
        return reason
    if (own := formats.family(problem.format)) is None:
        return f"no kernel for matmul of {problem.format} in this version"
    return None if own == family else f"is for tiles of {family}; those of {problem.format} are {own}"


# Experts


def grouped(problem: Experts) -> str | None:
    if reason := int_experts(problem) or _on_hopper(problem):
        return reason
    return None if problem.whole else "gate and up have different formats, or other kernels than down"


def grouped_decode(problem: Experts) -> str | None:
    if reason := grouped(problem):
        return reason
    from pallas_kernels.matmul.int_mma.decode_plan import SMALL_BLOCK_COLUMNS  # only GPUs need it

    if problem.columns <= SMALL_BLOCK_COLUMNS:
        return None
    return f"is faster up to {SMALL_BLOCK_COLUMNS} columns; an expert has {problem.columns}"


def int_experts(problem: Experts) -> str | None:
    if problem.kernel != "int_decode":
        return "is for weights that int_decode multiplies"
    return "inputs of folded weights are rotated before, tile by tile" if problem.folded else None


def router_logits(problem: RouterLogits) -> str | None:
    if reason := _since_ampere(problem) or _reference_experts(problem.kernel):
        return reason
    if problem.mixed or problem.format not in ("f32", "f16", "bf16"):
        others = " and others" * problem.mixed
        return f"the router is {problem.format}{others}; the kernel has f32, f16 or bf16 in all layers"
    from pallas_kernels.experts.router_logits import MOST_COLUMNS  # only GPUs need it

    if problem.hidden % 4 or problem.hidden > MOST_COLUMNS:
        return f"hidden is {problem.hidden} wide; the kernel has multiples of 4 up to {MOST_COLUMNS}"
    return None


def route(problem: Route) -> str | None:
    if reason := _since_ampere(problem) or _reference_experts(problem.kernel):
        return reason
    if problem.used > 32:
        return f"{problem.used} experts are used; the kernel has at most 32"
    from pallas_kernels.experts.choice import refuses_groups  # only GPUs need it

    return refuses_groups(problem.count, problem.groups)


def _reference_experts(kernel: str) -> str | None:
    return "the experts' products are the reference's" if kernel == "reference" else None


# Attention


def decode_attention(problem: Attention) -> str | None:
    if reason := _phase("decode", problem) or _attention(problem):
        return reason
    return "keys and values are another layer's; the kernel writes its own" if problem.stored else None


def prefill_attention_sm90(problem: Attention) -> str | None:
    if reason := _phase("prefill", problem) or _on_hopper(problem) or _many_queries(problem):
        return reason
    return f"pages of {problem.page_size} are no multiple of 64" if problem.page_size % 64 else None


def prefill_attention_sm80(problem: Attention) -> str | None:
    if reason := _phase("prefill", problem):
        return reason
    if problem.head_dim > 128:
        return f"head_dim is {problem.head_dim}; the kernel has 64 and 128"
    return _many_queries(problem)


def latent_decode(problem: Attention) -> str | None:
    if reason := _phase("decode", problem) or latent_gemms(problem):
        return reason
    from pallas_kernels.latent import plan  # only GPUs need it

    assert problem.values is not None
    return plan.refuses(problem.values, problem.head_dim - problem.values, problem.heads)


def latent_prefill(problem: Attention) -> str | None:
    if reason := _phase("prefill", problem) or _on_hopper(problem) or latent_gemms(problem):
        return reason
    keys, values = problem.expanded or (0, 0)
    if keys not in (64, 128, 192, 256) or values not in (64, 128, 256):
        known = "the kernel has keys of 64, 128, 192 and 256, values of 64, 128 and 256"
        return f"a head's keys are {keys} wide, its values {values}; {known}"
    return None


def latent_gemms(problem: Attention) -> str | None:
    if problem.values is None:
        return "is for latent attention, whose values are the first numbers of keys"
    if reason := _since_ampere(problem):
        return reason
    if problem.cache_dtype not in ("float16", "bfloat16"):
        return f"the cache is {problem.cache_dtype}; it multiplies float16 and bfloat16"
    return None


def triton_attention(problem: Attention) -> str | None:
    if reason := _since_ampere(problem):
        return reason
    if problem.cache_dtype not in ("float16", "bfloat16"):
        return f"the cache is {problem.cache_dtype}; the kernel reads float16 and bfloat16"
    if problem.head_dim % 8 or problem.head_dim > 256:
        return f"head_dim is {problem.head_dim}; the kernel has multiples of 8, to 256"
    return NEEDS_TRITON if importlib.util.find_spec("jax_triton") is None else None


def cpu_attention(problem: Attention) -> str | None:
    if problem.platform != "cpu":
        return "is for CPUs"
    if problem.cache_dtype not in ("float32", "float16", "bfloat16", "int8"):
        return f"the cache is {problem.cache_dtype}; the kernel reads float32, float16, bfloat16 and int8"
    if problem.head_dim % 16:
        return f"head_dim is {problem.head_dim}; the kernel has multiples of 16"
    return _needs_llvm()


def _attention(problem: Attention) -> str | None:
    if reason := _since_ampere(problem):
        return reason
    if problem.values is not None:
        return f"values are the first {problem.values} numbers of keys; the kernel has pages for each"
    known = problem.head_dim in (64, 128, 256)
    return None if known else f"head_dim is {problem.head_dim}; the kernel has 64, 128 and 256"


def _plain_scores(problem: Attention) -> str | None:
    """Why a kernel of all layers does not have this attention, or None. Windows differ from layer to layer,
    and its code is the same for all."""
    if problem.window is not None:
        return f"a query sees {problem.window} keys; the kernel knows no window"
    if problem.scale is not None:
        return f"scores are scaled by {problem.scale}; the kernel has 1 / sqrt(head_dim)"
    if problem.softcap is not None:
        return f"scores are capped at {problem.softcap}; the kernel does not bound them"
    if problem.rotated == 0:
        return "queries and keys are not rotated; the kernel rotates them in every layer"
    if problem.sinks:
        return "softmax has a sink for each query head; the kernel has none"
    return _attention(problem)


def _many_queries(problem: Attention) -> str | None:
    if reason := _attention(problem):
        return reason
    if cache_layouts.get(problem.cache_dtype).PREFILL is None:
        return f"the cache is {problem.cache_dtype}, which tensor cores do not multiply as it lies"
    return None


# Step


def one_launch(problem: Step) -> str | None:
    if problem.experts is not None:
        return _one_launch_with_experts(problem)
    if problem.layers is not None and not _others_than({"int"}, problem.layers):
        return _one_launch_of_integers(problem)
    if _older_than(problem.platform, 90):
        return "needs bulk copies to shared memory: an NVIDIA GPU of compute capability 9.0 or newer"
    if reason := _several_phases(problem):
        return reason
    if problem.layers is None or (others := _others_than({"bit"}, problem.layers)):
        others = "" if problem.layers is None else f": {others}"
        return f"not all layers' weights are Q1_0, or not all of 2 to 8 bits, joined by layer{others}"
    if reason := _plain_scores(problem.attention) or _plain(problem) or _turned(problem.attention):
        return reason
    from pallas_kernels.step.decode_layers import Shapes  # only GPUs need it

    a = problem.attention
    sizes = (problem.rows, problem.hidden, problem.ffn, a.heads, a.kv_heads, a.head_dim)
    bits = {"bits": problem.bits, "down_bits": problem.bits_of_down}
    return _in_this_share(Shapes(*sizes, blocks=device.multiprocessors(), **bits).refuses())


def _one_launch_of_integers(problem: Step) -> str | None:
    if reason := _int_layers(problem):
        return reason
    from pallas_kernels.step import int_layers_plan  # only GPUs need it

    assert problem.layers is not None
    a = problem.attention
    heads = a.heads, a.kv_heads, a.head_dim
    reason = int_layers_plan.refuses(
        problem.rows, problem.hidden, problem.ffn, heads, problem.bits, problem.layers
    )
    return _in_this_share(reason)


def _int_layers(problem: Step) -> str | None:
    """Why layers with weights of 2 to 8 bits are not one launch, whatever mixes their channels, or None."""
    if reason := _since_ampere(problem) or _several_phases(problem) or _in_tiles(problem, {"int"}):
        return reason
    if reason := _plain_scores(problem.attention) or _plain(problem):
        return reason
    if (problem.attention.rotated or 0) % 64:
        return f"rope turns {problem.attention.rotated} values of a head; the kernel turns multiples of 64"
    return None


def _one_launch_with_experts(problem: Step) -> str | None:
    if reason := _int_layers(problem) or _whole_steps(problem):
        return reason
    from pallas_kernels.step import experts_plan  # only GPUs need it

    assert problem.layers is not None and problem.experts is not None
    a, (count, used) = problem.attention, problem.experts
    reason = experts_plan.refuses(
        problem.rows, problem.hidden, problem.ffn, (a.heads, a.kv_heads, a.head_dim),
        experts_plan.Experts(count, used, True), problem.bits, problem.layers,
    )  # fmt: skip
    return _in_this_share(reason)


def layer_products(problem: Step) -> str | None:
    if reason := _since_ampere(problem) or _without_experts(problem):
        return reason
    if reason := _several_phases(problem) or _in_tiles(problem, {"bit", "int"}):
        return reason
    assert problem.layers is not None
    from pallas_kernels.step.layer_products_plan import refuses  # only GPUs need it

    bits = (problem.bits, problem.bits, problem.bits_of_down, problem.bits)  # of a launch's products
    rest = {"bits": bits, "rotated": problem.folded, "post_norms": problem.post_norms}
    alike = dict.fromkeys(zip(problem.inputs_of_o, problem.layers, (*problem.layers[1:], None), strict=True))
    reasons = (
        refuses(problem.rows, width, problem.hidden, problem.ffn, layer, following, **rest)
        for width, layer, following in alike
    )
    return _in_this_share(next(filter(None, reasons), None))


def int_launches(problem: Step) -> str | None:
    if reason := _without_experts(problem) or _int_layers(problem):
        return reason
    assert problem.layers is not None
    if problem.bits != 8:
        return f"products round for each other to 8 bits; {problem.bits} bits were asked for"
    from pallas_kernels.step.int_launches import refuses  # only GPUs need it

    a = problem.attention
    heads = a.heads, a.kv_heads, a.head_dim
    return refuses(problem.rows, problem.hidden, problem.ffn, heads, problem.layers)


def layer_gemms(problem: Step) -> str | None:
    if reason := _on_hopper(problem) or _without_experts(problem):
        return reason
    if reason := _several_phases(problem):
        return reason
    if problem.post_norms:
        return NORMED_FIRST
    if problem.folded:
        return "weights are folded, and only the kernels of 2 to 8 bits rotate inputs"
    if problem.layers is None:
        return "q, k and v of a layer are not joined, or a matrix is not stored in a kernel's tiles"
    if problem.bits != 8:
        return f"activations are rounded to 8 bits, or to float16; {problem.bits} bits were asked for"
    for _, o, gate, up, down in problem.layers:
        if gate != up:
            return "gate and up have different formats"
        if max(map(len, (o, gate, down))) > 1:
            return "a matrix is of several formats"
    pieces = {piece for layer in problem.layers for parts in layer for piece in parts}
    if any(formats.family(format) == "bit" and n % 64 for format, n in pieces):
        return "its tiles are 64 outputs"
    if not problem.plain:  # what mixes tokens has a launch of its own
        return _whole_steps(problem) if problem.rows < 9 else None
    return _plain_scores(problem.attention) or _turned(problem.attention)


def _in_this_share(reason: str | None) -> str | None:
    """Why there is no room for all blocks, with the remedy where the process has a part of the GPU."""
    gpu = device.default()
    if reason is None or gpu.whole is None:
        return reason
    return (
        f"{reason}; all blocks must run at once, and MPS gives this process {gpu.multiprocessors} of the "
        f"GPU's {gpu.whole} multiprocessors: raise its active thread percentage"
    )


def _several_phases(problem: Step) -> str | None:
    """Why not even two phases of a layer can be one launch, or None."""
    if problem.split:
        return "between a layer's phases devices that share weights must add their parts"
    if problem.unknown:
        return f"the model has {', '.join(problem.unknown)}, which the kernel was not written for"
    return None


def _plain(problem: Step) -> str | None:
    """Why a kernel with attention of its own does not have this kind of layers, or None."""
    if problem.post_norms:
        return NORMED_FIRST
    if not problem.plain or problem.folded:
        return "the kernel has plain attention, without gates, and weights that are not folded"
    return None


def _without_experts(problem: Step) -> str | None:
    return None if problem.experts is None else "is for layers without experts"


def _turned(problem: Attention) -> str | None:
    if problem.rotated is not None:
        return f"rope turns {problem.rotated} values of a head; the kernel turns all"
    return None


def _in_tiles(problem: Step, families: set[str]) -> str | None:
    """Why not all products are of formats of these families, or None."""
    if problem.layers is None:
        return "q, k and v of a layer are not joined, or a matrix is not stored in a kernel's tiles"
    if others := _others_than(families, problem.layers):
        return f"not all layers' weights have {1 if 'bit' in families else 2} to 8 bits: {others}"
    return None


def _whole_steps(problem: Step) -> str | None:
    """Why not all products have whole steps of columns, or None."""
    sizes = [("hidden", problem.hidden), ("feed-forward", problem.ffn)]
    for what, size in (*sizes, *(("q", width) for width in problem.inputs_of_o)):
        if size % TILE_COLUMNS:
            return f"{what} is {size} wide, no multiple of {TILE_COLUMNS}"
    return None


def _others_than(families: set[str], layers: tuple[tuple[Parts, ...], ...]) -> str:
    """Formats of other families."""
    stored = {format for layer in layers for parts in layer for format, _ in parts}
    return ", ".join(sorted(format for format in stored if formats.family(format) not in families))


# DeltaNet and Sampling


def delta_step(problem: DeltaNet) -> str | None:
    return _phase("decode", problem) or _delta(problem)


def delta_chunks(problem: DeltaNet) -> str | None:
    if reason := _phase("prefill", problem) or _delta(problem):
        return reason
    from pallas_kernels.delta import chunks  # only GPUs need it

    room, needed = device.shared_bytes(), chunks.shared_bytes(problem.k_dim)
    return f"a block needs {needed} bytes of shared memory, of {room}" if needed > room else None


def _delta(problem: DeltaNet) -> str | None:
    if reason := _since_ampere(problem):
        return reason
    if not {problem.k_dim, problem.v_dim} <= {64, 128}:
        return f"heads are {problem.k_dim} and {problem.v_dim} wide; the kernel has 64 and 128"
    return f"the convolution sees {problem.conv} tokens; the kernel has 4" if problem.conv != 4 else None


def two_launches(problem: Sampling) -> str | None:
    return _since_ampere(problem)


def cpu_sampling(problem: Sampling) -> str | None:
    return "is for CPUs" if problem.platform != "cpu" else _needs_llvm()


# Several ops


def _older_than(platform: str, capability: int) -> bool:
    return not platform.startswith("sm_") or int(platform[3:]) < capability


def _since_ampere(problem: Problem) -> str | None:
    return NEEDS_AMPERE if _older_than(problem.platform, 80) else None


def _on_hopper(problem: Problem) -> str | None:
    return None if problem.platform == "sm_90" else NEEDS_HOPPER


def _phase(phase: str, problem: Attention | DeltaNet) -> str | None:
    return None if problem.phase == phase else f"is for {phase}"


def _needs_llvm() -> str | None:
    return NEEDS_LLVM if importlib.util.find_spec("llvmlite") is None else None
