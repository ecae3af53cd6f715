"""The loss and the learning rate over the run, drawn from metricas.jsonl."""

from pathlib import Path

from ..errors import t
from .progress import read_metrics

SMOOTHING = 0.05
"""Share of the run in the moving average."""


def plot_metrics(metrics: Path, path: Path) -> None:
    """Draw loss (raw and smoothed), validation loss and learning rate. Steps replayed after a crash count once."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    rows = read_metrics(metrics)
    steps = {row["step"]: row for row in rows if "loss" in row and "event" not in row}
    validation = {row["step"]: row["validation_loss"] for row in rows if "validation_loss" in row}
    if not steps:
        return
    order = sorted(steps)
    losses = [steps[s]["loss"] for s in order]
    figure = Figure(figsize=(9, 5), layout="constrained")
    FigureCanvasAgg(figure)
    top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=[3, 1])
    top.plot(order, losses, color="#9bbbe0", linewidth=0.8, label=t(pt="perda", en="loss"))
    top.plot(order, smooth(losses), color="#1f4e9c", label=t(pt="média móvel", en="moving average"))
    if validation:
        top.plot(*zip(*sorted(validation.items()), strict=True), "o-", color="#c44", label=t(pt="validação", en="validation"))
    top.legend()
    top.grid(alpha=0.3)
    bottom.plot(order, [steps[s]["lr"] for s in order], color="#444")
    bottom.set(ylabel=t(pt="taxa", en="rate"), xlabel=t(pt="passo", en="step"))
    bottom.grid(alpha=0.3)
    figure.savefig(path, dpi=110)


def smooth(values: list[float]) -> list[float]:
    """Exponential average without bias at the start."""
    keep = 1 - 1 / max(1.0, SMOOTHING * len(values))
    average, weight, out = 0.0, 0.0, []
    for value in values:
        average, weight = keep * average + (1 - keep) * value, keep * weight + (1 - keep)
        out.append(average / weight)
    return out
