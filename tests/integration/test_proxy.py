"""The recipes of docs/access.md with Debian's nginx in front of the scheduler."""

import contextlib
import re
import shutil
import socket
import ssl
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
from agent_process import free_port
from answering import Asked, listen
from certificates import Authority, openssl
from scheduler_process import SchedulerProcess
from test_token_command import run
from waiting import wait_until

NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
pytestmark = pytest.mark.skipif(NGINX is None, reason="no nginx: apt install nginx-light")

RECIPES = re.findall(
    r"^```nginx\n(.*?)^```$", (Path(__file__).parents[2] / "docs" / "access.md").read_text(), re.DOTALL | re.MULTILINE
)
MAIN = """
daemon off;
pid {folder}/nginx.pid;
{user}
events {{}}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    {server}
}}
"""


class Proxy:
    """nginx with one of the recipes, whose files and ports are those of the test."""

    def __init__(self, folder: Path, recipe: str, scheduler: SchedulerProcess, token: str, sign_in: int = 0) -> None:
        self.folder = folder
        folder.mkdir()
        self.authority = Authority(folder)
        for source, name in zip(self.authority.sign("pools"), ("pools.example.crt", "pools.example.key"), strict=True):
            source.rename(folder / name)
        self.write_token(token)
        self.port = free_port()
        server = recipe.replace("/etc/nginx/", f"{folder}/").replace("127.0.0.1:9757", scheduler.address)
        server = server.replace("listen 443 ssl", f"listen 127.0.0.1:{self.port} ssl")
        server = server.replace("127.0.0.1:4180", f"127.0.0.1:{sign_in}")
        # Workers of root, unlike the recipe's: nobody may pass for what the proxy runs as.
        self.config = folder / "nginx.conf"
        self.config.write_text(MAIN.format(folder=folder, user="user root;", server=server))

    def write_token(self, token: str) -> None:
        line = f'proxy_set_header X-Cpumond-Proxy-Token "{token}";\n' if token else ""
        (self.folder / "cpumond-proxy-token").write_text(line)

    @contextlib.contextmanager
    def running(self) -> Iterator[httpx2.Client]:
        command = [str(NGINX), "-p", str(self.folder), "-c", str(self.config), "-e", str(self.folder / "error.log")]
        context = ssl.create_default_context(cafile=str(self.authority.ca_file))
        with subprocess.Popen(command) as process:
            try:
                wait_until(self._answers, "nginx listens")
                url = f"https://localhost:{self.port}"
                with httpx2.Client(base_url=url, verify=context, trust_env=False, timeout=250) as client:
                    yield client
            finally:
                process.terminate()

    def _answers(self) -> bool:
        with socket.socket() as probe:
            return probe.connect_ex(("127.0.0.1", self.port)) == 0


def start(scheduler: SchedulerProcess, api: str = 'trusted_proxy = ["127.0.0.1"]', text: str = "") -> str:
    """A scheduler that root's word opens, and the token of its proxy."""
    scheduler.write_config(text, api=api)
    scheduler.start()
    return run(scheduler, "", "token", "create", "nginx", "--role", "proxy").stdout.strip()


def test_passwords(scheduler: SchedulerProcess, tmp_path: Path) -> None:
    token = start(scheduler, text='[groups]\nml = ["dora"]')
    proxy = Proxy(tmp_path / "nginx", RECIPES[0], scheduler, token)
    hashed = subprocess.run(
        ["openssl", "passwd", "-apr1", "secret"], capture_output=True, text=True, timeout=250, check=True
    ).stdout
    (proxy.folder / "cpumond.htpasswd").write_text(f"dora:{hashed}")
    dora = httpx2.BasicAuth("dora", "secret")
    with proxy.running() as client:
        assert client.get("/api/v1/me").status_code == 401
        answer = client.get("/api/v1/me", auth=dora)
        assert (answer.status_code, answer.json()["user"]) == (200, "dora"), answer.text
        # Whatever a client adds, it is dora.
        forged: dict[str, str]
        for forged in (
            {"X-Remote-User": "root"}, {"X-Remote-Groups": "admins"}, {"X-Cpumond-Proxy-Token": "x"},
            {"X_Remote_User": "root"},
        ):  # fmt: skip
            answer = client.get("/api/v1/me", auth=dora, headers=forged)
            assert (answer.status_code, answer.json().get("user")) == (200, "dora")
        # The page's own origin may change things, other sites' may not.
        own, other = f"https://localhost:{proxy.port}", "https://evil.example"
        assert client.post("/api/v1/tokens", auth=dora, headers={"Origin": other}).status_code == 403
        made = client.post("/api/v1/tokens", auth=dora, headers={"Origin": own}, json={"groups": ["ml"]})
        assert made.status_code == 201, made.text
        [record] = [each for each in scheduler.events("command") if each["user"] == "dora"]
        assert record["origin"] == "proxy 127.0.0.1 (nginx)"
        # A revoked token of the proxy: its users are not known any more, nor is it root.
        listed = run(scheduler, "", "token", "list", "--json").stdout
        run(scheduler, "", "token", "revoke", next(
            each["id"] for each in httpx2.Response(200, text=listed).json()["tokens"] if each["role"] == "proxy"
        ))  # fmt: skip
        answer = client.get("/api/v1/me", auth=dora)
        assert answer.status_code == 401
        assert "was revoked on" in answer.text
    proxy.write_token("")
    with proxy.running() as client:
        answer = client.get("/api/v1/me", auth=dora)
        assert answer.status_code == 401
        assert "X-Remote-User is only accepted from a proxy" in answer.text


def sign_in(asked: Asked) -> None:
    """Answers as oauth2-proxy does: a session's cookie is known, or not."""
    if asked.path != "/oauth2/auth":
        asked.reply(403, b"sign in")
    elif "session=eva" in asked.headers.get("Cookie", ""):
        groups = {"X-Auth-Request-Preferred-Username": "eva", "X-Auth-Request-Groups": "ml,data team"}
        asked.reply(202, b"sign in", **groups)
    else:
        asked.reply(401, b"sign in")


def test_single_sign_on(scheduler: SchedulerProcess, tmp_path: Path) -> None:
    token = start(scheduler)
    with listen(sign_in) as url:
        proxy = Proxy(tmp_path / "nginx", RECIPES[1], scheduler, token, int(url.rpartition(":")[2]))
        with proxy.running() as client:
            assert client.get("/api/v1/me").text == "sign in"
            session = {"Cookie": "session=eva"}
            answer = client.get("/api/v1/me", headers=session)
            assert (answer.status_code, answer.json()["user"]) == (200, "eva"), answer.text
            assert client.post("/api/v1/tokens", headers=session, json={"groups": ["data team"]}).status_code == 201
            assert client.post("/api/v1/tokens", headers=session, json={"groups": ["web"]}).status_code == 403


def test_the_commands_for_an_authority(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that docs/access.md shows for TLS."""
    monkeypatch.chdir(tmp_path)
    text = (Path(__file__).parents[2] / "docs" / "access.md").read_text()
    [commands] = [block for block in text.split("```")[1::2] if block.startswith("\nopenssl")]
    done = subprocess.run(["sh", "-ec", commands], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr
    openssl("verify", "-CAfile", "ca.pem", "scheduler.crt")
