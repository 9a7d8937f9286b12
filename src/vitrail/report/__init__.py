"""What a run shows of itself: panels, plots, one self-contained HTML page, and the same facts as JSON.

Importing this package costs little: matplotlib, Jinja2 and PyYAML come in when something is drawn or written.
"""

from vitrail.report.facts import summary
from vitrail.report.metrics import read_metrics
from vitrail.report.page import write_report

__all__ = ["read_metrics", "summary", "write_report"]
