"""Run the notebooks as scripts, from top to bottom, each in a process of its own.

    uv run python notebooks                     # all of them
    uv run python notebooks 2 4                 # some
    uv run python notebooks --pictures folder   # and keep what they draw, as folder/2-1.png ...

On the CPU, on tiny models with random weights, it takes a minute or two. Ends with an error where a notebook
does: they assert what they say.
"""

import argparse
import itertools
import runpy
import subprocess
import sys
from pathlib import Path

NOTEBOOKS = {path.name[0]: path for path in sorted(Path(__file__).parent.glob("[0-9]_*.py"))}


def run(number: str, pictures: Path | None) -> None:
    """One notebook, in this process: JAX's devices and settings are a process's."""
    try:
        import matplotlib
    except ImportError:
        if pictures is not None:
            sys.exit("--pictures needs matplotlib: uv run --group plot python notebooks --pictures ...")
    else:
        matplotlib.use("agg")  # no windows, which would wait to be closed
        from matplotlib import pyplot

        count = itertools.count(1)

        def show() -> None:
            for figure in map(pyplot.figure, pyplot.get_fignums()):
                if pictures is not None:
                    figure.savefig(pictures / f"{number}-{next(count)}.png", dpi=100)
            pyplot.close("all")

        pyplot.show = show
    runpy.run_path(str(NOTEBOOKS[number]), run_name="__main__")


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the notebooks from top to bottom.", prog="notebooks")
    parser.add_argument(
        "numbers", nargs="*", metavar="number", help=f"of {', '.join(NOTEBOOKS)}; all without"
    )
    parser.add_argument("--pictures", type=Path, metavar="folder", help="keep the pictures there, as PNG")
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.numbers) - set(NOTEBOOKS)):
        parser.error(f"there is no notebook {unknown[0]}; there are {', '.join(NOTEBOOKS)}")
    if arguments.pictures:
        arguments.pictures.mkdir(parents=True, exist_ok=True)
    numbers = arguments.numbers or list(NOTEBOOKS)
    if len(numbers) == 1:
        run(numbers[0], arguments.pictures)
        return 0
    extra = ["--pictures", str(arguments.pictures)] if arguments.pictures else []
    for number in numbers:
        print(f"==== {NOTEBOOKS[number].name}", flush=True)
        if code := subprocess.run([sys.executable, __file__, number, *extra]).returncode:
            return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
