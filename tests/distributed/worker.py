"""Runs several trainings in one launch: `worker.py CASES.json`, a list of recipes."""

import json
import sys
from pathlib import Path

from vitrail.cli.words import end
from vitrail.training.run import train


def main() -> None:
    for tree in json.loads(Path(sys.argv[1]).read_text()):
        train(tree)


if __name__ == "__main__":
    main()
    end(0)
