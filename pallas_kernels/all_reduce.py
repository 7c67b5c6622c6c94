"""The sum of a few rows over the devices of one process, through peer memory, without a barrier.

    out = x + sum over devices d of y_d

Each device has a mailbox, and every device knows where the others' are. What makes y sends it: each float32
beside the number of the call into all mailboxes. `receive` waits at its own until all have the number of this
call: whoever sees the number has the value, since 8 aligned bytes arrive as one (as in NCCL's LL protocol).
The sum is in the order of the devices, so all have the same bits.

    mailbox      number of the last call   slots [2 (call % 2), devices, MOST_WORDS]
                 u32, 128 bytes            (float32, u32) pairs

A kernel of a product sends its outputs as it has them (int_decode.run_and_send), so that they travel while it
ends and `receive` is launched; what has no such kernel is sent by one of its own, `send`.

Two slots do: a device in call s has received all others' words of call s - 1, which they sent behind the end
of their `receive` of call s - 2, so nobody still reads that slot.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxtyping import Array, Float, Int

from pallas_kernels.gpu import lanes, memory
from pallas_kernels.gpu.launch import launch
from pallas_kernels.gpu.values import as_real, as_word, i32, index, integer, long, low_word

BLOCKS, THREADS = 32, 128
COUNT_BYTES = 128  # of the number of the last call: a cache line of its own
MOST_WORDS = 1 << 17  # 16 rows of 8192


def mailbox_words(devices: int) -> int:
    """32-bit words of one device's mailbox, zeros before the first call."""
    return COUNT_BYTES // 4 + 2 * devices * MOST_WORDS * 2


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


def send(y: Float[Array, "*batch H"], peers: Int[Array, "devices+2 2"]) -> Int[Array, "1"]:
    """y into the mailboxes of all devices, inside shard_map.

    peers   `addresses` of this device
    Returns the number of the call, for `receive`.
    """
    _check(y.size)
    devices = devices_of(peers)

    def body(y_gmem, peers_gmem, sent_gmem, mailboxes_smem):
        sender = Sender(mailboxes_smem, devices)
        sender.prepare(peers_gmem, sent_gmem)
        lanes.block_barrier()

        def one(pair):
            at = pair * 2
            for i, value in enumerate(memory.load_reals(2, y_gmem, [at])):
                sender.send(value, at + i)

        _each_pair(y.size, one)

    return launch(
        body,
        {"y_gmem": y.reshape(-1), "peers_gmem": as_operand(peers)},
        {"sent_gmem": jax.ShapeDtypeStruct((1,), jnp.int32)},
        name="all_reduce_send",
        blocks=BLOCKS,
        threads=THREADS,
        scratch={"mailboxes_smem": plgpu.SMEM((Sender.words(devices),), jnp.int32)},
    )


def receive(
    x: Float[Array, "*batch H"], sent: list[Int[Array, "1"]], peers: Int[Array, "devices+2 2"]
) -> Float[Array, "*batch H"]:
    """x + the sum of what all devices sent, inside shard_map.

    sent    what the kernels that sent this device's part returned: its words are on their way
    peers   `addresses` of this device
    """
    _check(x.size)
    devices = devices_of(peers)

    def body(x_gmem, peers_gmem, sent_gmem, out_gmem):
        call = memory.load(sent_gmem[0], 0)
        own = _address(peers_gmem, devices)

        def one(pair):
            begin = pair * 2
            x = memory.load_reals(2, x_gmem, [begin])
            at = long(pair) * 16
            places = [_slot(own, call, long(d), devices) + at for d in range(devices)]

            def attempt():
                values, wrong = [], integer(0)
                for place in places:
                    text = "ld.relaxed.sys.global.v4.b32 {$0,$1,$2,$3}, [$4];"
                    v = lanes.ptx([i32()] * 4, [place], text, "=r,=r,=r,=r,l,~{memory}", effects=True)
                    for number in (v[1], v[3]):
                        wrong = wrong | number ^ call
                    values += [v[0], v[2]]
                return lanes.any_lane(wrong), values

            values = list(map(as_real, lanes.repeated(attempt, [i32()] * (2 * devices))))
            # The devices' sum first, as psum has it, then x.
            sums = values[:2]
            for d in range(1, devices):
                sums = [s + v for s, v in zip(sums, values[2 * d :][:2], strict=True)]
            memory.store_reals([a + s for a, s in zip(x, sums, strict=True)], out_gmem, [begin])

        _each_pair(x.size, one)
        with lanes.when((lanes.thread() == 0) & (lanes.block() == 0)):
            text = "st.relaxed.sys.global.b32 [$0], $1;"
            lanes.ptx(None, [own, call], text, "l,r,~{memory}", effects=True)

    out = launch(
        body,
        {"x_gmem": x.reshape(-1), "peers_gmem": as_operand(peers), "sent_gmem": sent},
        {"out_gmem": jax.ShapeDtypeStruct((x.size,), jnp.float32)},
        name="all_reduce_receive",
        blocks=BLOCKS,
        threads=THREADS,
    )
    return out.reshape(x.shape)


@dataclasses.dataclass(frozen=True)
class Sender:
    """A kernel that sends, while it is traced: what it knows lies in shared memory, int32 [`words`]."""

    smem: Any
    devices: int

    @staticmethod
    def words(devices: int) -> int:
        """Of shared memory: of every mailbox, where this device's slot begins; the number of the call."""
        return 2 * devices + 1

    def prepare(self, peers_gmem, sent_gmem):
        """By all threads of a block, before a barrier; its first block writes the number of the call."""
        thread, devices = lanes.thread(), self.devices
        with lanes.when(thread < devices):
            text = "ld.relaxed.sys.global.b32 $0, [$1];"
            own = _address(peers_gmem, devices)
            call = lanes.ptx(i32(), [own], text, "=r,l,~{memory}", effects=True) + 1
            me = long(memory.load(peers_gmem, 2 * (devices + 1)))
            slot = _slot(_address(peers_gmem, thread), call, me, devices)
            for i, word in enumerate((slot, slot >> 32)):
                memory.store(low_word(word), self.smem, thread * 2 + i)
            with lanes.when(thread == 0):
                memory.store(call, self.smem, 2 * devices)
                with lanes.when(lanes.block() == 0):
                    memory.store(call, sent_gmem, 0)

    def send(self, value, at):
        """A float32 as word `at` (an index) of this call."""
        offset = long(at) * 8
        call = memory.load(self.smem, 2 * self.devices)
        for d in range(self.devices):
            slot = _joined(*(memory.load(self.smem, 2 * d + i) for i in (0, 1)))
            text = "st.relaxed.sys.global.v2.b32 [$0], {$1,$2};"
            lanes.ptx(None, [slot + offset, as_word(value), call], text, "l,r,r,~{memory}", effects=True)


def devices_of(peers: jax.Array) -> int:
    return peers.shape[0] - 2


def as_operand(peers: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(peers, jnp.int32).reshape(-1)


def _check(words: int):
    if reason := refuses(words):
        raise NotImplementedError(f"all_reduce: {reason}")


def _each_pair(words: int, one):
    """one(pair of neighbouring words), shared out over all threads; whole warps: see `refuses`."""
    first = lanes.thread() + lanes.block() * THREADS
    for i in range(-(-words // (2 * BLOCKS * THREADS))):
        pair = first + i * BLOCKS * THREADS
        with lanes.when(pair < words // 2):
            one(pair)


def _slot(mailbox, call, sender, devices: int):
    """Address of what a device sends in a call, in a mailbox."""
    number = (long(call) & 1) * devices + sender
    return mailbox + COUNT_BYTES + number * (8 * MOST_WORDS)


def _address(peers_gmem, row):
    first = index(row) * 2
    return _joined(*(memory.load(peers_gmem, first + i) for i in (0, 1)))


def _joined(low, high):
    low, high = map(long, (low, high))
    return low | high << 32
