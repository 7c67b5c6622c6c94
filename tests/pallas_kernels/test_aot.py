"""Kernels compile for GPUs of every kind, and ptxas spills no register of those that run often."""

import functools
import os
import re

import jax.numpy as jnp
import pytest

from pallas_kernels import GELU, GELU_TANH, cache_layouts, formats
from pallas_kernels.attention.prefill_sm80 import mma_attention
from pallas_kernels.attention.prefill_sm90 import prefill_attention, prefill_part
from pallas_kernels.attention.scores import Scores
from pallas_kernels.experts.choice import Rules
from pallas_kernels.matmul.bit_mma.activations import ROTATED_INTEGERS, activations_int8
from pallas_kernels.matmul.int_mma.activations_float16 import activations_float16, rotated_form
from pallas_kernels.matmul.int_mma.activations_shared import ROTATED_WORDS
from tests.pallas_kernels.aot import OTHERS, TARGETS, as_on_a_gpu, compile_for_gpu, for_target
from tests.pallas_kernels.aot_kernels import (
    attention,
    choice_of_experts,
    choosing_experts,
    delta_chunks,
    delta_inputs,
    delta_step,
    dequantized,
    experts,
    experts_of_prefill,
    heads_of_prompts,
    integers,
    latent,
    logits_of_router,
    many_queries,
    many_rows,
    many_rows_of_integers,
    masks_of_the_host,
    of_rows,
    one_launch,
    one_launch_of_experts,
    one_launch_of_integers,
    product,
    products_between,
    rotated,
    seen_pages,
    token,
)  # fmt: skip

pytestmark = pytest.mark.aot


def test_a_process_that_dies_fails_its_own_test_with_what_it_said(compilers):
    """As LLVM ends one."""
    target = "none"
    with pytest.raises(pytest.fail.Exception, match="for none died:\nLLVM ERROR"):
        compilers.printed(target, os.system, "echo LLVM ERROR; kill -ABRT $PPID")
    assert compilers.printed(target, os.system, "echo alive") == "alive\n"


MIXED = ("q4_k", "q4_k", "q6_k", [("q4_k", 5120), ("q6_k", 1024)])
# One format of each layout.
LAYOUTS = list({formats.get(name).LANES: name for name in reversed(formats.names("int"))}.values())
GEMMA_2, GEMMA_3 = Scores(4096, 144**-0.5, 50.0), Scores(1024)  # 27B's, and 4B's
GPT_OSS = {"scores": Scores(128), "sinks": True}
HOT = {
    **{f"{format} down": functools.partial(integers, format, 4096, 12288, 1, 1) for format in LAYOUTS},
    "many queries of windows, by mma": lambda: many_queries(mma_attention, 32, 16, 128, 2048, scores=GEMMA_2),
    "many queries with sinks, by mma": lambda: many_queries(mma_attention, 64, 8, 64, 2048, **GPT_OSS),
    "many queries, by mma": lambda: many_queries(mma_attention, 32, 8, 128, 2048),
    "many queries of 64, by mma": lambda: many_queries(mma_attention, 14, 2, 64, 2048),
    "q4_k gate and up": lambda: integers("q4_k", 12288, 4096, 2, 1),
    "q4_k gate and up, GELU by tanh": lambda: integers("q4_k", 12288, 4096, 2, 1, activation=GELU_TANH),
    "q4_k gate and up, 8 rows": lambda: integers("q4_k", 12288, 4096, 2, 8),
    "q4_k down, 16 bits": lambda: integers("q4_k", 4096, 12288, 1, 1, 16),
    "q6_k output matrix, 8 rows": lambda: integers("q6_k", 151669, 4096, 1, 8),
    "pq2_0 gate and up": lambda: integers("pq2_0", 12288, 4096, 2, 1),
    "pq2_0 gate and up, 8 rows": lambda: integers("pq2_0", 12288, 4096, 2, 8),
    "pq2_0 down, 16 bits": lambda: integers("pq2_0", 4096, 12288, 1, 1, 16),
    "pq2_0 o, 8 rows": lambda: integers("pq2_0", 4096, 4096, 1, 8),
    "q2_0_g64 o, 4 rows": lambda: integers("q2_0_g64", 4096, 4096, 1, 4),
    "tq1_0 down": lambda: integers("tq1_0", 4096, 12288, 1, 1),
    "decoded: q4_k gate and up": lambda: dequantized(("q4_k", "q4_k"), 12288, 4096),
    "choice of 8 of 256 experts": lambda: choice_of_experts(256, 8, 8),
    "choice of 8 of 256 experts in groups": lambda: choice_of_experts(
        256, 8, 4, Rules("sigmoid", 2.5, 8, 4), biased=True, with_shared=True
    ),
    "router of 256 experts": lambda: logits_of_router(256, 2048, 1),
    "router of 512 experts, 16 rows, bfloat16": lambda: logits_of_router(512, 7168, 16, jnp.bfloat16, True),
    "choice of 4 of 32 experts": lambda: choice_of_experts(32, 4, 2048),
    "experts: q4_k gate and up": lambda: experts("q4_k", 768, 2048, 2, 8, 1),
    "experts: choice, q4_k gate and up": lambda: choosing_experts("q4_k", 512, 2048, 1),
    "experts: q6_k down and a shared one": lambda: experts("q6_k", 2048, 768, 1, 9, 1, shared=True),
    "experts: q6_k down": lambda: experts("q6_k", 2048, 768, 1, 8, 1),
    "experts: q4_k gate and up, 512 tokens": lambda: experts("q4_k", 768, 2048, 2, 384, 16),
    "experts: q6_k down, 512 tokens": lambda: experts("q6_k", 2048, 768, 1, 384, 16),
    "decoded: q5_k": lambda: dequantized(("q5_k",), 4096, 12288),
    "decoded: q6_k": lambda: dequantized(("q6_k",), 4096, 12288),
    "decoded: q8_0": lambda: dequantized(("q8_0",), 4096, 12288),
    "decoded: q4_0 and q4_1, no whole tiles": lambda: dequantized(("q4_0", "q4_1"), 904, 576),
    "draw of a token, 8 rows": lambda: token(8, 151669),
    "masks of the host, 32 rows": lambda: masks_of_the_host(32, 151669),
    "norm": lambda: of_rows(activations_float16, 2048, 4096),
    "norm, 8192 wide": lambda: of_rows(activations_float16, 512, 8192),
    "folded gate and up": lambda: integers("pq2_0", 17408, 5120, 2, 1, folded=True),
    "folded down": lambda: integers("pq2_0", 5120, 17408, 1, 1, folded=True),
    "folded, heads regrouped": lambda: integers("pq2_0", 5120, 6144, 1, 1, folded=True, heads=(3, 16)),
    "folded gate and up, rounded": lambda: integers("pq2_0", 17408, 5120, 2, 8, rounded=True),
    "folded down, rounded": lambda: integers("pq2_0", 5120, 17408, 1, 2, rounded=True),
    "rotated": lambda: rotated(16, 5120),
    "rotated and rounded, few rows": lambda: rotated(8, 5120, form=ROTATED_WORDS),
    "rotated and rounded, few rows, heads regrouped": lambda: rotated(
        8, 6144, normed=False, heads=(3, 16), form=ROTATED_WORDS
    ),
    "rotated, heads regrouped": lambda: rotated(16, 6144, normed=False, heads=(3, 16)),
    "delta step": lambda: delta_step(1),
    "delta step, 32 rows": lambda: delta_step(32),  # S in shared memory
    "delta step, float16": lambda: delta_step(8, dtype=jnp.float16),
    "delta step, 32 rows, float16": lambda: delta_step(32, dtype=jnp.float16),
    "delta step of 4 tokens, float16": lambda: delta_step(1, tokens=4, dtype=jnp.float16),
    "delta step, 16 rows, gates made": lambda: delta_step(16, gates_made=True),
    "delta step of 8 tokens, not stored": lambda: delta_step(1, tokens=8, stores=False),
    "delta step of 4 tokens of 2 rows": lambda: delta_step(2, tokens=4),
    "delta step, replay of 8 tokens in 3 layers": lambda: delta_step(1, tokens=8, layers=3),
    "attention of a window": lambda: attention(32, 16, 128, False, "float16", scores=GEMMA_2),
    "attention of a window, 256 wide, int8": lambda: attention(8, 4, 256, True, "int8", scores=GEMMA_3),
    "attention with sinks": lambda: attention(64, 8, 64, False, "float16", **GPT_OSS),
    "pages of windows to float16": lambda: seen_pages("int8", window=1024),
    "attention, 256 wide": lambda: attention(24, 4, 256, True, "float16", pairs=32, gated=True),
    "gate and up": lambda: product(12288, 4096, 2, 1),
    "down": lambda: product(4096, 12288, 1, 1, bits=16),
    "down, 17408 wide": lambda: product(5120, 17408, 1, 1, layers=64, bits=16),
    "down, 17408 wide, 8 rows": lambda: product(5120, 17408, 1, 8, layers=64, bits=16),
    "gate and up, 8 rows": lambda: product(12288, 4096, 2, 8),
    "down, 8 rows": lambda: product(4096, 12288, 1, 8, bits=16),
    "out, 8 rows": lambda: product(4096, 4096, 1, 8),
    "attention": lambda: attention(32, 8, 128, True),
    "attention, 8 rows of one": lambda: attention(32, 8, 128, True, rows=8, tokens=8),
    "attention, 64 wide": lambda: attention(14, 2, 64, False),
    "latent attention": lambda: latent(20, 40),
    "latent attention, 128 heads": lambda: latent(128, 64, rows=2, layout="bfloat16", nope=128),
}
# By instructions that only Hopper has.
HOT_ON_HOPPER = {
    **{
        f"many: {format} gate and up": functools.partial(many_rows_of_integers, format, 12288, 4096, 2, 2048)
        for format in LAYOUTS
    },
    "many: gate and up": lambda: many_rows(12288, 4096, 2, 2048),
    "many: q4_k gate and up, GELU": lambda: many_rows_of_integers(
        "q4_k", 12288, 4096, 2, 2048, activation=GELU
    ),
    "many: down": lambda: many_rows(4096, 12288, 1, 2048),
    "many: out": lambda: many_rows(4096, 4096, 1, 512),
    "many: gate and up, 16 rows": lambda: many_rows(12288, 4096, 2, 16),
    "many: down, 32 rows": lambda: many_rows(4096, 12288, 1, 32),
    "many: qkv, 48 rows": lambda: many_rows(6144, 4096, 1, 48),
    "many: out, 64 rows": lambda: many_rows(4096, 4096, 1, 64),
    "many: out, 16 rows of 16 bits": lambda: many_rows(4096, 4096, 1, 16, bits=16),
    **{
        f"many: {format} in 8 bits, {name}": functools.partial(many_rows, *sizes, format=format)
        for format, name, sizes in (
            ("pq2_0", "gate and up", (12288, 4096, 2, 2048)),
            ("pq2_0", "down", (5120, 17408, 1, 2048)),
            ("pq2_0", "out, 48 rows", (4096, 4096, 1, 48)),
            ("pq2_0", "gate and up, 16 rows", (17408, 5120, 2, 16)),
            ("tq1_0", "qkv, 512 rows", (6144, 4096, 1, 512)),
            ("q2_0_g64", "down", (4096, 12288, 1, 2048)),
        )
    },
    "many: q4_k down": lambda: many_rows_of_integers("q4_k", 4096, 12288, 1, 2048),
    "many: q4_k qkv": lambda: many_rows_of_integers("q4_k", 6144, 4096, 1, 2048),
    "many: q4_k out, 512 rows": lambda: many_rows_of_integers("q4_k", 4096, 4096, 1, 512),
    "many: q6_k down": lambda: many_rows_of_integers("q6_k", 4096, 12288, 1, 2048),
    "many: q4_k gate and up, 16 rows": lambda: many_rows_of_integers("q4_k", 12288, 4096, 2, 16),
    "many: q4_k down, 64 rows": lambda: many_rows_of_integers("q4_k", 4096, 12288, 1, 64),
    "many: q6_k down, 32 rows": lambda: many_rows_of_integers("q6_k", 4096, 12288, 1, 32),
    "many: q8_0 down": lambda: many_rows_of_integers("q8_0", 4096, 12288, 1, 2048),
    "many: q5_k down": lambda: many_rows_of_integers("q5_k", 4096, 12288, 1, 2048),
    "many: q4_1 down": lambda: many_rows_of_integers("q4_1", 4096, 12288, 1, 2048),
    "rounding": lambda: of_rows(activations_float16, 2048, 12288, normed=False),
    "norm, in groups of 32": lambda: of_rows(activations_float16, 2048, 4096, group=32),
    "norm, in groups of 16": lambda: of_rows(activations_float16, 2048, 4096, group=16),
    "norm, in groups of 32, no whole 256 columns": lambda: of_rows(activations_float16, 2048, 896, group=32),
    "rounding, in groups of 32": lambda: of_rows(activations_float16, 2048, 12288, normed=False, group=32),
    "rounding, in groups of 32, 28672 wide": lambda: of_rows(
        activations_float16, 512, 28672, normed=False, group=32
    ),
    "rotated and rounded": lambda: rotated(2048, 5120, form=rotated_form(32)),
    "rotated and rounded to 8 bits": lambda: rotated(2048, 5120, form=ROTATED_INTEGERS),
    "rotated and rounded to 8 bits, 17408 wide": lambda: rotated(
        2048, 17408, normed=False, form=ROTATED_INTEGERS
    ),
    "rotated and rounded, 17408 wide": lambda: rotated(2048, 17408, normed=False, form=rotated_form(32)),
    **{
        f"output matrix, {rows} rows of {k}": functools.partial(product, 151680, k, 1, rows, layers=1)
        for rows, k in ((1, 4096), (4, 4096), (8, 4096), (3, 2560))
    },
    "many: output matrix": lambda: many_rows(151669, 4096, 1, 256),
    "many: q6_k output matrix": lambda: many_rows_of_integers("q6_k", 151669, 4096, 1, 256),
    "many: out, 16 bits": lambda: many_rows(4096, 4096, 1, 2048, bits=16),
    "codes behind a norm": lambda: of_rows(activations_int8, 2048, 4096),
    "codes behind a norm, no fours of groups": lambda: of_rows(activations_int8, 2048, 896),
    "codes": lambda: of_rows(activations_int8, 2048, 12288, normed=False),
    "codes, 16 bits, 28672 wide": lambda: of_rows(activations_int8, 512, 28672, normed=False, bits=16),
    "attention, 48 rows": lambda: attention(32, 8, 128, True, "float16", rows=48),
    "attention, 64 rows, int8": lambda: attention(32, 8, 128, True, "int8", rows=64),
    "attention, 256 rows": lambda: attention(32, 8, 128, True, "float16", rows=256),
    "attention to integers, 64 rows": lambda: attention(32, 8, 128, True, rows=64, integers=True),
    "attention to integers, 256 rows": lambda: attention(32, 8, 128, True, rows=256, integers=True),
    "attention to integers, 256 rows, int8": lambda: attention(
        32, 8, 128, True, "int8", rows=256, integers=True
    ),
    "heads of prompts, 27B": lambda: heads_of_prompts(24, 4, 256, "int8", gated=True, pairs=32),
    "heads of prompts, SmolLM2": lambda: heads_of_prompts(9, 3, 64, "bfloat16", normed=False),
    "many queries of windows": lambda: many_queries(prefill_attention, 32, 16, 128, 2048, scores=GEMMA_2),
    "many queries with sinks": lambda: many_queries(prefill_attention, 64, 8, 64, 2048, **GPT_OSS),
    "many queries of 256, windows": lambda: many_queries(prefill_attention, 8, 4, 256, 2048, scores=GEMMA_3),
    "many queries": lambda: many_queries(prefill_attention, 32, 8, 128, 2048),
    "inputs of delta chunks": lambda: delta_inputs(2048),
    "delta chunks": lambda: delta_chunks(2048),
    "delta chunks, float16": lambda: delta_chunks(2048, dtype=jnp.float16),
    "experts of 512 tokens": lambda: experts_of_prefill("q4_k", 512),
    "experts of 2048 tokens, q6_k": lambda: experts_of_prefill("q6_k", 2048),
    "experts of 8192 tokens": lambda: experts_of_prefill("q4_k", 8192),
    "many queries of GLM-4.7-Flash": lambda: many_queries(prefill_part, 20, 20, 256, 2048, "float16"),
    "many queries of DeepSeek": lambda: many_queries(prefill_part, 16, 16, 192, 2048, "float16", values=128),
    "many queries of 256": lambda: many_queries(prefill_attention, 24, 4, 256, 2048),
    # The 8B's activations leave no room for weights in 99 KB, and this is quicker than three targets.
    "products between, mixed": lambda: products_between(*MIXED),
    "products between, folded, 27B": lambda: products_between(
        *["pq2_0"] * 3, [("pq2_0", 16384)], width=6144, hidden=5120, ffn=17408, folded=True
    ),
    **{
        f"products between, 1 bit, 27B{also}": functools.partial(
            products_between, *["q1_0"] * 3, [("q1_0", 16384)], width=6144, hidden=5120, ffn=17408, **options
        )
        for also, options in (("", {}), (", 2 rows", {"rows": 2}), (", 16 bits", {"bits": 16}))
    },
    "products between, 1 bit, 8B": lambda: products_between(*["q1_0"] * 3, [("q1_0", 6144)]),
    "products between, the last": lambda: products_between(*MIXED[:3], None),
    "products between, 2 rows": lambda: products_between(*["q4_k"] * 3, [("q4_k", 6144)], rows=2),
    **{
        f"products between, norms after, {name}": functools.partial(
            products_between,
            *formats,
            hidden=3840,
            ffn=15360,
            rows=rows,
            post_norms=True,
            activation=GELU_TANH,
        )
        for name, formats, rows in (
            ("Gemma 3 12B", ("q4_k", "q4_k", "q6_k", [("q4_k", 6144), ("q6_k", 2048)]), 1),
            ("2 rows", ("q4_k", "q4_k", "q4_k", [("q4_k", 8192)]), 2),
            ("the last", ("q4_k", "q4_k", "q6_k", None), 1),
        )
    },
    "products between, 16 bits": lambda: products_between(*["q4_k"] * 3, [("q4_k", 6144)], bits=16),
    **{
        f"products between, {format}": functools.partial(products_between, *[format] * 3, [(format, 6144)])
        for format in ("q2_k", "q3_k", "iq4_xs", "q5_0")
    },
    "one launch, A3B": lambda: one_launch_of_experts(
        48, ["q6_k", "q4_k"], [[("q4_k", 4608), ("q6_k", 512)], [("q4_k", 5120)]]
    ),
    "one launch, A3B, float16": lambda: one_launch_of_experts(
        48, ["q4_k"], [[("q4_k", 5120)]], layout="float16"
    ),
    **{
        f"one launch, A3B, {rows} rows": functools.partial(
            one_launch_of_experts,
            48,
            ["q6_k", "q4_k"],
            [[("q4_k", 4608), ("q6_k", 512)], [("q4_k", 5120)]],
            rows=rows,
        )
        for rows in (2, 8)
    },
    "one launch, 8B, Q4_K_M": lambda: one_launch_of_integers(
        36, "q4_k", "q4_k", ["q6_k", "q4_k"], [[("q4_k", 5120), ("q6_k", 1024)], [("q4_k", 6144)]]
    ),
    "one launch, 8B, Q2_K": lambda: one_launch_of_integers(
        36, "q3_k", "q2_k", ["q3_k"], [[("q2_k", 5120), ("q3_k", 1024)]]
    ),
    "one launch, SmolLM2": lambda: one_launch_of_integers(
        30, *["q4_1"] * 2, ["q4_1"], [[("q4_1", 960)]], 576, 1536, (9, 3, 64)
    ),
    "one launch, 8B, Q8_0, 16 bits, int8": lambda: one_launch_of_integers(
        36, *["q8_0"] * 2, ["q8_0"], [[("q8_0", 6144)]], layout="int8", bits=16
    ),
    **{
        f"one launch, 8B, Q4_K_M, {rows} rows, {tokens} tokens each": functools.partial(
            one_launch_of_integers,
            36,
            "q4_k",
            "q4_k",
            ["q6_k", "q4_k"],
            [[("q4_k", 5120), ("q6_k", 1024)], [("q4_k", 6144)]],
            rows=rows,
            tokens=tokens,
        )
        for rows, tokens in ((2, 1), (3, 1), (4, 4))
    },
    "one launch, 8B": lambda: one_launch(36, 4096, 12288, 32, 8, 128),
    "one launch, 8B, int8": lambda: one_launch(36, 4096, 12288, 32, 8, 128, layout="int8"),
    "one launch, 8B, adapter": lambda: one_launch(36, 4096, 12288, 32, 8, 128, rank=16),
    "one launch, 8B, adapter, bfloat16": lambda: one_launch(
        36, 4096, 12288, 32, 8, 128, rank=16, dtype=jnp.bfloat16
    ),
    "one launch, 8B, adapter, rank 32": lambda: one_launch(36, 4096, 12288, 32, 8, 128, rank=32),
    "one launch, 8B, adapter, bfloat16, rank 64": lambda: one_launch(
        36, 4096, 12288, 32, 8, 128, rank=64, dtype=jnp.bfloat16
    ),
    "one launch, 4B, adapter": lambda: one_launch(36, 2560, 9728, 32, 8, 128, rank=16),
    "one launch, 1.7B, adapter": lambda: one_launch(28, 2048, 6144, 16, 8, 128, rank=16),
    "one launch, 4B": lambda: one_launch(36, 2560, 9728, 32, 8, 128),
    "one launch, 1.7B": lambda: one_launch(28, 2048, 6144, 16, 8, 128),
    **{
        f"one launch, 8B, 16 bits, {rows} rows": functools.partial(
            one_launch, 36, 4096, 12288, 32, 8, 128, rows=rows, bits=16
        )
        for rows in (1, 2, 4, 8, 12)
    },
    "one launch, 8B, 4 rows": lambda: one_launch(36, 4096, 12288, 32, 8, 128, rows=4),
    "one launch, 8B, 8 rows": lambda: one_launch(36, 4096, 12288, 32, 8, 128, rows=8),
    "one launch, 8B, 8 rows of one": lambda: one_launch(36, 4096, 12288, 32, 8, 128, rows=8, tokens=8),
    "one launch, 8B, 4 rows of one, int8": lambda: one_launch(
        36, 4096, 12288, 32, 8, 128, rows=4, layout="int8", tokens=4
    ),
    "one launch, 4B, 9 rows": lambda: one_launch(36, 2560, 9728, 32, 8, 128, rows=9),
    "one launch, 8B, 16 rows": lambda: one_launch(36, 4096, 12288, 32, 8, 128, rows=16),
    "one launch, 8B, 24 rows": lambda: one_launch(36, 4096, 12288, 32, 8, 128, rows=24),
    "one launch, 1.7B, 16 bits": lambda: one_launch(28, 2048, 6144, 16, 8, 128, bits=16),
}
for layout in cache_layouts.names():
    if layout == "bfloat16":  # above
        continue
    HOT[f"attention, {layout}"] = functools.partial(attention, 32, 8, 128, True, layout)
    HOT[f"attention, 64 wide, {layout}"] = functools.partial(attention, 14, 2, 64, False, layout)
    HOT_ON_HOPPER[f"one launch, 1.7B, {layout}"] = functools.partial(
        one_launch, 28, 2048, 6144, 16, 8, 128, layout=layout
    )
    if cache_layouts.get(layout).PREFILL is not None:
        HOT[f"heads of prompts, {layout}"] = functools.partial(heads_of_prompts, 32, 8, 128, layout)
    if cache_layouts.get(layout).PREFILL not in (layout, None):
        HOT[f"pages to float16, {layout}"] = functools.partial(seen_pages, layout)
    if layout == cache_layouts.get(layout).PREFILL:
        queries = functools.partial(
            many_queries, heads=32, kv_heads=8, head_dim=128, tokens=2048, layout=layout
        )
        HOT[f"many queries, by mma, {layout}"] = functools.partial(queries, mma_attention)
        HOT_ON_HOPPER[f"many queries, {layout}"] = functools.partial(queries, prefill_attention)
# Blocks of 128 threads, of which 4 are to be on a multiprocessor at once.
FOUR_AT_ONCE = [
    "attention, 48 rows", "attention, 64 rows, int8", "attention, 256 rows", "attention to integers, 64 rows",
    "attention to integers, 256 rows", "attention to integers, 256 rows, int8",
]  # fmt: skip
# Bytes that are known to be spilled.
SPILLED = {
    # Sums of 128 tokens twice, as integers and as float32, beside 13 more registers: once a step.
    ("many: out, 16 bits", (9, 0)): 52,
    # 8 dimensions of float32 are twice the registers.
    ("attention, float32", (9, 0)): 4,
}
OF_EACH_KIND = [
    "many queries, by mma", "q4_k gate and up", "q4_k gate and up, 8 rows", "decoded: q4_k gate and up",
    "norm", "gate and up", "gate and up, 8 rows", "attention", "experts: q4_k gate and up",
    "masks of the host, 32 rows",
]  # fmt: skip
# Every day each kernel for one target, one of each kind for every target. What is slow differs from those in
# a size, or is of a format that another kernel is compiled with, while this kernel is with another format.
SLOW = [
    "one launch, 4B", "one launch, 4B, adapter",
    "many: output matrix", "many: q4_k qkv", "many: q4_k out, 512 rows",
    *(f"many: {format} down" for format in ("q6_k", "q8_0", "q5_k", "q4_1")),
    *(f"products between, {format}" for format in ("q3_k", "iq4_xs", "q5_0")),
    "norm, 8192 wide", "rounding, in groups of 32", "codes behind a norm, no fours of groups",
    "experts of 8192 tokens",
]  # fmt: skip
KERNELS = [
    for_target(
        capability, kernel, slow=kernel in SLOW or (capability != (9, 0) and kernel not in OF_EACH_KIND)
    )
    for kernel in HOT
    for capability in TARGETS
]
KERNELS += [for_target((9, 0), kernel, slow=kernel in SLOW) for kernel in HOT_ON_HOPPER]
KERNELS += [for_target(capability, kernel) for kernel in OF_EACH_KIND for capability in OTHERS]
KERNELS += [for_target(capability, "one launch, 1.7B") for capability in [(10, 0), (12, 0)]]
KERNELS += [for_target((10, 0), "one launch, 8B"), for_target((8, 0), "products between, q2_k")]
KERNELS += [for_target((8, 0), "products between, 1 bit, 8B")]


def compile_kernel(kernel, capability):
    with as_on_a_gpu(capability):
        f, arguments = (HOT | HOT_ON_HOPPER)[kernel]()
        compile_for_gpu(f, *arguments, compute_capability=capability)


@pytest.mark.parametrize(("kernel", "capability"), KERNELS, ids=str)
def test_hot_kernels_do_not_spill(kernel, capability, compilers):
    """Registers as ptxas counts them, of an 8B step's kernels and a 0.5B one's attention; -rP prints them."""
    printed = compilers.printed(capability, compile_kernel, kernel, capability)
    registers = re.findall(r"Used (\d+) registers", printed)
    assert registers, "no ptxas on the PATH, or it printed nothing"
    stores = [int(count) for count in re.findall(r"(\d+) bytes spill stores", printed)]
    print(f"{kernel}, {capability}: {registers} registers, {stores} bytes spilled")
    assert kernel not in FOUR_AT_ONCE or max(map(int, registers)) <= 2**16 // (4 * 128)
    assert max(stores, default=0) <= SPILLED.get((kernel, capability), 0)
    assert "Registers are spilled" not in printed or (kernel, capability) in SPILLED
    assert "wgmma" not in printed  # ptxas warns where it has one wait for the other
