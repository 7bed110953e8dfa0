"""How long a look-up of a name keeps the scheduler's loop busy: ``python tests/bench/names.py``.

10 000 live operations and the 1000 finished ones that are kept, a third of them with access lists; a user who is no
administrator. Milliseconds, of 20 look-ups the shortest and the longest.
"""

from __future__ import annotations

import random
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import msgspec
from scheduler_world import World

from cpumond.api.finding import find_matches
from cpumond.scheduler.access import Rights
from cpumond.scheduler.model import OperationRecord
from cpumond.scheduler.rights.entries import AccessEntry
from cpumond.scheduler.rights.users import User
from cpumond.scheduler.settings.operations import finish
from cpumond.scheduler.state import install

COUNT = 10_000
LOOKUPS = 20


def make_rights(denies: bool) -> tuple[Rights, list[OperationRecord]]:
    """A user's view of a state with the operations; ``denies``: an entry of the tree denies somebody to read."""
    world = World(max_operation_count=10**6, max_operation_count_per_pool=10**6)
    acl = ({"action": "deny", "subjects": ["mallory"], "permissions": ["read"]},) if denies else ()
    for number in range(20):
        world.create_pool(f"pool-{number}", **({"acl": list(acl)} if acl else {}))
    entry = (AccessEntry("allow", ("eve", "team"), ("read", "manage")),)
    draw = random.Random(1)
    template = None
    for number in range(2 * COUNT):
        if template is None:
            template = world.record(world.start("pool-0", user="ann"))
        made = "-".join(f"{draw.getrandbits(32):x}" for _ in range(4))
        pool = f"pool-{number % 20}"
        trees = {name: msgspec.structs.replace(each, pool=pool) for name, each in template.trees.items()}
        record = msgspec.structs.replace(
            template, id=made, sequence=number + 10, title=f"train model {number:05d} of the night", trees=trees,
            user=f"user-{number % 200}", acl=entry if number % 3 == 0 else (),
        )  # fmt: skip
        install.install_operation(world.state, record, world.now)
        if number % 2:
            install.install_operation(world.state, finish(record, "completed", world.now, "", {}), world.now)
    state = world.state
    records = [*(each.record for each in state.operations.values()), *state.finished.values()]
    return Rights(state, User("eve")), records


def main() -> None:
    for denies in (False, True):
        rights, records = make_rights(denies)
        live, done = records[COUNT // 2], records[-7]
        print(f"{'some pools deny reading' if denies else 'nobody is denied'}: {len(rights.state.operations)} live, "
              f"{len(rights.state.finished)} finished")  # fmt: skip
        for what, name, all_of in (
            ("a whole id", live.id, False), ("the beginning of an id", live.id[:9], False),
            ("a title", live.title, False),
            ("the beginning of every title", "train", False), ("of a finished one's title", done.title[:-3], False),
            ("nothing", "no such thing", False), ("-", "-", False), ("Tab after nothing", "", True),
            ("Tab after a letter", "a", True), ("Tab after a title", "train model 0", True),
        ):  # fmt: skip
            took = []
            for _ in range(LOOKUPS):
                fresh = Rights(rights.state, rights.user)
                begun = time.perf_counter()
                found = find_matches(fresh, "operation", name, all_of=all_of, limit=20)
                took.append((time.perf_counter() - begun) * 1e3)
            print(f"  {what:30} {min(took):7.2f} to {max(took):7.2f} ms, {found.total} found")


if __name__ == "__main__":
    main()
