"""All known options of a specification, including those of YTsaurus, and how each is treated.

``OPTIONS`` has a row for each option, which is honoured, refused, warned of or ignored. ``operations`` uses these rows
to read specifications, and the table in ``docs/from-ytsaurus.md`` is made of them. An option that changes the result
of an operation is honoured or refused, never ignored. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final, Literal, NamedTuple, get_args

Place = Literal["root", "task", "tree", "pool"]
"""The root of a specification; an entry of its ``tasks``; an entry of its ``scheduling_options_per_pool_tree``;
attributes of a pool that are no options of this scheduler."""

Verdict = Literal["honoured", "refused", "warned", "ignored"]
"""warned: the option has no effect, and this is reported. ignored: clients add it, and it could change nothing here."""


class Option(NamedTuple):
    """Treatment of one option. A name with ``*`` matches several options."""

    name: str
    places: tuple[Place, ...]
    default: str
    """The default of YTsaurus as text for people; "" if only this scheduler has the option."""
    verdict: Verdict
    sentence: str = ""
    """If refused: the consequence, and what to write instead. If warned of: why it has no effect. Else a note or ""."""
    aliases: tuple[str, ...] = ()
    with_zero: bool = False
    """Whether 0, an empty map and the like also request something. If so, only an entity (``#``) does not."""
    several_trees: bool = False
    """Whether the option is refused only for operations in several trees."""

    def is_wish(self, value: object) -> bool:
        """Return whether ``value`` requests something: if so, it matters that the option has no effect here."""
        return value is not None if self.with_zero else bool(value)


ROOT: Final[tuple[Place, ...]] = ("root",)
TASK: Final[tuple[Place, ...]] = ("task",)
BOTH: Final[tuple[Place, ...]] = ("root", "task")
TREES: Final[tuple[Place, ...]] = ("root", "tree")
POOL: Final[tuple[Place, ...]] = ("pool",)

_NO_FILES: Final = "put the files on the nodes and name them by absolute paths in the command"
_OWN_FILES: Final = "the command would run in the node's own file system; install what it needs on the nodes"
_NO_TMPFS: Final = (
    "the job would write to a disk where it expects memory; let it use /dev/shm, which counts as its memory, too"
)
_NO_TABLES: Final = "no tables are stored here, so the results would be lost; let the jobs write them elsewhere"
_OWN_LOGS: Final = "[jobs] of the node's agent decides how logs are kept"
_NO_TRIES: Final = "the operation runs in its other trees"
_NO_RIGHTS: Final = "would not be enforced; name who may read or manage the operation in acl"
_MEMORY: Final = "if the tree sets enable_memory_reserve"

OPTIONS: Final[tuple[Option, ...]] = (
    # --- honoured
    Option("tasks", ROOT, "required", "honoured"),
    Option("pool", TREES, "the user's name", "honoured"),
    Option("pool_trees", ROOT, "the default tree", "honoured"),
    Option("schedule_in_single_tree", ROOT, "false", "honoured",
           "chosen at the start; not beside tentative_pool_trees"),
    Option("scheduling_options_per_pool_tree", ROOT, "{}", "honoured",
           "without pool_trees its keys are the trees of the operation; a tree that is not among pool_trees is refused",
           ("fair_share_options_per_pool_tree",)),
    Option("weight", TREES, "1", "honoured"),
    Option("max_share_ratio", TREES, "1", "honoured"),
    Option("resource_limits", TREES, "{}", "honoured"),
    Option("min_share_resources", TREES, "{}", "honoured", aliases=("strong_guarantee_resources",)),
    Option("fair_share_starvation_timeout", TREES, "that of the pool", "honoured",
           "never to the operation's own advantage", ("fair_share_preemption_timeout",)),
    Option("fair_share_starvation_tolerance", TREES, "that of the pool", "honoured",
           "never to the operation's own advantage"),
    Option("min_share_preemption_timeout", TREES, "that of the pool", "honoured"),
    Option(
        "max_unpreemptible_running_job_count", TREES, "that of the tree", "honoured",
        aliases=(
            "max_unpreemptable_running_job_count", "max_unpreemptable_job_count",
            "max_unpreemptible_running_allocation_count",
        ),
    ),
    Option("non_preemptible_resource_usage_threshold", TREES, "that of the pool", "honoured"),
    Option("min_run_time", ("root", "task", "tree"), "", "honoured"),
    Option("scheduling_tag_filter", TREES, "empty", "honoured", "also of pools; running jobs continue when it changes",
           ("scheduling_tag",)),
    Option("enable_limiting_ancestor_check", ROOT, "true", "honoured",
           "whether it counts as stuck if limits of a pool above are below its smallest job; it does not fail then"),
    Option("title", ROOT, "none", "honoured"),
    Option("alias", ROOT, "none", "honoured", "begins with `*`"),
    Option("acl", ROOT, "[]", "honoured"),
    Option("annotations", ROOT, "{}", "honoured", "kept and shown; at most 10 KiB"),
    Option("description", ROOT, "none", "honoured", "kept and shown"),
    Option("started_by", ROOT, "none", "honoured", "kept and shown"),
    Option("preemption_mode", ROOT, "normal", "honoured"),
    Option("is_gang", ROOT, "false", "honoured", "all jobs start in one step or none"),
    Option("retry_policy", BOTH, "", "honoured",
           "rules for starting jobs again; at the root: for tasks without one; else the pool's"),
    Option("max_failed_job_count", ROOT, "10", "honoured", "0 to 10 000; 0 is as 1"),
    Option("time_limit", ROOT, "none", "honoured", "from the start, pending included"),
    Option("job_cpu_monitor", ROOT, "{}", "honoured"),
    Option("allow_reclaimed", ROOT, "", "honoured"),
    Option("require_reclaimed", ROOT, "", "honoured"),
    Option("command", TASK, "required", "honoured", "text for a shell or a list of arguments"),
    Option("job_count", TASK, "required", "honoured"),
    Option("cpu_limit", TASK, "1", "honoured", aliases=("cpu",)),
    Option("memory_limit", TASK, "512 MiB", "honoured", "default_memory_limit of the tree; 0: none", ("memory",)),
    Option("user_slots", TASK, "1", "honoured"),
    Option("gpu_limit", TASK, "0", "honoured", "only counted: agents offer none, and no device is assigned to a job"),
    Option("network", TASK, "0", "honoured", "only counted: agents offer none"),
    Option("environment", TASK, "{}", "honoured", "names are letters, digits and `_`"),
    Option("working_directory", TASK, "", "honoured", "absolute; without it each job gets a new directory of its own"),
    Option("interruptible", TASK, "false", "honoured"),
    Option("job_time_limit", TASK, "none", "honoured", "at least a second", ("exec_time_limit",)),
    Option("checkpoints", TASK, "", "honoured"),
    Option("set_container_cpu_limit", TASK, "false", "honoured",
           "if a task does not set it, its pools or its tree do; if none does, jobs have a quota"),
    Option("fail_on_job_restart", BOTH, "false", "honoured", "at the root: for all tasks"),
    Option("suspend_on_job_failure", ROOT, "false", "honoured",
           "the max_failed_job_count-th failed job still fails the operation"),
    Option("restart_completed_jobs", TASK, "false", "honoured",
           "the operation ends only by yt complete-op or yt abort-op"),
    Option("gang_options", TASK, "none", "honoured",
           "ranks, and all start again if one is lost; also set is_gang for jobs that start in one step",
           ("gang_manager",)),
    Option("interruption_signal", TASK, "none", "honoured", "its name, such as SIGINT; implies interruptible"),
    Option("signal_root_process_only", TASK, "false", "honoured"),
    Option("restart_exit_code", TASK, "none", "honoured", "1 to 255"),
    Option("redirect_stdout_to_stderr", TASK, "false", "honoured"),
    Option("max_stderr_size", TASK, "5 MiB", "honoured",
           "the end of stderr is kept; max_log_bytes of the node's agent also applies and is the default"),
    Option("secure_vault", ROOT, "none", "honoured",
           "refused without a secrets_key_file of the scheduler; no answer contains it, not even one to its owner"),
    Option("user_job_memory_digest_default_value", TASK, "0.5", "honoured", _MEMORY),
    Option("user_job_memory_digest_lower_bound", TASK, "0.05", "honoured", _MEMORY),
    Option("memory_reserve_factor", TASK, "none", "honoured", _MEMORY),
    Option("ignore_memory_reserve_factor_less_than_one", TASK, "false", "honoured", _MEMORY),
    Option("user_job_resource_overdraft_memory_multiplier", TASK, "none", "honoured", _MEMORY),
    # --- refused: without them the result would differ
    Option("collective_options", TASK, "none", "refused",
           "each job would run alone but expect to be one of several; request one larger job, or one job for each "
           "member in a gang", with_zero=True),
    Option("docker_image", TASK, "none", "refused",
           "the command would run in the node's own file system; install what it needs on the nodes or let the command "
           "start the container"),
    Option("layer_paths", TASK, "[]", "refused", _OWN_FILES),
    Option("system_layer_path", TASK, "none", "refused", _OWN_FILES),
    Option(
        "cuda_toolkit_version", TASK, "none", "refused",
        "the job would find the node's own toolkit or none; install it on the nodes and name its path in environment",
    ),
    Option("file_paths", TASK, "[]", "refused", f"the job would not find the files; {_NO_FILES}"),
    Option("volumes", TASK, "{}", "refused", f"the job would not find the volumes; {_NO_FILES}"),
    Option("job_volumes_mounts", TASK, "[]", "refused", f"the job would not find the volumes; {_NO_FILES}"),
    Option("output_table_paths", TASK, "[]", "refused", _NO_TABLES),
    Option("stderr_table_path", ROOT, "none", "refused",
           "no tables are stored here, so it would stay empty; read the output of jobs with yt get-job-stderr"),
    Option("core_table_path", ROOT, "none", "refused",
           "no tables are stored here, so it would stay empty; collect core dumps on the nodes (core_pattern)"),
    Option("input_query", ROOT, "none", "refused",
           "a vanilla operation has no input to select from; let the command read its own input"),
    Option("sidecars", TASK, "{}", "refused", "they would not run; start them in the command, or as another task"),
    Option("network_project", TASK, "none", "refused",
           "the job would be in the node's own network; omit it and use the nodes' network"),
    Option("enable_rpc_proxy_in_job_proxy", TASK, "false", "refused",
           "no proxy would answer the job; pass the address of a cluster in environment"),
    Option("enable_fuse", TASK, "false", "refused",
           "the job would have no right to mount; mount on the nodes what it needs"),
    Option("port_count", TASK, "0", "refused",
           "no ports would be kept for the job (YT_PORT_0 ...); let it bind port 0: the kernel chooses a free one"),
    Option("tmpfs_path", TASK, "none", "refused", _NO_TMPFS),
    Option("tmpfs_size", TASK, "memory_limit", "refused", _NO_TMPFS),
    Option("tmpfs_volumes", TASK, "[]", "refused", _NO_TMPFS),
    Option("issue_temporary_token", BOTH, "false", "refused",
           "the job would have no token; create one for it (cpumond token create)"),
    Option("consider_guarantees_for_single_tree", ROOT, "false", "refused",
           "the tree is chosen only by guarantees and demand of pools; omit the option", several_trees=True),
    Option("owners", ROOT, "[]", "refused", _NO_RIGHTS),
    Option("aco_name", ROOT, "none", "refused", _NO_RIGHTS),
    # --- warned of: without them the result is the same, but something else differs
    Option("disk_request", TASK, "none", "warned",
           "disk space is neither reserved nor limited: a job may fill the disk"),
    Option("disk_space_limit", TASK, "none", "warned", "disk space is not limited: a job may fill the disk"),
    Option("inode_limit", TASK, "none", "warned", "the number of a job's files is not limited"),
    Option("max_stderr_count", ROOT, "10", "warned", _OWN_LOGS),
    Option("max_core_info_count", ROOT, "10", "warned", "core dumps are not collected"),
    Option("custom_statistics_count_limit", TASK, "128", "warned", "jobs cannot send statistics of their own"),
    Option("allow_idle_cpu_policy", ("root", "pool"), "false", "warned",
           "no job runs in the idle class of its node; require_reclaimed=%true keeps jobs on reclaimed CPU"),
    Option("enable_lightweight_operations", POOL, "false", "warned",
           "each operation counts towards max_running_operation_count; raise that, which costs little here"),
    Option("config_preset", POOL, "none", "warned", "there are no presets; set its options directly"),
    Option("config_presets", POOL, "[]", "warned", "there are no presets; set their options directly"),
    Option("tentative_pool_trees", ROOT, "[]", "warned", _NO_TRIES),
    Option("use_default_tentative_pool_trees", ROOT, "false", "warned", _NO_TRIES),
    Option("tentative_tree_eligibility", ROOT, "none", "warned", _NO_TRIES),
    Option("erase_trees_with_pool_limit_violations", ROOT, "false", "warned",
           "the scheduler's own option of this name applies to all operations"),
    Option("prepare_time_limit", TASK, "45 min", "warned", "nothing is prepared before a job starts"),
    Option("waiting_job_timeout", BOTH, "10 min", "warned",
           "the scheduler itself sets how long a node may keep a job waiting"),
    Option("time_limit_job_fail_timeout", ROOT, "2 min", "warned", "jobs are stopped as soon as time_limit is over"),
    Option("ban_nodes_with_failed_jobs", ROOT, "false", "warned", "a job may start again on the node where it failed"),
    Option("ignore_job_failures_at_banned_nodes", ROOT, "false", "warned", "no node is banned after a failed job"),
    Option("fail_on_all_nodes_banned", ROOT, "true", "warned", "no node is banned after a failed job"),
    Option("extra_environment", TASK, "[]", "warned", "these variables are not set"),
    # --- ignored: clients and templates add them, and they can have no meaning here
    *(
        Option(name, places, default, "ignored")
        for name, places, default in (
            ("probing_ratio", ROOT, "0"), ("probing_pool_tree", ROOT, "none"),
            ("max_probing_job_count_per_task", ROOT, "10"), ("*speculat*", BOTH, "various"),
            ("enable_job_splitting", ROOT, "true"), ("try_avoid_duplicating_jobs", ROOT, "false"),
            ("job_node_account", ROOT, "various"), ("debug_artifacts_account", ROOT, "various"),
            ("intermediate_*", ROOT, "various"), ("unavailable_chunk_*", ROOT, "various"),
            ("chunk_availability_policy", ROOT, "various"), ("data_weight_*", ROOT, "various"),
            ("max_data_size_per_job", ROOT, "various"), ("suspend_operation_if_account_limit_exceeded", ROOT, "false"),
            ("job_io", BOTH, "{}"), ("format", BOTH, "none"), ("*_format", BOTH, "none"),
            ("use_columnar_statistics", ROOT, "false"), ("auto_merge", ROOT, "{}"),
            ("controller_agent_tag", ROOT, "default"), ("enable_porto", BOTH, "none"), ("copy_files", TASK, "false"),
            ("deterministic", TASK, "false"), ("title", TASK, "none"), ("monitoring", TASK, "{}"),
            ("profilers", TASK, "[]"), ("use_yamr_descriptors", TASK, "false"),
            ("check_input_fully_consumed", TASK, "false"), ("enable_input_table_index", TASK, "none"),
            ("allow_offloading", ROOT, "false"), ("offloading_settings", POOL, "{}"),
            ("redirect_to_cluster", POOL, "none"), ("enable_step_function_for_gang_operations", POOL, "true"),
            ("always_allow_gang_operations", POOL, "false"), ("waiting_for_resources_on_node_timeout", POOL, "none"),
            ("allow_normal_preemption", POOL, "true"), ("abc", POOL, "none"), ("metering_tags", POOL, "{}"),
            ("enable_secure_vault_variables_in_job_shell", ROOT, "true"),
        )
    ),
)  # fmt: skip

_BY_SPELLING: Final = {name: option.name for option in OPTIONS for name in (option.name, *option.aliases)}
_BY_NAME: Final = {(place, option.name): option for option in OPTIONS for place in option.places}
_PATTERNS: Final = tuple((re.compile(row.name.replace("*", ".*")), row) for row in OPTIONS if "*" in row.name)
_ANY_PATTERN: Final = re.compile("|".join(pattern.pattern for pattern, _ in _PATTERNS))
"""One pattern for all options with ``*``: a specification may have thousands of unknown names."""


_WITH_EFFECT: Final[Mapping[Place, frozenset[str]]] = {
    place: frozenset(
        name
        for option in OPTIONS
        if option.verdict == "honoured" and place in option.places
        for name in (option.name, *option.aliases)
    )
    for place in get_args(Place)
}
"""Place -> names and aliases, with underscores, of the options that have an effect there and need no warning."""


def canonical(key: Any) -> str:
    """Return the canonical name of an option that may have any accepted spelling."""
    found = _BY_SPELLING.get(key)
    if found is None:
        name = str(key).replace("-", "_")
        found = _BY_SPELLING.get(name, name)
    return found


IDLE_OF_POOLS: Final = frozenset(row.name for row in OPTIONS if "pool" in row.places and row.verdict == "warned")


def find_option(place: Place, name: str) -> Option | None:
    """Return the row of an option by its canonical name; None if the option is unknown."""
    found = _BY_NAME.get((place, name))
    if found is None and _ANY_PATTERN.fullmatch(name):
        found = next((row for fits, row in _PATTERNS if place in row.places and fits.fullmatch(name)), None)
    return found


def honoured(place: Place) -> frozenset[str]:
    """Return names of the options that have an effect at ``place``."""
    return frozenset(option.name for option in OPTIONS if option.verdict == "honoured" and place in option.places)


def find_refused(
    place: Place, given: Mapping[str, Any], *, several_trees: bool = False
) -> Iterator[tuple[str, Option]]:
    """Yield options that must be refused, by canonical name: in YTsaurus, they change the operation's result."""
    for name, value in given.items() if not given.keys() <= _WITH_EFFECT[place] else ():
        option = find_option(place, name)
        if option is None or option.verdict != "refused" or not option.is_wish(value):
            continue
        if several_trees or not option.several_trees:
            yield name, option


def find_idle(place: Place, given: Mapping[str, Any]) -> Iterator[tuple[str, Any, str]]:
    """Yield (key, value, reason) of options without effect that the user should know of. The reason is "" for unknown
    options. Options that are refused now may be among them, in a specification that an older version accepted."""
    for key, value in given.items() if not given.keys() <= _WITH_EFFECT[place] else ():
        option = find_option(place, canonical(key))
        if option is None:
            yield str(key), value, ""
        elif option.verdict in ("refused", "warned") and option.is_wish(value) and not option.several_trees:
            yield str(key), value, option.sentence
