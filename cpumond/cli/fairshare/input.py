"""Input of ``fair-share``: a pool tree as one JSON object, or one object per line, turned into updates.

The form of input is described in ``cpumond fair-share --help``; null and absent both mean "not set". Every mistake
becomes one sentence with file, line, element and key."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, BinaryIO, Final, NoReturn, get_args

import msgspec

from cpumond.cli.options import open_input
from cpumond.core.decode import is_no_utf8
from cpumond.core.errors import FairShareInputError
from cpumond.core.words import did_you_mean, named, one_of, quoted
from cpumond.fairshare.folding import limits_of_total
from cpumond.fairshare.resources import UNLIMITED, ZERO, Vector, exact_cpu, least, round_half_away
from cpumond.fairshare.tree import ROOT, GuaranteeType, IntegralGuarantees, Mode, Operation, Options, Pool, Snapshot
from cpumond.fairshare.validate import (
    check_max_share_ratio,
    check_times,
    check_total_resources,
    check_volume,
    order_pools,
    validate,
)

MAX_BYTES: Final = 256 * 1024 * 1024
"""Maximum bytes of an update; a file that is not JSON may be one endless line."""

FIRST_BYTES: Final = 64 * 1024
"""Bytes of a line that are read to check that it may be JSON."""

TRUNCATED: Final = "Input data was truncated"
"""The decoder's error for an object that ends too early."""

MAX_SHOWN: Final = 60
"""Maximum characters of a wrong value in a message."""


class ResourcesForm(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    """Absolute amounts; memory in bytes, cpu in cores. None means "not set"."""

    user_slots: float | None = None
    cpu: float | None = None
    gpu: float | None = None
    memory: float | None = None
    network: float | None = None


class OptionsForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``options``; the defaults are those of ``cpumond.fairshare.Options``."""

    main_resource: str | None = None
    integral_pool_capacity_saturation_period_s: float | None = None
    integral_smooth_period_s: float | None = None
    step_function_for_gang_operations: bool | None = None
    fifo_reordering: bool | None = None
    improved_fair_share_by_fit_factor: bool | None = None
    improved_distribution_gap: bool | None = None
    share_gang_remainders: bool | None = None
    fast_fifo: bool | None = None


class RootIntegralForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``root.integral``: the root is a pool without guarantees, so it has only options of free volume."""

    can_accept_free_volume: bool | None = None
    should_distribute_free_volume_among_children: bool | None = None


class RootForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``root``: a pool without guarantees and weight."""

    mode: Mode | None = None
    resource_limits: ResourcesForm | None = None
    step_function_for_gang_operations: bool | None = None
    fifo_reordering: bool | None = None
    compute_promised_guarantee_fair_share: bool | None = None
    priority_strong_guarantee_adjustment: bool | None = None
    priority_strong_guarantee_adjustment_donorship: bool | None = None
    integral: RootIntegralForm | None = None


class IntegralForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    type: GuaranteeType | None = None
    resource_flow: ResourcesForm | None = None
    burst_guarantee_resources: ResourcesForm | None = None
    relaxed_share_multiplier_limit: float | None = None
    can_accept_free_volume: bool | None = None
    should_distribute_free_volume_among_children: bool | None = None
    accumulated_volume: ResourcesForm | None = None
    last_share_ratio: float | None = None


class PoolForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    parent: str
    weight: float | None = None
    mode: Mode | None = None
    max_share_ratio: float | None = None
    resource_limits: ResourcesForm | None = None
    strong_guarantee_resources: ResourcesForm | None = None
    step_function_for_gang_operations: bool | None = None
    fifo_reordering: bool | None = None
    compute_promised_guarantee_fair_share: bool | None = None
    priority_strong_guarantee_adjustment: bool | None = None
    priority_strong_guarantee_adjustment_donorship: bool | None = None
    integral: IntegralForm | None = None


class OperationForm(msgspec.Struct, frozen=True, gc=False, forbid_unknown_fields=True):
    name: str
    parent: str
    weight: float | None = None
    demand: ResourcesForm | None = None
    usage: ResourcesForm | None = None
    gang: bool | None = None
    start_time: float | None = None
    resource_limits: ResourcesForm | None = None
    max_share_ratio: float | None = None


class UpdateForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    total_resources: ResourcesForm
    now: float
    previous_update_time: float | None = None
    id: str | None = None
    options: OptionsForm | None = None
    root: RootForm | None = None
    pools: list[PoolForm] | None = None
    operations: list[OperationForm] | None = None


FORMS: Final[dict[str, type[msgspec.Struct]]] = {
    "$": UpdateForm, "$.options": OptionsForm, "$.root": RootForm, "$.root.integral": RootIntegralForm,
    "$.pools[]": PoolForm, "$.pools[].integral": IntegralForm, "$.operations[]": OperationForm,
}  # fmt: skip
"""Path of an object -> its form; objects elsewhere have ResourcesForm."""

WORDS: Final = {
    "str": "a text", "int": "a number", "float": "a number", "bool": "true or false", "object": "an object",
    "array": "a list",
}  # fmt: skip
CHOICES: Final = {"mode": get_args(Mode), "type": get_args(GuaranteeType)}


DEFAULT_OPTIONS: Final = Options()


class UpdateInput(msgspec.Struct, frozen=True):
    """Input of one update: times in seconds, ``previous_update_time`` None for the first update."""

    id: str | None
    snapshot: Snapshot
    now: float
    previous_update_time: float | None


class InputReader:
    """Reads the updates of one tree, one after another.

    An element that equals the one in the update before is returned as the identical object, which ``FairShareUpdater``
    recognises without comparing fields."""

    def __init__(self, options: Options = DEFAULT_OPTIONS) -> None:
        """``options``: values for the options that an update does not set."""
        self._options = options
        self._decoder = msgspec.json.Decoder(UpdateForm)
        self._operations: dict[str, tuple[OperationForm, Operation]] = {}
        self._pools: dict[str, Pool] = {}

    def read(self, data: bytes) -> UpdateInput:
        """Return the validated update that one JSON object describes.

        Raises FairShareInputError with a sentence that names element and key."""
        try:
            form = self._decoder.decode(data)
        except msgspec.ValidationError as error:
            _refuse_form(data, str(error))
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            if is_no_utf8(error):
                raise FairShareInputError("not valid JSON: a text is not UTF-8") from None
            raise FairShareInputError(f"not valid JSON: {_describe_syntax(data, str(error))}") from None
        total = _vector(form.total_resources, ZERO)
        check_total_resources(total)
        check_times(form.now, form.previous_update_time)
        pools = order_pools(self._reuse_pool(_make_pool(pool, total)) for pool in form.pools or ())
        root = self._reuse_pool(_make_root(form.root))
        operations = [self._reuse_operation(operation) for operation in form.operations or ()]
        options = replace(self._options, **_given(form.options))
        snapshot = Snapshot(total, pools, tuple([operation for _, operation in operations]), options, root)
        validate(snapshot)
        self._operations = {pair[0].name: pair for pair in operations}
        self._pools = {pool.name: pool for pool in (root, *pools)}
        previous = None if form.previous_update_time is None else _microseconds(form.previous_update_time)
        return UpdateInput(form.id, snapshot, _microseconds(form.now), previous)

    def _reuse_pool(self, pool: Pool) -> Pool:
        before = self._pools.get(pool.name)
        return before if before is not None and before == pool else pool

    def _reuse_operation(self, form: OperationForm) -> tuple[OperationForm, Operation]:
        before = self._operations.get(form.name)
        return before if before is not None and before[0] == form else (form, _make_operation(form))


def _vector(form: ResourcesForm | None, unset: Vector) -> Vector:
    if form is None:
        return unset
    a, b, c, d, e = unset
    return (
        a if form.user_slots is None else form.user_slots,
        b if form.cpu is None else form.cpu,
        c if form.gpu is None else form.gpu,
        d if form.memory is None else form.memory,
        e if form.network is None else form.network,
    )


def _given(form: msgspec.Struct | None, *left_out: str) -> dict[str, Any]:
    """Return the fields that are set, except ``left_out``; the library has defaults for the others."""
    if form is None:
        return {}
    values = msgspec.structs.asdict(form)
    return {key: value for key, value in values.items() if value is not None and key not in left_out}


def _make_root(form: RootForm | None) -> Pool:
    if form is None:
        return Pool(ROOT, "")
    values = _given(form, "resource_limits", "integral")
    values["integral_guarantees"] = IntegralGuarantees(**_given(form.integral))
    return Pool(ROOT, "", resource_limits=_vector(form.resource_limits, UNLIMITED), **values)


def _make_pool(form: PoolForm, total: Vector) -> Pool:
    where = named("pool", form.name)
    values = _given(form, "resource_limits", "max_share_ratio", "strong_guarantee_resources", "integral")
    limits = _vector(form.resource_limits, UNLIMITED)
    if form.max_share_ratio is not None:
        check_max_share_ratio(where, form.max_share_ratio)
        limits = least(limits, limits_of_total(total, form.max_share_ratio))
    if form.strong_guarantee_resources is not None:
        values["strong_guarantee_resources"] = msgspec.structs.astuple(form.strong_guarantee_resources)
    if form.integral is not None:
        values["integral_guarantees"] = _make_integral(form.integral, where)
    return Pool(resource_limits=limits, **values)


def _make_integral(form: IntegralForm, where: str) -> IntegralGuarantees:
    values = _given(form, "type")
    for key in ("resource_flow", "burst_guarantee_resources", "accumulated_volume"):
        values[key] = _vector(getattr(form, key), ZERO)
    volume = values["accumulated_volume"]
    check_volume(f"{where}: integral.accumulated_volume", volume)
    values["accumulated_volume"] = exact_cpu(volume)
    return IntegralGuarantees(guarantee_type=form.type or "none", **values)


def _make_operation(form: OperationForm) -> Operation:
    return Operation(
        form.name,
        form.parent,
        1.0 if form.weight is None else form.weight,
        _vector(form.demand, ZERO),
        _vector(form.usage, ZERO),
        form.gang or False,
        form.start_time or 0.0,
        _vector(form.resource_limits, UNLIMITED),
        1.0 if form.max_share_ratio is None else form.max_share_ratio,
    )


def _microseconds(seconds: float) -> float:
    """Times are whole microseconds (fair_share_update.md 17)."""
    return round_half_away(seconds * 1e6) / 1e6


def _describe_syntax(data: bytes, message: str) -> str:
    """The decoder's error, with line and column instead of a byte offset."""
    found = re.fullmatch(r"(?:JSON is malformed: )?(.*) \(byte (\d+)\)", message)
    if found is None:
        # The decoder reports half a surrogate pair as truncated, too.
        return "it ends in the middle of the object" if message == TRUNCATED else "it is nested too deeply"
    at = int(found[2])
    row, column = data.count(b"\n", 0, at), at - data.rfind(b"\n", 0, at)
    place = f"line {row + 1}, column {column}" if row else f"column {column}"
    literal = re.match(rb"NaN|Infinity", data[at : at + 8])
    if literal is not None:
        return f"{place}: {literal[0].decode()} is not a JSON number; leave a missing limit out"
    return f"{place}: {found[1]}"


def _refuse_form(data: bytes, message: str) -> NoReturn:
    """Raise the sentence for a value of the wrong form.

    ``message`` is the decoder's, for example "Expected `float`, got `str` - at `$.pools[3].weight`"."""
    problem, _, tail = message.rpartition(" - at `")
    path = tail.removesuffix("`")
    if not path.startswith("$"):
        problem, path = message, "$"
    # The path consists of keys of the forms, so the value is found again, unless an unknown key looks like a path.
    try:
        value = json.loads(data)
        steps: list[str | int] = [int(index) if index else key for key, index in re.findall(r"\.(\w+)|\[(\d+)\]", path)]
        where = _place(value, steps)
        for step in steps:
            value = value[step]
    except (ValueError, LookupError, TypeError, RecursionError):
        place = "" if path == "$" else f"{path.removeprefix('$.')}: "
        raise FairShareInputError(place + problem.replace("`", "").replace("Expected", "expected")) from None
    raise FairShareInputError(_describe_problem(problem, re.sub(r"\[\d+\]", "[]", path), where, value))


def _place(document: Any, steps: list[str | int]) -> str:
    """The element and key that ``steps`` lead to, as people write them: ``pool "q": integral.type: ``."""
    words, rest = [], steps
    if len(steps) > 1 and steps[0] in ("pools", "operations") and isinstance(steps[1], int):
        kind = "pool" if steps[0] == "pools" else "operation"
        element = document[steps[0]][steps[1]]
        name = element.get("name") if isinstance(element, dict) else None
        words, rest = [named(kind, name) if isinstance(name, str) else f"{steps[0]}[{steps[1]}]"], steps[2:]
    elif len(steps) > 1:
        words, rest = [str(steps[0])], steps[1:]
    if rest:
        words.append(".".join(map(str, rest)))
    return "".join(f"{word}: " for word in words)


def _describe_problem(problem: str, path: str, where: str, value: Any) -> str:
    form = FORMS.get(path, ResourcesForm)
    if unknown := re.fullmatch(r"Object contains unknown field `(.*)`", problem, re.DOTALL):
        keys = form.__struct_encode_fields__
        hint = did_you_mean(unknown[1], keys) or f"; known are {', '.join(keys)}"
        return f"{where}unknown key {quoted(unknown[1])}{hint}"
    if missing := re.fullmatch(r"Object missing required field `(.*)`", problem):
        return f"{where}the key {quoted(missing[1])} is missing"
    key = path.rpartition(".")[2]
    if problem.startswith("Invalid enum value"):
        return f"{where}expected {one_of(CHOICES[key])}, got {_format(value)}"
    if problem == "Number out of range":
        return f"{where}the number is too large"
    expected = re.match(r"Expected `(\w+)", problem)
    words = WORDS.get(expected[1], expected[1]) if expected else problem
    if key in CHOICES:
        words = one_of(CHOICES[key])
    return f"{where}expected {words}, got {_format(value)}"


def _format(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False)
    shown = text if len(text) <= MAX_SHOWN else f"{text[: MAX_SHOWN - 3]}..."
    return shown if shown.isprintable() else ascii(shown)[1:-1]


def read_updates(path: str, options: Options = DEFAULT_OPTIONS) -> Iterator[UpdateInput]:
    """Yield the updates of a file, or of standard input for ``-``, each as soon as its line is read; ``options`` as in
    ``InputReader``.

    A file is one JSON object over any number of lines, or one object per line. Raises AccessError for missing rights,
    UnavailableError for other read errors, FairShareInputError (file, line, element, key) for invalid input."""
    name = "standard input" if path == "-" else path
    reader, is_empty = InputReader(options), True
    with open_input(path, "a JSON file") as file:
        for where, data in _split(file, name):
            try:
                update = reader.read(data)
            except FairShareInputError as error:
                raise FairShareInputError(f"{where}: {error}") from None
            yield update
            is_empty = False
    if is_empty:
        raise FairShareInputError(f"{name}: is empty; expected a JSON object, see 'cpumond fair-share --help'")


def _split(file: BinaryIO, name: str) -> Iterator[tuple[str, bytes]]:
    """Yield (file and line for messages, text) of each object."""
    number, is_first = 0, True
    while line := file.readline(FIRST_BYTES):
        number += 1
        line = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if not line.strip():
            continue
        is_object = line.lstrip().startswith(b"{")
        if is_object and not line.endswith(b"\n"):
            line += file.readline(MAX_BYTES)
        where = f"{name}: line {number}"
        if is_first and is_object and _is_cut(line):
            where, line = name, line + file.read(MAX_BYTES)
        if len(line) > MAX_BYTES:
            raise FairShareInputError(f"{where}: is larger than {MAX_BYTES >> 20} MiB; expected one pool tree")
        yield where, line
        is_first = False


def _is_cut(line: bytes) -> bool:
    """Whether a line starts an object that continues on the next one."""
    try:
        msgspec.json.decode(line, type=msgspec.Raw)
    except msgspec.DecodeError as error:
        return str(error) == TRUNCATED
    except RecursionError:
        pass  # InputReader.read reports it with its place
    return False
