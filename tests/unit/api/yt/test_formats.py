import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from yt import yson as library
from yt.yson import parser as library_parser
from yt.yson import writer as library_writer
from yt.yson.convert import to_yson_type
from yt.yson.yson_types import YsonType, YsonUint64

from cpumond.api.yt.formats import (
    BINARY,
    JSON,
    PRETTY,
    Format,
    format_of,
    from_json_tree,
    has_too_many_values,
    parse_format,
    read_json,
    read_value,
    to_json_tree,
    write_json,
    write_value,
)
from cpumond.api.yt.values import (
    MAX_VALUES,
    WRITTEN_BYTES,
    Attributed,
    FormatError,
    ParseError,
    Uint,
    YtError,
    error_of,
    error_value,
)
from cpumond.api.yt.yson import read_yson, write_yson
from cpumond.core.errors import ConfigError
from cpumond.scheduler.program.config import finish_scheduler_config, parse_scheduler_config_text

TEXT = Format("yson", "text")
PRETTY_JSON = Format("json", "pretty")
UNICODE_JSON = Format("json", "text", encode_utf8=False)


# --- examples --------------------------------------------------------------------------------------------------------


def test_pretty_yson_is_what_yt_prints():
    value = {
        "empty": {},
        "none": [],
        "capacity": 86400.0,
        "large": 1e22,
        "third": 0.1,
        "count": Uint(5),
        "entity": None,
        "yes": True,
        "text": 'a"\\\n\t\r\x00п\x7f',
        "limits": [math.nan, math.inf, -math.inf, -0.0],
        "weighted": Attributed(3, {"a": {}, "b": 1}),
        "pool": Attributed({}, {"weight": 2.0}),
    }
    assert write_yson(value, "pretty").decode() == (
        r"""{
    "empty" = {};
    "none" = [];
    "capacity" = 86400.;
    "large" = 1e+22;
    "third" = 0.1;
    "count" = 5u;
    "entity" = #;
    "yes" = %true;
    "text" = "a\"\\\n\t\r\x00\xD0\xBF\x7F";
    "limits" = [
        %nan;
        %inf;
        %-inf;
        -0.;
    ];
    "weighted" = <
        "a" = {};
        "b" = 1;
    > 3;
    "pool" = <
        "weight" = 2.;
    > {};
}"""
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (b"{cpu=100}", {"cpu": 100}),
        (b' \n{ a = b.c-d ; "\\x41\\102\\n\\"" = \'x\' }'.replace(b"'", b'"'), {"a": "b.c-d", 'AB\n"': "x"}),
        (b"[1;-2;+3;4u;5.;5e3;-1.5E-2;%nan]", [1, -2, 3, Uint(4), 5.0, 5000.0, -0.015, math.nan]),
        (b"[%true;%false;#;%inf;%-inf;%+inf;]", [True, False, None, math.inf, -math.inf, math.inf]),
        (b"<a=1;b=<c=2>[]>x", Attributed("x", {"a": 1, "b": Attributed([], {"c": 2})})),
        (b"<>5", 5),
        (b"<a=1>#", Attributed(None, {"a": 1})),
        (b"{a=\x01\x04xy;\x01\x02b=\x02\x03;c=\x05;d=\x06\x07}", {"a": "xy", "b": -2, "c": True, "d": Uint(7)}),
        (b'"\\xD0\\xBF\\u043f\\400\\8\\a"', "пп 08\a"),
        (b'"\xd0\xbf\xff"', "п\udcff"),
        (b"18446744073709551615u", Uint(2**64 - 1)),
        (b"-9223372036854775808", -(2**63)),
        (b"{a=1;a=2}", {"a": 2}),
        (b"nan", "nan"),
    ],
)
def test_yson_is_read(text, value):
    assert typed(read_yson(text)) == typed(value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "expected a value, but the text ends at offset 0"),
        (b"  ", "expected a value, but the text ends at offset 2"),
        (b"{broken", 'expected "=", but the text ends at offset 7'),
        (b"{a=1", 'expected ";" or "}", but the text ends at offset 4'),
        (b"{a=1]", 'expected ";" or "}", not "]" at offset 4'),
        (b"{5=1}", 'expected a key or "}", not "5" at offset 1'),
        (b"{#=1}", 'expected a key or "}", not "#" at offset 1'),
        (b"[1 2]", 'expected ";" or "]", not "2" at offset 3'),
        (b"a;b", 'unexpected ";" after the value at offset 1'),
        (b"5abc", 'unexpected "a" after the value at offset 1'),
        (b"]", 'expected a value, not "]" at offset 0'),
        (b"\xff", "expected a value, not byte 0xFF at offset 0"),
        (b"[/]", 'expected a value, not "/" at offset 1'),
        (b'{a="b}', "a string without its closing quote at offset 3"),
        (b'"abc\\', "a string without its closing quote at offset 0"),
        (b'{"a\\xZZ"=1}', "broken escape \\x in a string at offset 3"),
        (b'"\\ud800"', "half of a surrogate pair as a character at offset 1"),
        (b"1.2.3", 'broken number "1.2.3" at offset 0'),
        (b"[5u5]", 'broken number "5u5" at offset 1'),
        (b"-5u", 'uint64 "-5u" out of range at offset 0'),
        (b"9223372036854775808", 'int64 "9223372036854775808" out of range at offset 0'),
        (b"1e999", 'double "1e999" out of range at offset 0'),
        (b"9" * 401, "of more than 400 characters at offset 0"),
        (b"%maybe", 'expected a value, not "%" at offset 0'),
        (b"<a=1>", "expected a value, but the text ends at offset 5"),
        (b"<a=1><b=2>c", "attributes twice before one value at offset 5"),
        (b"\x01\x10abc", "the end inside a binary string of 8 bytes at offset 5"),
        (b"\x01\x03abc", "binary string of a negative or impossible length at offset 1"),
        (b"\x02\x80", "the end inside a binary integer at offset 2"),
        (b"\x06" + b"\xff" * 10 + b"\x01", "binary integer of more than 64 bits at offset 1"),
        (b"\x03\x00", "the end inside a binary double at offset 2"),
        (b"[" * 65 + b"]" * 65, "nested deeper than the limit of 64 levels at offset 64"),
        (b"<a=" * 200_000, "nested deeper than the limit of 64 levels at offset 192"),
    ],
)
def test_broken_yson_is_refused_with_its_place(text, message):
    with pytest.raises(ParseError) as refused:
        read_yson(text)
    assert str(refused.value).startswith("Error parsing request: ")
    assert message in str(refused.value)
    assert str(refused.value.located("body")).startswith("Error parsing request: body: ")
    assert refused.value.attributes == {"offset": refused.value.offset}


def test_nesting_up_to_the_limit_is_read():
    assert read_yson(b"[" * 64 + b"]" * 64) == read_json(b"[" * 64 + b"]" * 64)
    assert read_yson(b"[[]]", max_depth=2) == [[]]
    with pytest.raises(ParseError):
        read_yson(b"[[[]]]", max_depth=2)
    with pytest.raises(ParseError, match="deeper"):
        read_json(b"[[[]]]", max_depth=2)
    for text in (b"[" * 65 + b"]" * 65, b"[" * 100_000, b'{"$value":' * 70 + b"1" + b"}" * 70):
        with pytest.raises(ParseError):
            read_json(text)


def test_what_the_largest_max_depth_lets_in_can_be_answered():
    depth = finish_scheduler_config(parse_scheduler_config_text("[api]\nmax_depth = 200\n", "x"), "x").api.max_depth
    for form in (JSON, BINARY, PRETTY):
        value = read_value(b"[" * depth + b"]" * depth, JSON if form is JSON else BINARY, depth)
        assert read_value(write_value({"spec": {"annotations": value}}, form), form, depth + 2)
    with pytest.raises(ConfigError, match="200"):
        parse_scheduler_config_text("[api]\nmax_depth = 201\n", "x")


@pytest.mark.parametrize("text", [b'"' + b"a\\" * 200_000, b" " * 400_000, b"{" + b"a=1;" * 100_000], ids=len)
def test_a_long_broken_text_is_passed_over_once(text):
    """A reader that began anew at each character would not end."""
    with pytest.raises(ParseError):
        read_yson(text)


def test_json_has_attributes_doubled_dollars_and_bytes_as_code_points():
    value = Attributed({"$key": "пул", "n": [Attributed(None, {"a": "é"})]}, {"x": Uint(1)})
    data = write_json(value)
    assert json.loads(data) == {
        "$attributes": {"x": 1},
        "$value": {"$$key": "пул".encode().decode("latin-1"), "n": [{"$attributes": {"a": "Ã©"}, "$value": None}]},
    }
    assert read_json(data) == value
    assert json.loads(write_json("пул", encode_utf8=False)) == "пул"
    assert read_json('"пул"'.encode(), encode_utf8=False) == "пул"
    assert read_json('{"имя":"пул"}'.encode()) == {"имя": "пул"}, "typed by hand, and unambiguous"
    assert write_json("\udcff") == '"ÿ"'.encode()
    assert read_json(b'"\\u00ff"') == "\udcff"
    assert write_json([math.nan, math.inf, -math.inf, 1.0]) == b'["nan","inf","-inf",1.0]'
    assert write_json({"a": {}, "b": [1]}, pretty=True) == b'{\n    "a": {},\n    "b": [\n        1\n    ]\n}'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "JSON: "),
        (b"{'a':1}", "JSON: object keys must be strings"),
        (b'{"a":1} x', "trailing characters at offset 9"),
        (b'"\xff"', "JSON that is not UTF-8"),
        (b"NaN", "JSON: invalid character at offset 0"),
        (b"1e999", "JSON: "),
        (b"18446744073709551616", "JSON: integer out of the range"),
        (b'{"$a":1}', 'JSON: key "$a": a leading "$" must be doubled'),
        (b'{"$value":1,"a":2}', 'no other key than "$attributes"'),
        (b'{"$value":1,"$attributes":5}', '"$attributes" must be a map'),
        (b'{"$value":{"$value":1,"$attributes":{"a":1}},"$attributes":{"b":1}}', "attributes twice"),
    ],
)
def test_broken_json_is_refused(text, message):
    with pytest.raises(ParseError) as refused:
        read_json(text)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("form", "value", "message"),
    [
        (TEXT, {1: 2}, "the key of a map must be a string"),
        (BINARY, {None: 2}, "the key of a map must be a string"),
        (JSON, {1.5: 2}, "the key of a map must be a string"),
        (PRETTY, [object()], "a value of type object"),
        (BINARY, [object()], "a value of type object"),
        (JSON, [object()], "a value of type object"),
        (TEXT, 2**64, "out of the range of YSON"),
        (BINARY, -(2**63) - 1, "out of the range of YSON"),
        pytest.param(JSON, 10**400, "out of the range of YSON", id="huge"),
        (TEXT, Uint(-1), "out of the range of YSON"),
        (TEXT, "\ud800", "not Unicode text"),
        (JSON, "\ud800", "not Unicode text"),
        (UNICODE_JSON, "\udcff", "is not UTF-8"),
        (TEXT, Attributed(Attributed(1, {}), {}), "attributes twice"),
    ],
)
def test_what_a_format_cannot_express_is_refused(form, value, message):
    with pytest.raises(FormatError, match=message):
        write_value(value, form)


@pytest.mark.parametrize("form", [TEXT, PRETTY, BINARY, JSON])
def test_a_value_that_contains_itself_is_refused(form):
    endless: list[Any] = []
    endless.append({"a": Attributed(endless, {"b": 1})})
    with pytest.raises(FormatError, match="nested deeper than 256 levels"):
        write_value(endless, form)


def test_subclasses_bytes_and_tuples_are_written():
    class Name(str):
        __slots__ = ()

    for form in (TEXT, PRETTY, BINARY, JSON):
        written = write_value((Name("a"), b"\xffb", {Name("k"): (1,)}), form)
        assert read_value(written, form) == ["a", "\udcffb", {"k": [1]}]


# --- the parameter that names a format -------------------------------------------------------------------------------


def test_a_format_is_read_from_its_parameter():
    assert format_of("json") == JSON
    assert format_of("yson") == BINARY
    assert format_of(Attributed("yson", {"format": "pretty", "lazy": False})) == PRETTY
    assert format_of(Attributed("json", {"format": "pretty", "encode_utf8": True})) == PRETTY_JSON
    assert parse_format(b"<format=text>yson") == TEXT
    assert parse_format(b"json") == JSON
    assert parse_format(b'{"$value":"json","$attributes":{"encode_utf8":false}}') == UNICODE_JSON
    assert {form.content_type for form in (PRETTY, TEXT, BINARY, JSON)} == {
        "application/json",
        *(f"application/x-yt-yson-{variant}" for variant in ("pretty", "text", "binary")),
    }


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("dsv", 'output_format: unknown format "dsv"; use "yson" or "json"'),
        (5, 'unknown format "5"'),
        (Attributed("yson", {"format": "nice"}), 'unknown kind "nice" of yson; use one of binary, text, pretty'),
        (Attributed("json", {"format": "binary"}), 'unknown kind "binary" of json'),
        (Attributed("json", {"encode_utf8": "no"}), "encode_utf8 must be %true or %false"),
    ],
)
def test_an_unknown_format_is_refused(value, message):
    with pytest.raises(FormatError) as refused:
        format_of(value, "output_format")
    assert message in str(refused.value)


def test_a_broken_format_is_refused_with_its_place():
    with pytest.raises(ParseError, match="header X: expected a key"):
        parse_format(b"<5>", "header X")


def test_an_error_survives_being_a_value():
    error = YtError("outer", 500, {"path": "//a"}, [YtError("inner", 501)])
    again = error_of(error_value(error))
    assert error_value(again) == error_value(error)
    assert str(again) == "outer"


# --- laws ------------------------------------------------------------------------------------------------------------

raw_text = st.binary(max_size=20).map(lambda raw: raw.decode("utf-8", "surrogateescape"))
texts = st.text(st.characters(codec="utf-8"), max_size=20) | raw_text
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=20)
integers = st.integers(-(2**63), 2**63 - 1) | st.integers(2**63, 2**64 - 1).map(Uint)
floats = st.floats(allow_nan=False)
scalars = st.none() | st.booleans() | integers | st.integers(0, 9).map(Uint) | floats | texts


def containers(items: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    pairs = st.dictionaries(texts, items, max_size=4)
    attributes = st.dictionaries(names, items, min_size=1, max_size=3)
    plain = st.lists(items, max_size=4) | pairs
    return plain | st.builds(Attributed, plain | scalars, attributes)


values = st.recursive(scalars, containers, max_leaves=25)


def typed(value: Any) -> Any:
    """A value with its types, for comparisons where ``True == 1`` is no agreement."""
    if isinstance(value, Attributed):
        return ("attributed", typed(value.value), typed(value.attributes))
    if isinstance(value, list):
        return [typed(item) for item in value]
    if isinstance(value, dict):
        return {key: typed(item) for key, item in value.items()}
    return (type(value).__name__, repr(value))


def without_uint(value: Any) -> Any:
    """The value as JSON keeps it: small unsigned numbers, infinities and empty attributes are no kinds of their own."""
    if isinstance(value, Attributed):
        return Attributed(without_uint(value.value), without_uint(value.attributes))
    if isinstance(value, list):
        return [without_uint(item) for item in value]
    if isinstance(value, dict):
        return {key: without_uint(item) for key, item in value.items()}
    if isinstance(value, Uint) and value < 2**63:
        return int(value)
    if isinstance(value, float) and math.isinf(value):
        return str(value)
    return value


@given(values, st.sampled_from([JSON, PRETTY_JSON]))
def test_json_survives_being_written_and_read(value, form):
    assert typed(read_value(write_value(value, form), form)) == typed(without_uint(value))
    assert typed(from_json_tree(to_json_tree(value))) == typed(without_uint(value))
    json.loads(write_value(value, form))


@given(values)
def test_text_written_is_printable_ascii(value):
    assert all(0x20 <= byte <= 0x7E for byte in write_yson(value))
    assert all(0x20 <= byte <= 0x7E or byte == 0x0A for byte in write_yson(value, "pretty"))


# --- agreement with YTsaurus' own library ----------------------------------------------------------------------------


def from_library(value: Any) -> Any:
    """A value of ``yt.yson`` (with byte strings) as one of ours."""
    if isinstance(value, YsonType) and value.has_attributes():
        attributes = from_library(value.attributes)
        value.attributes = {}
        return Attributed(from_library(value), attributes)
    if isinstance(value, list):
        return [from_library(item) for item in value]
    if isinstance(value, dict):
        return {from_library(key): from_library(item) for key, item in value.items()}
    if isinstance(value, bytes):
        return bytes(value).decode("utf-8", "surrogateescape")
    if isinstance(value, YsonUint64):
        return Uint(value)
    if type(value).__name__ == "YsonBoolean":
        return bool(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, float):
        return float(value)
    return None if type(value).__name__ == "YsonEntity" else value


variants = st.sampled_from(["text", "pretty", "binary"])
libraries = pytest.mark.parametrize(
    ("loads", "dumps"),
    [
        pytest.param(library_parser.loads, library_writer.dumps, id="Python"),
        *([pytest.param(library.loads, library.dumps, id="C++")] if library.TYPE == "BINARY" else []),
    ],
)


@libraries
@given(value=values, variant=variants)
def test_the_library_reads_what_is_written(loads, dumps, value, variant):
    read = loads(write_yson(value, variant), encoding=None)
    assert typed(from_library(read)) == typed(value)


def to_library(value: Any) -> Any:
    """One of our values as one of ``yt.yson``; strings are bytes, but for the keys of attributes, which it wants so."""
    if isinstance(value, Attributed):
        attributes = {key: to_library(item) for key, item in value.attributes.items()}
        return to_yson_type(to_library(value.value), attributes)
    if isinstance(value, list):
        return [to_library(item) for item in value]
    if isinstance(value, dict):
        return {to_library(key): to_library(item) for key, item in value.items()}
    if isinstance(value, str):
        return value.encode("utf-8", "surrogateescape")
    return YsonUint64(value) if isinstance(value, Uint) else value


@libraries
@given(value=values, variant=variants)
def test_what_the_library_writes_is_read(loads, dumps, value, variant):
    assert typed(read_yson(dumps(to_library(value), yson_format=variant))) == typed(value)


# --- how many values -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("piece", "values"),
    [(b"1;", 1), (b"{a=1};", 2), (b"<a=1>1;", 3), (b"[];", 1), (b'"s;,[";', 1), (b"\x01\x06abc;", 1), (b"#;", 1)],
)
def test_yson_holds_so_many_values_and_no_more(piece, values):
    count = (MAX_VALUES - 1) // values
    assert len(read_yson(b"[" + piece * count + b"]")) == count
    with pytest.raises(ParseError, match="more values than the limit of 20000"):
        read_yson(b"[" + piece * (count + 2) + b"]")


@pytest.mark.parametrize(("piece", "values"), [(b"1", 1), (b'{"a":1}', 2), (b"[[1]]", 3), (b"{}", 1), (b"[ ]", 1)])
def test_json_holds_so_many_values_and_no_more(piece, values):
    count = (MAX_VALUES - 1) // values
    assert len(read_json(b"[" + b",".join([piece] * count) + b"]")) == count
    with pytest.raises(ParseError, match="more values than the limit of 20000"):
        read_json(b"[" + b",".join([piece] * (count + 2)) + b"]")


@pytest.mark.parametrize("text", [",[{" * 20_000, '",\\"' * 20_000, "\\" * 20_000 + "," * 20_000])
def test_what_is_in_strings_does_not_count(text):
    assert read_json(json.dumps({"a": text}).encode()) == {"a": text}
    assert read_yson(write_yson({"a": text})) == {"a": text}


def test_a_string_without_its_end_is_seen_at_once():
    """Not looked for anew from each of its characters."""
    with pytest.raises(ParseError):
        read_json(b'"' + b'\\",' * 300_000)


@pytest.mark.parametrize(
    "value",
    [
        {},
        [],
        list(range(100)),
        {"value": []},
        {"value": {}},
        {"value": {f"${n}é": {"a": [n] * 70, "b": Attributed([1] * 70, {"x": "é"})} for n in range(70)}},
        {"value": Attributed([f"k{n}" for n in range(64)], {"incomplete": True})},
        [Attributed(n, {"a": 1}) for n in range(65)],
    ],
)
def test_large_values_are_written_in_parts_that_make_the_same_json(value):
    for encode_utf8 in (True, False):
        assert json.loads(write_json(value, encode_utf8)) == to_json_tree(value, encode_utf8)


@pytest.mark.parametrize(
    "form", [Format("json"), Format("json", "pretty"), Format("yson"), Format("yson", "text"), Format("yson", "pretty")]
)
def test_who_writes_a_long_text_gives_way_again_and_again(form: Format):
    value = {f"pool-{number}": {"share": 0.5, "names": ["x" * 40] * 10} for number in range(300)}
    turns: list[None] = []
    data = write_value(value, form, lambda: turns.append(None))
    assert data == write_value(value, form)
    assert len(data) / WRITTEN_BYTES / 2 < len(turns) <= len(data) / WRITTEN_BYTES


@pytest.mark.parametrize("empty", [b"[]", b"{ }"])
def test_empty_values_without_a_sign_between_end_the_count(empty: bytes):
    """No JSON has them; a step for each of a million would hold up the event loop."""
    assert has_too_many_values(empty * MAX_VALUES + b",1" * MAX_VALUES)
    data = empty * (2 * MAX_VALUES) + b",1" * MAX_VALUES
    assert not has_too_many_values(data)
    with pytest.raises(ParseError):
        read_json(data)
