"""Run by test_parallel.py in a process of its own, whose CPU is eight devices to JAX."""

import dataclasses
import functools
import itertools
import json
from unittest import mock

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import bonsai_jax as bj
from bonsai_jax import server
from bonsai_jax.cli import options
from bonsai_jax.config import Layer
from bonsai_jax.network import architectures
from bonsai_jax.network.kinds import place
from bonsai_jax.network.kinds.experts import Experts
from bonsai_jax.nnx import LanguageModel
from bonsai_jax.research.prompt_logprobs import prompt_logprobs
from bonsai_jax.research.reading import Reader
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights import read as reading
from bonsai_jax.weights.placement import Placement, Whole, _mailbox
from bonsai_jax.weights.specs import Spec
from checkpoints import Tensor, open_checkpoint
from pallas_kernels import Products, QTensor, dequantize, from_blocks
from pallas_kernels import device as gpu
from tests.bonsai_jax import test_gemma4 as gemma4
from tests.bonsai_jax.command_line import run as run_command
from tests.bonsai_jax.test_folding import folded
from tests.bonsai_jax.test_speculation import two_layers
from tests.bonsai_jax.test_transformations import OPS, K, check_shard_map, weight
from tests.bonsai_jax.tokens import assert_same

PROMPTS = [np.random.default_rng(n).integers(0, 256, n).tolist() for n in (5, 18, 30, 7, 9, 11)]
# Greedy and seeded rows in one batch.
SAMPLING = [bj.SamplingParams(temperature=float(row % 2), seed=row) for row in range(len(PROMPTS))]


RUN = bj.RunConfig(page_size=16, context=64, activation_bits=16)


@functools.cache  # what places weights is compiled for every mesh: few tests have one of their own
def load(source: str, weights, mesh=None) -> bj.Model:
    checkpoint = open_checkpoint(f"synth:{source}")
    if source.startswith("tiny-qwen35"):
        checkpoint = two_layers(checkpoint)
    return bj.from_checkpoint(checkpoint, dataclasses.replace(RUN, weights=weights), mesh=mesh)


def an_adapter(model: bj.Model) -> bj.Adapter:
    fresh, rng = bj.lora(model.config, 4, key=jax.random.key(0)), np.random.default_rng(0)
    return jax.tree.map(lambda x: jnp.asarray(0.2 * rng.standard_normal(x.shape), x.dtype), fresh)


@pytest.mark.slow
def test_each_device_of_a_mesh_of_data_has_the_whole_adapter():
    """Of a model, and of an engine's rows, which have one or none."""
    one, many = (load("tiny-llama:q8_0", "packed", mesh) for mesh in (None, bj.make_mesh(2, 1)))
    adapter = an_adapter(one)
    want = answers(one.with_adapter(adapter))
    assert_same(answers(many.with_adapter(adapter)), want)
    plain = answers(one)
    with bj.Engine(many, max_batch_size=4, context=64, adapters={"a": adapter}) as engine:
        for name, texts in (("a", want), (None, plain)):
            handles = [
                engine.submit(ids, sampling, max_new_tokens=12, ignore_eos=True, adapter=name)
                for ids, sampling in zip(PROMPTS, SAMPLING, strict=True)
            ]
            assert_same([handle.result(timeout_s=120).tokens for handle in handles], texts)


def test_an_engine_stays_on_the_default_device():
    """Its threads have jax.default_device of who made it; else each step would copy weights and pool."""
    second = jax.devices()[1]
    with jax.default_device(second):
        model = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(context=64))
        with bj.Engine(model, max_batch_size=2) as engine:
            own = engine.submit("Hi", bj.SamplingParams(0.0), max_new_tokens=4).result(60).tokens
            pool = engine._loop.runner._pool
            where = {device for leaf in jax.tree.leaves((model.params, pool)) for device in leaf.devices()}
    assert where == {second}
    model = bj.load("synth:tiny-llama:q8_0", bj.RunConfig(context=64))
    assert bj.generate(model, "Hi", sampling=bj.SamplingParams(0.0), max_new_tokens=4)[0].tokens == own


def test_adapters_are_refused_where_devices_share_matrices():
    model = load("tiny-llama:q8_0", "packed", bj.make_mesh(1, 2))
    with pytest.raises(NotImplementedError, match='adapters over a mesh with an axis "model"'):
        model.with_adapter(an_adapter(model))


def answers(model: bj.Model, **options) -> list[list[int]]:
    outputs = bj.generate(model, PROMPTS, max_new_tokens=12, sampling=SAMPLING, ignore_eos=True, **options)
    return [output.tokens for output in outputs]


@functools.cache
def on_one_device(source: str, weights) -> list[list[int]]:
    return answers(load(source, weights))


def assert_follows(sharded: bj.Model, whole: bj.Model) -> None:
    """One device's logits: of the last tokens of four prompts, and of a token behind each, which one device
    reads with the prompt."""
    ids, lengths = np.zeros((4, 31), np.int32), np.array([len(ids) for ids in PROMPTS[:4]])
    for row, prompt in zip(ids, PROMPTS, strict=False):
        row[: len(prompt)] = prompt
    rows, next_ids = np.arange(4), ids[:, :1].copy()

    def extend(m: bj.Model, cache, ids, lengths):
        logits, cache = bj.jitted.extend(m.params, cache, ids, lengths, m.config)
        return np.asarray(logits), cache

    read, cache = extend(sharded, bj.new_cache(sharded, 4, 64), ids, lengths)
    followed, _ = extend(sharded, cache, next_ids, np.ones(4, np.int32))
    ids[rows, lengths] = next_ids[:, 0]
    want, _ = extend(whole, bj.new_cache(whole, 4, 64), ids, lengths + 1)
    np.testing.assert_allclose(read[rows, lengths - 1], want[rows, lengths - 1], atol=1e-4)
    np.testing.assert_allclose(followed[:, 0], want[rows, lengths], atol=1e-4)


def bytes_of(tree, device) -> int:
    """Bytes of the arrays' shards that lie on a device."""
    shards = [shard for leaf in jax.tree.leaves(tree) for shard in leaf.addressable_shards]
    return sum(shard.data.nbytes for shard in shards if shard.device == device)


@pytest.mark.parametrize(
    "source, weights, data, model",
    [
        ("tiny-llama:q8_0", "packed", 2, 4),  # 6 rows: two of padding; two devices a KV head
        pytest.param("tiny-llama:q8_0", "decoded", 2, 4, marks=pytest.mark.slow),
        pytest.param("tiny-llama:q4_k_m", "decoded", 1, 2, marks=pytest.mark.slow),
        pytest.param("tiny-llama:q8_0", "packed", 4, 1, marks=pytest.mark.slow),
        pytest.param("tiny-llama:q1_0", "packed", 2, 2, marks=pytest.mark.slow),
    ],
)
def test_tokens_are_those_of_one_device(source, weights, data, model):
    """Over a mesh whose axes are Explicit, as jax.make_mesh makes them."""
    sharded = load(source, weights, jax.make_mesh((data, model), ("data", "model")))
    assert_same(answers(sharded), on_one_device(source, weights))


@pytest.mark.slow  # the engine below does both
def test_speculating_and_streaming_over_a_mesh():
    sharded, want = load("tiny-llama:q8_0", "packed", bj.make_mesh(2, 2)), ("tiny-llama:q8_0", "packed")
    assert_same(answers(sharded, speculate="ngram"), on_one_device(*want))
    pieces = bj.stream(sharded, PROMPTS[1], max_new_tokens=12, sampling=SAMPLING[1], ignore_eos=True)
    assert_same([[t for piece in pieces for t in piece.tokens]], [on_one_device(*want)[1]])


@pytest.mark.parametrize(
    "data, parts", [(2, 2), *(pytest.param(*shape, marks=pytest.mark.slow) for shape in [(2, 1), (1, 2)])]
)
def test_an_engine_over_a_mesh_has_one_queue(data, parts):
    """Rows and pages of each device along "data", too few for all; what was read once is shared there.
    Speculating: the batch below does not."""
    sharded = load("tiny-llama:q8_0", "packed", bj.make_mesh(data, parts))
    options = {"max_new_tokens": 12, "ignore_eos": True}
    how = {"max_batch_size": 2, "pages": 4, "prefill_tokens": 32, "speculate": "ngram"}
    with bj.Engine(sharded, **how) as engine:
        handles = [
            engine.submit(ids, params, **options) for ids, params in zip(PROMPTS, SAMPLING, strict=True)
        ]
        tokens = [handle.result(300).tokens for handle in handles]
        assert_same(tokens, on_one_device("tiny-llama:q8_0", "packed"))
        devices = engine._loop.scheduler.devices
        assert len(devices) == data and all(device.pages.idle for device in devices)
        again = engine.submit(PROMPTS[-1], SAMPLING[-1], **options).result(300)
        assert again.tokens == tokens[-1] and again.cached_tokens == len(PROMPTS[-1]) - 1
        tokens = with_other_weights(engine, options)
        with server.running(engine) as own:  # as serve with --data-parallel and --tensor-parallel has it
            greedy = {"prompt": PROMPTS[::2], "max_tokens": 12, "ignore_eos": True, "temperature": 0}
            answer = httpx.post(f"{own.url}/v1/completions", json=greedy, timeout=300).json()
        texts = [choice["text"] for choice in answer["choices"]]
        assert texts == [sharded.tokenizer.decode(ids) for ids in tokens[::2]]


def with_other_weights(engine: bj.Engine, options: dict) -> list[list[int]]:
    """One device's tokens with another norm, as the engine's are after an update: the norm of one device is
    spread over the mesh, and nothing that was read before is shared."""
    whole = load("tiny-llama:q8_0", "packed")
    norm = whole.params.final_norm * jnp.linspace(0.5, 2.0, whole.config.hidden)
    want = answers(dataclasses.replace(whole, params=whole.params.replace(final_norm=norm)))
    assert want != on_one_device("tiny-llama:q8_0", "packed")
    with pytest.raises(ValueError, match=r"mesh are not the engine's"):
        engine.update_params(whole.params)
    assert engine.update_params(engine.model.params.replace(final_norm=norm)) == 1
    handles = [engine.submit(*each, **options) for each in zip(PROMPTS, SAMPLING, strict=True)]
    outputs = [handle.result(300) for handle in handles]
    assert_same([out.tokens for out in outputs], want)
    assert {version for out in outputs for version in out.versions} == {1}
    return want


@pytest.mark.parametrize(("data", "parts"), [(2, 2)])
def test_constrained_answers_over_a_mesh_are_those_of_one_device(data, parts):
    each = [bj.regex("([a-z]{2} ){3}end"), None, bj.choice(["north", "south"]), bj.regex("[0-9]{6}"), None]
    options = {"max_new_tokens": 20, "constraint": each, "ignore_eos": True}
    whole, sharded = (load("tiny-llama:q8_0", "packed", mesh) for mesh in (None, bj.make_mesh(data, parts)))
    prompts, params = PROMPTS[:5], SAMPLING[:5]
    want = bj.generate(whole, prompts, sampling=params, **options)
    got = bj.generate(sharded, prompts, sampling=params, **options)
    assert_same([out.tokens for out in got], [out.tokens for out in want])
    assert [out.text for out in got][2] in ("north", "south")


def test_a_batch_over_a_mesh_has_one_devices_answers(tmp_path):
    """The command, with both options: rows, pages and context are those that `generate` has above, so nothing
    is compiled."""
    head = {"method": "POST", "url": "/v1/completions"}
    bodies = [
        {"prompt": ids, "max_tokens": 12, "temperature": params.temperature, "seed": params.seed}
        for ids, params in zip(PROMPTS, SAMPLING, strict=True)
    ]
    lines = [{"custom_id": str(i), **head, "body": body} for i, body in enumerate(bodies)]
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n".join(map(json.dumps, lines)))

    def on_mesh(model, run, mesh):
        assert mesh == bj.make_mesh(2, 4)
        return load(model.name.removeprefix("synth:"), "packed", mesh)

    arguments = ["-m", "synth:tiny-llama:q8_0", "--batch-size", 4, "--pages", 16]
    with mock.patch.object(options.LoadOptions, "load", on_mesh):
        done = run_command("batch", source, output, *arguments, "--data-parallel", 2, "--tensor-parallel", 4)
    assert done.exit_code == 0, done.output
    assert "6 lines answered, 0 with an error" in done.stderr
    tokenizer = load("tiny-llama:q8_0", "packed").tokenizer
    for line in map(json.loads, output.read_text().splitlines()):
        drawn = on_one_device("tiny-llama:q8_0", "packed")[int(line["custom_id"])]
        said = list(itertools.takewhile(lambda token: token not in tokenizer.eos_ids, drawn))
        assert line["response"]["body"]["choices"][0]["text"] == tokenizer.decode(said, at_start=False)


@pytest.mark.parametrize(
    "source, weights",
    [
        ("tiny-arcee:q8_0", "packed"),  # a feed-forward without a gate
        ("tiny-phi4:q8_0", "packed"),  # rows of joined tensors
        ("tiny-granite:q8_0", "packed"),  # a scale of what is added
        ("tiny-qwen2:q8_0", "packed"),  # biases; tied embeddings, whose text varies too little to compare it
        ("tiny-olmo3:q8_0", "packed"),  # norms of all heads of a token
        ("tiny-bitnet:q8_0", "packed"),  # norms before the output matrices
        pytest.param("tiny-cohere2:q8_0", "packed", marks=pytest.mark.slow),  # halves in parallel
        pytest.param("tiny-qwen3:q8_0", "packed", marks=pytest.mark.slow),  # QK-norm: folded below
        (
            "tiny-gpt-oss:mxfp4",
            "packed",
        ),  # sinks by head, experts with biases, a bias after the sum over devices
        pytest.param("tiny-llama:q8_0", "decoded", marks=pytest.mark.slow),  # float32: lists below
    ],
)
def test_other_weights_have_one_devices_logits_too(source, weights):
    whole, sharded = load(source, weights), load(source, weights, bj.make_mesh(2, 4))
    np.testing.assert_allclose(*(bj.logits(m, PROMPTS[2]) for m in (whole, sharded)), atol=1e-4)


@pytest.mark.parametrize(
    "source, weights",
    [
        ("tiny-qwen35:q8_0", "packed"),
        pytest.param("tiny-qwen35:q4_k", "decoded", marks=pytest.mark.slow),  # 64 columns are no whole blocks
    ],
)
def test_a_delta_net_is_split_by_head(source, weights):
    """Its states and its convolution's tail too: prefill, steps, and rows of two devices."""
    sharded = load(source, weights, bj.make_mesh(2, 2))
    assert_follows(sharded, load(source, weights))
    cache = bj.new_cache(sharded, 4, 64)
    for device in sharded.mesh.devices.flat:
        assert 4 * bytes_of(cache.states["delta_net"], device) == sum(
            x.nbytes for x in jax.tree.leaves(cache.states["delta_net"])
        )
    with pytest.raises(ValueError, match="2 k heads of the delta net do not split evenly; sizes that do: 1"):
        bj.load(f"synth:{source}", mesh=bj.make_mesh(1, 4))


@pytest.mark.parametrize("data, model", [(1, 4), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_experts_are_split_by_expert(data, model):
    """Prefill in tiles, steps, and what each device holds."""
    sharded = load("tiny-qwen3moe:q8_0", "packed", bj.make_mesh(data, model))
    assert_follows(sharded, load("tiny-qwen3moe:q8_0", "packed"))
    (experts,) = sharded.params.layers["experts"]
    stacks = [experts.gate, experts.up, experts.down]
    for device in sharded.mesh.devices.flat:
        assert model * bytes_of(stacks, device) == sum(x.nbytes for x in jax.tree.leaves(stacks))
    layers = tuple(Layer(layer.mixer, Experts(6, 3, 256)) for layer in sharded.config.layers)
    six = dataclasses.replace(sharded.config, layers=layers)
    with pytest.raises(ValueError, match="6 experts do not split evenly; sizes that do: 1, 2"):
        Placement(bj.make_mesh(1, 4)).shares(six, {})


@pytest.mark.slow
@pytest.mark.parametrize("name", gemma4.NAMES)
def test_gemma_4_is_split(name):
    """KV heads that devices share, keys used as values, experts beside a feed-forward, and keys of another
    layer."""
    one = bj.from_checkpoint(gemma4.file(name), RUN)
    sharded = bj.from_checkpoint(gemma4.file(name), RUN, mesh=bj.make_mesh(2, 2))
    assert_same(answers(sharded), answers(one))
    ids = gemma4.prompt(60)
    np.testing.assert_allclose(bj.logits(sharded, ids), bj.logits(one, ids), atol=1e-3)


@pytest.mark.parametrize("data, model", [(1, 4), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_heads_of_latent_attention_are_split_and_rows_are_not(data, model):
    sharded = load("tiny-deepseek2:q8_0", "packed", bj.make_mesh(data, model))
    assert_follows(sharded, load("tiny-deepseek2:q8_0", "packed"))
    (mixer,) = sharded.params.layers["latent_attention"]
    pages = bj.new_cache(sharded, 4, 64).states["latent_attention"]
    for device in sharded.mesh.devices.flat:
        for split, parts in ([mixer.k_b, mixer.v_b, mixer.q_b, mixer.o], model), (pages, data):
            assert parts * bytes_of(split, device) == sum(x.nbytes for x in jax.tree.leaves(split))


@functools.cache
def load_folded(source: str, block: int, mesh=None) -> bj.Model:
    return bj.from_checkpoint(folded(source, block), bj.RunConfig(page_size=16), mesh=mesh)


@pytest.mark.parametrize(
    "source, block, data, parts",
    [
        ("tiny-llama", 128, 1, 4),  # 64 columns of W_o, half a block: gathered; 128 of W_down
        ("tiny-qwen3", 128, 2, 2),  # tied; whole blocks
        ("tiny-qwen35", 256, 2, 2),  # half a block of heads that are regrouped
        ("tiny-qwen3moe", 128, 1, 4),  # experts, each whole
        pytest.param("tiny-llama", 128, 2, 1, marks=pytest.mark.slow),
        pytest.param("tiny-llama", 128, 1, 2, marks=pytest.mark.slow),
        pytest.param("tiny-qwen3", 256, 1, 4, marks=pytest.mark.slow),
        pytest.param("tiny-qwen35", 128, 1, 2, marks=pytest.mark.slow),  # whole blocks of them
    ],
)
def test_folded_weights_are_split_within_blocks_too(source, block, data, parts):
    whole, sharded = load_folded(source, block), load_folded(source, block, bj.make_mesh(data, parts))
    np.testing.assert_allclose(*(bj.logits(m, PROMPTS[2]) for m in (sharded, whole)), atol=1e-4)
    (channels,) = next(
        sharded.params.layers[kind] for kind in ("mlp", "experts") if kind in sharded.params.layers
    )
    *_, down = channels.down.parts
    for device in sharded.mesh.devices.flat:
        assert parts * shard(down.fields["w"], device).nbytes == down.fields["w"].nbytes


def test_v_heads_folded_in_tiled_order_are_not_split():
    source = folded("tiny-qwen35")
    metadata = dict(source.metadata) | {"prism.hadamard.gdn_v_grouped": False}
    with pytest.raises(NotImplementedError, match=r"gdn_v_grouped is False: v heads .* load it on one"):
        bj.from_checkpoint(dataclasses.replace(source, metadata=metadata), mesh=bj.make_mesh(1, 2))


@pytest.mark.parametrize("source, parts", [("tiny-llama:q8_0", 4), ("tiny-qwen2:q8_0", 4)])
def test_each_device_holds_its_share(source, parts):
    mesh = bj.make_mesh(2, parts)
    whole, sharded = load(source, "packed"), load(source, "packed", mesh)
    (attention,), (mlp,) = whole.params.layers["attention"], whole.params.layers["mlp"]
    split = [whole.params.embed, whole.params.head, attention.o, mlp.gate, mlp.up, mlp.down]
    split_bytes = sum(w.nbytes for w in split if w is not None)
    joined_bytes = sum(w.nbytes for w in (*attention.qkv, attention.qkv_bias) if w is not None)
    rest = sum(leaf.nbytes for leaf in jax.tree.leaves(whole.params)) - split_bytes - joined_bytes
    heads, kv_heads = whole.config.attention.num_heads, whole.config.attention.num_kv_heads
    share = (heads // parts + 2 * max(1, kv_heads // parts)) / (heads + 2 * kv_heads)
    state = bj.new_state(sharded, 4, 64, SAMPLING[:4], 8)
    one = bj.new_state(whole, 4, 64, SAMPLING[:4], 8)
    cache_bytes = sum(leaf.nbytes for leaf in jax.tree.leaves(one.cache.states["attention"]))
    for device in mesh.devices.flat:
        assert bytes_of(sharded.params, device) == split_bytes // parts + joined_bytes * share + rest
        assert bytes_of(state.cache.states["attention"], device) == cache_bytes // 2 // min(parts, kv_heads)


def shard(array, device):
    return next(s.data for s in array.addressable_shards if s.device == device)


@pytest.mark.parametrize("format", ["q4_k", "q1_0"])
def test_tiles_are_split_at_their_borders(format):
    """The layouts of kernels, which a CPU cannot run: each device's tiles decode to its share, of a file's
    blocks and of drawn ones alike."""
    mesh, checkpoint = bj.make_mesh(1, 2), open_checkpoint(f"synth:tiny-qwen3:{format}")
    description = architectures.describe(checkpoint)
    placement, decode = Placement(mesh), jax.jit(dequantize)
    from_file = jax.jit(lambda blocks: dequantize(from_blocks(blocks, format)))
    run = bj.RunConfig(weights="packed", cache_dtype="float16")

    def made(specs: list[Spec], rows: int | None = None):
        """The whole matrices, and their tiles over the mesh, rows below rows: of blocks, and drawn there."""
        drawn = [next(iter(description.tensors[spec].values())) for spec in specs]
        data = [np.asarray(reading.blocks(t))[:rows] for t in drawn]
        file = [Tensor(t.name, t.format, (len(d), t.shape[1]), d) for t, d in zip(drawn, data, strict=True)]
        tiles = []
        with mock.patch.object(gpu, "default", lambda: gpu.GPUS["sm_90"]):
            for tensors in [file] if rows else [file, drawn]:
                first = {spec: None if spec.kind is None else 0 for spec in specs}
                alone = dataclasses.replace(
                    description,
                    config=dataclasses.replace(description.config, layers=description.config.layers[:1]),
                    tensors={spec: {first[spec]: t} for spec, t in zip(specs, tensors, strict=True)},
                )
                (stack,) = load_plans.planned(alone, run, placement).stacks
                tiles.append(reading._matrices(*stack.pieces, placement, reading._run, stacked=False))
        return [np.asarray(from_file(d)) for d in data], tiles

    def shares(w: QTensor) -> list[np.ndarray]:
        shards = [jax.tree.map(lambda field, d=d: np.asarray(shard(field, d)), w) for d in mesh.devices.flat]
        return [np.asarray(decode(one)) for one in shards]  # compiled once, for the default device

    def check(kind: str | None, fields: tuple[str, ...], split, rows=None):
        specs = [s for s in description.tensors if s.kind == kind and s.field in fields]
        want, tiles = made(specs, rows)
        for w in tiles:
            own = zip(*(split(matrix) for matrix in want), strict=True)
            for got, parts in zip(shares(w), own, strict=True):
                np.testing.assert_array_equal(got[: sum(map(len, parts))], np.concatenate(parts))

    check("attention", ("q", "k", "v"), lambda w: np.split(w, 2))  # by head: each device's are neighbours
    check("attention", ("o",), lambda w: np.split(w, 2, axis=1))
    check("mlp", ("up",), lambda w: np.split(w, 2))
    # 501 tokens: the last device's share ends in rows of nobody.
    check(None, ("embed",), lambda w: np.split(w, [256]), rows=501)


SLOW = [pytest.param(*sizes, marks=pytest.mark.slow) for sizes in [(2, 1), (2, 2), (1, 4)]]


@pytest.mark.parametrize("data, parts", [(2, 4), *SLOW])
def test_the_functions_of_arrays_find_the_mesh_by_themselves(data, parts):
    """Under their own jit and under a user's, what they return is one device's."""
    tokens, lengths = np.array([PROMPTS[0], PROMPTS[1][:5]], np.int32), np.array([5, 3], np.int32)

    def results(m: bj.Model):
        c = m.config
        state = bj.new_state(m, 2, 64, SAMPLING[:2], 8, ignore_eos=True)

        @jax.jit
        def begin(params, state):
            return bj.step(params, bj.prefill(params, state, tokens, lengths, c).state, c).state

        state = begin(m.params, state)
        state, drawn, scores = bj.jitted.decode(m.params, state, c, limit=np.int32(3), size=4, logprobs=2)
        logits, cache = bj.jitted.extend(m.params, bj.new_cache(m, 2, 64), tokens, lengths, c)
        logits, cache = bj.jitted.extend(m.params, cache.take([1, 0]).rewind([2, 3]), tokens, lengths, c)

        @functools.partial(jax.grad, argnums=1, has_aux=True)
        def gradient(params, vectors):
            whole, kept = bj.forward(params, vectors, lengths, c, taps=bj.Taps("mlp"))
            return whole[:, 2, 7].sum(), (whole[:, :3], kept["mlp"][:, :, :3])

        @jax.jit
        def embedded(params):
            vectors = bj.embed(params, tokens)
            return vectors, gradient(params, vectors)

        scores = [scores.top, np.asarray(logits)[:, :3], *embedded(m.params)]
        return [state.tokens, drawn], scores

    one = results(load("tiny-llama:q8_0", "packed"))
    many = results(load("tiny-llama:q8_0", "packed", bj.make_mesh(data, parts)))
    jax.tree.map(np.testing.assert_array_equal, one[0], many[0])
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=2e-4), one[1], many[1])


def test_a_result_of_another_structure_than_over_mesh_names_is_refused():
    """With a mesh and without."""
    tokens = jnp.ones((2, 3), jnp.int32)

    def twice(params, tokens):
        return tokens, tokens

    for mesh in (None, bj.make_mesh(2, 2)):
        params = load("tiny-llama:q8_0", "packed", mesh).params
        first, second = bj.over_mesh(("rows", "rows"))(twice)(params, tokens)
        np.testing.assert_array_equal(first, tokens)
        np.testing.assert_array_equal(second, tokens)
        for returns in (("rows",), ("rows", ("rows", "rows"))):
            with pytest.raises(ValueError, match="tuple"):
                bj.over_mesh(returns)(twice)(params, tokens)
    with pytest.raises(ValueError, match="'row'; give one of rows, layers, whole or an argument's name"):
        bj.over_mesh(("rows", "row"))(twice)


def test_a_state_is_saved_on_one_mesh_and_loaded_on_another(tmp_path):
    """Each device gets its part of the rows and of the heads."""
    source, path = "tiny-llama:q8_0", tmp_path / "state"
    split, whole = load(source, "packed", bj.make_mesh(2, 2)), load(source, "packed")
    state = bj.new_state(split, 2, 32, bj.SamplingParams(seed=1), 8)
    (stored,) = state.cache.states["attention"]
    values = np.random.default_rng(0).normal(size=stored.k.shape).astype(np.float32)
    stored = stored.replace(k=jax.device_put(values, stored.k.sharding))
    bj.save_state(path, state.replace(cache=state.cache.with_state("attention", 0, stored)))
    on_one, back = bj.load_state(path, whole), bj.load_state(path, split)
    np.testing.assert_array_equal(on_one.cache.states["attention"][0].k, values)
    np.testing.assert_array_equal(back.cache.states["attention"][0].k, values)
    assert all(
        map(lambda one, other: one.sharding == other.sharding, jax.tree.leaves(back), jax.tree.leaves(state))
    )


def test_taps_inside_attention_over_meshes():
    source, taps = "tiny-llama:q8_0", bj.Taps({"pattern", "hidden"})
    tokens, lengths = jnp.array([[1, 2, 3, 4], [5, 6, 0, 0]]), jnp.array([4, 2])
    kept = []
    for mesh in (None, bj.make_mesh(2, 1)):
        model = load(source, "packed", mesh)
        kept.append(bj.jitted.forward(model.params, tokens, lengths, model.config, taps=taps)[1])
    jax.tree.map(lambda one, other: np.testing.assert_allclose(one, other, atol=1e-5), *kept)
    model = load(source, "packed", bj.make_mesh(1, 2))
    with pytest.raises(NotImplementedError, match="hidden, pattern: each device has some of the heads"):
        bj.jitted.forward(model.params, tokens, lengths, model.config, taps=taps)


def test_lists_and_checked_values_over_a_mesh():
    """Of dequantized weights, each device its share."""
    one, many = load("tiny-llama:q8_0", "decoded"), load("tiny-llama:q8_0", "decoded", bj.make_mesh(1, 4))
    checked, want = bj.checked(bj.forward), bj.logits(one, PROMPTS[0])
    for forward in (bj.jitted.forward, checked):
        got, _ = forward(many.params, [PROMPTS[0]], [len(PROMPTS[0])], many.config)
        np.testing.assert_allclose(got[0], want, atol=1e-4)
    with pytest.raises(ValueError, match="lengths: 9 to 9 are not within 0 to 5"):
        checked(many.params, [PROMPTS[0]], [9], many.config)


def test_a_view_of_split_weights_as_a_flax_module():
    one, many = load("tiny-llama:q8_0", "packed"), load("tiny-llama:q8_0", "packed", bj.make_mesh(1, 2))
    ids = jnp.array([PROMPTS[1]])
    call = nnx.jit(lambda module, ids: module(ids)[0], graph_updates=False)
    want, got = (call(LanguageModel(m), ids) for m in (one, many))
    np.testing.assert_allclose(got, want, atol=1e-4)


def test_pmap_draws_one_devices_tokens():
    """Three rows on each of two devices. There is no mesh: it is the pure function as it is."""
    model = load("tiny-llama:q8_0", "packed")

    @jax.jit
    def states():
        of_device = [bj.new_state(model, 3, 64, SAMPLING[d : d + 3], 12, ignore_eos=True) for d in (0, 3)]
        return jax.tree.map(lambda *leaves: jnp.stack(leaves), *of_device)

    tokens, lengths = np.zeros((2, 3, 32), np.int32), np.array([len(ids) for ids in PROMPTS]).reshape(2, 3)
    for row, ids in zip(tokens.reshape(6, 32), PROMPTS, strict=True):
        row[: len(ids)] = ids
    generate = functools.partial(bj.generate_tokens, config=model.config, size=12)
    drawn = jax.pmap(generate, in_axes=(None, 0, 0, 0))(model.params, states(), tokens, lengths).tokens
    assert_same(drawn.reshape(6, 12), on_one_device("tiny-llama:q8_0", "packed"))


def test_what_does_not_split_is_refused_with_what_would():
    with pytest.raises(ValueError, match=r"3 devices along 'model': 4 query heads .* sizes that do: 1, 2, 4"):
        load("tiny-qwen3:q8_0", "packed", bj.make_mesh(1, 3))
    with pytest.raises(ValueError, match=r"o: 512 columns of q4_k do not split at 256; sizes that do: 1, 2$"):
        load("tiny-qwen3:q4_k_m", "packed", bj.make_mesh(1, 4))
    with pytest.raises(ValueError, match="data=4 x model=4 devices; there are 8"):
        bj.make_mesh(4, 4)
    with pytest.raises(ValueError, match="'pipeline' among them"):
        load("tiny-llama:q8_0", "packed", jax.make_mesh((2,), ("pipeline",)))
    model = load("tiny-llama:q8_0", "packed", bj.make_mesh(2, 4))
    with pytest.raises(ValueError, match="5 rows do not split over 2 devices; 4 or 6 would"):
        bj.new_state(model, 5, 64, SAMPLING[:5], 8)


def test_bonsai_and_llama_70b_split_as_they_are_shaped():
    """Shapes only: 151,669 tokens and 8 KV heads over 8 devices; K-quants of 28,672 columns over 8."""
    for source, parts in (("synth:bonsai-8b:q1_0", 8), ("synth:llama-70b:q4_k_m", 8)):
        description = architectures.describe(open_checkpoint(source))
        config = description.config
        tensors = [(spec, *next(iter(sources.items()))) for spec, sources in description.tensors.items()
                   if spec.is_matrix and sources]  # fmt: skip
        wholes = {
            spec: Whole(spec, spec.settings(config, layer), t.shape, t.format, t.format, tiled=True)
            for spec, layer, t in tensors
        }
        assert len(Placement(bj.make_mesh(1, parts)).shares(config, wholes)) == 9


def test_a_group_of_devices_has_mailboxes_of_its_own():
    """It counts its calls in them, which those of another group do not see."""
    a, b, c = jax.devices()[:3]
    boxes = [_mailbox(a, group) for group in ((a, b), (a, c), (a, b))]
    assert boxes[0] is boxes[2] and boxes[0].unsafe_buffer_pointer() != boxes[1].unsafe_buffer_pointer()


def test_prefill_by_gemms_of_float16_sums_in_bfloat16():
    """As on GPUs, whose library GEMM is run here: near one device's, and near what float32 sums give."""

    def scores(mesh) -> np.ndarray:
        model = load("tiny-llama:q8_0", "packed", mesh)
        by_cublas = Products(((8, "reference"), (None, "cublas")))
        by_library = jax.tree.map(
            lambda w: w.replace(products=by_cublas) if isinstance(w, QTensor) else w,
            model.params,
            is_leaf=lambda w: isinstance(w, QTensor),
        )
        return bj.logits(dataclasses.replace(model, params=by_library), PROMPTS[2])

    with mock.patch.object(place, "PREFILL_SUMS", jnp.float32):
        one, by_float32 = scores(None), scores(bj.make_mesh(1, 2))
    jax.clear_caches()
    by_bfloat16 = scores(bj.make_mesh(1, 2))
    error, least = (np.linalg.norm(s - one) / np.linalg.norm(one) for s in (by_bfloat16, by_float32))
    assert least < 5e-4 and 3 * least < error < 4e-3  # 1.8e-4 and 1.5e-3


@pytest.mark.parametrize(
    "names", [("feed-forward",), pytest.param(OPS, marks=pytest.mark.slow)], ids=["one", "all"]
)
def test_ops_under_shard_map(names):
    """The feed-forward has all that the other ops have. With optimizations: without, one partition rounds
    differently from another. What is compiled here nobody else has."""
    weights = weight("q8_0", 1, K, 1)[0], weight("q4_k", 1, K)  # soon compiled without
    before = jax.config.values["jax_disable_most_optimizations"]
    jax.config.update("jax_disable_most_optimizations", False)
    try:
        check_shard_map(names, *weights)
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@pytest.mark.parametrize(("data", "model"), [(1, 2), (4, 2)])
def test_texts_are_read_as_on_one_device(data, model):
    """Scores, embeddings, and what a harvest and generate(read=) return."""
    draw, taps = np.random.default_rng(0), bj.Taps("output", layers=1)
    continuations = [[draw.integers(0, 256, n).tolist() for n in (3, 1, 2)[: 1 + i % 3]] for i in range(6)]

    def everything(mesh):
        loaded = load("tiny-qwen3:q8_0", "packed", mesh)
        scores = bj.score(loaded, PROMPTS, continuations)
        read = {}
        for batch in bj.harvest(loaded, PROMPTS, taps):
            values = np.asarray(batch.activations["output"])[0]
            read |= {n: values[row][batch.mask[row]] for row, n in enumerate(batch.texts) if n >= 0}
        (output,) = bj.generate(loaded, PROMPTS[:1], max_new_tokens=4, sampling=SAMPLING[:1], read=taps)
        likeliest = prompt_logprobs(Reader(loaded), PROMPTS, 2)
        return [
            *(score.token_logprobs for each in scores for score in each),
            *(scored.token for scored in likeliest),
            *(scored.top for scored in likeliest),
            bj.embed_texts(loaded, PROMPTS),
            *(read[n] for n in range(len(PROMPTS))),
            output.activations["output"],
        ]

    for got, want in zip(everything(bj.make_mesh(data, model)), everything(None), strict=True):
        np.testing.assert_allclose(got, want, atol=1e-4)
