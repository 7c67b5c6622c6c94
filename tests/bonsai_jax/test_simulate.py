"""The simulator: times that follow from arithmetic, and the limits and order of a real engine."""

import numpy as np
import pytest

from bonsai_jax.engine.plans import Limits
from bonsai_jax.measure.simulate import Arrival, StepTimes, quantile, simulate

LIMITS = Limits(4, 64, 16, row_sizes=(1, 2, 4), shapes=((1, 32), (1, 128)), prefill_cost=1, steps=8)
TIMES = StepTimes(decode=[(1, 0.010), (2, 0.014), (4, 0.018)], prefill=[(32, 0.1), (128, 0.25)])


def test_one_request_takes_its_prefill_and_its_steps():
    """40 tokens are a chunk of 32 and one of 8 in a program for 32; then 8, 8 and 3 steps of one row. The
    first token is drawn by the last chunk, and known before the steps of its plan are done."""
    (answer,) = simulate([Arrival(2.0, 40, 20)], TIMES, LIMITS, max_wait_s=None).answers
    assert answer.ttft_s == pytest.approx(0.1 + 0.1)
    assert answer.last_s == pytest.approx(2.0 + 0.2 + 19 * 0.010)
    assert answer.per_token_s == pytest.approx((answer.last_s - answer.first_s) / 19)


def test_what_is_stored_and_what_is_before_cost_more_and_so_does_each_dispatch():
    times = StepTimes(TIMES.decode, TIMES.prefill, stored_s=1e-4, pair_s=1e-6, dispatch_s=0.002)
    outcome = simulate([Arrival(0.0, 160, 2)], times, LIMITS, max_wait_s=None)
    # 128 tokens, then 32 behind them, and a step whose keys are those of the prompt and of what it adds.
    want = 0.25 + 0.1 + 1e-6 * 32 * 128 + 0.010 + 1e-4 * 161
    assert outcome.plans == 2
    assert outcome.seconds == pytest.approx(want + 2 * 0.002)
    assert outcome.busy_s == pytest.approx(outcome.seconds)


def test_who_cannot_be_served_waits_and_two_devices_serve_twice_as_many():
    arrivals = [Arrival(0.0, 32, 33) for _ in range(16)]
    one, two = (simulate(arrivals, TIMES, LIMITS, devices=n) for n in (1, 2))
    assert 1.6 < one.seconds / two.seconds < 2.4
    assert len(one.answers) == 16 and all(a.last_s > a.first_s > 0 for a in one.answers)
    first = sorted(a.ttft_s for a in one.answers)
    assert first[4] > first[3] + 8 * 0.018  # rows are four
    few = Limits(**vars(LIMITS) | {"pages": 8})
    assert simulate(arrivals, TIMES, few).preempted > 0
    with pytest.raises(ValueError, match="new_tokens=200\\) needs more than 8 pages of 16 tokens"):
        simulate([Arrival(0.0, 32, 200)], TIMES, few)


def test_times_come_from_rows_of_bench():
    """Of a device whose step takes 2 ms, 0.1 ms a row and 1 us a token that is stored."""

    def step(rows, depth):
        return 2e-3 + 1e-4 * rows + 1e-6 * rows * depth

    rows = [{"test": "tg128", "tok_s": 1.0}, {"test": "batch8", "tok_s": 1.0}]  # older, and without sampling
    rows += [{"test": f"gen128@d{d}" if d else "gen128", "tok_s": 1 / step(1, d + 64)} for d in (0, 2048)]
    rows += [{"test": f"gen-batch{n}", "tok_s": n / step(n, 192)} for n in (8, 2)]
    rows += [{"test": f"pp{n}", "tok_s": n / (1e-3 + n * 1e-5)} for n in (2048, 512)]
    rows += [{"test": "pp512@d1000", "tok_s": 512 / (1e-3 + 512 * 1e-5 + 512 * 1000 * 1e-9)}]
    rows += [{"test": "gen128+ngram", "tok_s": 1.0}]
    times = StepTimes.measured(reversed(rows))
    np.testing.assert_allclose(times.decode, [(n, 2e-3 + 1e-4 * n) for n in (1, 2, 8)], rtol=1e-9)
    np.testing.assert_allclose(times.prefill, [(n, 1e-3 + n * 1e-5) for n in (512, 2048)], rtol=1e-9)
    np.testing.assert_allclose((times.stored_s, times.pair_s), (1e-6, 1e-9), rtol=1e-6)
    with pytest.raises(ValueError, match="prefill"):
        StepTimes.measured(rows[:1])


def test_quantiles_are_values():
    assert [quantile([3, 1, 2, 4], share) for share in (0.0, 0.5, 0.75, 0.76, 1.0)] == [1, 2, 3, 4, 4]
