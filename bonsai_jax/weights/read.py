"""The weights that a load plan describes, read onto the device: repacked, and stacked by layer."""

import concurrent.futures
import contextlib
import dataclasses
import functools
import threading
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bonsai_jax.config import ModelConfig
from bonsai_jax.weights.drawing import Drawn
from bonsai_jax.weights.placement import Placement, Share
from bonsai_jax.weights.records import LoadPlan, Matrix, Member, Piece, Stack, Vector
from bonsai_jax.weights.specs import Source, Spec
from checkpoints import RandomTensor
from pallas_kernels import LayerStack, QTensor, device, formats, qtensor
from pallas_kernels.gpu import kernels_first

# Arrays of a model by name, those of layers by kind: fields["layers"]["attention"][group]["o"].
Fields = dict[str, Any]
Run = Callable[..., Any]  # _run or _run_alone

_ALONE = threading.Lock()  # held by the thread whose program runs
_programs: dict[Hashable, jax.stages.Compiled] = {}  # those of `_run_alone`


def read(
    plan: LoadPlan, progress: Callable[[int, int], None] = lambda done, total: None, threads: int = 1
) -> list[Fields]:
    """Every array of a plan, on the default device or over the mesh for which it was made: those of the model
    and, where they are loaded, those of its draft layer and of its draft model.

    progress   called with bytes read so far and in all
    threads    stacks that are made at once: their programs are compiled and their parts of the file are read
               side by side, and each needs the memory of one layer more
    An optional array that the file lacks is not among them. Arrays that join several stacks (q, k and v) are
    tuples.
    """
    done, total = 0, sum(t.nbytes for model in plan.models for _, t in model.description.sources)

    def note(made: Any, tensors: Sequence[Source]) -> None:
        nonlocal done
        _ready(made)
        for t in tensors:
            t.forget()
        done += sum(t.nbytes for t in tensors)
        progress(done, total)

    models = []
    for model in plan.models:
        fields = no_fields(model.config)
        models.append(fields)
        with _each(threads) as each:
            run = _run_alone if threads > 1 else _run
            stacks = each(functools.partial(_stack, placement=model.placement, run=run), model.stacks)
            for stack, made in zip(model.stacks, stacks, strict=True):
                put(fields, stack, made)
                note(made, stack.tensors)
        for vector in model.vectors:
            value = _vector(vector, model.description.naming, model.placement)
            put(fields, vector, value)
            note(value, [t for _, tensors in vector.tensors for t in tensors])
    return models


def no_fields(config: ModelConfig) -> Fields:
    """The fields of a model before any array is read."""
    groups = {kind: [defaultdict(tuple) for _ in config.groups(kind)] for kind in config.kinds}
    return {"layers": groups}


def put(fields: Fields, record: Stack | Vector, made: Any) -> None:
    """Add the array of a record to the fields of its model."""
    group = fields if record.kind is None else fields["layers"][record.kind][record.group]
    joined = isinstance(record, Stack) and record.joined
    group[record.array] = (*group[record.array], made) if joined else made


@contextlib.contextmanager
def _each(threads: int) -> Iterator[Callable[..., Iterator]]:
    """`map`, whose calls run in this many threads at once, under this thread's default device."""
    if threads == 1:  # also for jax.eval_shape, which sees only its own thread
        yield map
        return
    pool = concurrent.futures.ThreadPoolExecutor(threads, "bonsai-jax load")
    try:
        yield lambda function, items: pool.map(device.for_threads(function), items)
    finally:
        pool.shutdown(cancel_futures=True)


def blocks(tensor: Source | RandomTensor) -> jax.Array:
    """A tensor's blocks as a file has them, uint8 [*shape[:-1], bytes of a row]; random ones are drawn."""
    return jnp.asarray((Drawn(tensor) if isinstance(tensor, RandomTensor) else tensor).data)


def _stack(stack: Stack, placement: Placement, run: Run) -> LayerStack | QTensor:
    """The matrices of all layers; the one matrix, if it belongs to no layer."""
    parts: list[QTensor | qtensor.Rows] = []
    for part in stack.parts:
        pieces = []
        for piece in part:
            pieces.append(_matrices(piece, placement, run, stacked=stack.kind is not None))
        if stack.kind is None:
            return pieces[0]
        parts.append(pieces[0] if len(pieces) == 1 else qtensor.Rows(tuple(pieces)))
    return LayerStack(tuple(parts), stack.where)


def _matrices(piece: Piece, placement: Placement, run: Run, *, stacked: bool) -> QTensor:
    """A stack of matrices, or one matrix. A layer that is not copied as it is in the file is written into its
    place in a donated array, so that at most one layer exists twice."""
    matrix = piece.matrix
    if piece.copied:
        data = () if device.traced() else _released(piece.tensors)  # jax.eval_shape reads nothing
        lead = (len(piece.layers), matrix.shape[0])[not stacked :]
        fields = formats.copied(matrix.problem.format, (*lead, matrix.shape[1]), data)
        on_xla = {name: jax.device_put(field, may_alias=True) for name, field in fields.items()}
        made = QTensor(on_xla, matrix.problem.format, matrix.shape, products=matrix.products)
    for index, layer in enumerate(() if piece.copied else piece.layers):
        recipe = Recipe(matrix, tuple(member for member, _ in layer))
        given = tuple(
            t.moments
            if member.drawn and isinstance(t, Drawn)
            else placement.blocks(t, None if member.given_whole else member.share)
            for member, t in layer
        )
        if not stacked:
            made = run(Placement.made, (placement, recipe), given)
            continue
        if index == 0:
            with _ALONE:
                made = _ready(placement.zeros(recipe, given, len(piece.layers)))
        made = run(Placement.placed, (placement, recipe), made, given, np.int32(index))
    return made.replace(rotation=jax.tree.map(lambda value: placement.put(value, (None,)), piece.rotation))


def _ready[T](made: T) -> T:
    """Wait until these arrays are made. Those of jax.eval_shape have nothing to wait for, and for each of
    them jax would print all that is traced into an error that it then drops, 10 ms."""
    return made if device.traced() else jax.block_until_ready(made)


def _run(function: Any, static: tuple, *arguments: Any) -> Any:
    """function(*static, *arguments), of a jitted function."""
    return function(*static, *arguments)


def _run_alone(function: Any, static: tuple, *arguments: Any) -> Any:
    """The same, for several threads: programs are compiled side by side, but what one is given is sent, and
    it is run to its end, before another's is. It seems that XLA may begin a program on a GPU before the copy
    of an argument from the host has ended, while other threads run programs (ROCm/xla pull request 964
    describes how): one of ten loads of a model had wrong weights."""
    leaves, structure = jax.tree.flatten(arguments)
    key = function, static, structure, *((leaf.shape, leaf.dtype) for leaf in leaves), device.in_use()
    program = _programs.get(key)
    if program is None:
        lowered = function.lower(*static, *arguments)
        program = _programs[key] = kernels_first.compile(lowered, {})
    with _ALONE:
        if device.platform() != "cpu":  # which reads NumPy's arrays where they are
            arguments = jax.block_until_ready(jax.device_put(arguments))
        return jax.block_until_ready(program(*arguments))


def _released(tensors: Sequence[Source]) -> Iterator[np.ndarray]:
    """The blocks of each, one after the other. When the next are asked for, their part of the file is
    released."""
    for t in tensors:
        yield t.data
        t.forget()


def _vector(vector: Vector, naming: str, placement: Placement) -> jax.Array:
    """A small array, float32 [layers, *shape], those of several specs side by side; [*shape] of no layer."""
    values = [np.stack([vector_values(t, spec, naming) for t in tensors]) for spec, tensors in vector.tensors]
    if vector.kind is None:
        return placement.put(values[0][0], vector.axes)
    return placement.stacked(values, vector.shares, vector.axes)


def vector_values(t: Source, spec: Spec, naming: str) -> np.ndarray:
    """The values of a small array, float32 [*shape], as GGUF files have them."""
    values = formats.values(t.format, t.data).reshape(spec.matched_shape(t.shape))
    if naming == "huggingface":
        values = values.reshape([size for size in values.shape if size > 1] or [1])
        values = np.asarray(spec.from_huggingface(values)) if spec.from_huggingface else values
    return values


@dataclasses.dataclass(frozen=True)
class Recipe:
    """How each device makes its share of a matrix of what it is given: of each member its blocks, or the
    moments (seed, mean, standard deviation) of which it draws them."""

    matrix: Matrix
    members: tuple[Member, ...]

    @property
    def share(self) -> Share | None:
        return self.members[0].share

    @property
    def whole(self) -> tuple[bool, ...]:
        """Of each member whether every device is given all of it."""
        return tuple(member.given_whole for member in self.members)

    def __call__(self, given: tuple) -> QTensor:
        """The members in their stored form, rows below rows."""
        made = [_made(member, one) for member, one in zip(self.members, given, strict=True)]
        fields = made[0].fields
        if len(made) > 1:
            fields = {name: jnp.concatenate([w.fields[name] for w in made]) for name in fields}
        w, products = QTensor(fields, made[0].format, self.matrix.shape), self.matrix.products
        return (qtensor.tile(w) if products.tiled else w).replace(products=products)


def _made(member: Member, given) -> QTensor:
    if member.drawn:
        seed, mean, std = given
        n, k = member.shape
        lead = (*([member.experts] if member.experts else []), n, k // formats.get(member.format).WEIGHTS)
        fields = formats.random_fields(member.format, jax.random.key(seed), lead, mean, std)
        w = QTensor(fields, member.format, member.shape)
    else:
        w = qtensor.from_blocks(given, member.format)
    # Where a share cuts blocks, values are cut.
    share = member.share if member.given_whole else None
    w = share.own(w) if share and share.whole_blocks else w
    w = w if w.format == member.stored else qtensor.quantize(qtensor.dequantize(w), member.stored)
    return share.own(w) if share and not share.whole_blocks else w
