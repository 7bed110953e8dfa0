"""The pages and dialogs of ``test_web_axe.py``, which looks at them on a telephone, on a desk."""

from __future__ import annotations

import pytest
from test_web_axe import DESK, checked, find_faults_of_dialogs, find_faults_of_pages, site  # noqa: F401 - fixtures

pytestmark = [pytest.mark.browser, pytest.mark.cgroup, pytest.mark.timeout(900)]


def test_no_page_keeps_anybody_out_and_none_cuts_a_text(checked, site):  # noqa: F811
    assert find_faults_of_pages(checked, site, DESK) == []


def test_no_dialog_does(checked, site):  # noqa: F811
    assert find_faults_of_dialogs(checked, site, DESK) == []
