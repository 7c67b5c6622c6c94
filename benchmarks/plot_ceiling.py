"""Draw measured decode speed against the speed that the bytes allow, by model size.

    uv run --group plot python benchmarks/plot_ceiling.py [-i benchmarks/results/nvidia-h200.jsonl]

Reads the rows that `bonsai-jax bench -o jsonl` prints, takes the fastest of each model and test, and writes
benchmarks/results/decode_ceiling.svg. A row's ceiling is its own: tok/s over the share of the copy rate that
it reached.
"""

import argparse
import dataclasses
import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"


@dataclasses.dataclass(frozen=True)
class Point:
    """The fastest row of one model and test; bytes are those of a token, weights and cache."""

    model: str
    test: str
    bytes: float
    tok_s: float
    ceiling: float
    commit: str | None


def points(rows: list[dict]) -> list[Point]:
    """One Point for each model and decode test, from the smallest model to the largest."""
    best: dict[tuple[str, str], dict] = {}
    for row in rows:
        key = row["model"], row["test"]
        if row["test"].startswith("tg") and row["tok_s"] > best.get(key, {"tok_s": 0.0})["tok_s"]:
            best[key] = row
    found = [
        Point(
            model=model,
            test=test,
            bytes=1e9 * row["gb_s"] / row["tok_s"],
            tok_s=row["tok_s"],
            ceiling=row["tok_s"] / row["ceiling_share"],
            commit=row["commit"],
        )
        for (model, test), row in best.items()
    ]
    return sorted(found, key=lambda p: p.bytes)


def draw(found: list[Point], device: str, path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "decode_ceiling"  # the same rows give the same file
    from matplotlib import pyplot, ticker

    tests = sorted({p.test for p in found})
    size = (5 * len(tests), 4.5)
    figure, panels = pyplot.subplots(
        1, len(tests), figsize=size, sharey=True, squeeze=False, layout="constrained"
    )
    sizes, bandwidth = [p.bytes / 1e9 for p in found], found[0].ceiling * found[0].bytes
    ends = [min(sizes) / 1.8, max(sizes) * 1.8]
    for axes, test in zip(panels[0], tests, strict=True):
        axes.plot(ends, [bandwidth / 1e9 / x for x in ends], color="0.3")
        of_it = [p for p in found if p.test == test]
        axes.scatter([p.bytes / 1e9 for p in of_it], [p.tok_s for p in of_it], zorder=3)
        for i, p in enumerate(of_it):
            below = i % 2 == 1  # neighbours' labels do not meet
            axes.annotate(
                f"{p.model.removeprefix('synth:')}\n{p.tok_s:,.0f}, {p.tok_s / p.ceiling:.0%}",
                (p.bytes / 1e9, p.tok_s), xytext=(0, -7 if below else 7), textcoords="offset points",
                ha="center", va="top" if below else "bottom", fontsize=7,
            )  # fmt: skip
        axes.set(xscale="log", yscale="log", title=test, xlabel="GB that a token must move")
        axes.xaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        axes.xaxis.set_major_formatter("{x:g}")
        axes.xaxis.set_minor_formatter(ticker.NullFormatter())
        axes.yaxis.set_major_formatter("{x:,.0f}")
        axes.grid(which="both", alpha=0.2)
    panels[0][0].set_ylabel("tok/s, one stream")
    panels[0][0].set_ylim(bottom=min(p.tok_s for p in found) / 2.5)
    allowed = f"what {bandwidth / 1e12:.1f} TB/s allows (line)"
    figure.suptitle(f"{device}: decode as measured (dots), and {allowed}", fontsize=10)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-i", "--input", type=Path, default=RESULTS / "nvidia-h200.jsonl")
    parser.add_argument("-o", "--output", type=Path, default=RESULTS / "decode_ceiling.svg")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.input.read_text().splitlines()]
    found = points(rows)
    if not found:
        raise SystemExit(f"{arguments.input}: no row of a tg test")
    draw(found, rows[0]["device"], arguments.output)
    print(f"{arguments.output}")
    for p in found:
        share = f"{p.tok_s / p.ceiling:.0%}"
        print(f"{p.model} {p.test}: {p.tok_s:,.0f} of {p.ceiling:,.0f} tok/s, {share} ({p.commit})")


if __name__ == "__main__":
    main()
