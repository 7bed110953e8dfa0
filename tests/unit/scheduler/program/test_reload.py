"""SIGHUP: what is read anew, and that a file that is wrong changes nothing."""

from pathlib import Path

from structlog.testing import capture_logs

from cpumond.host.service import ServiceManager
from cpumond.scheduler.program.config import load_scheduler_config
from cpumond.scheduler.program.identities import Identities, load_identities
from cpumond.scheduler.program.reload import Reload
from cpumond.scheduler.rights.tokens import hash_token


class Files:
    def __init__(self, folder: Path) -> None:
        self.tokens = folder / "tokens"
        self.tokens.touch(mode=0o600)
        self.config = folder / "scheduler.toml"
        self.write()
        config = load_scheduler_config(str(self.config))
        self.identities: Identities = load_identities(config)
        self._reload = Reload(config, self.identities, None, ServiceManager({}))

    def write(self, tokens: str = f"alice:{hash_token('a')}", more: str = '[groups]\nml = ["alice"]') -> None:
        self.tokens.write_text(tokens)
        self.config.write_text(f'[api]\ntokens_file = "{self.tokens}"\n{more}\n')

    def reload(self) -> dict[str, object]:
        with capture_logs() as lines:
            self._reload.run()
        [line] = lines
        return line

    def knows(self, token: str) -> bool:
        assert self.identities.tokens is not None
        return self.identities.tokens.user_of(token) is not None


def test_tokens_and_groups_are_read_anew(tmp_path: Path) -> None:
    files = Files(tmp_path)
    assert files.knows("a")
    files.write(f"bob:{hash_token('b')}", '[groups]\nweb = ["alice", "bob"]\nops = ["bob"]')
    line = files.reload()
    assert (line["event"], line["tokens"], line["groups"], "needs_restart" in line) == ("reloaded", 1, 2, False)
    assert not files.knows("a")
    assert files.knows("b")
    assert files.identities.groups_of("alice") == {"web"}
    assert files.identities.groups_of("bob") == {"web", "ops"}


def test_a_wrong_file_changes_nothing(tmp_path: Path) -> None:
    files = Files(tmp_path)
    bob = f"bob:{hash_token('b')}"
    for tokens, more, words in (
        ("alice", "[groups]\n", "tokens: line 1: expected"),
        (bob, "[group]\n", "did you mean 'groups'?"),
        (bob, '[groups]\nml = "alice"\n', 'groups.ml: must be a list of users, for example ["alice"'),
        (bob, '[groups]\nowner = ["alice"]\n', "'owner' is no name of a group: access lists"),
        (bob, '[groups]\nml = [""]\n', "'' is no user: expected 1 to 256"),
    ):
        files.write(tokens, more)
        line = files.reload()
        assert line["event"] == "reload_refused"
        assert words in str(line["error"])
        assert files.knows("a")
        assert not files.knows("b")
        assert files.identities.groups_of("alice") == {"ml"}
    files.write()
    files.tokens.chmod(0o644)
    assert "others than its owner have rights to it" in str(files.reload()["error"])
    assert files.knows("a")


def test_what_needs_a_restart_is_named(tmp_path: Path) -> None:
    files = Files(tmp_path)
    files.write(more='max_body = 4096\n[log]\nlevel = "debug"\n[groups]\n')
    assert files.reload()["needs_restart"] == ["api.max_body", "log.level"]
    assert files.reload()["needs_restart"] == ["api.max_body", "log.level"], "until it was restarted"
