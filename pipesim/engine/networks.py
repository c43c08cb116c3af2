"""The networks of a run: its routes over what the cluster's transfers share, and the transport of messages that take them."""

from __future__ import annotations

from pipesim.engine.clock import Clock, Event
from pipesim.engine.program import Program
from pipesim.engine.sharing import FairNetwork, FifoNetwork, Left, Order, Taken
from pipesim.engine.transports import OffloadTransport

__all__ = ["FairNetwork", "FifoNetwork", "NetworkTransport", "network"]


class NetworkTransport(OffloadTransport):
    """Messages, and OFFLOAD and RELOAD, over what the cluster's transfers share."""

    def __init__(self, env: Clock, program: Program) -> None:
        super().__init__(env, program)
        # where no op ends when it starts, and no lane goes on, an event's asks are those of the slot that ends then
        quick = not len(program.moves) and bool((program.durations > 0).all())
        self.network = network(env, program, self.taken, self.left_at, self.order, sorted_asks=quick)
        self.sizes: list[float] = program.sizes.tolist()
        self.route: list[int] = program.link.tolist()
        self.ends: list[float] = [0.0] * (self.count * program.steps)
        if quick:
            self.send = self.ask  # type: ignore[assignment, method-assign]  # no message is a move

    def ask(self, transfer: int) -> None:
        """Asks the transfer's route to take it."""
        number = transfer % self.count
        self.network.ask(transfer, self.route[number], self.sizes[number])

    def order(self, transfer: int) -> tuple[int, int, int]:
        """(device, step, position): whose turn it is."""
        step, number = divmod(transfer, self.count)
        return self.device[number], step, self.rank[number]

    def left_at(self, transfer: int, time: float) -> None:
        """Lets a transfer be there after the link's latency."""
        self.ends[transfer] = time
        number = transfer % self.count
        arrival, lane = time + self.latency[number], self.lanes[number]
        if lane is None:
            self.arrive_at(transfer, arrival)
            return
        ended = Event(self.env)
        ended.callbacks.append(lane.ended)
        self.env.trigger_at(ended, arrival)
        if number not in self.out:  # nobody waits for an OFFLOAD
            self.arrive_at(transfer, arrival)


def network(env: Clock, program: Program, taken: Taken, left: Left, order: Order, *, sorted_asks: bool = False) -> FifoNetwork | FairNetwork:
    """The network of a run: over the routes of the program's links, in their numbers, and then over those of its collectives.

    A collective (step x collectives + number) is transfer -1 - collective; who asks for it says in ``collectives`` whom to tell.
    """
    shared = program.cluster.network
    assert shared is not None  # else links are private
    make = FairNetwork if shared.discipline == "fair" else FifoNetwork
    nodes = program.plan.collectives.nodes if program.beyond_plain is not None else []
    if not nodes:
        return make(env, program.routes, taken, left, order, sorted_asks=sorted_asks)

    def either_taken(transfer: int) -> None:
        if transfer < 0:
            found.collectives[0](-1 - transfer)
        else:
            taken(transfer)

    def either_left(transfer: int, time: float) -> None:
        if transfer < 0:
            found.collectives[1](-1 - transfer, time)
        else:
            left(transfer, time)

    def either_order(transfer: int) -> tuple[int, int, int]:
        if transfer >= 0:
            return order(transfer)
        step, number = divmod(-1 - transfer, len(nodes))
        return nodes[number].members[0], step, len(program.transfer_rank) + number  # after the messages of its device

    found = make(env, [*program.routes, *(shared.ring(node.members) for node in nodes)], either_taken, either_left, either_order)
    return found
