"""`vitrail view`: data, labels and predictions in the browser, for as long as it runs."""

from __future__ import annotations

import os
import sys
from typing import Annotated, Any

import typer

from vitrail.cli.options import Json, Plugins, Trust, load_plugins
from vitrail.cli.words import note, print_found


def add(app: typer.Typer) -> None:
    app.command(short_help="Show data, labels and predictions over each other in the browser.")(view)


def view(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="RUN_OR_PATH", help="Run folders, and data of any kind.", show_default=False),
    ],
    labels: Annotated[
        list[str] | None,
        typer.Option(metavar="PATH", help="Data that are labels, where nothing tells it; repeatable."),
    ] = None,
    item: Annotated[
        str | None, typer.Option(metavar="NAME_OR_NUMBER", help="Of a folder of volumes or images; else the first.")
    ] = None,
    kind: Annotated[
        str | None, typer.Option(metavar="KIND", help="Kind of source of the first path; guessed if not given.")
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="A key of the first path's entry; repeatable."),
    ] = None,
    port: Annotated[int, typer.Option(metavar="N", min=0, max=65535, help="Of this machine; 0: a free one.")] = 0,
    browser: Annotated[bool, typer.Option("--browser/--no-browser", help="Open a browser, where there is one.")] = True,
    trust: Trust = False,
    plugin: Plugins = None,
    as_json: Json = False,
) -> None:
    """Show volumes, images, labels and predictions as layers of one page, until Ctrl-C.

    \b
    vitrail view data/em.zarr
    vitrail view data/em.zarr em-classes.ome.zarr
    vitrail view runs/em-unetr em-classes.ome.zarr --no-browser --port 8765
    vitrail view scan.h5 --set key=raw --labels annotations.tif

    The address is printed. It holds a random token, without which nothing is answered, and leads to this machine alone.
    What is looked at is read, level by level, so that volumes may be far larger than memory; nothing is written. A RUN
    shows the data that it is judged on, with their labels. Sizes and places are those that the files tell.
    """
    from vitrail.view.server import Server, find_client

    find_client()  # before the work
    load_plugins(plugin)
    from vitrail.data.look.inspect import read_settings
    from vitrail.foreign import trusted
    from vitrail.view.layers import far_apart, words_of
    from vitrail.view.show import gather

    with trusted(trust):
        layers = gather(paths, labels=labels or (), settings=read_settings(settings or ()), kind=kind, item=item)
        server = Server(layers, port=port)
        server.tell = note  # type: ignore[method-assign]
        notes = [*(told for layer in layers for told in layer.notes), *far_apart(layers)]
        for layer in layers:
            note(words_of(layer))
        for told in notes:
            note(f"note: {told}")
        with server:
            found: dict[str, Any] = {
                "address": server.address,
                "port": server.port,
                "layers": [
                    {"name": layer.name, "kind": layer.kind, "levels": [list(level.shape) for level in layer.levels]}
                    for layer in layers
                ],
                "notes": notes,
            }
            print_found(found, server.address, as_json)
            sys.stdout.flush()
            _invite(server, wanted=browser)
            _wait()


def _invite(server: Any, *, wanted: bool) -> None:
    """Open a browser where there is a screen; else say how the page is reached from another machine."""
    screen = sys.platform == "darwin" or any(os.environ.get(name) for name in ("DISPLAY", "WAYLAND_DISPLAY"))
    if os.environ.get("SSH_CONNECTION") or not screen:
        import getpass
        import socket

        try:
            user = getpass.getuser()
        except (KeyError, OSError):
            user = "USER"
        port = server.port
        note(
            f"from another machine: ssh -N -L {port}:127.0.0.1:{port} {user}@{socket.gethostname()}  # then the address"
        )
    elif wanted:
        import webbrowser

        webbrowser.open(server.ticket())
    note("Ctrl-C ends it")


def _wait() -> None:
    """Wait until Ctrl-C, or until somebody asks the process to end."""
    import signal
    import threading

    ended = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: ended.set())
    while not ended.wait(3600):
        pass
