"""Loggers: what a run reports to, by name, by plugin, and what happens when one fails."""

import importlib
import importlib.machinery
import json
import os
import re
import struct
import sys
import threading
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from support import ROOT, events, tiny_recipe, write_recipe

import vitrail
from vitrail.cli import main
from vitrail.contents import check_contents
from vitrail.errors import UserError
from vitrail.recipe import config, json_schema, kinds, load_recipe
from vitrail.training import loggers
from vitrail.training.loggers import Facts, Logger
from vitrail.training.loggers.logger import KEPT, told_before
from vitrail.training.session import Session

SMALL = {"run__steps": 8, "eval__every": 4, "log__pictures": 4, "log__activations": "off", "checkpoint__every": 4}
OWN = (
    *("WANDB_MODE", "WANDB_SILENT", "WANDB_PROJECT", "WANDB_API_KEY", "WANDB_ERROR_REPORTING", "VITRAIL_CREDENTIALS"),
    *("MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY", "MLFLOW_EXPERIMENT_NAME", "MLFLOW_TRACKING_URI"),
)


@pytest.fixture(autouse=True)
def surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No settings of the person who tests, and nothing of theirs written to."""
    for name in OWN:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name in ("CACHE", "CONFIG", "DATA"):
        monkeypatch.setenv(f"WANDB_{name}_DIR", str(tmp_path / "wandb of mine"))
    monkeypatch.setitem(kinds._registered, "logger", {})


def recipe(volume: Path, run: Path, to: Any, **changes: Any) -> dict[str, Any]:
    tree = tiny_recipe(volume, run, **SMALL | changes, log__to=to)
    del tree["log"]["tensorboard"]
    return tree


def break_off(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let the next training fail when it has reported a step."""

    def tell(self: Session, *arguments: Any) -> None:
        usual(self, *arguments)
        if self.trainer.done == step:
            monkeypatch.setattr(Session, "tell", usual)
            raise RuntimeError("a power cut")

    usual = Session.tell
    monkeypatch.setattr(Session, "tell", tell)


# ---------------------------------------------------------------- the recipe


def load(tmp_path: Path, log: dict[str, Any], *overrides: str) -> Any:
    return load_recipe({**tiny_recipe(tmp_path / "em.zarr", tmp_path / "run"), "log": log}, overrides).log


def test_loggers_are_named_or_given_with_options(tmp_path: Path) -> None:
    log = load(tmp_path, {"to": ["tensorboard", {"kind": "wandb", "project": "em", "tags": ["a"]}]})
    assert [logger.kind for logger in log.to] == ["tensorboard", "wandb"]
    assert (log.to[1].project, log.to[1].tags, log.to[1].mode) == ("em", ("a",), None)
    again = load(tmp_path, log.model_dump(mode="json"))
    assert again == log
    assert load(tmp_path, {}).to == "auto"
    assert load(tmp_path, {}) == load(tmp_path, {"to": "auto"})
    assert load(tmp_path, {"to": ["wandb"]}, "log.to=null").to == "auto"
    assert load(tmp_path, {"to": [{"kind": "wandb", "group": "g"}]}, "log.to.0.kind=mlflow").to[0].kind == "mlflow"


def test_the_older_spelling_means_the_same(tmp_path: Path) -> None:
    assert load(tmp_path, {"tensorboard": True}) == load(tmp_path, {"to": ["tensorboard"]})
    assert load(tmp_path, {"tensorboard": False}) == load(tmp_path, {"to": []})
    assert load(tmp_path, {"tensorboard": "auto"}) == load(tmp_path, {})
    assert load(tmp_path, {"tensorboard": "auto", "to": ["mlflow"]}) == load(tmp_path, {"to": ["mlflow"]})
    assert load(tmp_path, {"tensorboard": True}, "log.tensorboard=null").to == "auto"
    log = json_schema()["$defs"]["Log"]["properties"]
    assert log["tensorboard"]["deprecated"]
    assert {"type": "string"} in log["to"]["anyOf"][1]["items"]["anyOf"]


@pytest.mark.parametrize(
    ("log", "sentence"),
    [
        (
            {"tensorboard": False, "to": ["wandb"]},
            'log.tensorboard: it is the older spelling of log.to, and both are given (false and ["wandb"]); '
            "remove log.tensorboard, or set it to auto",
        ),
        ({"tensorboard": "yes"}, "log.tensorboard: expected auto, true or false, got 'yes'"),
        ({"tensorboard": None}, "log.tensorboard: expected auto, true or false, got null"),
        (
            {"to": ["wadb"]},
            "log.to.0.kind: 'wadb' is not a known logger; did you mean 'wandb'? "
            "(known: mlflow, tensorboard, wandb; a plugin's needs --plugin MODULE)",
        ),
        ({"to": [3]}, "log.to.0: expected a mapping such as {kind: mlflow}, got 3"),
        ({"to": [{}]}, "log.to.0.kind: missing; expected one of mlflow, tensorboard, wandb"),
        ({"to": "wandb"}, "log.to: expected 'auto' or a list, got 'wandb'"),
        ({"to": ["wandb", {"kind": "wandb"}]}, "log.to: wandb is there twice; name each logger once"),
        (
            {"to": [{"kind": "wandb", "projekt": "em"}]},
            "log.to.0.projekt: unknown key; did you mean 'project'? (keys here: "
            "kind, project, entity, group, tags, mode)",
        ),
        (
            {"to": ["mlflow", {"kind": "wandb", "mode": "on"}]},
            "log.to.1.mode: expected 'offline' or 'online', got 'on'",
        ),
    ],
)
def test_mistakes_are_named(tmp_path: Path, log: dict[str, Any], sentence: str) -> None:
    with pytest.raises(UserError) as refused:
        load(tmp_path, log)
    assert str(refused.value) == sentence


@pytest.mark.parametrize("name", ["wandb", "mlflow", "tensorboard"])
def test_what_is_not_installed_is_named_before_anything_is_written(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(UserError, match=rf'^log\.to: .* is not installed.*pip install "vitrail\[{name}\]"'):
        vitrail.train(recipe(volume, tmp_path / "run", [name]), quiet=True)
    assert not (tmp_path / "run").exists()
    found = loggers.open_loggers(load_recipe(recipe(volume, tmp_path / "run", "auto")))
    assert [logger.name for logger in found] == ([] if name == "tensorboard" else ["tensorboard"])


def test_a_password_in_an_address_is_not_stored(tmp_path: Path) -> None:
    log = load(tmp_path, {"to": [{"kind": "mlflow", "uri": "https://me:hunter22@mlflow.example.org/a"}]})
    assert log.to[0].uri == "https://mlflow.example.org/a"


# ---------------------------------------------------------------- a user's own


def call(*words: str | Path) -> Any:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return ended.value.code or 0


def test_the_plugin_of_the_page_receives_everything(
    volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "logging.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (tmp_path / "my_lab").mkdir()
    (tmp_path / "my_lab" / "diary.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    tree = recipe(volume, tmp_path / "run", [{"kind": "diary", "path": str(tmp_path / "diary.txt")}])
    written = write_recipe(tmp_path / "recipe.yaml", tree)
    assert call("train", written, "--quiet") == 2
    assert "log.to.0.kind: 'diary' is not a known logger" in capfd.readouterr().err
    assert call("train", written, "--quiet", "--plugin", "my_lab.diary") == 0
    lines = (tmp_path / "diary.txt").read_text().splitlines()
    assert lines[0] == "tiny goes on after step 0"
    assert lines[-1] == "done"
    told = [line.split()[:3] for line in lines[1:-1]]
    assert told.count(["train", "step", "8:"]) == told.count(["eval", "step", "8:"]) == 1
    drawn = [line.partition(": ")[2] for line in lines if line.startswith("picture ")]
    assert drawn == [str(tmp_path / "run/pictures" / f"reconstruct-{step:08d}.png") for step in (0, 4, 8)]
    loss = next(line for line in lines if line.startswith("train step 8: "))
    assert f"loss={events(tmp_path / 'run', 'train')[-1]['loss']:g}" in loss


class Kept(Logger):
    """Keeps what it is told."""

    told: list[tuple[Any, ...]]
    act: Callable[..., None]

    def __getattribute__(self, name: str) -> Any:
        if name not in ("start", "scalars", "picture", "event", "end"):
            return super().__getattribute__(name)

        def take(*arguments: Any) -> None:
            type(self).told.append((name, *arguments))
            type(self).act(name, *arguments)

        return take


@config
class KeptConfig:
    kind: str = "kept"

    def open(self) -> Logger:
        return Kept()


@pytest.fixture
def kept(surroundings: None) -> type[Kept]:
    kinds.register("logger", "kept", KeptConfig)
    Kept.told, Kept.act = [], staticmethod(lambda *_: None)
    return Kept


def test_everything_comes_in_order_and_is_as_in_the_log(volume: Path, tmp_path: Path, kept: type[Kept]) -> None:
    run = tmp_path / "run"
    vitrail.train(recipe(volume, run, ["kept"]), quiet=True)
    assert [call[0] for call in kept.told[:1] + kept.told[-1:]] == ["start", "end"]
    facts = kept.told[0][1]
    assert isinstance(facts, Facts)
    assert (facts.name, facts.folder, facts.step) == ("tiny", run, 0)
    assert facts.recipe == load_recipe(run / "recipe.yaml").to_tree()
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert [call[1] for call in kept.told if call[0] == "event"] == [json.loads(line)["event"] for line in lines]
    points = [call for call in kept.told if call[0] == "scalars"]
    assert [call[1::2] for call in points] == [
        *(("train", step) for step in (1, 2, 3, 4)),
        ("eval", 4),
        *(("train", step) for step in (5, 6, 7, 8)),
        ("eval", 8),
    ]
    assert points[-1][2] == events(run, "eval")[-1]["metrics"]
    assert {"step", "samples", "activation_rms"}.isdisjoint(points[0][2])
    assert threading.active_count() == len([t for t in threading.enumerate() if not t.name.startswith("logger")])


def test_lines_of_the_log_are_as_ever(volume: Path, tmp_path: Path, kept: type[Kept]) -> None:
    """One JSON object a line, event and time first, as Python writes it."""
    vitrail.train(recipe(volume, tmp_path / "run", ["kept"]), quiet=True)
    text = (tmp_path / "run" / "metrics.jsonl").read_bytes()
    assert text.endswith(b"}\n")
    for line in text.decode().splitlines():
        found = json.loads(line)
        assert json.dumps(found) == line
        assert list(found)[:2] == ["event", "time"]
    (drawn,) = [
        json.loads(line) for line in text.decode().splitlines() if '"picture", ' in line and '"step": 4' in line
    ]
    assert list(drawn) == ["event", "time", "step", "path", "caption", "samples"]
    assert drawn["path"] == "pictures/reconstruct-00000004.png"
    assert len(drawn["samples"]) > 0
    assert all(re.fullmatch(r"\S+\.zarr   from z .*", sample) for sample in drawn["samples"])


# ---------------------------------------------------------------- a logger that fails


@pytest.mark.parametrize("method", ["start", "scalars", "picture", "event", "end"])
def test_a_logger_that_fails_ends_no_run(
    volume: Path, tmp_path: Path, kept: type[Kept], capfd: pytest.CaptureFixture[str], method: str
) -> None:
    def fail(name: str, *_: Any) -> None:
        if name == method:
            raise SystemExit("no answer from https://me:hunter22@example.org")

    kept.act = staticmethod(fail)
    assert vitrail.train(recipe(volume, tmp_path / "run", ["kept"])).code == 0
    told = " ".join(capfd.readouterr().err.split())
    assert told.count("log.to: kept is switched off: SystemExit: no answer from https://example.org; the run") == 1
    assert [call[0] for call in kept.told].count(method) == 1
    assert [line["step"] for line in events(tmp_path / "run", "train")] == list(range(1, 9))


def test_a_logger_that_hangs_ends_no_run(
    volume: Path, tmp_path: Path, kept: type[Kept], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on = threading.Event()
    kept.act = staticmethod(lambda *_: go_on.wait())
    monkeypatch.setattr(loggers, "PATIENCE", {"done": 0.1})
    try:
        assert vitrail.train(recipe(volume, tmp_path / "run", ["kept"])).code == 0
        assert "log.to: kept is switched off: it did not end within" in " ".join(capfd.readouterr().err.split())
        monkeypatch.setattr(loggers, "MOST", 5)
        assert vitrail.train(recipe(volume, tmp_path / "more", ["kept"])).code == 0
        assert "log.to: kept is switched off: it is 5 reports behind" in " ".join(capfd.readouterr().err.split())
    finally:
        go_on.set()


def test_a_run_without_a_step_starts_no_logger(
    volume: Path, tmp_path: Path, kept: type[Kept], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise UserError("no")

    monkeypatch.setattr(Session, "loop", refuse)
    with pytest.raises(UserError, match="no"):
        vitrail.train(recipe(volume, tmp_path / "run", ["kept"]), quiet=True)
    assert kept.told == []
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- going on


def test_what_earlier_sessions_told_is_known(tmp_path: Path) -> None:
    lines = [
        *({"event": "start", "step": 0}, {"event": "train", "step": 5}, {"event": "eval", "step": 4}),
        *({"event": "init"}, {"event": "start", "step": 4}, {"event": "train", "step": 6}),
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert told_before(tmp_path) == {"start": 0, "train": 5, "eval": 4}


def in_two_sittings(volume: Path, run: Path, to: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that fails after step 6, and goes on from step 4."""
    break_off(monkeypatch, 6)
    with pytest.raises(RuntimeError, match="a power cut"):
        vitrail.train(recipe(volume, run, to), quiet=True)
    assert vitrail.train(run, quiet=True).step == 8
    check_contents(run)
    assert [line["step"] for line in events(run, "start")] == [0, 4]


def module(name: str, **members: Any) -> types.ModuleType:
    """A module that passes for an installed one."""
    made = types.ModuleType(name)
    made.__spec__ = importlib.machinery.ModuleSpec(name, None)
    vars(made).update(members)
    return made


def test_wandb_as_it_is_called(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[dict[str, Any]] = []
    points: list[tuple[dict[str, Any], int]] = []
    ends: list[int] = []

    def init(**options: Any) -> Any:
        begun.append(options)
        return types.SimpleNamespace(
            log=lambda values, step: points.append((values, step)), finish=lambda exit_code: ends.append(exit_code)
        )

    fake = module("wandb", init=init, Settings=dict, Image=lambda path, caption: ("image", path))
    monkeypatch.setitem(sys.modules, "wandb", fake)
    run = tmp_path / "run"
    in_two_sittings(volume, run, [{"kind": "wandb", "group": "g"}], monkeypatch)
    assert [options["id"] for options in begun] == [json.loads((run / "wandb" / KEPT).read_text())["id"]] * 2
    assert {options["mode"] for options in begun} == {"offline"}
    assert {options["resume"] for options in begun} == {None}
    assert {options["dir"] for options in begun} == {str(run)}
    assert (begun[0]["project"], begun[0]["group"], begun[0]["name"]) == ("vitrail", "g", "tiny")
    assert begun[0]["settings"]["symlink"] is False
    assert ends == [1, 0]
    assert [step for values, step in points if "train/loss" in values] == list(range(1, 9))
    assert [step for values, step in points if "eval/mse_over_variance" in values] == [4, 8]
    drawn = [(values["pictures/reconstruct"][1], step) for values, step in points if "pictures/reconstruct" in values]
    assert drawn == [(str(run / f"pictures/reconstruct-{step:08d}.png"), step) for step in (0, 4, 8)]

    for mode, given in (("online", {"kind": "wandb", "mode": "online"}), ("dryrun", {"kind": "wandb"})):
        monkeypatch.setenv("WANDB_MODE", "dryrun")
        vitrail.train(recipe(volume, tmp_path / mode, [given], run__steps=1), quiet=True)
        assert (begun[-1]["mode"], begun[-1]["resume"]) == (mode, "allow" if mode == "online" else None)


def test_mlflow_as_it_is_called(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Missing(Exception):
        pass

    class Client:
        runs: ClassVar[dict[str, Any]] = {}
        addresses: ClassVar[list[str]] = []
        metrics: ClassVar[list[tuple[Any, ...]]] = []
        params: ClassVar[dict[str, str]] = {}
        artifacts: ClassVar[list[str]] = []
        states: ClassVar[list[str]] = []

        def __init__(self, tracking_uri: str):
            self.addresses.append(tracking_uri)
            self.base = tracking_uri

        def get_experiment_by_name(self, name: str) -> None:
            assert name == "vitrail"

        def create_experiment(self, name: str) -> str:
            return "7"

        def create_run(self, number: str, run_name: str) -> Any:
            made = types.SimpleNamespace(info=types.SimpleNamespace(run_id="r1", artifact_uri=f"{self.base}/7/r1"))
            return self.runs.setdefault("r1", made)

        def get_run(self, number: str) -> Any:
            if number not in self.runs:
                raise Missing
            return self.runs[number]

        def update_run(self, number: str, status: str) -> None:
            self.states.append(status)

        def log_batch(self, number: str, metrics: Any = (), params: Any = ()) -> None:
            assert len(params) <= 100
            self.metrics.extend(metrics)
            self.params.update(dict(params))

        def log_artifact(self, number: str, path: str, place: str) -> None:
            self.artifacts.append(path)

        def set_terminated(self, number: str, status: str) -> None:
            self.states.append(status)

    monkeypatch.setitem(sys.modules, "mlflow", module("mlflow", MlflowClient=Client))
    monkeypatch.setitem(sys.modules, "mlflow.exceptions", module("mlflow.exceptions", MlflowException=Missing))
    entities = module("mlflow.entities", Metric=lambda *given: given, Param=lambda *given: given)
    monkeypatch.setitem(sys.modules, "mlflow.entities", entities)
    run = tmp_path / "run"
    in_two_sittings(volume, run, ["mlflow"], monkeypatch)
    assert Client.addresses == [(run / "mlflow").as_uri()] * 2
    assert json.loads((run / "mlflow" / KEPT).read_text()) == {"id": "r1"}
    assert Client.params["model.encoder.width"] == "24"
    assert [point[3] for point in Client.metrics if point[0] == "train/loss"] == list(range(1, 9))
    assert [Path(path).name for path in Client.artifacts] == [f"reconstruct-{s:08d}.png" for s in (0, 4, 8)]
    assert Client.states == ["FAILED", "RUNNING", "FINISHED"]

    # A folder that was moved: files of MLflow know whole paths, and nothing is written to the old place.
    run.rename(tmp_path / "moved")
    vitrail.train(tmp_path / "moved", overrides=[f"run.dir={tmp_path / 'moved'}", "run.steps=12"], quiet=True)
    assert len(Client.artifacts) == 3
    assert [point[3] for point in Client.metrics if point[0] == "train/loss"] == list(range(1, 13))

    # A server whose password is known from the environment alone; it does not have the run yet.
    Client.runs.clear()
    monkeypatch.setenv("VITRAIL_CREDENTIALS", "https://me:hunter22@mlflow.example.org")
    given = [{"kind": "mlflow", "uri": "https://mlflow.example.org/a"}]
    vitrail.train(recipe(volume, tmp_path / "served", given, run__steps=1), quiet=True)
    assert Client.addresses[-1] == "https://me:hunter22@mlflow.example.org/a"
    assert "hunter22" not in "".join(path.read_text() for path in (tmp_path / "served").glob("*.[yj]*"))


# ---------------------------------------------------------------- the real ones, without a network


def read_wandb(path: Path) -> list[dict[str, Any]]:
    """The rows of numbers in a small file of wandb: records behind a head of 7 bytes, each behind one of 7."""
    records = importlib.import_module("wandb.proto.wandb_internal_pb2")
    content, place, rows = path.read_bytes(), 7, []
    assert len(content) < 2**15  # one block
    while place < len(content):
        size, kind = struct.unpack("<4xHB", content[place : place + 7])
        assert kind == 1
        record = records.Record.FromString(content[place + 7 : place + 7 + size])
        items = record.history.item
        rows += [{"/".join(i.nested_key) or i.key: json.loads(i.value_json) for i in items}] if items else []
        place += 7 + size
    return rows


def test_wandb_offline(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="wandb is an extra")
    monkeypatch.setenv("WANDB_DIR", str(tmp_path / "elsewhere"))
    run = tmp_path / "run"
    in_two_sittings(volume, run, ["wandb"], monkeypatch)
    assert not (tmp_path / "elsewhere").exists()
    number = json.loads((run / "wandb" / KEPT).read_text())["id"]
    sittings = sorted((run / "wandb").glob(f"offline-run-*-{number}"))
    assert len(sittings) == 2
    rows = [row for sitting in sittings for row in read_wandb(sitting / f"run-{number}.wandb")]
    assert [row["_step"] for row in rows if "train/loss" in row] == list(range(1, 9))
    assert [row["_step"] for row in rows if "eval/mse_over_variance" in row] == [4, 8]
    assert len([row for row in rows if "pictures/reconstruct" in row or "pictures/reconstruct/path" in row]) == 3
    assert len(list((run / "wandb").rglob("*.png"))) == 3
    assert [entry.name for entry in os.scandir(run / "wandb") if entry.is_symlink()] == []


def test_mlflow_in_the_run_folder(volume: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mlflow", reason="mlflow is an extra")
    from mlflow import MlflowClient

    run = tmp_path / "run"
    in_two_sittings(volume, run, ["mlflow"], monkeypatch)
    client = MlflowClient(tracking_uri=(run / "mlflow").as_uri())
    number = json.loads((run / "mlflow" / KEPT).read_text())["id"]
    found = client.get_run(number)
    assert (found.info.status, found.info.run_name) == ("FINISHED", "tiny")
    assert found.data.params["model.encoder.width"] == "24"
    assert [point.step for point in client.get_metric_history(number, "train/loss")] == list(range(1, 9))
    assert [point.step for point in client.get_metric_history(number, "eval/mse_over_variance")] == [4, 8]
    drawn = [file.path for file in client.list_artifacts(number, "pictures")]
    assert drawn == [f"pictures/reconstruct-{step:08d}.png" for step in (0, 4, 8)]
