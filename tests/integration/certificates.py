"""Certificates of an authority that lives as long as a test, made by openssl."""

import subprocess
from pathlib import Path


def openssl(*arguments: str) -> None:
    done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, timeout=250, check=False)
    assert done.returncode == 0, done.stderr


class Authority:
    """Signs certificates; its own is ``ca_file``."""

    def __init__(self, directory: Path, name: str = "authority") -> None:
        self.directory = directory
        self.ca_file = directory / f"{name}.pem"
        self._key = directory / f"{name}.key"
        openssl(
            "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "2",
            "-subj", f"/CN={name}", "-keyout", str(self._key), "-out", str(self.ca_file),
        )  # fmt: skip

    def sign(self, name: str, names: str = "DNS:localhost,IP:127.0.0.1", days: str = "2") -> tuple[Path, Path]:
        certificate, key = self.directory / f"{name}.crt", self.directory / f"{name}.key"
        request, more = self.directory / f"{name}.csr", self.directory / f"{name}.ext"
        more.write_text(f"subjectAltName={names}\n")
        openssl(
            "req", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-subj", f"/CN={name}",
            "-keyout", str(key), "-out", str(request),
        )  # fmt: skip
        key.chmod(0o600)
        openssl(
            "x509", "-req", "-in", str(request), "-CA", str(self.ca_file), "-CAkey", str(self._key), "-CAcreateserial",
            "-days", days, "-extfile", str(more), "-out", str(certificate),
        )  # fmt: skip
        return certificate, key
