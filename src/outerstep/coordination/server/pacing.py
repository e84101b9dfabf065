"""Workers of unequal speed: how many local steps each takes.

Plain numbers, so that the coordinator can decide without tensors.
"""

from __future__ import annotations

import math

from ...errors import ConfigError

SPEED_PRECISION = 1e-9
"""Relative. v_w/v_max·H_base is rounded twice, so a product meant to be whole can fall short by a few 1e-16 and lose a
step to the floor (0.29/1·100 is 28.999999999999996). No speed is measured to a billionth: what lies that close below a
whole number is taken for it."""


def local_steps(speed: float, fastest: float, base: int, least: int = 1) -> int:
    """H_w = max(least, ⌊v_w / v_max · H_base⌋): all workers come back after about the same time.

    (Dynamic local updates, "DyLU": Liu et al. 2024, "Asynchronous Local-SGD Training for Language Modeling".)
    `speed` and `fastest` are in steps per unit of time; a worker faster than `fastest` takes `base` steps, as it does.
    """
    for name, value in (("speed", speed), ("fastest", fastest)):
        if not 0.0 < value < math.inf:
            raise ConfigError(f"{name} must be a finite number of steps per second > 0, got {value}")
    if not 1 <= least <= base:
        raise ConfigError(f"the local steps need 1 <= least <= base, got least={least}, base={base}")
    if speed >= fastest:
        return base
    return min(base, max(least, math.floor(speed / fastest * base * (1 + SPEED_PRECISION))))
