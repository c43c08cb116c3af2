"""A slow network reverses rankings of schedules. Everything expected here is worked out by hand; notebooks/slow_network.ipynb shows it."""

from __future__ import annotations

import pytest

from pipesim import Communication, UniformCosts, generate, simulate

# p=2, m=4. Of two chunks on a device each takes F=1, B=2; as one stage they take 2 and 4.
CHUNK = {"gpipe": 2, "1f1b": 2, "interleaved": 1}


def makespans(latency: float, microbatches: int = 4) -> dict[str, float]:
    return {
        name: simulate(generate(name, 2, microbatches), UniformCosts(forward=time, backward=2 * time, latency=latency)).makespan
        for name, time in CHUNK.items()
    }


@pytest.mark.parametrize("microbatches", [2, 4, 8])
@pytest.mark.parametrize("latency", [0, 0.5, 1, 2, 5])
def test_1f1b_pays_the_hop_in_every_round_trip_and_gpipe_once_each_way(latency: float, microbatches: int) -> None:
    """F=2, B=4 on two devices, m even.

    GPipe: m forwards, the hop, one forward, one backward, the hop, m backwards: 6(m + 1) + 2c.
    1F1B: device 1 ends its second backward at 2 + c + 12, and sends its gradient back; for every two more, device 0 does
    a backward and a forward in return, 4 + 2, with a hop to either side, and device 1 another 2 + 4: 12 + 2c. After the last one
    the gradient goes back and is worked off: 14 + c + (m/2 - 1)(12 + 2c) + c + 4 = 6(m + 1) + mc.
    """
    found = makespans(latency, microbatches)
    assert found["gpipe"] == 6 * (microbatches + 1) + 2 * latency
    assert found["1f1b"] == 6 * (microbatches + 1) + microbatches * latency


def test_interleaved_without_a_hop_has_half_the_bubble() -> None:
    """m(F + B) + (p - 1)(F + B)/v = 24 + 3, against 24 + 6."""
    assert makespans(0) == {"gpipe": 30, "1f1b": 30, "interleaved": 27}


def test_a_hop_of_1_reverses_the_ranking() -> None:
    """Interleaved by hand, with a hop of 1 (device 0 | device 1; the start of each op).

    0F0 0, 0F1 1, 2F0 4, 2F1 5, 0F2 6, 2B0 10, 0F3 12, 2B1 13, 2F2 15, 0B0 16, 2F3 18, 0B1 19, 2B2 22, 2B3 25, 0B2 28, 0B3 31-33
    1F0 2, 1F1 3, 3F0 6, 3B0 7, 3F1 9, 3B1 10, 1F2 12, 1B0 13, 1F3 15, 1B1 16, 3F2 18, 3B2 19, 3F3 21, 3B3 22, 1B2 25, 1B3 28
    """
    run = simulate(generate("interleaved", 2, 4), UniformCosts(forward=1, backward=2, latency=1))
    assert run.start[0].tolist() == [
        *(0, 1, 4, 5, 6, 10, 12, 13, 15, 16, 18, 19, 22, 25, 28, 31),
        *(2, 3, 6, 7, 9, 10, 12, 13, 15, 16, 18, 19, 21, 22, 25, 28),
    ]
    near, far, farther = makespans(0), makespans(1), makespans(2)
    assert far == {"gpipe": 32, "1f1b": 34, "interleaved": 33}
    assert near["interleaved"] < near["1f1b"] == near["gpipe"]
    assert far["gpipe"] < far["interleaved"] < far["1f1b"]
    assert farther["gpipe"] < farther["1f1b"] < farther["interleaved"]  # the opposite of where it began


def test_blocking_sends_make_gpipe_pay_every_hop() -> None:
    """C10: p=2, m=4, F=1, B=2, c=0.25: overlapped 15 + 2c; where both ends are held, each of 2m messages delays what follows."""
    costs = UniformCosts(forward=1, backward=2, latency=0.25)
    assert simulate(generate("gpipe", 2, 4), costs).makespan == 15.5
    held = simulate(generate("gpipe", 2, 4), costs, communication=Communication(sends="rendezvous", blocking=True))
    assert held.makespan == 17
    assert sum(held.idle_causes()[0].values()) == 17 - 12


@pytest.mark.parametrize("time", [1, 2, 3, 4, 8])
def test_a_reduction_reverses_the_ranking_too(time: float) -> None:
    """F=B=1, p=2, m=2. 1F1B takes 2(2 + 1) = 6, and the reduction of stage 0 follows: 6 + R.

    Chimera takes 4. Each device reduces both stages: stage 1, whose last gradients are there at 3, and then stage 0 (there at 4): 3 + 2R.
    """
    found = {name: simulate(generate(name, 2, 2), UniformCosts(forward=1, backward=1, reduction=time)).makespan for name in ("1f1b", "chimera")}
    assert found == {"1f1b": 6 + time, "chimera": 3 + 2 * time}
    assert (found["chimera"] < found["1f1b"]) == (time < 3)
