"""CPU kernels against numpy in float64, with the weights that each format's oracle dequantizes."""

import functools
import hashlib
import importlib.util
import multiprocessing
import os
import platform
import subprocess
import sys
import threading
import time
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from bonsai_jax.cli.figures import CompileClock
from pallas_kernels import attention, formats, from_blocks, gated, matmul, selection
from pallas_kernels.attention import cpu
from pallas_kernels.problems import Matmul
from pallas_kernels.qtensor import Products
from pallas_kernels.selection import choose, explain, for_device
from tests.pallas_kernels import expected_blocks
from tests.pallas_kernels.naive_attention import naive_attention
from tests.pallas_kernels.stacks import numbers_of, pages_of

FORMATS = [name for name in formats.names() if hasattr(formats.get(name), "CPU")]
KINDS = ("plain", "normed", "added", "gated")
RAGGED, WHOLE = 640, 1024  # columns: no multiple of 256, and one


made = jax.jit(from_blocks, static_argnums=1)  # outside of jit each operation would be compiled alone


def weights(format, seed, *shape, bits=8):
    """A stack [layers, N, K] of expected blocks, and their weights in float64."""
    *lead, k = shape
    size = formats.get(format).BLOCK.itemsize
    expected = expected_blocks.load(format)
    raw = expected.raw.reshape(-1, size)
    dense = expected.weights.reshape(len(raw), -1)
    which = np.random.default_rng(seed).integers(0, len(raw), (*lead, k // dense.shape[1]))
    w = made(raw[which].reshape(*lead, -1), format)
    w = w.replace(products=Products(((None, "cpu"),), bits))
    return w, dense[which].reshape(*lead, k).astype(np.float64)


def exact_activations(rng, rows, k):
    """float32 [rows, k] that are integers of 8 bits times a power of two, the same in each 128 columns, and
    stay so when they are rounded in groups of runs of 8 or more."""
    x = rng.integers(-127, 128, (rows, k // 8, 8))
    x[..., 5] = 127
    return x.reshape(rows, k) * np.repeat(2.0 ** rng.integers(-9, -6, (rows, k // 128)), 128, axis=1)


def error(got, want):
    return np.linalg.norm(np.asarray(got, np.float64) - want) / np.linalg.norm(want)


def silu(x):
    return x / (1 + np.exp(-x))


def seen(format):
    """What a kernel's code sees of a format, but for the functions that make codes and scales."""
    v, size = formats.get(format).CPU, formats.get(format).WEIGHTS
    return size, v.columns.tobytes(), v.group, v.shares, v.scales is None, v.minimums is None, v.zero > 0


# A format's own functions are those of every kernel: all formats for few rows, one of each kind otherwise.
KINDS_OF = {seen(format): format for format in reversed(FORMATS)}.values()
CASES = [(format, 8, (1, 2, 5)) for format in FORMATS]
CASES += [
    pytest.param(format, bits, rows, marks=[] if format in KINDS_OF else pytest.mark.slow)
    for bits, rows in ((16, (1, 2, 5)), (8, (9,)))
    for format in FORMATS
]
CASES += [(format, 16, (7,)) for format in ("q4_0", "q4_k", "q1_0")]
CASES += [("q1_0", 8, (rows,)) for rows in (8, 10, 11, 13)]  # in halves, of each kind, and a panel


@pytest.mark.parametrize(("format", "bits", "rows"), CASES)
def test_the_kernel_is_the_product(format, bits, rows):
    case = formats.names().index(format) + bits + rows[0]
    rows, kind = rows[case % len(rows)], KINDS[case % 4]
    k = RAGGED if 256 % formats.get(format).WEIGHTS == 0 and formats.get(format).WEIGHTS < 256 else WHOLE
    rng = np.random.default_rng(case)
    w, dense = weights(format, case, 3, 37, k, bits=bits)
    x = exact_activations(rng, rows, k)
    gamma = np.repeat(2.0 ** rng.integers(-1, 2, (3, k // 128)), 128, axis=1)
    residual = rng.standard_normal((rows, 37))
    norm = 1 / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    normed = norm * x * gamma[2]
    # numpy's: for jax's each shape would be copied and cast by programs of its own.
    f32 = lambda a: np.asarray(a, np.float32)  # noqa: E731
    if kind == "plain":
        got, want = matmul(f32(x), w, 2), x @ dense[2].T
    elif kind == "normed":
        got, want = matmul(f32(x), w, 2, gamma=f32(gamma), eps=1e-6), normed @ dense[2].T
    elif kind == "added":
        got, want = matmul(f32(x), w, 2, residual=f32(residual)), x @ dense[2].T + residual
    else:
        up, dense_up = weights(format, case + 1, 3, 37, k, bits=bits)
        got = gated(f32(x) / 64, w, up, 2, gamma=f32(gamma), eps=1e-6)
        small = x / 64
        normed = small / np.sqrt((small**2).mean(-1, keepdims=True) + 1e-6) * gamma[2]
        want = silu(normed @ dense[2].T) * (normed @ dense_up[2].T)
    assert error(got, want) < 2e-6


# The columns that have a scale together, as axes of a row: where a format has one for more than 32, runs of
# the group that lie in the same lanes.
SHARES = {
    "q4_1": ((-1, 32), (0, 1)),
    "q6_k": ((-1, 16), (0, 1)),
    "q2_0_g64": ((-1, 32), (0, 1)),
    "q2_0_g128": ((-1, 32), (0, 1)),
    "q1_0": ((-1, 32), (0, 1)),
    "ptq1_0": ((-1, 2, 4, 16), (0, 2, 1, 3)),
    "tq2_0": ((-1, 4, 4, 8), (0, 2, 1, 3)),
}


@pytest.mark.parametrize("format", SHARES)
@pytest.mark.parametrize("rows", [2, 9])
def test_activations_are_rounded_in_groups_of_at_most_32(format, rows):
    """By both kernels. Activations of a group differ in size, as a model's do."""
    w, dense = weights(format, 1, 40, 512)
    rng = np.random.default_rng(2)
    x = (rng.standard_normal((rows, 512)) * np.exp(rng.standard_normal((rows, 512)))).astype(np.float32)
    shape, axes = SHARES[format]
    shares = x.reshape(rows, *shape).transpose(0, *(axis + 1 for axis in axes))
    size, flat = 16 if format == "q6_k" else 32, shares.reshape(rows, -1)
    flat = flat.reshape(rows, -1, size).astype(np.float64)
    largest, factors = np.abs(flat).max(-1, keepdims=True), formats.get(format).CPU.shares
    group = (
        largest.reshape(rows, -1, factors, 1).max(2, keepdims=True).repeat(factors, 2).reshape(largest.shape)
    )
    each = []
    for a in (127, 125, 123):
        scale = largest / a
        if factors > 1:  # whole 256ths of the group's
            scale = np.ceil(256 * 127 * scale / group) * group / (256 * 127)
        each.append(np.rint(flat / scale) * scale)
    errors = [((flat - rounded) ** 2).sum(-1, keepdims=True) for rounded in each]
    rounded = np.take_along_axis(np.array(each), np.argmin(errors, 0)[None], 0).reshape(shares.shape)
    rounded = rounded.transpose(0, *(np.argsort(axes) + 1)).reshape(rows, 512)
    got = matmul(jnp.asarray(x), w)
    assert error(got, rounded @ dense.T) < 1e-4 < 1e-3 < error(got, x @ dense.T) < 2e-2


@pytest.mark.parametrize("format", ["q4_k", "q1_0", "q6_k"])
def test_rows_have_their_bits_whatever_panels_and_tiles_they_share(format):
    """13 panels. With a matrix unit, 37 rows are two of its tiles and 5 rows by vectors, 45 are three."""
    w, _ = weights(format, 3, 400, 1280)
    for count in (37, 45):
        x = np.random.default_rng(count).standard_normal((count, 1280)).astype(np.float32)
        few = [matmul(x[i : i + 5], w) for i in range(0, count, 5)]
        np.testing.assert_array_equal(matmul(x, w), np.concatenate(few))


@pytest.mark.parametrize("rows", [2, 6, 7, 33])
@pytest.mark.parametrize(
    ("format", "bits"), [("q4_k", 8), ("q4_1", 8), ("q1_0", 8), ("q6_k", 16), ("f16", 8)]
)
def test_rows_have_the_same_bits_whatever_is_beside_them(format, bits, rows):
    """By both kernels, also where columns fill no whole chunk."""
    w, _ = weights(format, 3, 70, 512 if format in ("q4_k", "q6_k", "q1_0") else 480, bits=bits)
    x = np.random.default_rng(rows).standard_normal((rows, w.shape[1])).astype(np.float32)
    together = np.asarray(matmul(x, w))
    np.testing.assert_array_equal(together, np.stack([matmul(row, w) for row in x]))


def test_a_layer_that_is_traced_in_a_scan():
    w, dense = weights("q8_0", 5, 3, 20, 256)
    x = exact_activations(np.random.default_rng(6), 2, 256)
    one_layer = lambda carry, layer: (carry, matmul(jnp.asarray(x, jnp.float32), w, layer))  # noqa: E731
    _, y = jax.jit(lambda: jax.lax.scan(one_layer, 0, jnp.arange(3)))()
    assert error(y, np.einsum("mk,lnk->lmn", x, dense)) < 2e-6


def test_transformations():
    """vmap makes rows of it, derivatives are the reference's."""
    w, dense = weights("q5_0", 7, 24, 256)
    x = jnp.asarray(exact_activations(np.random.default_rng(8), 5, 256), jnp.float32)
    np.testing.assert_array_equal(jax.jit(jax.vmap(lambda row: matmul(row, w)))(x), matmul(x, w))
    gradient = jax.grad(lambda x: matmul(x, w).sum())(x)
    assert error(gradient, np.broadcast_to(dense.sum(0), x.shape)) < 1e-6


def large_product(rows=1):
    """What many threads compute: rows of weights enough for all of them; of activations few, or many."""
    w, _ = weights("q4_1", 9, 2, 1500, 640)
    x = jnp.asarray(np.random.default_rng(10).standard_normal((rows, 640)), jnp.float32)

    @jax.jit
    def steps(x):
        y = lambda i, x: x + 1e-3 * matmul(x, w, i % 2)[:, :640]  # noqa: E731
        return jax.lax.fori_loop(0, 50, y, x)

    return steps, x


def digest(_=None) -> str:
    results = [steps(x) for steps, x in map(large_product, (1, 9))]
    return hashlib.sha256(b"".join(np.asarray(y).tobytes() for y in results)).hexdigest()


def by_avx2(*features):
    """In a process of its own: what processors without AVX-512 run."""
    from pallas_kernels.cpu import compiled

    compiled.processor = lambda: ("x86-64-v3", ",".join(["+avx2", "+fma", "+f16c", *features]))
    for format in ("q1_0", "tq2_0", "q4_k", "q5_1", "iq4_nl"):
        for rows in (2, 9):
            w, dense = weights(format, 1, 37, WHOLE)
            x = exact_activations(np.random.default_rng(rows), rows, WHOLE).astype(np.float32)
            assert error(matmul(x, w), x @ dense.T) < 2e-6, (format, rows)


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="for x86")
@pytest.mark.parametrize("vnni", [False, True])
def test_processors_without_avx512_have_the_product_too(vnni, tmp_path):
    from pallas_kernels.cpu import compiled

    if vnni and not compiled.has("avxvnni"):
        pytest.skip("this processor has no AVX-VNNI")
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    code = "from tests.pallas_kernels import test_cpu; test_cpu.by_avx2({})".format("'+avxvnni'" * vnni)
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr


def for_arm():
    """In a process of its own: kernels as processors with NEON have them, compiled for one of these too, and
    run on this one."""
    from llvmlite import binding as llvm

    import bonsai_jax as bj
    from pallas_kernels.cpu import compiled

    compiled._machine()  # this processor's
    compiled.processor = lambda: ("generic", "+neon")
    llvm.initialize_all_targets()
    llvm.initialize_all_asmprinters()
    arm = llvm.Target.from_triple("aarch64-unknown-linux-gnu").create_target_machine(features="+neon", opt=3)
    times, code = [], compiled._code

    def both(text):
        module = llvm.parse_assembly(text)
        module.triple, module.data_layout = arm.triple, str(arm.target_data)
        began = time.perf_counter()
        assert arm.emit_object(module)
        times.append(time.perf_counter() - began)
        return code(text)

    compiled._code = both
    for format in ("q4_k", "f16"):
        for rows in (2, 9):
            w, dense = weights(format, 1, 37, WHOLE)
            x = exact_activations(np.random.default_rng(rows), rows, WHOLE).astype(np.float32)
            assert error(matmul(x, w), x @ dense.T) < 2e-6, (format, rows)
    products = len(times)
    bj.generate(bj.load("synth:tiny-llama:q8_0"), "a b c", max_new_tokens=2)  # attention and the draw, too
    print(products, len(times), max(times))


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="for x86, which has other kernels")
def test_kernels_for_arm_are_compiled_in_seconds_and_are_right(tmp_path):
    """Masks of elements, which these processors have not, had taken LLVM minutes."""
    environment = os.environ | {"JAX_COMPILATION_CACHE_DIR": str(tmp_path)}
    code = "from tests.pallas_kernels import test_cpu; test_cpu.for_arm()"
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    products, kernels, longest = done.stdout.split()
    assert int(products) >= 4 and int(kernels) >= int(products) + 4 and float(longest) < 60


@pytest.fixture(scope="module")
def processes(tmp_path_factory):
    """One of one thread, then one of three, with an empty folder for what is compiled: what each found, and
    when the kernels in the folder were written."""
    folder, runs = tmp_path_factory.mktemp("compiled"), []
    code = "from tests.pallas_kernels import test_cpu; print(test_cpu.digest())"
    for threads in ("1", "3"):
        environment = os.environ | {"NPROC": threads, "JAX_COMPILATION_CACHE_DIR": str(folder)}
        done = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120
        )
        assert done.returncode == 0, done.stderr
        written = {path: path.stat().st_mtime_ns for path in folder.glob("cpu-*.o")}
        runs.append((done.stdout.strip(), written))
    return runs


def test_the_number_of_threads_changes_no_bit(processes):
    assert [result for result, _ in processes] == 2 * [digest()]


def test_code_is_cached_beside_the_compiled_programs(processes):
    """One file for few rows' kernel and one for many rows'; a second process reads them and writes none."""
    (_, first), (_, second) = processes
    assert len(first) == 2 and first == second


@pytest.mark.parametrize("rows", [1, 9])
def test_two_threads_run_steps_at_once(rows):
    steps, x = large_product(rows)
    want, results = np.asarray(steps(x)), []

    def run():
        results.extend(np.asarray(steps(x)) for _ in range(10))

    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(results) == 40
    for y in results:
        np.testing.assert_array_equal(y, want)


def test_processes_that_python_starts_run_it():
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(digest, [0]) == [digest()]


def test_without_the_package_the_reference_runs(monkeypatch):
    find = importlib.util.find_spec
    problem = Matmul("cpu", "q4_k", 64, 256)
    assert choose(problem, 1) == "cpu" == choose(problem, 500)
    missing = lambda name, *rest: None if name == "llvmlite" else find(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", missing)
    assert choose(problem, 1) == "reference"
    (verdict,) = (v for v in explain(problem) if v.kernel == "cpu")
    assert verdict.reason == "needs the package llvmlite: install the extra `cpu`"


def test_float32_stays_with_the_reference():
    assert selection.products(Matmul("cpu", "f32", 64, 256)).kernels == ((None, "reference"),)


def test_formats_are_read_without_the_package():
    """A GPU's machine need not have it."""
    without = "import sys; sys.modules['llvmlite'] = None; from pallas_kernels import formats"
    code = f"{without}; print(*(formats.get(name).__name__ for name in formats.names()))"
    read = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert len(read.stdout.split()) == len(formats.names()), read.stderr


def test_what_is_chosen_for_this_device_leaves_the_blocks_as_they_lie():
    w, _ = weights("q4_k", 11, 8, 256)
    chosen = for_device(w)
    assert chosen.products.kernels == ((None, "cpu"),) and not chosen.tiled
    assert chosen.fields.keys() == w.fields.keys()


def later(monkeypatch, made, bits):
    """What runs a product by a kernel that `made` compiles, and what it is. bits: of activations, which each
    caller has alone, so that this process does not have the kernel; above 8 they stay float32."""
    from pallas_kernels.cpu import compiled

    compile = compiled.compile
    own = lambda names: names[0].startswith("bonsai_later")  # noqa: E731
    monkeypatch.setattr(compiled, "cache_path", lambda *_: None)
    monkeypatch.setattr(
        compiled,
        "compile",
        lambda names, *rest: compile(names, *rest) if own(names) else made(compile, names, *rest),
    )
    w, dense = weights("q8_0", 1, 8, 64, bits=bits)
    x = jnp.ones((1, 64))
    program = jax.jit(lambda x, w: matmul(x, w)).lower(x, w).compile()
    return (lambda: program(x, w)), np.ones((1, 64)) @ dense.T


def test_a_program_is_compiled_before_its_kernels_are_and_waits_for_them(monkeypatch):
    done = threading.Event()
    run, want = later(monkeypatch, lambda compile, *rest: done.wait(60) and compile(*rest), 17)
    assert not done.is_set()
    clock, began = CompileClock(), time.perf_counter()
    threading.Timer(0.2, done.set).start()
    got = jax.block_until_ready(run())
    assert clock.seconds(began, time.perf_counter()) > 0.15  # so that speeds do not include it
    assert error(got, want) < 1e-5
    assert done.is_set() and error(run(), want) < 1e-5


def test_a_fork_waits_for_kernels_that_are_being_compiled(monkeypatch):
    """A child has no thread that would end them."""
    done = threading.Event()
    later(monkeypatch, lambda compile, *rest: done.wait(60) and compile(*rest), 18)
    threading.Timer(0.2, done.set).start()
    with warnings.catch_warnings(action="ignore"):  # of jax's, that it has threads
        child = os.fork()
    if child == 0:
        os._exit(0)
    assert done.is_set() and os.waitpid(child, 0)[1] == 0


def test_a_kernel_that_cannot_be_compiled_is_an_error_that_says_why(monkeypatch):
    def made(*_):
        raise MemoryError("no room")

    run, _ = later(monkeypatch, made, 19)
    for _ in range(2):
        with pytest.raises(jax.errors.JaxRuntimeError, match="could not be compiled: MemoryError"):
            jax.block_until_ready(run())


HEADS = {
    "float32": (9, 3, 64, None, None, 1.5),
    "float16": (16, 2, 128, None, 0.2, None),
    "bfloat16": (4, 4, 96, 11, None, None),
    "int8": (6, 2, 64, 17, None, 50.0),
}


@functools.cache
def attention_case(dtype, tokens):
    """(q, k, v, table, positions, options): shuffled pages, a row that is padding, one that fills its pages,
    and one with padding at the end; a window, a scale, a softcap, sinks."""
    heads, kv_heads, head_dim, window, scale, softcap = HEADS[dtype]
    rng, sinks = np.random.default_rng(12), None
    if dtype in ("float32", "int8"):
        sinks = np.resize(np.array([0.5, 4.0, -30.0], np.float32), (2, heads))
    k, v = (pages_of(dtype, np.float32(rng.standard_normal((2, 15, 8, kv_heads, head_dim)))) for _ in "kv")
    q = rng.standard_normal((3, tokens, heads, head_dim)).astype(np.float32)
    table, positions = rng.permutation(15).reshape(3, 5), np.full((3, tokens), -1)
    positions[1] = np.arange(40)[-tokens:]
    real = max(1, tokens - 2)
    positions[2, :real] = np.arange(21)[-real:]
    options = {"window": window, "scale": scale, "softcap": softcap}
    return q, k, v, table, positions, options | {"sinks": None if sinks is None else jnp.asarray(sinks)}


def attended(q, k, v, table, positions, options):
    places = jnp.asarray(table), jnp.asarray(positions), 1
    return np.asarray(cpu.run(jnp.asarray(q), k, v, *places, num_keys=40, **options))


@pytest.mark.parametrize("tokens", [1, 19])
@pytest.mark.parametrize("dtype", HEADS)
def test_attention_is_numpys(dtype, tokens):
    q, k, v, table, positions, options = attention_case(dtype, tokens)
    got = attended(q, k, v, table, positions, options)
    assert got.shape == q.shape and not got[positions < 0].any()
    kv_heads, head_dim = HEADS[dtype][1:3]
    for row in (1, 2):
        real = positions[row] >= 0
        keys, values = (
            np.float64(numbers_of(pages))[1, table[row]].reshape(40, kv_heads, head_dim) for pages in (k, v)
        )
        *scores, sinks = options.values()
        own = None if sinks is None else np.asarray(sinks)[1]
        want = naive_attention(q[row, real], keys, values, positions[row, real], *scores, own)
        assert error(got[row, real], want) < 1e-6


@pytest.mark.parametrize("dtype", HEADS)
def test_a_tokens_attention_has_the_same_bits_alone_and_in_a_prompt(dtype):
    """Padded too: positions of -1 are tokens beside it as well."""
    q, k, v, table, positions, options = attention_case(dtype, 19)
    together = attended(q, k, v, table, positions, options)
    for t in range(0, 19, 6):
        alone = attended(q[:, t : t + 1], k, v, table, positions[:, t : t + 1], options)
        np.testing.assert_array_equal(together[:, t : t + 1], alone)
    half = attended(q[:, :10], k, v, table, positions[:, :10], options)
    np.testing.assert_array_equal(together[:, :10], half)


def test_attention_under_vmap_and_grad():
    rng = np.random.default_rng(13)
    k, v = (jnp.asarray(rng.standard_normal((1, 3, 8, 2, 16)), jnp.float32) for _ in "kv")
    q = jnp.asarray(rng.standard_normal((4, 1, 1, 4, 16)), jnp.float32)
    places = jnp.arange(3)[None], jnp.array([[20]]), 0
    rest = {"num_keys": 24, "softcap": 2.0, "sinks": jnp.array([[0.5, 2.0, -1.0, 0.0]])}
    one = lambda q, v: cpu.run(q, k, v, *places, **rest)  # noqa: E731
    exact = lambda q, v: attention(q, k, v, *places, **rest)  # noqa: E731
    got, want = (jax.jit(jax.vmap(f, (0, None)))(q, v) for f in (one, exact))
    assert error(got, np.asarray(want, np.float64)) < 1e-6
    got, want = (jax.jit(jax.grad(lambda v, f=f: (f(q[0], v) ** 2).sum()))(v) for f in (one, exact))
    assert error(got, np.asarray(want, np.float64)) < 1e-5
