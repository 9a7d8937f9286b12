"""MLflow: a server, or without one files in the folder `mlflow` of the run. A run that goes on is the same there."""

import os
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal
from urllib.parse import unquote, urlsplit

from vitrail.credentials import reveal
from vitrail.recipe import config
from vitrail.recipe.yaml import dotted, leaves
from vitrail.training.loggers.logger import Facts, Logger, recall, remember, require, told_before

MOST = 100  # parameters that a server takes at once
LONGEST = 500  # characters of a parameter's value


@config
class MlflowConfig:
    kind: Literal["mlflow"] = "mlflow"
    uri: str | None = None  # of a server; null: MLFLOW_TRACKING_URI, or the run folder
    experiment: str | None = None  # null: MLFLOW_EXPERIMENT_NAME, or vitrail

    def open(self) -> Logger:
        require("mlflow", "MLflow", extra="mlflow")
        return MlflowLogger(self)


class MlflowLogger(Logger):
    client: Any
    run: str  # its id

    def __init__(self, config: MlflowConfig):
        self.config = config
        self.told: dict[str, float] = {}
        self.draws = True

    def start(self, facts: Facts) -> None:
        place = Path(os.path.abspath(facts.folder / "mlflow"))
        uri = self.config.uri or os.environ.get("MLFLOW_TRACKING_URI")
        if uri is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")  # a database needs more than mlflow-skinny
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        from mlflow import MlflowClient

        self.client = MlflowClient(tracking_uri=place.as_uri() if uri is None else reveal(uri))
        found = self.find(place)
        if found is None:
            found = self.create(facts)
            remember(place, found.info.run_id)
        else:
            self.told = told_before(facts.folder)
            self.client.update_run(found.info.run_id, status="RUNNING")
        self.run = found.info.run_id
        if uri is None:  # files know their places by whole paths: after a move pictures would go to the old ones
            self.draws = Path(os.path.normpath(unquote(urlsplit(found.info.artifact_uri).path))).is_relative_to(place)

    def find(self, place: Path) -> Any:
        """Return the run of earlier sessions, if this store has it."""
        from mlflow.exceptions import MlflowException

        number = recall(place)
        try:
            return None if number is None else self.client.get_run(number)
        except MlflowException:
            return None

    def create(self, facts: Facts) -> Any:
        from mlflow.entities import Param

        name = self.config.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or "vitrail"
        known = self.client.get_experiment_by_name(name)
        number = self.client.create_experiment(name) if known is None else known.experiment_id
        made = self.client.create_run(number, run_name=facts.name)
        given = [Param(_named(dotted(key)), str(value)[:LONGEST]) for key, value in leaves(facts.recipe)]
        for first in range(0, len(given), MOST):
            self.client.log_batch(made.info.run_id, params=given[first : first + MOST])
        return made

    def scalars(self, prefix: str, values: Mapping[str, float], step: int) -> None:
        if step > self.told.get(prefix, -1):
            from mlflow.entities import Metric

            now = round(1000 * time.time())
            points = [Metric(_named(f"{prefix}/{name}"), value, now, step) for name, value in values.items()]
            self.client.log_batch(self.run, metrics=points)

    def picture(self, name: str, path: Path, step: int, caption: str) -> None:
        if self.draws and step > self.told.get("picture", -1):
            self.client.log_artifact(self.run, str(path), "pictures")

    def end(self, reason: str) -> None:
        self.client.set_terminated(self.run, {"done": "FINISHED", "failed": "FAILED"}.get(reason, "KILLED"))


def _named(key: str) -> str:
    """Make a name of the letters that MLflow takes."""
    return re.sub(r"[^\w .:/-]", "_", key, flags=re.ASCII)
