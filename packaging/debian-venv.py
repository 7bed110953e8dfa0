"""Makes a virtual environment fit for a Debian package; called by debian/rules.

usage: debian-venv.py VENV TARGET PYTHON LIST

VENV is the environment in the package's tree, TARGET where it will be on a host, PYTHON the name of Debian's
interpreter, for example python3.11. LIST becomes a table of the libraries in it with their versions and licences.
"""

from __future__ import annotations

import shutil
import sys
from importlib.metadata import PackageMetadata, distributions
from pathlib import Path


def main() -> None:
    venv, target, python, table = Path(sys.argv[1]), sys.argv[2], sys.argv[3], Path(sys.argv[4])
    shrink_programs(venv / "bin", target, python)
    lines = ["home = /usr/bin", "include-system-site-packages = false", f"executable = /usr/bin/{python}"]
    (venv / "pyvenv.cfg").write_text("".join(f"{line}\n" for line in lines))
    site = venv / "lib" / python / "site-packages"
    table.write_text(describe_libraries(site))
    # dpkg owns the files. With these pip would know the place of the build, and change or remove the files.
    for name in ("direct_url.json", "RECORD", "REQUESTED", "INSTALLER"):
        for path in site.glob(f"*.dist-info/{name}"):
            path.unlink()
    for path in (venv / "include", venv / "share", venv / "lib64"):
        if path.is_symlink():
            path.unlink()
        else:
            shutil.rmtree(path, ignore_errors=True)


def shrink_programs(folder: Path, target: str, python: str) -> None:
    """Keep only the interpreter and cpumond: a host has no use for the programs of libraries."""
    for path in folder.iterdir():
        if path.name != "cpumond":
            path.unlink()
    (folder / "python3").symlink_to(f"/usr/bin/{python}")
    program = folder / "cpumond"
    body = program.read_text().partition("\n")[2]
    program.write_text(f"#!{target}/bin/python3\n{body}")


def describe_libraries(site: Path) -> str:
    rows = sorted(
        (found.metadata["Name"], found.version, name_licence(found.metadata))
        for found in distributions(path=[str(site)])
        if found.metadata["Name"] != "cpumond"
    )
    return "".join(f"{name} {version}: {licence}\n" for name, version, licence in rows)


def name_licence(metadata: PackageMetadata) -> str:
    """The licence, by the newest to the oldest field in which a project may name it."""
    classifiers = metadata.get_all("Classifier") or []
    named = [text.rpartition(" :: ")[2] for text in classifiers if text.startswith("License ::")]
    text = metadata["License-Expression"] or ", ".join(named) or metadata["License"] or "see its metadata"
    return str(text).strip().partition("\n")[0]


main()
