from __future__ import annotations

import pytest

from pipesim import ScheduleError, UniformCosts, simulate
from pipesim.schedules.pipad import pipad
from pipesim.testing import check_generator


@pytest.mark.parametrize("times", [(1, 1, 1), (3, 1, 2), (1, 4, 2), (0.5, 1, 6)])
@pytest.mark.parametrize("microbatches", [1, 2, 7])
def test_the_slowest_resource_sets_the_pace(times, microbatches):
    run = simulate(pipad(3, microbatches), UniformCosts(forward=list(times)))
    assert run.makespan == sum(times) + (microbatches - 1) * max(times)


def test_three_resources_and_no_other_number():
    sizes = [(p, m) for p in range(1, 9) for m in range(1, 25)]
    result = check_generator(pipad, sizes=sizes)
    assert result.legal == tuple((3, m) for m in range(1, 25))
    assert result.refused[4, 8] == "pipad has three devices, which stand for CPU, PCIe and GPU; got 4"
    with pytest.raises(ScheduleError, match="got 2"):
        pipad(2, 8)
