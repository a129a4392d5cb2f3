"""The compatibility rules: versions that must not stand beside each other are found without a registry."""

from __future__ import annotations

from typing import Any

import pytest

from rollstream.schemas.codec import SchemaFile, schema_files
from rollstream.schemas.compatibility import check_versions
from tests.unit.schemas.next_versions import (
    NAMES,
    NEW_SYMBOL,
    RULES,
    Rule,
    adds_a_field,
    makes_optional,
    named_types,
    next_schema,
    widens_enums,
)


def problems_of(*added: SchemaFile) -> list[str]:
    return check_versions({**schema_files(), **{(schema.record, schema.version): schema for schema in added}})


def adds_a_field_without_default(schema: dict[str, Any]) -> None:
    schema["fields"].append({"name": "added_later", "type": "string"})


def adds_a_field_within_without_default(schema: dict[str, Any]) -> None:
    [*named_types(schema, "record")][-1]["fields"].append({"name": "added_later", "type": "string"})


def changes_a_type(schema: dict[str, Any]) -> None:
    schema["fields"][0]["type"] = "boolean"


def renames_the_record(schema: dict[str, Any]) -> None:
    schema["name"] += "Two"


def repacks_arrays(schema: dict[str, Any]) -> None:
    for field in schema["fields"]:
        if isinstance(field["type"], dict) and field["type"].get("logicalType") == "packed-u32":
            field["type"] = {"type": "bytes", "logicalType": "packed-f32"}


def drops_a_symbol(schema: dict[str, Any]) -> None:
    next(iter(named_types(schema, "enum")))["symbols"].pop()


def drops_a_field(schema: dict[str, Any]) -> None:
    schema["fields"].pop(0)


def test_released_versions_go_with_each_other() -> None:
    """What is in the repository passes, so that the rest of these tests mean something."""
    assert [] == problems_of()


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize("name", [name for name in NAMES if name not in ("sample", "group_built")])
def test_change_that_new_readers_can_live_with_is_allowed(name: str, rule: Rule) -> None:
    """BACKWARD_TRANSITIVE: readers are updated first."""
    assert [] == problems_of(next_schema(name, rule))


@pytest.mark.parametrize(
    ("name", "rule", "expected"),
    [
        ("terminal", adds_a_field_without_default, "reader_field_missing_default_value (added_later)"),
        ("rollout", adds_a_field_within_without_default, "reader_field_missing_default_value (added_later)"),
        ("terminal", changes_a_type, "type_mismatch"),
        ("terminal", renames_the_record, "name_mismatch"),
        ("model_call", repacks_arrays, "/output_ids is packed-f32, and was written as packed-u32"),
        ("terminal", drops_a_symbol, "missing_enum_symbols"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_change_that_makes_the_log_unreadable_is_found(name: str, rule: Rule, expected: str) -> None:
    """In any record; the sentence names both versions and the place."""
    coming = next_schema(name, rule)

    found = problems_of(coming)

    assert any(problem.startswith(f"{name}.v{coming.version} cannot read {name}.v1: ") for problem in found)
    assert expected in " ".join(found)


@pytest.mark.parametrize("name", ["sample", "group_built"])
@pytest.mark.parametrize("rule", [drops_a_field, makes_optional], ids=lambda rule: rule.__name__)
def test_change_that_a_trainer_of_before_cannot_read_is_found(name: str, rule: Rule) -> None:
    """FULL_TRANSITIVE: what is allowed elsewhere is not, where a training run keeps its version for weeks."""
    found = problems_of(next_schema(name, rule))

    assert [problem for problem in found if problem.startswith(f"{name}.v1 cannot read {name}.v2: ")] == found != []


@pytest.mark.parametrize("name", ["sample", "group_built"])
def test_field_with_a_default_is_allowed_for_trainers_too(name: str) -> None:
    """Both directions resolve."""
    assert [] == problems_of(next_schema(name, adds_a_field))


def test_rules_hold_across_all_versions_not_only_neighbours() -> None:
    """A field that v2 took away and v3 brings back as another type: v3 reads v2, but not v1."""
    second, third = next_schema("terminal", drops_a_field), next_schema("terminal", drops_a_field, _back_as_boolean)
    third = SchemaFile(third.record, 3, third.text, third.parsed, third.fingerprint)

    found = problems_of(second, third)

    assert ["terminal.v3 cannot read terminal.v1"] == [problem.split(":")[0] for problem in found]


def _back_as_boolean(schema: dict[str, Any]) -> None:
    schema["fields"].append({"name": "rollout_id", "type": "boolean", "default": False})


def test_version_that_is_missing_is_found() -> None:
    """A released file that was deleted would make its records unreadable."""
    third = next_schema("terminal", widens_enums)

    found = problems_of(SchemaFile(third.record, 3, third.text, third.parsed, third.fingerprint))

    assert ["terminal.v2 is missing, v3 is there"] == found
    assert NEW_SYMBOL in third.text
