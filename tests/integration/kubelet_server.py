"""A small server in place of a kubelet, and one in place of a container runtime: they say what a test has them say."""

import contextlib
import http.server
import json
import secrets
import shutil
import socket
import ssl
import subprocess
import threading
from collections.abc import Iterable
from concurrent import futures
from pathlib import Path
from typing import Any

import pytest

TOKEN = "header.payload.signature"  # noqa: S105 - of nobody


def make_certificate(directory: Path, name: str) -> tuple[Path, Path]:
    """A certificate for the host ``name``, signed by itself as a kubelet's is, and its key."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is missing; Debian's package openssl has it")
    certificate, key = directory / "kubelet.crt", directory / "kubelet.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1",
         "-subj", f"/CN={name}", "-addext", f"subjectAltName=DNS:{name}", "-keyout", key, "-out", certificate],
        check=True, capture_output=True,
    )  # fmt: skip
    return certificate, key


class KubeletServer:
    """``/pods`` and ``/configz`` on the loopback: by HTTPS for who shows ``token``, by HTTP for who shows none."""

    def __init__(self, certificate: Path | None = None, key: Path | None = None) -> None:
        self.pods: list[dict[str, Any]] = []
        self.token = TOKEN
        self.asked: list[str] = []
        self.tokens_seen: set[str] = set()
        self._context = None
        if certificate is not None:
            self._context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
            self._context.load_cert_chain(certificate, key)
        outer = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                outer._answer(self)

            def log_message(self, *_: object) -> None:
                """Nothing."""

        class Server(http.server.ThreadingHTTPServer):
            daemon_threads = True

            def finish_request(self, request: Any, client_address: Any) -> None:
                # In the connection's thread: one that shakes no hands keeps nobody else waiting.
                wrap = outer._context.wrap_socket if outer._context else lambda plain, **_: plain
                with contextlib.suppress(OSError), wrap(request, server_side=True) as secure:
                    secure.settimeout(30.0)
                    outer._open.add(secure)
                    super().finish_request(secure, client_address)

            def handle_error(self, *_: object) -> None:
                """A client that went away is none."""

        self._open: set[socket.socket] = set()
        self._server = Server(("127.0.0.1", 0), Handler)
        self.port = self._server.server_address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.05})
        self._thread.start()

    @property
    def url(self) -> str:
        return f"http{'s' if self._context else ''}://127.0.0.1:{self.port}"

    def _answer(self, request: http.server.BaseHTTPRequestHandler) -> None:
        shown = request.headers.get("Authorization", "")
        self.tokens_seen.add(shown)
        self.asked.append(request.path)
        body: bytes = b""
        if shown != (f"Bearer {self.token}" if self._context else ""):
            status = 401
        elif request.path == "/pods":
            status, body = 200, json.dumps({"kind": "PodList", "items": self.pods}).encode()
        elif request.path == "/configz":
            status, body = 200, b'{"kubeletconfig": {"cpuManagerPolicy": "none", "cpuCFSQuota": true}}'
        else:
            status = 403
        request.send_response(status)
        request.send_header("Content-Type", "application/json")
        request.send_header("Content-Length", str(len(body)))
        request.end_headers()
        with contextlib.suppress(OSError):
            request.wfile.write(body)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        for each in self._open:
            with contextlib.suppress(OSError):
                each.shutdown(2)


def make_pod(
    name: str,
    qos: str,
    containers: dict[str, str | None],
    namespace: str = "shop",
    uid: str | None = None,
    reclaimed: str | None = None,
) -> dict[str, Any]:
    """A pod as ``/pods`` shows it, ``containers`` with their CPU limit (None: none), each with an id of its own."""

    def limits(cores: str | None) -> dict[str, Any]:
        found = {"memory": "64Mi"} | ({} if cores is None else {"cpu": cores})
        return {"limits": found | ({} if reclaimed is None else {"cpumond.io/reclaimed-cpu": reclaimed})}

    return {
        "metadata": {
            "name": name,
            "namespace": namespace,
            "uid": uid or "-".join(secrets.token_hex(size) for size in (4, 2, 2, 2, 6)),
        },
        "spec": {
            "nodeName": "test-node",
            "containers": [
                {"name": each, "image": f"registry.example/{each}:1", "resources": limits(cores)}
                for each, cores in containers.items()
            ],
        },
        "status": {
            "phase": "Running",
            "qosClass": qos,
            "containerStatuses": [
                {
                    "name": each,
                    "image": f"registry.example/{each}:1",
                    "containerID": f"containerd://{secrets.token_hex(32)}",
                    "state": {"running": {"startedAt": "2026-01-01T00:00:01Z"}},
                    "resources": limits(cores),
                }
                for each, cores in containers.items()
            ],
        },
    }


def container_id(pod: dict[str, Any], number: int = 0) -> str:
    found: str = pod["status"]["containerStatuses"][number]["containerID"]
    return found.rpartition("//")[2]


def place_of(pod: dict[str, Any], number: int = 0) -> str:
    """Where the driver cgroupfs has a container's cgroup below ``kubepods``."""
    qos = {"Burstable": "burstable/", "BestEffort": "besteffort/"}.get(pod["status"]["qosClass"], "")
    return f"{qos}pod{pod['metadata']['uid']}/{container_id(pod, number)}"


def field(number: int, value: int | str | bytes) -> bytes:
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value % (1 << 64))
    data = value.encode() if isinstance(value, str) else value
    return _varint(number << 3 | 2) + _varint(len(data)) + data


def _varint(number: int) -> bytes:
    low, rest = number & 127, number >> 7
    return bytes([low | 128]) + _varint(rest) if rest else bytes([low])


def list_entry(pod: dict[str, Any], number: int = 0, state: int = 1) -> bytes:
    meta, status = pod["metadata"], pod["status"]["containerStatuses"][number]
    labels = {
        "io.kubernetes.container.name": status["name"],
        "io.kubernetes.pod.name": meta["name"],
        "io.kubernetes.pod.namespace": meta["namespace"],
        "io.kubernetes.pod.uid": meta["uid"],
    }
    return b"".join(
        (
            field(1, container_id(pod, number)),
            field(2, "5a" * 32),
            field(3, field(1, status["name"])),
            field(4, field(1, "sha256:0") + field(18, status["image"])),
            field(6, state),
            field(7, 1_767_225_601_000_000_000),
            *(field(8, field(1, key) + field(2, value)) for key, value in labels.items()),
        )
    )


class RuntimeServer:
    """The used part of ``runtime.v1.RuntimeService``; ``quotas``: us by container, None = no resources are told."""

    def __init__(self, socket: Path) -> None:
        import grpc

        self.entries: list[bytes] = []
        self.quotas: dict[str, int | None] = {}
        self._not_found = grpc.StatusCode.NOT_FOUND
        calls = {"Version": self._version, "ListContainers": self._list, "ContainerStatus": self._status}
        self._server = grpc.server(futures.ThreadPoolExecutor(2))
        self._server.add_generic_rpc_handlers(
            [
                grpc.method_handlers_generic_handler(
                    "runtime.v1.RuntimeService",
                    {name: grpc.unary_unary_rpc_method_handler(call) for name, call in calls.items()},
                )
            ]
        )
        self._server.add_insecure_port(f"unix:{socket}")
        self._server.start()

    def _version(self, request: bytes, context: Any) -> bytes:
        return field(1, "0.1.0") + field(2, "containerd") + field(3, "v1.7.24") + field(4, "v1")

    def _list(self, request: bytes, context: Any) -> bytes:
        assert request == bytes.fromhex("0a0412020801"), "those that run"
        return b"".join(field(1, each) for each in self.entries)

    def _status(self, request: bytes, context: Any) -> bytes:
        name = request[2:].decode()
        assert request == field(1, name)
        if name not in self.quotas:
            context.abort(self._not_found, f'an error occurred when try to find container "{name}": not found')
        quota_us = self.quotas[name]
        linux = b"" if quota_us is None else field(1, 100_000) + field(2, quota_us) + field(3, 512)
        return field(1, field(1, name) + field(3, 1) + (b"" if quota_us is None else field(16, field(1, linux))))

    def close(self) -> None:
        self._server.stop(None).wait()


def write_token(path: Path, tokens: Iterable[str] = (TOKEN,)) -> Path:
    path.write_text("\n".join(tokens) + "\n")
    return path
