"""Decode steps and prefill of whole models compile, in place and without a second copy of anything large."""

import dataclasses
import functools
import re
from unittest import mock

import jax
import jax.numpy as jnp
import pytest

import bonsai_jax as bj
from bonsai_jax.adapters import making
from bonsai_jax.decoding import proposers, speculation
from bonsai_jax.decoding import steps as core
from bonsai_jax.decoding.proposers import mtp
from bonsai_jax.decoding.state import Hidden
from bonsai_jax.engine import calls, split_rows
from bonsai_jax.engine import rows as on_device
from bonsai_jax.network import decoder, draft, draft_model
from bonsai_jax.research import reading, score
from bonsai_jax.weights import memory
from checkpoints import synth
from pallas_kernels.attention import prefill_sm90
from pallas_kernels.gpu import kernels_first
from tests.pallas_kernels.aot import (
    OTHERS,
    TARGETS,
    as_on_a_gpu,
    compile_for_gpu,
    for_target,
    lower_for_gpu,
    shapes,
)

pytestmark = pytest.mark.aot


# Whole models for the oldest and the newest every day: of the kernels one of each kind is compiled for all.
NOT_HOPPER = [
    for_target(target, slow=target not in [(8, 0), (12, 0)])
    for target in TARGETS + OTHERS
    if target != (9, 0)
]


def check_decode(source, capability, cache_dtype="bfloat16", rank=0):
    """The decode loop compiles, its cache is aliased, and no copy of the cache is among its temporaries. With
    a rank: beside two adapters, of which it copies none."""
    with as_on_a_gpu(capability):
        params, state, config = shapes(source, cache_dtype=cache_dtype)
    if rank:
        lora = lambda: bj.lora(config, rank, key=jax.random.key(0))  # noqa: E731
        adapter = jax.eval_shape(lambda: making.stacked([lora(), lora()]))
        params = params.replace(adapter=adapter.replace(chosen=jax.ShapeDtypeStruct((1,), jnp.int32)))
    assert params.layers["mlp"][0].down.parts[0].tiled and state.cache.states["attention"][0].impl == "decode"
    step = functools.partial(core.decode, config=config, size=8)
    with as_on_a_gpu(capability):  # an adapter's schedule is known when the step is traced
        compiled = compile_for_gpu(
            lambda params, state: step(params, state, limit=8),
            params,
            state,
            compute_capability=capability,
            donate_argnums=1,
        )
    cache_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(state.cache.states["attention"]))
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= cache_bytes
    assert memory.temp_size_in_bytes < cache_bytes
    if rank:
        assert "decode_layers" in compiled.as_text() and memory.temp_size_in_bytes < 2e6


def with_draft_model(pair, source, rows=1, **sizes):
    """What `shapes` makes of a model, with that of a draft model in it."""
    params, state, config = pair
    own, drafts, own_config = shapes(source, rows=rows, **sizes)
    started = jax.eval_shape(lambda: speculation.start(rows, state.cache.capacity, "draft_model"))
    states = draft_model.DraftModelState(dict(drafts.cache.states))
    state = state.replace(speculation=started.replace(draft=states))
    return params.replace(draft_model=own), state, dataclasses.replace(config, draft_model=own_config)


# Q1_0 with a cache of bfloat16: an engine's dispatch below, and other GPUs.
@pytest.mark.parametrize(
    ("source", "cache_dtype"),
    [
        *(("synth:tiny-llama:q4_k_m", "bfloat16"), ("synth:tiny-qwen3:q1_0", "int8")),
        ("synth:tiny-gemma3:q4_k_m", "bfloat16"),
        pytest.param("synth:tiny-olmo3:q4_k_m", "bfloat16", marks=pytest.mark.slow),
        pytest.param("synth:tiny-qwen3:q1_0", "bfloat16", marks=pytest.mark.slow),
        pytest.param("synth:tiny-qwen2:q8_0", "bfloat16", marks=pytest.mark.slow),
    ],
)
def test_decode_compiles_with_its_cache_aliased(source, cache_dtype):
    check_decode(source, (9, 0), cache_dtype)


def test_decode_with_adapters_copies_none_of_them():
    check_decode("synth:bonsai-8b:q1_0", (9, 0), rank=16)


@pytest.mark.parametrize("draft", [None, "synth:tiny-qwen3:q8_0", "synth:tiny-qwen3:q1_0"])
def test_a_dispatch_of_an_engine_is_one_graph_with_its_loop_in_it(draft, tmp_path, monkeypatch):
    """So nothing in it waits for the host. With a draft model that could pay its loops are in it, too, as is
    that over layers where it reads the tokens of many steps together."""
    monkeypatch.setattr(proposers.get("draft_model"), "time", lambda params, config: 0.2)
    rows = 2
    with as_on_a_gpu((9, 0)):
        params, pool, config = shapes("synth:tiny-qwen3:q1_0", rows=rows, context=256)
        if draft is not None:
            params, pool, config = with_draft_model((params, pool, config), draft, rows=rows, context=256)
        columns = jax.ShapeDtypeStruct((rows, 2 + pool.cache.block_table.shape[1]), jnp.int32)
        compile_for_gpu(
            lambda params, pool, columns: on_device.decode(params, pool, columns, config, size=64),
            params,
            pool,
            columns,
            donate_argnums=1,
            compiler_options=calls.LOOP_IN_GRAPH | {"xla_dump_to": str(tmp_path)},
        )
    (file,) = tmp_path.glob("*.thunk_sequence_after_thunk_passes.txt")
    on_host = re.findall(r"^\d+: (\w+)", file.read_text(), re.MULTILINE)
    assert on_host == ["kCommandBuffer"]


@pytest.mark.parametrize("rows", [1, 8])
def test_split_steps_compile_in_place(rows):
    """Draws with masks and the reading of new tokens; a kernel gets a mask, or what it needs to wait for one,
    in arrays of its own."""
    with as_on_a_gpu((9, 0)):
        params, pool, config = shapes("synth:tiny-qwen3:q1_0", rows=16, context=256)
    vectors = jax.ShapeDtypeStruct((16, config.hidden), jnp.float32)
    pool = pool.replace(hidden=Hidden(vectors, jax.ShapeDtypeStruct((16,), bool)))
    pages, words = pool.cache.block_table.shape[1], split_rows.mask_words(config.vocab_size)
    cache_bytes = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(pool.cache.states["attention"]))
    for function, width in (
        (split_rows.draw, 1 + words),
        (split_rows.draw_from_mailbox, 4),
        (split_rows.read_newest, 2 + pages),
    ):
        columns = jax.ShapeDtypeStruct((rows, width), jnp.int32)
        f = functools.partial(function, config=config)
        with as_on_a_gpu((9, 0)):
            compiled = compile_for_gpu(f, params, pool, columns, donate_argnums=1)
        assert compiled.memory_analysis().alias_size_in_bytes >= cache_bytes
        if function is not split_rows.read_newest:  # whose layers are a loop
            before, entry = compiled.as_text().split("ENTRY")
            assert "mosaic_gpu" in entry and "mosaic_gpu" not in before


def test_a_kernel_gets_arrays_of_its_own_from_what_an_engine_sends():
    """Of one row the block table is a slice of `columns`, which XLA would hand on as an address within them,
    by a call inside a fusion, and Mosaic takes multiples of 256 bytes only: prompts of 64 pages failed."""
    with as_on_a_gpu((9, 0)):
        _, pool, config = shapes("synth:tiny-qwen3:q1_0", context=4096)
        layout = on_device.layout(pool, tokens := 64, chained=False)

        def read(columns, q, cache):
            chunk = on_device.unpacked(columns, layout)
            positions = chunk["first"][:, None] + jnp.arange(tokens)
            (keys,) = cache.states["attention"]
            return prefill_sm90.prefill_attention(q, keys.k, keys.v, chunk["table"], positions, 0)

        columns = jax.ShapeDtypeStruct((1, layout.itemsize // 4), jnp.int32)
        heads = config.attention.num_heads, config.attention.head_dim
        q = jax.ShapeDtypeStruct((1, tokens, *heads), jnp.bfloat16)
        text = compile_for_gpu(read, columns, q, pool.cache).as_text()
    (call,) = re.findall(r"custom-call\((.*)\), custom_call_target=\"mosaic_gpu", text.split("ENTRY")[1])
    assert "slice" in call  # a copy


# Q4_K_M has layers of Q4_K alone. 13 rows are no whole eights.
@pytest.mark.parametrize(
    ("format", "rows", "most", "mixed"),
    [
        ("q1_0", 64, 8, 0),
        pytest.param("q4_k", 64, 9, 0, marks=pytest.mark.slow),
        ("q4_k_m", 64, 9, 1),
        ("q4_k_m", 13, 9, 1),
        ("q4_k_m", 5, 5, 0),
    ],
)
def test_a_layer_of_a_step_of_many_rows_is_a_few_launches_and_nothing_between(format, rows, most, mixed):
    """K-quants' activations have one scale a row, which no block of attention knows; v of another format,
    which one of the layers has, is a launch more. What is left to add is the last layer's, once. A few rows
    of K-quants are rounded by what makes them."""
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes(f"synth:tiny-qwen3:{format}", rows=rows, context=256)
        assert params.step.schedule(rows) == ("int_launches" if rows < 9 else "layer_gemms")
        step = functools.partial(core.read, config=config)
        tokens, ones = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((rows, 1), (rows,)))
        compiled = compile_for_gpu(step, params, state.cache, tokens, ones, donate_argnums=1)
    text = compiled.as_text()
    assert text.count('custom_call_target="mosaic_gpu') == most * config.num_layers + mixed
    entry = text.split("ENTRY")[1]
    assert "pad_fusion" not in entry
    assert len(re.findall(r"%\S*add_fusion\S* = ", entry)) == (rows >= 9) < config.num_layers


def speculative_step(source, tokens):
    """Two compiled steps, and the state of the first: one reads several tokens of a sequence, the other is
    plain and reads a token of as many sequences."""
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes(f"synth:{source}")
        started = jax.eval_shape(lambda: speculation.start(1, state.cache.capacity, "ngram"))
        proposals = jax.ShapeDtypeStruct((1, tokens - 1), jnp.int32)
        compiled = compile_for_gpu(
            lambda *arrays: speculation.step(*arrays, config=config),
            params, state.replace(speculation=started), proposals, jax.ShapeDtypeStruct((1,), bool),
            donate_argnums=1,
        )  # fmt: skip
        _, plain, _ = shapes(f"synth:{source}", rows=tokens)
        rows = compile_for_gpu(lambda *arrays: core.step(*arrays, config), params, plain, donate_argnums=1)
    text = compiled.as_text()
    assert "prefill" not in text[text.index("ENTRY") :]
    assert text.count(" while(") == rows.as_text().count(" while(")
    return compiled, rows, state


LAUNCH = 'custom_call_target="mosaic_gpu'


@pytest.mark.parametrize("tokens", [4, 8])
@pytest.mark.parametrize("source", ["bonsai-8b:q1_0", "tiny-qwen3:q4_k_m", "tiny-qwen3moe:q4_k_m"])
def test_a_speculative_step_is_straight_code_of_kernels_for_one_token(source, tokens):
    """As a plain step of as many rows is; layers of the 8B in Q1_0 are one launch. The cache stays in its
    place."""
    compiled, rows, state = speculative_step(source, tokens)
    launches = compiled.as_text().count(LAUNCH)
    assert launches == rows.as_text().count(LAUNCH)
    assert "q1_0" not in source or launches == 4  # layers, the output matrix, a draw in two
    pages = state.cache.states["attention"][0].k
    assert compiled.memory_analysis().alias_size_in_bytes >= 2 * pages.size * 2


@pytest.mark.parametrize("tokens", [2, 4, 8])
@pytest.mark.parametrize("source", ["tiny-qwen35:q1_0", "bonsai-27b:q1_0"])
def test_a_speculative_step_of_a_delta_net_stores_all_layers_by_one_launch(source, tokens, monkeypatch):
    """States are read in place, token by token in one launch a layer, and what the accepted tokens make of
    them is stored by a launch for all layers. All other launches are those of as many rows."""
    four = dataclasses.replace(synth.MODELS["bonsai-27b"], layers=4)
    monkeypatch.setitem(synth.MODELS, "bonsai-27b", four)
    compiled, rows, state = speculative_step(source, tokens)
    assert compiled.as_text().count(LAUNCH) == rows.as_text().count(LAUNCH) + 1
    (states,) = state.cache.states["delta_net"]
    memory, logits = compiled.memory_analysis(), 4 * tokens * state.sampler.seen.shape[-1]
    assert memory.alias_size_in_bytes >= 4 * states.s.size
    assert memory.temp_size_in_bytes < 4 * states.s.size + 2 * logits  # a copy of all states would be as much


def test_a_draft_layer_s_pages_stay_in_place_whether_it_drafts_or_not(monkeypatch):
    """Of decode steps, in which it drafts on a condition and, on another, reads the tokens of plain steps
    together: by kernels of one token, and by no loop but theirs."""
    monkeypatch.setattr(mtp, "time", lambda params, config: 0.05)  # as beside all layers
    four = dataclasses.replace(synth.MODELS["bonsai-27b-mtp"], layers=4)
    monkeypatch.setitem(synth.MODELS, "bonsai-27b-mtp", four)
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:bonsai-27b-mtp:q1_0", draft=True)
        started = jax.eval_shape(lambda: speculation.start(1, state.cache.capacity, "mtp"))
        run = bj.RunConfig(cache_dtype="bfloat16")
        own = jax.eval_shape(lambda: draft.empty(config, run, 1, 512))
        state = state.replace(speculation=started.replace(draft=own))
        compiled = compile_for_gpu(
            lambda p, s: core.decode(p, s, config, limit=64, size=64), params, state, donate_argnums=1
        )
    text, memory = compiled.as_text(), compiled.memory_analysis()
    pages = own.attention.k.size * 2
    assert text.count(" while(") == 2 and text.count(" conditional(") == 2 and "prefill_sm90" not in text
    assert memory.alias_size_in_bytes >= 2 * pages and memory.temp_size_in_bytes < pages


def test_a_draft_model_draws_by_the_kernels_of_a_plain_step():
    """In one loop of as many turns as pay. Its cache stays in its place, and so does the model's, which is
    read for its block table alone."""
    with as_on_a_gpu((9, 0)):
        own, drafts, own_config = shapes(draft := "synth:tiny-qwen3:q1_0")
        params, state, config = with_draft_model(shapes("synth:bonsai-8b:q1_0"), draft)
        propose = proposers.get("draft_model").propose
        compiled = compile_for_gpu(
            lambda *arrays: propose(*arrays, config, 7), params, state, donate_argnums=1
        )
        plain = compile_for_gpu(lambda *arrays: core.step(*arrays, own_config), own, drafts, donate_argnums=1)
    text, launches = compiled.as_text(), 'custom_call_target="mosaic_gpu'
    assert text.count(" while(") == plain.as_text().count(" while(") + 1
    assert "prefill" not in text and text.count(launches) == plain.as_text().count(launches)
    sizes = [s.states["attention"][0].k.size * 4 for s in (state.cache, drafts.cache)]
    assert compiled.memory_analysis().alias_size_in_bytes >= sum(sizes)


def test_prefill_with_a_cache_of_bytes_compiles():
    check_prefill("synth:tiny-qwen3:q1_0", (9, 0), "int8")


@pytest.mark.parametrize("capability", NOT_HOPPER, ids=str)
def test_decode_compiles_for_other_gpus(capability, compilers):
    compilers.printed(capability, check_decode, "synth:tiny-qwen3:q1_0", capability)


def test_a_step_with_an_adapter_compiles():
    """In one launch, as without; of a rank that this refuses product by product: attention and its token's
    keys, five products a layer and the head's; and A and B of seven matrices, two launches each at most."""
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:tiny-qwen3:q1_0")

        def launches(params, rank=0):
            lora = lambda: bj.lora(config, rank, key=jax.random.key(0), dtype=jnp.bfloat16)  # noqa: E731
            params = params.replace(adapter=jax.eval_shape(lora) if rank else None)
            step = lambda params, state: core.step(params, state, config)  # noqa: E731
            text = compile_for_gpu(step, params, state, donate_argnums=1).as_text().split("ENTRY")[1]
            return len(re.findall(r"= \S+ fusion\(", text)), text.count('custom_call_target="mosaic_gpu')

        (others, fused), (beside, kernels) = launches(params), launches(params, rank=6)
        assert launches(params, rank=16)[1] == fused
    assert fused < config.num_layers * 5 < kernels <= config.num_layers * 7 + 3
    assert beside - others <= config.num_layers * 2 * 7


def bytes_of(step: str, memory) -> str:
    return (
        f"{step}: a decode step has {memory.temp_size_in_bytes:,} bytes of temporaries and updates "
        f"{memory.alias_size_in_bytes:,} in place"
    )


def test_the_8b_step_reads_its_weights_in_place():
    """Through kernels no weight is copied or decoded to memory: the temporaries are a few vectors."""
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:bonsai-8b:q1_0")
    compiled = compile_for_gpu(
        lambda params, state: core.step(params, state, config), params, state, donate_argnums=1
    )
    memory = compiled.memory_analysis()
    print(bytes_of("8B, Q1_0", memory))
    assert memory.alias_size_in_bytes >= 2 * state.cache.states["attention"][0].k.size * 2
    assert memory.temp_size_in_bytes < 8e6  # the logits and what sampling makes of them


def test_decode_of_a_mixed_8b_model_copies_neither_cache_nor_stack():
    """Through kernels no weight is copied or decoded to memory: the temporaries are a few vectors."""
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:bonsai-8b:q4_k_m", rows=2)
    compiled = compile_for_gpu(
        lambda params, state: core.step(params, state, config), params, state, donate_argnums=1
    )
    memory = compiled.memory_analysis()
    print(bytes_of("8B, Q4_K_M, 2 rows", memory))
    assert memory.alias_size_in_bytes >= 2 * state.cache.states["attention"][0].k.size * 2
    assert memory.temp_size_in_bytes < 16e6


def test_a_folded_step_is_two_launches_a_layer_and_copies_nothing(monkeypatch):
    """Bonsai 2 27B's first four layers, three with a delta net: what rotates is within products."""
    four = dataclasses.replace(synth.MODELS["bonsai-2-27b"], layers=4)
    monkeypatch.setitem(synth.MODELS, "bonsai-2-27b", four)
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:bonsai-2-27b:ptq1_0")
        compiled = compile_for_gpu(lambda p, s: core.step(p, s, config), params, state, donate_argnums=1)
    launches = compiled.as_text().count('custom_call_target="mosaic_gpu')
    assert launches == 2 * 4 + 1 + 1 + 2  # and the first layer's inputs, the output matrix, a draw
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 2e6
    (delta,), (attention,) = state.cache.states["delta_net"], state.cache.states["attention"]
    assert memory.alias_size_in_bytes >= 4 * delta.s.size + 2 * 2 * attention.k.size


@pytest.mark.parametrize(("rows", "state_dtype"), [(8, "float16"), (32, "float32")])
def test_several_rows_of_delta_nets_are_eight_launches_a_layer_and_copy_nothing(
    rows, state_dtype, monkeypatch
):
    """Bonsai 27B's first four layers in Q1_0, one of them with attention, whose outputs a launch of their own
    rounds: nothing of XLA's stands between launches, but a sum at the end and one of attention's inputs."""
    four = dataclasses.replace(synth.MODELS["bonsai-27b"], layers=4)
    monkeypatch.setitem(synth.MODELS, "bonsai-27b", four)
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:bonsai-27b:q1_0", rows=rows)
        assert params.step.schedule(rows) == "layer_gemms"
        (delta,) = state.cache.states["delta_net"]
        delta = delta.replace(s=jax.ShapeDtypeStruct(delta.s.shape, state_dtype))
        state = state.replace(cache=state.cache.with_state("delta_net", 0, delta))
        compiled = compile_for_gpu(lambda p, s: core.step(p, s, config), params, state, donate_argnums=1)
    text, memory = compiled.as_text(), compiled.memory_analysis()
    # The output matrix, before which more rows are rounded, and a draw in two.
    assert text.count(LAUNCH) == 3 * 8 + 9 + (1 if rows <= 8 else 2) + 2
    entry = text[text.index("ENTRY") :]
    additions = re.findall(r"%(?:loop|wrapped)_add\S* = f32\[", entry)
    assert 1 <= len(additions) <= 3 and " copy(" not in entry, additions
    pages = state.cache.states["attention"][0].k
    states = delta.s.size * delta.s.dtype.itemsize
    assert memory.alias_size_in_bytes >= states + 2 * 2 * pages.size
    assert memory.temp_size_in_bytes < 4 * rows * config.vocab_size + 2e6


def test_experts_are_read_in_place(monkeypatch):
    """Of steps in one launch, of one of nine rows and of 512 tokens: no stack is copied, and no
    layer's experts are dequantized. Layers of Qwen3-30B-A3B, but two, whose down differ in format."""
    layers = 2
    few = dataclasses.replace(synth.MODELS["qwen3-30b-a3b"], layers=layers, vocab=2048, specials=2000)
    monkeypatch.setitem(synth.MODELS, "few-a3b", few)
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:few-a3b:q4_k_m")
        tokens = jax.ShapeDtypeStruct((1, 512), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        states = [state, *(shapes("synth:few-a3b:q4_k_m", rows=rows)[1] for rows in (8, 9))]
        step, step_8, step_9 = (
            compile_for_gpu(lambda p, s: core.step(p, s, config), params, state, donate_argnums=1)
            for state in states
        )
        prefill = compile_for_gpu(
            lambda p, s, t, n: core.prefill(p, s, t, n, config), params, state, *tokens, donate_argnums=1
        )
    (experts,) = params.layers["experts"]
    assert len(experts.down.parts) == layers
    one_layer = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(experts.up)) // layers
    print(bytes_of("A3B", step.memory_analysis()), prefill.memory_analysis().temp_size_in_bytes, one_layer)
    for one_launch in (step, step_8):
        assert one_launch.as_text().count("experts_layers") and "int_experts" not in one_launch.as_text()
    assert step_9.as_text().count("int_experts") >= 2 * layers
    assert "expert_places" in prefill.as_text() and "int_experts" not in prefill.as_text()
    assert step.memory_analysis().temp_size_in_bytes < 1e6
    assert step_8.memory_analysis().temp_size_in_bytes < 4e6
    assert step_9.memory_analysis().temp_size_in_bytes < 8e6
    assert prefill.memory_analysis().temp_size_in_bytes < 2 * one_layer


def test_latent_attention_is_straight_code_and_copies_no_rows(monkeypatch):
    """Layers of GLM-4.7-Flash: a step's latent attention is a launch, with one before it and one after it for
    all matrices of heads."""
    layers = 2
    few = dataclasses.replace(synth.MODELS["glm-4.7-flash"], layers=layers, vocab=2048, specials=2000)
    monkeypatch.setitem(synth.MODELS, "few-glm", few)
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:few-glm:q4_k_m")
        (latent,) = state.cache.states["latent_attention"]
        assert (latent.impl, latent.prefill_impl) == ("latent_decode", "latent_prefill")
        step = compile_for_gpu(lambda p, s: core.step(p, s, config), params, state, donate_argnums=1)
        tokens = jax.ShapeDtypeStruct((1, 2048), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        prefill = compile_for_gpu(
            lambda p, s, t, n: core.prefill(p, s, t, n, config), params, state, *tokens, donate_argnums=1
        )
    assert "int_experts" not in prefill.as_text() and " while(" not in prefill.as_text()
    print(bytes_of("GLM-4.7-Flash", step.memory_analysis()))
    assert " while(" not in step.as_text()
    assert step.as_text().count('custom_call_target="mosaic_gpu') < 11 * layers
    assert step.memory_analysis().alias_size_in_bytes >= latent.k.size * 2
    assert step.memory_analysis().temp_size_in_bytes < 8e6


@pytest.mark.parametrize("source", ["synth:bonsai-8b:q1_0", "synth:bonsai-8b:q4_k_m"])
def test_logits_after_every_token_compile(source):
    """The output matrix as a product of many rows: 151,669 outputs, which TMA does not take as they are. The
    layers before it are prefill's."""
    with as_on_a_gpu((9, 0)):
        params, _, config = shapes(source, context=512)
        x = jax.ShapeDtypeStruct((1, 512, config.hidden), jnp.float32)
        compile_for_gpu(lambda params, x: decoder.unembed(params, x, config), params, x)


def test_the_plan_counts_what_decode_works_on(monkeypatch):
    """Bonsai 2 27B's first four layers: a decode of all rows takes their states out of the pool, and makes
    scores."""
    four = dataclasses.replace(synth.MODELS["bonsai-2-27b"], layers=4)
    monkeypatch.setitem(synth.MODELS, "bonsai-2-27b", four)
    rows, run = 16, bj.RunConfig(weights="packed", cache_dtype="bfloat16")
    with as_on_a_gpu((9, 0)):
        params, pool, config = shapes("synth:bonsai-2-27b:q1_0", rows=rows, context=256)
        compiled = compile_for_gpu(
            lambda params, pool, columns: on_device.decode(params, pool, columns, config, size=8),
            params, pool, jax.ShapeDtypeStruct((rows, 2 + pool.cache.block_table.shape[1]), jnp.int32),
            donate_argnums=1, compiler_options=calls.LOOP_IN_GRAPH,
        )  # fmt: skip
    copies, took = rows * memory.copied_bytes(config, run), compiled.memory_analysis().temp_size_in_bytes
    planned = copies + rows * memory.score_bytes(config)
    assert copies <= took < 1.01 * planned, (copies, took, planned)


def test_scores_and_harvests_compile():
    """Rows of a few tokens behind their prompts' pages, the tokens to be scored, and the layers up to a
    tapped one, without the others' weights."""
    source, layer = "synth:bonsai-1.7b:q1_0", 5
    taps = bj.Taps("output", layers=layer)
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes(source, rows=24, context=128)
        ints = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
        read = compile_for_gpu(
            lambda *arrays: reading.read_rows(*arrays, config),
            params, state.cache, ints(64, 16), ints(64), ints(64, 5), ints(64, 2), donate_argnums=1,
        )  # fmt: skip
        compile_for_gpu(
            lambda *arrays: score.token_scores(*arrays, config),
            params, jax.ShapeDtypeStruct((1024, config.hidden), jnp.float32), ints(1024, 3),
        )  # fmt: skip
        harvested = compile_for_gpu(
            lambda *arrays: bj.hidden_states(*arrays, config, taps=taps, stop_at_layer=layer + 1),
            params, state.cache, ints(24, 80), ints(24), donate_argnums=1,
        )  # fmt: skip
    shapes_out = [leaf.shape for leaf in jax.tree.leaves(harvested.out_info)]
    assert (1, 24, 80, config.hidden) in shapes_out
    pages = state.cache.states["attention"][0].k
    assert read.memory_analysis().alias_size_in_bytes >= 2 * pages.size * 2  # they are written in place
    assert "prefill_sm90" in harvested.as_text()


def check_prefill(source, capability, cache_dtype="bfloat16"):
    """Prefill of a model compiles for GPUs that have no wgmma; its attention is a kernel there too."""
    with as_on_a_gpu(capability):
        params, state, config = shapes(source, cache_dtype=cache_dtype)
        assert state.cache.states["attention"][0].prefill_impl == (
            "prefill_sm90" if capability == (9, 0) else "prefill_sm80"
        )
        tokens, lengths = jax.ShapeDtypeStruct((1, 300), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)
        compile_for_gpu(
            lambda p, s, t, n: core.prefill(p, s, t, n, config), params, state, tokens, lengths,
            compute_capability=capability,
        )  # fmt: skip


@pytest.mark.parametrize("capability", NOT_HOPPER, ids=str)
@pytest.mark.parametrize(
    "source", ["synth:tiny-llama:q4_k_m", pytest.param("synth:tiny-llama:q1_0", marks=pytest.mark.slow)]
)
def test_prefill_compiles_for_other_gpus(source, capability, compilers):
    compilers.printed(capability, check_prefill, source, capability)


def test_32k_tokens_of_the_8b_model_prefill_in_little_memory():
    """By kernels: nothing of the weights or the cache is copied; what is left is a chunk's activations."""
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:bonsai-8b:q1_0", context=32768)
    assert params.layers["mlp"][0].down.parts[0].products.kernel(512) == "bit_prefill_sm90"
    assert state.cache.states["attention"][0].prefill_impl == "prefill_sm90"
    tokens = jax.ShapeDtypeStruct((1, 32768), jnp.int32)
    lengths = jax.ShapeDtypeStruct((1,), jnp.int32)
    compiled = compile_for_gpu(
        lambda p, s, t, n: core.prefill(p, s, t, n, config), params, state, tokens, lengths, donate_argnums=1
    )
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= 2 * state.cache.states["attention"][0].k.size * 2
    assert memory.temp_size_in_bytes < 0.3e9


def test_prefill_of_a_mixed_8b_model_decodes_one_layer_at_a_time():
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:bonsai-8b:q4_k_m", context=4096)
    assert {part.products.kernel(512) for part in params.layers["mlp"][0].down.parts} == {"cublas"}
    tokens, lengths = jax.ShapeDtypeStruct((1, 4096), jnp.int32), jax.ShapeDtypeStruct((1,), jnp.int32)

    def read(params, cache, tokens, lengths):
        return core.read(params, cache, tokens, lengths, config)

    with as_on_a_gpu((9, 0)):
        compiled = compile_for_gpu(read, params, state.cache, tokens, lengths, donate_argnums=1)
    assert compiled.memory_analysis().temp_size_in_bytes < 1.5e9


def kernels_of(lowered):
    return kernels_first._kernels(kernels_first._operations(lowered.compiler_ir("stablehlo")))


@pytest.mark.parametrize("multiplies", [True, False])
def test_xla_tries_variants_only_where_it_multiplies(multiplies):
    def f(a, b):
        return jax.lax.fori_loop(0, 3, lambda i, x: x @ b if multiplies else x + b, a)

    one = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    lowered, _ = lower_for_gpu(f, one, one)
    with as_on_a_gpu((9, 0)), mock.patch.object(type(lowered), "compile") as compile:
        kernels_first.compile(lowered, {"some": 1})
    (call,) = compile.call_args_list
    untuned = {} if multiplies else kernels_first.UNTUNED
    assert call.kwargs["compiler_options"] == {"some": 1, **untuned, **kernels_first.NOT_KEPT_LESS}


def test_the_kernels_of_a_program_compile_alone():
    """kernels_first.py takes each of them once, with its code and its digest."""
    with as_on_a_gpu((9, 0)):
        params, state, config = shapes("synth:tiny-qwen3:q1_0", context=256)
        tokens, lengths = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 128), (1,)))
        lowered, sharding = lower_for_gpu(
            lambda *arguments: core.prefill(*arguments, config), params, state, tokens, lengths
        )
    found = {kernels_first._attributes(op)["kernel_hash"]: op for op in kernels_of(lowered)}
    calls = lowered.as_text().count("@" + kernels_first.TARGET)
    assert 5 < len(found) <= calls
    for digest, op in found.items():
        alone = kernels_first._program(op, sharding)()
        (same,) = kernels_of(alone)
        assert kernels_first._attributes(same) == kernels_first._attributes(op)
        assert kernels_first._attributes(same)["kernel_hash"] == digest
        assert [str(value.type) for value in same.results] == [str(value.type) for value in op.results]
        assert kernels_first.TARGET in alone.compile().as_text()
