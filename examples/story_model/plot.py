"""Draw the loss of both models over the tokens that they have read, as docs/stories.svg.

uv run --group plot python examples/story_model/plot.py
"""

import json
from pathlib import Path

RESULTS = Path(__file__).parent / "results"
PICTURE = RESULTS.parents[2] / "docs" / "stories.svg"
NAMES = {"one-bit": "one bit a weight", "float": "float32"}


def main() -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "stories"  # the same results give the same file
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.5, 3.2), layout="constrained")
    for file, name in NAMES.items():
        result = json.loads((RESULTS / f"{file}.json").read_text())
        tokens = [line["tokens"] / 1e6 for line in result["curve"]]
        perplexity = result["report"]["test perplexity"]
        label = f"{name}: perplexity {perplexity:.2f} on new stories"
        axes.plot(tokens, [line["loss"] for line in result["curve"]], marker="o", markersize=3, label=label)
    axes.set(xlabel="million tokens read", ylabel="nats a token", xlim=(0, None))
    axes.grid(alpha=0.2)
    axes.legend()
    figure.savefig(PICTURE, metadata={"Date": None})
    pyplot.close(figure)


if __name__ == "__main__":
    main()
