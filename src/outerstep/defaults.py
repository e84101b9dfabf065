"""What holds if nobody says otherwise, where more than one room needs to know it. Each value stands here alone.

A default that one dataclass holds stays there: `ServerConfig.num_workers`, `RoundRules.norm_screen`.
"""

from __future__ import annotations

from typing import Final

# Douillard et al. 2023, "DiLoCo".
OUTER_LR: Final = 0.7  # η
OUTER_MOMENTUM: Final = 0.9  # μ
SYNC_EVERY: Final = 500  # H

JOIN_TIMEOUT_S: Final = 120.0  # how long a worker looks for the others before it gives up
PEER_BEAT_S: Final = 2.0  # between two signs of life of a peer
PEER_HEARTBEAT_TIMEOUT_S: Final = 30.0  # of silence until a peer counts as dead
PART_SIZE_BYTES: Final = 16 << 20  # of the parts that payloads travel in; no part may be larger
SERVER_PORT: Final = 8512  # of a server, and of an address that names none
RUN_FOLDER: Final = "outerstep-run"  # that a server keeps its run in
METRICS_FOLDER: Final = "outerstep-metrics"  # that `outerstep worker` lets its script keep metrics in
RECENT_LOSSES: Final = 60  # rounds whose loss the status of a server or a peer shows
LOGGERS: Final = ("tensorboard", "wandb", "mlflow", "trackio", "otel")  # what metrics can also be written to

# Between layers (docs/concepts/hierarchy.md).
ABOVE_EVERY: Final = 8  # rounds of a cluster between two exchanges of the layer above
OUTER_PATIENCE: Final = 2.0  # times as long as the layer inside a layer waits for a silent member
