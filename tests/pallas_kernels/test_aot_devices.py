"""What several GPUs run compiles for them, and a device makes no more than its share of a weight."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import bonsai_jax as bj
from bonsai_jax.network import architectures
from bonsai_jax.weights import plan as load_plans
from bonsai_jax.weights import read as reading
from bonsai_jax.weights.placement import Placement
from checkpoints import open_checkpoint
from pallas_kernels import LayerStack, QTensor, all_reduce, for_device, formats
from pallas_kernels.matmul import sent_product
from tests.pallas_kernels.aot import as_on_a_gpu, compile_for_mesh, gpu_mesh

pytestmark = pytest.mark.aot


def test_a_device_makes_its_share_of_a_weight_only():
    mesh, description = gpu_mesh(4), architectures.describe(open_checkpoint("synth:llama-70b:q4_k_m"))
    placement = Placement(mesh)
    config = dataclasses.replace(description.config, layers=description.config.layers[:1])
    with as_on_a_gpu((9, 0)):
        for spec in (spec for spec in description.tensors if spec.field in ("gate", "down")):
            t = description.tensors[spec][0]
            run = bj.RunConfig(weights="packed", cache_dtype="float16")
            alone = dataclasses.replace(description, config=config, tensors={spec: {0: t}})
            (stack,) = load_plans.planned(alone, run, placement).stacks
            recipe = reading.Recipe(stack.pieces[0].matrix, tuple(stack.members))
            assert recipe.matrix.products.tiled and recipe.share

            def make(seed, mean, std, recipe=recipe):
                return placement.made(recipe, ((seed, mean, std),))

            scalars = [((), jnp.uint32, P()), ((), jnp.float32, P()), ((), jnp.float32, P())]
            compiled = compile_for_mesh(make, mesh, *scalars)
            memory = compiled.memory_analysis()
            assert memory.output_size_in_bytes == pytest.approx(t.nbytes / 4, rel=0.01)
            assert memory.temp_size_in_bytes < t.nbytes  # of each device's part: codes of 8 bits
            assert "all-" not in compiled.as_text()


@pytest.mark.parametrize("rows", [1, 16])
def test_a_sum_through_mailboxes_is_two_launches(rows):
    mesh = gpu_mesh(4)

    def total(x, y, peers):
        def on_device(x, y, peers):
            return all_reduce.receive(x, [all_reduce.send(y[0], peers[0, 0])], peers[0, 0])

        specs = (P(), P("model"), P("data", "model"))
        return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(
            x, y, peers
        )

    compiled = compile_for_mesh(
        total,
        mesh,
        ((rows, 1, 8192), jnp.float32, P()),
        ((4, rows, 1, 8192), jnp.float32, P("model")),
        ((1, 4, 6, 2), jnp.uint32, P("data", "model")),
    )
    text = compiled.as_text()
    assert text.count("mosaic_gpu_v2") == 2 and "all-reduce" not in text


@pytest.mark.parametrize(
    ("format", "columns", "rows"), [("q4_k", 2048, 1), ("q4_k", 7168, 8), ("q6_k", 7168, 1)]
)
def test_a_product_sends_what_it_makes_itself(format, columns, rows):
    """o and down of the 70B model, of which each of four devices has a quarter of the columns."""
    mesh, n = gpu_mesh(4), 8192
    blocks = jax.eval_shape(
        lambda: formats.random_fields(format, jax.random.key(0), (1, n, columns // 256), 0.0, 0.02)
    )
    with as_on_a_gpu((9, 0)):
        whole = jax.eval_shape(lambda fields: for_device(QTensor(fields, format, (n, columns))), blocks)
    names = sorted(whole.fields)

    def total(x, h, peers, *fields):
        def on_device(x, h, peers, *fields):
            weight = whole.replace(fields=dict(zip(names, fields, strict=True)))
            sent = sent_product(h, LayerStack((weight,), ((0, 0),)), 0, peers[0, 0])
            return all_reduce.receive(x, sent, peers[0, 0])

        specs = (P(), P(), P("data", "model"), *[P()] * len(names))
        return jax.shard_map(on_device, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)(
            x, h, peers, *fields
        )

    with as_on_a_gpu((9, 0)):
        compiled = compile_for_mesh(
            total,
            mesh,
            ((rows, 1, n), jnp.float32, P()),
            ((rows, 1, columns), jnp.float32, P()),
            ((1, 4, 6, 2), jnp.uint32, P("data", "model")),
            *((whole.fields[name].shape, whole.fields[name].dtype, P()) for name in names),
        )
    text = compiled.as_text()
    assert text.count("mosaic_gpu_v2") == 2 and "all-reduce" not in text
