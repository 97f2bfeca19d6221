"""A picture of a load run. Needs the ``plot`` extra."""

import importlib.util
from pathlib import Path

from headrace.bench.report import LevelReport, ServeReport
from headrace.bench.stats import Summary
from headrace.core.errors import ConfigError


def require_matplotlib() -> None:
    """Fail before the run, not after it.

    Raises:
        ConfigError: matplotlib is not installed; says how to install it.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError("a plot needs matplotlib: pip install 'headrace[plot]'")


def save(report: ServeReport, path: Path) -> None:
    """Write latencies and rates by level of load to ``path``; its suffix chooses the format (``.png``, ``.svg``).

    Raises:
        ConfigError: matplotlib is not installed, or does not know the format.
    """
    require_matplotlib()
    # Imported here because matplotlib is an optional extra, and takes a second to import.
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 7), layout="constrained")
    axes = figure.subplots(2, 2)
    x = range(len(report.levels))
    for axis, name in zip(axes.flat, ("ttft", "tpot", "e2e"), strict=False):
        for percentile in ("p50", "p90", "p99"):
            axis.plot(x, [_milliseconds(level, name, percentile) for level in report.levels], "o-", label=percentile)
        axis.set(title={"ttft": "TTFT", "tpot": "TPOT", "e2e": "End to end"}[name], ylabel="ms", ylim=(0, None))
        axis.legend()
    rates = axes[1][1]
    rates.plot(x, [level.requests_per_s for level in report.levels], "o-", label="completed")
    rates.plot(x, [level.goodput_per_s for level in report.levels], "o-", label="within targets")
    rates.set(title="Requests per second", ylim=(0, None))
    rates.legend()
    for axis in axes.flat:
        axis.set_xticks(x, [level.label for level in report.levels])
        axis.grid(alpha=0.3)
    figure.suptitle(f"{report.model}, {report.endpoint}\n{report.machine.line()}", fontsize=9)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        figure.savefig(path)
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from error


def _milliseconds(level: LevelReport, name: str, percentile: str) -> float:
    sample: Summary | None = getattr(level, name)
    return float("nan") if sample is None else float(getattr(sample, percentile)) * 1000
