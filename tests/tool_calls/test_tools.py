"""Tools come from clients: their schemas are checked, and can neither fetch nor hang anything."""

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvlease.errors import BadInput
from kvlease.services.tool_calls.markup import PARAMETER_END, Call, write_call
from kvlease.services.tool_calls.tools import Toolbox, ToolSpec

TREE: dict[str, object] = {
    "$defs": {
        "node": {
            "anyOf": [
                {"type": "object", "properties": {"all": {"items": {"$ref": "#/$defs/node"}}}},
                {"type": "object", "properties": {"any": {"items": {"$ref": "#/$defs/node"}}}},
                {"type": "string"},
            ]
        }
    },
    "properties": {"filter": {"$ref": "#/$defs/node"}},
}


def box(schema: dict[str, object]) -> Toolbox:
    return Toolbox([ToolSpec("f", parameters=schema)])


def twice_each(count: int, keyword: str = "anyOf") -> dict[str, object]:
    """Definitions that each apply the next one twice to the same value."""
    made: dict[str, object] = {
        f"a{i}": {keyword: [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(count)
    }
    made[f"a{count}"] = {"type": "string"}
    return {"$defs": made, "$ref": "#/$defs/a0"}


def test_arguments_are_checked_and_the_place_is_named() -> None:
    tools = box({"properties": {"a": {"items": {"type": "integer"}}}, "required": ["a"]})
    assert tools.complaint("f", {"a": [1, 2]}) is None
    assert tools.complaint("f", {"a": [1, "x"]}) == """['a'][1]: "x" is not of type "integer\""""
    assert "required" in (tools.complaint("f", {}) or "")


def test_older_drafts_work() -> None:
    draft = "http://json-schema.org/draft-07/schema#"
    tools = box({"$schema": draft, "properties": {"a": {"items": [{"type": "string"}]}}})
    assert tools.complaint("f", {"a": ["x", 1]}) is None
    assert tools.complaint("f", {"a": [1]}) is not None


def test_recursive_schemas_work_for_values_that_people_write() -> None:
    tools = box(TREE)
    assert tools.complaint("f", {"filter": {"all": ["a", {"any": ["b"]}]}}) is None
    assert tools.complaint("f", {"filter": {"all": [1]}}) is None, "the other branch takes it"
    assert tools.complaint("f", {"filter": 1}) is not None


def test_what_would_take_for_ever_is_refused_at_once() -> None:
    """One request must not hold the thread that serves all others."""
    begun = time.thread_time()
    assert "deeply" in (box(twice_each(40)).complaint("f", {"a": 1}) or "")
    assert "deeply" in (box(twice_each(40, "allOf")).complaint("f", {"a": 1}) or "")
    deep: object = 1
    for _ in range(60):
        deep = {"all": [deep]}
    assert "deeply" in (box(TREE).complaint("f", {"filter": deep}) or "")
    many = box({"properties": {"a": {"items": {"anyOf": [{"const": n} for n in range(1000)]}}}})
    assert many.complaint("f", {"a": [1] * 100}) is None
    assert "too many" in (many.complaint("f", {"a": [1] * 10_000}) or "")
    pattern = box({"properties": {"a": {"pattern": r"^(a|a?)+(?=b)\1$"}}})
    assert pattern.complaint("f", {"a": "a" * 60 + "!"}) is not None
    assert time.thread_time() - begun < 2


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strng"}, "no usable JSON schema"),
        ({"properties": {"a": {"pattern": "("}}}, "no usable JSON schema"),
        ({"$ref": "http://127.0.0.1:9/x.json"}, "not local"),
        ({"properties": {"a": {"$ref": "file:///etc/hostname"}}}, "not local"),
        ({"$ref": "#/$defs/absent"}, "no usable JSON schema"),
        ({"$schema": "http://127.0.0.1:9/"}, "no usable JSON schema"),
        ({"properties": {"a": {"$id": "http://a/"}}}, "not supported"),
        ({"$dynamicRef": "#a"}, "not supported"),
    ],
)
def test_schemas_that_cannot_work_are_refused(schema: dict[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        box(schema)


def test_deep_schemas_are_refused() -> None:
    schema: dict[str, object] = {}
    for _ in range(5_000):
        schema = {"items": schema}
    with pytest.raises(BadInput, match="nests deeper"):
        box(schema)


def test_large_schemas_are_refused() -> None:
    with pytest.raises(BadInput, match="parts"):
        box({"properties": {f"p{n}": {"type": "string"} for n in range(3000)}})


def test_names_have_to_differ_and_to_be_writable() -> None:
    with pytest.raises(BadInput, match="two tools"):
        Toolbox([ToolSpec("f"), ToolSpec("f")])
    with pytest.raises(BadInput, match="without quotes"):
        Toolbox([ToolSpec('f"')])


KEYWORDS = st.sampled_from(
    ["type", "properties", "items", "$ref", "anyOf", "not", "required", "pattern", "enum", "$defs"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            KEYWORDS | st.text(max_size=4),
            inner | st.sampled_from(["#", "#/$defs", "#/properties/a", "object", "("]),
            max_size=4,
        )
    ),
    max_leaves=12,
)


@given(
    st.dictionaries(KEYWORDS, JSON, max_size=4),
    st.dictionaries(st.text(max_size=3), JSON, max_size=3),
)
def test_no_schema_raises_anything_undeclared(
    schema: dict[str, object], arguments: dict[str, object]
) -> None:
    try:
        tools = box(schema)
    except BadInput:
        return
    complaint = tools.complaint("f", arguments)
    assert complaint is None or complaint


def test_calls_are_written_letter_by_letter() -> None:
    """What the model wrote as JSON comes back the same, or its cached pages are not found."""
    written = write_call(Call("f", '{"a": "x\\ny", "b": [1,2 , 3], "c": 1.50}'))
    assert 'string="true">x\ny</' in written
    assert 'string="false">[1,2 , 3]</' in written
    assert 'string="false">1.50</' in written


def test_what_no_parameter_can_hold_is_written_as_json() -> None:
    closing = write_call(Call("f", f'{{"a": "{PARAMETER_END}"}}'))
    assert f'string="false">"{PARAMETER_END}"</' in closing
    assert write_call(Call("f", '{"a\\"": 1}')).splitlines()[1] == '{"a\\"": 1}'
    assert write_call(Call("f", "broken")).splitlines()[1] == "broken"
