"""Weights & Biases. Offline unless told otherwise: its files lie in the folder `wandb` of the run, for `wandb sync`.

A run that goes on has the same id there. Offline, every session is a folder of its own, and none repeats what an
earlier one has told.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vitrail.recipe import config
from vitrail.training.loggers.logger import Facts, Logger, new_id, recall, remember, require, told_before


@config
class WandbConfig:
    kind: Literal["wandb"] = "wandb"
    project: str | None = None  # null: WANDB_PROJECT, or vitrail
    entity: str | None = None
    group: str | None = None
    tags: tuple[str, ...] = ()
    mode: Literal["offline", "online"] | None = None  # null: WANDB_MODE, or offline

    def open(self) -> Logger:
        require("wandb", "Weights & Biases", extra="wandb")
        return WandbLogger(self)


class WandbLogger(Logger):
    run: Any

    def __init__(self, config: WandbConfig):
        self.config = config
        self.told: dict[str, float] = {}

    def start(self, facts: Facts) -> None:
        # Read when it is imported: no lines of its own between the run's, and above all no question for a key.
        os.environ.setdefault("WANDB_SILENT", "true")
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")  # which goes out offline, too
        import wandb

        folder = facts.folder / "wandb"
        mode: Any = self.config.mode or os.environ.get("WANDB_MODE") or "offline"
        number = recall(folder)
        if number is None:
            remember(folder, number := new_id())
        else:
            self.told = told_before(facts.folder)
        self.run = wandb.init(
            dir=str(facts.folder),
            id=number,
            name=facts.name,
            project=self.config.project or os.environ.get("WANDB_PROJECT") or "vitrail",
            entity=self.config.entity,
            group=self.config.group,
            tags=list(self.config.tags),
            config=facts.recipe,
            mode=mode,
            resume="allow" if mode == "online" else None,
            reinit="create_new",  # whatever else this process does with wandb
            # A run folder holds no links beside its own files; the terminal and the code are not for a server.
            settings=wandb.Settings(symlink=False, console="off", disable_code=True, x_disable_stats=True),
        )

    def scalars(self, prefix: str, values: Mapping[str, float], step: int) -> None:
        if step > self.told.get(prefix, -1):
            self.run.log({f"{prefix}/{name}": value for name, value in values.items()}, step=step)

    def picture(self, name: str, path: Path, step: int, caption: str) -> None:
        if step > self.told.get("picture", -1):
            import wandb

            self.run.log({f"pictures/{name}": wandb.Image(str(path), caption=caption)}, step=step)

    def end(self, reason: str) -> None:
        self.run.finish(exit_code=int(reason == "failed"))
