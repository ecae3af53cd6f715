"""Learning-rate curves as pure functions of the optimizer step, so nothing needs saving and a run may be extended.

Steps count from 0: the factor for `step` scales the update number `step + 1`. Warm-up climbs in equal strides and meets
the peak at update number `warmup_steps`; the curve then falls to `lr_min_ratio`, met exactly at the last update.
"""

from ..choices.schedules import SCHEDULES
from ..config.schema import TrainingConfig
from ..errors import t


def warmup_steps(total: int, settings: TrainingConfig) -> int:
    """`lr_warmup` below 1 is a share of all optimizer steps, otherwise a number of them."""
    share = settings.lr_warmup
    return round(total * share) if share < 1 else int(share)


def lr_factor(step: int, total: int, settings: TrainingConfig) -> float:
    """Factor in [0, 1] on the learning rate for optimizer step `step` (from 0) of `total`."""
    assert step >= 0, step
    climb = max(warmup_steps(total, settings), 1)
    if step + 1 <= climb:
        return (step + 1) / climb
    done, span = min(step + 1, total) - climb, total - climb
    if span <= 0:  # warm-up longer than the run, and the run longer than planned
        return 1.0
    curve = SCHEDULES[settings.lr_scheduler]
    shape = curve.shape(done, span, **curve.arguments(settings))
    return settings.lr_min_ratio + (1 - settings.lr_min_ratio) * shape


def schedule_notices(total: int, settings: TrainingConfig) -> list[str]:
    """What a user would want to know before the first step."""
    climb = warmup_steps(total, settings)
    if climb <= total:
        return []
    return [
        t(
            pt=f"aquecimento de {climb} passos num treino de {total}: a taxa nunca chega a taxa_aprendizado",
            en=f"warm-up of {climb} steps in a run of {total}: the rate never reaches learning_rate",
        )
    ]
