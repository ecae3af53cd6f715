"""What techniques that take the optimizer apart, one for each weight, share."""

from ..config.declared import Conflict, Key
from ..config.optimizers import NOT_SEPARABLE


def one_estimate_for_all(switch: Key) -> Conflict:
    """Which optimizers cannot be."""
    return Conflict(
        switch, ("training", "optimizer"), lambda c: c.training.optimizer in NOT_SEPARABLE,
        ("`{first}` não anda com `{second}: {c.training.optimizer}`, que usa uma estimativa comum a todos os pesos",
         "`{first}` excludes `{second}: {c.training.optimizer}`, which has one estimate for all weights"),
        ("use outro otimizador, ou apague `{first}`", "use another optimizer, or delete `{first}`"))
