"""From a trace to figures: what is averaged over what, and what stays absent."""

import math

import numpy as np
import pytest

from gradbench.probe import account
from gradbench.probe.trace import Trace


def trace(phases, training=None, **columns):
    """Return a trace of one sample a second; columns are lists, None where nothing was read."""
    times = np.arange(len(phases), dtype=float) + 1000
    filled = {name: np.array([math.nan if v is None else float(v) for v in values]) for name, values in columns.items()}
    lag = filled.pop("lag_s", np.zeros(len(phases)))
    return Trace(
        {"t_unix_s": times, "lag_s": lag, **filled},
        list(phases),
        training if training is not None else [(times[0], times[-1])],
    )


PHASES = ["set-up", "warm-up", "forward", "backward", "eval", "data", "", "optimizer"]


def test_utilisation_is_of_the_updates_without_warm_up_and_evaluation():
    found = account.metrics(trace(PHASES, gpu0_util_pct=[0, 1, 90, 100, 7, 10, 3, 80], cpu_pct=[9] * 8), 1)
    assert found["final/gpu_util_pct"] == (90 + 100 + 10 + 80) / 4
    assert found["final/cpu_util_pct"] == 9


def test_what_was_not_read_is_absent_and_never_zero():
    """N7: under MIG there is no utilisation."""
    found = account.metrics(trace(PHASES, cpu_pct=[None] * 8, gpu0_power_w=[None] * 8), 1)
    assert found == {}
    found = account.metrics(trace(PHASES, gpu0_util_pct=[None, 1, None, 100, 7, None, 3, 80]), 1)
    assert found["final/gpu_util_pct"] == 90


def test_N3_memory_of_the_process_is_absent_where_one_gpu_does_not_tell():
    found = account.metrics(
        trace(["forward"] * 2, gpu0_process_bytes=[5, 7], gpu0_mem_used_bytes=[9, 9], gpu1_mem_used_bytes=[1, 2]), 1
    )
    assert "final/nvml_process_bytes" not in found
    assert found["final/nvml_device_bytes"] == 11


def test_idle_time_is_attributed_and_adds_up():
    phases = ["data", "forward", "forward", "backward"]
    found = account.metrics(trace(phases, gpu0_util_pct=[20, 60, 90, 100], lag_s=[0, 1e-5, 0.1, 0.2]), 1)
    shares = {name: found[f"final/idle_{name}_pct"] for name in ("data", "launch", "other")}
    assert shares == {"data": 80 / 4, "launch": 40 / 4, "other": 10 / 4}
    assert found["final/gpu_util_pct"] + sum(shares.values()) == 100


def test_energy_is_of_the_training_alone():
    """100 W throughout, ten seconds, of which the evaluation of 4 s in the middle is no part."""
    spans = [(1000.0, 1003.0), (1007.0, 1010.0)]
    counter = [5000 + 100 * second for second in range(11)]
    found = account.metrics(trace(["forward"] * 11, spans, gpu0_power_w=[100] * 11, gpu0_energy_j=counter), 60)
    assert found["final/energy_counter_j"] == found["final/energy_integrated_j"] == found["final/energy_j"] == 600
    assert found["final/j_per_token"] == 10
    assert account.warnings(found) == []


def test_energy_between_two_samples_and_over_gaps_and_of_all_gpus():
    power = [100, None, 100, 100]
    one = account.metrics(trace(["forward"] * 4, [(1000.5, 1002.5)], gpu0_power_w=power), 1)
    assert one["final/energy_integrated_j"] == one["final/energy_j"] == pytest.approx(200)
    assert "final/energy_counter_j" not in one
    two = account.metrics(trace(["forward"] * 4, [(1000.5, 1002.5)], gpu0_power_w=power, gpu1_power_w=[50] * 4), 1)
    assert two["final/energy_j"] == pytest.approx(300)
    lost = account.metrics(trace(["forward"] * 4, gpu0_power_w=power, gpu1_power_w=[None] * 4), 1)
    assert "final/energy_j" not in lost


@pytest.mark.parametrize(("integrated", "warned"), [(187.0, True), (300.0, False)])
def test_N5_the_two_energies_are_stored_and_told_apart_where_they_differ(integrated, warned):
    counter, power = [0.0, 327.0], [integrated] * 2
    found = account.metrics(trace(["forward"] * 2, gpu0_energy_j=counter, gpu0_power_w=power), 1)
    assert (found["final/energy_counter_j"], found["final/energy_integrated_j"]) == (327, integrated)
    said = account.warnings(found)
    assert bool(said) is warned
    if warned:
        assert said == [
            "the driver's energy counter says 327 J, the integrated power 187 J; final/energy_j is the counter's"
        ]


def test_the_idle_baseline_is_the_power_before_anything_ran():
    found = account.metrics(
        trace(["set-up", "set-up", "set-up", "forward"], gpu0_util_pct=[0, 0, 50, 0], gpu0_power_w=[40, 44, 90, 60]), 1
    )
    assert found["final/idle_power_w"] == 42


def test_what_the_gpu_did_in_the_backward_pass_can_be_asked():
    table = account.by_phase(
        trace(PHASES, gpu0_util_pct=[0, 1, 90, 100, 7, 10, 3, 80], gpu0_power_w=[1, 2, 3, 400, 5, 6, 7, 8])
    )
    assert table["backward"] == {"samples": 1, "gpu_util_pct": 100, "power_w": 400}
    assert set(table) == set(PHASES) - {""}
