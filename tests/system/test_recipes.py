"""The recipes reach the numbers that their headers give: trained as they are, on generated data."""

import shutil
from pathlib import Path

import pytest
from support import events, vitrail

ROOT = Path(__file__).parents[2]

# recipe, how its data are made, what the last evaluation must reach
RECIPES = {
    "demo/unetr3d.yaml": (["data/em.zarr"], {"dice_membrane": 0.90, "dice_mitochondria": 0.80}),
    "demo/sap3d.yaml": (["data/em.zarr"], {"dice_membrane": 0.85, "dice_mitochondria": 0.75}),
    "digits/vit.yaml": (["data/digits", "--kind", "digits"], {"accuracy": 0.95}),
}


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_reaches_its_number(recipe: str, tmp_path: Path) -> None:
    made, wanted = RECIPES[recipe]
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    for arguments in (["data", "generate", *made], ["train", f"configs/{recipe}", "--quiet"]):
        code, output = vitrail(*arguments, cwd=tmp_path, timeout=1400)
        assert code == 0, output[-2000:]
    (folder,) = (tmp_path / "runs").iterdir()
    last = events(folder, "eval")[-1]["metrics"]
    for name, least in wanted.items():
        assert last[name] >= least, (name, last[name])
