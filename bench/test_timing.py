"""Arithmetic of samples, with a clock that the test turns."""

import pytest

from bench.timing import alternate, per_layer_us


class FakeClock:
    """Seconds that pass only when something is said to take time."""

    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_samples_are_time_per_step_in_turns_without_warmup():
    clock, order = FakeClock(), []

    def call(name, seconds):
        def run():
            order.append(name)
            clock.now += seconds * (10 if len(order) <= 2 else 1)  # the first round is slow

        return run

    calls = {"a": call("a", 0.004), "b": call("b", 0.008)}
    found = alternate(calls, lambda x: x, steps=4, repeats=3, warmups=1, clock=clock)
    assert order == ["a", "b"] * 4
    assert found == {"a": pytest.approx([1000.0] * 3), "b": pytest.approx([2000.0] * 3)}


def test_the_wait_is_part_of_a_sample():
    clock = FakeClock()

    def wait(_):
        clock.now += 0.5

    found = alternate({"a": lambda: 1}, wait, steps=1, repeats=2, warmups=0, clock=clock)
    assert found["a"] == pytest.approx([5e5, 5e5])


@pytest.mark.parametrize(("budget", "samples"), [(1000.0, 20), (10.0, 10), (0.1, 4)])
def test_slow_samples_are_fewer_but_enough_to_tell_noise(budget, samples):
    clock = FakeClock()

    def call():
        clock.now += 1.0

    found = alternate(
        {"a": call}, lambda x: x, steps=1, repeats=20, warmups=1, budget_s=budget, clock=clock
    )
    assert len(found["a"]) == samples


def test_time_of_a_layer_is_a_difference_of_depths():
    # 8 and 20 layers of 70 us each on top of 500 us
    assert per_layer_us([1900.0] * 2, [1060.0] * 2, 12) == pytest.approx([70.0] * 2)
    with pytest.raises(ValueError, match="as many of each"):
        per_layer_us([1.0], [1.0, 2.0], 12)
