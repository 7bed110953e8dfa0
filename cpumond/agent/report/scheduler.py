"""The link to ``cpumond scheduler``: it registers the node, sends heartbeats, and gets orders in the responses.

One thread makes one request at a time, so responses come in the order of the requests. After any failure, the newest
heartbeat is retried. The scheduler repeats an order in each response until it is carried out, so a response may be
lost. Among several addresses the link finds the leader (``core/route.py``); it ignores responses of a lower term."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Final, TypeVar

import httpx2
import msgspec
import structlog

from cpumond.agent.config import SchedulerOptions
from cpumond.agent.report.mailbox import AGAIN, Again, HttpReply, Mailbox, SendFailure, make_client, make_failure, post
from cpumond.agent.report.token import check_token, read_token
from cpumond.core.answers import ReporterStats
from cpumond.core.base_url import parse_base_url
from cpumond.core.decode import ContentError, decode_json
from cpumond.core.difference import Differences
from cpumond.core.route import Route, Terms, backoff_s, is_standby, standby_period_s
from cpumond.core.tls import make_client_context
from cpumond.core.wire import (
    AgentAbout,
    Heartbeat,
    HeartbeatAnswer,
    JobLog,
    JobReply,
    JobRequest,
    LogRequest,
    NodeHeartbeat,
    NodeRegistration,
    NodeResources,
    RegistrationAnswer,
)

NODES: Final = "/api/v1/nodes"
HEARTBEATS: Final = "/api/v1/heartbeats"
LOGS: Final = "/api/v1/logs"
REPLIES: Final = "/api/v1/replies"

MAX_ANSWER_BYTES: Final = 16 * 2**20
"""Maximum length of a response, which may contain hundreds of jobs to start; a longer one is a failure."""

MAX_SENTENCE: Final = 1000
"""Maximum number of characters of the scheduler's texts that are shown."""

REQUESTS_PER_ANSWER: Final = 4
REQUESTS_S: Final = 1.0
"""Maximum seconds by which the requests in one response delay the next heartbeat; twice that if the last one hangs."""

REFUSED: Final = "status 422"
"""Kind of the failure if the scheduler understands a registration but does not allow it."""

EARLIER_RUN: Final = NodeRegistration("earlier run", "earlier run", NodeResources(0.0))
"""Stands for an earlier run's registration, if the scheduler refuses this run's registration but takes heartbeats."""

REQUEST_ATTEMPTS: Final = 5
REMEMBERED_REQUESTS: Final = 1000
MAX_LOGGED_TERMS: Final = 100

MAX_ASKED_PERIOD_S: Final = 10.0
"""Maximum period of heartbeats in seconds that a busy scheduler may ask for. A separate setting of the scheduler, 60 s
by default, is the time until a node counts as silent."""

_log = structlog.get_logger()
_Message = TypeVar("_Message")

UNIX: Final = "unix:"
"""Prefix of an address that is the path of a unix socket."""
AT_SOCKET: Final = "http://localhost"


class _Refusal(msgspec.Struct):
    """The part of an error response of the scheduler that is read."""

    error: str


class _StandbyError(Exception):
    """The scheduler is a standby; ``leader`` is the leader's address according to it, None if it names none."""

    def __init__(self, sentence: str, leader: str | None) -> None:
        super().__init__(sentence)
        self.leader = leader


class _TermError(Exception):
    """The response has a lower term than an earlier response."""


class SchedulerLink:
    """Registers the node at one of ``options.addresses`` and posts the newest heartbeat until the scheduler accepts it.

    ``on_answer`` gets each accepted response, once and in order, with the monotonic time in seconds when the heartbeat
    was sent. ``read_log`` returns the end of a log that a user requested. ``carry_out`` carries out a request and
    returns the reply; None if that takes longer than the given seconds, so that the scheduler repeats the request. The
    link's thread calls these functions; they must not raise. ``rng`` draws the waits. Raises ConfigError if
    ``options.url`` or ``options.token`` is unusable. Later problems appear only in the log and in ``stats``."""

    def __init__(
        self,
        options: SchedulerOptions,
        registration: NodeRegistration,
        on_answer: Callable[[HeartbeatAnswer, float], None],
        read_log: Callable[[LogRequest], JobLog],
        carry_out: Callable[[JobRequest, float], JobReply | None],
        rng: random.Random | None = None,
    ) -> None:
        addresses = [
            url if url.startswith(UNIX) else str(parse_base_url(url, "scheduler.url", "scheduler.token_file", 9757))
            for url in options.addresses or ("",)
        ]
        rng = rng or random.SystemRandom()
        self._route = Route(addresses, options.retry_max_s, rng)
        needs_tls = any(address.startswith("https:") for address in addresses)
        self._context = make_client_context(options.ca_file, "scheduler.ca_file") if needs_tls else None
        token = options.token.encode("utf-8", "surrogatepass")
        self._token = check_token(token, "scheduler.token") if token else ""
        self._options = options
        self._rng = rng
        self._on_answer = on_answer
        self._read_log = read_log
        self._carry_out = carry_out
        self._lock = threading.Lock()
        """Guards the next five attributes. Only the link's thread uses the attributes after these."""
        self._wanted = registration
        self._known: NodeRegistration | None = None
        self._registered: RegistrationAnswer | None = None
        self._change_error = ""
        self._scheduler: tuple[str, int | None, int] = (addresses[0], None, 0)
        self._terms = Terms()
        self._term: int | None = None
        self._followed: tuple[str, int | None] | None = None
        """Address and term of the last accepted response."""
        self._logged_terms: set[tuple[str, int | None]] = set()
        self._period_s = 0.0
        self._differences = Differences()
        self.about: AgentAbout | None = None
        """Facts about the agent, which are sent if the scheduler asks for them and does not have them already."""
        self._sent_about: AgentAbout | None = None
        self._asks_about = self._knows_stderr_size = False
        self._asked_at_s = 0.0
        self._refused_change: NodeRegistration | None = None
        self._change_failures = 0
        self._change_at_s = 0.0
        self._demand = ""
        self._taken_since_demand = True
        self._logged_dropped = self._logged_broken = False
        self._attempts: dict[str, int] = {}
        """Request id -> number of failed attempts to send the reply; REQUEST_ATTEMPTS if there must be no other."""
        self.shown_url = addresses[0]
        self._client = self._turn_to(addresses[0])
        self._mailbox = Mailbox("link", self, options.timeout_s, options.retry_max_s, rng)

    def submit(self, heartbeat: Heartbeat) -> None:
        """Leave ``heartbeat`` for the thread; it replaces a heartbeat that still waits."""
        self._mailbox.submit(heartbeat)

    def close(self, timeout_s: float) -> None:
        self._mailbox.close(timeout_s)

    def end(self) -> None:
        self._client.close()

    def register(self, registration: NodeRegistration) -> None:
        """Register the node again before the next heartbeat, because the node's resources or tags have changed.

        If the scheduler refuses the change, the old registration stays valid; the change is retried."""
        with self._lock:
            self._wanted = registration

    def stats(self) -> ReporterStats:
        """Return the statistics so far. Without another error, ``last_error`` is that of a refused registration."""
        stats = self._mailbox.stats()
        with self._lock:
            error = stats.last_error or self._change_error
        return msgspec.structs.replace(stats, last_error=error)

    @property
    def registered(self) -> RegistrationAnswer | None:
        """The scheduler's response to the present registration; None if there is none yet."""
        with self._lock:
            return self._registered

    @property
    def period_s(self) -> float:
        """Heartbeat period in seconds asked by the scheduler, at most ``MAX_ASKED_PERIOD_S``; 0 if it asks for none."""
        with self._lock:
            return self._period_s

    @property
    def scheduler(self) -> tuple[str, int | None, int]:
        """The address in use, the term of the last response, and the number of responses ignored for a lower term."""
        with self._lock:
            return self._scheduler

    def deliver(self, heartbeat: Heartbeat, timeout_s: float) -> SendFailure | Again | None:
        """Send one heartbeat. After a failure, choose the address for the next attempt."""
        leader: str | None = None
        try:
            result = self._exchange(heartbeat, timeout_s)
        except _StandbyError as error:
            leader, result = error.leader, SendFailure("standby", str(error))
        except _TermError as error:
            result = SendFailure("term refused", str(error), elsewhere=True)
        except Exception as error:  # after any error the next heartbeat must be tried
            result = make_failure(error, self.shown_url, timeout_s)
        if isinstance(result, Again):
            return result
        if result is None or not result.retry:
            self._route.taken()
            self._follow()
            return result
        now_s = time.monotonic()
        if result.kind == "standby":
            period_s = standby_period_s(max(self._options.heartbeat_period_s, self._period_s))
            pause_s = self._route.standby(leader, period_s, self._asked_at_s, now_s)
        elif result.elsewhere:
            pause_s = self._route.unanswered(self._asked_at_s, now_s)
        else:
            pause_s = self._route.refused(now_s)
        if self._route.current != self.shown_url:
            before, self._client = self._client, self._turn_to(self._route.current)
            self.shown_url = self._route.current
            before.close()
        with self._lock:
            self._scheduler = (self.shown_url.rstrip("/"), None, self._terms.refused_total)
        return msgspec.structs.replace(result, pause_s=pause_s)

    def _turn_to(self, address: str) -> httpx2.Client:
        """Use ``address`` for all further requests; return a client for it."""
        path = address.removeprefix(UNIX) if address.startswith(UNIX) else None
        self._base = httpx2.URL(AT_SOCKET if path else address)
        return make_client(self._options.timeout_s, address, self._context, path)

    def _follow(self) -> None:
        """Record the address and the term of a scheduler that accepted a message; log it if one of them has changed."""
        url = self.shown_url.rstrip("/")
        with self._lock:
            self._scheduler = (url, self._term, self._terms.refused_total)
        before, self._followed = self._followed, (url, self._term)
        if before is not None and before != self._followed:
            _log_safely(
                _log.info, "scheduler_changed", url=url, term=self._term, before=before[0], term_before=before[1]
            )

    def _exchange(self, heartbeat: Heartbeat, timeout_s: float) -> SendFailure | Again | None:
        with self._lock:
            wanted, known = self._wanted, self._known
        is_due = known is None or wanted != self._refused_change or time.monotonic() >= self._change_at_s
        if wanted != known and is_due:
            failure = self._register(wanted, timeout_s)
            if failure is None:
                return AGAIN
            if known is None and (failure.kind != REFUSED or self._send(heartbeat, timeout_s) is not None):
                return failure
            # The scheduler still has the node's old registration. Without heartbeats, the node's jobs would be lost.
            self._put_off(wanted, failure)
            if known is None:
                with self._lock:
                    self._known = EARLIER_RUN
                return None
        return self._send(heartbeat, timeout_s)

    def _send(self, heartbeat: Heartbeat, timeout_s: float) -> SendFailure | Again | None:
        sent_at_s = time.monotonic()
        knows_size, self._knows_stderr_size = self._knows_stderr_size, False
        if heartbeat.finished_jobs and not knows_size:
            finished = [msgspec.structs.replace(end, stderr_size=msgspec.UNSET) for end in heartbeat.finished_jobs]
            heartbeat = msgspec.structs.replace(heartbeat, finished_jobs=finished)
        told, about = self._differences.make(heartbeat), self.about
        asks, self._asks_about = self._asks_about, False
        is_news = about is not None and asks and about != self._sent_about
        if is_news:
            # A scheduler of an older version refuses unknown fields, and may take over at any time: decide anew.
            told = NodeHeartbeat(**{**msgspec.structs.asdict(told), "about": about})
            # Until the scheduler has answered, it is unknown which facts it has.
            self._sent_about = None
        reply = self._ask(HEARTBEATS, msgspec.json.encode(told), timeout_s)
        if not reply.is_good and reply.status != 409:
            return self._make_failure(reply)
        answer = self._decode(reply, HeartbeatAnswer)
        if isinstance(answer, SendFailure):
            return answer if reply.is_good else self._make_failure(reply)
        if answer.register and not answer.accepted:
            return self._obey_demand(reply, answer.reason)
        if not reply.is_good:
            return self._make_failure(reply)
        if answer.full and not answer.accepted and told is not heartbeat:
            return AGAIN
        self._asks_about, self._knows_stderr_size = answer.knows_about is not None, answer.knows_stderr_size
        if not answer.accepted:
            return self._give_up(f"{reply.url}: the heartbeat was dropped: {self._sanitize(answer.reason)}")
        self._taken_since_demand, self._logged_dropped = True, False
        self._differences.taken(heartbeat, answer)
        self._sent_about = (about if is_news else self._sent_about) if answer.knows_about else None
        with self._lock:
            self._period_s = min(answer.period_s or 0.0, MAX_ASKED_PERIOD_S)
        self._hand_over(answer, sent_at_s)
        if (answer.requests or answer.logs) and not self._mailbox.is_closing():
            # Replies to requests are sent first: users wait for them, and logs may be long.
            self._answer_requests([*answer.requests, *answer.logs], heartbeat.node_id)
        return None

    def _hand_over(self, answer: HeartbeatAnswer, sent_at_s: float) -> None:
        try:
            self._on_answer(answer, sent_at_s)
        except Exception as error:  # the next response repeats all orders
            if not self._logged_broken:
                self._logged_broken = True
                _log_safely(_log.error, "answer_not_obeyed", exc_info=error)

    def _give_up(self, sentence: str) -> SendFailure:
        """Drop a heartbeat that was refused because the scheduler had accepted it before; the first answer was lost."""
        if not self._logged_dropped:
            self._logged_dropped = True
            _log_safely(_log.warning, "heartbeat_dropped", error=sentence)
        return SendFailure("dropped", sentence, retry=False)

    def _register(self, wanted: NodeRegistration, timeout_s: float) -> SendFailure | None:
        """Register the node; return the failure if the scheduler refused it. Raises if the scheduler did not answer."""
        reply = self._ask(NODES, msgspec.json.encode(wanted), timeout_s)
        if not reply.is_good:
            return self._make_failure(reply)
        answer = self._decode(reply, RegistrationAnswer)
        if isinstance(answer, SendFailure):
            return answer
        with self._lock:
            self._known, self._registered, self._change_error = wanted, answer, ""
        self._refused_change, self._change_failures = None, 0
        log = _log.warning if answer.warning else _log.info
        warning = self._sanitize(answer.warning)
        _log_safely(log, "node_registered", tree=answer.tree, warning=warning, reason=self._demand)
        self._demand = ""
        return None

    def _obey_demand(self, reply: HttpReply, reason: str) -> SendFailure | Again:
        """Register again at once as demanded; fail if the scheduler accepted no heartbeat since its previous demand."""
        self._demand = self._sanitize(reason)
        with self._lock:
            self._known = self._registered = None
        if self._taken_since_demand:
            self._taken_since_demand = False
            return AGAIN
        advice = "it was registered just now; check that no other agent runs with this node_id"
        return SendFailure("register", f"{reply.url}: {self._demand}; {advice}")

    def _put_off(self, wanted: NodeRegistration, failure: SendFailure) -> None:
        if wanted != self._refused_change:
            self._refused_change, self._change_failures = wanted, 0
            _log_safely(_log.warning, "registration_refused", error=failure.sentence)
        self._change_failures += 1
        self._change_at_s = time.monotonic() + backoff_s(self._change_failures, self._options.retry_max_s, self._rng)
        with self._lock:
            self._change_error = failure.sentence

    def _answer_requests(self, requests: list[LogRequest | JobRequest], node_id: str) -> None:
        """Answer some of ``requests``, as time permits. The scheduler repeats the others in its next response."""
        end_s = time.monotonic() + REQUESTS_S
        open_requests = [each for each in requests if self._attempts.get(each.request_id, 0) < REQUEST_ATTEMPTS]
        for number, request in enumerate(open_requests[:REQUESTS_PER_ANSWER]):
            is_urgent = self._mailbox.has_newer() or self._mailbox.is_closing()
            if number > 0 and (is_urgent or time.monotonic() >= end_s):
                return
            path, body = self._make_answer(request, node_id, end_s)
            if body is None:
                return  # later requests must not be answered before this one
            error = self._send_answer(path, body, end_s)
            attempts = REQUEST_ATTEMPTS if error is None else self._attempts.get(request.request_id, 0) + 1
            self._attempts[request.request_id] = attempts
            if len(self._attempts) > REMEMBERED_REQUESTS:
                del self._attempts[next(iter(self._attempts))]
            if error is not None and attempts >= REQUEST_ATTEMPTS:
                event = "job_log_not_sent" if isinstance(request, LogRequest) else "job_reply_not_sent"
                _log_safely(_log.warning, event, job_id=request.job_id, error=error)

    def _make_answer(self, request: LogRequest | JobRequest, node_id: str, end_s: float) -> tuple[str, bytes | None]:
        """Return the path for a reply, and the reply; None in place of a reply that is not ready in time."""
        try:
            if isinstance(request, LogRequest):
                return LOGS, msgspec.json.encode(self._read_log(request))
            reply = self._carry_out(request, max(end_s - time.monotonic(), REQUESTS_S / 4))
            return REPLIES, None if reply is None else msgspec.json.encode(reply)
        except Exception as error:  # the waiting user gets the error
            problem = f"{type(error).__name__}: {error}"
            if isinstance(request, LogRequest):
                told = JobLog(node_id, request.request_id, error=self._sanitize(f"the log cannot be read: {problem}"))
                return LOGS, msgspec.json.encode(told)
            failed = JobReply(node_id, request.request_id, error=self._sanitize(f"{request.kind} failed: {problem}"))
            return REPLIES, msgspec.json.encode(failed)

    def _send_answer(self, path: str, body: bytes, end_s: float) -> str | None:
        """Send one reply. Return why that failed; None if it was accepted, or no user waits for it any more (404)."""
        timeout_s = min(max(end_s - time.monotonic(), REQUESTS_S / 4), self._options.timeout_s)
        try:
            reply = self._ask(path, body, timeout_s)
        except Exception as error:
            return make_failure(error, str(self._url(path)), timeout_s).sentence
        return None if reply.is_good or reply.status == 404 else self._make_failure(reply).sentence

    def _ask(self, path: str, body: bytes, timeout_s: float) -> HttpReply:
        """Make one request and return the whole response. Raises an exception that ``make_failure`` can describe."""
        if self._options.token_file and not self._options.token:
            # The token is read again for each attempt, because the file may be replaced while the agent runs.
            self._token = read_token(self._options.token_file)
        headers = {"Authorization": f"OAuth {self._token}"} if self._token else {}
        reply = post(self._client, self._url(path), body, headers, timeout_s, MAX_ANSWER_BYTES)
        if reply.problem is not None:
            raise reply.problem
        if not self._terms.accept(reply.term):
            raise _TermError(self._refuse_term(reply))
        self._term = reply.term
        if is_standby(reply.status, reply.leader, told := self._read_error(reply)):
            raise _StandbyError(f"{reply.url}: answered {reply.status}: {told}", reply.leader)
        return reply

    def _refuse_term(self, reply: HttpReply) -> str:
        """Return why the response is ignored. This is logged once for each address and term."""
        sentence = (
            f"{reply.url}: answered in term {reply.term}, but term {self._terms.highest} has begun: it lost the lead, "
            "so its response is ignored"
        )
        if (self.shown_url, reply.term) not in self._logged_terms and len(self._logged_terms) < MAX_LOGGED_TERMS:
            self._logged_terms.add((self.shown_url, reply.term))
            advice = "if an older state of the schedulers was restored on purpose, restart this agent"
            _log_safely(_log.warning, "term_refused", error=sentence, advice=advice)
        return sentence

    def _url(self, path: str) -> httpx2.URL:
        return self._base.copy_with(raw_path=self._base.raw_path.rstrip(b"/") + path.encode())

    def _make_failure(self, reply: HttpReply) -> SendFailure:
        """Describe a status that is not a success, with the scheduler's error sentence if there is one."""
        status, told = reply.status, self._read_error(reply)
        said = f"{reply.url}: answered {status}{f': {told}' if told else ''}"
        if status in (401, 403):
            return SendFailure("token refused", f"{said}; check scheduler.token and scheduler.token_file")
        if 300 <= status < 400:
            advice = "redirects are not followed, set scheduler.url to the final address"
            return SendFailure("redirect", f"{said}; {advice}", elsewhere=True)
        if not told:
            said += "; check that scheduler.url is the address of a cpumond scheduler"
        return SendFailure(f"status {status}", said, elsewhere=status == 404 or status >= 500)

    def _read_error(self, reply: HttpReply) -> str:
        """Return the error sentence in the scheduler's response; "" if there is none."""
        if not reply.is_good:
            with suppress(ContentError):
                return self._sanitize(decode_json(reply.content, _Refusal).error)
        return ""

    def _sanitize(self, text: str) -> str:
        """Make text from outside fit for a log line: printable, short, and without the token, which it may contain."""
        if self._token:
            text = text.replace(self._token, "...")
        return "".join(char if char.isprintable() else " " for char in text[:MAX_SENTENCE])

    def _decode(self, reply: HttpReply, kind: type[_Message]) -> _Message | SendFailure:
        try:
            return decode_json(reply.content, kind)
        except ContentError as error:
            said = f"{reply.url}: the response cannot be understood: {self._sanitize(str(error))}"
            advice = "check that scheduler.url is the address of a cpumond scheduler of this version"
            return SendFailure("answer", f"{said}; {advice}", elsewhere=True)


def _log_safely(log: Callable[..., object], event: str, **facts: object) -> None:
    """Log a line. A failure to write the log is ignored, because it must not end the thread."""
    with suppress(Exception):
        log(event, **facts)
