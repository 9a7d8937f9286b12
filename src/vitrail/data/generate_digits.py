"""Handwritten digits as an image folder: 1,797 images of 8 x 8 pixels that come with scikit-learn.

Every fifth image is held out. Both parts hold digits of the same writers, so the held-out accuracy says how well a
model learns these hands, not how well it reads others.
"""

from pathlib import Path

import numpy as np

from vitrail.disk import check_free, new_folder, told
from vitrail.errors import UserError
from vitrail.recipe.kinds import remedy

HELD_OUT = 5  # every so many


def write_digits(path: str | Path) -> Path:
    """Write train/ and valid/, in each a folder of PNG images for each digit; all appears at once, when complete."""
    from PIL import Image

    try:
        from sklearn.datasets import load_digits
    except ModuleNotFoundError as error:
        raise UserError(f"the digits come with scikit-learn, which is not installed; {remedy('sklearn')}") from error

    target = Path(path)
    check_free(target)
    digits = load_digits()
    grey = np.rint(digits.images * (255 / 16)).astype(np.uint8)  # stored as 0 to 16
    with told(target), new_folder(target) as draft:
        for number, (image, digit) in enumerate(zip(grey, digits.target.tolist(), strict=True)):
            folder = draft / ("valid" if number % HELD_OUT == 0 else "train") / str(digit)
            folder.mkdir(parents=True, exist_ok=True)
            Image.fromarray(image).save(folder / f"{number}.png")
    return target
