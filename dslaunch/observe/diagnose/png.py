"""A diagnosis as a picture. matplotlib is no dependency: it is asked for only here."""

from __future__ import annotations

import importlib.util
import math
from typing import TYPE_CHECKING, Any

from dslaunch.core.errors import EnvironmentNotReady

if TYPE_CHECKING:
    from dslaunch.observe.diagnose.read import Diagnosis
    from dslaunch.observe.diagnose.series import Series


def check_matplotlib(output: str) -> None:
    """Raises EnvironmentNotReady where it is not installed; nothing is imported."""
    if importlib.util.find_spec("matplotlib") is None:
        raise EnvironmentNotReady(
            f"-o {output} needs matplotlib, which is not installed", hint="pip install matplotlib"
        )


def draw_png(found: Diagnosis, output: str) -> None:
    """Scale, loss and norm over the steps, below each other, to the file ``output``.

    Raises EnvironmentNotReady where it cannot be written.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    curves = [(name, series) for name, series in (("loss", found.loss), ("gradient norm", found.norm))]
    curves = [(name, series) for name, series in curves if series.points]
    with_scale = bool(found.course.points)
    figure = Figure(figsize=(10, 1 + 2.6 * (len(curves) + with_scale)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots(max(1, len(curves) + with_scale), 1, sharex=True, squeeze=False)[:, 0]
    if with_scale:
        _draw_scale(axes[0], found)
    for axis, (name, series) in zip(axes[with_scale:], curves, strict=False):
        _draw_series(axis, name, series)
    worst = found.verdicts[0].title if found.verdicts else "nothing wrong found"
    figure.suptitle(worst, fontsize=10)
    axes[-1].set_xlabel("step")
    try:
        figure.savefig(output, dpi=120, format="png")
    except OSError as error:
        raise EnvironmentNotReady(f"cannot write {output}: {error.strerror}") from None


def _draw_scale(axis: Any, found: Diagnosis) -> None:
    steps, scales = zip(*found.course.points, strict=True)
    axis.plot(steps, scales, drawstyle="steps-post", linewidth=1)
    axis.set_yscale("log", base=2)
    axis.set_ylabel("loss scale")
    for step in found.course.overflow_steps:
        axis.axvline(step, color="tab:red", linewidth=0.4, alpha=0.5)


def _draw_series(axis: Any, name: str, series: Series) -> None:
    points = [point for point in series.points if point.count]
    axis.plot([point.last for point in points], [point.mean for point in points], linewidth=1)
    means = [point.mean for point in points if point.mean > 0]
    if means and len(means) == len(points) and max(means) / min(means) >= 1000:
        axis.set_yscale("log")
    for point in series.points:
        if point.num_bad:
            axis.axvline(point.last, color="tab:red", linewidth=0.6)
    axis.set_ylabel(name)
    assert all(math.isfinite(point.mean) for point in points)
