"""Find what the start of a job needs: its account, command line and environment."""

from __future__ import annotations

import os
import pwd

from cpumond.agent.config import AgentConfig
from cpumond.core.errors import ConfigError
from cpumond.core.wire import JobOrder

SAFE_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def find_account(config: AgentConfig, user: str) -> tuple[str, pwd.struct_passwd]:
    """Return the account of a job: its name for the executor ("" = the agent's own), and its entry.

    Only an agent with root can use a different account. Without root, jobs run as the agent's user, if
    ``executor.user`` names that user. Raises ConfigError for unknown users and for forbidden accounts: root, system
    accounts, and every account that a scheduler without tokens names, since it does not authenticate users.
    ``allow_root`` permits all forbidden accounts."""
    if os.geteuid() != 0:
        check_own_account(config)
        return "", _own_account()
    name = config.executor.user or user
    try:
        account = pwd.getpwuid(int(name)) if name.isdecimal() else pwd.getpwnam(name)
        name = account.pw_name
    except (KeyError, ValueError, OverflowError):
        raise ConfigError(
            f"user {name!r} is unknown on node {config.node_id}; create the account, or set [executor] user"
        ) from None
    if account.pw_uid == 0 and not config.executor.allow_root:
        raise ConfigError(
            f"jobs may not run as root on node {config.node_id}; submit as another user, set [executor] user, "
            "or [executor] allow_root = true"
        )
    options = config.executor
    if options.user or options.allow_root:
        return name, account
    if not (config.scheduler.token or config.scheduler.token_file):
        raise ConfigError(
            f"node {config.node_id} runs no job as {name!r}: its scheduler requires no tokens, so anybody there "
            "can claim any name; set [executor] user, or [scheduler] token with a scheduler that has a tokens_file"
        )
    if account.pw_uid < options.min_uid:
        raise ConfigError(
            f"node {config.node_id} runs no job as {name!r}, a system account (uid {account.pw_uid} is "
            f"below [executor] min_uid = {options.min_uid}); submit as another user, or set [executor] user"
        )
    return name, account


def check_own_account(config: AgentConfig) -> None:
    """Check that the configuration lets an agent without root run jobs as its own user. Raises ConfigError if not."""
    own = _own_account().pw_name
    if os.geteuid() != 0 and config.executor.user != own:
        wish = f"not as {config.executor.user!r}" if config.executor.user else "not as the users of the operations"
        raise ConfigError(
            f"{config.path or 'built-in defaults'}: executor.user: this agent runs as {own}, not as root, so "
            f'its jobs can only run as {own}, {wish}; set [executor] user = "{own}" if that is intended, or run the '
            "agent as root"
        )


def _own_account() -> pwd.struct_passwd:
    own = os.geteuid()
    try:
        return pwd.getpwuid(own)
    except KeyError:
        # The uid has no name, which can happen in containers.
        return pwd.struct_passwd((str(own), "x", own, os.getegid(), "", "/", "/bin/sh"))


def make_environment(order: JobOrder, account: pwd.struct_passwd, checkpoint: str = "") -> dict[str, str]:
    """Return the environment of a job: the variables of a login, then those of its task, then facts about the job.

    A later value overrides an earlier one, so the task's variables cannot replace YT_JOB_ID. ``checkpoint`` is the file
    for reporting checkpoints, if the job's task does that."""
    return {
        "PATH": SAFE_PATH,
        "HOME": account.pw_dir,
        "USER": account.pw_name,
        "LOGNAME": account.pw_name,
        "SHELL": _shell(),  # the shell of a service account may refuse to run anything
        "LANG": "C.UTF-8",
        **order.environment,
        "CPUMOND_JOB_ID": order.job_id,
        "CPUMOND_OPERATION_ID": order.operation_id,
        "CPUMOND_TASK": order.task,
        "CPUMOND_POOL": order.pool,
        "CPUMOND_CPU_LIMIT": f"{order.cpu_limit:g}",
        "YT_JOB_ID": order.job_id,
        "YT_OPERATION_ID": order.operation_id,
        "YT_TASK_NAME": order.task,
        "YT_FIRST_OUTPUT_TABLE_FD": "1",
        **order.variables,
        **({"CPUMOND_CHECKPOINT": checkpoint} if order.checkpoints else {}),
    }


def make_argv(order: JobOrder) -> list[str]:
    """Return the command line of a job; a command that is one text is run by a shell. Raises ConfigError if empty."""
    if not order.command:
        raise ConfigError("it has no command")
    return [_shell(), "-c", order.command] if isinstance(order.command, str) else list(order.command)


def _shell() -> str:
    """Return the path of bash, for which YTsaurus' documentation writes commands; sh if the host has no bash."""
    return "/bin/bash" if os.access("/bin/bash", os.X_OK) else "/bin/sh"
