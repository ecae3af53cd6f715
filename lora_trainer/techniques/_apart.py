"""What techniques that take the optimizer apart, one for each weight, share."""

from ..choices.optimizers import OPTIMIZERS
from ..config.declared import Conflict
from ..config.fields import Key


def one_estimate_for_all(switch: Key) -> Conflict:
    """Which optimizers cannot be."""
    return Conflict(
        switch, ("training", "optimizer"), lambda c: not OPTIMIZERS[c.training.optimizer].separable,
        ("`{first}` não anda com `{second}: {c.training.optimizer}`, que usa uma estimativa comum a todos os pesos",
         "`{first}` excludes `{second}: {c.training.optimizer}`, which has one estimate for all weights"),
        ("use outro otimizador, ou apague `{first}`", "use another optimizer, or delete `{first}`"))
