"""Draw the README's table of speed, beside llama.cpp, as docs/speed.svg.

    uv run python benchmarks/plot_readme.py

The table is the only place with the numbers; tests/test_benchmarks.py checks that the picture is of them.
"""

import itertools
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
PANELS = {"decode, batch size 1": 1, "prefill, 2,048 tokens": 7}  # the table's columns
WIDTH, BAR, LEFT = 340, 13, 110
COLORS = {"bonsai-jax": "#3f51b5", "llama.cpp": "#9e9e9e"}


def pairs(readme: str) -> dict[str, tuple[list[str], list[str]]]:
    """{model: (the cells of our row, those of llama.cpp's, which follows it)}."""
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in re.findall(r"^\|.*\|$", readme, re.M)
    ]
    return {
        ours[0]: (ours, theirs)
        for ours, theirs in itertools.pairwise(rows)
        if theirs[0] == "llama.cpp" and ours[0] != "llama.cpp"
    }


def draw(readme: str) -> str:
    """The SVG: a panel for each column, a pair of bars for each model."""
    models = pairs(readme)
    height = 52 + len(models) * (2 * BAR + 12)
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + 2 * WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        "<title>Tokens per second on one H200: bonsai-jax and llama.cpp</title>",
        '<rect width="100%" height="100%" fill="white"/>',
    ]
    for panel, (title, column) in enumerate(PANELS.items()):
        x = LEFT + panel * WIDTH
        longest = max(number(ours[column]) for ours, _ in models.values())
        out.append(f'<text x="{x}" y="16" font-weight="bold">tok/s, {title}</text>')
        for place, (model, rows) in enumerate(models.items()):
            y = 30 + place * (2 * BAR + 12)
            if not panel:
                out.append(f'<text x="{LEFT - 8}" y="{y + BAR + 4}" text-anchor="end">{label(model)}</text>')
            for i, (row, color) in enumerate(zip(rows, COLORS.values(), strict=True)):
                length = (WIDTH - 70) * number(row[column]) / longest
                top = y + i * (BAR + 1)
                out.append(f'<rect x="{x}" y="{top}" width="{length:.1f}" height="{BAR}" fill="{color}"/>')
                out.append(f'<text x="{x + length + 4:.1f}" y="{top + BAR - 2}">{row[column]}</text>')
    for i, (name, color) in enumerate(COLORS.items()):
        x, y = LEFT + 110 * i, height - 14
        out.append(f'<rect x="{x}" y="{y}" width="10" height="10" fill="{color}"/>')
        out.append(f'<text x="{x + 15}" y="{y + 9}">{name}</text>')
    return "\n".join([*out, "</svg>"]) + "\n"


def number(cell: str) -> float:
    return float(cell.replace(",", ""))


def label(model: str) -> str:
    """Rows of the 8B are named by their format alone."""
    return model if model[0].isdigit() else f"8B, {model}"


if __name__ == "__main__":
    picture = ROOT / "docs" / "speed.svg"
    picture.write_text(draw((ROOT / "README.md").read_text()))
    print(picture)
