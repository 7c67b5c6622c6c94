"""Several GPUs of one host: `pytest -m multigpu`. NCCL_NVLS_ENABLE=0 where NVLink multicast is missing."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import bonsai_jax as bj
from bonsai_jax.weights.placement import Placement
from pallas_kernels import LayerStack, QTensor, for_device, formats, matmul
from pallas_kernels.matmul import sent_product

pytestmark = pytest.mark.multigpu

PROMPTS = [[5, 6, 7], list(range(40))]
SAMPLING = [bj.SamplingParams(temperature=0.0), bj.SamplingParams(temperature=1.0, seed=3)]


@pytest.fixture(scope="module")
def mesh():
    return bj.make_mesh(model=2)


@pytest.mark.parametrize("words", [64, 8192, 65536])
def test_sums_through_mailboxes_are_those_of_psum(mesh, words):
    """1,000 sums of changing data: the same bits, on every device."""
    from pallas_kernels import all_reduce

    peers = Placement(mesh, "mailbox").peers()

    def on_device(peers):
        me = jax.lax.axis_index("model").astype(jnp.float32)
        steps = jnp.arange(words, dtype=jnp.float32)

        def body(i, wrong):
            x, y = jnp.cos(0.11 * i + steps), jnp.sin(0.37 * i + 0.01 * steps * (me + 1))
            got = all_reduce.receive(x, [all_reduce.send(y, peers[0, 0])], peers[0, 0])
            apart = jax.lax.pmax(got, "model") != got
            return wrong + ((got != x + jax.lax.psum(y, "model")) | apart).sum()

        return jax.lax.psum(jax.lax.fori_loop(0, 1000, body, 0), "model")

    run = jax.shard_map(on_device, mesh=mesh, in_specs=P("data", "model"), out_specs=P(), check_vma=False)
    assert jax.jit(run)(peers) == 0


@pytest.mark.parametrize("rows", [1, 3, 16])
def test_a_product_that_sends_is_the_product_and_a_sum(mesh, rows):
    """The same bits as by psum, in 100 steps that hand on what they got."""
    from pallas_kernels import all_reduce

    N, K = 512, 1024
    peers = Placement(mesh, "mailbox").peers()

    def on_device(peers):
        seed = jax.random.fold_in(jax.random.key(0), jax.lax.axis_index("model"))
        fields = formats.random_fields("q4_k", seed, (2, N, K // 256), 0.0, K**-0.5)
        w = LayerStack((for_device(QTensor(fields, "q4_k", (N, K))),), ((0, 0), (0, 1)))
        peers = peers[0, 0]

        def body(i, carry):
            x, wrong = carry
            h = jnp.cos(x[:, :1] + jnp.arange(K) * (1 + i) / 7)
            got = all_reduce.receive(x, sent_product(h, w, 1, peers), peers)
            want = x + jax.lax.psum(matmul(h, w, 1), "model")
            return got / 2, wrong + (got != want).sum()

        _, wrong = jax.lax.fori_loop(0, 100, body, (jnp.ones((rows, N)), 0))
        return jax.lax.psum(wrong, "model")

    run = jax.shard_map(on_device, mesh=mesh, in_specs=P("data", "model"), out_specs=P(), check_vma=False)
    assert jax.jit(run)(peers) == 0


@pytest.mark.parametrize("source", ["synth:bonsai-1.7b:q4_k_m", "synth:bonsai-1.7b:q1_0"])
def test_tokens_by_mailbox_are_those_by_nccl(mesh, source):
    load = functools.partial(bj.load, source, mesh=mesh)
    answers = [
        [output.tokens for output in bj.generate(model, PROMPTS, max_new_tokens=24, sampling=SAMPLING)]
        for model in (load(bj.RunConfig(all_reduce=how)) for how in ("psum", "mailbox"))
    ]
    assert answers[0] == answers[1]
