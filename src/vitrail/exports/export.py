"""`vitrail export`: the model of a run as files for others, checked against the model before they get their name.

| to | OUT | opened by |
|---|---|---|
| vitrail | a folder: model.safetensors, config.json | `vitrail.load(OUT)`; all verbs that take a run |
| timm | a folder | `timm.create_model("local-dir:OUT", pretrained=True)` |
| huggingface | a folder | `from_pretrained(OUT)` of ViT, ViTMAE or Dinov2 |
| monai | a folder | MONAI's ViT or UNETR |
| torch | a file .pt2 | `torch.export.load(OUT).module()` |
| onnx | a file .onnx | onnxruntime |
"""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors.torch import save_file
from torch import Tensor

import vitrail
from vitrail import disk
from vitrail.data.normalize import Values
from vitrail.errors import UserError
from vitrail.exports import program
from vitrail.exports.layouts import LAYOUTS, Layout, Subject
from vitrail.exports.plain import encoder_alone, plainer
from vitrail.infer.eyes import Eyes
from vitrail.models.model import Model
from vitrail.weights import load_weights
from vitrail.weights.backwards import as_file
from vitrail.weights.exported import CONFIG, DATA, RECIPE, WEIGHTS, config_of
from vitrail.weights.runs import load, read_model, stored_recipe, which_weights, with_checkpoint

To = Literal["vitrail", "timm", "huggingface", "monai", "torch", "onnx"]
SUFFIXES = {"torch": ".pt2", "onnx": ".onnx"}
CLOSE = 1e-3  # of the largest value: what differs by more is another model
MOST = 2**31 - 2**20  # bytes of an ONNX file, whose sizes are of 31 bits


def export(
    run: str | Path,
    *,
    out: str | Path,
    to: To = "vitrail",
    checkpoint: str | int | None = None,
    weights: str | None = None,
    only: str | None = None,
) -> dict[str, Any]:
    """Write the model of a run as others read it; return facts of the making, the largest difference among them.

    `only` "encoder" leaves out the rest of the model.
    """
    target = Path(out)
    _check(to, target, only)

    def make(path: Path, manifest: dict[str, Any]) -> dict[str, Any]:
        recipe = stored_recipe(manifest)
        if recipe.model.shape is None:
            raise UserError(f"{run}: its model has no shape; set model.shape, and train again")
        model = read_model(path, manifest, weights)
        taken = Taken(Eyes(run, manifest, recipe), model, which_weights(weights, recipe), only)
        told = {"vitrail": _own, "torch": _torch, "onnx": _onnx}.get(to, _layout)(taken, to, target)
        facts = {"out": str(target), "to": to, "run": str(run), "step": manifest["step"], "weights": taken.weights}
        return facts | {"parameters": sum(p.numel() for p in taken.model.parameters())} | told

    with disk.told(target):
        return with_checkpoint(run, checkpoint, make)


def _check(to: str, target: Path, only: str | None) -> None:
    """Refuse what cannot be, before anything is read."""
    if to not in get_args(To):
        raise UserError(f"to: {to!r} is not known; choose one of {', '.join(get_args(To))}")
    if only not in (None, "encoder"):
        raise UserError(f"only: {only!r} is not known; give encoder, or leave it out")
    if only and to == "vitrail":
        raise UserError("only: a model of vitrail's own is written whole; init.only: [encoder] takes its encoder")
    suffix = SUFFIXES.get(to)
    if suffix is not None and target.suffix != suffix:
        raise UserError(f"out: {target} is a file for --to {to}; let it end in {suffix}")
    if suffix is None and target.suffix in SUFFIXES.values():
        kind = next(kind for kind, ending in SUFFIXES.items() if ending == target.suffix)
        raise UserError(f"out: {target} is a folder for --to {to}; choose another name, or --to {kind}")
    if to == "onnx":
        program.require_onnx()
    disk.check_free(target)


class Taken:
    """The model that is exported, and what is known of it."""

    def __init__(self, eyes: Eyes, model: Model, weights: str, only: str | None):
        if only and model.config.kind not in program.KNOWN:
            raise UserError(f"only: the encoder of a {model.config.kind} needs more than an image; leave it out")
        self.eyes, self.weights = eyes, weights
        self.model = encoder_alone(model) if only else model
        self.objective = "features" if only else eyes.recipe.objective.kind

    def notes(self) -> list[str]:
        """Say what a mean and a std do not tell of how values are normalised."""
        data, notes = self.eyes.recipe.data, []
        if data.statistics != "shared":
            notes.append(f"data.statistics: {data.statistics}: the run's own values for all of its data were taken")
        values = Values(data.normalize, self.eyes.variables, self.eyes.statistics)
        if any(values.changing):
            notes.append(f"the run's values are changed by more than mean and std: {values.describe()}")
        return notes


def _own(taken: Taken, to: str, target: Path) -> dict[str, Any]:
    eyes, recipe = taken.eyes, taken.eyes.recipe
    with disk.new_folder(target) as draft:
        _save(taken.model.state_dict(), draft / WEIGHTS)
        more = {"made_by": f"vitrail {vitrail.__version__}", "classes": list(eyes.names), "variables": eyes.variables}
        config = config_of(eyes.manifest, recipe.to_tree(), taken.weights, draft / WEIGHTS, **more)
        disk.write_whole(draft / CONFIG, _text(config))
        disk.write_whole(draft / RECIPE, stored_recipe(config).to_yaml())
        if eyes.facts:
            disk.write_whole(draft / DATA, _text(eyes.facts))
        again = load(draft).state_dict()
        for name, tensor in taken.model.state_dict().items():
            if not tensor.equal(again[name]):
                raise UserError(f"{name} is not read as it was written to {draft / WEIGHTS}; try another disk")
    return {"difference": 0.0, "opens": f'vitrail.load("{target}")', "notes": []}


def _layout(taken: Taken, to: str, target: Path) -> dict[str, Any]:
    eyes, model = taken.eyes, taken.model
    statistics = eyes.statistics
    subject = Subject(
        model,
        (list(statistics.mean), list(statistics.std)),
        are_bytes=str(eyes.facts.get("dtype")) == "uint8",
        names=eyes.names,
        variables=eyes.variables,
        norm_pixels=getattr(eyes.recipe.objective, "target", "raw") == "patch",
    )
    layout = LAYOUTS[to](subject)
    plain = plainer(model, cls_row=layout.style.cls_row, layer_scale=layout.layer_scale)
    with disk.new_folder(target) as draft:
        _save(as_file(plain, layout.style, layout.settings), draft / WEIGHTS)
        for name, tree in layout.files.items():
            disk.write_whole(draft / name, _text(tree))
        difference = _difference(model, _read_back(plain, draft, layout))
    notes = [*layout.notes, *taken.notes()]
    return {"difference": difference, "opens": layout.opens.format(out=target), "notes": notes}


def _read_back(plain: Model, folder: Path, layout: Layout) -> Model:
    """Read what was written as any such file is read."""
    with torch.device("meta"):
        again: Model = plain.config.build()
    again.to_empty(device="cpu")
    load_weights(again, folder / WEIGHTS, adapter=layout.style.adapter)
    return again.eval()


@torch.no_grad()
def _difference(model: Model, other: Model) -> float:
    """Return by how much the outputs of two models differ at most, for one sample."""
    config: Any = model.config
    images = torch.randn(1, config.channels_in, *config.extent, generator=torch.Generator().manual_seed(0))
    return _compare(model(**model.inputs(images)), other(**other.inputs(images)))


def _compare(expected: Tensor, found: Tensor) -> float:
    difference = float((expected.float() - found.float()).abs().max())
    if not difference <= CLOSE * max(float(expected.abs().max()), 1e-6):
        raise UserError(
            f"what was written gives other outputs than the model: they differ by up to {difference:.3g}, of "
            f"{float(expected.abs().max()):.3g}; nothing was kept. Please report the recipe"
        )
    return difference


def _torch(taken: Taken, to: str, target: Path) -> dict[str, Any]:
    made, stream = _program(taken), io.BytesIO()
    torch.export.save(program.as_exported(made), stream)
    opened = torch.export.load(io.BytesIO(stream.getvalue())).module()
    told = _written(taken, made, stream.getvalue(), opened, target)
    return told | {"opens": f'torch.export.load("{target}").module()(values)'}


def _onnx(taken: Taken, to: str, target: Path) -> dict[str, Any]:
    import onnxruntime

    made = _program(taken)
    if (size := 4 * sum(p.numel() for p in made.parameters())) > MOST:
        raise UserError(f"--to onnx: {size / 2**30:.1f} GiB of weights do not fit into a file of 2 GiB; use --to torch")
    content = program.as_onnx(made)
    session = onnxruntime.InferenceSession(content, providers=["CPUExecutionProvider"])

    def opened(values: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"values": values.numpy()})[0])

    told = _written(taken, made, content, opened, target)
    return told | {"opens": f'onnxruntime.InferenceSession("{target}").run(None, {{"values": values}})'}


def _program(taken: Taken) -> program.Program:
    eyes = taken.eyes
    return program.make(taken.model, eyes.recipe, eyes.variables, eyes.statistics, taken.objective)


@torch.no_grad()
def _written(
    taken: Taken, made: program.Program, content: bytes, opened: Callable[[Tensor], Tensor], target: Path
) -> dict[str, Any]:
    """Compare a program as it was stored with the model, for one sample and for several, and write it."""
    difference = 0.0
    for number in (1, 3):
        values = program.example(made, number, seed=number)
        expected = made(values)
        difference = max(difference, _compare(expected, opened(values)))
    target.parent.mkdir(parents=True, exist_ok=True)
    disk.check_free(target)
    disk.write_whole(target, content)
    notes = [note for note in taken.notes() if note.startswith("data.statistics")]
    shapes = {"values": ["batch", *values.shape[1:]], "output": ["batch", *expected.shape[1:]]}
    return {"difference": difference, **shapes, "gives": made.gives, "notes": notes}


def _save(state: dict[str, Tensor], path: Path) -> None:
    save_file({name: tensor.detach().contiguous() for name, tensor in state.items()}, path, {"format": "pt"})


def _text(tree: dict[str, Any]) -> str:
    return json.dumps(tree, indent=1) + "\n"
