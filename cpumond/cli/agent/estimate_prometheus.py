"""Workloads from the history of a Prometheus: metrics of cAdvisor, or of cpumond's agents."""

from __future__ import annotations

import bisect
import itertools
import math
import statistics
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from operator import itemgetter
from typing import Final, Literal

import msgspec

from cpumond.agent.discovery.workloads import Workload, classify, pick_workloads
from cpumond.cli.agent.estimate_findings import Findings, WorkloadRow
from cpumond.core.decode import ContentError, decode_json
from cpumond.core.errors import AccessError, UnavailableError
from cpumond.core.measures import format_duration, format_span
from cpumond.core.words import count, escape
from cpumond.monitor.estimate import Timeline, UseWatch
from cpumond.monitor.model import CpuReading, LimitRule, MonitorSettings

Metrics = Literal["auto", "cadvisor", "cpumond"]

TIMEOUT_S: Final = 60.0
MAX_POINTS: Final = 5000
"""Maximum points of each series in one query; Prometheus answers with 11 000 at most."""
FIRST_POINTS: Final = 100
"""Points of each series in the first query, before the number of series is known."""
MAX_ANSWER: Final = 500_000
"""Maximum points of one answer; each takes about 300 bytes while the answer is read."""
MAX_KEPT: Final = 30_000_000
"""Maximum points of all answers together, 16 bytes each."""
PROBE_S: Final = 900.0
"""Seconds of history from which the scrape interval is determined."""
DEFAULT_SCRAPE_S: Final = 30.0
LOOKBACK_S: Final = 300.0
"""Seconds for which Prometheus repeats the last value of a series (its default)."""
MAX_CHECKS: Final = 30_000_000
"""Maximum checks of all rules over all workloads (some minutes of computing): to stay below, checks get rarer."""
GAP_STEPS: Final = 1.5
MAX_SAID: Final = 300
MAX_QUERY: Final = 1500

Series = Mapping[float, float]
"""Values by time (seconds since 1970), in order."""
Labels = Mapping[str, str]


class Samples(Series):
    """A series in two arrays, 16 bytes a sample."""

    __slots__ = ("_times", "_values")

    def __init__(self, samples: Iterable[tuple[float, float]] = ()) -> None:
        self._times, self._values = array("d"), array("d")
        for at_s, value in samples:
            self.append(at_s, value)

    def append(self, at_s: float, value: float) -> None:
        """Add a sample if it is later than all others."""
        if not self._times or at_s > self._times[-1]:
            self._times.append(at_s)
            self._values.append(value)

    def __getitem__(self, at_s: float) -> float:
        number = bisect.bisect_left(self._times, at_s)
        if number == len(self._times) or self._times[number] != at_s:
            raise KeyError(at_s)
        return self._values[number]

    def __iter__(self) -> Iterator[float]:
        return iter(self._times)

    def __len__(self) -> int:
        return len(self._times)


class _Result(msgspec.Struct):
    metric: dict[str, str] = {}
    values: list[tuple[float, str]] = []


class _Data(msgspec.Struct):
    result: list[_Result] = []


class _Answer(msgspec.Struct):
    status: str
    data: _Data | None = None
    error: str = ""
    warnings: list[str] = []


class Prometheus:
    """Client that reads ranges of samples from one Prometheus over HTTP.

    ``url``: its address, with a path if a proxy serves it below that; ``token``: a bearer token, "" for none. Raises
    ConfigError for a ``url`` that is no address."""

    def __init__(self, url: str, token: str = "", timeout_s: float = TIMEOUT_S) -> None:
        from cpumond.core.base_url import parse_base_url

        self.url = str(parse_base_url(url, "--prometheus", "--token-file", 9090)).rstrip("/")
        self._token = token
        self._timeout_s = timeout_s
        self.warnings: set[str] = set()
        self._kept = 0

    def read_range(
        self, expression: str, start_s: float, end_s: float, step_s: float
    ) -> list[tuple[dict[str, str], Series]]:
        """Return labels and samples of each series of ``expression``: a sample every ``step_s``, finite values only.

        Raises UnavailableError without a usable answer or for too many samples, AccessError for a refused token."""
        merged: dict[tuple[tuple[str, str], ...], Samples] = {}
        begin_s, points = start_s, FIRST_POINTS
        while begin_s <= end_s:
            until_s = min(begin_s + (points - 1) * step_s, end_s)
            query = {"query": expression, "start": f"{begin_s:.3f}", "end": f"{until_s:.3f}", "step": f"{step_s:.3f}"}
            results = self._ask("query_range", query)
            for result in results:
                series = merged.setdefault(tuple(sorted(result.metric.items())), Samples())
                before = len(series)
                for at_s, text in result.values:
                    value = float(text)
                    if math.isfinite(value):
                        series.append(at_s, value)
                self._kept += len(series) - before
            if self._kept > MAX_KEPT:
                raise UnavailableError(
                    f"{self.url}: has more than {MAX_KEPT // 1_000_000} million samples for this query, too many for "
                    "the memory; reduce it with --match, a longer --step or a shorter --since"
                )
            points = min(max(MAX_ANSWER // max(len(results), 1), 10), MAX_POINTS)
            begin_s = until_s + step_s
        return [(dict(labels), series) for labels, series in merged.items() if series]

    def _ask(self, path: str, query: dict[str, str]) -> list[_Result]:
        import httpx2

        headers = {"authorization": f"Bearer {self._token}"} if self._token else {}
        transport = httpx2.HTTPTransport(verify=self.url.startswith("https:"), trust_env=False)
        try:
            with httpx2.Client(transport=transport, timeout=self._timeout_s, trust_env=False) as client:
                address = f"{self.url}/api/v1/{path}"
                if len(query["query"]) <= MAX_QUERY:
                    answer = client.get(address, params=query, headers=headers)
                else:
                    # Some gateways refuse POST, but a URL cannot hold a long query.
                    answer = client.post(address, data=query, headers=headers)
        except httpx2.TimeoutException:
            raise UnavailableError(
                f"{self.url}: Prometheus did not answer in {self._timeout_s:g} s; query less with --since, a longer "
                "--step or --match"
            ) from None
        except httpx2.ConnectError as error:
            raise UnavailableError(
                f"no Prometheus answers on {self.url} ({error}); give --prometheus its address"
            ) from None
        except (httpx2.RequestError, httpx2.InvalidURL) as error:
            raise UnavailableError(f"{self.url}: the connection to Prometheus failed: {error}") from None
        return self._read(answer.status_code, answer.content)

    def _read(self, status: int, content: bytes) -> list[_Result]:
        try:
            answer = decode_json(content, _Answer)
            problem = ""
        except ContentError as error:
            answer, problem = _Answer("error"), str(error)
        said = f": {self._sanitize(answer.error)}" if answer.error else ""
        if status in (401, 403):
            needs = "requires a token; give it one with --token-file"
            have = "refuses the token of --token-file" if self._token else needs
            raise AccessError(f"{self.url}: {have} (HTTP status {status}{said})")
        if status == 404 or 300 <= status < 400:
            raise UnavailableError(
                f"{self.url}: there is no Prometheus at this address (HTTP status {status}); is a path missing?"
            )
        if status >= 400 or (answer.status != "success" and not problem):
            raise UnavailableError(f"{self.url}: Prometheus answered with an error (HTTP status {status}){said}")
        if problem or answer.data is None:
            raise UnavailableError(
                f"{self.url}: the answer cannot be decoded: {self._sanitize(problem) or 'it has no data'}; "
                "is this a Prometheus?"
            )
        self.warnings.update(self._sanitize(each) for each in answer.warnings)
        try:
            for result in answer.data.result:
                for _, text in result.values:
                    float(text)
        except ValueError:
            raise UnavailableError(f"{self.url}: the answer has a value that is no number") from None
        return answer.data.result

    def _sanitize(self, text: str) -> str:
        """A text from the server as one line of output, without control characters and without the token."""
        text = text.replace(self._token, "...") if self._token else text
        return escape(" ".join(text.split())[:MAX_SAID])


class RecordedWorkload(msgspec.Struct):
    """History of one workload by time: CPU seconds, cores requested, and enforcement periods."""

    workload: Workload
    host: str
    usage: Series
    ordered: Series
    is_limited: bool | None
    periods: Series = {}
    throttled: Series = {}


def read_history(
    prometheus: Prometheus, metrics: Metrics, match: str, since_s: float, step_s: float, now_s: float,
    settings: Mapping[LimitRule, MonitorSettings], report: Callable[[str], None],
) -> Findings:  # fmt: skip
    """Return the findings of the ``since_s`` seconds before ``now_s`` (since 1970).

    ``match``: label matchers that every series must meet, "" for none. Raises UnavailableError, AccessError."""
    notes: list[str] = []
    chosen, step_s = _choose(prometheus, metrics, match, since_s, step_s, now_s, notes)
    end_s = math.floor(now_s / step_s) * step_s
    start_s = end_s - math.floor(since_s / step_s) * step_s

    def read(expression: str) -> list[tuple[dict[str, str], Series]]:
        report(f"querying {expression}")
        return prometheus.read_range(expression, start_s, end_s, step_s)

    reader = read_cadvisor if chosen == "cadvisor" else read_cpumond
    histories = [each for each in reader(read, match, notes) if len(each.usage) > 1]
    if not histories:
        raise UnavailableError(
            f"{prometheus.url}: no workload has two samples in the last {format_span(since_s)}; extend the time with "
            "--since"
        )
    check_s = next(iter(settings.values())).check_period_s
    checks = sum(len(each.usage) for each in histories) * step_s / check_s * len(settings)
    if checks > MAX_CHECKS:
        check_s = min(check_s * math.ceil(checks / MAX_CHECKS), step_s)
        notes.append(f"because of the number of samples, a check is computed every {format_duration(check_s)}")
    timeline = Timeline(0.0, end_s - start_s)
    rows = []
    for number, history in enumerate(histories, 1):
        report(f"computing workload {number} of {len(histories)}")
        rows.append(_replay(history, step_s, min(check_s, step_s), start_s, end_s, settings, timeline))
    known = [row for row in rows if row.estimate.watched_s > 0.0]
    if not known:
        raise UnavailableError(f"{prometheus.url}: the samples are too far apart for a --step of {step_s:g} s")
    length_s = max(max(each.usage) for each in histories) - min(min(each.usage) for each in histories)
    if length_s < since_s * 0.9:
        notes.append(f"Prometheus has only {format_span(length_s)} of it")
    if missing := sum(row.estimate.missing_s > 0.01 * length_s for row in known):
        notes.append(f"{count(missing, 'workload has', 'workloads have')} gaps in the history; gaps are left out")
    named_notes = [f"Prometheus warns: {each}" for each in sorted(prometheus.warnings)]
    return Findings("prometheus", prometheus.url, length_s, since_s, step_s, None, known, timeline, notes, named_notes)


USAGE: Final = {"cadvisor": "container_cpu_usage_seconds_total", "cpumond": "cpumond_job_cpu_seconds_total"}


def _choose(
    prometheus: Prometheus, metrics: Metrics, match: str, since_s: float, step_s: float, now_s: float, notes: list[str]
) -> tuple[str, float]:
    """Choose the metrics (a key of USAGE) and the step in seconds, a multiple of the scrape interval if known."""
    probed = {}
    probe_s = min(max(20.0 * step_s, PROBE_S), since_s)
    for name in USAGE if metrics == "auto" else (metrics,):
        expression = f"timestamp({USAGE[name]}{{{match}}})"
        series = prometheus.read_range(expression, now_s - probe_s, now_s, step_s)
        if not series:
            # Even the newest sample may be hours old.
            series = prometheus.read_range(expression, now_s - since_s, now_s, max(LOOKBACK_S, since_s / 2000))
            stamps = [max(stamps.values()) for _, stamps in series]
            last_s = min(max(stamps, default=now_s), now_s)
            begin_s = max(last_s - probe_s, now_s - since_s)
            series = (prometheus.read_range(expression, begin_s, last_s, step_s) if stamps else []) or series
        if series:
            probed[name] = series
    if not probed:
        names = " nor ".join(USAGE.values()) if metrics == "auto" else USAGE[metrics]
        raise UnavailableError(
            f"{prometheus.url}: has no {names} in the last {format_span(since_s)}"
            f"{f' with {match}' if match else ''}; scrape cAdvisor (of each kubelet: /metrics/cadvisor) or cpumond's "
            "agents, or leave --prometheus out to watch this host"
        )
    chosen = max(probed, key=lambda name: len(probed[name]))
    if len(probed) > 1:
        other = next(name for name in probed if name != chosen)
        notes.append(f"metrics of {chosen} are used; there are also metrics of {other}: --metrics {other} uses those")
    scrape_s = _find_scrape_s([stamps for _, stamps in probed[chosen]])
    if scrape_s == 0.0:
        step_s = max(step_s, DEFAULT_SCRAPE_S)
        notes.append(f"the scrape interval is unknown, so the step is {format_duration(step_s)}")
    if scrape_s > step_s * 1.01 or (scrape_s > 0.0 and abs(step_s / scrape_s - round(step_s / scrape_s)) > 0.01):
        step_s = scrape_s * max(math.ceil(step_s / scrape_s - 0.01), 1)
        notes.append(f"scraped every {format_duration(scrape_s)}, so the step is {format_duration(step_s)}")
    return chosen, step_s


def _find_scrape_s(stamps: Iterable[Series]) -> float:
    """The scrape interval in seconds, rounded to a tenth, from the times of samples; 0 if no series has two samples."""
    distances = []
    for series in stamps:
        times = sorted(set(series.values()))
        distances += [later - earlier for earlier, later in itertools.pairwise(times)]
    return round(statistics.median(distances), 1) if distances else 0.0


Reader = Callable[[str], list[tuple[dict[str, str], Series]]]


def read_cadvisor(read: Reader, match: str, notes: list[str]) -> list[RecordedWorkload]:
    """Return histories from cAdvisor's metrics, of cgroups that are named by their paths, or by pod and container."""
    found: dict[tuple[str, str], tuple[Labels, Series]] = {}
    usage = read(f"sum without (cpu) ({USAGE['cadvisor']}{{{match}}})")
    clusters = _find_cluster_labels(labels for labels, _ in usage)
    for labels, series in usage:
        if not _is_pause(labels):
            place = _identify(labels, clusters)
            known = found.get(place)
            # Two series of one cgroup come from two scrape jobs: at equal times the sample of the first series counts.
            found[place] = (known[0], Samples(sorted({**series, **known[1]}.items()))) if known else (labels, series)
    chosen: dict[tuple[str, str], Workload] = {}
    for host in sorted({host for host, _ in found}):
        paths = {key: key.strip("/") for own, key in found if own == host and key.startswith("/")}
        keys = {path: key for key, path in paths.items()}
        for workload in pick_workloads(paths.values(), lambda _: True):
            chosen[host, keys[workload.path]] = _name_by_labels(workload, found[host, keys[workload.path]][0])
        for own, key in found:
            if own == host and not key.startswith("/"):
                chosen[own, key] = _name_by_labels(Workload("", "container", key), found[own, key][0])
    quotas, periods, runs, throttled = (
        {_identify(labels, clusters): series for labels, series in read(f"{name}{{{match}}}")}
        for name in (
            "container_spec_cpu_quota",
            "container_spec_cpu_period",
            "container_cpu_cfs_periods_total",
            "container_cpu_cfs_throttled_periods_total",
        )
    )
    # This metric has the labels of a host and no labels of a container.
    cores = {_find_host(labels, clusters): series for labels, series in read(f"machine_cpu_cores{{{match}}}")}
    histories = []
    for place, workload in chosen.items():
        quota, period = quotas.get(place, {}), periods.get(place, {})
        cores_at = ((at, q / (period.get(at) or 100_000.0)) for at, q in quota.items() if q > 0.0)
        # Of equal values one after another, only the first is kept.
        limits = Samples(next(equal) for _, equal in itertools.groupby(cores_at, itemgetter(1)))
        host_cores = cores.get(place[0], {})
        is_limited = True if limits else False if host_cores else None
        histories.append(
            RecordedWorkload(
                workload, place[0], found[place][1], limits or host_cores, is_limited, runs.get(place, {}),
                throttled.get(place, {}),
            )
        )  # fmt: skip
    if unknown := sum(each.is_limited is None for each in histories):
        notes.append(
            f"{count(unknown, 'workload has', 'workloads have')} no limit, and no machine_cpu_cores says how many CPUs "
            "the host has: they are left out"
        )
    notes.append("a limit that cpumond or another program had lowered looks like the request")
    return histories


def _identify(labels: Labels, clusters: tuple[str, ...]) -> tuple[str, str]:
    key = labels.get("id") or "/".join(
        labels.get(each, "") for each in ("namespace", "pod", "container", "name") if labels.get(each)
    )
    return _find_host(labels, clusters), key


CLUSTER_LABELS: Final = ("cluster", "cluster_name", "cluster_id", "k8s_cluster", "datacenter", "region", "environment")
"""Labels that name a cluster; hosts of different clusters in one Prometheus may have the same name."""


def _find_cluster_labels(every: Iterable[Labels]) -> tuple[str, ...]:
    """The ``CLUSTER_LABELS`` whose values differ between series."""
    values: dict[str, set[str]] = {name: set() for name in CLUSTER_LABELS}
    for labels in every:
        for name, known in values.items():
            known.add(labels.get(name, ""))
    return tuple(name for name, known in values.items() if len(known) > 1)


def _find_host(labels: Labels, clusters: tuple[str, ...]) -> str:
    """The host's name, prefixed with the values of the labels ``clusters``."""
    host = labels.get("node") or labels.get("instance", "")
    return "/".join([*(labels[name] for name in clusters if labels.get(name)), host])


def _is_pause(labels: Labels) -> bool:
    image = labels.get("image", "").rpartition("/")[2]
    is_pause = image.partition(":")[0].partition("@")[0] == "pause"
    return is_pause or labels.get("container") == "POD" or labels.get("name", "").startswith("k8s_POD_")


def _name_by_labels(workload: Workload, labels: Labels) -> Workload:
    """``workload`` with the names that the container engine gave; a cgroup's path has only ids."""
    if labels.get("pod") and labels.get("container"):
        name = "/".join(labels[each] for each in ("namespace", "pod", "container") if labels.get(each))
        return msgspec.structs.replace(workload, kind="kubernetes", name=name)
    given = labels.get("name", "")
    if given and not given.startswith("/") and workload.kind in ("docker", "podman", "containerd", "container"):
        return msgspec.structs.replace(workload, name=given)
    return workload


def read_cpumond(read: Reader, match: str, notes: list[str]) -> list[RecordedWorkload]:
    usage = read(f"{USAGE['cpumond']}{{{match}}}")
    clusters = _find_cluster_labels(labels for labels, _ in usage)

    def identify(labels: Labels) -> tuple[str, str]:
        return _find_host(labels, clusters), labels.get("job_id", "")

    ordered = {identify(labels): series for labels, series in read(f"cpumond_job_cpu_limit_cores{{{match}}}")}
    infos: dict[tuple[str, str], Labels] = {}
    moved = set()
    for labels, _ in read(f"cpumond_job_info{{{match}}}"):
        infos[identify(labels)] = labels
        if labels.get("mode") not in ("shadow", "off"):
            moved.add(identify(labels))
    histories = []
    for labels, series in usage:
        key = identify(labels)
        info = infos.get(key, {})
        path = info.get("cgroup", "").strip("/")
        known = classify(path)
        operation = info.get("operation_id", "")
        workload = Workload(
            path, known[0].kind if known else "cgroup", key[1], f"operation {operation}" if operation else ""
        )
        limits = ordered.get(key, {})
        histories.append(RecordedWorkload(workload, key[0], series, limits, True if limits else None))
    if moved:
        notes.append(
            f"{count(len(moved), 'job')} had a limit that cpumond moved: while that limit held a job back, its demand "
            "is unknown"
        )
    return histories


def _replay(
    history: RecordedWorkload, step_s: float, check_s: float, start_s: float, end_s: float,
    settings: Mapping[LimitRule, MonitorSettings], timeline: Timeline,
) -> WorkloadRow:  # fmt: skip
    """Run every rule of ``settings`` over one history; time 0 of the estimate is ``start_s``."""
    times = list_times(history.usage, step_s, end_s)
    ordered = _fill_forward(history.ordered, times)
    known = next((value for value in ordered if value is not None), None)
    watch = UseWatch(known or 0.0, settings if known else {}, GAP_STEPS * step_s, timeline)
    previous: CpuReading | None = None
    for at_s, cores in zip(times, ordered, strict=True):
        if cores is not None and known:
            watch.move_hard(cores)
        periods = int(history.periods.get(at_s, previous.nr_periods if previous else 0))
        throttled = int(history.throttled.get(at_s, previous.nr_throttled if previous else 0))
        reading = CpuReading(history.usage[at_s], at_s - start_s, 0, periods, throttled)
        for each in interpolate(previous, reading, check_s, GAP_STEPS * step_s):
            watch.add(each)
        previous = reading
    return WorkloadRow(history.workload, watch.conclude(), history.is_limited, history.host)


def list_times(usage: Series, step_s: float, end_s: float = -math.inf) -> list[float]:
    """The times of samples in order, without repetitions of the last value before a gap or before ``end_s``.

    Prometheus repeats the last value of a series for LOOKBACK_S after its last sample."""
    times = sorted(usage)
    kept: list[float] = []
    for at_s in times:
        if kept and at_s - kept[-1] > GAP_STEPS * step_s:
            _drop_repeated(kept, usage)
        kept.append(at_s)
    if kept and end_s - kept[-1] > GAP_STEPS * step_s:
        _drop_repeated(kept, usage)
    return kept


def _drop_repeated(times: list[float], usage: Series) -> None:
    while len(times) > 1 and usage[times[-1]] == usage[times[-2]]:
        times.pop()


def interpolate(before: CpuReading | None, now: CpuReading, check_s: float, longest_s: float) -> Iterator[CpuReading]:
    """Yield readings every ``check_s`` from ``before`` to ``now``, for even usage; after a gap, only at ``now``."""
    if before is not None:
        length_s = now.at_s - before.at_s
        if length_s <= longest_s and now.total_cpu_s >= before.total_cpu_s:
            parts = max(round(length_s / check_s), 1)
            used, at_s = now.total_cpu_s - before.total_cpu_s, before.at_s
            periods, throttled = now.nr_periods - before.nr_periods, now.nr_throttled - before.nr_throttled
            for number in range(1, parts):
                share = number / parts
                yield CpuReading(
                    before.total_cpu_s + used * share, at_s + length_s * share, 0,
                    before.nr_periods + int(periods * share), before.nr_throttled + int(throttled * share),
                )  # fmt: skip
    yield now


def _fill_forward(series: Series, times: list[float]) -> list[float | None]:
    """Return the last known value at each time; for times before the first known value, the first one."""
    if not series:
        return [None] * len(times)
    last = series[min(series)]
    return [last := series.get(at_s, last) for at_s in times]
