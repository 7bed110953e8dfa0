"""Where executors put jobs: names that no two of them share."""

import pytest

from cpumond.core.job_cgroups import DEFAULT_ROOT, IDLE_NAME, IDLE_SLICE, is_idle_name, name_idle_parent


@pytest.mark.parametrize(
    ("root", "parent"),
    [(DEFAULT_ROOT, "cpumond-reclaimed"), ("", "cpumond-reclaimed"), ("a/b-c", "cpumond-reclaimed-a-b-c")],
)
def test_the_idle_class_is_a_child_of_the_hierarchys_root(root, parent):
    assert name_idle_parent(root) == parent
    assert is_idle_name(parent)
    assert not is_idle_name(root)


@pytest.mark.parametrize(
    ("path", "is_idle"),
    [(f"{IDLE_NAME}/a", True), (f"{IDLE_NAME}-a/b", True), (f"{IDLE_NAME}s", False), (f"a/{IDLE_NAME}", False)],
)
def test_which_names_are_the_idle_class(path, is_idle):
    assert is_idle_name(path) == is_idle


def test_a_slice_without_a_dash_has_no_slice_above_it():
    assert "-" not in IDLE_SLICE
