"""A cluster: a server and its workers, which together act as one worker of the layer above.

    with (
        DiLoCoServer(…, outer_lr=1.0, outer_momentum=0.0) as server,
        Cluster(server, above="10.0.0.1:8512", name="east"),
    ):
        server.wait()

The server *is* the cluster's leader. Only the server talks to the layer above, from a separate thread (leader.py). Its
workers need not know about that layer. After a restart of the server, the cluster resumes from the record in the run's
folder (server_below.py).
"""

from __future__ import annotations

import socket
from typing import Any

from msgspec.structs import replace

from ..coordination.layers.between import check_inner_momentum
from ..server import DiLoCoServer
from ..types import MemberFacts
from ..wire.relay import Relay
from .leader import Leader
from .server_below import ServerBelow
from .ways_up import addresses


class Cluster(Leader):
    """The leader of a server's cluster. Start it before the first worker joins; stop it before the server stops."""

    def __init__(
        self,
        server: DiLoCoServer,
        above: str,
        name: str,
        *,
        relay: bool = False,
        inner_momentum: bool = False,
        **settings: Any,
    ) -> None:
        """`settings`: those of `Leader`. `relay`: forward the bytes of other clusters to the same layer above.
        `inner_momentum`: allow the server an outer_momentum above 0, for a run above that has none."""
        server.expect_layer_above()
        below = ServerBelow(server)
        check_inner_momentum(below.terms.momentum, server.config.outer_optimizer, insists=inner_momentum)

        def facts() -> MemberFacts:
            return replace(below.facts(), relays=relay)

        super().__init__(below, above, name, facts=facts, hostname=socket.gethostname(), **settings)
        if relay:
            server.service.routes |= Relay(addresses(above), cluster=name).routes
        if server.service.coordinator.steering is not None:
            server.service.coordinator.steering.layer = name
        server.service.run.describe_above = self.describe
