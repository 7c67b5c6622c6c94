"""Masks of tokens that the host makes while the device is at work, and a launch that waits for them.

A program that draws tokens is dispatched before the host knows which of them are allowed. Host and device
share a mailbox in the host's memory, with a place for every row:

    host     writes the words of a mask, then the row's letter: DRAW; or only the letter HOLD
    device   waits for the letter of each of its rows, copies the mask, and takes the letter out

    word 0           not 0: the mailbox is closed, and nobody waits any more
    place of row b   from word HEAD + b * place_words(words) on: the letter, padding to MASK, the mask's words

Words are 32 bits. The host may write a row's next letter when it knows what was drawn with the one before:
then the device has taken that one out. A GPU reads the host's memory itself, by its address, so nothing of
this is sent by a copy that the host would have to dispatch.
"""

import ctypes
import functools
import time

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jaxtyping import Array, Bool, Int, UInt32

from pallas_kernels import device

HEAD, MASK = 32, 32  # words before the first place, and before a place's mask: cache lines of their own
HOLD, DRAW = 1, 2  # letters
THREADS = 512
AT_ONCE = 8  # words of a thread that are on their way from the host's memory together
POLL_S = 1e-4


def place_words(words: int) -> int:
    """The size of one row's place in words, where a mask has this many."""
    return MASK + -(-words // MASK) * MASK


def mailbox_words(rows: int, words: int) -> int:
    """Words of a mailbox, zeros before the first letter."""
    return HEAD + rows * place_words(words)


def address_words(address: int) -> tuple[int, int]:
    """A mailbox's address as two int32, low and high, for `receive`."""
    low, high = np.array([address & 0xFFFFFFFF, address >> 32], np.uint32).view(np.int32).tolist()
    return low, high


def receive(
    address: Int[Array, "2"], rows: Int[Array, "R"], waits: Bool[Array, "R"], words: int
) -> tuple[UInt32[Array, "R words"], Bool[Array, "R"]]:
    """Wait for the letters of these rows.

    address  `address_words` of the mailbox
    rows     int32, their places
    waits    False: this row has no letter to wait for, and every token is allowed
    words    of a mask
    Returns the masks, where bit i % 32 of word i // 32 says whether token i is allowed (all zeros for a row
    with the letter HOLD), and which rows are to draw: those that do not wait, and those with the letter DRAW.
    On a CPU Python waits (jax.experimental.io_callback); engines there send masks with their draws.
    """
    if device.platform() == "cpu":
        shapes = jax.ShapeDtypeStruct((len(rows), words), jnp.uint32), jax.ShapeDtypeStruct(rows.shape, bool)
        own = functools.partial(_receive_on_cpu, words=words)
        return io_callback(own, shapes, address, rows, waits)
    allowed, draws = _receive_on_gpu(address, rows, waits.astype(jnp.int32), words)
    return jax.lax.bitcast_convert_type(allowed, jnp.uint32), draws != 0


def _receive_on_cpu(address, rows, waits, *, words: int) -> tuple[np.ndarray, np.ndarray]:
    low, high = np.asarray(address).view(np.uint32).tolist()
    rows, waits = np.asarray(rows), np.asarray(waits)
    mailbox = in_memory(low | high << 32, mailbox_words(int(rows[waits].max(initial=0)) + 1, words))
    allowed, draws = np.full((len(rows), words), 0xFFFFFFFF, np.uint32), np.ones(len(rows), bool)
    for i in np.flatnonzero(waits):
        place = mailbox[HEAD + rows[i] * place_words(words) :]
        while not place[0] and not mailbox[0]:
            time.sleep(POLL_S)
        draws[i] = place[0] == DRAW
        allowed[i] = place[MASK : MASK + words].view(np.uint32) if draws[i] else 0
        place[0] = 0
    return allowed, draws


def in_memory(address: int, words: int) -> Int[np.ndarray, "words"]:
    """Words at an address of the host's memory."""
    return np.ctypeslib.as_array((ctypes.c_int32 * words).from_address(address))


def _receive_on_gpu(address: jax.Array, rows: jax.Array, waits: jax.Array, words: int):
    """In one launch, with a block for each row."""
    from pallas_kernels.gpu import lanes, memory
    from pallas_kernels.gpu.launch import launch
    from pallas_kernels.gpu.values import i32, integer, long, minimum, select

    def load(at):
        text = "ld.relaxed.sys.global.b32 $0, [$1];"
        return lanes.ptx(i32(), [at], text, "=r,l,~{memory}", effects=True)

    def body(address_gmem, rows_gmem, waits_gmem, allowed_gmem, draws_gmem, letter_smem):
        block, thread = lanes.block(), lanes.thread()
        low, high = (long(memory.load(address_gmem, i)) for i in (0, 1))
        mailbox, waits = low | high << 32, memory.load(waits_gmem, block) != 0
        row = select(waits, memory.load(rows_gmem, block), 0)
        place = mailbox + HEAD * 4 + long(row) * (place_words(words) * 4)

        def attempt():
            text = "ld.acquire.sys.global.b32 $0, [$1];"
            letter = lanes.ptx(i32(), [place], text, "=r,l,~{memory}", effects=True)
            lanes.ptx(None, [], "nanosleep.u32 200;", "~{memory}", effects=True)
            return (letter == 0) & (load(mailbox) == 0), [letter]

        with lanes.when(waits & (thread == 0)):
            (letter,) = lanes.repeated(attempt, [i32()])
            memory.store(letter, letter_smem, 0)
            text = "st.relaxed.sys.global.b32 [$0], $1;"
            lanes.ptx(None, [place, integer(0)], text, "l,r,~{memory}", effects=True)
        lanes.block_barrier()
        letter = memory.load(letter_smem, 0)
        masked, unmasked = waits & (letter == DRAW), select(waits, integer(0), integer(-1))
        with lanes.when(thread == 0):
            memory.store(select(~waits | masked, 1, 0), draws_gmem, block)
        own = range(-(-words // THREADS))
        for some in (own[i : i + AT_ONCE] for i in own[::AT_ONCE]):
            at = [thread + i * THREADS for i in some]
            sources = [place + MASK * 4 + long(integer(minimum(i, words - 1))) * 4 for i in at]
            read = functools.partial(list, map(load, sources))
            read_words = lanes.choose(masked, read, [unmasked] * len(at))
            for i, word in zip(at, read_words, strict=True):
                with lanes.when(i < words):
                    memory.store(word, allowed_gmem, block, i)

    from jax.experimental.pallas import mosaic_gpu as plgpu

    shape = lambda *sizes: jax.ShapeDtypeStruct(sizes, jnp.int32)  # noqa: E731
    return launch(
        body,
        {"address_gmem": address, "rows_gmem": rows, "waits_gmem": waits},
        {"allowed_gmem": shape(len(rows), words), "draws_gmem": shape(len(rows))},
        name="host_masks_receive",
        blocks=len(rows),
        threads=THREADS,
        scratch={"letter_smem": plgpu.SMEM((1,), jnp.int32)},
    )
