"""Python's garbage is collected between steps, by all ranks at the same ones.

Python collects whenever it has made so many objects: in the middle of a step, on another rank each time, and all wait
for that one. What is there at the start of the loop is not looked at again, so that a collection takes a moment.
"""

import gc
from typing import Any

EVERY = 50  # steps


class Garbage:
    """Holds collections back inside; `between(step)` collects what has come up after so many steps."""

    def __enter__(self) -> "Garbage":
        self.enabled = gc.isenabled()
        gc.collect()
        gc.freeze()
        gc.disable()
        return self

    def between(self, step: int) -> None:
        """Collect, if it is time to."""
        if step % EVERY == 0:
            gc.collect()

    def __exit__(self, *error: Any) -> None:
        gc.unfreeze()
        if self.enabled:
            gc.enable()
