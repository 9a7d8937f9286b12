"""The tutorial of slices of one's own, command by command as the page has them, from an empty folder; on few pixels."""

import http.client
import json
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import zarr
from support import ROOT

from vitrail.cli import main

PAGE = ROOT / "docs" / "tutorials" / "own_slices.md"
SMALLER = {  # what a verb is given besides, so that it takes seconds
    "data generate": ["--shape", "30,64,64"],
    "train": ["run.steps=4", "eval.every=4", "checkpoint.every=4", "log.pictures=null"],
    "view": ["--no-browser", "--json"],
}


def commands() -> list[list[str]]:
    blocks = re.findall(r"^```sh\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [shlex.split(line) for block in blocks for line in block.splitlines()]


def test_the_way_from_slices_to_the_browser_has_at_most_six_commands() -> None:
    assert all(words[0] == "vitrail" for words in commands())
    assert len(commands()) <= 6


@pytest.mark.slow
def test_the_page_leads_from_slices_to_the_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("neuroglancer")
    monkeypatch.chdir(tmp_path)
    *before, last = commands()
    for words in before:
        verb = " ".join(words[1:3]) if words[1] == "data" else words[1]
        with pytest.raises(SystemExit) as ended:
            main([*words[1:], *SMALLER.get(verb, [])])
        assert ended.value.code == 0, words
    found = zarr.open_group("tissue-classes.ome.zarr", mode="r")["s0"]
    assert found.shape == (30, 64, 64)
    scores = [json.loads(line) for line in Path("runs/tissue-segment/metrics.jsonl").read_text().splitlines()]
    assert any(row["event"] == "eval" for row in scores)
    assert last[1] == "view"
    command = [sys.executable, "-m", "vitrail", *last[1:], *SMALLER["view"]]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        lines = [process.stdout.readline()]
        while lines[-1] not in ("}\n", ""):
            lines.append(process.stdout.readline())
        told = json.loads("".join(lines))
        assert [layer["kind"] for layer in told["layers"]] == ["image", "labels", "labels"]
        assert all(layer["levels"][0] == [30, 64, 64] for layer in told["layers"])
        connection = http.client.HTTPConnection("127.0.0.1", told["port"], timeout=600)
        connection.request("GET", "/" + told["address"].split("/", 3)[3] + "data/2/0/c/0/0/0")
        chunk = np.frombuffer(connection.getresponse().read(), np.uint8)
        assert chunk.size == np.prod([30, 64, 64])
        assert (chunk.reshape(30, 64, 64) == found[:]).all()
        process.send_signal(signal.SIGINT)
        process.wait(600)
    assert process.returncode == 0
