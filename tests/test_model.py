"""The model of throughput: the paper's numbers, limits that can be reckoned by hand, and a simulation that agrees."""

import functools
import itertools
import random
import time

import numpy as np
import pytest
from conftest import changed

from bench.model import (
    best_split,
    conventional,
    decode_flashes,
    equal,
    gain,
    long_tailed,
    pipeline,
    survivors_of,
    uniform,
    utilisation,
)
from bench.simulate import Machine, Simulation
from config import presets
from schedule import drains, make_schedule, may_load_weights, publishes

TINY = presets()["tiny"]()
LINEAR = ((0, 0.0), (1000, 1.0))  # U(h) = h / 1000: a decode step takes 1000 flashes, whatever its batch


def test_case_study_of_the_paper():
    """N = 128, B = 128, lengths uniform on 1..L (arXiv 2509.19128, appendix A)."""
    ours = pipeline(128, 192, 44, 128)
    assert (ours.r_gen, ours.r_train) == pytest.approx((16.9, 17.08), abs=0.05) and ours.r == ours.r_gen
    assert ours.max_lag == 132, "192 · 44 · 2 / 128 = 132"
    theirs = conventional(128, 128, 134, uniform(8192))
    assert (theirs.r_gen, theirs.r_train, theirs.r) == pytest.approx((18.3, 26.02, 10.7), rel=5e-3)
    assert ours.r / theirs.r == pytest.approx(1.57, abs=0.01) and theirs.max_lag == 133
    best = best_split(128, 128, 133)
    assert best.max_lag <= 133 and best.r >= ours.r
    assert utilisation(0) == 0 and utilisation(192) == 0.384 and utilisation(10_000) == 0.7


def test_conventional_by_hand():
    # 2 accelerators, 4 sequences: of 1, 1, 3, 3 tokens. Batches of 2, 1, 1; with U = h / 1000 a step is 1000 flashes.
    survivors = survivors_of([1, 1, 3, 3])
    assert survivors.tolist() == [1.0, 0.5, 0.5]
    rate = conventional(2, 4, 1, survivors, LINEAR, tau=5.0)
    assert rate.r_gen == pytest.approx(8 / 3000) and rate.r_train == 2 / 5.0
    assert rate.r == pytest.approx(1 / (3000 / 8 + 5.0 / 2))


def test_every_split_is_tried_and_large_clusters_take_no_minute():
    lag, best = 32, (0.0, 0, 0)
    for i, h in itertools.product(range(1, 16), range(1, 257)):
        split = pipeline(16, h, i, 64)
        if split.max_lag <= lag and split.r > best[0]:
            best = (split.r, i, h)
    found = best_split(16, 64, lag, most=256)
    assert (found.r, found.generating, found.sequences) == best
    assert best_split(2, 1, 1) is None, "lengths up to twice the mean: a lag of 2 at least"
    start = time.monotonic()
    assert best_split(16384, 1024, 64).max_lag <= 64
    assert time.monotonic() - start < 60


def test_it_stops_helping_with_equal_lengths_and_with_few_or_very_many_accelerators():
    middle = gain(128, 1024, 32, uniform(1000))
    assert middle > 1.3
    assert gain(128, 1024, 32, equal(1000)) < 1.1 < middle, "there is no tail to wait for"
    assert gain(4, 1024, 32, uniform(1000)) < 1.0, "few are busy anyway"
    assert gain(16384, 1024, 32, uniform(1000)) < 1.0, "no faster than one sequence"
    assert gain(32, 1024, 32, long_tailed(8192, 640)) > gain(32, 1024, 32, uniform(8192))


def simulated(cfg, engines: int, trainers: int, longest: int, sequences: int, tau=5.0, lengths=None, **more):
    """Lengths uniform, if there are no others; times in flashes, as in the formulas."""
    rng = random.Random(0)
    machine = Machine(
        engines,
        sequences,
        lambda h: float(decode_flashes(np.array(h))),
        lambda tokens: tokens * tau / trainers,
        **({"queued": 10**6} | more),
    )
    lengths = lengths or (rng.randint(1, longest) for _ in itertools.count())
    out, load = functools.partial(publishes, cfg), functools.partial(may_load_weights, cfg)
    return Simulation(make_schedule(cfg, 0), machine, lengths, cfg.group_size, cfg.steps, out, load, drains(cfg)).run()


@pytest.mark.parametrize("g", [1, 4, 16])
def test_simulation_of_conventional_agrees_with_its_formula(g):
    cfg = changed(TINY, schedule="conventional", phase_steps=g, steps=4 * g, max_lag=None)
    trace = simulated(cfg, engines=16, trainers=16, longest=500, sequences=10**6)
    expected = conventional(16, cfg.batch_size, g, uniform(500), tau=5.0)
    assert trace.tokens_per_time() == pytest.approx(expected.r, rel=0.06)
    assert max(lags.max() for lags in trace.lags) == expected.max_lag and len(trace.lags) == 4 * g


@pytest.mark.parametrize("engines", [4, 13])
def test_simulation_of_pipeline_agrees_with_its_formula_and_knows_its_lag(engines):
    """4 of 16: bound by generation; 13: by training."""
    cfg = changed(TINY, steps=60, max_lag=None, preprocess=dict(ready_batches=10**6))
    trace = simulated(cfg, engines, 16 - engines, longest=500, sequences=64, queued=4)
    expected = pipeline(16, 64, engines, cfg.batch_size, tau=5.0)
    assert trace.tokens_per_time(skip=20) == pytest.approx(expected.r, rel=0.05)
    if engines == 4:  # bound by generation; groups of 8 wait for their longest: a little over g_max
        assert expected.max_lag <= max(lags.max() for lags in trace.lags[20:]) <= 2 * expected.max_lag
    bounded = simulated(changed(cfg, max_lag=3), engines, 16 - engines, longest=500, sequences=64, queued=4)
    assert max(lags.max() for lags in bounded.lags) <= 3


def test_where_one_in_many_is_long_the_others_need_not_wait_for_it():
    rng, traces = random.Random(0), {}
    groups = [rng.choice([10] * 31 + [400]) for _ in range(1000)]
    lengths = [length for length in groups for _ in range(8)]
    for order in ("started", "finished"):
        cfg = changed(TINY, steps=60, max_lag=32, preprocess=dict(order=order, ready_batches=3))
        traces[order] = simulated(cfg, 1, 1, 0, sequences=128, queued=4, lengths=itertools.cycle(lengths))
    lag = {order: np.concatenate(trace.lags[20:]).mean() for order, trace in traces.items()}
    assert lag["finished"] < 0.6 * lag["started"]
    assert traces["finished"].tokens_per_time(20) > 1.05 * traces["started"].tokens_per_time(20), "fewer bursts"
    assert max(lags.max() for trace in traces.values() for lags in trace.lags) <= 32


def test_simulation_shows_what_the_formulas_leave_out():
    cfg = changed(TINY, steps=40)
    quick = simulated(cfg, 8, 8, longest=500, sequences=64).tokens_per_time(skip=10)
    stalls = simulated(cfg, 8, 8, longest=500, sequences=64, stall=50_000.0).tokens_per_time(skip=10)
    drain = simulated(changed(cfg, actor=dict(update="drain")), 8, 8, 500, 64).tokens_per_time(skip=10)
    assert stalls < 0.9 * quick and drain < 0.7 * quick
    overlapped = changed(TINY, schedule="async", phase_steps=4, steps=40, max_lag=None)
    trace = simulated(overlapped, 8, 8, longest=500, sequences=10**6)
    assert max(lags.max() for lags in trace.lags) == 7
