"""A small HTTP server on the loopback whose answers are a function of the test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Asked(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    answer: Callable[[Asked], None]

    def do_GET(self) -> None:
        self.body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.answer(self)

    do_POST = do_PATCH = do_GET  # noqa: N815 - the names of the base class

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Nothing."""


@contextmanager
def listen(answer: Callable[[Asked], None], port: int = 0) -> Iterator[str]:
    """The address of a server whose requests ``answer`` answers, each in a thread of its own."""
    handler = type("Handler", (Asked,), {"answer": staticmethod(answer)})
    with ThreadingHTTPServer(("127.0.0.1", port), handler) as server:
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever, args=(0.05,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()
