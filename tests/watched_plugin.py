"""Ranks that are not ended by the clock: another is hung only once the file `hang` lies in their run's folder."""

from vitrail.training.failures import Watchdog


def _least(watchdog: Watchdog) -> float:
    told = watchdog.folder is not None and (watchdog.folder / "hang").exists()
    return 6.0 if told else 3600.0


Watchdog.GRACE = 3600.0  # to end by itself, once another rank has failed
Watchdog.least = property(_least, lambda watchdog, least: None)  # type: ignore[assignment]
