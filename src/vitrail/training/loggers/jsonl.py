"""metrics.jsonl in the run folder: every event, one JSON object a line. Always on: reports are made from it."""

from collections.abc import Mapping
from typing import Any

from vitrail.training.loggers.logger import Logger
from vitrail.training.runfolder import RunFolder


class JsonlLogger(Logger):
    def __init__(self, folder: RunFolder):
        self.folder = folder

    def event(self, event: str, fields: Mapping[str, Any]) -> None:
        self.folder.log(event, **fields)
