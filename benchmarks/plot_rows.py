"""Draw tokens per second over the batch size, 1 to 64, and list the batch sizes at which they fall.

    uv run --group plot python benchmarks/plot_rows.py [-i benchmarks/results/rows-nvidia-h200.jsonl]

Reads the rows that `benchmarks/steps.py` prints, takes the median of each model and batch size, and writes
benchmarks/results/rows.svg. A triangle marks a batch size with more than 3 % fewer tok/s than the batch size
one below it; those are printed too. Rows with times of kernels are left out, as their steps are slower.
"""

import argparse
import collections
import json
import statistics
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
LARGEST_BATCH = 64
DROP = 0.03
FIELDS = {"device", "model", "layers", "rows", "depth", "us", "kernels"}  # those of steps.Row that are read


def series(rows: list[dict]) -> dict[str, dict[int, float]]:
    """model, layers and depth -> {batch size: tok/s}, the smallest batch size first."""
    times: dict[str, dict[int, list[float]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for row in rows:
        if row["kernels"] is None and row["rows"] <= LARGEST_BATCH:
            name = row["model"].removeprefix("synth:")
            model = f"{name}, {row['layers']} layers, after {row['depth']} tokens"
            times[model][row["rows"]].append(row["us"])
    return {
        model: {batch: batch / statistics.median(us) * 1e6 for batch, us in sorted(measured.items())}
        for model, measured in sorted(times.items())
    }


def drops(speeds: dict[int, float]) -> dict[int, float]:
    """{batch size: 1 - its tok/s over those of one row less}, where that is above DROP."""
    pairs = [(n, speeds[n - 1], tok_s) for n, tok_s in speeds.items() if n - 1 in speeds]
    return {n: 1 - tok_s / before for n, before, tok_s in pairs if tok_s < (1 - DROP) * before}


def draw(models: dict[str, dict[int, float]], device: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "rows"  # the same rows give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(10, 4.5), layout="constrained")
    for model, speeds in models.items():
        (line,) = axes.plot(list(speeds), list(speeds.values()), marker=".", markersize=3, label=model)
        lower = list(drops(speeds))
        axes.scatter(lower, [speeds[n] for n in lower], marker="v", s=25, color=line.get_color(), zorder=3)
    axes.set(xlabel="batch size", ylabel="tok/s", xticks=[1, *range(4, LARGEST_BATCH + 1, 4)])
    axes.set(xlim=(0, LARGEST_BATCH + 1), ylim=(0, None))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    axes.grid(alpha=0.2)
    axes.legend(fontsize=7, loc="upper left")
    marked = f"triangles: more than {DROP:.0%} below the batch size before"
    figure.suptitle(f"{device}: decode by batch size; {marked}", fontsize=10)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-i", "--input", type=Path, default=RESULTS / "rows-nvidia-h200.jsonl")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "rows.svg")
    arguments = parser.parse_args()
    try:
        rows = [json.loads(line) for line in arguments.input.read_text().splitlines()]
    except json.JSONDecodeError:
        rows = []
    complete = all(isinstance(row, dict) and row.keys() >= FIELDS for row in rows)
    models = series(rows) if complete else {}
    if not models:
        raise SystemExit(
            f"{arguments.input}: not rows of 1 to {LARGEST_BATCH} by benchmarks/steps.py without --kernels"
        )
    draw(models, rows[0]["device"], arguments.output)
    print(f"{arguments.output}")
    print("| model | from | to | percent |\n|---|---|---|---|")
    for model, speeds in models.items():
        for n, share in drops(speeds).items():
            cells = [model, *(f"{m}: {speeds[m]:,.0f} tok/s" for m in (n - 1, n)), f"-{100 * share:.1f}"]
            print(f"| {' | '.join(cells)} |")


if __name__ == "__main__":
    main()
