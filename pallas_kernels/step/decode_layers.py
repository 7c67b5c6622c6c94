"""All layers of a decode step in one launch, a block on each multiprocessor.

A chain of small kernels waits at every link for its launch, then for its first weights. Here each block keeps
its share of a whole layer's weights in shared memory, and asks for the next layer's share of a phase when
that phase is done: weights are there before the activations that they wait for.

    x -> [norm, qkv] -> [attention] -> [o, + x] -> x -> [norm, gate, up, SwiGLU] -> [down, + x] -> x

Each [phase] is that of bit_mma/product.py or attention/decode.py. A block has the same tiles of a phase in
every layer; what a phase needs besides activations (gammas, first keys and values) is on its way before it
waits for them.

Weights lie in shared memory (shared_weights.py); so do keys and values, in place of weights that are asked
for when they have been read. Blocks that have no share of attention ask for weights evenly meanwhile.
Activations go from block to block through a workspace in global memory (workspace.py). The residual stream
itself stays exact with the block that adds to it; the workspace has what the others see of it.
"""

import contextlib
import dataclasses
import functools
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import cache_layouts
from pallas_kernels.attention.decode import Attention
from pallas_kernels.attention.decode_cache import Cache
from pallas_kernels.attention.decode_plan import THREADS, WARPS
from pallas_kernels.attention.decode_sources import visit_bytes
from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.exchange import Exchange
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import index, minimum, real, select, total, true
from pallas_kernels.matmul.bit_mma.plane_product import PlaneProduct
from pallas_kernels.matmul.bit_mma.product import GROUP, LaneColumns
from pallas_kernels.step import low_rank
from pallas_kernels.step.inputs import StepChanges, StepInputs
from pallas_kernels.step.low_rank import READERS, LowRankChanges
from pallas_kernels.step.shapes import Phase, Shapes, Vector
from pallas_kernels.step.shared_weights import SharedWeights
from pallas_kernels.step.workspace import Workspace, begun, workspace_words

MOST_EVEN_ROWS = 8  # with more, no registers are left for `asks_evenly`
MOST_EARLY_KEYS = 512  # of all rows: more are not requested a layer early, they would queue behind weights


@functools.partial(jax.jit, static_argnames=("shapes", "interleaved"))
def decode_layers(
    x: jax.Array,
    weights: tuple[tuple[jax.Array, jax.Array], ...],
    inputs: StepInputs,
    changes: StepChanges | None = None,
    *,
    shapes: Shapes,
    interleaved: bool,
) -> tuple[jax.Array, cache_layouts.Pages, cache_layouts.Pages]:
    """One token of every row through all layers.

    x <- x + W_o attention(norm(x));  x <- x + W_down activation(W_gate n, W_up n),  n = norm(x)

    x          float32 [rows, hidden]
    weights    (words, scales) of qkv, o, gate, up and down: tiled stacks (formats/q1_0.py)
    changes    low-rank changes beside these, of one row: those of shapes.changes
    Returns x float32 [rows, hidden] and the pages, which are updated in place.
    """
    layers, layout = weights[0][0].shape[0], cache_layouts.recognize(inputs.k_pages)
    shapes = dataclasses.replace(shapes, cache_bits=8 * jax.tree.leaves(layout.DTYPE)[0].itemsize)
    page_size, pages_of_row = cache_layouts.shape(inputs.k_pages)[2], inputs.block_table.shape[1]
    attention = shapes.attention(page_size, pages_of_row, inputs.head_norms is not None, interleaved)
    pad = lambda a, n: jnp.pad(a, ((0, 0), (0, n - a.shape[1])))  # noqa: E731
    x = pad(x, shapes.width(Vector.X))
    more = attention.partials + (low_rank.workspace_words(shapes, attention) if changes else 0)
    x_ref, workspace = jax.new_ref(x), jax.new_ref(begun(shapes, x, more))
    pages = jax.tree.map(jax.new_ref, (inputs.k_pages, inputs.v_pages))
    weight_bytes, scratch_bytes = shapes.buffers
    launch(
        lambda **refs: _Step(shapes, attention, layers, layout, **refs).run(),
        {
            "weights": weights,
            "changes": None if changes is None else low_rank.flattened(changes),
            "norms": (inputs.attn_norm, inputs.ffn_norm),
            "head_norms": inputs.head_norms,
            "bias": None if inputs.bias is None else pad(inputs.bias, shapes.width(Vector.QKV)),
            "rotation": inputs.rotation,
            "positions": inputs.positions,
            "table": inputs.block_table,
            "x": x_ref,
            "workspace": workspace,
            "pages": pages,
        },
        {},
        name="decode_layers",
        blocks=shapes.blocks,
        threads=32 * shapes.warps,
        scratch={
            "weights_smem": plgpu.SMEM((weight_bytes // 4,), jnp.int32),
            "scratch_smem": plgpu.SMEM((scratch_bytes // 4,), jnp.float32),
        },
    )
    return jax.freeze(x_ref)[:, : shapes.hidden], *jax.tree.map(jax.freeze, pages)


class _Outputs(NamedTuple):
    """This thread's outputs of a round (Product.outputs), and of each, if any has it, what is added to it,
    its rows of B, and the gamma of who multiplies it with an A."""

    own: list
    added: list
    b: list
    gamma: list


class _Step:
    """The step, as a lane of a block sees it; refs without a suffix are of global memory."""

    def __init__(
        self, shapes: Shapes, attention: Attention, layers: int, layout, *, weights, changes, norms,
        head_norms, bias, rotation, positions, table, x, workspace, pages, weights_smem, scratch_smem,
    ):  # fmt: skip
        self.shapes, self.products, self.attention, self.layers = shapes, shapes.products(), attention, layers
        self.gamma = {Phase(phase): ref for phase, ref in zip((Phase.QKV, Phase.GATE_UP), norms, strict=True)}
        self.bias, self.x, self.scratch = bias, x, scratch_smem
        self.cache = Cache(layout, pages, table, positions, rotation, head_norms)
        mbarriers = memory.shared_address(scratch_smem) + 4 * shapes.scratch
        self.weights = SharedWeights(shapes, layers, weights, weights_smem, mbarriers)
        self.workspace = Workspace(shapes, workspace)
        self.changes = None
        if changes is not None:
            begin = workspace_words(shapes) + attention.partials
            self.changes = LowRankChanges(shapes, attention, layers, changes, workspace, begin, scratch_smem)

    @property
    def attends_groups(self) -> bool:
        """Whether a block of attention makes whole groups of what o reads, of several rows."""
        return self.shapes.passes_on and self.attention.heads * self.attention.head_dim % GROUP == 0

    def run(self):
        self.lane_state = self.attention.keep(self.cache)
        self.weights.prepare()
        if changes := self._changes_after(Phase.DOWN):
            with lanes.when(self._takes_part(Phase.DOWN)):
                changes.begin(self.x, self.gamma[Phase.QKV], self.workspace.tag_read(Phase.QKV, index(0)))
        lanes.loop(0, self.layers, 1, [], self._layer)
        if self.shapes.passes_on:  # what the last layer adds
            p = self.products[Phase.QKV]
            self._with_groups(
                Phase.QKV,
                lambda group, row: self._residual(
                    Phase.QKV, index(self.layers), row, p.columns_of_lane(group)
                ),
            )

    def _layer(self, layer, carry):
        for phase in Phase:
            takes_part = self._takes_part(phase)
            if phase != Phase.ATTENTION and self.shapes.passes_on:
                self._pass_on(phase, layer)
            if phase == Phase.ATTENTION and self.asks_evenly:
                with lanes.when(~self._attends()):
                    self.weights.request_evenly(layer)
            with lanes.when(takes_part):
                self._attend(layer) if phase == Phase.ATTENTION else self._product(phase, layer)
            if phase != Phase.ATTENTION:
                with lanes.when(~self._takes_part(phase)):
                    self._request_during(phase, layer)
        return carry

    def _takes_part(self, phase: Phase):
        if phase == Phase.ATTENTION:
            return lanes.block() < self.attention.blocks
        return self.weights.takes_part(phase)

    def _request_during(self, phase: Phase, layer):
        """Request what can be requested once the activations of a phase have arrived; weights that go where
        keys lie, once these have been read."""
        if phase == Phase.QKV and self.has_slots:
            with self._attending_warps():
                self.attention.ask(self.cache, self.lane_state, layer, self._slot, ~self._asked())
        self.weights.request_during(phase, layer, self._attends() if self.asks_evenly else None)
        if phase == Phase.QKV and not self.asks_evenly:
            with lanes.when(~self._attends() if self.has_slots else true()):
                self.weights.request_during(Phase.ATTENTION, layer)

    def _attends(self):
        """Whether this block has a share of attention."""
        return self.attention.has_share(self.lane_state)

    @property
    def asks_evenly(self) -> bool:
        """Whether blocks that have no share of attention ask for down while others attend, and not before and
        after it. Where keys go to registers, no registers are left for that."""
        return self.has_slots and self.shapes.rows <= MOST_EVEN_ROWS

    def _attending_warps(self):
        """For `with`: code that only the warps of attention run."""
        if not self.attention.other_warps:
            return contextlib.nullcontext()
        return lanes.when(lanes.thread() < THREADS)

    def _asked(self):
        """Whether this warp's first keys are asked for while q is made."""
        return lanes.thread() // 32 < self.shapes.early_slots

    @property
    def has_slots(self) -> bool:
        """Whether keys and values go to shared memory."""
        fits = visit_bytes(self.attention, self.cache.layout) == self.shapes.slot_bytes
        return fits and self.shapes.slots != []

    def _slot(self, warp):
        """Address of a warp's first slot, and what makes it that of its second by xor; 0 if it has none."""
        size, slots = self.shapes.slot_bytes, self.shapes.slots

        def address(warp, slots):
            at = warp * size + slots[0]
            for w in range(1, len(slots)):
                if slots[w] != slots[w - 1] + size:
                    at = select(warp < w, at, (warp - w) * size + slots[w])
            return self.weights.address + at

        first, more = address(warp, slots[:WARPS]), slots[WARPS:]
        return first, select(warp < len(more), first ^ address(warp, more), 0) if more else None

    def _attend(self, layer):
        workspace, after_keys, changes = self.workspace, None, self._changes_after(Phase.ATTENTION)
        tag = workspace.tag_written(Phase.ATTENTION, layer)
        request = functools.partial(self.weights.request_during, Phase.ATTENTION, layer)
        if self.has_slots and self.attention.teams == 1:
            after_keys = request
        with self._attending_warps():
            self.attention.run(
                self.cache, self.lane_state, layer, self.scratch,
                load_qkv=lambda row, columns: workspace.receive(Phase.ATTENTION, layer, row, columns, 4),
                store_out=functools.partial(self._store_attended, layer),
                exchange=self._splits(layer),
                next_layer=minimum(layer + 1, self.layers - 1),
                prefetch_below=MOST_EARLY_KEYS,
                pass_on=functools.partial(self._pass_on_attended, layer) if self.attends_groups else None,
                after_keys=after_keys,
                slots=self._slot if self.has_slots else None,
                asked=self._asked(),
                around=functools.partial(changes.attended, layer, tag) if changes else None,
            )  # fmt: skip
        lanes.block_barrier()
        if self.has_slots and self.attention.teams > 1:
            request()

    def _store_attended(self, layer, y, row, n):
        self.workspace.send(Phase.ATTENTION, layer, y, row, n)
        if changes := self._changes_after(Phase.ATTENTION):
            changes.keep(y, n % (self.attention.heads * self.attention.head_dim))

    def _changes_beside(self, phase: Phase) -> LowRankChanges | None:
        """Changes, if there are some beside a phase's product."""
        return self.changes if self.changes and self.changes.beside[phase].ranks else None

    def _changes_after(self, phase: Phase) -> LowRankChanges | None:
        """Changes, if there are some beside the product that reads what a phase makes."""
        return self._changes_beside(READERS[phase]) if phase in READERS else None

    def _pass_on(self, phase: Phase, layer):
        """Quantize what a phase reads, one warp of some block for each row of a group."""

        def pass_on(group, row):
            if phase in (Phase.QKV, Phase.GATE_UP):
                load = functools.partial(self._residual, phase, layer, row)
            else:
                load = functools.partial(self._receive_row, phase, layer, row)
            self._pass_on_group(phase, layer, group, row, load)

        if phase == Phase.O and self.attends_groups and self.attention.splits == 1:
            return  # attention has done it
        self._with_groups(phase, pass_on)

    def _with_groups(self, phase: Phase, use: Callable):
        """Call use(group, row) in one warp of some block for each row of the groups that a phase reads."""
        p, warp = self.products[phase], lanes.thread() // 32
        items = p.groups * -(-p.x_rows // p.warps)  # of as many rows as a block has warps
        for first in range(0, items, self.shapes.blocks):
            item = lanes.block() + first
            group, row = (
                (item, warp) if items == p.groups else (item % p.groups, item // p.groups * p.warps + warp)
            )
            valid = (item < items) & (row < p.x_rows)
            if phase == Phase.O and self.attends_groups:
                position = memory.load(self.cache.positions, minimum(row, p.x_rows - 1))
                valid = valid & ~self.attention.has_one_split(position)
            with lanes.when(valid):
                use(group, row)

    def _residual(self, phase: Phase, layer, row, columns) -> list:
        """The residual stream at columns that only this lane has, after it has waited for what is to be
        added, and has added it."""
        places, width = [column + more for column, more in columns], self.shapes.width(Vector.X)
        x = [memory.load_written_by_others(self.x, row * width + at) for at in places]
        added = self.workspace.receive(phase, layer, row, columns, 1)
        x = [total([v, *added[k :: len(columns)]]) for k, v in enumerate(x)]
        for v, at in zip(x, places, strict=True):
            memory.store(v, self.x, row, at)
        return x

    def _pass_on_attended(self, layer, row, heads, load):
        """What a block of attention has made."""
        pass_on = lambda group: self._pass_on_group(Phase.O, layer, group, row, load)  # noqa: E731
        self.attention.each_group(heads, pass_on)

    def _pass_on_group(self, phase: Phase, layer, group, row, load):
        p, ref, tag = self.products[phase], self.gamma.get(phase), self.workspace.tag_read(phase, layer)
        columns = p.columns_of_lane(group)
        gamma = None if ref is None else [memory.load(ref, layer, at + more) for at, more in columns]
        words = p.quantize(row, load(columns), gamma, tag)
        self.workspace.pass_on(phase, [(group * p.group_words + at, *rest) for at, *rest in words], p)

    def _product(self, phase: Phase, layer):
        p = self.products[phase]
        me = p.lane_columns()

        def one_section(first_row, carry):
            # What one row's block adds to its outputs is asked for before activations are waited for.
            early = p.together == p.tiles and not self.shapes.passes_on
            changes = self._changes_after(phase)
            tag = self.workspace.tag_written(phase, layer)
            with changes.made(phase, layer, tag) if changes else contextlib.nullcontext():
                outputs = self._outputs(phase, layer, me, first_row, index(0)) if early else None
                x = self._activations(phase, layer, me, first_row)
                asked = changes.ask(phase) if (changes := self._changes_beside(phase)) else []
                with p.busy_warps(me):
                    p.store_squares(me, first_row, x, self._sums(phase))
                self.weights.wait(phase, layer)
                self._rounds(phase, layer, me, first_row, x, outputs, asked)
            return carry

        if p.section_rows == p.rows:
            one_section(index(0), [])
        else:  # a loop: straight code of both would be more than the instruction cache has room for
            lanes.loop(0, p.rows, p.section_rows, [], one_section)

    def _activations(self, phase: Phase, layer, me: LaneColumns, first_row):
        """Wait for what this warp multiplies, then request weights of later phases."""
        p, workspace = self.products[phase], self.workspace
        if self.shapes.passes_on:
            split = self.weights.split(phase)
            x = p.receive(
                me, first_row, lambda places: workspace.receive_passed_on(phase, layer, places, p, split)
            )
            with contextlib.nullcontext() if p.section_rows == p.rows else lanes.when(first_row == 0):
                self._request_during(phase, layer)
            return x
        assert isinstance(p, PlaneProduct)
        gamma = {}
        if p.normed:
            gamma = p.own_columns(
                me, lambda columns: [memory.load(self.gamma[phase], layer, at + more) for at, more in columns]
            )
        x = p.own_columns(me, lambda columns: workspace.receive(phase, layer, index(0), columns, 1))
        self._request_during(phase, layer)
        return p.quantize_own(me, x, gamma)

    def _receive_row(self, phase: Phase, layer, row, columns) -> list:
        """Of several rows, wait for what o or down reads of one at columns, an index and a constant each.
        Attention leaves a row's splits apart, so o's inputs are made of them here."""
        whole = functools.partial(self.workspace.receive, phase, layer, row, columns, 1)
        if phase != Phase.O or self.attention.splits == 1:
            return whole()
        position = memory.load(self.cache.positions, row)
        apart = functools.partial(self.attention.received, self._splits(layer), row, position, columns)
        if self.attends_groups:  # then attention has passed on rows of one split
            return apart()
        has_one = self.attention.has_one_split(position)
        x = lanes.choose(~has_one, apart, [real(0)] * len(columns))
        return lanes.choose(has_one, whole, x)

    def _splits(self, layer) -> Exchange:
        """Where splits of attention meet."""
        tag = self.workspace.tag_written(Phase.ATTENTION, layer)
        return Exchange(self.workspace.ref, workspace_words(self.shapes), tag)

    def _sums(self, phase: Phase):
        """Shared memory for a phase's sums and squares."""
        if phase == Phase.GATE_UP and self.shapes.sums_among_weights:
            return memory.Reals(self.weights.smem)
        return self.scratch

    def _rounds(
        self, phase: Phase, layer, me: LaneColumns, first_row, x, outputs: _Outputs | None,
        asked: list,
    ):  # fmt: skip
        """Multiply a section by all of the block's tiles; outputs: `_outputs` if there is one round only;
        asked: what changes beside the product have asked for."""
        p, smem, ref = self.products[phase], self._sums(phase), self.weights.smem
        begin = [self.weights.begin[phase, m] // 4 for m in range(p.matrices)]
        changes = self._changes_beside(phase)

        def one_round(first, carry):
            this_round = outputs or self._outputs(phase, layer, me, first_row, first)
            tile = [minimum(first + u, p.tiles - 1) for u in range(p.together)]
            with p.busy_warps(me):
                sums = p.multiply(
                    me, x,
                    lambda m, u, k: p.shared_words(ref, begin[m], tile[u], me.pair[k], me.lane),
                    lambda m, u, k, h: p.shared_scales(ref, begin[m], tile[u], me.scale_group[k, h], me.g),
                )  # fmt: skip
                p.store_sums(me, sums, smem)
            if outputs:
                add_changes()
            lanes.block_barrier()
            changed = None
            if changes:
                changed = lambda k, n, y: changes.change(phase, y, n, this_round.b[k])  # noqa: E731
            p.finish(smem, this_round.own, self._store(phase, layer, this_round), changed=changed)
            lanes.block_barrier()  # the next round or phase has the same scratch memory
            return carry

        def add_changes():
            if changes:
                changes.add(phase, asked, self.workspace.tag_read(phase, layer))

        if p.together == p.tiles:
            one_round(index(0), [])
        else:
            add_changes()
            lanes.loop(0, p.tiles, p.together, [], one_round)

    def _outputs(self, phase: Phase, layer, me: LaneColumns, first_row, first) -> _Outputs:
        p = self.products[phase]
        own = p.outputs(me, first_row, first, self.weights.first_tile(phase))
        added = self._added(phase, layer, [(minimum(row, p.x_rows - 1), n) for *_, n, row in own])
        rows, b, gamma = [n for *_, n, _ in own], [], []
        if changes := self._changes_beside(phase):
            b = changes.load_b(phase, layer, rows)
        if (changes := self._changes_after(phase)) and READERS[phase] in self.gamma:
            ref, at, last = (
                self.gamma[READERS[phase]],
                changes.layer_after(phase, layer),
                self.shapes.hidden - 1,
            )
            gamma = [memory.load(ref, at, minimum(n, last)) for n in rows]
        return _Outputs(own, added, b, gamma)

    def _store(self, phase: Phase, layer, outputs: _Outputs):
        def store(k, row, n, y):
            y = y + outputs.added[k] if outputs.added else y
            if phase in (Phase.O, Phase.DOWN) and not self.shapes.passes_on:
                memory.store(y, self.x, row, n)
            split = self.weights.split(phase) if self.products[phase].splits > 1 else 0
            self.workspace.send(phase, layer, y, row, n, split)
            if changes := self._changes_after(phase):
                y = y * outputs.gamma[k] if outputs.gamma else y
                changes.keep(y, n - self.weights.first_tile(phase) * 16)

        return store

    def _added(self, phase: Phase, layer, outputs: list) -> list:
        """What is added to each of this thread's outputs, (row, n): the bias, or with one row the residual,
        which belongs to this block."""
        last = 16 * self.products[phase].n_tiles - 1
        if phase in (Phase.O, Phase.DOWN) and not self.shapes.passes_on:
            width = self.shapes.width(Vector.X)
            return [
                memory.load_written_by_others(self.x, row * width + minimum(n, last)) for row, n in outputs
            ]
        if phase == Phase.QKV and self.bias is not None:
            return [memory.load(self.bias, layer, minimum(n, last)) for _, n in outputs]
        return []
