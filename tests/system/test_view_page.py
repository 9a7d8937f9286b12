"""The page of `vitrail view` in a real browser, without a screen: data are drawn, and nothing else is fetched."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from browsing import Browser, find_browser

from vitrail.data.generate import generate_em, write_ome_zarr
from vitrail.report.views import label_colour
from vitrail.view.server import Server
from vitrail.view.show import gather

BAR = 50  # pixels of bars above the views


def coloured(picture: np.ndarray, number: int) -> float:
    """Return the share of pixels of a class's hue, over grey that shines through."""
    wanted = label_colour(number)
    pixels = picture[BAR:].reshape(-1, 3).astype(float)
    spread = pixels - pixels.mean(1, keepdims=True)
    aim = wanted - wanted.mean()
    lengths = np.linalg.norm(spread, axis=1)
    return float(((spread @ aim > 0.97 * lengths * np.linalg.norm(aim)) & (lengths > 35)).mean())


def middle(picture: np.ndarray) -> np.ndarray:
    high, wide = picture.shape[:2]
    return picture[BAR + (high - BAR) // 8 : BAR + (high - BAR) // 3, wide // 8 : wide // 3]


def is_drawn(picture: np.ndarray) -> bool:
    return all(coloured(picture, number) > 0.002 for number in (1, 2)) and middle(picture).std() > 20


@pytest.mark.slow
def test_a_browser_draws_data_labels_and_a_prediction(tmp_path: Path) -> None:
    pytest.importorskip("neuroglancer")
    find_browser()
    volume = generate_em((48, 64, 96), 0)
    write_ome_zarr(tmp_path / "em.zarr", volume, levels=2, chunk=32, name="em")
    np.save(tmp_path / "classes.npy", volume.labels)
    layers = gather([str(tmp_path / "em.zarr"), str(tmp_path / "classes.npy")])
    assert [layer.kind for layer in layers] == ["image", "labels", "labels"]
    with Server(layers) as server, Browser(tmp_path / "profile", (1200, 800)) as browser:
        answered: list[str] = []
        answer = server.answer

        def listen(path: str, host: str) -> Any:
            answered.append(path)
            return answer(path, host)

        server.answer = listen  # type: ignore[method-assign]
        browser.open(server.ticket())
        wide = browser.watch(is_drawn)
        assert is_drawn(wide), browser.complaints()
        browser.call("Emulation.setDeviceMetricsOverride", width=420, height=800, deviceScaleFactor=1, mobile=False)
        narrow = browser.watch(lambda picture: picture.shape[1] == 420 and is_drawn(picture))
        assert is_drawn(narrow), browser.complaints()
        asked = browser.asked()
        here = f"http://127.0.0.1:{server.port}/"
        assert all(address.startswith(here) for address in asked), asked
        for number in range(3):  # chunks of each layer
            assert any(f"/data/{number}/" in path and "/c/" in path for path in answered)
        assert not [told for told in browser.complaints() if "404" not in told]  # of the picture in the tab's corner


@pytest.mark.slow
def test_a_browser_draws_an_image_and_channels(tmp_path: Path) -> None:
    pytest.importorskip("neuroglancer")
    find_browser()
    y, x = np.mgrid[:80, :120]
    np.save(tmp_path / "two.npy", np.stack([np.sin(x / 9), np.sin(y / 7)]).astype(np.float32))
    layers = gather([str(tmp_path / "two.npy")], settings={"axes": "cyx"})
    with Server(layers) as server, Browser(tmp_path / "profile", (900, 600)) as browser:
        browser.open(server.address)

        def both(picture: np.ndarray) -> bool:
            red, green = (float(picture[200:400, 300:600, n].mean()) for n in (0, 1))
            return red > 60 and green > 60

        assert both(browser.watch(both)), browser.complaints()
