"""The pictures and pages of a run: panels, plots, one self-contained HTML page, and the same facts as JSON.

Importing this package costs little: matplotlib, Jinja2 and PyYAML come in when something is drawn or written.
"""

from pathlib import Path

from vitrail.report.bench_page import bench_summary, write_bench_report
from vitrail.report.compare import compare_summary, write_comparison
from vitrail.report.facts import summary
from vitrail.report.metrics import read_metrics
from vitrail.report.page import write_report

__all__ = [
    "bench_summary",
    "compare_summary",
    "is_bench",
    "read_metrics",
    "summary",
    "write_bench_report",
    "write_comparison",
    "write_report",
]


def is_bench(folder: str | Path) -> bool:
    """Return whether a folder is that of a bench, not of a run."""
    return any(Path(folder, name).is_file() for name in ("sweep.json", "results.jsonl"))
