"""Questions to nodes, and the nodes' answers.

Nodes connect to the scheduler, which never connects to nodes. Therefore each heartbeat response to a node contains the
question until the node has answered it, or until no caller waits for the answer any more."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import Final, Generic, TypeVar

import msgspec

from cpumond.core.wire import JobLog, JobReply, JobRequest, LogRequest
from cpumond.scheduler.model import TIMEOUT, TOO_MANY_REQUESTS, CommandError

TIMEOUT_S: Final = 10.0
MAX_WAITING: Final = 1000
MAX_PER_NODE: Final = 16
"""Maximum number of questions that wait for one node: a silent node must leave space for other nodes."""
MAX_PER_ANSWER: Final = 4
"""Maximum number of questions in one heartbeat response: the node answers them before its next heartbeat."""

Question = TypeVar("Question", LogRequest, JobRequest)
Answer = TypeVar("Answer", JobLog, JobReply)


@dataclass(slots=True, eq=False)
class _Waiting(Generic[Question, Answer]):
    node_id: str
    question: Question
    answer: asyncio.Future[Answer]
    readers: int = field(default=0)


class NodeQuestions(Generic[Question, Answer]):
    """Waiting questions of one kind. Only the event loop's thread may use them.

    ``what``: name of an answer in sentences. ``new_id``: returns the id of a new question. ``timeout_s``: real seconds.
    """

    def __init__(self, new_id: Callable[[], str], what: str, timeout_s: float = TIMEOUT_S) -> None:
        self.timeout_s = timeout_s
        self._new_id = new_id
        self._what = what
        self._waiting: dict[str, _Waiting[Question, Answer]] = {}
        """Waiting questions by id, oldest first."""
        self._shared: dict[tuple[str, Question], str] = {}
        """Node, and question without its id -> id of this question."""

    def __len__(self) -> int:
        return len(self._waiting)

    async def ask(self, node_id: str, question: Question, share: bool = True) -> Answer:
        """Return the node's answer to ``question``. The id of the question is set here.

        ``share``: callers that ask the same question at the same time share one answer. Raises CommandError if too many
        questions wait, or if the node does not answer in time."""
        key = (node_id, msgspec.structs.replace(question, request_id=""))
        waiting = self._waiting[self._shared[key]] if share and key in self._shared else self._add(*key, share)
        waiting.readers += 1
        try:
            # If one caller is cancelled, the others must still get the answer.
            return await asyncio.wait_for(asyncio.shield(waiting.answer), self.timeout_s)
        except TimeoutError:
            text = f"node {node_id} did not send the {self._what} within {self.timeout_s:g} s"
            raise CommandError(text, TIMEOUT) from None
        finally:
            waiting.readers -= 1
            if not waiting.readers:
                self._forget(waiting)

    def _add(self, node_id: str, question: Question, share: bool) -> _Waiting[Question, Answer]:
        of_node = sum(waiting.node_id == node_id for waiting in self._waiting.values())
        if of_node >= MAX_PER_NODE or len(self._waiting) >= MAX_WAITING:
            where, number = (f" from node {node_id}", of_node) if of_node >= MAX_PER_NODE else ("", len(self._waiting))
            raise CommandError(
                f"{number} {self._what}s{where} are already waiting, which is the limit; ask again in a moment",
                TOO_MANY_REQUESTS,
            )
        request_id = self._new_id()
        asked = msgspec.structs.replace(question, request_id=request_id)
        waiting = self._waiting[request_id] = _Waiting(node_id, asked, asyncio.get_running_loop().create_future())
        if share:
            self._shared[node_id, question] = request_id
        return waiting

    def _forget(self, waiting: _Waiting[Question, Answer]) -> None:
        question = waiting.question
        if self._waiting.pop(question.request_id, None) is None:
            return
        key = (waiting.node_id, msgspec.structs.replace(question, request_id=""))
        if self._shared.get(key) == question.request_id:
            del self._shared[key]

    def questions_for(self, node_id: str) -> list[Question]:
        """Return the questions for the response to a heartbeat of this node, oldest first."""
        if not self._waiting:
            return []
        mine = (waiting.question for waiting in self._waiting.values() if waiting.node_id == node_id)
        return list(islice(mine, MAX_PER_ANSWER))

    def take(self, answer: Answer) -> bool:
        """Pass an answer to the callers that wait for it. Returns False if no caller waits any more.

        Raises CommandError if a different node was asked."""
        waiting = self._waiting.get(answer.request_id)
        if waiting is None:
            return False
        if waiting.node_id != answer.node_id:
            raise CommandError(
                f"node {answer.node_id} was not asked for the {self._what} about job {waiting.question.job_id}"
            )
        self._forget(waiting)
        waiting.answer.set_result(answer)
        return True
