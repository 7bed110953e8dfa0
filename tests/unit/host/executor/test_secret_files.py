"""Secret variables on their way to systemd (``host/executor/systemd/secrets.py``)."""

import os
import shlex

import pytest

from cpumond.host.executor.systemd.secrets import SecretFiles, find_problem, format_file


def test_a_shell_reads_the_file_as_systemd_does():
    secrets = {"A": 'two words\nand $HOME `x` "\\', "B": "", "C": "é = #;"}
    lexed = shlex.split(format_file(secrets).replace("\\$", "$").replace("\\`", "`"))
    assert dict(each.split("=", 1) for each in lexed) == secrets


@pytest.mark.parametrize("sign", ["\r", "\x1b", "\x7f", "\x01"])
def test_what_systemd_would_write_to_its_log_is_refused_without_it(sign):
    told = find_problem({"KEY": f"hunter2{sign}"})
    assert told == "a secret contains a control character, which systemd passes to no process; encode it in base64"
    assert find_problem({"KEY": "a\tb\n"}) == ""


def test_only_their_owner_can_read_them_and_they_are_removed(tmp_path):
    files = SecretFiles(str(tmp_path))
    paths = [files.write(job_id, {"A": job_id}) for job_id in ("one", "two", "one")]
    assert [os.stat(path).st_mode & 0o777 for path in (paths[0], tmp_path / "job-secrets")] == [0o600, 0o700]
    files.keep(["two"])
    assert os.listdir(tmp_path / "job-secrets") == ["two"]
    files.remove("two")
    files.remove("two")
    assert os.listdir(tmp_path / "job-secrets") == []
    SecretFiles(str(tmp_path / "none")).keep([])
