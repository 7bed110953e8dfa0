"""A node that sends heartbeats all the time, in a process of its own: how much the scheduler does before it answers,
and how large it gets.

``honest_node.py HOST:PORT PID NAME PAUSE_S`` prints a line when it has begun, and its figures when its input ends. A
wait is counted in CPU time of the scheduler's first thread: other work of the machine has no part in it.
"""

import http.client
import json
import select
import sys
from pathlib import Path


def read_cpu_s(pid: int) -> float:
    return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9


def read_memory(pid: int) -> int:
    """Resident, bytes."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmRSS")) * 1024


def main(address: str, pid: int, name: str, pause_s: float) -> None:
    client = http.client.HTTPConnection(address, timeout=250)

    def post(path: str, body: dict[str, object]) -> tuple[int, str]:
        client.request("POST", path, json.dumps(body))
        answer = client.getresponse()
        return answer.status, answer.read().decode()

    incarnation = {"node_id": name, "incarnation": "one"}
    status, text = post("/api/v1/nodes", {**incarnation, "resources": {"cpu": 1.0, "memory": 1000, "user_slots": 1}})
    failures = [] if status == 200 else [text]
    rest = largest = read_memory(pid)
    waits: list[float] = []
    print("begun", flush=True)
    is_over = False
    while not is_over:
        is_over = bool(select.select([sys.stdin], [], [], pause_s)[0])
        begun_s = read_cpu_s(pid)
        beat = {**incarnation, "sequence": len(waits) + 1, "sent_at": 0.0, "cpu_capacity": 1.0, "jobs": []}
        status, text = post("/api/v1/heartbeats", beat)
        waits.append(read_cpu_s(pid) - begun_s)
        if status != 200:
            failures.append(text)
        largest = max(largest, read_memory(pid))
    print(
        json.dumps(
            {
                "count": len(waits),
                "longest_cpu_s": max(waits, default=0.0),
                "failures": failures[:3],
                "growth": largest - rest,
            }
        )
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
