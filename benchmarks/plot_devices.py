"""Draw speed on several devices over that on one, beside what is asked for.

    uv run --group plot python benchmarks/plot_devices.py [-i benchmarks/results/nvidia-h200-x4.jsonl]

Reads the rows that `benchmarks/devices.py -o jsonl` prints, takes the fastest of each model, test and number
of devices, and writes benchmarks/results/devices.svg.
"""

import argparse
import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


def series(rows: list[dict]) -> dict[tuple[str, str, str], dict[int, float]]:
    """(model, test, split) -> {devices: tok/s}, of what was measured on one device and on more."""
    best: dict[tuple[str, str, int, int], float] = {}
    for row in rows:
        key = row["model"], row["test"], row["data_parallel"], row["tensor_parallel"]
        best[key] = max(row["tok_s"], best.get(key, 0.0))
    found: dict[tuple[str, str, str], dict[int, float]] = {}
    for (model, test, data, tensor), tok_s in best.items():
        if data * tensor > 1 and 1 in (data, tensor) and (one := best.get((model, test, 1, 1))):
            split = "data parallel" if data > 1 else "tensor parallel"
            found.setdefault((model, test, split), {1: one})[data * tensor] = tok_s
    return {key: dict(sorted(speeds.items())) for key, speeds in sorted(found.items())}


def draw(found: dict[tuple[str, str, str], dict[int, float]], device: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "devices"  # the same rows give the same file
    from matplotlib import pyplot

    most = max(n for speeds in found.values() for n in speeds)
    splits = sorted({split for *_, split in found})
    figure, panels = pyplot.subplots(
        1, len(splits), figsize=(5 * len(splits), 4.5), sharey=True, squeeze=False, layout="constrained"
    )
    for axes, split in zip(panels[0], splits, strict=True):
        axes.plot([1, most], [1, most], color="0.6", linewidth=1)
        for (model, test, of), speeds in found.items():
            if of == split:
                factors = [tok_s / speeds[1] for tok_s in speeds.values()]
                name = f"{model.removeprefix('synth:')} {test}: {factors[-1]:.2f} x {speeds[1]:,.0f} tok/s"
                axes.plot(list(speeds), factors, marker="o", label=name)
        axes.set(title=split, xlabel="devices", xticks=range(1, most + 1))
        axes.grid(alpha=0.2)
        axes.legend(fontsize=7, loc="upper left")
    panels[0][0].set_ylabel("speed over that of one device")
    figure.suptitle(f"{device}: speed on several devices; the grey line is proportion", fontsize=10)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-i", "--input", type=Path, default=RESULTS / "nvidia-h200-x4.jsonl")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "devices.svg")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.input.read_text().splitlines()]
    found = series(rows)
    if not found:
        raise SystemExit(f"{arguments.input}: no test on one device and on several")
    draw(found, rows[0]["device"], arguments.output)
    print(f"{arguments.output}")
    for (model, test, split), speeds in found.items():
        speedups = ", ".join(f"{n}: {tok_s:,.1f} (x{tok_s / speeds[1]:.2f})" for n, tok_s in speeds.items())
        print(f"{model} {test}, {split}: {speedups}")


if __name__ == "__main__":
    main()
