"""How is Serve told to scale a pool by our policy?"""

from __future__ import annotations

import warnings
from dataclasses import asdict

from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from cluster.config import PoolConfig
from cluster.scaling import ScalingRules

REPORT_PERIOD_S = 1.0
"""How often a worker tells its signals."""


def autoscaling_of(role: str, pool: PoolConfig) -> AutoscalingConfig | None:
    """Serve's part of it; None when the pool's number of workers is fixed.

    The delays are our policy's; Serve's own, which act on the last moment alone, are left out. A pool
    begins with the least workers; a new configuration keeps the present number, if its bounds allow it.
    """
    rules = rules_of(pool)
    if rules is None:
        return None
    with warnings.catch_warnings():
        # Serve 2.60 says that the period has moved to a variable, which it never reads.
        warnings.simplefilter("ignore", DeprecationWarning)
        return AutoscalingConfig(
            min_replicas=rules.min_workers,
            max_replicas=rules.max_workers,
            upscale_delay_s=0.0,
            downscale_delay_s=0.0,
            metrics_interval_s=REPORT_PERIOD_S,
            look_back_period_s=5 * REPORT_PERIOD_S,
            policy=AutoscalingPolicy(  # type: ignore[no-untyped-call]
                policy_function="cluster.scaling:ScalingPolicy",
                policy_kwargs={"role": role, **asdict(rules)},
            ),
        )


def rules_of(pool: PoolConfig) -> ScalingRules | None:
    """What the configuration says about the pool's number of workers; None when it is fixed."""
    scaling = pool.autoscaling
    if scaling.max_workers is None:
        return None
    return ScalingRules(
        min_workers=scaling.min_workers,
        max_workers=scaling.max_workers,
        target_wait_s=scaling.target_wait_s,
        target_use=scaling.target_use,
        upscale_delay_s=scaling.upscale_delay_s,
        downscale_delay_s=scaling.downscale_delay_s,
    )
