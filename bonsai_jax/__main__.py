"""The command `bonsai-jax`, and `python -m bonsai_jax` for a checkout that is not installed."""

import os
import signal

INTERRUPTED = 128 + 2  # what shells report for SIGINT


def main() -> None:
    """Run the command line. Ctrl-C while it is imported, which takes up to a second, ends it in silence."""
    before = signal.getsignal(signal.SIGINT)
    if before is signal.default_int_handler:  # in a shell's background it is ignored
        signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
    from bonsai_jax.cli import main as run

    if before is signal.default_int_handler:
        signal.signal(signal.SIGINT, before)
    run()


if __name__ == "__main__":
    main()
