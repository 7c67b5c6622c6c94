"""The sum of a few rows over the devices of one process, through peer memory: one launch, no barrier.

    out = x + sum over devices d of y_d

Each device has a mailbox, and every device knows where the others' are. It writes its y into all of them,
each float32 beside the number of the call, and waits at its own until all have the number of this call:
whoever sees the number has the value, since 8 aligned bytes arrive as one (as in NCCL's LL protocol). The sum
is in the order of the devices, so all have the same bits.

    mailbox      calls                       slots [2 (call % 2), devices, MOST_WORDS]
                 a u32 each block, 128 bytes  (float32, u32) pairs

Two slots do: a device in call s has seen all others' words of call s - 1, which they wrote behind the end of
their call s - 2, so nobody still reads that slot. All calls have the same blocks, so their counts agree.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.lib.mlir import ir  # pyright: ignore[reportPrivateImportUsage]
from jax._src.lib.mlir.dialects import arith, llvm
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.mosaic import lanes, memory

BLOCKS, THREADS = 32, 128
COUNT_BYTES = 128  # of a block's count of calls: a cache line of its own
MOST_WORDS = 1 << 17  # 16 rows of 8192


def mailbox_words(devices: int) -> int:
    """32-bit words of one device's mailbox, zeros before the first call."""
    return BLOCKS * COUNT_BYTES // 4 + 2 * devices * MOST_WORDS * 2


def refuses(words: int) -> str | None:
    """Why a sum of so many words cannot be made here, or None."""
    if words > MOST_WORDS:
        return f"{words} words are more than the {MOST_WORDS} that a mailbox holds"
    return f"{words} words are no multiple of 64" if words % 64 else None


def addresses(mailboxes: list[int], me: int) -> np.ndarray:
    """What device `me` must know: uint32 [devices + 2, 2], low and high words of the mailboxes' addresses,
    then of its own, then its number."""
    rows = [*mailboxes, mailboxes[me], me]
    return np.array([[row & 0xFFFFFFFF, row >> 32] for row in rows], np.uint32)


def all_reduce_add(
    x: Float[Array, "*batch H"], y: Float[Array, "*batch H"], peers: Int[Array, "devices+2 2"]
) -> Float[Array, "*batch H"]:
    """x + the sum of all devices' y, inside shard_map.

    peers   `addresses` of this device
    """
    devices = peers.shape[0] - 2
    if reason := refuses(x.size):
        raise NotImplementedError(f"all_reduce_add: {reason}")
    kernel = plgpu.kernel(
        functools.partial(_body, devices=devices, words=x.size),
        out_type=jax.ShapeDtypeStruct((x.size,), jnp.float32),
        grid=(BLOCKS,),
        grid_names=("block",),
        num_threads=THREADS // 128,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    peers = jax.lax.bitcast_convert_type(peers, jnp.int32).reshape(-1)
    return kernel(x.reshape(-1), y.reshape(-1), peers).reshape(x.shape)


def _body(*refs, devices: int, words: int):
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * len(refs))
    def kernel(ctx, x_gmem, y_gmem, peers_gmem, out_gmem):
        wide = ir.IntegerType.get_signless(64)

        def long(value: int):
            return arith.constant(wide, value)

        def address(row: int):
            low, high = (arith.extui(wide, memory.load(peers_gmem, lanes.index(2 * row + i))) for i in (0, 1))
            return arith.ori(low, arith.shli(high, long(32)))

        mailboxes, own = [address(d) for d in range(devices)], address(devices)
        me = arith.extui(wide, memory.load(peers_gmem, lanes.index(2 * (devices + 1))))
        block = arith.index_cast(wide, lanes.block())
        count = arith.addi(own, arith.muli(block, long(COUNT_BYTES)))
        last = llvm.inline_asm(
            lanes.i32(),
            [count],
            "ld.relaxed.sys.global.b32 $0, [$1];",
            "=r,l,~{memory}",
            has_side_effects=True,
        )
        call = arith.addi(last, lanes.integer(1))
        parity = arith.andi(arith.extui(wide, call), long(1))

        def place(sender, pair):
            """Byte of a pair of words in a mailbox, in this call's slot."""
            slot = arith.addi(arith.muli(parity, long(devices)), sender)
            at = arith.addi(arith.muli(slot, long(8 * MOST_WORDS)), arith.muli(pair, long(16)))
            return arith.addi(at, long(BLOCKS * COUNT_BYTES))

        first = lanes.sum_of(lanes.thread(), (lanes.block(), THREADS))
        rounds = -(-words // (2 * BLOCKS * THREADS))

        def in_range(i):
            pair = lanes.behind(first, i * BLOCKS * THREADS)
            return pair, lanes.is_below(pair, lanes.index(words // 2))

        for i in range(rounds):
            pair, there = in_range(i)
            with lanes.when(there):  # whole warps: see `refuses`
                mine = memory.load_reals(2, y_gmem, [arith.muli(pair, lanes.index(2))])
                a, b = (arith.bitcast(lanes.i32(), v) for v in mine)
                at = place(me, arith.index_cast(wide, pair))
                for mailbox in mailboxes:
                    llvm.inline_asm(
                        None,
                        [arith.addi(mailbox, at), a, call, b],
                        "st.relaxed.sys.global.v4.b32 [$0], {$1,$2,$3,$2};",
                        "l,r,r,r,~{memory}",
                        has_side_effects=True,
                    )
        for i in range(rounds):
            pair, there = in_range(i)
            with lanes.when(there):
                begin = arith.muli(pair, lanes.index(2))
                total = memory.load_reals(2, x_gmem, [begin])
                places = [
                    arith.addi(own, place(long(d), arith.index_cast(wide, pair))) for d in range(devices)
                ]

                def attempt(places=places):
                    values, wrong = [], lanes.integer(0)
                    for from_device in places:
                        loaded = llvm.inline_asm(
                            llvm.StructType.get_literal([lanes.i32()] * 4),
                            [from_device],
                            "ld.relaxed.sys.global.v4.b32 {$0,$1,$2,$3}, [$4];",
                            "=r,=r,=r,=r,l,~{memory}",
                            has_side_effects=True,
                        )
                        v = [llvm.extractvalue(lanes.i32(), loaded, [j]) for j in range(4)]
                        for number in (v[1], v[3]):
                            wrong = arith.ori(wrong, arith.xori(number, call))
                        values += [v[0], v[2]]
                    return lanes.any_lane(wrong), values

                values = lanes.repeated(attempt, [lanes.i32()] * (2 * devices))
                # The devices' sum first, as psum has it, then x.
                sums = [arith.bitcast(lanes.f32(), v) for v in values[:2]]
                for d in range(1, devices):
                    new = [arith.bitcast(lanes.f32(), v) for v in values[2 * d : 2 * d + 2]]
                    sums = [arith.addf(s, v) for s, v in zip(sums, new, strict=True)]
                total = [arith.addf(t, s) for t, s in zip(total, sums, strict=True)]
                memory.store_reals(total, out_gmem, [begin])
        lanes.block_barrier()  # all have read the count
        with lanes.when(lanes.is_equal(lanes.thread(), lanes.index(0))):
            llvm.inline_asm(
                None,
                [count, call],
                "st.relaxed.sys.global.b32 [$0], $1;",
                "l,r,~{memory}",
                has_side_effects=True,
            )

    kernel(*refs)
