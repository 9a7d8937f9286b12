"""Verbs with absurd numbers in one process of little memory: `absurd_child.py CASES.json`, told as JSON lines.

Each line: the case, its exit code (null: it raised), what was said, and how much its peak of memory rose, in MiB.
"""

import contextlib
import io
import json
import resource
import sys
import traceback
from pathlib import Path

LIMIT = 8 * 2**30  # bytes of addresses: libraries alone map a few GiB


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (LIMIT, LIMIT))
    from vitrail.cli import main as run

    for words in json.loads(Path(sys.argv[1]).read_text()):
        said = io.StringIO()
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        code: object = None
        try:
            with contextlib.redirect_stderr(said), contextlib.redirect_stdout(said):
                run(words)
        except SystemExit as ended:
            code = ended.code or 0
        except BaseException:
            said.write(traceback.format_exc())
        rose = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) // 1024
        print(json.dumps({"words": words, "code": code, "said": said.getvalue()[-3000:], "rose": rose}), flush=True)


if __name__ == "__main__":
    main()
