"""The integration tests of the short lane: a few for each real part, by file of tests/integration."""

from typing import Final

SPINE: Final[dict[str, tuple[str, ...]]] = {
    "test_cgroup_contract.py": (
        "test_a_fresh_one",
        "test_what_is_written_is_in_force",
        "test_the_order_of_quota_and_burst",
        "test_the_least_quota_above",
        "test_gone_is_a_normal_answer_at_every_step",
        "test_a_foreign_write_is_seen_at_once",
        "test_what_the_kernel_refuses_is_an_error_with_file_and_value",
        "test_counters_follow_a_load_and_its_throttling",
        "test_the_agent_runs_on_v2",
    ),
    "test_agent_v1.py": (
        "test_a_quota_follows_a_light_load_down_and_nothing_else_changes",
        "test_a_load_that_wakes_up_has_its_limit_back_in_two_checks",
        "test_the_weight_actuator_moves_shares_and_never_the_quota",
        "test_every_file_is_left_as_it_was_found",
    ),
    "test_agent_guarantee.py": (
        "test_it_needs_no_right_to_the_cgroups_and_leaves_no_trace",
        "test_actuators_change_by_reload_and_quotas_return_at_the_next_check",
        "test_a_job_runs_on_an_owners_unused_cpu_and_ends_when_it_wakes_up",
    ),
    "test_agent_v1_life.py": (
        "test_a_cgroup_that_goes_is_dropped_and_one_made_again_is_another_job",
        "test_two_hundred_jobs_come_and_go_without_a_trace",
    ),
    "test_cgroup_executor.py": (
        "test_an_exit_code",
        "test_its_quota_is_in_force",
        "test_both_streams_are_kept_apart",
        "test_jobs_outlive_the_agent",
        "test_what_forks_away_is_killed_too",
        "test_many_at_once",
        "test_the_keeper_is_killed_while_jobs_run",
    ),
    "test_closed_loop.py": ("test_freed_cpu_runs_another_job_and_comes_back_when_it_is_wanted",),
    "test_scheduler_life.py": ("test_a_restart_keeps_everything_and_the_jobs_run_on",),
    "test_postgresql_store.py": (
        "test_a_batch_is_stored_with_its_entries_or_nothing_of_it",
        "test_entries_are_there_at_once_and_after_opening_newest_first",
    ),
    "test_two_schedulers.py": ("test_a_killed_and_a_stopped_leader_are_replaced_and_cost_no_job",),
    "test_yt_transport.py": ("test_a_client_with_bindings_is_answered_in_binary",),
    "test_scheduler_rules.py": ("test_what_the_client_adds_by_itself_is_known",),
    "test_node_maintenance.py": ("test_by_the_command_line_of_yt",),
    "test_web_pages.py": ("test_every_page_opens_with_one_heading_and_a_title",),
}
