"""What a model's config says of its layers."""

import itertools

from hypothesis import given
from hypothesis import strategies as st

from bonsai_jax.config import Layer, ModelConfig, Run
from bonsai_jax.network.kinds.mlp import Mlp


def config_of(widths: list[int]) -> ModelConfig:
    """Of layers that differ by the width of their feed-forward only."""
    layers = tuple(Layer(None, Mlp(width)) for width in widths)
    return ModelConfig("llama", 64, 256, 128, 1e-5, layers)


def test_layers_that_repeat_are_one_run_whatever_comes_before_and_after():
    assert config_of([1] * 36).runs == (Run(0, 1, 36),)
    assert config_of([1, 1, 1, 2] * 10).runs == (Run(0, 4, 10),)
    assert config_of([3, *[1] * 46]).runs == (Run(0, 1, 1), Run(1, 1, 46))
    assert config_of([*[1, 2] * 5, 1]).runs == (Run(0, 2, 5), Run(10, 1, 1))
    assert config_of([*[1, 1, 2] * 5, *[3, 3, 4] * 4]).runs == (Run(0, 3, 5), Run(15, 3, 4))


def least_traced(widths: list[int]) -> int:
    """By trying every way to cut layers into runs."""
    if not widths:
        return 0
    best = len(widths)
    for period in range(1, len(widths) + 1):
        turns = 1
        while widths[turns * period : (turns + 1) * period] == widths[:period]:
            turns += 1
        best = min(best, *(period + least_traced(widths[t * period :]) for t in range(1, turns + 1)))
    return best


@given(st.lists(st.integers(1, 3), min_size=1, max_size=9))
def test_runs_are_all_layers_with_the_fewest_to_trace(widths):
    runs = config_of(widths).runs
    in_turns = [widths[run.start : run.start + run.period] * run.turns for run in runs]
    assert list(itertools.chain(*in_turns)) == widths
    assert sum(run.period for run in runs) == least_traced(widths)
