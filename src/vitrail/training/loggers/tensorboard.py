"""TensorBoard: numbers and pictures, in the folder `tensorboard` of the run."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from vitrail.foreign import open_plain
from vitrail.recipe import config
from vitrail.training.loggers.logger import Facts, Logger, require


@config
class TensorboardConfig:
    kind: Literal["tensorboard"] = "tensorboard"

    def open(self) -> Logger:
        require("tensorboard", "TensorBoard", extra="tensorboard")
        return TensorboardLogger()


class TensorboardLogger(Logger):
    writer: Any

    def start(self, facts: Facts) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Points after the step that the run goes on from, which a crash left behind, are dropped.
        self.writer = SummaryWriter(str(facts.folder / "tensorboard"), purge_step=facts.step + 1)

    def scalars(self, prefix: str, values: Mapping[str, float], step: int) -> None:
        for name, value in values.items():
            self.writer.add_scalar(f"{prefix}/{name}", value, step)

    def picture(self, name: str, path: Path, step: int, caption: str) -> None:
        import numpy as np
        from PIL import Image

        with open_plain(path) as file, Image.open(file) as image:
            pixels = np.asarray(image.convert("RGB"))
        self.writer.add_image(f"pictures/{name}", pixels, step, dataformats="HWC")

    def end(self, reason: str) -> None:
        self.writer.close()
