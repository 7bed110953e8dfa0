"""``cpumond demo`` of somebody without rights: its whole story on a simulated kernel."""

import os
import shutil
import tempfile
from pathlib import Path

import pytest
from test_try_it_commands import run_whole_story, start_demo

from cpumond.host.cgroup.mounts import Hierarchies


@pytest.mark.timeout(500)
def test_demo_of_an_ordinary_user_simulates_the_kernel(hierarchies: Hierarchies) -> None:
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        pytest.skip("needs root, to become an ordinary user, and setpriv of util-linux")
    if hierarchies.cpu_version == 2:
        pytest.skip("needs cgroup v1: on v2 a user may have cgroups of its own")
    with tempfile.TemporaryDirectory() as directory:
        os.chown(directory, 65534, 65534)
        # Reading everything lets it reach this interpreter and checkout, wherever they are.
        become = ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", "--inh-caps=+dac_read_search",
                  "--ambient-caps=+dac_read_search"]  # fmt: skip
        _, summary = run_whole_story(
            lambda seconds: start_demo(Path(directory), *become, arguments=("--duration", str(seconds), "--json")), 25
        )
        assert os.listdir(directory) == []
    assert (summary["kernel"], summary["restored"], summary["removed"]) == ("simulated", True, True)
    assert summary["started_on_freed_cpu"]["render"] >= 1
    assert summary["give_back_s"]
    assert summary["used_cpu_s"] > 0.0
