"""Settings that SIGHUP reloads without a restart: groups, the file of tokens and the certificate."""

from __future__ import annotations

import time

import msgspec
import structlog

from cpumond.core.errors import CpumondError
from cpumond.host.service import ServiceManager
from cpumond.scheduler.program.config import SchedulerConfig, load_scheduler_config
from cpumond.scheduler.program.identities import Identities, load_identities
from cpumond.scheduler.program.listen import Certificate
from cpumond.scheduler.program.vault_keys import load_keys

log = structlog.get_logger("cpumond.scheduler")


def check_files(config: SchedulerConfig) -> None:
    """Read the configuration's files, as at a start, but keep nothing. Raises ConfigError or AccessError."""
    load_identities(config)
    if config.secrets_key_file:
        load_keys(config.secrets_key_file)
    if config.api.certificate:
        Certificate(config.api.certificate, config.api.key)


class Reload:
    """Reloads everything or nothing: if a file is wrong, everything stays unchanged and the log reports it.
    ``identities`` and ``certificate`` are changed in place. ``manager`` is notified of the beginning and the end."""

    def __init__(
        self, config: SchedulerConfig, identities: Identities, certificate: Certificate | None, manager: ServiceManager
    ) -> None:
        self._config = config
        self._identities = identities
        self._certificate = certificate
        self._manager = manager

    def run(self) -> str:
        self._manager.notify("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
        try:
            self._reload()
        except CpumondError as error:
            advice = "nothing was changed; correct the error and reload again"
            log.error("reload_refused", error=str(error), advice=advice)
            self._manager.notify("READY=1", status=f"the reload was refused: {error}")
            return f"the reload failed and nothing was changed: {error}"
        self._manager.notify("READY=1", status="reloaded")
        return "the scheduler reloaded its file of tokens, its groups and its certificate"

    def _reload(self) -> None:
        config = load_scheduler_config(self._config.path or None)
        present = msgspec.structs.replace(self._config, groups=config.groups)
        identities = load_identities(present)
        if self._certificate is not None:
            self._certificate.reload()
        self._identities.take_over(identities)
        self._config = present
        later = _find_changed(present, config)
        log.info(
            "reloaded",
            tokens=None if identities.tokens is None else len(identities.tokens),
            groups=len(config.groups),
            certificate=self._certificate is not None,
            **({"needs_restart": later} if later else {}),
        )


def _find_changed(before: msgspec.Struct, after: msgspec.Struct, path: str = "") -> list[str]:
    """Return the keys whose values differ; in a table, each key by itself."""
    changed: list[str] = []
    for field in msgspec.structs.fields(before):
        old, new = getattr(before, field.name), getattr(after, field.name)
        if isinstance(old, msgspec.Struct):
            changed += _find_changed(old, new, f"{path}{field.encode_name}.")
        elif old != new:
            changed.append(path + field.encode_name)
    return changed
