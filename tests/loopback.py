"""A server on loopback that has nothing, and tells what was asked of it."""

import http.server
import threading
from collections.abc import Iterator


def listening() -> Iterator[tuple[str, list[str]]]:
    """Its address and the paths that were asked for, while it runs."""
    asked: list[str] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *args: object) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()
