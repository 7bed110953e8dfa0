"""The connection between keeper and agent, used at both ends: lines of JSON over a non-blocking socket."""

from __future__ import annotations

import json
import select
import socket
from typing import Any, Final

_RECEIVE_BYTES: Final = 1 << 18


class LineConnection:
    """A non-blocking connection. The owner registers ``sock`` in ``epoll``. ``unsent``: data that waits to be sent."""

    def __init__(self, sock: socket.socket, epoll: select.epoll) -> None:
        self.sock = sock
        self.unsent = b""
        self._epoll = epoll
        self._received = b""

    def send(self, message: dict[str, Any]) -> bool:
        """Add a line to send; return the result of ``flush``."""
        self.unsent += json.dumps(message).encode() + b"\n"
        return self.flush()

    def flush(self) -> bool:
        """Send as much as possible; return False if the other end is gone."""
        try:
            while self.unsent:
                self.unsent = self.unsent[self.sock.send(self.unsent) :]
        except BlockingIOError:
            pass
        except OSError:
            return False
        self._epoll.modify(self.sock.fileno(), select.EPOLLIN | (select.EPOLLOUT if self.unsent else 0))
        return True

    def receive(self) -> list[bytes] | None:
        """Read once, and return the lines; None if the other end is gone. Raises BlockingIOError if nothing came."""
        try:
            data = self.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            raise
        except OSError:
            return None
        *lines, self._received = (self._received + data).split(b"\n")
        return lines if data else None
