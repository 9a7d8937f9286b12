"""A server of one page for one person: on the loopback address, below a random token, of what was opened and no more.

- it answers GET and HEAD of a page's parts, metadata and chunks by number; no path of a request becomes one of a
  file: the names of the client's own parts are looked up in a list
- a request without the token, or in the name of another host than this one (as a page elsewhere could send by a name
  that leads here), is answered as if nothing were there
- the browser is told to fetch nothing from anywhere else, and to keep nothing
- the address that a browser is started with is good once, as other people here may see the arguments of processes
"""

import hmac
import importlib.util
import json
import re
import secrets
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from vitrail.errors import UserError
from vitrail.foreign import read_plain
from vitrail.view.layers import Layer
from vitrail.view.page import array_metadata, class_names, group_metadata, state

HERE = "127.0.0.1"
TYPES = {".js": "text/javascript", ".css": "text/css", ".html": "text/html", ".wasm": "application/wasm"}
POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; worker-src 'self' blob:; style-src 'self' "
    "'unsafe-inline'; img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self' blob: data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
READING = 4  # chunks at once
LARGEST = 64 << 20  # bytes of a part of the page
PULSE = 10  # seconds between signs of life
WAIT = 60  # seconds that a connection may say nothing


def find_client() -> Path:
    """Return the folder of the page's parts, which come with neuroglancer's package; none of its Python is run."""
    found = importlib.util.find_spec("neuroglancer")
    for place in (found.submodule_search_locations or ()) if found is not None else ():
        folder = Path(place) / "static" / "client"
        if (folder / "index.html").is_file():
            return folder
    raise UserError(
        "vitrail view shows its page by neuroglancer, which is not installed; "
        'pip install -c constraints.txt -e ".[view]"'
    )


class Server:
    """The page, its layers, and who may see them."""

    def __init__(self, layers: Sequence[Layer], *, port: int = 0):
        self.layers = list(layers)
        self.token = secrets.token_urlsafe(24)
        self.tickets: set[str] = set()
        self.client = {path.name: path for path in find_client().iterdir() if path.suffix in TYPES}
        self.reading = threading.BoundedSemaphore(READING)
        self.problems: list[str] = []  # with chunks, each once
        self.tell: Callable[[str], None] = lambda problem: None  # is called with each
        self.closing = threading.Event()
        handler = type("Bound", (Handler,), {"server_": self})
        try:
            self.http = _Listener((HERE, port), handler)
        except (OSError, OverflowError) as error:
            why = getattr(error, "strerror", None) or error
            raise UserError(
                f"--port {port}: cannot be used here ({why}); choose another, or leave it out for one that is free"
            ) from None
        self.thread = threading.Thread(target=self.http.serve_forever, args=(0.2,), name="vitrail-view", daemon=True)

    @property
    def port(self) -> int:
        return int(self.http.server_address[1])

    @property
    def address(self) -> str:
        return f"http://{HERE}:{self.port}/{self.token}/"

    def ticket(self) -> str:
        """Return an address that leads to the page, once."""
        ticket = secrets.token_urlsafe(24)
        self.tickets.add(ticket)
        return f"http://{HERE}:{self.port}/{ticket}/"

    def __enter__(self) -> "Server":
        self.thread.start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.closing.set()
        self.http.shutdown()
        self.http.server_close()

    def answer(self, path: str, host: str) -> tuple[int, str, bytes, dict[str, str]]:
        """Return status, type, content and further headers for a path of the page."""
        nothing = (404, "text/plain; charset=utf-8", b"nothing is here\n", dict[str, str]())
        if not is_here(host):
            return nothing
        first, _, rest = path.partition("?")[0].removeprefix("/").partition("/")
        root = f"http://{host}/{self.token}"
        if first in self.tickets:
            self.tickets.discard(first)
            return 302, "text/plain", b"", {"Location": f"{root}/"}
        if not hmac.compare_digest(first.encode(), self.token.encode()):
            return nothing
        if rest == "":  # the page takes its state from an address
            return 302, "text/plain", b"", {"Location": f"{root}/v/page/#!{root}/state.json"}
        if rest == "state.json":
            return _json(state(self.layers, root))
        part, _, name = rest.partition("/")
        if part == "v" and name.startswith("page/"):  # the client takes what stands after /v/ for a name of its page
            file = self.client.get(name.removeprefix("page/") or "index.html")
            return nothing if file is None else (200, TYPES[file.suffix], read_plain(file, LARGEST), {})
        words = name.split("/")
        if part not in ("data", "names") or not _number(words[0], len(self.layers)):
            return nothing
        layer = self.layers[int(words[0])]
        if part == "names":
            return _json(class_names(layer)) if words[1:] == ["info"] else nothing
        found = self.data(layer, words[1:])
        return nothing if found is None else found

    def is_stream(self, path: str) -> bool:
        """Tell whether the page asks for news, which it does for as long as it is open; there never are any."""
        return hmac.compare_digest(path.partition("?")[0].encode(), f"/{self.token}/events/page".encode())

    def data(self, layer: Layer, words: list[str]) -> tuple[int, str, bytes, dict[str, str]] | None:
        """Return metadata or a chunk of a layer; None where there is none."""
        if words == ["zarr.json"]:
            return _json(group_metadata(layer))
        if not words or not _number(words[0], len(layer.levels)):
            return None
        level = int(words[0])
        if words[1:] == ["zarr.json"]:
            return _json(array_metadata(layer, level))
        places = words[2:]
        if words[1:2] != ["c"] or len(places) != len(layer.axes) + layer.channel_axis:
            return None
        if not all(_number(word, 2**31) for word in places):
            return None
        try:
            with self.reading:
                content = layer.chunk(level, [int(word) for word in places])
        except IndexError:
            return None
        except Exception as error:  # whatever a library says of a damaged file
            told = f"{layer.name}: {str(error) or type(error).__name__}"
            if told not in self.problems and len(self.problems) < 20:
                self.problems.append(told)
                self.tell(told)
            return 500, "text/plain; charset=utf-8", told.encode(), {}
        return 200, "application/octet-stream", content, {}


def is_here(host: str) -> bool:
    """Tell whether a request was meant for this machine; ports differ where it came through a tunnel."""
    return re.fullmatch(r"(127\.0\.0\.1|localhost)(:\d{1,5})?", host) is not None


def _json(tree: Any) -> tuple[int, str, bytes, dict[str, str]]:
    return 200, "application/json", json.dumps(tree).encode(), {}


def _number(word: str, below: int) -> bool:
    return word.isascii() and word.isdecimal() and len(word) < 12 and int(word) < below


class _Listener(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, *_: Any) -> None:
        """Say nothing of browsers that go away."""


class Handler(BaseHTTPRequestHandler):
    """One connection of a browser."""

    protocol_version = "HTTP/1.1"
    timeout = WAIT
    server_: Server

    def do_GET(self) -> None:
        server, host = self.server_, self.headers.get("Host", "")
        if self.command == "GET" and server.is_stream(self.path) and is_here(host):
            self.wait()
            return
        status, kind, content, more = server.answer(self.path, host)
        self.send_response(status)
        for name, value in {**HEADERS, **more}.items():
            self.send_header(name, value)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(content)

    do_HEAD = do_GET

    def wait(self) -> None:
        """Keep a connection open until the server ends, by which the page knows that it is there."""
        self.close_connection = True
        self.send_response(200)
        for name, value in {**HEADERS, "Content-Type": "text/event-stream", "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        with suppress(OSError):
            while not self.server_.closing.wait(PULSE):
                self.wfile.write(b": still here\n\n")

    def version_string(self) -> str:
        return "vitrail"

    def log_message(self, *_: Any) -> None:
        """Print nothing of requests, which hold the token."""
