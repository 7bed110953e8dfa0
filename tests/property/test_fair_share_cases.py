"""The update gives the reference's numbers, and the slow literal one's on random trees (fair_share_update.md)."""

import gzip
import json
import random
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import fields
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from examples import ALL
from fair_share_cases import FAMILIES, random_case
from fair_share_oracle import compute

from cpumond.cli.fairshare.input import InputReader
from cpumond.fairshare import RESOURCES, ElementShares, FairShare, FairShareUpdater, UpdateResult

Record = dict[str, Any]

CASES = Path(__file__).parent.parent / "data" / "fair_share_cases.jsonl.gz"

TOLERANCE = 1e-9
"""Absolute for shares and ratios, relative for volumes."""

EXACT = {"kind", "dominant_resource", "fifo_index", "effective_fifo_index", "inferred_strong_guarantee_resources"}
SCALARS = {"burst_ratio", "total_burst_ratio", "resource_flow_ratio", "total_resource_flow_ratio", "last_share_ratio"}

SEEDS_PER_FAMILY = 20 if ALL else 12
SENSITIVE = {("degenerate", 14)}
"""Random trees so close to a jump that noise of 1e-12 in their amounts moves shares beyond the tolerance (19)."""


def read_records() -> dict[str, list[Record]]:
    """The records of the data set by family, sequences in the order of their steps."""
    families = defaultdict(list)
    with gzip.open(CASES, "rt", encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            families[record["family"]].append(record)
    for records in families.values():
        records.sort(key=lambda record: (record["sequence"] or "", record["step"]))
    return dict(families)


RECORDS = read_records()


def update(case: Record, reader: InputReader, updater: FairShareUpdater) -> UpdateResult:
    asked = reader.read(json.dumps(case).encode())
    return updater.update(asked.snapshot, asked.now, asked.previous_update_time)


def find_differences(result: UpdateResult, expected: Record) -> list[str]:
    """Where a result differs from an output object, in which omitted fields are 0 or null; [] if nowhere."""
    codes, expected_codes = ([error.code for error in result.errors], [error["code"] for error in expected["errors"]])
    found = [] if codes == expected_codes else [f"errors: {codes} for {expected_codes}"]
    if set(result.elements) != set(expected["elements"]):
        return [*found, f"elements: {sorted(set(result.elements) ^ set(expected['elements']))}"]
    for name, element in result.elements.items():
        given = expected["elements"][name]
        unknown = set(given) - {field.name for field in fields(ElementShares)}
        found += [f"{name}: unknown field {field}" for field in sorted(unknown)]
        for field in fields(ElementShares):
            value = getattr(element, field.name)
            found += [
                f"{name}.{path}: {ours!r} for {theirs!r}"
                for path, ours, theirs in pair_up(field.name, value, given.get(field.name))
                if not agree(field.name, ours, theirs)
            ]
    return found


def pair_up(path: str, ours: object, theirs: Any) -> Iterator[tuple[str, object, object]]:
    """Numbers and words of a field beside those expected of it."""
    if isinstance(ours, FairShare):
        given = theirs or {}
        assert set(given) <= {part.name for part in fields(FairShare)}
        for part in fields(FairShare):
            yield from pair_up(f"{path}.{part.name}", getattr(ours, part.name), given.get(part.name))
    elif isinstance(ours, Sequence) and not isinstance(ours, str):
        expected = theirs or [0.0] * 5
        assert len(ours) == len(expected) == 5
        yield from ((f"{path}[{r}]", *pair) for r, pair in enumerate(zip(ours, expected, strict=True)))
    else:
        yield path, ours, 0.0 if path in SCALARS and theirs is None else theirs


def agree(field: str, ours: Any, theirs: Any) -> bool:
    if field in EXACT:
        return bool(ours == theirs)
    bound = TOLERANCE * abs(theirs) if "volume" in field else TOLERANCE
    return bool(abs(ours - theirs) <= bound)


@pytest.mark.parametrize("family", sorted(RECORDS))
def test_every_record_of_the_reference_agrees(family):
    """Every field of every element of every record: sections 1 to 17, with the tolerances of section 19."""
    for record in RECORDS[family]:
        result = update(record["input"], InputReader(), FairShareUpdater())
        assert find_differences(result, record["output"]) == [], record["id"]


def test_the_data_set_is_complete():
    """All records are there, and one each of what only some have."""
    records = [record for family in RECORDS.values() for record in family]
    assert len(records) == len({record["id"] for record in records}) == 486
    assert {error["code"] for record in records for error in record["output"]["errors"]} == {29000, 29001, 29002}
    present = {field for record in records for element in record["output"]["elements"].values() for field in element}
    assert present == {field.name for field in fields(ElementShares)}


@pytest.mark.parametrize("family", [family for family in sorted(RECORDS) if RECORDS[family][0]["sequence"]])
def test_sequences_agree_with_the_state_carried_on_by_one_updater(family):
    """Volumes and last share ratios that a step gives are the state of the next one: sections 1 and 5."""
    for _, records in groupby(RECORDS[family], lambda record: record["sequence"]):
        reader, updater = InputReader(), FairShareUpdater()
        state: dict[str, Record] = {}
        for record in records:
            result = update(with_state(record["input"], state), reader, updater)
            assert find_differences(result, record["output"]) == [], record["id"]
            state = {
                name: {
                    "accumulated_volume": dict(zip(RESOURCES, element.accumulated_volume, strict=True)),
                    "last_share_ratio": element.last_share_ratio,
                }
                for name, element in result.elements.items()
            }


def with_state(case: Record, state: dict[str, Record]) -> Record:
    """The input with the state that its pools have been left in; pools that are new have the one they come with."""
    pools = [pool | {"integral": pool.get("integral", {}) | state.get(pool["name"], {})} for pool in case["pools"]]
    return case | {"pools": pools}


@pytest.mark.parametrize("family", FAMILIES)
def test_random_trees_give_what_the_literal_update_gives(family):
    """All sections, each tree on its own and all of them by one updater."""
    reader, updater = InputReader(), FairShareUpdater()
    for seed in range(SEEDS_PER_FAMILY):
        case = in_microseconds(random_case(random.Random(seed), family))
        result = update(case, reader, updater)
        if (family, seed) not in SENSITIVE:
            assert find_differences(result, compute(case)) == [], seed


def in_microseconds(case: Record) -> Record:
    """The case at times that are whole microseconds, so that no rounding of ties matters (section 17)."""
    times = {key: case[key] for key in ("now", "previous_update_time") if case[key] is not None}
    return case | {key: round(seconds, 6) for key, seconds in times.items()}
