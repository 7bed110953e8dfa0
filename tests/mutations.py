"""Mistakes made on purpose, each of which the unit tests that it names must notice.

``python tests/mutations.py [WORD...]`` makes them one at a time in a copy of the package, or those whose texts hold a
word, and prints how each came out; the exit code is 1 where one survives or cannot be made.
"""

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
UNIT = ROOT / "tests" / "unit"
WORKERS = os.cpu_count() or 1
LIMIT_S = 900.0
NOT_ENDED = -1
FAILED = 1
"""pytest's exit code where tests ran and some failed; others say that nothing was tried."""

MUTATIONS: dict[str, list[tuple[str, str]]] = {
    # --- limits and jobs of a node
    "test_hold.py": [
        ("max(CALM_S, 4 * backoff_s", "max(CALM_S, 2 * backoff_s"),
        ("return lost if losses < most else", "return lost if losses <= most else"),
        ("is_for_a_time = ttl_s > 0 and not self.is_contested", "is_for_a_time = ttl_s > 0"),
    ],
    "test_loop_with_fake_tree.py": [
        (" and self.moves and self.hold.is_free:", " and self.moves:"),
        ("wrote, job.original = job.writes, found", "wrote = job.writes"),
        ("if job.touched and not (shrinks and job.found.path in self.writer.unsaved):", "if job.touched:"),
        ("if not job.touched or job.hold.is_contested:", "if not job.touched or self.writer.is_paused():"),
        ("(paused or (covered and shrinks and job.writes),", "(paused or covered,"),
        ("if pin is None and pinned_cores is not None:", "if False:"),
        ("not self.writer.is_paused() and pinned_cores != pin.cpu_limit", "pinned_cores != pin.cpu_limit"),
        ("0 < ttl_s < math.inf", "0 < ttl_s"),
        ("if used < budget / 3 else stride", "if used < budget else stride"),
        (" or suspended_s > self.context.period_s", ""),
    ],
    "test_peaks.py": [("            self.context.peaks.close(self.table)\n", "            pass\n")],
    "test_engine_orders.py": [
        ("job.hold.expire(math.inf).unpin().write(None)", "job.hold.expire(math.inf).write(None)"),
        ("if job.touched and engine.sets_quota:", "if job.touched:"),
        ("if cores is not None and cores < known.settings.cores - EQUAL_CORES:", "if False:"),
        ("return found.engine is not None and not found.engine.is_named", "return False"),
    ],
    "test_link.py": [
        ('if before.problem:\n            log.info("engine_back"', 'if False:\n            log.info("engine_back"'),
        ("msgspec.structs.replace(before, problem=problem), problem", "EngineView(key[0], problem=problem), problem"),
    ],
    "test_kubernetes.py": [("_read_limit(of_pod) if enforces_limits else None", "_read_limit(of_pod)")],
    "test_restore_paths.py": [("if not is_of_this_boot(content, copies[1]):", "if False:")],
    "test_engine_sources.py": [
        ("(RANKS[each.kind], not each.is_named)", "RANKS[each.kind]"),
        (" or (job.is_named and path not in named)", ""),
    ],
    # --- budgets
    "test_budgets.py": [
        ("            job.settled = told\n", ""),
        ("(record.budget, record.period) == (budget, period) and record.level > level", "False"),
        ('pool.yields == "weight"\n', 'pool.yields == "never"\n'),
        ("        and element.spent is None\n", ""),
        ("return known if today < known <= add_days(today, BACK_DAYS) else today", "return today"),
        ("min(held, counted + cores * LATE_S) if counted else held)", "held)"),
        ("msgspec.structs.replace(record, counted=settled[record.id]) if record.id in settled else record", "record"),
        ("(now if first <= day else self.end_of(day))", "now"),
        (" + (STEP_S if is_resumed else LATE_S))", " + LATE_S)"),
    ],
    # --- the history
    "test_history_store.py": [
        ("self._add_to_days()\n        self._days = {}\n\n    def", "self._add_to_days()\n\n    def"),
        ("return math.ceil(at / DAY_S) - 1", "return int(at // DAY_S)"),
    ],
    "test_history.py": [
        ("            elif isinstance(element, OperationElement) and grown is not _NOTHING", "            elif False"),
        ("            rows.values[number] += rate\n", "            rows.values[number] = rate\n"),
    ],
    # --- nodes on which jobs fail
    "test_failing_nodes.py": [
        ("streak = NO_STREAK if job.sequence >= streak.sequence else streak", "streak = NO_STREAK"),
        ("if len(failed) >= self.rules.operations or", "if len(streak.by_operation) >= self.rules.operations or"),
        ("> 1 and not any(each.completed for each in record.counts.values())", "> 1"),
        ("most = min(max(1, int(len(nodes) * rules.max_held_ratio)), len(nodes) - 1)", "most = len(nodes)"),
        ("rules.pause_s * 2.0 ** (failing.holds - 1)", "rules.pause_s"),
        ('return job.state == "aborted" or _fits_elsewhere(self.state, job)', "return True"),
        ("    if len(failed_on) > 1:\n        blamed = 0\n", "    if False:\n        blamed = 0\n"),
        ("operation.shuns[job.node_id] = number + 1, now + OTHER_NODE_S", "pass"),
        ("if now >= until or element.operation.needed_job_count > number:", "if now >= until:"),
        ("if failing.streak.reason or len(failing.streak.by_operation) >= rules.operations:", "if True:"),
    ],
    # --- nodes under maintenance, trees as files
    "test_cordon.py": [
        ("if not node.cordoned:\n        gangs.place_kept(", "if True:\n        gangs.place_kept("),
        ("budget = 0.0 if node.cordoned else ", "budget = "),
        ("if not self.cordoned and not self.matched_trees:", "if not self.matched_trees:"),
        ("return least(self.capacity, sum_vectors([job.limits", "return least(self.capacity, sum_vectors([job.usage"),
        (
            "        if old.cordon is None and not old.user_tags:\n            forget_lost(",
            "        if True:\n            forget_lost(",
        ),
        (", cordon=None if before is None else before.cordon", ""),
        ("now, tuple(jobs[:MAX_LOST_JOBS]), node.cordon,", "now, tuple(jobs[:MAX_LOST_JOBS]),"),
        ("chosen = [job for job in jobs if job.task.interruptible]", "chosen = jobs"),
        ("if not chosen and not any(job.task.interruptible for job in node.stopping.values()):", "if not chosen:"),
        ('if cordon is not None and cordon.drain == "graceful" and', "if cordon is None and"),
    ],
    "test_import_shares.py": [
        ("own = share * float(text) / 100 if", "own = float(text) if"),
        ("{name: made[name] + above[name] for name in made.keys() & above}", "{name: made[name] for name in above}"),
    ],
    "test_simulate.py": [
        ("(time_s - self._begin_s) / (self._end_s - self._begin_s)", "(time_s - self._begin_s) / self._end_s"),
        ("abs(x - y) <= NOISE * t", "abs(x + y) <= NOISE * t"),
    ],
    "test_log.py": [
        ('return "console" if stream.isatty() else "json"', 'return "json"'),
        (' and _is_journal(environment["JOURNAL_STREAM"], stream):', ":"),
    ],
    "test_doctor.py": [("os.path.abspath(seen.config) != os.path.abspath(config.path)", "False")],
    "test_jobs.py": [("bool(job.stderr_size)", "True"), ('get_number(request, "offset", 0, 2**31)', "0")],
    "test_files_that_are_read.py": [
        ('sys.stdin.reconfigure(encoding="utf-8", errors="replace")', "pass"),
        ('sys.stdin is None or not hasattr(sys.stdin, "buffer")', "sys.stdin is None"),
        ('b"" if sys.stdin is None else', 'b"" if False else'),
    ],
    "test_init_files.py": [('return first == f"{MARK}{_checksum(body)}"', "return first.startswith(MARK)")],
    "test_tree_file.py": [
        ("kept = [] if prune else [", "kept = [] if not prune else ["),
        ("    if command.base and command.base != revision_of(present):", "    if False:"),
        ("kept = [] if prune else [", "kept = ["),
        ("parent = renamed.get(pool.parent, pool.parent)\n        pools[", "parent = pool.parent\n        pools["),
        ("if table.id != pool.id and pool.id in given:", "if False:"),
        ("    return is_same(normalise(kind, present)[0], attributes)", "    return False"),
        ('default.settings.acl_required and "acl_required" not in tree.attributes:', "False:"),
    ],
    # --- which of several schedulers is asked and believed
    "test_route.py": [
        ("if self.highest is not None and term < self.highest:", "if False:"),
        ("pause_s = max(pause_s, PATIENCE * state.took_s)", "pass"),
        ("state.due_s = now_s + standbys * period_s", "state.due_s = now_s + period_s"),
        ("other.asked_at_s + PATIENCE * max(period_s, other.took_s)", "other.asked_at_s"),
        ("is_loopback(host) and not is_loopback(parts.hostname or ", "False and not is_loopback(parts.hostname or "),
    ],
    "test_link_to_several.py": [
        ("if not self._terms.accept(reply.term):", "if False:"),
        ("elsewhere=status == 404 or status >= 500", "elsewhere=True"),
    ],
    "test_client_of_several.py": [
        ('is_safe = method == "GET" or was_not_done(str(refusal))', "is_safe = True"),
        ('if method != "GET" and not isinstance(error, _UnreachedError):', "if False:"),
    ],
    "test_judge.py": [
        ("if is_as_found and is_sent and seen.is_reloaded:", "if is_as_found and is_sent:"),
        ("(seen.is_inherited or not is_known) and (is_same", "not is_known and (is_same"),
    ],
    "test_unit_limits.py": [
        ('if event.kind == "removed"}', 'if event.kind != "removed"}'),
        ("WriteVerdict.STORED: self._undo,", "WriteVerdict.STORED: self._respect_or_undo,"),
    ],
    "test_unit_troubles.py": [
        ("                self._missing = True\n", "                pass\n"),
        ("or now_s < hold.asking.since_s + ANSWER_PATIENCE_S)", "or True)"),
    ],
    "test_looks.py": [
        ("if seen is None or not job.settings.is_ceiling else", "if seen is None else"),
        ("watched[each.turn % stride :: stride]", "watched[::stride]"),
        ("checked_s = now_s - each.period_s / 4", "checked_s = now_s - each.period_s"),
    ],
    "test_first_aid.py": [("if now_us not in [each[0] for each in ours] or", "if False and")],
    "test_overdraft.py": [
        ("elif now_s - self.since_s > self.timeout_s:", "elif now_s - self.since_s >= self.timeout_s:"),
        ("(job.start_time, job.job_id), reverse=True)", "(job.start_time, job.job_id))"),
    ],
    "test_assigned.py": [
        ("and (not order.memory_limit or self._was_below_limit(ended))", "and not order.memory_limit"),
        ("if account.pw_uid == 0 and not config.executor.allow_root:", "if False:"),
        ("order.interruptible or was_over):", "order.interruptible):"),
        ("min(job.kill_at_s, now_s + stop.timeout_s)", "now_s + stop.timeout_s if first else job.kill_at_s"),
        ("if now_s - job.received_at_s > order.wait_s:", "if missing and now_s - job.received_at_s > order.wait_s:"),
        ("(resources.cpu or 0.0) - other_cores - sum(", "(resources.cpu or 0.0) - sum("),
    ],
    # --- cgroups, systemd, how jobs run
    "test_settings.py": [
        (
            "burst_us = min(burst_us if burst_ratio is None else int(burst_ratio * quota_us), quota_us)",
            "burst_us = burst_us if burst_ratio is None else int(burst_ratio * quota_us)",
        ),
        ('if step.value != getattr(before, f"{step.name}_us")]', "]"),
        ("if cores > ancestor.cores:", "if False:"),
        ("        quota_us -= 1\n", "        pass\n"),
        ("burst_us = min(burst_us, restored.quota_us)", "pass"),
        ("if current.cores in [each.cores for each in ours]:", "if False:"),
        ("after.quota_us / before.period_us <= before", "after.quota_us / before.period_us > before"),
    ],
    "test_cgroup_jobs.py": [
        ("if not _remove_empty(directory) and each != parent:", "if False:"),
        ("if reclaimed and mount == self.hierarchies.cpu_root:", "if reclaimed or mount == self.hierarchies.cpu_root:"),
        ('            _write(directory, "memory.swap.max", "0\\n", optional=True)\n', ""),
    ],
    "test_unit_properties.py": [("math.ceil(round(cores / STEP_CORES, 6))", "math.ceil(cores / STEP_CORES)")],
    "test_parse.py": [("int(last or first) - int(first) + 1", "int(last or first) - int(first)")],
    "test_systemd_executor_values.py": [
        ('word.replace("$", "$$") for word', "word for word"),
        ("max(1, round(launch.cpu_limit * 1e6))", "round(launch.cpu_limit * 1e6)"),
        (', ("MemorySwapMax", "t", 0)]', "]"),
        ('if any("\\0" in word for word in words):', "if False:"),
    ],
    "test_keeper_logs.py": [("            self._rotate()\n", "            self._size = 0\n")],
    # --- the scheduler
    "test_repeats.py": [
        ("request.user, remember if is_kept else None)", "request.user, None)"),
        ("    replies.restore(scheduler.remembered.values())\n", ""),
    ],
    "test_usage_accounting.py": [("return (slots, report.current_cpu_limit", "return (slots, report.cpu_limit")],
    "test_service_and_store.py": [('{"volumes": volumes, ', '{"volumes": {}, ')],
    "test_admission.py": [
        ("if len(made) >= limit:", "if len(made) > limit:"),
        ("added[pool] = added.get(pool, 0) + 1", "added[pool] = 0"),
        ("        if pool in old:\n            continue\n", ""),
    ],
    "test_group_commit.py": [
        ("sequence=state.sequence + 1 + ahead.count", "sequence=state.sequence + 1"),
        ("pool.operation_count + ahead.operations[pool] >=", "pool.operation_count >="),
        ("pool.running_operation_count + ahead.running[pool] <", "pool.running_operation_count <"),
        ("if ahead.count and (", "if False and ("),
        ("is_open = ahead.add(", "ahead.add("),
        ("                if group:\n                    break\n", ""),
        ("                    if len(group) > 1:\n", "                    if False:\n"),
    ],
    "test_placement.py": [
        ("if own > 1.0 + SHARE_EPS else least, own)", "if False else least, own)"),
        ("        free = subtract(free, job.limits)\n", ""),
    ],
    "test_lending.py": [("if above in path or above in lenders)", "if above in path)")],
    "test_job_orders.py": [("job.was_reported or job.first_sent_at is None or _is", "job.was_reported or _is")],
    "test_preemption_on_heartbeats.py": [
        (" and wants_jobs(element) and starvation.still_starves(element, level)", " and wants_jobs(element)"),
        ("is_there and wants_jobs(element) and starvation", "is_there and starvation"),
    ],
    "test_starvation.py": [
        ("if since < now - _timeout_s(element):", "if since <= now - _timeout_s(element):"),
        ("parent.aggressive_starvation or bool(", "bool("),
        ("min(1.0, element.operation.needed_job_count / coefficient)", "1.0"),
        ("elif not pool.says_min_share:", "elif pool.says_min_share:"),
        ("pools_starve = tree.config.settings.enable_pool_starvation", "pools_starve = True"),
        (
            "max(usage_share(element)), max(element.fair_share)\n    # If",
            "usage_share(element)[1], element.fair_share[1]\n    # If",
        ),
        ("        element.below_since = None\n        return", "        return"),
    ],
    "test_cost.py": [
        ("return lost * max(now - told, 0.0) / ran_s", "return lost"),
        ("not job.began_at <= told <= now + CLOCK_SKEW_S", "not job.began_at <= told"),
        ("job.is_active and is_allowed and spared_until(job) <= self.now", "job.is_active and is_allowed"),
        ("jobs.sort(key=_loss_by_size, reverse=True)", "jobs.sort(key=_loss_by_size)"),
        ("core_seconds\n        above = above.parent", "core_seconds\n        break"),
    ],
    "test_guarantees.py": [
        ("is_allowed = self.by_guarantee or is_permitted", "is_allowed = is_permitted"),
        ("(by_guarantee or not is_protected_by_count", "(not is_protected_by_count"),
        ("claims_guarantee(branch) and after < max(branch.fair_share) + EPSILON", "claims_guarantee(branch)"),
        ("if not keeps_guarantee(above, add(losses.lost.get(above, ZERO), each.whole)):", "if False:"),
        ("(guarantee is ZERO or not is_below_guarantee(element)):", "True:"),
    ],
    "test_gangs.py": [
        ('if operation.record.is_gang and kind != "preempted" and not alone:', "if False:"),
        ("if _is_stopping(state, element):\n        return GANG_STOPS", "if False:\n        return GANG_STOPS"),
        ("if is_gang and not all(self._may_go(other) for other in candidate.jobs):", "if False:"),
        ("if plan is None or len(plan.victims) > budget:", "if plan is None:"),
        ("rests[element] = now +", "rests[element] = now + 0 *"),
        ("    return limit - recent\n", "    return math.inf\n"),
        ('gangs.broken = dict.fromkeys(state.gangs.live, "one of its jobs ended before")', "gangs.broken = {}"),
        ("if tightest is None and min(room) <= 0.0:", "if tightest is None:"),
    ],
    "test_retry_rules.py": [
        ("elif times >= rule.times:", "elif times > rule.times:"),
        ("elif total >= rule.per_operation:", "elif False:"),
        ("is_counted, times = False, times - 1", "times -= 1"),
        ("after.pop(job.cookie, None)", "pass"),
        ("after[job.cookie] = msgspec.structs.replace(before, due=0.0)", "del after[job.cookie]"),
    ],
    "test_retries.py": [
        ("int(min(memory * rule.memory_growth, terms.most_memory))", "int(memory * rule.memory_growth)"),
        ("if retry.due <= now:\n            self.later", "if retry.due <= now + 60.0:\n            self.later"),
        ("        retries.follow(state, operation, now)\n        if is_cut_short", "        if is_cut_short"),
        ('is_excused = note.outcome == "retried"', "is_excused = False"),
        ("(operation.needed or operation.waits_whole)", "operation.needed"),
        (" and not record.is_gang and not operation.waits_whole", " and not record.is_gang"),
        ("job.cookie = operation.retries.choose(operation.record, job.task)", "pass"),
        ("if bound is not None and bound < most:", "if False:"),
        ("memory_limit=job.grown_memory, incarnation", "incarnation"),
        ("or job.must_end or retries.is_for_end(job, record)", "or job.must_end"),
        ("            operation.retries.keep(job.task, job.cookie, retry, now)\n", "            pass\n"),
    ],
    "test_job_failures.py": [
        (' or (job.state in ("aborted", "lost") and job.has_run)', ' or job.state in ("aborted", "lost")'),
        ("fails or job.must_end or retries", "fails or retries"),
        ("may_have_run=job.first_sent_at is not None", "may_have_run=False"),
        (" and not known.must_end:", ":"),
        ('finished.start_time is not None or finished.state == "lost"', "finished.start_time is not None"),
        ("self.rank = int(job.task.fail_on_job_restart)", "self.rank = 0"),
        ("return (not job.task.fail_on_job_restart, job.start_time,", "return (True, job.start_time,"),
        ("return has_begun and any(", "return any("),
        ('if job.state == "failed" and not is_excused and record.suspend_on_job_failure:', "if False:"),
        ("suspended=False, suspended_for=None", "suspended=False"),
        ("if len(operation.restarted) > MAX_RESTARTED_JOBS:", "if False:"),
        (" or job.exit_code == task.restart_exit_code", ""),
        ('not is_of_before and state == "failed" and bool(job.task.interruption_signal)', "False"),
        ("or record.exit_code:", "or False:"),
    ],
    "test_preemption.py": [
        ('is_new = job.state == "starting" and job.start_time >= self.now', "is_new = False"),
        ("settings.preemption_check_starvation and element", "element"),
        ("and job.preemptibility == AGGRESSIVELY_PREEMPTIBLE", "or job.preemptibility == AGGRESSIVELY_PREEMPTIBLE"),
        ("lost.update({above: add(lost.get(above, ZERO), job.usage) for above in path})", "pass"),
        ("guarantee += element.last_integral_ratio", "pass"),
        ("return (True, is_beyond,", "return (True, False,"),
        ("return (False, is_beyond,", "return (False, False,"),
        (" and target.operation.record.allow_reclaimed:", ":"),
        ("self.unordered[job.node] += job.ordinary_cores", "pass"),
    ],
    "test_job_class.py": [
        ("is_required = job.element.operation.record.require_reclaimed", "is_required = False"),
        ("find_task(element, free, node.unordered_cores)", "find_task(element, free)"),
        ("job.reclaimed and (about is None or bool(about.idle_class))", "job.reclaimed"),
        ("    job.reclaimed = record.reclaimed\n", ""),
        ("job.has_ceiling = lifecycle.recall_ceiling(job, record)", "pass"),
        ("job.has_ceiling = lifecycle.recall_ceiling(job, known)", "pass"),
        ("says = find_ceiling_rule(job.element.parent, job.element.tree)", "pass"),
        ("return tree.config.settings.set_container_cpu_limit", "return None"),
        ("return not is_in_idle_class(job) if says is None", "return not job.reclaimed if says is None"),
        ("cpu_monitor_moves=job.element.tree.config.settings.cpu_monitor_moves,", ""),
        ("job.reclaimed = known.reclaimed", "pass"),
        ("node.ordered_cores = node.ordered_cores - job.limits[CPU] if node.jobs else 0.0", "pass"),
        ("rooms if is_free else gangs.within_orders(rooms)", "rooms"),
    ],
    "test_backfill.py": [
        ("if job.backfill_until is not None and self.keeps_room:", "if False:"),
        ("if _takes_back(state, jobs[0].element, now):", "if False:"),
        ("    if _takes_back(state, element, now):", "    if False:"),
        ("return room_beside(room, gangs.sum_backfilled(node))", "return room"),
        ("if min(ends) <= ready_at else", "if True else"),
        ("if operation.overstay_count > most:", "if False:"),
        ("    job.backfill_until = record.backfill_until\n", ""),
        ("(now <= (job.backfill_until or 0.0), -job.sequence)", "-job.sequence"),
        ("if fits(free, order) and fits_orders(unordered, order[CPU]):\n            break", "pass"),
        ("enable_backfill and element.operation.record.allow_reclaimed", "enable_backfill"),
    ],
    "test_state_nodes.py": [
        ("if heartbeat.sequence <= node.sequence:", "if heartbeat.sequence < node.sequence:"),
        ("if heartbeat.incarnation != node.incarnation:", "if False:"),
        ("(live.is_active or live.keeps_place)", "live.is_active"),
        ('job.state == "starting" and job.is_stored and', 'job.state == "starting" and'),
        ("start.cookie < 0):\n        resume(state, start, now)\n", "start.cookie < 0):\n        pass\n"),
        ("        if has_unstored_starts:\n            state.awaited[node.id] = None\n", ""),
    ],
    "test_cpu_time.py": [("if value and value > most:", "if value and value > 1e300:")],
    "test_reconnection.py": [('state == "completed" and counted.state in GIVEN_UP', 'state == "completed"')],
    # --- what is told to service managers, of rights, of changes; which host is late
    "test_scheduler_notify.py": [
        ("if now_s - seen_s <= vitals.period_s else []", "if True else []"),
        ("good_updates += broken < max(len(names), 1)", "good_updates += not broken"),
        ("good_updates += broken < max(len(names), 1)", "good_updates += 1"),
    ],
    "test_lead.py": [
        ("self.lease_s * (1 - 1 / GUARD)", "self.lease_s"),
        ("heard._leased(sent_s) if self.may_answer(self.term, now_s) else heard", "heard._leased(sent_s)"),
        ("until_s=-math.inf, next_s=now_s + rest_s)", "until_s=-math.inf, next_s=now_s)"),
        ('lease.leader if lease.left_s > 0 else ""', "lease.leader"),
    ],
    "test_rights.py": [
        ("if access.owner == user.name and permission in access.owned:", "if access.owner == user.name:"),
        ("closed = access.closed_by or alone", "closed = alone"),
    ],
    "test_event_log.py": [
        ("if _is_dictionary(before) and _is_dictionary(after) and (before or after):", "if False:"),
        ("            yield from _attribute_changes(name, pool.name, *place)\n", ""),
    ],
    "test_rollout_commands.py": [("    if _has_news(seen, before.base):", "    if True:")],
    "test_every_option.py": [
        ("    return limit - recent\n", "    return limit\n"),
        ("        if record.at <= now - 60.0:\n            break\n        recent", "        recent"),
    ],
    "test_rollout_watch.py": [("errors += restarts[node_id] > 1", "pass")],
    "test_nodes_filter.py": [("near {before!r} <here> {after!r}", "near {after!r} <here> {before!r}")],
    "test_tokens.py": [("return self._users.get(digest)", "return next(iter(self._users.values()), None)")],
    # --- why CPU stands idle, and what else clients ask
    "test_idle_situations.py": [
        ('if record.preemption_mode == "graceful" and satisfaction(element) >= 1.0:', "if False:"),
        ("tried=tuple(UncordonNode(each.id) for each in nodes),", "tried=(),"),
        ("state.rules = replace(state.rules, spare=ZERO)", "state.rules = state.rules"),
    ],
    "test_stuck.py": [("if not record.enable_limiting_ancestor_check or not orders:", "if not orders:")],
    "test_sqlite_store.py": [("if found[0] is not None and found[0] != self._files[0]:", "if False:")],
    # --- parts of files whose tests are tables or laws
    "test_access.py": [
        ('"object_only" if depth else "descendants_only"', '"object_only" if not depth else "descendants_only"')
    ],
    "test_integral.py": [
        ("upper = greatest(old, capacity)", "upper = capacity"),
        (
            "max(round_half_away(now * 1e6) - round_half_away(before * 1e6), 0.0)",
            "abs(round_half_away(now * 1e6) - round_half_away(before * 1e6))",
        ),
        ("node.last_share_ratio = max(granted)", "node.last_share_ratio = min(granted)"),
    ],
    "test_replay.py": [
        ('max(row["total_cpu_s"] - before["total_cpu_s"], 0.0)', '(row["total_cpu_s"] - before["total_cpu_s"])'),
        ('"pressure_ratio": (0.0, 1.0,', '"pressure_ratio": (-1.0, 1.0,'),
        ("if len(window) < s.vote_window_size:", "if len(window) <= s.vote_window_size:"),
    ],
    "test_functions.py": [
        ("needed >= 1.0 or any(d > limit", "needed > 1.0 or any(d > limit"),
        ("(x_end, _END, child, segment, rise)", "(x_end, _END, child, segment, ZERO)"),
        ("active[child, segment] = ramps[child, segment]", "pass"),
        ("path.values[vertex] = (v[0], v[1], v[2], v[3], v[4])", "path.values[vertex] = (v[0], v[1], v[2], 0.0, 0.0)"),
    ],
    "test_gang_remainders.py": [
        ("not any(each[0].operations[each[1]].usage_share)", "any(each[0].operations[each[1]].usage_share)"),
        ("ends = is_step or (function.horizon == 1.0 and segment == len(function.starts) - 1)", "ends = node is root"),
        ("[NOTHING if n in passed else self.operations[n].function for", "[self.operations[n].function for"),
        ("(node.whole, node.passed)  #", "(node.whole,)  #"),
    ],
    "test_gang_shares.py": [
        (
            "(weights - own) * (needed - strong) / (room + strong - needed)",
            "weights * (needed - strong) / (room + strong)",
        ),
        ("room = limit - parent.fair_share[r] if parent.is_root or limit < 1.0 else 0.0", "room = 0.0"),
    ],
    "test_fair_share_update.py": [
        ("float(math.trunc(scaled))", "float(round(scaled))"),
        ("bound = add(node.strong, MARGIN)", "bound = node.strong"),
        ("        node.strong = least(node.strong, node.limits_share)\n", "        pass\n"),
    ],
    "test_cypress.py": [("user is not request.user and not request.user", "user is not request.user and request.user")],
    "test_orchid.py": [
        ("lambda view, e: _least_share(view, view.best_allocation(e))", "lambda view, e: max(view.best_allocation(e))"),
        ('"below_fair_share_since": _below_since,', '"below_fair_share_since": _starving_since,'),
    ],
    "test_operations.py": [
        ("if len(table) > MAX_OPTIONS:", "if False:"),
        ("        if left > 0:\n            needed[task.name]", "        if left >= 0:\n            needed[task.name]"),
    ],
    "test_json_lists.py": [("self.made_of = self.until = -math.inf", "self.until = -math.inf")],
    "test_hidden_operations.py": [("operation_id.startswith(FORETOLD) or rights.user.admin:", "rights.user.admin:")],
    "test_node_counters.py": [("max(found.ends.get(result, 0), 0) for", "found.ends.get(result, 0) for")],
    "test_notify.py": [("if self._good is None:", "if not self._good:")],
    "test_agent_sockets.py": [("os.chmod(path, 0o660)", "os.chmod(path, 0o664)")],
    "test_containers.py": [
        ("given.cpu_quota, given.cpu_period or DEFAULT_PERIOD_US", "given.cpu_quota, DEFAULT_PERIOD_US"),
        ("status_code != 200:\n        raise StatusError", "status_code >= 400:\n        raise StatusError"),
    ],
    "test_operation_commands.py": [
        ("            self._is_aborted = True\n", "            pass\n"),
        ("        if not self._operation:", "        if False:"),
    ],
    "test_scheduler_reporter.py": [
        ("if not reply.is_good and reply.status != 409:", "if not reply.is_good:"),
        ("if result is not None and result.retry else 0", "if result is not None and result.retry else failures"),
        ("        follow_redirects=False,\n    )\n", "        follow_redirects=True,\n    )\n"),
        ("self._sent_about = (about if is_news else self._sent_about) if answer", "self._sent_about = about if answer"),
    ],
    "test_distribution.py": [("least(rest, proposed)", "least(total, proposed)")],
    "test_explain_peak.py": [('s = msgspec.structs.replace(s, direction="up-only")', "pass")],
    "test_config.py": [('{"min_cpu_limit": 0.1}', "{}")],
    "test_demand.py": [("max(before_s - begin_s + spacing_s, duration_s or 0.0)", "before_s - begin_s + spacing_s")],
    "test_policy.py": [
        ("now_s < state.started_at_s + s.startup_boost_s", "now_s <= state.started_at_s + s.startup_boost_s"),
        ("s.vote_decision_threshold else window[1:]", "s.vote_decision_threshold else window"),
    ],
    "test_exporter.py": [("ordered_cores - job.current_cores, 0.0),", "ordered_cores - job.state.limit_cores, 0.0),")],
}
"""Name of a test file below tests/unit -> the mistakes that it notices: a text that stands once in the package, and
what it becomes."""


def find_file(old: str) -> Path:
    """The file of the package that holds the text. Raises ValueError where it stands nowhere or more than once."""
    counts = {path: path.read_text().count(old) for path in (ROOT / "cpumond").rglob("*.py")}
    found = [path for path, count in counts.items() if count]
    if sum(counts.values()) != 1:
        raise ValueError(f"stands {sum(counts.values())} times in the package, not once")
    return found[0]


def run_tests(copy: str, names: Collection[str]) -> int:
    """pytest's exit code for these files over the package in ``copy``; NOT_ENDED after LIMIT_S."""
    files = [str(path) for name in names for path in UNIT.rglob(name)]
    assert len(files) == len(names), f"not one file each: {names}"
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider", *files]
    # Nothing is imported from the present directory, which has the package too.
    environment = {**os.environ, "PYTHONPATH": copy, "PYTHONSAFEPATH": "1"}
    try:
        return subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, check=False, timeout=LIMIT_S
        ).returncode
    except subprocess.TimeoutExpired:
        return NOT_ENDED


def copy_package(place: str) -> str:
    """The package without any mistake, in a directory of its own."""
    shutil.copytree(ROOT / "cpumond", Path(place, "cpumond"))
    return place


def try_mistake(mistake: tuple[str, str, str]) -> str:
    """What became of one (test file, text, other text), in a word or a sentence."""
    tests, old, new = mistake
    with tempfile.TemporaryDirectory(prefix="cpumond-mutation-") as place:
        try:
            file = Path(copy_package(place), find_file(old).relative_to(ROOT))
        except ValueError as error:
            return str(error)
        file.write_text(file.read_text().replace(old, new))
        code = run_tests(place, [tests])
    return "noticed" if code == FAILED else "SURVIVES" if code == 0 else f"pytest ended with {code}"


def main(words: list[str]) -> int:
    known = [(tests, old, new) for tests, mistakes in MUTATIONS.items() for old, new in mistakes]
    wanted = [each for each in known if not words or any(word in " ".join(each) for word in words)]
    with tempfile.TemporaryDirectory(prefix="cpumond-mutation-") as place:
        code = run_tests(copy_package(place), {tests for tests, _, _ in wanted})
    if code:
        print(f"the tests fail without a mistake, too: pytest ended with {code}")
        return 1
    missed = 0
    with ThreadPoolExecutor(WORKERS) as workers:
        for (tests, old, new), outcome in zip(wanted, workers.map(try_mistake, wanted), strict=True):
            missed += outcome != "noticed"
            print(f"{outcome}: {old.strip()!r} -> {new.strip()!r} by {tests}", flush=True)
    print(f"{len(wanted)} mistakes, {len(wanted) - missed} noticed")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
